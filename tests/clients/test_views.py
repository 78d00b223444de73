"""Stock clients and views with a condition: they read one as any topic, with whatever is between.

Each codec has a base topic with a view over it. The base has matches far between in mixed batches,
a long stretch without any, an aborted and a committed transaction with some, batches that match
wholly, and an end without matches. No client is told anything of it but the view's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import confluent_kafka
import kafka
import pytest
from attrs import define, evolve, field, frozen
from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka.admin import AdminClient

from tests.clients.adapters import ClientAdapter, GroupMember, elect_preferred
from tests.clients.programs import NAMES, Program
from tests.clients.test_kcat import kcat
from tests.live.harness import Cluster, wait_until
from tests.live.load import create_topic, leaders, watermarks

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    # kafka-python leaves sockets to the garbage collector when it closes.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
NOT_READ = {("kafka-python", "snappy")} | {("kafkajs", c) for c in ("snappy", "lz4", "zstd")}
"""What a client wants a library for that is not installed."""
WHERE = "tag in ('refund', 'chargeback') and region = 'eu'"
BEGAN_MS = 1_700_000_000_000
STEP_MS = 1000
WAIT_S = 90.0


@frozen
class Row:
    """A record that the view shows."""

    offset: int
    timestamp: int
    key: str
    value: str


@define
class View:
    """A view, and what it is to show."""

    base: str
    name: str
    codec: str
    rows: list[Row] = field(factory=list)
    count: int = 0

    @property
    def end(self) -> int:
        """One past its last record."""
        return self.rows[-1].offset + 1

    def before(self, offset: int) -> list[Row]:
        return [row for row in self.rows if row.offset < offset]

    def since(self, offset: int) -> list[Row]:
        return [row for row in self.rows if row.offset >= offset]


class Writer:
    """Writes to a base as fast as it may, and notes what its view is to show."""

    def __init__(self, bootstrap: str, view: View, transactional_id: str = "") -> None:
        self._view = view
        settings = {
            "bootstrap.servers": bootstrap,
            "compression.type": view.codec,
            "linger.ms": 200,
            "enable.idempotence": True,
        }
        if transactional_id:
            settings["transactional.id"] = transactional_id
        self.producer = confluent_kafka.Producer(settings)

    def write(self, tags: Sequence[str], *, is_shown: bool = True) -> None:
        """A record for each tag, in as few batches as the client makes of them."""
        view, errors = self._view, []
        shown: list[Row] = []

        def noted(row: Row, tag: str) -> Callable[[Any, Any], None]:
            def delivered(error: Any, message: Any) -> None:
                if error is not None:
                    errors.append(error)
                elif is_shown and tag in ("refund", "chargeback"):
                    shown.append(evolve(row, offset=message.offset()))

            return delivered

        for tag in tags:
            number, view.count = view.count, view.count + 1
            time = BEGAN_MS + number * STEP_MS
            row = Row(-1, time, f"k{number}", f"{number} a refund? {'x' * 60}")
            self.producer.produce(
                view.base,
                row.value,
                row.key,
                0,
                timestamp=time,
                headers=[("tag", tag), ("region", "eu"), ("trace", f"{number:032x}")],
                on_delivery=noted(row, tag),
            )
        assert self.producer.flush(WAIT_S) == 0
        assert not errors, errors[:3]
        view.rows += sorted(shown, key=lambda row: row.offset)


def sparse(count: int, step: int) -> list[str]:
    """One of `step` is to be shown, the last one not."""
    return ["refund" if n % step == step // 2 else "order" for n in range(count)]


def make_view(cluster: Cluster, base: str, codec: str) -> View:
    """A base of one partition on three nodes, and its view, by any admin client's CreateTopics."""
    bootstrap, view = cluster.bootstrap, View(base, f"{base}-refunds", codec)
    create_topic(bootstrap, base, retention_ms="-1")
    create_topic(bootstrap, view.name, raftmq_view_of=base, raftmq_view_where=WHERE)
    wait_until(lambda: leaders(bootstrap, view.name), WAIT_S, f"the view {view.name}")
    return view


def fill(cluster: Cluster, view: View) -> None:
    """Write all that a view may have between its records."""
    plain = Writer(cluster.bootstrap, view)
    for _ in range(3):
        plain.write(sparse(200, 50))
    plain.write(["order"] * 6000)
    transactional = Writer(cluster.bootstrap, view, f"{view.base}-writer")
    transactional.producer.init_transactions(WAIT_S)
    for is_committed in (False, True, False):
        transactional.producer.begin_transaction()
        transactional.write(sparse(60, 4), is_shown=is_committed)
        transactional.write(["chargeback"] * 20, is_shown=is_committed)
        if is_committed:
            transactional.producer.commit_transaction(WAIT_S)
        else:
            transactional.producer.abort_transaction(WAIT_S)
        plain.write(["order"] * 30)
    plain.write(["refund"] * 60)
    plain.write(sparse(40, 40))
    plain.write(["order"] * 1000)


