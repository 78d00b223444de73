"""Topics that shrink, grow, go and grow again while a stock client writes keyed records to them.

Whatever a client does when fewer partitions are listed (docs/shrink-clients.md has it), each record
that it was told of as acknowledged is read once by each group: by one that follows, by one that was
far behind and reads what is retired through the view, and by one of our own client without it. What
it was told of as failed was placed on a retired partition, before it had asked for metadata.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import confluent_kafka
import pytest

from raftmq_client.blocking import Consumer
from tests.clients.adapters import Loop
from tests.clients.keyed import (
    Keyed,
    KeyedLoad,
    OfAioKafka,
    OfConfluent,
    OfKafkaPython,
    OfProgram,
    Tell,
    Told,
    key_of,
)
from tests.clients.programs import Program
from tests.live.harness import Cluster, wait_until
from tests.live.load import create_topic
from tests.live.test_shrink import Group, grow, shrink, wait_for

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    # kafka-python leaves sockets to the garbage collector when it closes.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

RATE = 200
RETIRED = (4, 5)
HASHES_ANEW = {"confluent-kafka", "java", "kafka-python", "aiokafka", "sarama"}
"""Who places records among the listed partitions once it has asked; others never do."""
LEAVES_GAPS = {"aiokafka", "confluent-kafka"}
"""Who gives up records of a number that is gone and goes on behind their sequences when it grows. A
leader refuses that for a minute, since what was given up may be under way; that is not waited for
here."""
BREAKER = "circuit breaker is open"
"""What Sarama says for ten seconds of all records for a partition that it looked up three times in
vain, also when the partition is there again."""
MADE: dict[str, Callable[[str, str, Tell], Keyed]] = {
    "confluent-kafka": OfConfluent,
    "kafka-python": OfKafkaPython,
}


@pytest.fixture
def make(request: pytest.FixtureRequest, asyncio_loop: Loop) -> Callable[[str, Tell], Keyed]:
    """What makes a producer of the client that the test is for."""
    name = request.param
    if name == "aiokafka":
        return lambda bootstrap, tell: OfAioKafka(asyncio_loop, bootstrap, "t", tell)
    if name in MADE:
        return lambda bootstrap, tell: MADE[name](bootstrap, "t", tell)
    program = Program(name)
    return lambda bootstrap, tell: OfProgram(program, bootstrap, "t", tell)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("shrunk-under-load")
    with Cluster(folder, settings={"retention_check_ms": 200}) as started:
        create_topic(started.bootstrap, "t", 6, retention_ms="3600000")
        yield started


class Own:
    """A member of a group of our own client that reads all the while, without the view."""

    def __init__(self, bootstrap: str) -> None:
        self.read: Counter[tuple[int, int, bytes]] = Counter()
        self._consumer = Consumer(
            bootstrap, topics="t", group="own", reset="earliest", metadata_max_age_ms=300
        )
        self._is_over = threading.Event()
        self._wanted = -1
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Own:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def wait_for(self, count: int) -> None:
        """Until it has read so many records in all."""
        wait_until(lambda: self.read.total() >= count, 60, f"{count} records of our client")

    def _run(self) -> None:
        with self._consumer as consumer:
            while not self._is_over.is_set():
                for record in consumer.poll(0.2):
                    self.read[record.partition, record.offset, bytes(record.value or b"")] += 1


def ends(cluster: Cluster, retired: tuple[int, ...]) -> dict[int, int]:
    """The end offset of each number."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "w"})
    try:
        return {
            number: consumer.get_watermark_offsets(
                confluent_kafka.TopicPartition("t.retired" if number in retired else "t", number),
                timeout=30,
            )[1]
            for number in range(6)
        }
    finally:
        consumer.close()


def is_taken(told: Told) -> bool:
    return not told.error


def wait_for_six(load: KeyedLoad) -> None:
    """Until records are placed on both numbers again, and taken."""
    for number in RETIRED:

        def is_there(told: Told, number: int = number) -> bool:
            return is_taken(told) and told.partition == number

        load.wait_for(is_there, 3, f"records are placed on {number} and taken")


def be_gone(cluster: Cluster) -> None:
    """Let retention end what is retired, and no more."""
    for value, state in (("1", "gone"), ("3600000", "gone")):
        done = cluster.run("topic", "alter", "t", "--set", f"retention.ms={value}")
        assert done.returncode == 0, done.stderr
        wait_for(cluster, state, RETIRED)


