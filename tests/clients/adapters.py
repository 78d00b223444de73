"""Stock Kafka clients behind one face, so that each story is told once and run with all of them.

Nothing here knows raftmq: only addresses, topics and records.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import confluent_kafka
import confluent_kafka.admin
import kafka
import kafka.admin
import kafka.errors
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewTopic as AioNewTopic
from aiokafka.structs import TopicPartition as AioTopicPartition
from attrs import frozen

TIMEOUT_S = 90.0
FETCH_BYTES = 1 << 20
"""The clients' own default, of a partition in an answer."""
Headers = tuple[tuple[str, bytes | None], ...]


@frozen
class Message:
    """What a client produces or got."""

    value: bytes | None = None
    key: bytes | None = None
    headers: Headers = ()
    partition: int = 0
    timestamp: int | None = None
    offset: int = -1


class GroupMember(Protocol):
    """One consumer of a group."""

    def poll(self, timeout_s: float) -> list[Message]: ...
    def assignment(self) -> set[int]: ...
    def commit(self) -> None: ...
    def close(self) -> None: ...


class ClientAdapter(Protocol):
    """What the stories need of a client."""

    name: str
    codecs: Sequence[str]

    def create_topic(self, topic: str, partitions: int, configs: dict[str, str]) -> None: ...
    def delete_topic(self, topic: str) -> None: ...
    def topics(self) -> dict[str, int]: ...
    def produce(
        self, topic: str, messages: Sequence[Message], *, codec: str, idempotent: bool
    ) -> list[int]: ...
    def read(
        self, topic: str, partition: int, offset: int, count: int, *, fetch_bytes: int = FETCH_BYTES
    ) -> list[Message]: ...
    def offset_at(self, topic: str, partition: int, timestamp: int) -> int | None: ...
    def member(self, group: str, topic: str) -> GroupMember: ...


# ---- confluent-kafka (librdkafka) ----


def _of_confluent(message: Any) -> Message:
    assert message.error() is None, message.error()
    return Message(
        message.value(),
        message.key(),
        tuple(message.headers() or ()),
        message.partition(),
        message.timestamp()[1],
        message.offset(),
    )


class ConfluentMember:
    def __init__(self, bootstrap: str, group: str, topic: str) -> None:
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 6000,
                "heartbeat.interval.ms": 300,
            }
        )
        self._consumer.subscribe([topic])

    def poll(self, timeout_s: float) -> list[Message]:
        return [_of_confluent(m) for m in self._consumer.consume(500, timeout_s)]

    def assignment(self) -> set[int]:
        return {tp.partition for tp in self._consumer.assignment()}

    def commit(self) -> None:
        self._consumer.commit(asynchronous=False)

    def close(self) -> None:
        self._consumer.close()


