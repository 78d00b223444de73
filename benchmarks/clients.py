"""librdkafka as the benchmarks use it: topics, their leaders, producers and consumers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from attrs import frozen
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.errors import BenchmarkError
from benchmarks.targets import Target

FAST_TIMEOUTS: Final[dict[str, Any]] = {
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 100,
    "topic.metadata.refresh.fast.interval.ms": 50,
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
}
"""Client settings that find a new leader soon; what they replace waits 100 ms to 10 s."""

QUIET: Final[dict[str, Any]] = {"log_level": 1}
"""Connections that a killed node resets are what is measured, not news."""

BULK: Final[dict[str, Any]] = {
    "acks": "all",
    "linger.ms": 5,
    "batch.size": 1 << 20,
    "batch.num.messages": 100_000,
    "queue.buffering.max.messages": 200_000,
    "queue.buffering.max.kbytes": 262_144,
    "message.timeout.ms": 120_000,
}
"""Settings for throughput: batches of up to a mebibyte."""

_POLL_S: Final = 0.05


@frozen
class Placement:
    """One partition, as Metadata tells it."""

    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


def wait_until(what: str, timeout_s: float, condition: Callable[[], bool]) -> None:
    """Poll a condition.

    Raises:
        BenchmarkError: it does not hold in time; `what` says what was waited for.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise BenchmarkError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(_POLL_S)


def admin(target: Target) -> AdminClient:
    """An admin client that finds a restarted node soon."""
    where = {"bootstrap.servers": target.bootstrap, **target.operator}
    return AdminClient({**where, **QUIET, **FAST_TIMEOUTS})


def new_name(prefix: str) -> str:
    """A topic's name that nobody used."""
    return f"{prefix}-{os.urandom(4).hex()}"


def create_topic(
    target: Target,
    name: str,
    partitions: int,
    *,
    assignment: Sequence[Sequence[int]] | None = None,
    timeout_s: float = 60.0,
) -> None:
    """Create a topic and return once every partition has a leader and all its replicas in sync.

    Raises:
        BenchmarkError: it cannot be had.
    """
    config = dict(target.topic_config)
    if target.replicas >= 3:
        config["min.insync.replicas"] = "2"
    if assignment is None:
        new = NewTopic(name, partitions, target.replicas, config=config)
    else:
        new = NewTopic(
            name,
            partitions,
            replica_assignment=[list(nodes) for nodes in assignment],
            config=config,
        )
    client = admin(target)
    try:
        client.create_topics([new], operation_timeout=timeout_s)[name].result(timeout_s)
    except KafkaException as error:
        raise BenchmarkError(f"topic {name} on {target.name}: {error}") from error
    wait_in_sync(target, name, partitions, timeout_s, client)


def delete_topics(target: Target, *names: str) -> None:
    """Delete topics, so that the next run finds the disk as this one did."""
    client = admin(target)  # held until the answers are in: its end would fail them
    for name, future in client.delete_topics(list(names)).items():
        try:
            future.result(60)
        except KafkaException as error:
            raise BenchmarkError(f"deleting {name} on {target.name}: {error}") from error


def placements(
    target: Target, topic: str, client: AdminClient | None = None
) -> dict[int, Placement]:
    """Leader, replicas and ISR of each partition; nothing while the topic is not known."""
    told = (client or admin(target)).list_topics(topic, timeout=15).topics[topic]
    if told.error is not None:
        return {}
    return {
        number: Placement(part.leader, tuple(part.replicas), tuple(part.isrs))
        for number, part in told.partitions.items()
    }


def wait_in_sync(
    target: Target,
    topic: str,
    partitions: int,
    timeout_s: float = 60.0,
    client: AdminClient | None = None,
) -> None:
    """Return once every partition is led and has all its replicas in sync."""
    client = client or admin(target)

    def is_whole() -> bool:
        try:
            found = placements(target, topic, client)
        except KafkaException:
            return False  # a busy or just killed node did not answer in time: asked again
        return len(found) == partitions and all(
            part.leader >= 0 and len(part.in_sync) >= target.replicas for part in found.values()
        )

    wait_until(f"{topic} on {target.name} led and in sync", timeout_s, is_whole)


def controller_id(target: Target) -> int:
    """The node that Metadata names as controller."""
    return int(admin(target).list_topics(timeout=15).controller_id)


def producer(target: Target, **settings: Any) -> Producer:
    """A producer with acks=all; settings by librdkafka's names."""
    where = {"bootstrap.servers": target.bootstrap, **target.client}
    return Producer({**where, "acks": "all", **QUIET, **settings})


def consumer(target: Target, **settings: Any) -> Consumer:
    """A consumer without a group's life: it is assigned, and commits nothing."""
    return Consumer(
        {
            "bootstrap.servers": target.bootstrap,
            **target.client,
            "group.id": new_name("bench"),
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            **QUIET,
            **settings,
        }
    )


if __name__ == "__main__":  # the comparison of client libraries uses what stands above
    import sys

    from benchmarks.client_race import main

    sys.exit(main(sys.argv[1:]))
