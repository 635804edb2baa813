"""Copies of the record for TensorBoard, trackio and Weights & Biases. `metrics.jsonl` stays the record itself."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from node import logs
from node.config import SinkSettings
from node.errors import NodeError
from node.record import Record


class SinkError(NodeError):
    """A sink that was asked for cannot be used. The message says what to install or to turn off."""

    exit_status = 2


class Sink(Protocol):
    """Takes one record after the other. A round may come again after a crash; the later one counts."""

    def write(self, record: Record, per_kind: Mapping[str, float]) -> None:
        """Copy one round. `per_kind` is the mean reward of each kind of task in it."""
        ...

    def close(self) -> None:
        """Write what is still held back."""
        ...


@contextlib.contextmanager
def open_sinks(settings: SinkSettings, directory: Path, run: str = "") -> Iterator[list[Sink]]:
    """The sinks that are turned on. `run` names this node where a service shows many: its id, so that it resumes there.

    A sink that fails later is given up with a warning; the record itself is in `metrics.jsonl`. Raises SinkError if one
    needs a package that is not installed, or cannot start.
    """
    sinks: list[Sink] = []
    with contextlib.ExitStack() as stack:
        if settings.tensorboard:
            sinks.append(_Guarded("tensorboard", TensorBoardSink(directory / "tensorboard"), (OSError,)))
            stack.callback(sinks[-1].close)
        for name in ("trackio", "wandb"):
            if getattr(settings, name):
                tracker = TrackerSink(name, settings.project, directory, run)
                sinks.append(_Guarded(name, tracker, tracker.failures))
                stack.callback(sinks[-1].close)
        yield sinks


class _Guarded:
    """A sink that cannot take the node along: what it may fail with ends it, not the training."""

    def __init__(self, name: str, sink: Sink, failures: tuple[type[Exception], ...]) -> None:
        self._name = name
        self._sink = sink
        self._failures = failures
        self._given_up = False

    def write(self, record: Record, per_kind: Mapping[str, float]) -> None:
        """See `Sink`."""
        self._guarded(lambda: self._sink.write(record, per_kind))

    def close(self) -> None:
        """See `Sink`."""
        self._guarded(self._sink.close)

    def _guarded(self, action: Callable[[], None]) -> None:
        if self._given_up:
            return
        try:
            action()
        except self._failures as error:
            self._given_up = True
            logs.get().warning(f"{self._name} failed and gets no more metrics until the next start: {error}")


def scalars(record: Record, per_kind: Mapping[str, float]) -> dict[str, float]:
    """The numbers of a round under the names they have in every sink. What is null in the record is left out."""
    values: dict[str, float] = {}
    for key, value in record.model_dump(exclude={"round", "time", "rejected"}).items():
        if value is not None:
            values[f"round/{key}"] = float(value)
    values.update({f"rejected/{reason}": float(count) for reason, count in record.rejected.items()})
    values.update({f"reward/{kind}": reward for kind, reward in per_kind.items()})
    return values


class TensorBoardSink:
    """Event files through TensorBoard's own writer, which needs neither torch nor TensorFlow."""

    def __init__(self, directory: Path) -> None:
        """Raises SinkError if TensorBoard is not installed."""
        self._writer_module = _package("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = _package("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = _package("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._writer: Any = self._writer_module.EventFileWriter(str(directory))
        self._last: int | None = None

    def write(self, record: Record, per_kind: Mapping[str, float]) -> None:
        """See `Sink`."""
        if self._last is None or record.round <= self._last:
            # Tells TensorBoard to forget points of this round and later, from before a crash.
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._writer.add_event(self._event.Event(wall_time=record.time, step=record.round, session_log=start))
        self._last = record.round
        values = [self._summary.Summary.Value(tag=t, simple_value=v) for t, v in scalars(record, per_kind).items()]
        self._writer.add_event(
            self._event.Event(wall_time=record.time, step=record.round, summary=self._summary.Summary(value=values))
        )
        self._writer.flush()

    def close(self) -> None:
        """See `Sink`."""
        self._writer.close()


class TrackerSink:
    """trackio, or Weights & Biases: the first has the same three functions as the second."""

    def __init__(self, name: str, project: str, directory: Path, run: str) -> None:
        """Raises SinkError if the package is not installed or refuses to start, as without a login."""
        self._tracker: Any = _package(name, name)
        # wandb's errors have a base of their own; trackio raises Python's.
        self.failures: tuple[type[Exception], ...] = (OSError, ValueError, getattr(self._tracker, "Error", OSError))
        options: dict[str, Any] = {"project": project, "name": run or directory.name, "resume": "allow"}
        if name == "wandb":
            # It would copy the terminal's output to its servers.
            settings = self._tracker.Settings(console="off")
            options |= {"dir": str(directory), "id": run or directory.name, "settings": settings}
        try:
            self._tracker.init(**options)
        except self.failures as error:
            raise SinkError(f"[sinks] {name} cannot start: {error}. Put that right, or turn it off") from error

    def write(self, record: Record, per_kind: Mapping[str, float]) -> None:
        """See `Sink`."""
        self._tracker.log(scalars(record, per_kind), step=record.round)

    def close(self) -> None:
        """See `Sink`."""
        self._tracker.finish()


def install_advice(extra: str) -> str:
    """How to get the package of a sink, with the Python that runs this, from a clone and from an index."""
    return f"in a clone run `{sys.executable} -m pip install -e '.[{extra}]'`, elsewhere with 'swarmnode[{extra}]'"


def _package(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SinkError(
            f"[sinks] {extra} is on, but its package cannot be imported ({error}):"
            f" {install_advice(extra)}, or turn it off"
        ) from error
