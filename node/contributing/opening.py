"""The desk of a node, with what it keeps in the data directory; and where one that trains has it, for a person."""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from node.background import background
from node.config import Config
from node.contributing.desk import Desk, Network
from node.contributing.kept import FILE, Kept, KeptError
from node.contributing.terminal import NAME
from node.datadir import DataDir
from node.disk import Disk
from node.exchange import CurrentRound, DurablePool
from node.identity import Identity
from node.stop import Stop
from node.view import View
from verifiers.sandbox import Sandbox
from verifiers.stream import TaskStream, seed_of


@dataclass(frozen=True)
class Office:
    """What a desk needs of its node. `stream` is the node's own: the desk has other tasks of the same mix."""

    config: Config
    data: DataDir
    identity: Identity
    stream: TaskStream
    sandbox: Sandbox
    pool: DurablePool
    disk: Disk
    current: CurrentRound


class Place:
    """Where the desk of a running node stands, if it has one. `over` ends what is in hand there."""

    def __init__(self) -> None:
        self.desk: Desk | None = None
        self.over = Stop()

    @contextmanager
    def holding(self, desk: Desk) -> Iterator[None]:
        """There is this desk while the block runs."""
        self.desk = desk
        try:
            yield
        finally:
            self.desk = None
            self.over.request()


@contextmanager
def open_desk(office: Office, name: str) -> Iterator[Desk]:
    """The desk at which `name` answers, for the time of a block. Raises KeptError, or sqlite3.OperationalError."""
    config, fixed = office.config, office.config.node.seed
    # Not the tasks that the node's own policy is trained on.
    seed = seed_of(b"contribute" + (office.identity.public_bytes if fixed is None else str(fixed).encode()))
    with Kept(office.data.path / FILE, seed) as kept:
        tasks = office.stream.with_seed(seed)
        tasks.restore(kept.cursor)
        yield Desk(
            name,
            tasks,
            office.sandbox,
            office.pool,
            kept,
            office.disk,
            samples=config.sampling.group_size,
            longest=config.admission.max_completion,
            advantage=config.training.advantage,
            round=office.current,
        )


@asynccontextmanager
async def take_answers(office: Office, place: Place, network: Network, view: View) -> AsyncIterator[None]:
    """A desk in a node that trains. One that cannot be had keeps it from nothing else."""
    with ExitStack() as stack:
        try:
            desk = stack.enter_context(open_desk(office, NAME))
        except KeptError as error:
            view.message("warning", f"nobody can contribute here: {error}")
            yield
            return
        async with background() as nursery:
            nursery.start_soon(desk.send, network)
            with place.holding(desk):
                yield
