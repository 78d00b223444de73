"""/metrics: what it shows after known work, what is documented, what is bounded."""

from __future__ import annotations

import gc
import os
import re
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest
import trio
from confluent_kafka.admin import AdminClient
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as PrometheusMetric
from prometheus_client.openmetrics import exposition as openmetrics

from raftmq.config import NodeConfig
from raftmq.counts import BUCKET_COUNT, Histogram, TopicCounts
from raftmq.metadata.commands import UNDATED
from raftmq.metadata.transactions import Transaction, TransactionState, transactions_of
from raftmq.node.loop_watch import (
    FROZEN_MIN,
    FULL_COLLECTIONS,
    _collecting,
    _Watch,
    watch_collections,
)
from raftmq.node.metrics import exposition
from raftmq.node.metrics.exposition import COLLECTORS, Exposition, write
from raftmq.node.metrics.families import OTHER, Family, Metric
from raftmq.node.metrics.node import SERVER
from raftmq.node.metrics.partitions import GROUPS, PARTITIONS
from raftmq.node.metrics.transactions import TRANSACTIONS
from raftmq.server.kafka.counts import ServerCounts
from raftmq.types import TopicPartition
from tests.live.harness import Cluster, wait_until
from tests.live.load import create_topic
from tests.node.exposition import Page, pages, total
from tests.server.auditing import NO_AUDIT

METRICS = [metric for collector in COLLECTORS for metric in collector.metrics]
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
PROCESS = {
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
}
UNITS = ("_seconds", "_bytes", "_total", "_info", "_ratio")


# ---- names and documentation ----


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"raftmq_[a-z][a-z0-9_]*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(ms|milliseconds|kb|mb|count|sum|bucket)(_|$)", metric.name)
    assert metric.help[0].isupper() or metric.help[0].isdigit()
    assert not metric.help.endswith(".")
    for label in metric.labels:
        assert re.fullmatch(r"[a-z][a-z_]*", label)
        assert label not in ("le", "job", "instance")
    if metric.kind == "histogram":
        assert metric.name.endswith(UNITS[0])


def test_no_name_is_used_twice() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))


def test_every_metric_is_documented() -> None:
    """Run with RAFTMQ_REWRITE=1 to write the table."""
    begin, end = "<!-- metrics: written by tests/node/test_metrics.py -->\n", "<!-- end -->"
    before, rest = PAGE.read_text().split(begin)
    _, after = rest.split(end)
    rows = "".join(
        f"| `{m.name}` | {m.kind} | {', '.join(m.labels)} | {m.help} |\n" for m in METRICS
    )
    table = "| metric | kind | labels | what |\n|---|---|---|---|\n" + rows
    wanted = before + begin + table + end + after
    if os.environ.get("RAFTMQ_REWRITE"):
        PAGE.write_text(wanted)
    assert PAGE.read_text() == wanted, "run with RAFTMQ_REWRITE=1"
    assert set(re.findall(r"`(process_\w+)`", before + after)) == PROCESS


# ---- histograms ----


@pytest.mark.parametrize(
    ("seconds", "edge"),
    [
        (0.0, "3.2e-05"),
        (20e-6, "3.2e-05"),
        (33e-6, "6.4e-05"),
        (0.001, "0.001024"),
        (1.5, "2.097152"),
        (1e6, "+Inf"),
    ],
)
def test_a_duration_falls_into_its_bucket(seconds: float, edge: str) -> None:
    histogram = Histogram()
    histogram.observe(seconds)
    rows = histogram.cumulative()
    first = next(name for name, count in rows if count)
    assert first == edge
    assert rows[-1] == ("+Inf", 1.0)
    assert histogram.count == 1
    assert histogram.seconds_max == seconds


def test_buckets_are_cumulative() -> None:
    histogram = Histogram()
    for i in range(BUCKET_COUNT):
        histogram.observe((1 << i) / 1e6)
    counts = [count for _, count in histogram.cumulative()]
    assert counts == sorted(counts)
    assert counts[-1] == BUCKET_COUNT


def test_full_collections_are_timed_and_others_are_not() -> None:
    watch_collections()
    watch_collections()
    try:
        before = FULL_COLLECTIONS.count
        gc.collect(0)
        gc.collect(1)
        assert FULL_COLLECTIONS.count == before
        gc.collect()
        assert FULL_COLLECTIONS.count == before + 1
        assert FULL_COLLECTIONS.seconds > 0
    finally:
        gc.callbacks.remove(_collecting)
        gc.unfreeze()


