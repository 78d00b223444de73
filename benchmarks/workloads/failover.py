"""kill -9 of a leader: how long until its partitions acknowledge again, and is anything lost?

The clock runs from the kill until the acknowledgement of the first record that was handed to the
client after it, per partition. Every acknowledged record is then read back and compared.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from attrs import define, field
from confluent_kafka import KafkaError, Message, TopicPartition

from benchmarks.clients import (
    FAST_TIMEOUTS,
    consumer,
    controller_id,
    create_topic,
    delete_topics,
    new_name,
    placements,
    producer,
    wait_in_sync,
    wait_until,
)
from benchmarks.errors import BenchmarkError
from benchmarks.plan import Metrics, Plan
from benchmarks.targets import Target

_READ_STALL_S: Final = 20.0
UNKNOWN: Final = -1


@define
class Load:
    """Numbers to every partition in turn at a steady rate, and what was acknowledged."""

    target: Target
    topic: str
    partitions: int
    rate: int
    settings: dict[str, Any]
    acknowledged: dict[int, dict[int, int]] = field(init=False)
    """Offset by number, by partition."""
    killed_at: float = 0.0
    first_sent: dict[int, int] = field(factory=dict)
    """By partition, the first number handed over after the kill."""
    recovered_s: dict[int, float] = field(factory=dict)
    """By partition, from the kill to that number's acknowledgement."""
    errors: list[str] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.acknowledged = {number: {} for number in range(self.partitions)}

    def run(self, victim: int, before_s: float, after_s: float, limit_s: float) -> None:
        """Load, kill a process in the middle, load on until all partitions acknowledge again."""
        client = producer(
            self.target,
            **{"enable.idempotence": True, "message.timeout.ms": 120_000},
            **{"queue.buffering.max.messages": 1_000_000},
            **self.settings,
        )
        stop = threading.Event()
        # Acknowledgements are taken note of while the producing thread sleeps or is held up.
        poller = threading.Thread(target=self._poll, args=(client, stop))
        poller.start()
        try:
            started = time.perf_counter()
            number = 0
            ends_at: float | None = None
            while ends_at is None or time.perf_counter() < ends_at:
                now = time.perf_counter()
                if not self.killed_at and now - started >= before_s:
                    os.kill(victim, signal.SIGKILL)
                    self.killed_at = time.perf_counter()
                if self.killed_at and ends_at is None:
                    if len(self.recovered_s) == self.partitions:
                        ends_at = now + after_s
                    elif now - self.killed_at > limit_s:
                        break
                number = self._send_due(client, number, now - started)
                time.sleep(0.001)
            client.flush(60)
        finally:
            stop.set()
            poller.join()
        if len(self.recovered_s) < self.partitions:
            missing = self.partitions - len(self.recovered_s)
            raise BenchmarkError(f"{missing} partitions did not acknowledge within {limit_s:.0f} s")

    def _send_due(self, client: Any, number: int, elapsed_s: float) -> int:
        while number < elapsed_s * self.rate:
            partition = number % self.partitions
            if self.killed_at:
                self.first_sent.setdefault(partition, number)
            client.produce(
                self.topic, b"%d" % number, partition=partition, on_delivery=self._delivered
            )
            number += 1
        return number

    def _poll(self, client: Any, stop: threading.Event) -> None:
        while not stop.is_set():
            client.poll(0.05)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.errors.append(str(error))
            return
        value, partition, offset = message.value(), message.partition(), message.offset()
        assert value is not None
        assert partition is not None
        number = int(value)
        # None: librdkafka concluded it from the answer to a later batch, which tells no offset.
        self.acknowledged[partition][number] = UNKNOWN if offset is None else offset
        if self.first_sent.get(partition) == number:
            self.recovered_s[partition] = time.perf_counter() - self.killed_at

    def lost(self) -> int:
        """How many acknowledged records do not stand where they were acknowledged."""
        read = _read_all(self.target, self.topic, self.acknowledged)
        found = {(partition, number) for (partition, _), number in read.items()}
        return sum(
            (partition, number) not in found
            if offset == UNKNOWN
            else read.get((partition, offset)) != number
            for partition, numbers in self.acknowledged.items()
            for number, offset in numbers.items()
        )


