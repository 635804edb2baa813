"""CPU time of each thing that becomes of a batch, measured one by one in one process."""

import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from bench.net.batches import key_of, load_verifiers
from bench.net.nodes import VERIFIERS, Batch
from bench.net.runs import cpu
from p2p.canonical import decode
from p2p.store import EnvelopeStore
from p2p.wire import MAX_BATCH, SIGNED, decode_batch, encode_batch
from rl.advantage import advantages
from rl.pool import SqlitePool
from rl.rollouts import RolloutGroup, ScoredGroup
from verifiers.base import Task
from verifiers.sandbox import Sandbox, open_sandbox

_LEVEL = 6


async def measure(batches: Sequence[Batch]) -> dict[str, float]:
    """CPU seconds a batch of each stage, but for gossip's own. The sandbox's worker processes are counted in."""
    spent: dict[str, float] = {}

    def each(stage: str, work: Callable[[Batch], object]) -> None:
        begun = time.process_time()
        for batch in batches:
            work(batch)
        spent[stage] = (time.process_time() - begun) / len(batches)

    key = key_of(0)
    public = key.public_key().public_bytes_raw()
    payloads = {batch.number: bytes(decode(batch.envelope.data, 5, 1)[2]) for batch in batches}
    signatures = {batch.number: bytes(decode(batch.envelope.data, 5, 1)[3]) for batch in batches}
    plain = {batch.number: zlib.decompress(payloads[batch.number]) for batch in batches}
    each("encode", lambda batch: encode_batch(batch.envelope.batch))
    each("compress", lambda batch: zlib.compress(plain[batch.number], _LEVEL))
    each("sign", lambda batch: key.sign(SIGNED + payloads[batch.number]))
    verifier = Ed25519PublicKey.from_public_bytes(public)
    each("verify", lambda batch: verifier.verify(signatures[batch.number], SIGNED + payloads[batch.number]))
    each("decompress", lambda batch: zlib.decompressobj().decompress(payloads[batch.number], MAX_BATCH + 1))
    each("decode", lambda batch: decode_batch(plain[batch.number]))
    async with open_sandbox(VERIFIERS, []) as sandbox:
        await load_verifiers(sandbox)
        made = await _regenerated(batches, sandbox, spent)
        scored = await _scored(batches, made, sandbox, spent)
    store = EnvelopeStore()
    with TemporaryDirectory() as directory, SqlitePool(Path(directory) / "pool.sqlite", "own") as pool:

        def keep(batch: Batch) -> None:
            store.add(batch.envelope)
            pool.add(scored[batch.number])

        each("store", keep)
    return spent


async def _regenerated(batches: Sequence[Batch], sandbox: Sandbox, spent: dict[str, float]) -> dict[int, list[Task]]:
    begun = sum(cpu())
    made = {batch.number: [await sandbox.make(scored.group.task.ref) for scored in batch.groups] for batch in batches}
    spent["regenerate"] = (sum(cpu()) - begun) / len(batches)
    return made


async def _scored(
    batches: Sequence[Batch], made: dict[int, list[Task]], sandbox: Sandbox, spent: dict[str, float]
) -> dict[int, list[ScoredGroup]]:
    found: dict[int, list[ScoredGroup]] = {}
    begun = sum(cpu())
    for batch in batches:
        for task, own in zip(made[batch.number], batch.groups, strict=True):
            rewards = tuple(await sandbox.score(task, [one.text for one in own.group.completions]))
            group = RolloutGroup(task, own.group.completions, batch.number)
            scored = ScoredGroup(group, "other", 1, rewards, advantages(rewards, "group"))
            found.setdefault(batch.number, []).append(scored)
    spent["score"] = (sum(cpu()) - begun) / len(batches)
    return found
