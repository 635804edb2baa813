"""`/metrics` in the text format of Prometheus. No label holds anything that a stranger chose."""

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from node.api.control import Control
from node.api.feed import Feed
from node.api.models import Resources
from node.evaluations import EvaluationRecord
from node.record import Record

TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LAST = {
    "policy_step": "Optimiser steps of the policy since its base model.",
    "reward_local": "Mean reward of the node's own completions in the last round.",
    "reward_external": "Mean reward of the external groups of the last round.",
    "informative_fraction": "Share of the own groups of the last round whose rewards differ.",
    "loss": "Mean loss of the last round.",
    "entropy": "Mean entropy of the policy in the last round, in nats a token.",
    "grad_norm": "Mean norm of the gradient in the last round, before clipping.",
    "clip_fraction": "Share of clipped tokens in the last round.",
    "engine_logprob_gap": "Mean difference of log-probs between engine and policy in the last round, in nats.",
    "gate_threshold": "Least mean log-prob that the likelihood gate lets pass, in nats a token.",
}

_TOTALS = {
    "rounds": "Rounds finished since the start.",
    "tokens_generated": "Tokens sampled since the start.",
    "tokens_trained": "Tokens trained on since the start.",
    "local_groups": "Own groups sampled since the start.",
    "external_groups": "Groups of other nodes trained on since the start.",
    "batches_sent": "Batches sent to other nodes since the start.",
    "batches_received": "Batches that came from other nodes, as counted by the rounds.",
    "gate_refused": "Completions that the likelihood gate refused since the start.",
    "engine_restarts": "Restarts of the inference engine since the start.",
}


def exposition(
    version: str, feed: Feed, control: Control, resources: Resources, measured: EvaluationRecord | None
) -> bytes:
    """All metrics at this moment. `measured` is the last evaluation."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Now(version, feed, control, resources, measured))
    return generate_latest(registry)


class _Now(Collector):
    def __init__(
        self, version: str, feed: Feed, control: Control, resources: Resources, measured: EvaluationRecord | None
    ) -> None:
        self._version, self._feed, self._control, self._resources = version, feed, control, resources
        self._measured = measured

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        feed, control = self._feed, self._control
        about = GaugeMetricFamily(
            "swarmnode_info", "The node; always 1.", labels=["node", "name", "model", "device", "engine", "version"]
        )
        info = feed.info
        if info is not None:
            about.add_metric([info.node_id, info.name, info.model, info.device, info.engine, self._version], 1)
        yield about
        yield _gauge("round", "The last finished round.", control.done)
        yield _gauge("saved_round", "The last round with a checkpoint.", control.saved)
        yield _gauge("paused", "1 if the operator has paused the node.", float(control.paused))
        yield _gauge("phase_age_seconds", "How long the present part of the round has lasted.", feed.phase_seconds)
        last = feed.history.last
        if last is not None:
            yield from _of_last(last)
        if self._measured is not None:
            yield from _of_evaluation(self._measured)
        yield from self._totals()
        yield from self._swarm()
        yield from _of_machine(self._resources)

    def _totals(self) -> Iterator[Metric]:
        totals = self._feed.totals
        for name, text in _TOTALS.items():
            yield CounterMetricFamily(f"swarmnode_{name}", text, value=totals.counts[name])
        seconds = CounterMetricFamily(
            "swarmnode_phase_seconds", "Time of the rounds since the start.", labels=["phase"]
        )
        for phase in ("generate", "score", "share", "update"):
            seconds.add_metric([phase], totals.seconds[phase])
        yield seconds
        yield _by_reason("rejected", "What was refused, as counted by the rounds.", totals.rejected.items())

    def _swarm(self) -> Iterator[Metric]:
        swarm = self._feed.snapshot
        if swarm is None:
            return
        yield _gauge("peers", "Nodes connected.", swarm.connected)
        yield _gauge("mesh_peers", "Of these, in the mesh.", swarm.mesh)
        yield _gauge("banned_peers", "Nodes that are banned now.", sum(row.banned_seconds > 0 for row in swarm.peers))
        yield _gauge("batches_waiting", "Batches that wait to be checked.", swarm.waiting)
        yield CounterMetricFamily("swarmnode_groups_received", "Groups that came in batches.", value=swarm.groups)
        yield CounterMetricFamily("swarmnode_groups_admitted", "Groups that passed admission.", value=swarm.admitted)
        ours = swarm.contribution
        yield CounterMetricFamily("swarmnode_groups_sent", "Own groups sent, over all restarts.", value=ours.sent)
        uses = CounterMetricFamily(
            "swarmnode_contribution", "Uses of own groups that peers tell of, over all restarts.", labels=["use"]
        )
        users = GaugeMetricFamily("swarmnode_contribution_peers", "Peers that tell of such uses.", labels=["use"])
        for use, count, by in (
            ("admitted", ours.admitted, ours.admitted_by),
            ("trained", ours.trained, ours.trained_by),
        ):
            uses.add_metric([use], count)
            users.add_metric([use], by)
        yield uses
        yield users
        lag = GaugeMetricFamily("swarmnode_loop_lag_seconds", "Lag of the event loop.", labels=["quantile"])
        for name, value in (("0.5", swarm.lag_ms.p50), ("0.99", swarm.lag_ms.p99), ("1", swarm.lag_ms.max)):
            lag.add_metric([name], value / 1000)
        yield lag


def _of_last(record: Record) -> Iterator[Metric]:
    yield _gauge("round_age_seconds", "Time since the last round was finished.", max(0.0, time.time() - record.time))
    for name, text in _LAST.items():
        value = getattr(record, name)
        if value is not None:
            yield _gauge(name, text, value)


def _of_evaluation(measured: EvaluationRecord) -> Iterator[Metric]:
    yield _gauge("held_out_round", "The round after which the policy was last measured.", measured.round)
    accuracy = GaugeMetricFamily(
        "swarmnode_held_out_accuracy", "Of the policy when it was last measured, from 0 to 1.", labels=["answers"]
    )
    for name in ("greedy", "sampled", "pass_k"):
        accuracy.add_metric([name], getattr(measured, name))
    yield accuracy


def _of_machine(resources: Resources) -> Iterator[Metric]:
    yield _gauge("disk_free_bytes", "Free on the data directory's file system.", resources.disk_free)
    yield _gauge("memory_available_bytes", "Memory of the machine that is free.", resources.memory_available)
    memory = GaugeMetricFamily("swarmnode_memory_bytes", "Resident memory of the node's processes.", labels=["part"])
    sums: dict[str, int] = {}
    for process in resources.processes:
        sums[process.name] = sums.get(process.name, 0) + process.memory
    for name, size in sorted(sums.items()):
        memory.add_metric([name], size)
    yield memory


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"swarmnode_{name}", text, value=value)


def _by_reason(name: str, text: str, counts: Iterable[tuple[str, int]]) -> Metric:
    family = CounterMetricFamily(f"swarmnode_{name}", text, labels=["reason"])
    for reason, count in sorted(counts):
        family.add_metric([reason], count)
    return family
