"""Several processes, the ranks of one learner, that share each learning step (data parallelism).

Rank 0 is the learner's own process; only it samples, saves and talks to the node. The others follow: rank 0 tells them
over a socket what to do, and then all do the same, each with its share of the micro-batches. Gradients are added up and
all make the same optimiser step, so weights never travel. Whatever can go wrong is agreed on (`together`) before
anything changes. A rank that is lost makes every other one fail: the learner starts anew from its last checkpoint.

Groups of torch.distributed are made by hand, without its one group a process, which the engine may want for itself.
"""

import logging
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed
from torch import Tensor

from rl.errors import CheckpointError, OutOfMemory, RankLost, Stopped, TrainingError
from rl.work import first_line, is_out_of_memory

log = logging.getLogger(__name__)

BUCKET = 2**22
"""Numbers (float32, so 16 MiB) that are added up at once: enough to make the cost of a message small. Larger tensors go
by themselves, where they lie."""

GRAVITY = (MemoryError, Stopped, OutOfMemory, CheckpointError, TrainingError)
"""What ranks agree on, the gravest last. The first is one that ends with a smaller batch, in all of them."""

T = TypeVar("T")

_c10d: Any = torch.distributed
"""Its stubs lack most of what is used here."""


class Ranks(Protocol):
    """This process among those that share a learning step. Calls that concern all are made by all, in one order."""

    @property
    def rank(self) -> int:
        """The number of this process; the learner itself is 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def join(self) -> None:
        """Wait until all have their model. Raises what kept one of them from it."""

    def tell(self, operation: str, **payload: Any) -> None:
        """On rank 0: have the others do this too (a method of `rl.rank_child.Follower`). Elsewhere nothing."""

    def hurry(self) -> None:
        """On rank 0: the others may leave what they were told last. Elsewhere nothing."""

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Set each of these contiguous float32 tensors to its sum over the ranks, bit by bit the same in all."""

    def gather(self, value: T) -> list[T]:
        """The value (anything small that can be pickled) of every rank."""

    def computing(self) -> AbstractContextManager[None]:
        """While all compute at once, none takes more than its share of the CPU."""

    def close(self) -> None:
        """End the others."""


class Alone:
    """The only rank."""

    rank, size = 0, 1

    def join(self) -> None:
        """There is nobody to wait for."""

    def tell(self, operation: str, **payload: Any) -> None:
        """There is nobody to tell."""

    def hurry(self) -> None:
        """There is nobody to wait for."""

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """They are the sum."""

    def gather(self, value: T) -> list[T]:
        """The one value."""
        return [value]

    def computing(self) -> AbstractContextManager[None]:
        """The whole CPU may be used."""
        return nullcontext()

    def close(self) -> None:
        """There is nobody to end."""