@pytest.fixture(scope="module")
def views(shared_cluster: Cluster) -> dict[str, View]:
    """A filled view for each codec."""
    made = {codec: make_view(shared_cluster, f"orders-{codec}", codec) for codec in CODECS}
    for view in made.values():
        fill(shared_cluster, view)
    for view in made.values():
        wait_filled(shared_cluster, view)
    return made


def wait_filled(cluster: Cluster, view: View) -> None:
    wait_until(lambda: end_of(cluster, view.name) == view.end, WAIT_S, f"{view.name} is filled")


def end_of(cluster: Cluster, topic: str) -> int:
    """What a client is told to be the end of partition 0."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": cluster.bootstrap, "group.id": "ends"}
    )
    try:
        return watermarks(consumer, topic)[1]
    finally:
        consumer.close()


def committed(cluster: Cluster, group: str, topic: str) -> int:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    asked = ConsumerGroupTopicPartitions(group, [confluent_kafka.TopicPartition(topic, 0)])
    (told,) = admin.list_consumer_group_offsets([asked])[group].result(WAIT_S).topic_partitions
    return int(told.offset)


def told_rows(found: Sequence[Any]) -> list[Row]:
    return [
        Row(m.offset, m.timestamp, (m.key or b"").decode(), (m.value or b"").decode())
        for m in found
    ]


def read_on(member: GroupMember, count: int) -> list[Row]:
    """So many more records of a group's member, or a few more."""
    found: list[Row] = []

    def are_read() -> bool:
        found.extend(told_rows(member.poll(0.3)))
        return len(found) >= count

    wait_until(are_read, WAIT_S, f"{count} records")
    return found


# ---- clients of Python ----


def test_a_view_is_listed_as_a_topic(client: ClientAdapter, views: dict[str, View]) -> None:
    assert {v.name for v in views.values()} <= client.topics().keys()
    assert all(client.topics()[view.name] == 1 for view in views.values())


@pytest.mark.parametrize("codec", CODECS)
def test_a_client_reads_what_matches(
    client: ClientAdapter, views: dict[str, View], codec: str
) -> None:
    if (client.name, codec) in NOT_READ:
        pytest.skip("the client wants a library for it")
    view = views[codec]
    assert told_rows(client.read(view.name, 0, 0, len(view.rows))) == view.rows
    for start in (view.rows[1].offset + 1, 3000, view.rows[-1].offset):
        wanted = view.since(start)
        assert told_rows(client.read(view.name, 0, start, len(wanted))) == wanted


@pytest.mark.parametrize("codec", CODECS)
def test_a_group_reads_it_once_and_has_no_lag(
    client: ClientAdapter, shared_cluster: Cluster, views: dict[str, View], codec: str
) -> None:
    if (client.name, codec) in NOT_READ:
        pytest.skip("the client wants a library for it")
    view, group = views[codec], f"{client.name}-{codec}-once"
    found: list[Row] = []
    for count in (5, len(view.rows)):
        if len(found) == len(view.rows):
            break
        member = client.member(group, view.name)
        try:
            found += read_on(member, count - len(found))
            member.commit()
        finally:
            member.close()
        assert found == view.rows[: len(found)]
        assert committed(shared_cluster, group, view.name) == found[-1].offset + 1
    assert found == view.rows
    assert committed(shared_cluster, group, view.name) == end_of(shared_cluster, view.name)


def test_a_client_finds_the_first_match_of_a_time(
    client: ClientAdapter, views: dict[str, View]
) -> None:
    view = views["gzip"]
    for at in (0, view.rows[3].timestamp, view.rows[3].timestamp + 1, view.rows[-1].timestamp):
        wanted = next(row.offset for row in view.rows if row.timestamp >= at)
        assert client.offset_at(view.name, 0, at) == wanted
    late = client.offset_at(view.name, 0, view.rows[-1].timestamp + 1)
    assert late in (None, view.end)


@pytest.mark.parametrize("codec", CODECS)
def test_kcat_reads_to_the_end_and_ends(
    shared_cluster: Cluster, views: dict[str, View], codec: str
) -> None:
    view = views[codec]
    for start in (0, 3000, view.end, view.end + 500):
        words = ("-C", "-t", view.name, "-p", "0", "-o", str(start), "-e", "-q", "-f", "%o %s\n")
        told = kcat(shared_cluster, *words).decode().splitlines()
        assert told == [f"{row.offset} {row.value}" for row in view.since(start)]


# ---- through a change of the leader ----


