"""A client in a process of its own, to be killed: `python -m tests.client.kill_clients JSON`.

It writes what happens to it into a file, a line at a time and with nothing buffered here, so that
what was written before a kill -9 is there after it. SIGTERM ends it in order.

    a PARTITION OFFSET NUMBER   a record was acknowledged
    f NUMBER OUTCOME WHY        it was not
    n NUMBER                    so many were given to the producer, all told
    + PARTITION ... / - PARTITION ...   partitions came, or were given up
    h PARTITION OFFSET NUMBER   a record was handed out
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import anyio
import msgspec

from raftmq_client import ClientError, Outcome, aio, blocking

PADDING = b" " + b"x" * 80


class Order(msgspec.Struct, frozen=True):
    """What to be."""

    role: str
    """`producer` or `consumer`."""
    driver: str
    bootstrap: str
    topic: str
    diary: str
    first: int = 0
    """Numbers of a producer's records begin here."""
    count: int = 1 << 60
    rate: float = 500.0
    settings: dict[str, Any] = {}


class Client:
    """What both have: a diary, and an end when told."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.must_end = False
        self._diary = os.open(order.diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, *_: object) -> None:
        self.must_end = True

    def write(self, *lines: str) -> None:
        """Into the diary, at once."""
        if lines:
            os.write(self._diary, ("\n".join(lines) + "\n").encode())


class Producing(Client):
    """Sends numbers and notes what becomes of each."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self._settled: list[str] = []
        self._began = time.monotonic()
        self.sent = 0

    def note(self) -> None:
        """Write what was settled."""
        settled, self._settled = self._settled, []
        self.write(*settled)

    @property
    def due(self) -> int:
        """How many more are to be sent by now."""
        goal = int((time.monotonic() - self._began) * self.order.rate) + 1
        return max(0, min(goal, self.order.count) - self.sent)

    @property
    def is_over(self) -> bool:
        """True when nothing more is to be sent."""
        return self.must_end or self.sent >= self.order.count

    def next(self) -> tuple[bytes, Callable[[Any], None]]:
        """A value, and who listens for its receipt."""
        number = self.order.first + self.sent
        self.sent += 1

        def heard(receipt: Any) -> None:
            if receipt.outcome is Outcome.OK:
                place = receipt.place
                self._settled.append(f"a {place.partition} {place.offset} {number}")
            else:
                self._settled.append(f"f {number} {receipt.outcome.name} {receipt.error!r}")

        return b"%d" % number + PADDING, heard

    async def run(self, producer: Any, pause: Callable[[float], Any]) -> None:
        """Send until told otherwise, and flush."""
        topic = self.order.topic
        while not self.is_over:
            for _ in range(min(self.due, 2_000)):
                value, heard = self.next()
                await _finish(producer.send(topic, value, on_delivery=heard))
            self.note()
            await _finish(pause(0.005))
        await _finish(producer.flush())
        self.note()
        self.write(f"n {self.sent}")


class Consuming(Client):
    """Polls and notes what is handed out."""

    def came(self, partitions: Any) -> None:
        """Partitions were assigned."""
        self.write("+ " + " ".join(str(key.partition) for key in partitions))

    def went(self, partitions: Any) -> None:
        """Partitions are given up."""
        self.write("- " + " ".join(str(key.partition) for key in partitions))

    async def run(self, consumer: Any) -> None:
        """Poll until told otherwise. What may be tried again is tried again."""
        while not self.must_end:
            try:
                records = await _finish(consumer.poll(0.2, 2_000))
            except ClientError as error:
                if not error.retriable:
                    raise
                self.write(f"! {error!r}")
                continue
            self.write(*(f"h {r.partition} {r.offset} {int(r.value.split()[0])}" for r in records))


async def _finish(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


async def _drive(order: Order) -> None:
    """Run a client; of the blocking driver nothing is ever awaited."""
    is_blocking = order.driver == "blocking"
    library: Any = blocking if is_blocking else aio
    if order.role == "producer":
        producing = Producing(order)
        made = library.Producer(order.bootstrap, **order.settings)
        if is_blocking:
            with made as producer:
                await producing.run(producer, time.sleep)
        else:
            async with made as producer:
                await producing.run(producer, anyio.sleep)
        return
    consuming = Consuming(order)
    made = library.Consumer(
        order.bootstrap,
        topics=[order.topic],
        on_assigned=consuming.came,
        on_revoked=consuming.went,
        **order.settings,
    )
    if is_blocking:
        with made as consumer:
            await consuming.run(consumer)
    else:
        async with made as consumer:
            await consuming.run(consumer)


def main(text: str) -> None:
    """Be what the order says."""
    order = msgspec.json.decode(text, type=Order)
    if order.driver == "blocking":
        running = _drive(order)
        try:
            running.send(None)
        except StopIteration:
            return
        raise AssertionError("the blocking driver awaited something")
    anyio.run(_drive, order, backend=order.driver)


if __name__ == "__main__":
    main(sys.argv[1])
