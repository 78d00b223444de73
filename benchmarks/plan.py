"""How much of everything a run does: the standard sizes, and tiny ones for the tests."""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

Metrics: TypeAlias = dict[str, float]
"""What one run of a workload measured, by name; units stand in the names."""


@frozen
class Plan:
    """Sizes of all workloads."""

    partitions: int = 6
    bulk_count: int = 512 * 1024
    """1 KiB records."""
    small_count: int = 400_000
    batch_count: int = 600
    """Prebuilt batches of a mebibyte."""
    batch_records: int = 9_500
    batches_in_flight: int = 4
    """Per connection."""
    latency_s: float = 5.0
    rate: int = 300
    """Records a second where latency is measured at a steady rate."""
    follower_s: float = 15.0
    """Long enough that one flush of a tenth of a second, of the disk's own, is below p99."""
    failover_rate: int = 1_000
    failover_before_s: float = 1.5
    failover_after_s: float = 1.0
    """How long load goes on after the first acknowledgement."""
    failover_limit_s: float = 60.0
    many_partitions: int = 300
    many_rate: int = 1_500
    idle_partitions: int = 1_000
    idle_settle_s: float = 20.0
    idle_s: float = 60.0
    consumers: int = 1_000
    consumers_s: float = 20.0
    fetch_wait_ms: int = 500
    crowd: int = 2_000
    crowd_s: float = 20.0
    rules: int = 10_000
    rules_turns: int = 6


TINY = Plan(
    partitions=2,
    bulk_count=1_000,
    small_count=1_000,
    batch_count=8,
    batch_records=100,
    batches_in_flight=2,
    latency_s=0.3,
    rate=50,
    follower_s=0.5,
    failover_rate=200,
    failover_before_s=0.3,
    failover_after_s=0.2,
    many_partitions=6,
    many_rate=200,
    idle_partitions=6,
    idle_settle_s=0.2,
    idle_s=0.3,
    consumers=10,
    consumers_s=0.5,
    crowd=20,
    crowd_s=1.5,
    rules=1_100,
    rules_turns=2,
)
"""Sizes that only show that everything runs."""