def together(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do `work` in all ranks. When it fails in one, all raise the same: the gravest of what was raised.

    MemoryError stands for any lack of memory; it and the types of GRAVITY are agreed on. Anything else is a fault of
    the program, which ends the rank and so the learner.
    """
    if ranks.size == 1:
        return work()
    done: list[T] = []
    gravity, told = -1, ""
    try:
        done.append(work())
    except (MemoryError, RuntimeError, *GRAVITY) as error:
        kind = MemoryError if is_out_of_memory(error) else type(error)
        if kind not in GRAVITY:
            raise
        gravity, told = GRAVITY.index(kind), first_line(error) if kind is MemoryError else str(error)
    if gravity == GRAVITY.index(Stopped):
        ranks.hurry()
    gravest, told = max(ranks.gather((gravity, told)), key=lambda outcome: outcome[0])
    if gravest >= 0:
        raise GRAVITY[gravest](told)
    return done[0]


class Connected:
    """A rank among several, over torch.distributed: gloo, and for tensors on a GPU nccl.

    Raises RankLost when another rank is gone, or has not come to the same call after `patience` seconds.
    """

    def __init__(self, rank: int, size: int, device: str, threads: int, patience: float) -> None:
        self.rank, self.size = rank, size
        self.threads = threads
        self.busy = False
        self.calls = 0
        self._device = torch.device(device)
        self._patience = timedelta(seconds=patience)
        self._place: list[int] = [0, 0]

    def connect(self, meeting: Path) -> None:
        """Meet the others at this file, which all name. Raises RankLost."""
        with self._call("meet"):
            shared = _c10d.FileStore(str(meeting), self.size)
            shared.set_timeout(self._patience)
            self._gloo = _gloo(_c10d.PrefixStore("gloo", shared), self.rank, self.size, self._patience)
            self._nccl: Any = None
            if self._device.type == "cuda":
                options = _c10d.ProcessGroupNCCL.Options()
                options._timeout = self._patience
                store = _c10d.PrefixStore("nccl", shared)
                self._nccl = _c10d.ProcessGroupNCCL(store, self.rank, self.size, options)
            # Made once: memory must not run out in one rank while another waits for it.
            self._bucket = torch.zeros(BUCKET, device=self._device)
        # The first call to nccl makes its channels, which takes memory.
        self.sum([torch.zeros(1, device=self._device)])

    def begin(self, number: int) -> None:
        """An operation, told by rank 0, begins."""
        self._place = [number, 0]

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """See Ranks."""
        with self._call("add up gradients"), torch.no_grad():
            held: list[Tensor] = []
            for tensor in tensors:
                if tensor.numel() > BUCKET // 2:
                    self._add_up(tensor)
                    continue
                if sum(t.numel() for t in held) + tensor.numel() > BUCKET:
                    self._add_up_all(held)
                    held = []
                held.append(tensor)
            self._add_up_all(held)
            if self._nccl is not None:
                # A peer that is lost is to be noticed here, where it is looked for.
                torch.cuda.synchronize(self._device)

    def _add_up_all(self, tensors: Sequence[Tensor]) -> None:
        if not tensors:
            return
        lengths = [tensor.numel() for tensor in tensors]
        flat = self._bucket[: sum(lengths)]
        places = [part.view_as(t) for part, t in zip(torch.split(flat, lengths), tensors, strict=True)]
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        self._add_up(flat)
        for place, tensor in zip(places, tensors, strict=True):
            tensor.copy_(place)

    def _add_up(self, tensor: Tensor) -> None:
        group = self._nccl if tensor.is_cuda else self._gloo
        group.allreduce([tensor]).wait()

    def gather(self, value: T) -> list[T]:
        """See Ranks. Raises RankLost if the ranks are not at the same place of the same operation."""
        self._place[1] += 1
        data = torch.frombuffer(bytearray(pickle.dumps((self._place, value))), dtype=torch.uint8)
        with self._call("agree"):
            lengths = [int(length) for length in self._gather(torch.tensor([len(data)]))]
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: len(data)] = data
            found = [pickle.loads(t[:n].numpy().tobytes()) for t, n in zip(self._gather(padded), lengths, strict=True)]
        if any(place != self._place for place, _ in found):
            raise RankLost(f"the ranks of this learner are out of step: {[place for place, _ in found]}")
        return [value for _, value in found]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._gloo.allgather([found], [tensor]).wait()
        return found

    @contextmanager
    def _call(self, purpose: str) -> Iterator[None]:
        self.calls += 1
        self.busy = True
        try:
            yield
        except RuntimeError as error:
            # Without the place in the library's source before it and the general advice after it.
            told = re.sub(r"^\[\S+\] ", "", first_line(error)).split(". ")[0]
            raise RankLost(f"rank {self.rank} of this learner cannot {purpose} with the others: {told}") from error
        finally:
            self.busy = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """See Ranks."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _gloo(store: Any, rank: int, size: int, patience: timedelta) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    # By itself gloo takes the address that the machine's name stands for, which others can reach too.
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = patience
    return _c10d.ProcessGroupGloo(store, rank, size, options)


class Following(Connected):
    """Any rank but 0."""

    def __init__(self, connection: Connection, rank: int, size: int, device: str, threads: int, patience: float):
        super().__init__(rank, size, device, threads, patience)
        self._connection = connection
        self._number = 0
        self._hurried = False

    def receive(self) -> tuple[str, dict[str, Any]]:
        """What to do next. Raises EOFError when rank 0 has closed or is gone."""
        while True:
            number, operation, payload = self._message()
            if operation != "hurry":
                self._number, self._hurried = number, False
                self.begin(number)
                return operation, payload

    def hurried(self) -> bool:
        """Whether rank 0 has said that what is being done may be left."""
        while self._connection.poll():
            number, operation, _ = self._message()
            if operation != "hurry":
                raise RankLost(f"rank 0 went on to {operation} before all had finished")
            self._hurried = self._hurried or number == self._number
        return self._hurried

    def _message(self) -> tuple[int, str, dict[str, Any]]:
        try:
            message: tuple[int, str, dict[str, Any]] = self._connection.recv()
        except ConnectionError as error:
            raise EOFError("rank 0 is gone") from error
        return message

    def join(self) -> None:
        """Rank 0 waits for the others."""

    def tell(self, operation: str, **payload: Any) -> None:
        """Only rank 0 tells."""

    def hurry(self) -> None:
        """Only rank 0 tells."""

    def close(self) -> None:
        """Rank 0 will notice."""
        self._connection.close()
