"""The sandbox process: makes tasks and scores answers for the node, one request at a time.

Started by `verifiers.sandbox` as `python -m verifiers.worker`. The first frame is the node's `[options, memory_mb,
readable, private]`, the last two lists of paths;
the answer says what isolation the system allowed. After that each request is `[number, operation, *arguments]`, and
each reply `[number, kind, *values]` where kind is

- `ok` with the result, which ends the request;
- `error` with the name of an exception class and its message, which ends it too;
- `ready` and then `reward` for each answer, while a batch is being scored: the node's clock runs for each alone.

Nothing that an answer does here is trusted. The worst it can do is end or corrupt this process, and the node then
kills it and starts another.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

from verifiers import grammar
from verifiers.base import NoSuchTask, Task, TaskRef, UnknownTask, Verifier, VerifierError, extract_answer
from verifiers.isolation import OUT_OF_MEMORY, isolate
from verifiers.process import Channel, die_with_parent
from verifiers.registry import load, sources

MAX_ANSWER = 8192
"""Characters of an answer that a verifier looks at; a longer one scores 0."""

_KEPT_TASKS = 1024

Reply = tuple[Any, ...]


class Worker:
    """The verifiers in use and the operations on them. Each operation yields its replies, the last one final."""

    def __init__(self, options: dict[str, dict[str, Any]]) -> None:
        self._options = options
        self._verifiers: dict[str, Verifier] = {}
        self._make = functools.lru_cache(_KEPT_TASKS)(self._make_task)

    def operations(self) -> dict[str, Callable[..., Iterator[Reply]]]:
        """What the node may ask for."""
        return {"load": self.load, "canonical": self.canonical, "make": self.make, "score": self.score}

    def load(self, name: str) -> Iterator[Reply]:
        """Import and construct a verifier: seconds, so it has a time limit of its own."""
        if name not in self._verifiers:
            self._verifiers[name] = load(name, self._options.get(name, {}))
        yield ("ok", None)

    def canonical(self, name: str, config: dict[str, Any]) -> Iterator[Reply]:
        """(version, canonical configuration)."""
        verifier = self._verifiers[name]
        yield ("ok", [verifier.version, verifier.canonical(config)])

    def make(self, ref: list[Any]) -> Iterator[Reply]:
        """The task as `[kind, prompt, answer, example]`."""
        task = self._make(TaskRef(*ref))
        example = [task.example.prompt, task.example.answer] if task.example else None
        yield ("ok", [task.kind, task.prompt, task.answer, example])

    def score(self, ref: list[Any], completions: list[str]) -> Iterator[Reply]:
        """A `reward` reply `(score, outcome)` for each completion, in order."""
        task = self._make(TaskRef(*ref))
        verifier = self._verifiers[task.ref.verifier]
        yield ("ready",)
        for completion in completions:
            yield ("reward", *_score(verifier, task, completion))
        yield ("ok", None)

    def _make_task(self, ref: TaskRef) -> Task:
        return self._verifiers[ref.verifier].make(ref)


def _score(verifier: Verifier, task: Task, completion: str) -> tuple[float, str]:
    answer = extract_answer(completion)
    if len(answer) > MAX_ANSWER:
        return 0.0, "refused"
    try:
        score = float(verifier.score(task, answer))
    except grammar.Refused:
        return 0.0, "refused"
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception:  # noqa: BLE001  # code of other projects, given text it does not expect: anything may be raised
        return 0.0, "raised"
    return (min(max(score, 0.0), 1.0), "scored") if math.isfinite(score) else (0.0, "raised")


def _replies(worker: Worker, operation: str, arguments: list[Any]) -> Iterator[Reply]:
    try:
        yield from worker.operations()[operation](*arguments)
    except VerifierError as error:
        kinds = ("NoSuchTask", NoSuchTask), ("UnknownTask", UnknownTask)
        kind = next((name for name, of in kinds if isinstance(error, of)), "VerifierError")
        yield ("error", kind, str(error))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as error:  # noqa: BLE001  # as above: a verifier is code of other projects
        yield ("error", "VerifierError", f"the verifier failed: {type(error).__name__}: {error}")


def _silence() -> None:
    """Until here a failing start could be explained on standard error; what scorers print is of no interest."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(null, number)
    os.close(null)


def main() -> None:
    """Serve the node until it closes the channel."""
    channel = Channel.inherited()
    options, memory_mb, readable, private = channel.receive()
    got = isolate(memory_mb, [*readable, *sources()], private)
    # After `isolate`, which has to find a process with one thread.
    die_with_parent()
    _silence()
    worker = Worker(options)
    channel.send(["hello", got])
    while True:
        try:
            number, operation, *arguments = channel.receive()
        except EOFError:
            return
        for reply in _replies(worker, operation, arguments):
            channel.send([number, *reply])


if __name__ == "__main__":
    main()
