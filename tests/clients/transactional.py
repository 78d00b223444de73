"""Transactions of stock clients behind one face, so that each story is told once for all of them.

What a client refuses is a `RefusedError` with its own words; nothing here knows raftmq. Java and
franz-go speak the second protocol of transactions (KIP-890), and our own client does; the others
the first.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import confluent_kafka
import kafka
import kafka.errors
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError as AioKafkaError
from aiokafka.structs import TopicPartition as AioTopicPartition
from kafka.structs import OffsetAndMetadata

from raftmq.types import TopicPartition
from raftmq_client import ClientError
from raftmq_client.blocking import Consumer, Producer
from raftmq_client.blocking.producer import Transaction
from tests.clients.adapters import Loop
from tests.clients.programs import transactions_program

WAIT_S = 60.0
QUIET_S = 1.0
"""For so long nothing more comes to a reader that is held back."""
FIRST, SECOND = "first", "second"


class RefusedError(Exception):
    """The client says no."""


class Transactor(Protocol):
    """One transactional producer, of partition 0 of its topics."""

    def begin(self) -> None: ...
    def send(self, topic: str, value: str) -> None:
        """Return once it is in the log."""

    def send_many(self, topic: str, values: list[str]) -> None:
        """Without waiting for one before the next; return once all are in the log."""

    def offsets(self, group: str, topic: str, offset: int) -> None: ...
    def commit(self) -> None: ...
    def abort(self) -> None: ...


class Client(Protocol):
    """One client, and what it opened."""

    name: str

    def open(
        self, name: str, *, timeout_ms: int = 60_000, request_ms: int = 30_000
    ) -> Transactor: ...

    def read(self, topic: str, until: str | None, isolation: str) -> list[str]:
        """Values from the beginning up to `until`; without it, what there is to be seen now."""

    def copy(self, source: str, target: str, group: str, name: str, count: int) -> None:
        """As a member of a group, write `<value>` for each of so many records, two a transaction.

        Each second transaction is aborted, and what it read is read again.
        """

    def close(self) -> None: ...


def until_quiet(poll: Callable[[], list[str]], until: str | None) -> list[str]:
    """What `poll` gives, up to a value or until it gives nothing more."""
    found: list[str] = []
    began = last = time.monotonic()
    while until not in found:
        more = poll()
        found += more
        now = time.monotonic()
        last = now if more else last
        if until is None and now - last > QUIET_S:
            break
        assert until is None or now - began < WAIT_S, f"no {until} in {found}"
    return found


# ---- kafka-python ----


@contextlib.contextmanager
def _of_kafka_python() -> Iterator[None]:
    try:
        yield
    except kafka.errors.KafkaError as error:
        raise RefusedError(repr(error)) from error


class KafkaPythonTransactor:
    def __init__(self, made: Any) -> None:
        self.made = made

    def begin(self) -> None:
        with _of_kafka_python():
            self.made.begin_transaction()

    def send(self, topic: str, value: str) -> None:
        self.send_many(topic, [value])

    def send_many(self, topic: str, values: list[str]) -> None:
        with _of_kafka_python():
            for future in [self.made.send(topic, v.encode(), partition=0) for v in values]:
                future.get(WAIT_S)

    def offsets(self, group: str, topic: str, offset: int) -> None:
        where = {kafka.TopicPartition(topic, 0): OffsetAndMetadata(offset, "", -1)}
        with _of_kafka_python():
            self.made.send_offsets_to_transaction(where, group)

    def commit(self) -> None:
        with _of_kafka_python():
            self.made.commit_transaction()

    def abort(self) -> None:
        with _of_kafka_python():
            self.made.abort_transaction()


class KafkaPythonClient:
    name = "kafka-python"

    def __init__(self, bootstrap: str) -> None:
        self._servers = bootstrap.split(",")
        self._opened: list[Any] = []

    def open(
        self, name: str, *, timeout_ms: int = 60_000, request_ms: int = 30_000
    ) -> KafkaPythonTransactor:
        made = kafka.KafkaProducer(
            bootstrap_servers=self._servers,
            transactional_id=name,
            transaction_timeout_ms=timeout_ms,
            request_timeout_ms=request_ms,
        )
        self._opened.append(made)
        with _of_kafka_python():
            made.init_transactions()
        return KafkaPythonTransactor(made)

    def read(self, topic: str, until: str | None, isolation: str) -> list[str]:
        where = kafka.TopicPartition(topic, 0)
        reader = kafka.KafkaConsumer(
            bootstrap_servers=self._servers, isolation_level=isolation, auto_offset_reset="earliest"
        )
        try:
            reader.assign([where])
            return until_quiet(
                lambda: [r.value.decode() for r in reader.poll(200).get(where, [])], until
            )
        finally:
            reader.close()

    def copy(self, source: str, target: str, group: str, name: str, count: int) -> None:
        made = self.open(name)
        where = kafka.TopicPartition(source, 0)
        member = kafka.KafkaConsumer(
            source,
            bootstrap_servers=self._servers,
            group_id=group,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        try:
            done, turn = 0, 0
            while done < count:
                records = member.poll(500, max_records=2).get(where, [])
                if not records:
                    continue
                made.begin()
                made.send_many(target, [f"<{r.value.decode()}>" for r in records])
                place = OffsetAndMetadata(records[-1].offset + 1, "", -1)
                made.made.send_offsets_to_transaction({where: place}, member.group_metadata())
                turn += 1
                if turn % 2:
                    made.abort()
                    member.seek(where, records[0].offset)
                else:
                    made.commit()
                    done += len(records)
        finally:
            member.close()

    def close(self) -> None:
        for made in self._opened:
            made.close(timeout=1)


# ---- aiokafka ----


class AioKafkaTransactor:
    def __init__(self, loop: Loop, made: AIOKafkaProducer) -> None:
        self._loop = loop
        self.made = made

    def run(self, work: Any) -> Any:
        try:
            return self._loop.run(work)
        except AioKafkaError as error:
            raise RefusedError(repr(error)) from error

    def begin(self) -> None:
        self.run(self.made.begin_transaction())

    def send(self, topic: str, value: str) -> None:
        self.send_many(topic, [value])

    def send_many(self, topic: str, values: list[str]) -> None:
        async def work() -> None:
            for future in [await self.made.send(topic, v.encode(), partition=0) for v in values]:
                await future

        self.run(work())

    def offsets(self, group: str, topic: str, offset: int) -> None:
        where = {AioTopicPartition(topic, 0): offset}
        self.run(self.made.send_offsets_to_transaction(where, group))

    def commit(self) -> None:
        self.run(self.made.commit_transaction())

    def abort(self) -> None:
        self.run(self.made.abort_transaction())


class AioKafkaClient:
    name = "aiokafka"

    def __init__(self, bootstrap: str, loop: Loop) -> None:
        self._bootstrap, self._loop = bootstrap, loop
        self._opened: list[AioKafkaTransactor] = []

    def open(
        self, name: str, *, timeout_ms: int = 60_000, request_ms: int = 30_000
    ) -> AioKafkaTransactor:
        async def start() -> AIOKafkaProducer:
            made = AIOKafkaProducer(
                bootstrap_servers=self._bootstrap,
                transactional_id=name,
                transaction_timeout_ms=timeout_ms,
                request_timeout_ms=request_ms,
            )
            await made.start()
            return made

        opened = AioKafkaTransactor(self._loop, self._loop.run(start()))
        self._opened.append(opened)
        return opened

    def read(self, topic: str, until: str | None, isolation: str) -> list[str]:
        async def start() -> AIOKafkaConsumer:
            reader = AIOKafkaConsumer(
                bootstrap_servers=self._bootstrap,
                isolation_level=isolation,
                auto_offset_reset="earliest",
                enable_auto_commit=False,
            )
            await reader.start()
            reader.assign([AioTopicPartition(topic, 0)])
            return reader

        reader = self._loop.run(start())

        def poll() -> list[str]:
            told = self._loop.run(reader.getmany(timeout_ms=200))
            return [r.value.decode() for records in told.values() for r in records]

        try:
            return until_quiet(poll, until)
        finally:
            self._loop.run(reader.stop())

    def copy(self, source: str, target: str, group: str, name: str, count: int) -> None:
        made = self.open(name)
        where = AioTopicPartition(source, 0)

        async def start() -> AIOKafkaConsumer:
            member = AIOKafkaConsumer(
                source,
                bootstrap_servers=self._bootstrap,
                group_id=group,
                isolation_level="read_committed",
                auto_offset_reset="earliest",
                enable_auto_commit=False,
            )
            await member.start()
            return member

        member = self._loop.run(start())
        try:
            done, turn = 0, 0
            while done < count:
                told = self._loop.run(member.getmany(timeout_ms=500, max_records=2))
                records = [r for found in told.values() for r in found]
                if not records:
                    continue
                made.begin()
                made.send_many(target, [f"<{r.value.decode()}>" for r in records])
                made.offsets(group, source, records[-1].offset + 1)
                turn += 1
                if turn % 2:
                    made.abort()
                    member.seek(where, records[0].offset)
                else:
                    made.commit()
                    done += len(records)
        finally:
            self._loop.run(member.stop())

    def close(self) -> None:
        for opened in self._opened:
            with contextlib.suppress(AioKafkaError):  # a fenced one says so once more
                self._loop.run(opened.made.stop())


# ---- our own ----


class OwnTransactor:
    def __init__(self, made: Producer) -> None:
        self.made = made
        self._open: Transaction[bytes, bytes] | None = None

    @property
    def _transaction(self) -> Transaction[bytes, bytes]:
        assert self._open is not None
        return self._open

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            raise RefusedError(repr(error)) from error

    def begin(self) -> None:
        with self._refusals():
            self._open = self.made.begin()

    def send(self, topic: str, value: str) -> None:
        self.send_many(topic, [value])

    def send_many(self, topic: str, values: list[str]) -> None:
        with self._refusals():
            sent = [self._transaction.send(topic, v.encode(), partition=0) for v in values]
            for receipt in sent:
                receipt.result(WAIT_S)

    def offsets(self, group: str, topic: str, offset: int) -> None:
        with self._refusals():
            self._transaction.commit_offsets(group, {TopicPartition(topic, 0): offset})

    def commit(self) -> None:
        with self._refusals():
            self._transaction.commit()

    def abort(self) -> None:
        with self._refusals():
            self._transaction.abort()


class OwnClient:
    name = "raftmq"

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._opened: list[Producer] = []

    def open(
        self, name: str, *, timeout_ms: int = 60_000, request_ms: int = 30_000
    ) -> OwnTransactor:
        made = Producer(
            self._bootstrap,
            transactional_id=name,
            transaction_timeout_ms=timeout_ms,
            request_timeout_ms=request_ms,
            batch_bytes=1,  # a batch for each record, five of them under way
        )
        self._opened.append(made)
        opened = OwnTransactor(made)
        # Its id is its own once the first transaction has begun.
        opened.begin()
        opened.abort()
        return opened

    def read(self, topic: str, until: str | None, isolation: str) -> list[str]:
        with Consumer(self._bootstrap, isolation=isolation) as reader:
            reader.assign({TopicPartition(topic, 0): 0})
            return until_quiet(
                lambda: [r.value.decode() for r in reader.poll(0.2) if r.value is not None], until
            )

    def copy(self, source: str, target: str, group: str, name: str, count: int) -> None:
        made = self.open(name).made
        with Consumer(
            self._bootstrap, group=group, reset="earliest", delivery="exactly_once"
        ) as member:
            member.subscribe([source])
            done, turn = 0, 0
            while done < count:
                records = list(member.poll(0.5, 2))
                if not records:
                    continue
                transaction = made.begin(member)
                for record in records:
                    value = b"<" + (record.value or b"") + b">"
                    transaction.send(target, value, partition=0).result(WAIT_S)
                turn += 1
                if turn % 2:
                    transaction.abort()
                else:
                    transaction.commit()
                    done += len(records)

    def close(self) -> None:
        for made in self._opened:
            with contextlib.suppress(ClientError):
                made.close(flush=False)


# ---- programs of other languages ----


class RemoteTransactor:
    def __init__(self, client: RemoteClient, name: str) -> None:
        self._client, self._name = client, name

    def _ask(self, **words: Any) -> Any:
        return self._client.ask(producer=self._name, **words)

    def begin(self) -> None:
        self._ask(do="begin")

    def send(self, topic: str, value: str) -> None:
        self.send_many(topic, [value])

    def send_many(self, topic: str, values: list[str]) -> None:
        self._ask(do="send", topic=topic, values=values)

    def offsets(self, group: str, topic: str, offset: int) -> None:
        self._ask(do="offsets", group=group, topic=topic, offset=offset)

    def commit(self) -> None:
        self._ask(do="commit")

    def abort(self) -> None:
        self._ask(do="abort")


class RemoteClient:
    """A program that does one command after the other: a JSON line in, one out."""

    def __init__(self, name: str, bootstrap: str) -> None:
        self.name = name
        self._bootstrap = bootstrap
        self._opened = 0
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            transactions_program(name), stdin=pipe, stdout=pipe, text=True, bufsize=1
        )

    def ask(self, **words: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"bootstrap": self._bootstrap, **words}) + "\n")
        stdin.flush()
        line = stdout.readline()
        assert line, f"{self.name} ended with {self._process.wait(10)}"
        answer = json.loads(line)
        if "error" in answer:
            raise RefusedError(answer["error"])
        return answer.get("values")

    def open(
        self, name: str, *, timeout_ms: int = 60_000, request_ms: int = 30_000
    ) -> RemoteTransactor:
        self._opened += 1
        key = f"{self._opened}"
        self.ask(do="open", producer=key, id=name, timeout_ms=timeout_ms, request_ms=request_ms)
        return RemoteTransactor(self, key)

    def read(self, topic: str, until: str | None, isolation: str) -> list[str]:
        quiet_ms = int(QUIET_S * 1000)
        words = {"topic": topic, "until": until, "isolation": isolation, "quiet_ms": quiet_ms}
        found: list[str] = self.ask(do="read", **words)
        return found

    def copy(self, source: str, target: str, group: str, name: str, count: int) -> None:
        self.ask(do="copy", source=source, target=target, group=group, id=name, count=count)

    def close(self) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.close()
        self._process.kill()
        self._process.wait(WAIT_S)
        stdout.close()


def send_plain(bootstrap: str, topic: str, *values: str) -> None:
    """By an idempotent producer without transactions."""
    made = confluent_kafka.Producer(
        {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 0}
    )
    for value in values:
        made.produce(topic, value.encode(), partition=0)
    assert made.flush(WAIT_S) == 0


def open_client(name: str, bootstrap: str, loop: Loop) -> Client:
    """A client by its name."""
    if name == "aiokafka":
        return AioKafkaClient(bootstrap, loop)
    if name == "kafka-python":
        return KafkaPythonClient(bootstrap)
    if name == "raftmq":
        return OwnClient(bootstrap)
    return RemoteClient(name, bootstrap)
