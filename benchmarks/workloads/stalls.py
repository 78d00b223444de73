"""How often the event loops of raftmq's nodes stand still under full load, cold reads included.

A node counts a stall when a tick is late by more than a quarter of the election timeout, and knows
how much of that its thread was ready and had no core (`docs/metrics.md`, `raftmq_loop_stalls_*`).
On a machine that nodes share with the load the second is the load's doing.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from benchmarks.clients import create_topic, delete_topics, new_name
from benchmarks.errors import BenchmarkError, UnsupportedError
from benchmarks.page_cache import forget, logs_of
from benchmarks.plan import Metrics, Plan
from benchmarks.processes import MIB
from benchmarks.targets import Target
from benchmarks.workloads.batches import batches
from benchmarks.workloads.bulk import KIB, bulk, consume, produce, small


def stalls(target: Target, plan: Plan) -> Metrics:
    """Every kind of bulk work once, each with the deletion of its topic, and a cold read."""
    if not target.admin:
        raise UnsupportedError("needs raftmq's admin ports")
    stalls_before, without_core_before = _counts(target)
    bulk(target, plan)
    small(target, plan)
    batches(target, plan)
    cold_mb_s = _cold_read(target, plan)
    stalls_after, without_core_after = _counts(target)
    in_all = stalls_after - stalls_before
    return {
        "stalls": in_all,
        "stalls_with_core": in_all - (without_core_after - without_core_before),
        "cold_consume_mb_s": cold_mb_s,
    }


def _cold_read(target: Target, plan: Plan) -> float:
    """Produce, put the logs out of the page cache, consume: MiB/s of the last."""
    topic = new_name("stalls")
    create_topic(target, topic, plan.partitions)
    made = produce(target, topic, plan.bulk_count, KIB, plan.partitions)
    paths = logs_of(target.servers, topic)
    if not paths:
        raise BenchmarkError(f"no log of {topic} found through the processes {target.servers}")
    forget(paths)
    got, size, seconds = consume(target, topic, made.acknowledged, plan.partitions)
    delete_topics(target, topic)
    if made.failed or got < made.acknowledged:
        raise BenchmarkError(f"{made.failed} failed, {made.acknowledged - got} records missing")
    return size / MIB / seconds


def _counts(target: Target) -> tuple[int, int]:
    """Stalls of all nodes so far, and those of them that lacked a core."""
    told = [_status(address) for address in target.admin.values()]
    return (
        sum(one["loop_stalls"] for one in told),
        sum(one["loop_stalls_without_core"] for one in told),
    )


def _status(address: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://{address}/status", timeout=10) as answer:
            page: dict[str, Any] = json.load(answer)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"the status of {address}: {error}") from error
    return page