def test_what_outlived_a_full_collection_is_not_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ring:
        def __init__(self) -> None:
            self.itself = self

    frozen, young = Ring(), Ring()
    gone, early = weakref.ref(frozen), weakref.ref(young)
    del young
    watch_collections()
    try:
        gc.collect()
        assert early() is None, "garbage was found before anything was frozen"
        assert gc.get_freeze_count() > 10_000
        assert gc.get_objects(generation=2) == []
        del frozen
        gc.collect()
        assert gone() is not None, "frozen rings stay"
        monkeypatch.setattr(_Watch, "frozen_max", 1_000)
        gc.collect()
        assert gone() is None, "until there are too many of them"
        assert _Watch.frozen_max >= FROZEN_MIN, "by what has gathered here until now"
    finally:
        gc.callbacks.remove(_collecting)
        gc.unfreeze()


# ---- bounds, without a cluster ----


class Some:
    """A replica as the metrics read it."""

    failure = None
    high_watermark = log_end_offset = 10
    log_start_offset = 3
    leader_epoch = 2
    voters = (1, 2, 3)
    is_leader = True
    leader = SimpleNamespace(node_id=1)
    core = SimpleNamespace(is_term_absurd=False)

    def in_sync_replicas(self) -> tuple[int, ...]:
        return (1, 2)

    def damaged(self) -> list[tuple[int, int]]:
        return []


class FakeNode:
    moving_from: tuple[int, ...] = ()

    def __init__(self, partitions: int, rows_max: int) -> None:
        self.tls: dict[str, object] = {}
        self.peer_tls = self.admin_tls = None
        self.config = NodeConfig(node_id=1, data=".", metrics_partitions_max=rows_max)
        settings = SimpleNamespace(min_insync_replicas=1)
        names = [TopicPartition(f"t{i:04}", 0) for i in range(partitions)]
        rows = [
            (
                SimpleNamespace(
                    name=name,
                    index=0,
                    size_bytes=100,
                    lag=0,
                    settings=settings,
                    parked_produces_count=1,
                    is_leader=True,
                    readable_end=10,
                    stable_lag=2,
                ),
                Some(),
            )
            for name in names
        ]
        counts: dict[str, TopicCounts] = {}
        for number, name in enumerate(names):
            counts[name.topic] = TopicCounts()
            counts[name.topic].messages_in = number
        views = SimpleNamespace(fills=list, counts={})
        self.partitions = SimpleNamespace(rows=lambda: rows, topic_counts=counts, views=views)
        self.broker = SimpleNamespace(metrics=ServerCounts())
        self.audit = NO_AUDIT
        assigned = SimpleNamespace(replicas=(1, 2, 3, 4), moving_from=self.moving_from)
        image = SimpleNamespace(partition=lambda name: assigned if name.topic == "t0001" else None)
        self.engine = SimpleNamespace(image=image, unauthorized={"DeleteTopics": 1})
        self.control = SimpleNamespace(peer_requests=SimpleNamespace(refused={"MoveLeadership": 1}))


