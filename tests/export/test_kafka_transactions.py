"""Ranges and exports over transactions, on Apache Kafka: what is committed, once; no gap is loss.

Aborted records and the ends of transactions take offsets and give no rows; what is open, or stands
behind it, is left to the next run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raftmq.types import TopicPartition
from raftmq_client import Admin, Producer, Transaction
from raftmq_spark.export.archive import find_archive
from raftmq_spark.export.verify import verify
from raftmq_spark.plan import RangePart
from raftmq_spark.reader import read_range
from raftmq_spark.security import ClientSettings
from tests.export.inline import archive_rows, committed, make_order, open_at, run_export
from tests.live.kafka import KafkaCluster

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.kafka]


@pytest.fixture(scope="module")
def kafka() -> Iterator[KafkaCluster]:
    with KafkaCluster() as cluster:
        yield cluster


class Written:
    """A topic of one partition, and what was written to it in transactions."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.topic = f"transactions-{time.time_ns()}"
        self.rows: list[tuple[int, bytes]] = []
        """Offset and value of what is committed, in order."""
        self._end = 0
        with Admin(bootstrap, timeout_ms=60_000) as admin:
            admin.create_topic(self.topic, 1)
        self._producer = Producer(bootstrap, transactional_id=self.topic)

    def close(self) -> None:
        self._producer.close()

    def write(self, count: int, *, commit: bool) -> None:
        """One whole transaction."""
        tx, rows = self.open(count)
        if commit:
            tx.commit()
            self.rows += rows
        else:
            tx.abort()
        self._end += 1  # the marker

    def open(self, count: int) -> tuple[Transaction, list[tuple[int, bytes]]]:
        """A transaction with so many records."""
        tx = self._producer.begin()
        rows = []
        for _ in range(count):
            value = b"%d" % self._end
            assert tx.send(self.topic, value, partition=0).result(30).offset == self._end
            rows.append((self._end, value))
            self._end += 1
        return tx, rows

    def end(self, tx: Transaction, rows: list[tuple[int, bytes]]) -> None:
        tx.commit()
        self.rows += rows
        self._end += 1


@pytest.fixture
def written(kafka: KafkaCluster) -> Iterator[Written]:
    made = Written(kafka.bootstrap)
    yield made
    made.close()


def stable_end(written: Written, at_least: int) -> int:
    """The last stable offset, once the ends of transactions have come there."""
    key = TopicPartition(written.topic, 0)
    deadline = time.monotonic() + 30
    with Admin(written.bootstrap, timeout_ms=60_000) as admin:
        while True:
            end = admin.list_offsets({key: -1}, isolation=1)[key].offset
            if end >= at_least:
                return end
            assert time.monotonic() < deadline, f"{end} of {at_least}"


def test_every_range_has_what_is_committed_in_it(written: Written) -> None:
    for number in range(8):
        written.write(3, commit=number % 2 == 0)
    end = stable_end(written, 32)
    client = ClientSettings(written.bootstrap, "raftmq-test")
    for start in range(end):
        for stop in {start + 1, min(start + 6, end), end}:
            part = RangePart(written.topic, 0, start, stop)
            found = [
                row
                for batch in read_range(client, part, columns=("offset", "value"))
                for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
            ]
            assert found == [row for row in written.rows if start <= row[0] < stop], part


def test_an_export_ends_at_the_last_stable_offset_and_goes_on_from_there(
    written: Written, tmp_path: Path
) -> None:
    client = ClientSettings(written.bootstrap, "raftmq-test")
    order = make_order(written.bootstrap, tmp_path, "archive", written.topic, records_per_file=5)

    def check(end: int) -> None:
        assert committed(written.bootstrap, "archive", written.topic) == {0: end}
        assert [(row[1], row[3]) for row in archive_rows(tmp_path)] == written.rows
        verdict = verify(find_archive(open_at(tmp_path)), client)
        assert verdict.is_good, verdict.findings

    for number in range(6):
        written.write(2, commit=number % 3 != 1)
    tx, rows = written.open(4)
    assert stable_end(written, 18) == 18
    first = run_export(order)
    assert first.manifest is not None
    assert first.manifest.rows == len(written.rows) == 8
    check(18)
    assert run_export(order).manifest is None, "what is open is not there yet"
    written.end(tx, rows)
    stable_end(written, 23)
    second = run_export(order)
    assert second.manifest is not None
    assert second.manifest.rows == 4
    check(23)
    written.write(7, commit=False)
    stable_end(written, 31)
    third = run_export(order)
    assert third.manifest is not None
    assert third.manifest.rows == 0, "nothing but aborted records"
    check(31)
    written.write(1, commit=True)
    stable_end(written, 33)
    run_export(order)
    check(33)
