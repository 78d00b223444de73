"""Which workloads there are, and which lines of the table their figures decide."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from attrs import frozen

from benchmarks.errors import BenchmarkError
from benchmarks.plan import Metrics, Plan
from benchmarks.targets import Target
from benchmarks.workloads import bulk, failover

Measure: TypeAlias = Callable[[Target, Plan], Metrics]


class Ground(enum.Enum):
    """On what cluster a workload runs."""

    SHARED = "shared"
    """The warmed pair that most workloads share."""
    OWN = "own"
    """A fresh cluster for all runs of the workload."""
    LAUNCH = "launch"
    """It starts clusters itself."""


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


WORKLOADS: Final = (
    Workload("bulk", "1 KiB records: produce, then consume", bulk.bulk),
    Workload("small", "100-byte records: produce", bulk.small),
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
        kafka_runs=2,
    ),
)

_BY_NAME: Final = {workload.name: workload for workload in WORKLOADS}


def workloads_named(names: Sequence[str]) -> list[Workload]:
    """The workloads of these names, in the order of the catalog; all without a name.

    Raises:
        BenchmarkError: an unknown name.
    """
    for name in names:
        if name not in _BY_NAME:
            raise BenchmarkError(f"no workload {name!r}; there are {', '.join(_BY_NAME)}")
    return [workload for workload in WORKLOADS if not names or workload.name in names]
