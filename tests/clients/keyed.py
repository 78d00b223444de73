"""A stock producer of each client under a load of keyed records, and what became of each record.

A `Keyed` producer sends without waiting and never stops for a failure; what it is told of a record
(the partition that it was placed on, and its offset or why it failed) comes when it comes. Records
are numbered: their values are their numbers, and `KEYS` keys take turns.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import confluent_kafka
import kafka
import kafka.partitioner
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError as AioKafkaError
from aiokafka.partitioner import DefaultPartitioner as AioPartitioner
from attrs import frozen

from tests.clients.adapters import Loop
from tests.clients.programs import Program
from tests.live.harness import wait_until

KEYS = 60
METADATA_MS = 500
"""The age of metadata at which a producer asks again."""
TIMEOUT_MS = 6_000
"""For so long a producer tries to send a record, where it can be told."""
TICK_S = 0.01


@frozen
class Told:
    """What a client said of a record that it had placed."""

    partition: int
    offset: int = -1
    error: str = ""


Tell = Callable[[int, Told], None]


class Keyed(Protocol):
    """A producer of keyed records."""

    def send(self, number: int) -> None: ...
    def hear(self) -> None:
        """Let it call back, where that is not a thread's of its own."""

    def close(self) -> None:
        """Return once every record was told of."""


def key_of(number: int) -> str:
    return f"key-{number % KEYS}"


class OfConfluent:
    """librdkafka, with the partitioner that Java has."""

    def __init__(self, bootstrap: str, topic: str, tell: Tell) -> None:
        self._topic = topic
        self._tell = tell
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "message.timeout.ms": TIMEOUT_MS,
                "topic.metadata.refresh.interval.ms": METADATA_MS,
            }
        )

    def send(self, number: int) -> None:
        def told(error: Any, message: Any) -> None:
            where = message.partition()
            self._tell(
                number,
                Told(where, message.offset()) if error is None else Told(where, error=error.name()),
            )

        self._producer.produce(self._topic, str(number), key_of(number), on_delivery=told)

    def hear(self) -> None:
        self._producer.poll(0)

    def close(self) -> None:
        assert self._producer.flush(60) == 0


class OfKafkaPython:
    """Not idempotent: 3.0.12 gives its producer id up when a batch that it has tried runs out of
    time, never asks for another, and sends nothing any more."""

    def __init__(self, bootstrap: str, topic: str, tell: Tell) -> None:
        self._topic = topic
        self._tell = tell
        self._producer = kafka.KafkaProducer(
            bootstrap_servers=bootstrap.split(","),
            enable_idempotence=False,
            acks="all",
            metadata_max_age_ms=METADATA_MS,
            delivery_timeout_ms=TIMEOUT_MS,
            request_timeout_ms=TIMEOUT_MS // 2,
        )

    def send(self, number: int) -> None:
        key, value = key_of(number).encode(), str(number).encode()
        future = self._producer.send(self._topic, value, key=key)
        where = future._produce_future.topic_partition.partition
        future.add_callback(lambda done: self._tell(number, Told(where, done.offset)))
        future.add_errback(lambda error: self._tell(number, Told(where, error=repr(error))))

    def hear(self) -> None:
        pass

    def close(self) -> None:
        self._producer.flush(60)
        self._producer.close()