async def scraped(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> Page:
    monkeypatch.setattr(exposition, "COLLECTORS", (SERVER, PARTITIONS))
    body, content_type = await Exposition(node).render("")  # type: ignore[arg-type]
    assert content_type.startswith("text/plain")
    return Page(body.decode())


async def test_a_log_that_lacks_the_batch_of_its_start_begins_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A log start may lie within a batch, and a replica begun anew there waits for that batch."""
    monkeypatch.setattr(Some, "log_start_offset", 11)
    page = await scraped(FakeNode(1, 4), monkeypatch)
    assert page.value("raftmq_partition_log_start_offset", topic="t0000") == 10


async def test_what_is_too_much_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    page = await scraped(FakeNode(10, 4), monkeypatch)
    name = "raftmq_partition_messages"
    kept = [labels["topic"] for labels, _ in page.rows(name)]
    assert kept == ["t0000", "t0001", "t0002", "t0003", OTHER]
    assert page.value(name, topic=OTHER) == 6 * 7
    assert page.value("raftmq_partition_last_stable_offset", topic="t0003") == 8
    assert page.value("raftmq_partition_stable_lag_messages", topic=OTHER) == 6 * 2
    replicas = page.rows("raftmq_partition_replicas")
    assert [value for _, value in replicas] == [3, 4, 3, 3, 6 * 3]
    assert page.value("raftmq_partitions_left_out") == 6
    assert page.value("raftmq_topics_left_out") == 6
    assert page.sum("raftmq_topic_messages_in_total") == sum(range(10))
    assert page.value("raftmq_topic_messages_in_total", topic=OTHER) == 4 + 5 + 6 + 7 + 8 + 9
    # Sums over all partitions do not care for the bound.
    assert page.value("raftmq_partitions") == 10
    assert page.value("raftmq_partitions_under_replicated") == 10
    assert page.value("raftmq_parked_produces") == 10


async def test_replicas_that_a_move_adds_need_not_be_in_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for moving_from, wanted in (((), 4), ((1, 2, 3), 3), ((4, 5, 6), 3), ((1, 2, 3, 4, 5), 4)):
        monkeypatch.setattr(FakeNode, "moving_from", moving_from)
        page = await scraped(FakeNode(2, 4), monkeypatch)
        assert page.value("raftmq_partition_replicas", topic="t0001") == wanted, moving_from


async def test_a_large_scrape_gives_the_loop_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "TURN_S", 0.0)
    turns = 0
    async with trio.open_nursery() as nursery:

        async def count() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        nursery.start_soon(count)
        page = await scraped(FakeNode(1000, 2000), monkeypatch)
        nursery.cancel_scope.cancel()
    assert len(page.rows("raftmq_partition_high_watermark")) == 1000
    assert turns >= 50, "at least one in sixteen partitions"


async def test_openmetrics_is_spoken_to_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "COLLECTORS", (SERVER, PARTITIONS))
    body, content_type = await Exposition(FakeNode(1, 1)).render(  # type: ignore[arg-type]
        "application/openmetrics-text; version=1.0.0"
    )
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


class Prepared:
    """A prometheus_client collector over families that were read before, for its encoders."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def describe(self) -> Iterator[PrometheusMetric]:
        """Nothing to say before it is collected."""
        return iter(())

    def collect(self) -> Iterator[PrometheusMetric]:
        """Yield them as prometheus_client's."""
        for family in self._families:
            yield to_prometheus(family)


def to_prometheus(family: Family) -> PrometheusMetric:
    """A family as prometheus_client knows it."""
    metric = family.metric
    made: Any
    if metric.kind == "histogram":
        made = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, buckets, seconds in family.histograms:
            made.add_metric(labels, buckets, sum_value=seconds)
        return made  # type: ignore[no-any-return]
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    made = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in family.rows:
        made.add_metric(labels, value)
    return made  # type: ignore[no-any-return]


NAMES = st.text(max_size=6)
VALUES = st.one_of(
    st.integers(-10, 10**12).map(float),
    st.floats(allow_nan=False).map(lambda value: value + 0.0),  # nothing counts to -0.0
    st.sampled_from([0.0, 0.1, 999_999.0, 1e6, 1_000_001.0, 123_456_789.0, 1e21, float("inf")]),
)


@given(
    rows=st.lists(st.tuples(st.tuples(NAMES, NAMES), VALUES), max_size=5),
    durations=st.lists(st.floats(0, 40), max_size=5),
    kind=st.sampled_from(["counter", "gauge"]),
    help_text=NAMES,
)
def test_text_is_what_prometheus_client_writes(
    rows: list[tuple[tuple[str, str], float]],
    durations: list[float],
    kind: Any,
    help_text: str,
) -> None:
    name = "raftmq_x_total" if kind == "counter" else "raftmq_x"
    family = Family(Metric(name, kind, help_text, ("topic", "group")))
    for labels, value in dict(rows).items():
        family.add(labels, value)
    plain = Family(Metric("raftmq_y", "gauge", 'A "word"'))
    plain.add((), 3)
    times = Family(Metric("raftmq_z_seconds", "histogram", help_text, ("api",)))
    histogram = Histogram()
    for duration in durations:
        histogram.observe(duration)
    times.add_histogram(("a",), histogram)
    families = [family, plain, times]
    prepared: Any = Prepared(families)
    wanted = generate_latest(prepared).decode()
    assert write(families, is_openmetrics=False) == wanted
    wanted = openmetrics.generate_latest(prepared).decode()
    assert write(families, is_openmetrics=True) + "# EOF\n" == wanted


# ---- transactions ----


def transaction(number: int, state: TransactionState, started_at_ms: int) -> Transaction:
    return Transaction(
        transactional_id=f"x{number:03}",
        producer_id=number,
        epoch=0,
        timeout_ms=1_000,
        txn_seq=1,
        state=state,
        decision=number if state.is_prepared else 0,
        started_at_ms=started_at_ms,
    )


async def test_transactions_by_state_and_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "COLLECTORS", (TRANSACTIONS,))
    ongoing, prepared = TransactionState.ONGOING, TransactionState.PREPARE_ABORT
    ids = [transaction(i, ongoing, 100_000 + i) for i in range(300)]
    ids += [transaction(i, ongoing, 97_990 + i) for i in range(300, 320)]  # 11 are overdue
    ids += [transaction(400, prepared, 99_000), transaction(401, ongoing, UNDATED)]
    ids += [transaction(500, TransactionState.COMPLETE_COMMIT, 1)]
    node: Any = SimpleNamespace(
        engine=SimpleNamespace(image=SimpleNamespace(transactions=transactions_of(ids, 1))),
        plane=SimpleNamespace(clock=SimpleNamespace(wall_ms=lambda: 100_300)),
    )
    body, _ = await Exposition(node).render("text/plain")
    page = Page(body.decode())
    name = "raftmq_transactional_ids"
    shown = {labels["state"]: value for labels, value in page.rows(name)}
    assert shown == {
        "Empty": 0,
        "Ongoing": 321,
        "PrepareCommit": 0,
        "PrepareAbort": 1,
        "CompleteCommit": 1,
        "CompleteAbort": 0,
    }
    assert page.value("raftmq_transactions_decided") == 1
    assert page.value("raftmq_transaction_oldest_open_seconds") == 2.01
    assert page.value("raftmq_transactions_overdue") == 10