class Shrink:
    """One shrink under load, from its order until its client has seen the growth that ends it."""

    def __init__(self, cluster: Cluster, load: KeyedLoad) -> None:
        self.first = load.sent
        """The first record that was sent after the order."""
        self._load = load
        shrink(cluster, "--now", "--force")
        wait_for(cluster, "sealed", RETIRED)
        load.wait_for(is_taken, 100, "records of the listed partitions")
        self.end = self.over = -1

    def grows(self) -> None:
        """What is sent from now on may be placed on six partitions again."""
        self.end = self._load.sent

    def is_over(self) -> None:
        """The client writes to six partitions again."""
        self.over = self._load.sent

    def check(
        self, homes: dict[str, int], *, hashes_anew: bool, has_new_leaders: bool = False
    ) -> list[int]:
        """Where records went whose keys belong to retired partitions; those that failed. Where
        leaders changed too, what is placed there behind a record that was given up is refused for
        as long as that might come again: a minute, and records have `TIMEOUT_MS` here."""
        told = self._load.told
        sent = [n for n in range(self.first, self.end) if homes[key_of(n)] in RETIRED]
        kept = [n for n in sent if told[n].partition in RETIRED]
        moved = [n for n in sent if told[n].partition not in RETIRED]
        assert bool(moved) is hashes_anew, f"{len(kept)} kept, {len(moved)} moved"
        if moved:
            assert max(kept, default=-1) < moved[0], "once it has asked it knows them no more"
        until = self.end if hashes_anew and not has_new_leaders else self.over
        failed = [n for n in range(self.first, until) if told[n].error]
        return [n for n in failed if told[n].partition in RETIRED]


def check_told(
    load: KeyedLoad, shrinks: list[Shrink], *, hashes_anew: bool, has_new_leaders: bool = False
) -> None:
    """Nothing was told of twice, and nothing failed but what was placed on a retired partition."""
    assert not load.twice
    assert sorted(load.told) == list(range(load.sent))
    homes = {key_of(n): load.told[n].partition for n in range(shrinks[0].first)}
    assert set(homes.values()) == set(range(6))
    failed = {
        n
        for one in shrinks
        for n in one.check(homes, hashes_anew=hashes_anew, has_new_leaders=has_new_leaders)
    }
    since = shrinks[0].first
    broken = {n for n, told in load.told.items() if told.error == BREAKER and n >= since}
    assert all(load.told[n].partition in RETIRED for n in broken)
    failed |= broken
    others = {n: told for n, told in load.told.items() if told.error and n not in failed}
    assert not others, f"{len(others)} failed beside {len(failed)}: {list(others.items())[:5]}"
    taken = sum(is_taken(told) for told in load.told.values())
    print(f"{load.sent} sent, {taken} acknowledged, {len(failed)} failed")  # noqa: T201  # told once


def check_read(load: KeyedLoad, read: dict[tuple[int, int], bytes]) -> None:
    """A group read each acknowledged record where it was acknowledged, and none twice."""
    wanted = {
        (told.partition, told.offset): b"%d" % n for n, told in load.told.items() if is_taken(told)
    }
    assert len(wanted) == sum(is_taken(told) for told in load.told.values()), "an offset for two"
    lost = {at: value for at, value in wanted.items() if read.get(at) != value}
    assert not lost, f"{len(lost)} not read: {list(lost.items())[:5]}"
    others = [int(value) for at, value in read.items() if at not in wanted]
    assert all(load.told[n].error for n in others), "a record is there twice"
    assert len(others) == len(set(others)), "a record that failed is there twice"


@pytest.mark.parametrize(
    ("make", "hashes_anew", "leaves_gaps"),
    [
        pytest.param(name, name in HASHES_ANEW, name in LEAVES_GAPS, id=name, marks=marks)
        for name, marks in (
            ("confluent-kafka", ()),
            ("kafka-python", ()),
            ("aiokafka", ()),
            ("java", pytest.mark.polyglot),
            ("franz", pytest.mark.polyglot),
            ("sarama", pytest.mark.polyglot),
        )
    ],
    indirect=["make"],
)
def test_each_acknowledged_record_is_read_once_by_each_group(
    cluster: Cluster, make: Callable[[str, Tell], Keyed], hashes_anew: bool, leaves_gaps: bool
) -> None:
    bootstrap = cluster.bootstrap
    near, behind = Group(bootstrap, "near"), Group(bootstrap, "behind")
    with Own(bootstrap) as own, KeyedLoad(lambda tell: make(bootstrap, tell), RATE) as load:
        wait_for_six(load)
        behind.take(["t"], 50)
        near.take(["t"], 200)
        shrinks = [Shrink(cluster, load)]
        near.take(["t", "t.retired"], 300)
        shrinks[0].grows()
        grow(cluster)
        wait_for_six(load)
        shrinks[0].is_over()
        shrinks.append(Shrink(cluster, load))
        load.pause()
        shrinks[1].grows()
        before = ends(cluster, RETIRED)
        for group in (near, behind):
            group.take(["t", "t.retired"], sum(before.values()))
        own.wait_for(sum(before.values()))
        be_gone(cluster)
        grow(cluster)
        assert {n: end for n, end in ends(cluster, ()).items() if n in RETIRED} == {
            number: before[number] for number in RETIRED
        }
        if not leaves_gaps:
            load.go_on()
            wait_for_six(load)
        shrinks[1].is_over()
        load.stop()
        after = ends(cluster, ())
        for group in (near, behind) if not leaves_gaps else ():
            group.take(["t"], sum(after.values()))
        own.wait_for(sum(after.values()))
    check_told(load, shrinks, hashes_anew=hashes_anew)
    for group in (near, behind):
        assert not group.twice
        check_read(load, group.read)
    assert set(own.read.values()) == {1}
    check_read(load, {(number, offset): value for number, offset, value in own.read})
