"""The clients that judge look-ups by time and metrics: what they must accept, and what not."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from jepsen_like.cluster import scraper
from jepsen_like.cluster.historian import NEWEST, Dated, is_right
from jepsen_like.cluster.options import ClusterOptions
from jepsen_like.cluster.run import run_cluster_seed
from jepsen_like.cluster.scraper import Process, SeenAges
from jepsen_like.disk import SimDisk
from jepsen_like.invariants import InvariantViolation
from raftmq.log.reader import ReadableLog
from raftmq.node.metrics.families import Family, Metric
from raftmq.node.metrics.node import FSYNC

BEFORE = [Dated(5, 6, 100, 1), Dated(6, 8, 90, 1), Dated(8, 9, 120, 1), Dated(9, 10, 120, 2)]
AFTER = [Dated(10, 11, 110, 2), Dated(11, 12, 130, 2), Dated(12, 13, 125, 2)]
QUIET = ClusterOptions(
    nodes=3, partitions=1, producers=2, safety_ms=3_000, has_floors=False, retention_bytes=-1
).with_weights(transfer=1.0)


@pytest.mark.parametrize(
    ("timestamp", "told"),
    [
        pytest.param(95, (100, 5, 1), id="first not older"),
        pytest.param(101, (120, 8, 1), id="later ones of the same age do not count"),
        pytest.param(121, None, id="nothing yet"),
        pytest.param(121, (130, 11, 2), id="it came meanwhile"),
        pytest.param(200, None, id="nothing at all"),
        pytest.param(NEWEST, (120, 8, 1), id="the first of the newest"),
        pytest.param(NEWEST, (130, 11, 2), id="a newer one came meanwhile"),
    ],
)
def test_right_answers(timestamp: int, told: tuple[int, int, int] | None) -> None:
    assert is_right(timestamp, told, BEFORE, AFTER)


@pytest.mark.parametrize(
    ("timestamp", "told"),
    [
        pytest.param(95, (120, 8, 1), id="not the first"),
        pytest.param(95, (100, 5, 2), id="another epoch"),
        pytest.param(95, None, id="passed over"),
        pytest.param(121, (125, 12, 2), id="not the first that came"),
        pytest.param(121, (131, 11, 2), id="another time than the record's"),
        pytest.param(NEWEST, (120, 9, 2), id="not the first of the newest"),
        pytest.param(NEWEST, (110, 10, 2), id="older than one that was there"),
        pytest.param(NEWEST, (125, 12, 2), id="older than one that came before it"),
        pytest.param(NEWEST, None, id="none where there are some"),
    ],
)
def test_wrong_answers(timestamp: int, told: tuple[int, int, int] | None) -> None:
    assert not is_right(timestamp, told, BEFORE, AFTER)


def test_records_without_a_time_are_not_the_newest() -> None:
    assert is_right(NEWEST, None, [Dated(0, 1, -1, 1)], [])


@pytest.mark.slow
def test_a_wrong_answer_of_a_node_is_an_anomaly(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(log: Any, end: int) -> tuple[int, int, int] | None:
        found = newest(log, end)
        return None if found is None else (found[0], found[1] + 1, found[2])

    newest = ReadableLog.max_timestamp
    monkeypatch.setattr(ReadableLog, "max_timestamp", last)
    result = run_cluster_seed(1, QUIET)
    assert result.name == "LookUpsAreRight", result.detail


@pytest.mark.slow
def test_a_quiet_run_is_judged_and_clean() -> None:
    result = run_cluster_seed(1, QUIET)
    assert result.name == "", result.detail
    assert result.counts.look_ups
    assert result.counts.scrapes


def process() -> Process:
    disk: Any = SimDisk(Random(1))
    node: Any = SimpleNamespace(node_id=1, life=1, disk=disk)
    return Process(node, 1)


def family(kind: Any, *rows: tuple[tuple[str, ...], float]) -> Family:
    name = "raftmq_x_total" if kind == "counter" else "raftmq_x"
    made = Family(Metric(name, kind, "", ("topic",)))
    for labels, value in rows:
        made.add(labels, value)
    return made


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(family("gauge", (("a",), -1.0)), id="below zero"),
        pytest.param(family("gauge", (("a",), float("nan"))), id="no number"),
        pytest.param(family("gauge", (("a",), 1.0), (("a",), 2.0)), id="a row twice"),
        pytest.param(family("counter", (("a",), 4.0)), id="a counter that falls"),
    ],
)
def test_numbers_that_no_node_may_tell(found: Family) -> None:
    asked = process()
    scraper._check_numbers(asked, family("counter", (("a",), 5.0), (("b",), 0.0)))
    with pytest.raises(InvariantViolation, match="MetricsAreTrue"):
        scraper._check_numbers(asked, found)


def test_a_histogram_that_forgets() -> None:
    asked = process()
    times = Family(FSYNC)
    times.histograms.append(((), [("0.1", 3.0), ("+Inf", 5.0)], 1.0))
    scraper._check_numbers(asked, times)
    times.histograms[0] = ((), [("0.1", 3.0), ("+Inf", 4.0)], 1.0)
    with pytest.raises(InvariantViolation, match="fell to 4"):
        scraper._check_numbers(asked, times)


def test_a_page_that_tells_twice() -> None:
    twice = family("gauge", (("a",), 1.0), (("a",), 2.0))
    with pytest.raises(InvariantViolation, match="twice"):
        scraper._check_text(process(), [twice], is_openmetrics=False)


@pytest.mark.slow
def test_an_age_that_is_not_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    stamp: Callable[[SeenAges, Any], int | None] = SeenAges.timestamp

    def wrong(ages: SeenAges, key: Any) -> int | None:
        found = stamp(ages, key)
        return None if found is None else found + 1

    monkeypatch.setattr(SeenAges, "timestamp", wrong)
    result = run_cluster_seed(1, attrs.evolve(QUIET, safety_ms=6_000))
    assert result.name == "MetricsAreTrue", result.detail