async def test_the_lag_of_a_group_by_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "COLLECTORS", (GROUPS,))
    job = SimpleNamespace(run=lambda: None, timestamp=None)
    replica = SimpleNamespace(
        log_start_offset=0, log=SimpleNamespace(timestamp_job=lambda _offset: job)
    )
    held = {0: 0, 1: 4, 2: None, 3: 1}
    partitions = {
        index: SimpleNamespace(
            is_leader=True, readable_end=10, stable_lag=lag, replica=replica, group=index
        )
        for index, lag in held.items()
    }
    offsets = {TopicPartition("t", index): SimpleNamespace(offset=3) for index in held}
    groups = SimpleNamespace(names=lambda: ["g"], groups={"g": SimpleNamespace(offsets=offsets)})
    node: Any = SimpleNamespace(
        engine=SimpleNamespace(image=SimpleNamespace(groups=groups)),
        partitions=SimpleNamespace(
            registry=SimpleNamespace(by_name=lambda _topic, index: partitions[index]),
            views=SimpleNamespace(fills=list),
        ),
        config=SimpleNamespace(metrics_groups_max=3),
        plane=SimpleNamespace(clock=SimpleNamespace(wall_ms=lambda: 0)),
    )
    body, _ = await Exposition(node).render("text/plain")
    page = Page(body.decode())
    shown = {
        labels["partition"]: value
        for labels, value in page.rows("raftmq_group_stable_lag_messages")
    }
    assert shown == {"1": 3, "-1": 6}, "where it differs, and of those without rows"
    assert page.value("raftmq_group_lag_messages", partition="1") == 7
    assert page.value("raftmq_group_lag_messages", partition="-1") == 7


# ---- a cluster after known work ----


@pytest.fixture(scope="module")
def worked(three: Cluster) -> dict[str, Any]:
    """100 records written, all read, 40 of them committed by a group; some errors made."""
    create_topic(three.bootstrap, "m", 1, 3)
    producer = confluent_kafka.Producer({"bootstrap.servers": three.bootstrap, "acks": "all"})
    began_ms = time.time() * 1000
    for i in range(100):
        producer.produce("m", b"%03d" % i + b"x" * 97, partition=0)
    assert producer.flush(30) == 0
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": three.bootstrap,
            "group.id": "g",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.assign([confluent_kafka.TopicPartition("m", 0, 0)])
    read = 0
    while read < 100:
        message = consumer.poll(10)
        assert message is not None
        assert message.error() is None
        read += 1
    consumer.commit(offsets=[confluent_kafka.TopicPartition("m", 0, 40)], asynchronous=False)
    consumer.close()
    admin = AdminClient({"bootstrap.servers": three.bootstrap})
    with pytest.raises(confluent_kafka.KafkaException, match="UNKNOWN_TOPIC"):
        admin.delete_topics(["nobody"])["nobody"].result(30)

    def is_settled() -> bool:
        found = pages(three.live)
        return total(found, "raftmq_partition_high_watermark", topic="m") == 300

    wait_until(is_settled, 60, "every replica knows the high watermark")
    return {"pages": pages(three.live), "began_ms": began_ms}