class Confluent:
    name = "confluent-kafka"
    codecs = ("none", "gzip", "snappy", "lz4", "zstd")

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": bootstrap})

    def create_topic(self, topic: str, partitions: int, configs: dict[str, str]) -> None:
        new = confluent_kafka.admin.NewTopic(topic, partitions, config=configs)
        self._admin.create_topics([new])[topic].result(TIMEOUT_S)

    def delete_topic(self, topic: str) -> None:
        self._admin.delete_topics([topic])[topic].result(TIMEOUT_S)

    def topics(self) -> dict[str, int]:
        told = self._admin.list_topics(timeout=TIMEOUT_S).topics
        return {name: len(topic.partitions) for name, topic in told.items()}

    def produce(
        self, topic: str, messages: Sequence[Message], *, codec: str, idempotent: bool
    ) -> list[int]:
        offsets: list[int] = []
        errors: list[str] = []

        def on_delivery(error: Any, message: Any) -> None:
            if error is None:
                offsets.append(message.offset())
            else:
                errors.append(str(error))

        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "compression.type": codec,
                "enable.idempotence": idempotent,
                "acks": "all",
                "message.max.bytes": 2_000_000,
                "linger.ms": 5,
            }
        )
        for m in messages:
            extra = {} if m.timestamp is None else {"timestamp": m.timestamp}
            producer.produce(
                topic,
                m.value,
                m.key,
                m.partition,
                headers=list(m.headers),
                on_delivery=on_delivery,
                **extra,
            )
        assert producer.flush(TIMEOUT_S) == 0
        assert not errors, errors[:3]
        return offsets

    def read(
        self, topic: str, partition: int, offset: int, count: int, *, fetch_bytes: int = FETCH_BYTES
    ) -> list[Message]:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": "unused",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 100,
                "fetch.message.max.bytes": fetch_bytes,
            }
        )
        try:
            consumer.assign([confluent_kafka.TopicPartition(topic, partition, offset)])
            found: list[Message] = []
            deadline = time.monotonic() + TIMEOUT_S
            while len(found) < count and time.monotonic() < deadline:
                found += [_of_confluent(m) for m in consumer.consume(1000, 0.5)]
            return found[:count]
        finally:
            consumer.close()

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int | None:
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": self._bootstrap, "group.id": "unused"}
        )
        try:
            wanted = confluent_kafka.TopicPartition(topic, partition, timestamp)
            (told,) = consumer.offsets_for_times([wanted], timeout=TIMEOUT_S)
            return None if told.offset == confluent_kafka.OFFSET_END else told.offset
        finally:
            consumer.close()

    def member(self, group: str, topic: str) -> GroupMember:
        return ConfluentMember(self._bootstrap, group, topic)


# ---- kafka-python ----


def _of_kafka_python(record: Any) -> Message:
    return Message(
        record.value,
        record.key,
        tuple(record.headers),
        record.partition,
        record.timestamp,
        record.offset,
    )


class KafkaPythonMember:
    def __init__(self, bootstrap: str, group: str, topic: str) -> None:
        self._consumer = kafka.KafkaConsumer(
            topic,
            bootstrap_servers=bootstrap.split(","),
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=6000,
            heartbeat_interval_ms=300,
            # A leader that made its plan before it knew the topic looks again only at this age.
            metadata_max_age_ms=1000,
        )

    def poll(self, timeout_s: float) -> list[Message]:
        told = self._consumer.poll(timeout_ms=int(timeout_s * 1e3))
        # kafka-python 3.0.12 forgets a rejoin that its leader began for news of the topic and that
        # outlasted the poll: the answered join is never taken up, and no heartbeat follows.
        coordinator = self._consumer._coordinator
        if coordinator.rejoining and not coordinator.need_rejoin():
            coordinator.request_rejoin()
        return [_of_kafka_python(r) for records in told.values() for r in records]

    def assignment(self) -> set[int]:
        return {tp.partition for tp in self._consumer.assignment()}

    def commit(self) -> None:
        self._consumer.commit()

    def close(self) -> None:
        self._consumer.close(autocommit=False)


