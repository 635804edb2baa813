"""A bfloat16 policy runs on weights that have its adapter in them, however small the adapter still is."""

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from rl.batches import Group, Row
from rl.learner import Learner
from rl.merged import PATTERN, MergedAdapters, _cut, _MergedLinear
from tests.rl.learning import MakeLearner

GROUPS = [Group((1, 2, 3), (Row((4, 5, 6, 7), 1.0), Row((8, 9), -1.0))), Group((9, 8), (Row((3, 1), 1.0),))]


def bfloat16(make_learner: MakeLearner) -> Learner:
    return make_learner(model={"dtype": "bfloat16"}, training={"lr": 1e-4})


def adapted(learner: Learner) -> list[LoraLinear]:
    return [module for module in learner.policy.model.modules() if isinstance(module, LoraLinear)]


def test_gradients_are_those_of_the_adapter_beside_the_layer() -> None:
    torch.manual_seed(0)
    x, a, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 5), (2, 5), (4, 2)))
    base, bias = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    weights = torch.randn(2, 3, 4, dtype=torch.float64)
    beside = nn.functional.linear(x, base, bias) + 0.5 * (x @ a.T @ b.T)
    expected = torch.autograd.grad((beside * weights).sum(), (x, a, b))
    within = _MergedLinear.apply(x, base + 0.5 * (b @ a).detach(), bias, a, b, 0.5)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(within, beside)
    found = torch.autograd.grad((within * weights).sum(), (x, a, b))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_rounding_keeps_what_is_exact_and_the_mean_of_the_rest() -> None:
    noise = torch.randint(0, 2**16, (PATTERN,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    exact = torch.randn(1000).bfloat16().float()
    kept = exact.clone()
    _cut(kept, noise)
    assert torch.equal(kept, exact)
    # A tenth of a unit in the last place of numbers between 1 and 2, of either sign; more of them than the pattern has.
    unit = 2.0**-7
    for sign in (1, -1):
        shares = torch.full((PATTERN + 1000,), sign * (1 + 0.1 * unit))
        _cut(shares, noise)
        assert set(shares.tolist()) == {sign * 1.0, sign * (1.0 + unit)}
        assert abs(float((shares - sign).double().mean()) / (0.1 * unit) - sign) < 0.01


def test_an_adapter_below_the_last_place_of_the_weights_is_in_them(make_learner: MakeLearner) -> None:
    learner = bfloat16(make_learner)
    weights = learner.policy.weights
    for master in weights.masters:
        nn.init.constant_(master, 0.002)
    weights.publish()
    served = dict(weights.whole())
    added, wanted, nearest = 0.0, 0.0, 0
    for name, module in learner.policy.model.named_modules():
        if isinstance(module, LoraLinear):
            base = module.base_layer.weight.detach()
            delta = module.get_delta_weight("default").detach().float()
            # Where the weight's own last place is coarse, going to the nearest would leave nothing.
            coarse = base.abs() > 0.125
            added += float((served[f"{name}.weight"].float() - base.float())[coarse].sum())
            wanted += float(delta[coarse].sum())
            nearest += int((((base.float() + delta).bfloat16() != base) & coarse).sum())
    assert nearest == 0
    assert wanted > 0
    assert 0.8 < added / wanted < 1.2


def test_the_policy_runs_on_what_the_engine_is_served(make_learner: MakeLearner) -> None:
    learner = bfloat16(make_learner)
    policy = learner.policy
    before = policy.logprobs(GROUPS)
    for master in policy.weights.masters:
        nn.init.normal_(master, std=0.2)
    policy.weights.publish()
    trained = policy.logprobs(GROUPS)
    assert all(not torch.equal(trained[row], before[row]) for row in trained)
    # The same weights in a model without any adapter.
    state = {name: value.clone() for name, value in policy.weights.whole()}
    with policy.weights.base():
        for name, parameter in policy.model.named_parameters():
            if ".lora_" not in name:
                parameter.data = state[name.replace(".base_layer.", ".")]
        plain = policy.logprobs(GROUPS)
    assert all(torch.equal(plain[row], trained[row]) for row in trained)


def test_a_base_model_and_a_return_are_exact(make_learner: MakeLearner) -> None:
    learner = bfloat16(make_learner)
    policy = learner.policy
    before, saved = policy.logprobs(GROUPS), policy.weights.snapshot()
    policy.update(GROUPS, 0)
    policy.update(GROUPS, 1)
    base = policy.logprobs(GROUPS, base=True)
    assert all(torch.equal(base[row], before[row]) for row in before)
    policy.weights.restore(saved)
    returned = policy.logprobs(GROUPS)
    assert all(torch.equal(returned[row], before[row]) for row in before)


def test_other_layers_and_types_are_left_alone(make_learner: MakeLearner) -> None:
    learner = make_learner()
    assert all("forward" not in vars(module) for module in adapted(learner))
    merged = MergedAdapters([], {})
    assert merged.weight(adapted(learner)[0]) is None
