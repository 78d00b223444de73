"""What a cluster costs while little or nothing happens, and what its memory is after work."""

from __future__ import annotations

import time

from benchmarks.clients import create_topic, delete_topics, new_name, producer
from benchmarks.errors import BenchmarkError
from benchmarks.loop_clients import Poller, Tally, TopicLeaders
from benchmarks.plan import Metrics, Plan
from benchmarks.processes import MIB, Usage, usage
from benchmarks.targets import Target
from benchmarks.wire import Loop, fetch_frame
from benchmarks.workloads.bulk import bulk


def _all_usage(target: Target) -> dict[int, Usage]:
    if not target.pids:
        raise BenchmarkError("needs --pids: without them there is nothing to read")
    return {pid: usage(pid) for pid in target.servers}


def _cpu_percent(before: dict[int, Usage], after: dict[int, Usage], seconds: float) -> list[float]:
    return [(after[pid].cpu_s - before[pid].cpu_s) / seconds * 100 for pid in before]


def memory(target: Target, plan: Plan) -> Metrics:
    """Memory of all servers after one more run of bulk records."""
    bulk(target, plan)
    now = _all_usage(target).values()
    return {
        "rss_mib": sum(one.rss_bytes for one in now) / MIB,
        "pss_mib": sum(one.pss_bytes for one in now) / MIB,
    }


def idle_partitions(target: Target, plan: Plan) -> Metrics:
    """Many replicated partitions that have one record each and then nothing to do."""
    topic = new_name("idle")
    started = time.perf_counter()
    create_topic(target, topic, plan.idle_partitions, timeout_s=240)
    created_s = time.perf_counter() - started
    errors: list[str] = []
    client = producer(
        target,
        **{"delivery.report.only.error": True},
        on_delivery=lambda error, _message: errors.append(str(error)),
    )
    for number in range(plan.idle_partitions):
        client.produce(topic, b"one", partition=number)
    if client.flush(180) or errors:
        raise BenchmarkError(f"not every partition took its record: {errors[:1]}")
    del client  # its connections and questions would be part of what is measured
    time.sleep(plan.idle_settle_s)
    before = _all_usage(target)
    begun = time.perf_counter()
    time.sleep(plan.idle_s)
    after = _all_usage(target)
    percent = _cpu_percent(before, after, time.perf_counter() - begun)
    written = sum(after[pid].written_bytes - before[pid].written_bytes for pid in before)
    metrics = {
        "cpu_percent_max": max(percent),
        "cpu_percent_mean": sum(percent) / len(percent),
        "written_kib": written / 1024,
        "created_s": created_s,
        "rss_mib": sum(one.rss_bytes for one in after.values()) / MIB,
    }
    delete_topics(target, topic)
    return metrics


def idle_consumers(target: Target, plan: Plan) -> Metrics:
    """Many consumers that wait for records which do not come, each on a connection of its own."""
    topic = new_name("polls")
    create_topic(target, topic, plan.partitions)
    tally = Tally()
    default, polls_per_s = _polled(target, plan, topic, plan.fetch_wait_ms, tally)
    patient, _ = _polled(target, plan, topic, plan.fetch_wait_ms * 10, tally)
    delete_topics(target, topic)
    return {
        "cpu_percent_max": max(default),
        "cpu_percent_mean": sum(default) / len(default),
        "patient_cpu_percent_max": max(patient),
        "polls_per_s": polls_per_s,
        "moved": float(tally.moved),
    }


def _polled(
    target: Target, plan: Plan, topic: str, wait_ms: int, tally: Tally
) -> tuple[list[float], float]:
    """CPU of each server in per cent of a core, and how many polls they answered in a second."""
    leaders = TopicLeaders(target.bootstrap, topic)
    parts = sorted(leaders.addresses)
    frames = {part: fetch_frame(topic, part, 0, wait_ms) for part in parts}
    with Loop() as loop:
        for number in range(plan.consumers):
            part = parts[number % len(parts)]
            poller = Poller(loop, tally, leaders, part, frames[part])
            # Spread over the time of one poll, as consumers of a real crowd are.
            loop.at(time.perf_counter() + wait_ms / 1000 * number / plan.consumers, poller.send)
        loop.run_until(time.perf_counter() + 2 * wait_ms / 1000)
        before, answered_before = _all_usage(target), tally.answered
        begun = time.perf_counter()
        loop.run_until(begun + plan.consumers_s)
        seconds = time.perf_counter() - begun
        percent = _cpu_percent(before, _all_usage(target), seconds)
    answered = tally.answered - answered_before
    expected = plan.consumers * seconds / (wait_ms / 1000)
    if not 0.5 * expected <= answered <= 1.5 * expected:
        raise BenchmarkError(f"{answered} polls were answered where {expected:.0f} were expected")
    return percent, answered / seconds
