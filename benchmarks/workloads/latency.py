"""Latency: one record in flight, end to end at a steady rate, and with a follower in trouble.

At a steady rate the clock of a record starts when it is due, not when it could be sent, so that a
stall counts for every record that it held up.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaError, Message, TopicPartition

from benchmarks.clients import (
    consumer,
    controller_id,
    create_topic,
    delete_topics,
    new_name,
    placements,
    producer,
    wait_in_sync,
)
from benchmarks.errors import BenchmarkError, UnsupportedError
from benchmarks.plan import Metrics, Plan
from benchmarks.stats import percentile
from benchmarks.targets import Target
from benchmarks.wire import Wire, batch_of, check_produced, produce_frame, settled_leaders

_SIZE = 100
_WARM = 50


@contextmanager
def no_collector() -> Iterator[None]:
    """Keep the garbage collector of this process out of the latencies."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def one_in_flight(target: Target, plan: Plan) -> Metrics:
    """100-byte records, each sent after the last was acknowledged: librdkafka, then raw frames,
    but where TLS would hide them."""
    topic = new_name("single")
    create_topic(target, topic, 1)
    with no_collector():
        stock = _stock_round_trips(target, topic, plan.latency_s)
        raw = [] if target.client else _raw_round_trips(target, topic, plan.latency_s / 2)
    delete_topics(target, topic)
    found = {"p50_ms": percentile(stock, 0.5) * 1e3, "p99_ms": percentile(stock, 0.99) * 1e3}
    if raw:
        found |= {"raw_p50_ms": percentile(raw, 0.5) * 1e3}
        found |= {"raw_p99_ms": percentile(raw, 0.99) * 1e3}
    return found