def leader_of(found: list[Page], topic: str) -> Page:
    (page,) = (p for p in found if p.sum("raftmq_partition_is_leader", topic=topic))
    return page


async def test_bugs_are_counted_by_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "COLLECTORS", (SERVER,))
    node = FakeNode(1, 1)
    for error in (ValueError(), ValueError("again"), KeyError()):
        node.broker.metrics.admin_bug(error)
    node.broker.metrics.bug(KeyError())
    body, _ = await Exposition(node).render("text/plain")  # type: ignore[arg-type]
    shown = [line for line in body.decode().splitlines() if re.match(r"raftmq\w+_bugs_total", line)]
    assert shown == [
        'raftmq_connection_bugs_total{kind="KeyError"} 1.0',
        'raftmq_admin_bugs_total{kind="KeyError"} 1.0',
        'raftmq_admin_bugs_total{kind="ValueError"} 2.0',
    ]


@pytest.mark.live
@pytest.mark.slow
def test_every_documented_metric_is_shown(worked: dict[str, Any]) -> None:
    found: list[Page] = worked["pages"]
    documented = {metric.name for metric in METRICS} | PROCESS
    for page in found:
        assert page.names == documented
    empty = [
        metric.name
        for metric in METRICS
        if not any(page.families[metric.name.removesuffix("_total")].samples for page in found)
    ]
    bugs = ["raftmq_connection_bugs_total", "raftmq_admin_bugs_total"]
    stable = "raftmq_group_stable_lag_messages"
    tls = ["raftmq_tls_handshakes_total", "raftmq_tls_handshake_failures_total"]
    tls.append("raftmq_certificate_expires_timestamp_seconds")
    tls.append("raftmq_crl_expires_timestamp_seconds")
    users = ["raftmq_authentications_total", "raftmq_denials_total"]
    users += ["raftmq_commands_refused_total", "raftmq_peer_requests_refused_total"]
    users += ["raftmq_audit_lines_total", "raftmq_audit_lines_left_out_total"]
    rows = ("end", "examined_end", "lacks_bytes", "filled_ratio")
    views = [f"raftmq_view_{name}" for name in rows]
    expected = [*bugs, "raftmq_refusals_total", *tls, *users, stable, *views]
    assert empty == expected, "all went well, nothing was open or encrypted, there are no views"
    assert all(sample.value >= 0 for page in found for sample in page.samples)


@pytest.mark.live
@pytest.mark.slow
def test_each_metric_has_the_value_that_the_work_gave_it(worked: dict[str, Any]) -> None:
    found: list[Page] = worked["pages"]
    leader = leader_of(found, "m")
    size = leader.value("raftmq_topic_in_bytes_total", topic="m")
    assert 100 * 100 < size < 100 * 130
    exact = {
        ("raftmq_topic_messages_in_total", "m"): 100,
        ("raftmq_topic_messages_out_total", "m"): 100,
        ("raftmq_topic_out_bytes_total", "m"): size,
        ("raftmq_partition_high_watermark", "m"): 300,
        ("raftmq_partition_log_start_offset", "m"): 0,
        ("raftmq_partition_log_end_offset", "m"): 300,
        ("raftmq_partition_messages", "m"): 300,
        ("raftmq_partition_size_bytes", "m"): 3 * size,
        ("raftmq_partition_is_leader", "m"): 1,
        ("raftmq_partition_replicas", "m"): 3,
        ("raftmq_partition_in_sync_replicas", "m"): 3,
        ("raftmq_partition_lag_messages", "m"): 0,
        ("raftmq_partition_damaged_messages", "m"): 0,
        ("raftmq_group_lag_messages", "m"): 60,
        ("raftmq_partition_last_stable_offset", "m"): 100,
        ("raftmq_partition_stable_lag_messages", "m"): 0,
    }
    shown = {(name, topic): total(found, name, topic=topic) for name, topic in exact}
    assert shown == exact
    assert leader.value("raftmq_partition_leader_epoch", topic="m") >= 1
    age_s = time.time() - worked["began_ms"] / 1e3
    assert 0 < leader.value("raftmq_group_lag_seconds", group="g") <= age_s + 1
    assert [labels["group"] for labels, _ in leader.rows("raftmq_group_lag_messages")] == ["g"]


