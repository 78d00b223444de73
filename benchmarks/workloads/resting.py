"""What a cluster costs while little or nothing happens, and what its memory is after work."""

from __future__ import annotations

import time

from benchmarks.clients import create_topic, delete_topics, new_name, producer
from benchmarks.errors import BenchmarkError
from benchmarks.plan import Metrics, Plan
from benchmarks.processes import MIB, Usage, usage
from benchmarks.targets import Target
from benchmarks.wire import Line, Loop, check_fetched, fetch_frame, settled_leaders
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
    create_topic(target, topic, plan.idle_partitions, timeout_s=120)
    created_s = time.perf_counter() - started
    errors: list[str] = []
    client = producer(
        target,
        **{"delivery.report.only.error": True},
        on_delivery=lambda error, _message: errors.append(str(error)),
    )
    for number in range(plan.idle_partitions):
        client.produce(topic, b"one", partition=number)
    if client.flush(60) or errors:
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
    default = _polled(target, plan, topic, plan.fetch_wait_ms)
    patient = _polled(target, plan, topic, plan.fetch_wait_ms * 10)
    delete_topics(target, topic)
    return {
        "cpu_percent_max": max(default),
        "cpu_percent_mean": sum(default) / len(default),
        "patient_cpu_percent_max": max(patient),
        "polls_per_s": plan.consumers * 1000 / plan.fetch_wait_ms,
    }


def _polled(target: Target, plan: Plan, topic: str, wait_ms: int) -> list[float]:
    leaders = settled_leaders(target.bootstrap, topic)
    frames = {part: fetch_frame(topic, part, 0, wait_ms) for part in leaders}
    answers = 0

    with Loop() as loop:
        for number in range(plan.consumers):
            part = number % len(leaders)
            frame = frames[part]

            def again(line: Line, answer: bytes, frame: bytes = frame) -> None:
                nonlocal answers
                answers += 1
                if check_fetched(answer):
                    raise BenchmarkError("records came, though none were sent")
                line.send(frame)

            line = loop.connect(leaders[part], again)
            # Spread over the time of one poll, as consumers of a real crowd are.
            begin = time.perf_counter() + wait_ms / 1000 * number / plan.consumers
            loop.at(begin, lambda line=line, frame=frame: line.send(frame))  # type: ignore[misc]
        loop.run_until(time.perf_counter() + 2 * wait_ms / 1000)
        before, answers = _all_usage(target), 0
        begun = time.perf_counter()
        loop.run_until(begun + plan.consumers_s)
        seconds = time.perf_counter() - begun
        percent = _cpu_percent(before, _all_usage(target), seconds)
    expected = plan.consumers * seconds / (wait_ms / 1000)
    if not 0.5 * expected <= answers <= 1.5 * expected:
        raise BenchmarkError(f"{answers} polls were answered where {expected:.0f} were expected")
    return percent