class KafkaPython:
    name = "kafka-python"
    codecs = ("none", "gzip")

    def __init__(self, bootstrap: str) -> None:
        self._servers = bootstrap.split(",")
        self._bootstrap = bootstrap

    def create_topic(self, topic: str, partitions: int, configs: dict[str, str]) -> None:
        admin = kafka.KafkaAdminClient(bootstrap_servers=self._servers)
        try:
            new = kafka.admin.NewTopic(topic, partitions, -1, topic_configs=configs)
            admin.create_topics([new], timeout_ms=int(TIMEOUT_S * 1e3))
        finally:
            admin.close()

    def delete_topic(self, topic: str) -> None:
        admin = kafka.KafkaAdminClient(bootstrap_servers=self._servers)
        try:
            admin.delete_topics([topic], timeout_ms=int(TIMEOUT_S * 1e3))
        finally:
            admin.close()

    def topics(self) -> dict[str, int]:
        consumer = kafka.KafkaConsumer(bootstrap_servers=self._servers)
        try:
            return {t: len(consumer.partitions_for_topic(t) or ()) for t in consumer.topics()}
        finally:
            consumer.close()

    def produce(
        self, topic: str, messages: Sequence[Message], *, codec: str, idempotent: bool
    ) -> list[int]:
        producer = kafka.KafkaProducer(
            bootstrap_servers=self._servers,
            compression_type=None if codec == "none" else codec,
            enable_idempotence=idempotent,
            acks="all",
            linger_ms=5,
            max_request_size=4_000_000,
        )
        try:
            futures = [
                producer.send(
                    topic,
                    value=m.value,
                    key=m.key,
                    headers=list(m.headers),
                    partition=m.partition,
                    timestamp_ms=m.timestamp,
                )
                for m in messages
            ]
            producer.flush(TIMEOUT_S)
            return [future.get(TIMEOUT_S).offset for future in futures]
        finally:
            producer.close()

    def read(
        self, topic: str, partition: int, offset: int, count: int, *, fetch_bytes: int = FETCH_BYTES
    ) -> list[Message]:
        consumer = kafka.KafkaConsumer(
            bootstrap_servers=self._servers,
            enable_auto_commit=False,
            fetch_max_wait_ms=100,
            max_partition_fetch_bytes=fetch_bytes,
        )
        try:
            where = kafka.TopicPartition(topic, partition)
            consumer.assign([where])
            consumer.seek(where, offset)
            found: list[Message] = []
            deadline = time.monotonic() + TIMEOUT_S
            while len(found) < count and time.monotonic() < deadline:
                for records in consumer.poll(timeout_ms=500).values():
                    found += [_of_kafka_python(r) for r in records]
            return found[:count]
        finally:
            consumer.close()

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int | None:
        consumer = kafka.KafkaConsumer(bootstrap_servers=self._servers)
        try:
            where = kafka.TopicPartition(topic, partition)
            told = consumer.offsets_for_times({where: timestamp})[where]
            return None if told is None else int(told.offset)
        finally:
            consumer.close()

    def member(self, group: str, topic: str) -> GroupMember:
        return KafkaPythonMember(self._bootstrap, group, topic)


# ---- aiokafka ----


