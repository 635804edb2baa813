"""Access to the policy for those outside the rounds: between the rounds' own requests, while a learner lives."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import trio

from node.errors import NodeError
from node.stop import Stop
from rl.rollouts import ChatAnswer, Sampling


class Absent(NodeError):
    """There is no learner at the moment: it is being loaded or replaced, or the node is stopping."""

    def __init__(self, message: str = "the policy is not ready: its learner is being loaded, or the node is stopping"):
        super().__init__(message)


class Chatting(Protocol):
    """What is needed of `node.learner.LearnerProcess`."""

    description: dict[str, Any]

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling: Sampling,
        seed: int,
        on_text: Callable[[str], None] | None = None,
    ) -> ChatAnswer:
        """See `LearnerProcess.chat`."""
        ...


class CurrentLearner:
    """Holds the learner while the rounds lend it."""

    def __init__(self, stop: Stop | None = None) -> None:
        """When `stop` is requested, what is in hand is cut short."""
        self._stop = stop or Stop()
        self._learner: Chatting | None = None
        self._in_hand: dict[trio.CancelScope, trio.Event] = {}

    @property
    def description(self) -> dict[str, Any] | None:
        """What the learner says of itself; None while there is none."""
        return None if self._learner is None else self._learner.description

    @asynccontextmanager
    async def lent(self, learner: Chatting) -> AsyncIterator[None]:
        """The learner takes requests in this block. What is in hand when it ends is cut short, so that nothing that
        comes after (a checkpoint) waits for it; after that the learner only saves.
        """
        self._learner = learner
        try:
            yield
        finally:
            self._learner = None
            with trio.CancelScope(shield=True):
                for scope, ended in list(self._in_hand.items()):
                    scope.cancel()
                    await ended.wait()

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling: Sampling,
        seed: int,
        on_text: Callable[[str], None] | None = None,
    ) -> ChatAnswer:
        """See `LearnerProcess.chat`. Not to be cancelled by a client that leaves: it would stop the learner's rounds.

        Raises Absent if there is no learner, or none any longer, and what the learner raises.
        """
        if self._learner is None:
            raise Absent
        ended = trio.Event()
        with self._stop.interruptible(), trio.CancelScope() as scope:
            self._in_hand[scope] = ended
            try:
                return await self._learner.chat(messages, sampling, seed, on_text)
            finally:
                del self._in_hand[scope]
                ended.set()
        raise Absent("the node stopped working on this answer: it is stopping, or its learner is replaced")
