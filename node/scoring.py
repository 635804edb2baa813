"""A node's scoring: the sandbox for what strangers send, its own tasks, and what the system does not let it limit."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress

import trio

from node.config import Config
from node.view import View
from rl.nurseries import unwrapped
from verifiers.base import VerifierError
from verifiers.sandbox import Sandbox, open_sandbox
from verifiers.settings import MixEntry
from verifiers.stream import TaskStream


def open_checker(config: Config) -> AbstractAsyncContextManager[Sandbox | None]:
    """The sandbox for rollouts of others: one worker of its own, so that they never hold up the node's own scoring."""
    if config.sharing.silo:
        return nullcontext()
    return open_sandbox(config.verifiers.model_copy(update={"workers": 1}), [config.node.data_dir])


async def open_stream(config: Config, seed: int, sandbox: Sandbox, checker: Sandbox | None) -> TaskStream:
    """The node's own tasks, of which the checker is told meanwhile."""
    with unwrapped():
        async with trio.open_nursery() as nursery:
            if checker is not None:
                nursery.start_soon(_tell_mix, checker, config.tasks.mix)
            return await TaskStream.open(sandbox, config.tasks.mix, seed)


def warn_of_open_sandbox(sandbox: Sandbox, view: View) -> None:
    if sandbox.isolation and not all(sandbox.isolation.values()):
        missing = ", ".join(name for name, achieved in sandbox.isolation.items() if not achieved)
        view.message(
            "warning", f"this system does not let the verifier sandbox limit: {missing} (see `swarmnode doctor`)"
        )


async def _tell_mix(checker: Sandbox, mix: Sequence[MixEntry]) -> None:
    """Let the checker know the node's own task mix: files of questions are known from there alone.

    What is wrong with an entry is found, and said, where the node's own tasks are drawn.
    """
    for entry in mix:
        with suppress(VerifierError):
            await checker.canonical(entry.verifier, entry.config)
