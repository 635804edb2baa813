"""The nouns of the learning side: completions, rollout groups, and groups scored by this node.

They are plain frozen data. Between processes they travel as msgpack through `pydantic.TypeAdapter`, which checks every
field again on arrival.
"""

from dataclasses import dataclass

from verifiers.base import Task

MIN_GROUP, MAX_GROUP = 2, 64
"""Completions in a group that may be trained on. Its maker chooses; advantages need at least two."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    `text` has no special tokens in it. `finished` is True if the policy ended it (EOS), False if it was cut at the
    token limit. `tokens` (EOS included when finished) and `logprobs` (nats, one a token, under the sampling policy
    at temperature 1) are known only for completions that this node's engine sampled itself.
    """

    text: str
    finished: bool
    tokens: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """A task and L completions of it by one policy at one step: what the paper calls a rollout (section 3)."""

    task: Task
    completions: tuple[Completion, ...]
    policy_step: int


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with this node's own rewards (in [0, 1]) and the advantages that follow from them.

    `origin` is the id of the node that sampled it, `round` the round of this node in which it was scored.
    """

    group: RolloutGroup
    origin: str
    round: int
    rewards: tuple[float, ...]
    advantages: tuple[float, ...]

    @property
    def informative(self) -> bool:
        """Whether its rewards differ: a group whose rewards are all equal teaches nothing (zero advantage)."""
        return max(self.rewards) > min(self.rewards)

    @property
    def mean_reward(self) -> float:
        """Mean of the rewards: the success rate where rewards are 0 or 1."""
        return sum(self.rewards) / len(self.rewards)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn. Temperature 0 is greedy."""

    samples: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The policy's turn in a chat: `finished` is True if it ended it, False if it was cut at the token limit.

    `tokens` counts those of the answer (EOS included), `prompt_tokens` those before it. A prompt that leaves no room in
    `context`, the most tokens of both together, gets no answer: `tokens` is 0 then.
    """

    text: str
    finished: bool
    tokens: int
    prompt_tokens: int
    context: int
    policy_step: int


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """What one call of `Learner.update` did.

    `loss`, `entropy` (nats a token), `clip_fraction` and `grad_norm` (before clipping) are means over its optimiser
    steps. `engine_logprob_gap` is the mean absolute difference, in nats a token, between the log-probs that the engine
    reported when it sampled and those of the policy: on the tokens that were checked when they were sampled, or if none
    were since the update before, on those trained. None if no completion carried any. `tokens_trained`
    counts completion tokens that entered the loss, once however many epochs. `engine_restarts` counts how often the
    engine was rebuilt since the update before, `seconds_sync` is the time it took to give it new weights.

    `refused` are the places, in the list of groups that was given, of those of others of which the likelihood gate
    (`rl.gate`) kept completions out, `refused_completions` how many completions that were, and `gate` its threshold in
    nats a token; None if it is off.
    """

    policy_step: int
    tokens_trained: int
    loss: float
    clip_fraction: float
    entropy: float
    grad_norm: float
    kl: float
    learning_rate: float
    engine_logprob_gap: float | None
    token_budget: int
    engine_restarts: int = 0
    seconds_sync: float = 0.0
    refused: tuple[int, ...] = ()
    refused_completions: int = 0
    gate: float | None = None
