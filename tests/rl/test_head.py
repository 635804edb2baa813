import pytest
import torch
from torch import nn

from rl import head


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("at_once", [10**6, 300])
def test_scores_and_gradient_are_those_of_all_logits(
    frozen: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece and in several, with a head that is frozen and one that trains."""
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", at_once)
    torch.manual_seed(0)
    layer = nn.Linear(16, 50, bias=False).requires_grad_(not frozen)
    hidden = (3 * torch.randn(23, 16)).requires_grad_()
    targets = torch.randint(0, 50, (23,))
    coefficients = torch.randn(23)

    everything = torch.log_softmax(layer(hidden), -1)
    expected = everything.gather(-1, targets[:, None])[:, 0]
    (expected * coefficients).sum().backward()  # type: ignore[no-untyped-call]
    gradient, hidden.grad = hidden.grad, None
    assert gradient is not None
    weight_gradient, layer.weight.grad = layer.weight.grad, None

    logprobs, entropies = head.token_scores(layer, hidden, targets)
    (logprobs * coefficients).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(logprobs, expected, atol=1e-6)
    assert torch.allclose(entropies, -(everything.exp() * everything).sum(-1), atol=1e-5)
    assert hidden.grad is not None
    assert torch.allclose(hidden.grad, gradient, atol=1e-6)
    if weight_gradient is not None:
        assert layer.weight.grad is not None
        assert torch.allclose(layer.weight.grad, weight_gradient, atol=1e-5)
