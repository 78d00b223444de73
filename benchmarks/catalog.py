"""Which workloads there are, and which lines of the table their figures decide."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from attrs import frozen

from benchmarks.errors import BenchmarkError, UnsupportedError
from benchmarks.plan import Metrics, Plan
from benchmarks.table import ROWS
from benchmarks.targets import Target
from benchmarks.workloads import batches, bulk, crowd, failover, latency, resting, rules
from benchmarks.workloads.stalls import stalls

Measure: TypeAlias = Callable[[Target, Plan], Metrics]


class Ground(enum.Enum):
    """On what cluster a workload runs."""

    SHARED = "shared"
    """The warmed pair that most workloads share."""
    OWN = "own"
    """A fresh cluster for all runs of the workload."""
    NONE = "none"
    """Its start is what is measured: see workloads/start.py."""


@frozen
class Workload:
    """One thing to run."""

    name: str
    about: str
    measure: Measure
    ground: Ground = Ground.SHARED
    engines: tuple[str, ...] = ("raftmq", "kafka")
    runs: int | None = None
    """How often at most for raftmq, where not as often as is asked for."""
    kafka_runs: int | None = None
    """The same for Kafka, whose slow failures would take the evening."""
    faults: bool = False
    """Nodes are started with their fault switch."""
    is_warm: bool = False
    """The cluster has taken bulk records before: Kafka's JIT needs them."""
    is_secured: bool = False
    """On clusters with TLS everywhere, users and rules (benchmarks/secured.py)."""

    def measure_on(self, target: Target, plan: Plan) -> Metrics:
        """What a run on that cluster gives.

        Raises:
            UnsupportedError: nobody is asked there who they are, or as `measure`.
        """
        if self.is_secured and not target.client:
            raise UnsupportedError("needs --engine: a cluster with TLS, users and rules")
        return self.measure(target, plan)


def _launch(_target: Target, _plan: Plan) -> Metrics:
    raise UnsupportedError("needs --engine: a running cluster has started already")


WORKLOADS: Final = (
    Workload("bulk", "1 KiB records: produce, then consume", bulk.bulk, is_warm=True),
    Workload("small", "100-byte records: produce", bulk.small, is_warm=True),
    Workload(
        "batches", "100-byte records in prebuilt 1 MiB batches", batches.batches, is_warm=True
    ),
    Workload("single", "one record in flight", latency.one_in_flight, is_warm=True),
    Workload("endtoend", "end to end at 300 records a second", latency.end_to_end, is_warm=True),
    Workload(
        "memory",
        "memory of the servers after the runs",
        resting.memory,
        runs=1,
        kafka_runs=1,
        is_warm=True,
    ),
    Workload(
        "stalls",
        "stalls of the nodes' event loops while they produce, consume and delete",
        stalls,
        engines=("raftmq",),
        is_warm=True,
    ),
    Workload(
        "stopped",
        "a follower stopped",
        latency.follower_stopped,
        Ground.OWN,
        kafka_runs=2,
        is_warm=True,
    ),
    Workload(
        "slow",
        "a follower's fsync slowed to 50 ms",
        latency.follower_slow,
        Ground.OWN,
        engines=("raftmq",),
        faults=True,
        is_warm=True,
    ),
    Workload("start", "three nodes from nothing to the first ack", _launch, Ground.NONE),
    Workload(
        "failover",
        "kill -9 of the leader, default timeouts",
        failover.failover,
        Ground.OWN,
        runs=10,
        kafka_runs=3,
    ),
    Workload(
        "failover-fast",
        "kill -9 of the leader, fast timeouts",
        failover.failover_fast,
        Ground.OWN,
        runs=10,
        kafka_runs=3,
    ),
    Workload(
        "failover-many",
        "kill -9 of the leader of 300 partitions",
        failover.failover_many,
        Ground.OWN,
        kafka_runs=1,
    ),
    Workload(
        "partitions",
        "1,000 idle partitions x 3",
        resting.idle_partitions,
        Ground.OWN,
        runs=1,
        kafka_runs=1,
    ),
    Workload(
        "consumers",
        "1,000 idle long-polling consumers",
        resting.idle_consumers,
        Ground.OWN,
        runs=3,
        kafka_runs=1,
    ),
    Workload(
        "crowd",
        "2,000 connections",
        crowd.crowd,
        Ground.OWN,
        runs=3,
        kafka_runs=1,
        is_warm=True,  # else the memory of newest batches, filled meanwhile, counts as theirs
    ),
    Workload(
        "secured-bulk",
        "secured: 1 KiB records, produce, then consume",
        bulk.bulk,
        is_warm=True,
        is_secured=True,
    ),
    Workload(
        "secured-small",
        "secured: 100-byte records, produce",
        bulk.small,
        is_warm=True,
        is_secured=True,
    ),
    Workload(
        "secured-single",
        "secured: one record in flight",
        latency.one_in_flight,
        is_warm=True,
        is_secured=True,
    ),
    Workload(
        "secured-failover",
        "secured: kill -9 of the leader, default timeouts",
        failover.failover,
        Ground.OWN,
        runs=10,
        kafka_runs=3,
        is_secured=True,
    ),
    Workload(
        "secured-failover-fast",
        "secured: kill -9 of the leader, fast timeouts",
        failover.failover_fast,
        Ground.OWN,
        runs=10,
        kafka_runs=3,
        is_secured=True,
    ),
    Workload(
        "rules",
        "secured: produce and fetch beside 10 and 10,000 rules",
        rules.rules,
        Ground.OWN,
        engines=("raftmq",),
        runs=1,
        is_secured=True,
    ),
)

NAMES: Final = {workload.name: workload.name for workload in WORKLOADS} | {
    row.key: row.workload for row in ROWS
}
"""Workload by what it may be called: its own name, or a line of the table that it decides."""


def workloads_named(names: Sequence[str]) -> list[Workload]:
    """The workloads of these names or lines, in the order of the catalog; without a name all that
    run on clusters without security.

    Raises:
        BenchmarkError: an unknown name.
    """
    for name in names:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise BenchmarkError(f"no workload {name!r}{hint}; there are {', '.join(NAMES)}")
    wanted = {NAMES[name] for name in names}
    return [one for one in WORKLOADS if one.name in wanted or not (names or one.is_secured)]


def secured_workloads() -> list[Workload]:
    """Those on clusters with TLS, users and rules."""
    return [one for one in WORKLOADS if one.is_secured]