class Loop:
    """An asyncio loop in a thread, so that a synchronous story can use an asynchronous client."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 2 * TIMEOUT_S) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()


def _of_aiokafka(record: Any) -> Message:
    return Message(
        record.value,
        record.key,
        tuple(record.headers),
        record.partition,
        record.timestamp,
        record.offset,
    )


class AioKafkaMember:
    def __init__(self, loop: Loop, bootstrap: str, group: str, topic: str) -> None:
        self._loop = loop

        async def start() -> AIOKafkaConsumer:
            consumer = AIOKafkaConsumer(
                topic,
                bootstrap_servers=bootstrap,
                group_id=group,
                auto_offset_reset="earliest",
                enable_auto_commit=False,
                session_timeout_ms=6000,
                heartbeat_interval_ms=300,
            )
            await consumer.start()
            return consumer

        self._consumer = loop.run(start())

    def poll(self, timeout_s: float) -> list[Message]:
        told = self._loop.run(self._consumer.getmany(timeout_ms=int(timeout_s * 1e3)))
        return [_of_aiokafka(r) for records in told.values() for r in records]

    def assignment(self) -> set[int]:
        return {tp.partition for tp in self._consumer.assignment()}

    def commit(self) -> None:
        self._loop.run(self._consumer.commit())

    def close(self) -> None:
        self._loop.run(self._consumer.stop())


class AioKafka:
    name = "aiokafka"
    codecs = ("none", "gzip")

    def __init__(self, bootstrap: str, loop: Loop) -> None:
        self._bootstrap = bootstrap
        self._loop = loop

    async def _with_admin(self, method: str, *arguments: Any) -> Any:
        admin = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap)
        await admin.start()
        try:
            return await getattr(admin, method)(*arguments)
        finally:
            await admin.close()

    def create_topic(self, topic: str, partitions: int, configs: dict[str, str]) -> None:
        new = AioNewTopic(topic, partitions, 3, topic_configs=configs)
        self._loop.run(self._with_admin("create_topics", [new]))

    def delete_topic(self, topic: str) -> None:
        self._loop.run(self._with_admin("delete_topics", [topic]))

    def topics(self) -> dict[str, int]:
        rows = self._loop.run(self._with_admin("describe_topics"))
        return {row["topic"]: len(row["partitions"]) for row in rows}

    def produce(
        self, topic: str, messages: Sequence[Message], *, codec: str, idempotent: bool
    ) -> list[int]:
        async def work() -> list[int]:
            producer = AIOKafkaProducer(
                bootstrap_servers=self._bootstrap,
                compression_type=None if codec == "none" else codec,
                enable_idempotence=idempotent,
                acks="all",
                linger_ms=5,
                max_request_size=4_000_000,
                max_batch_size=1_000_000,
            )
            await producer.start()
            try:
                futures = [
                    await producer.send(
                        topic,
                        value=m.value,
                        key=m.key,
                        headers=list(m.headers),
                        partition=m.partition,
                        timestamp_ms=m.timestamp,
                    )
                    for m in messages
                ]
                return [(await future).offset for future in futures]
            finally:
                await producer.stop()

        offsets: list[int] = self._loop.run(work())
        return offsets

    def read(
        self, topic: str, partition: int, offset: int, count: int, *, fetch_bytes: int = FETCH_BYTES
    ) -> list[Message]:
        async def work() -> list[Message]:
            consumer = AIOKafkaConsumer(
                bootstrap_servers=self._bootstrap,
                enable_auto_commit=False,
                fetch_max_wait_ms=100,
                max_partition_fetch_bytes=fetch_bytes,
            )
            await consumer.start()
            try:
                where = AioTopicPartition(topic, partition)
                consumer.assign([where])
                consumer.seek(where, offset)
                found: list[Message] = []
                deadline = time.monotonic() + TIMEOUT_S
                while len(found) < count and time.monotonic() < deadline:
                    told = await consumer.getmany(timeout_ms=500)
                    found += [_of_aiokafka(r) for records in told.values() for r in records]
                return found[:count]
            finally:
                await consumer.stop()

        messages: list[Message] = self._loop.run(work())
        return messages

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int | None:
        async def work() -> int | None:
            consumer = AIOKafkaConsumer(bootstrap_servers=self._bootstrap)
            await consumer.start()
            try:
                where = AioTopicPartition(topic, partition)
                told = (await consumer.offsets_for_times({where: timestamp}))[where]
                return None if told is None else int(told.offset)
            finally:
                await consumer.stop()

        offset: int | None = self._loop.run(work())
        return offset

    def member(self, group: str, topic: str) -> GroupMember:
        return AioKafkaMember(self._loop, self._bootstrap, group, topic)


def elect_preferred(admin: Any, topic: str) -> int:
    """Have kafka-python ask for the preferred leader of partition 0; who leads then.

    That node may not be in sync yet, after a move or on a busy machine: ask again.
    """
    with suppress(kafka.errors.PreferredLeaderNotAvailableError):
        admin.elect_leaders(0, {topic: [0]})
    (told,) = admin.describe_topics([topic])
    return int(told["partitions"][0]["leader_id"])


_KAFKA_PYTHON = """
import json, logging, sys
from kafka import KafkaProducer
logging.basicConfig(level=logging.WARNING)
KafkaProducer(**json.load(sys.stdin), bootstrap_timeout_ms=60_000)
"""


def is_told_by_kafka_python(settings: Mapping[str, object], text: str) -> bool:
    """Whether the log of a producer says so that cannot come in: the error only says that it came
    to nothing. In a process of its own, for it leaves sockets open where it fails."""
    return is_told([sys.executable, "-c", _KAFKA_PYTHON], text, json.dumps(settings))


def is_told(words: list[str], text: str, said: str = "") -> bool:
    """True as soon as a program says it, which tries on for longer than a busy machine needs: how
    soon it is told is not what is tested. False when it ends without."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stderr is not None
        program.stdin.write(said)
        program.stdin.close()
        try:
            return any(text in line for line in program.stderr)
        finally:
            program.kill()


__all__ = [
    "AioKafka",
    "ClientAdapter",
    "Confluent",
    "GroupMember",
    "KafkaPython",
    "elect_preferred",
    "is_told",
    "is_told_by_kafka_python",
]
