"""What one simulated run is like, drawn from its seed.

Every run differs: how many nodes and groups, how fast disks and networks are, which faults come how
often. Nothing else in the simulation draws what this module has decided. Times are virtual
milliseconds.
"""

from __future__ import annotations

from random import Random

import attrs
from attrs import frozen

FAULTS = (
    "isolate",
    "isolate-leader",
    "one-way",
    "halves",
    "crash",
    "crash-leader",
    "crash-all",
    "crash-point",
    "pause",
    "slow-disk",
    "storm",
    "log-start",
    "transfer",
    "wipe",
    "lose-folder",
    "rot",
    "full-disk",
    "crash-voter",
    "siesta",
)


@frozen(kw_only=True)
class SimOptions:
    """Settings of one run."""

    nodes: int = 3
    groups: int = 2
    clients_per_group: int = 2
    safety_ms: float = 5_000
    liveness_ms: float = 12_000
    tick_ms: float = 25
    election_ticks: int = 8
    heartbeat_ticks: int = 2
    latency_ms: tuple[float, float] = (0.5, 4.0)
    straggler: float = 0.01  # chance that a frame takes up to straggler_ms
    straggler_ms: float = 300
    drop: float = 0.01
    duplicate: float = 0.01
    fsync_ms: tuple[float, float] = (0.5, 3.0)
    slow_fsync_ms: float = 150
    think_ms: tuple[float, float] = (10.0, 60.0)
    records_max: int = 4
    value_bytes_max: int = 60
    segment_bytes: int = 1_500
    append_bytes_max: int = 2_000
    rest_after_ticks: int = 0
    pre_vote: bool = True
    check_quorum: bool = True
    fault_every_ms: tuple[float, float] = (150.0, 900.0)
    fault_lasts_ms: tuple[float, float] = (100.0, 1_200.0)
    weights: tuple[tuple[str, float], ...] = tuple((fault, 1.0) for fault in FAULTS)
    clock_skew_ms: float = 0.0

    def with_weights(self, **weights: float) -> SimOptions:
        """Other odds of faults; a fault that is not named does not happen."""
        chosen = tuple((name.replace("_", "-"), weight) for name, weight in weights.items())
        assert all(name in FAULTS for name, _ in chosen), "no such fault"
        return attrs.evolve(self, weights=chosen)


def draw_options(seed: int) -> SimOptions:
    """The options of the run with this seed."""
    random = Random(f"options {seed}")
    weights = {
        "isolate": 1.0,
        "isolate-leader": 2.0,
        "one-way": 1.0,
        "halves": 1.0,
        "crash": 1.5,
        "crash-leader": 2.5,
        "crash-all": 0.6,
        "crash-point": 1.0,
        "pause": 1.0,
        "slow-disk": 0.8,
        "storm": 0.8,
        "log-start": 1.5,
        "transfer": 0.5,
        "wipe": 0.5,
        "lose-folder": 0.4,
        "rot": 0.6,
        "full-disk": 0.3,
        "crash-voter": 0.5,
        "siesta": 1.0,
    }
    # Some runs lack some faults altogether, so that others come in bursts (swarm testing).
    for fault in FAULTS:
        if random.random() < 0.25:
            weights[fault] = 0.0
    if not any(weights.values()):
        weights["crash-leader"] = 1.0
    return SimOptions(
        nodes=5 if random.random() < 0.15 else 3,
        groups=1 if random.random() < 0.3 else 2,
        latency_ms=(0.5, random.choice((2.0, 6.0, 15.0))),
        drop=random.choice((0.0, 0.005, 0.02, 0.08)),
        duplicate=random.choice((0.0, 0.01, 0.05)),
        straggler=random.choice((0.0, 0.01, 0.05)),
        fsync_ms=(0.3, random.choice((1.0, 4.0, 12.0))),
        records_max=random.choice((1, 4, 10)),
        segment_bytes=random.choice((600, 2_000, 1 << 20)),
        append_bytes_max=random.choice((400, 4_000, 1 << 20)),
        rest_after_ticks=random.choice((0, 8)),
        fault_every_ms=(100.0, random.choice((700.0, 1_500.0))),
        weights=tuple(weights.items()),
        clock_skew_ms=random.choice((0.0, 500.0, 15 * 86_400_000.0)),
    )