class OfAioKafka:
    def __init__(self, loop: Loop, bootstrap: str, topic: str, tell: Tell) -> None:
        self._loop = loop
        self._topic = topic
        self._tell = tell
        self._chosen: dict[asyncio.Task[Any] | None, int] = {}
        self._placing: set[asyncio.Task[None]] = set()

        async def start() -> AIOKafkaProducer:
            producer = AIOKafkaProducer(
                bootstrap_servers=bootstrap,
                enable_idempotence=True,
                metadata_max_age_ms=METADATA_MS,
                request_timeout_ms=TIMEOUT_MS,
                partitioner=self._choose,
            )
            await producer.start()
            return producer

        self._producer = loop.run(start())

    def _choose(self, key: bytes | None, everything: Sequence[int], led: Sequence[int]) -> int:
        """As ever, and remembered: of a record that failed it is not told where it was placed."""
        chosen: int = AioPartitioner()(key, everything, led)
        self._chosen[asyncio.current_task()] = chosen
        return chosen

    def send(self, number: int) -> None:
        async def begin() -> None:
            task = asyncio.create_task(self._place(number))
            self._placing.add(task)
            task.add_done_callback(self._placing.discard)

        self._loop.run(begin())

    async def _place(self, number: int) -> None:
        """Send a record, which waits while its partition has too many, and hear of it."""
        key, value = key_of(number).encode(), str(number).encode()
        task, offset, failure = asyncio.current_task(), -1, ""
        try:
            offset = (await self._producer.send_and_wait(self._topic, value, key=key)).offset
        except AioKafkaError as error:
            failure = repr(error)
        self._tell(number, Told(self._chosen.pop(task), offset, failure))

    def hear(self) -> None:
        pass

    def close(self) -> None:
        async def stop() -> None:
            if self._placing:
                await asyncio.wait(self._placing)
            await self._producer.stop()

        self._loop.run(stop())


class OfProgram:
    """A client of another language (`programs.py`)."""

    def __init__(self, program: Program, bootstrap: str, topic: str, tell: Tell) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            program.load_words(bootstrap, topic, METADATA_MS, TIMEOUT_MS),
            env=program.environment,
            stdin=pipe,
            stdout=pipe,
            text=True,
            bufsize=1,
        )
        self._tell = tell
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def send(self, number: int) -> None:
        assert self._process.stdin is not None
        line = json.dumps({"key": key_of(number), "value": str(number)})
        self._process.stdin.write(line + "\n")

    def hear(self) -> None:
        pass

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._thread.join()
            self._process.stdout.close()
        assert code == 0, f"it ended with {code}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            row = json.loads(line)
            told = Told(row["partition"], row["offset"], row.get("error", ""))
            self._tell(int(row["value"]), told)


class KeyedLoad:
    """One producer that writes in a thread of its own, and everything it was told."""

    def __init__(self, made: Callable[[Tell], Keyed], rate: int) -> None:
        self.sent = 0
        self.told: dict[int, Told] = {}
        self.twice: list[int] = []
        """Records that were told of more than once."""
        self._producer = made(self._note)
        self._rate = rate
        self._may_write = threading.Event()
        self._is_idle = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> KeyedLoad:
        self._may_write.set()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.stop()

    def _note(self, number: int, told: Told) -> None:
        if number in self.told:
            self.twice.append(number)
        self.told[number] = told

    def pause(self) -> None:
        """Send no more for now, and wait until everything that was sent was told of."""
        self._may_write.clear()
        assert self._is_idle.wait(60)
        wait_until(lambda: len(self.told) == self.sent, 60, "every record is told of")

    def go_on(self) -> None:
        self._is_idle.clear()
        self._may_write.set()

    def stop(self) -> None:
        """Send no more at all, and hear of everything."""
        self._is_over = True
        self._may_write.set()
        self._thread.join()
        self._producer.close()

    def wait_for(self, wanted: Callable[[Told], bool], count: int, what: str) -> None:
        """Until so many records that are sent from now on were told of as wanted."""
        since = self.sent

        def are_told() -> bool:
            told = [self.told.get(number) for number in range(since, self.sent)]
            return sum(1 for one in told if one is not None and wanted(one)) >= count

        wait_until(are_told, 60, what)

    def wait_for_keys(self) -> None:
        """Until a record of each key was told of, so that it is known where each is at home."""
        wait_until(lambda: all(n in self.told for n in range(KEYS)), 60, "a record of each key")

    def _run(self) -> None:
        next_s = time.monotonic()
        while not self._is_over:
            if self._may_write.is_set():
                for _ in range(max(1, int(self._rate * TICK_S))):
                    self._producer.send(self.sent)
                    self.sent += 1
            else:
                self._is_idle.set()
            self._producer.hear()
            next_s += TICK_S
            late_s = time.monotonic() - next_s
            if late_s < 0:
                time.sleep(-late_s)
            else:
                next_s += late_s


__all__ = ["Keyed", "KeyedLoad", "Told", "key_of"]