@pytest.mark.live
@pytest.mark.slow
def test_sums_over_the_cluster(worked: dict[str, Any]) -> None:
    found: list[Page] = worked["pages"]
    exact = {
        "raftmq_node_ready": 3,
        "raftmq_node_is_controller": 1,
        "raftmq_brokers": 9,
        "raftmq_brokers_fenced": 0,
        "raftmq_topics": 3,  # as each of three nodes knows it
        "raftmq_groups": 3,
        "raftmq_partitions": 3,
        "raftmq_partitions_led": 1,
        "raftmq_partitions_under_replicated": 0,
        "raftmq_partitions_under_min_isr": 0,
        "raftmq_partitions_leaderless": 0,
        "raftmq_partitions_failed": 0,
        "raftmq_partitions_damaged": 0,
        "raftmq_partitions_absurd_term": 0,
        "raftmq_partitions_left_out": 0,
        "raftmq_topics_left_out": 0,
        "raftmq_group_lags_left_out": 0,
        "raftmq_parked_produces": 0,
        "raftmq_transactional_ids": 0,
        "raftmq_transactions_decided": 0,
        "raftmq_transactions_overdue": 0,
        "raftmq_transaction_rows_total": 0,
        "raftmq_request_memory_waiting": 0,
        "raftmq_request_memory_limit_bytes": 3 * (256 << 20),
        "raftmq_open_files_limit": 3 * 5000,
        "raftmq_metadata_lag_entries": 0,
        "raftmq_connections_refused_total": 0,
        "raftmq_protocol_errors_total": 0,
        "raftmq_scrub_damages_total": 0,
        "raftmq_damages_found_total": 0,
        "raftmq_damages_repaired_total": 0,
        "raftmq_disk_full": 0,
        "raftmq_disk_full_errors_total": 0,
        "raftmq_isolation_transfers_total": 0,
        "raftmq_build_info": 3,
        "raftmq_node_info": 3,
        "raftmq_peer_connected": 6,
    }
    assert {name: total(found, name) for name in exact} == exact


@pytest.mark.live
@pytest.mark.slow
def test_what_no_test_can_foretell_is_plausible(worked: dict[str, Any]) -> None:
    found: list[Page] = worked["pages"]
    positive = (
        "raftmq_metadata_applied_index",
        "raftmq_metadata_leader_epoch",
        "raftmq_metadata_log_bytes",
        "raftmq_connections_accepted_total",
        "raftmq_received_bytes_total",
        "raftmq_sent_bytes_total",
        "raftmq_direct_sends_total",
        "raftmq_appended_batches_total",
        "raftmq_fsync_seconds_count",
        "raftmq_fsync_seconds_sum",
        "raftmq_elections_total",
        "raftmq_elections_won_total",
        "raftmq_segments_rolled_total",
        "raftmq_recent_bytes",
        "raftmq_disk_size_bytes",
        "raftmq_disk_free_bytes",
        "raftmq_loop_lag_seconds_count",
        "raftmq_loop_lag_max_seconds",
        "raftmq_scrape_turn_max_seconds",
        "raftmq_peer_sent_bytes_total",
        "process_resident_memory_bytes",
        "process_cpu_seconds_total",
        "process_open_fds",
    )
    assert [name for name in positive if total(found, name) <= 0] == []
    sent = total(found, "raftmq_sent_bytes_total")
    assert 0 <= total(found, "raftmq_sendfile_bytes_total") <= sent
    won = total(found, "raftmq_elections_won_total")
    assert 2 <= won <= total(found, "raftmq_elections_total")  # metadata's and the topic's


@pytest.mark.live
@pytest.mark.slow
def test_requests_and_errors_are_counted_by_api(worked: dict[str, Any]) -> None:
    found: list[Page] = worked["pages"]
    produced = total(found, "raftmq_requests_total", api="produce")
    assert produced >= 1
    assert total(found, "raftmq_request_seconds_count", api="produce") == produced
    assert (
        total(
            found,
            "raftmq_request_errors_total",
            api="delete_topics",
            error="UNKNOWN_TOPIC_OR_PARTITION",
        )
        == 1
    )
    assert total(found, "raftmq_request_failures_total") == 0
    buckets = leader_of(found, "m").rows("raftmq_request_seconds_bucket", api="produce")
    edges = [float(labels["le"]) for labels, _ in buckets]
    assert edges == sorted(edges)
    assert edges[-1] == float("inf")