def _read_all(
    target: Target, topic: str, acknowledged: dict[int, dict[int, int]]
) -> dict[tuple[int, int], int]:
    """Numbers by (partition, offset), up to each partition's last acknowledged offset."""
    client = consumer(target, **FAST_TIMEOUTS)
    ends = {part: max(numbers.values()) for part, numbers in acknowledged.items() if numbers}
    read: dict[tuple[int, int], int] = {}
    try:
        client.assign([TopicPartition(topic, part, 0) for part in ends])
        progressed = time.perf_counter()
        while ends and time.perf_counter() - progressed < _READ_STALL_S:
            messages = client.consume(10_000, 0.2)
            if messages:
                progressed = time.perf_counter()
            for message in messages:
                value, part, offset = message.value(), message.partition(), message.offset()
                if message.error() is not None or value is None:
                    continue
                assert part is not None
                assert offset is not None
                read[part, offset] = int(value)
                if offset >= ends.get(part, offset + 1):
                    del ends[part]
    finally:
        client.close()
    return read


def _kill_under_load(
    target: Target, plan: Plan, topic: str, partitions: int, rate: int, settings: dict[str, Any]
) -> Metrics:
    victim = placements(target, topic)[0].leader
    was_controller = controller_id(target) == victim
    load = Load(target, topic, partitions, rate, settings)
    load.run(
        target.pid_of(victim), plan.failover_before_s, plan.failover_after_s, plan.failover_limit_s
    )
    times = load.recovered_s.values()
    metrics = {
        "gap_s": max(times),
        "first_gap_s": min(times),
        "lost": float(load.lost()),
        "failed": float(len(load.errors)),
        "acknowledged": float(sum(len(numbers) for numbers in load.acknowledged.values())),
        "was_controller": float(was_controller),
    }
    if target.restarter is not None:
        target.restart(victim)
        wait_in_sync(target, topic, partitions, timeout_s=90)
        delete_topics(target, topic)
    return metrics


def failover(target: Target, plan: Plan) -> Metrics:
    """One partition, a client with librdkafka's own timeouts."""
    topic = new_name("failover")
    create_topic(target, topic, 1)
    return _kill_under_load(target, plan, topic, 1, plan.failover_rate, {})


def failover_fast(target: Target, plan: Plan) -> Metrics:
    """One partition, a client that looks for the new leader soon."""
    topic = new_name("failover")
    create_topic(target, topic, 1)
    settings = {**FAST_TIMEOUTS, "linger.ms": 0}
    return _kill_under_load(target, plan, topic, 1, plan.failover_rate, settings)


def failover_many(target: Target, plan: Plan) -> Metrics:
    """Many partitions led by the node that dies: until the last of them acknowledges again."""
    topic = new_name("failovers")
    nodes = sorted(target.pids)
    if len(nodes) < 3 or nodes[0] < 0:
        raise BenchmarkError("needs --pids ID:PID of at least three nodes")
    first, second, third = nodes[:3]
    # The first replica is the preferred leader; the other two take turns as second.
    assignment = [
        [first, second, third] if number % 2 else [first, third, second]
        for number in range(plan.many_partitions)
    ]
    create_topic(target, topic, plan.many_partitions, assignment=assignment)
    wait_until(
        f"all of {topic} led by node {first}", 60, lambda: _leaders(target, topic) == [first]
    )
    return _kill_under_load(target, plan, topic, plan.many_partitions, plan.many_rate, {})


def _leaders(target: Target, topic: str) -> Sequence[int]:
    return sorted({part.leader for part in placements(target, topic).values()})
