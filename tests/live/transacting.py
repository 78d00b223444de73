"""Many transactional producers at once, and the reckoning: each transaction is wholly there or
wholly not, and the offset that was committed within it goes with its records.

A producer's transactions are numbered. Each writes its number to some partitions and commits it as
an offset of a partition of its own; so the records of one, and the offset of one, tell the same.
They are of our own client: librdkafka 2.16 may hang for ever in `send_offsets_to_transaction` when
metadata leaves a broker out that it is just dialling, as happens when all nodes begin again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import TracebackType
from typing import Any

from attrs import field, mutable
from confluent_kafka import Consumer, KafkaError
from confluent_kafka import TopicPartition as Place

from raftmq_client import EndUnknownError, MustAbortError, TopicPartition
from raftmq_client.blocking import Producer
from tests.live.harness import wait_until
from tests.live.load import create_topic

TARGET, SOURCE = "target", "source"
PARTITIONS = 6
RECORDS = 3
"""Of one transaction, each to another partition."""
GROUP = "readers"
SETTLE_S = 120.0


@mutable(eq=False)
class One:
    """A producer, as its thread left it."""

    number: int
    begun: int = 0
    committed: set[int] = field(factory=set)
    aborted: set[int] = field(factory=set)
    is_open: bool = False
    """A transaction of it is under way."""


class Transacting:
    """So many producers, each with one transaction after the other, and a pause between two."""

    def __init__(self, bootstrap: str, producers: int, pause_s: float = 0.0) -> None:
        create_topic(bootstrap, TARGET, PARTITIONS)
        create_topic(bootstrap, SOURCE, producers)
        self._bootstrap = bootstrap
        self.all = [One(number) for number in range(producers)]
        self._pause_s = pause_s
        self._go_on = threading.Event()
        self._is_over = False
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(one,), daemon=True) for one in self.all
        ]

    def __enter__(self) -> Transacting:
        self._go_on.set()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over = True
        self._go_on.set()
        if error is not None:
            return  # what they wait for may never come
        for thread in self._threads:
            thread.join(SETTLE_S)
        if self._failures:
            raise self._failures[0]

    @property
    def ended(self) -> int:
        """Transactions whose end is known."""
        return sum(len(one.committed) + len(one.aborted) for one in self.all)

    @property
    def open(self) -> int:
        """Transactions that are under way."""
        return sum(one.is_open for one in self.all)

    def wait_for(self, more: int, timeout_s: float = SETTLE_S) -> None:
        """Return once so many more transactions have ended."""
        end = self.ended + more
        wait_until(lambda: self._failures or self.ended >= end, timeout_s, f"{more} transactions")

    def go_on(self) -> None:
        """Begin new ones again."""
        self._go_on.set()

    def settle(self) -> None:
        """Begin no new ones, and return once the end of each is known."""
        self._go_on.clear()
        wait_until(lambda: self._failures or not self.open, SETTLE_S, "the end of each transaction")
        assert not self._failures, self._failures

    # ---- the threads ----

    def _guarded(self, one: One) -> None:
        try:
            while not self._is_over:
                self._serve(one)
        except BaseException as error:
            self._failures.append(error)
            one.is_open = False
            raise

    def _serve(self, one: One) -> None:
        """Go on with one producer until it cannot go on."""
        with Producer(
            self._bootstrap, transactional_id=f"one-{one.number}", max_block_ms=SETTLE_S * 1_000
        ) as producer:
            while True:
                self._go_on.wait()
                if self._is_over:
                    return
                self._transact(one, producer)
                one.is_open = False
                time.sleep(self._pause_s)

    def _transact(self, one: One, producer: Producer[Any, Any]) -> None:
        transaction = producer.begin()
        position = TopicPartition(SOURCE, one.number)
        one.begun += 1
        one.is_open = True
        end, told = transaction.commit, one.committed
        try:
            for number in range(RECORDS):
                partition = (one.number + one.begun + number) % PARTITIONS
                transaction.send(TARGET, b"%d %d" % (one.number, one.begun), partition=partition)
            transaction.commit_offsets(GROUP, {position: one.begun}, SETTLE_S)
        except MustAbortError:
            end, told = transaction.abort, one.aborted
        while True:
            try:
                end()
            except MustAbortError:
                end, told = transaction.abort, one.aborted
            except EndUnknownError:
                continue  # asked again, it tells how it ended
            else:
                told.add(one.begun)
                return

    # ---- the reckoning ----

    def check(self, bootstrap: str | None = None) -> None:
        """Compare what readers of committed records, and the group, see with what was told."""
        self._bootstrap = bootstrap or self._bootstrap
        seen: Counter[tuple[int, int]] = Counter(self._read())
        torn = {which: count for which, count in seen.items() if count != RECORDS}
        assert not torn, f"not all, or twice, of (producer, transaction): {torn}"
        offsets = self._offsets()
        for one in self.all:
            found = {number for producer, number in seen if producer == one.number}
            assert found == one.committed, (
                f"producer {one.number}: lost {sorted(one.committed - found)}, "
                f"not to be there {sorted(found - one.committed)}"
            )
            assert offsets[one.number] == max(found, default=-1), f"producer {one.number}: offset"

    def _read(self) -> list[tuple[int, int]]:
        reader = self._consumer(GROUP + "-check")
        found = []
        ended: set[int] = set()
        until = time.monotonic() + SETTLE_S
        try:
            reader.assign([Place(TARGET, index, 0) for index in range(PARTITIONS)])
            while len(ended) < PARTITIONS:
                assert time.monotonic() < until, f"ends of {ended} alone"
                for message in reader.consume(1_000, 0.5):
                    error = message.error()
                    if error is None:
                        producer, number = (message.value() or b"").split()
                        found.append((int(producer), int(number)))
                        ended.discard(int(message.partition() or 0))
                    elif error.code() == KafkaError._PARTITION_EOF:
                        ended.add(int(message.partition() or 0))
        finally:
            reader.close()
        return found

    def _offsets(self) -> dict[int, int]:
        reader = self._consumer(GROUP)
        try:
            wanted = [Place(SOURCE, one.number) for one in self.all]
            told = reader.committed(wanted, 60)
        finally:
            reader.close()
        return {at.partition: max(at.offset, -1) for at in told}

    def _consumer(self, group: str) -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": group,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
            }
        )