def _stock_round_trips(target: Target, topic: str, seconds: float) -> list[float]:
    errors: list[str] = []

    def delivered(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            errors.append(str(error))

    client = producer(target, **{"linger.ms": 0}, on_delivery=delivered)
    value = os.urandom(_SIZE)

    def once() -> None:
        client.produce(topic, value, partition=0)
        if client.flush(30) or errors:
            raise BenchmarkError(f"not acknowledged: {errors[:1] or 'nothing within 30 s'}")

    return _timed(once, seconds)


def _raw_round_trips(target: Target, topic: str, seconds: float) -> list[float]:
    frame = produce_frame(topic, 0, batch_of(1, _SIZE, os.urandom(4096)))
    with Wire(settled_leaders(target.bootstrap, topic)[0]) as wire:
        return _timed(lambda: check_produced(wire.exchange(frame)), seconds)


def _timed(call: Callable[[], object], seconds: float) -> list[float]:
    for _ in range(_WARM):
        call()
    times = []
    end = time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        call()
        times.append(time.perf_counter() - started)
    return times


def end_to_end(target: Target, plan: Plan) -> Metrics:
    """From produce to a consumer that polls, at a steady rate.

    The producer is not idempotent, as in most applications: where a leader changes on the way it
    may send a record twice, and then the first arrival counts.
    """
    topic = new_name("endtoend")
    create_topic(target, topic, 1)
    client = consumer(target, **{"fetch.wait.max.ms": 100})
    arrived: dict[bytes, float] = {}
    stop, reading = threading.Event(), threading.Event()

    def read() -> None:
        while not stop.is_set():
            message = client.poll(0.1)
            if message is None:
                reading.set()
            elif message.error() is None:
                value = message.value()
                assert value is not None
                arrived.setdefault(value, time.perf_counter() - float(value))

    client.assign([TopicPartition(topic, 0, 0)])
    reader = threading.Thread(target=read)
    with no_collector():
        reader.start()
        try:
            if not reading.wait(30):
                raise BenchmarkError("the consumer does not come to rest")
            acks = paced(target, topic, plan.rate, plan.latency_s, stamped=True)
            deadline = time.perf_counter() + 10
            while len(arrived) < len(acks) and time.perf_counter() < deadline:
                time.sleep(0.01)
        finally:
            stop.set()
            reader.join()
            client.close()
    times = list(arrived.values())
    if len(times) != len(acks):
        raise BenchmarkError(f"{len(times)} of {len(acks)} records came through")
    delete_topics(target, topic)
    return {"p50_ms": percentile(times, 0.5) * 1e3, "p99_ms": percentile(times, 0.99) * 1e3}


def paced(
    target: Target, topic: str, rate: int, seconds: float, *, stamped: bool = False
) -> list[float]:
    """Produce at a steady rate with linger 0; each record's time from when it was due to its ack.

    Raises:
        BenchmarkError: one was not acknowledged.
    """
    times: list[float] = []
    errors: list[str] = []
    client = producer(target, **{"linger.ms": 0, "message.timeout.ms": 60_000})
    padding = b" " * _SIZE

    def send(due: float) -> None:
        def delivered(error: KafkaError | None, _message: Message) -> None:
            if error is not None:
                errors.append(str(error))
            times.append(time.perf_counter() - due)

        value = repr(due).encode() if stamped else padding
        client.produce(topic, value, partition=0, on_delivery=delivered)

    client.list_topics(topic, timeout=15)
    started = time.perf_counter() + 0.1
    count = int(rate * seconds)
    for number in range(count):
        due = started + number / rate
        while (wait := due - time.perf_counter()) > 0:
            client.poll(wait)
        send(due)
        client.poll(0)
    if client.flush(60) or errors or len(times) != count:
        raise BenchmarkError(f"{count - len(times)} of {count} not acknowledged, {errors[:1]}")
    return times


def _follower(target: Target, topic: str) -> int:
    """A follower of the only partition; not the controller, whose loss is another matter."""
    part = placements(target, topic)[0]
    controller = controller_id(target)
    followers = [node for node in part.replicas if node != part.leader]
    return next((node for node in followers if node != controller), followers[0])


def _in_trouble(
    target: Target, plan: Plan, trouble: Callable[[int], None], relief: Callable[[int], None]
) -> Metrics:
    topic = new_name("follower")
    create_topic(target, topic, 1)
    paced(target, topic, plan.rate, min(1.0, plan.follower_s))
    with no_collector():
        healthy = paced(target, topic, plan.rate, plan.follower_s)
        node = _follower(target, topic)
        trouble(node)
        try:
            troubled = paced(target, topic, plan.rate, plan.follower_s)
        finally:
            relief(node)
    wait_in_sync(target, topic, 1, timeout_s=90)
    delete_topics(target, topic)
    before, during = percentile(healthy, 0.99) * 1e3, percentile(troubled, 0.99) * 1e3
    return {
        "healthy_p50_ms": percentile(healthy, 0.5) * 1e3,
        "healthy_p99_ms": before,
        "p50_ms": percentile(troubled, 0.5) * 1e3,
        "p99_ms": during,
        "max_ms": max(troubled) * 1e3,
        "ratio": during / before,
    }


def follower_stopped(target: Target, plan: Plan) -> Metrics:
    """p99 of acks=all with all followers well, then with one of them stopped (SIGSTOP)."""
    return _in_trouble(
        target,
        plan,
        lambda node: os.kill(target.pid_of(node), signal.SIGSTOP),
        lambda node: os.kill(target.pid_of(node), signal.SIGCONT),
    )


def follower_slow(target: Target, plan: Plan) -> Metrics:
    """The same with one follower's fsync slowed to 50 ms, by raftmq's fault switch."""
    if not target.admin:
        raise UnsupportedError("needs raftmq's fault switch")
    return _in_trouble(
        target,
        plan,
        lambda node: _faults(target, node, "PUT", b'{"fsync_delay_ms": 50}'),
        lambda node: _faults(target, node, "DELETE", None),
    )


def _faults(target: Target, node: int, method: str, body: bytes | None) -> None:
    request = urllib.request.Request(
        f"http://{target.admin[node]}/faults",
        data=body,
        method=method,
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10):
            pass
    except OSError as error:
        raise UnsupportedError(f"the fault switch of node {node}: {error}") from error