def move_leader(cluster: Cluster, topic: str) -> None:
    """Another replica of partition 0 leads."""
    admin = kafka.KafkaAdminClient(bootstrap_servers=cluster.bootstrap.split(","))
    try:
        (row,) = admin.describe_topics([topic])
        (partition,) = row["partitions"]
        before, replicas = partition["leader_id"], partition["replica_nodes"]
        others = [node for node in replicas if node != before]
        where = kafka.TopicPartition(topic, 0)
        admin.alter_partition_reassignments({where: [*others, before]})
        wait_until(lambda: not admin.list_partition_reassignments([where]), WAIT_S, "it is known")
        wait_until(lambda: elect_preferred(admin, topic) == others[0], WAIT_S, f"{others[0]} leads")
    finally:
        admin.close()


def test_a_group_reads_on_under_another_leader(
    client: ClientAdapter, shared_cluster: Cluster, unique: str
) -> None:
    view = make_view(shared_cluster, unique, "lz4")
    writer = Writer(shared_cluster.bootstrap, view)
    member = client.member(unique, view.name)
    found: list[Row] = []
    try:
        for _ in range(3):
            writer.write(sparse(300, 30))
            found += read_on(member, len(view.rows) - len(found))
            assert found == view.rows
            move_leader(shared_cluster, view.base)
            assert end_of(shared_cluster, view.name) == view.end, "its end never falls"
            writer.write(["order"] * 500)
        writer.write(["refund"] * 30)
        found += read_on(member, len(view.rows) - len(found))
        assert found == view.rows
        member.commit()
    finally:
        member.close()
    assert committed(shared_cluster, unique, view.name) == view.end


# ---- clients of other languages ----


def keyed(rows: Sequence[Row]) -> list[tuple[int, str, str]]:
    return [(row.offset, row.key, row.value) for row in rows]


def keyed_lines(lines: Sequence[dict[str, Any]]) -> list[tuple[int, str, str]]:
    return [(line["offset"], line["key"], line["value"]) for line in lines]


@pytest.fixture(scope="module")
def programs() -> Callable[[str], Program]:
    made: dict[str, Program] = {}

    def program(name: str) -> Program:
        return made.get(name) or made.setdefault(name, Program(name))

    return program


@pytest.mark.polyglot
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", NAMES)
def test_clients_of_other_languages_read_what_matches(
    shared_cluster: Cluster,
    views: dict[str, View],
    programs: Callable[[str], Program],
    name: str,
    codec: str,
) -> None:
    if (name, codec) in NOT_READ:
        pytest.skip("the client wants a library for it")
    program, view = programs(name), views[codec]
    for start in (0, 3000):
        lines = program.consume(shared_cluster.bootstrap, view.name, 0, start, view.end)
        assert keyed_lines(lines) == keyed(view.since(start))


@pytest.mark.polyglot
@pytest.mark.parametrize("name", NAMES)
def test_their_groups_go_on_where_they_committed(
    shared_cluster: Cluster, views: dict[str, View], programs: Callable[[str], Program], name: str
) -> None:
    program, view, group = programs(name), views["gzip"], f"{name}-once"
    bootstrap = shared_cluster.bootstrap
    first = program.group(bootstrap, view.name, group, 5)
    assert keyed_lines(first) == keyed(view.rows[:5])
    assert committed(shared_cluster, group, view.name) == view.rows[4].offset + 1
    rest = program.group(bootstrap, view.name, group, len(view.rows) - 5)
    assert keyed_lines(rest) == keyed(view.rows[5:])
    assert committed(shared_cluster, group, view.name) == end_of(shared_cluster, view.name)


@pytest.mark.polyglot
@pytest.mark.parametrize("name", NAMES)
def test_they_find_the_first_match_of_a_time(
    shared_cluster: Cluster, views: dict[str, View], programs: Callable[[str], Program], name: str
) -> None:
    program, view = programs(name), views["zstd"]
    for at in (view.rows[0].timestamp, view.rows[3].timestamp + 1, view.rows[-1].timestamp):
        wanted = next(row.offset for row in view.rows if row.timestamp >= at)
        assert program.offset_at(shared_cluster.bootstrap, view.name, 0, at) == wanted


@pytest.mark.polyglot
@pytest.mark.parametrize("name", NAMES)
def test_they_read_on_under_another_leader(
    shared_cluster: Cluster, unique: str, programs: Callable[[str], Program], name: str
) -> None:
    program, view = programs(name), make_view(shared_cluster, unique, "gzip")
    writer = Writer(shared_cluster.bootstrap, view)
    rounds, size = 3, 400
    end = rounds * size + 1
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(
            program.consume, shared_cluster.bootstrap, view.name, 0, 0, end, timeout_s=2 * WAIT_S
        )
        for _ in range(rounds):
            writer.write(sparse(size, 40))
            move_leader(shared_cluster, view.base)
        writer.write(["refund"])
        found = keyed_lines(reading.result())
    if name == "kafkajs":  # it makes its consumer anew, which has committed nothing here
        found = list(dict.fromkeys(found))
    assert found == keyed(view.rows)
