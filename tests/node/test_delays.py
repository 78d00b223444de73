"""One delay partition and its targets, step by step: transactions, what is given up, long logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import UUID

import attrs
import pytest

from raftmq.delays.deliveries import ORDINARY, Lane
from raftmq.delays.headers import GIVEN_UP, NOT_DELIVERED
from raftmq.delays.pending import FIRST
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.image import LEVEL_OF_CONDITIONS, LEVEL_OF_DEAD_TOPICS
from raftmq.node.delay_readings import ENTRIES_MIN
from raftmq.node.delays import GONE_MS_MIN, LOOK_MS_MAX, Delays, Led
from raftmq.partition.partition import Partition
from raftmq.partition.ports import FileSpan
from raftmq.partition.settings import PartitionSettings
from raftmq.promise import Promise
from raftmq.records import (
    Marker,
    NewRecord,
    Record,
    build_batch,
    build_marker,
    parse_header,
    read_records,
    set_log_append_time,
)
from raftmq.types import LeaderEpoch, Offset, ReplicaId, TopicId
from tests.partition.fake_replica import REPLICAS, Bench

T = TypeVar("T")
TARGET, DEAD = TopicId(UUID(int=101)), TopicId(UUID(int=102))
GIVEUP_MS = 5_000
RETRY = {
    "raftmq.delivers.to": "orders",
    "raftmq.dead.to": "dead",
    "raftmq.retry.min.ms": "1",
    "raftmq.retry.max.ms": "1",
    "raftmq.delivery.giveup.ms": str(GIVEUP_MS),
}
PLAIN = {
    "raftmq.dead.to": "dead",
    "raftmq.retry.attempts": "0",
    "raftmq.delivery.giveup.ms": str(GIVEUP_MS),
}
with_a_dead_topic = pytest.mark.parametrize("configs", [RETRY, PLAIN], ids=["retry", "plain"])


class World:
    """The partition, its leader's `Delays`, and targets that take what they are sent."""

    def __init__(self, **configs: str) -> None:
        named = {"raftmq.delivers.to": "orders", **configs}
        self.bench = Bench(settings=PartitionSettings.from_configs(named))
        self.partition, self.replica = self.bench.partition, self.bench.replica
        self.now_ms = 1_000_000
        self.partition._delay_ms = lambda: self.now_ms
        self.topics = {"orders": TARGET, "dead": DEAD}
        self.level = LEVEL_OF_CONDITIONS
        self.taken: dict[TopicId, list[Record]] = {TARGET: [], DEAD: []}
        self.sent: set[tuple[TopicId, int, int, int]] = set()
        self.is_answering = True
        self.is_heard = self.is_taking = True
        self.lead()

    def lead(self) -> None:
        """A new leader begins, which knows nothing but the log."""
        row = SimpleNamespace(leader_id=1)
        control: Any = SimpleNamespace(
            engine=self, leaders=SimpleNamespace(get=lambda *_: row), deliver=self._take
        )
        agreed: Any = SimpleNamespace(reached_ms=lambda: self.now_ms, is_sure=True)
        deadlines: Any = SimpleNamespace(after=lambda *_: SimpleNamespace(cancel=lambda: None))
        tasks: Any = self
        self.delays = Delays(control, tasks, deadlines, agreed, self._nobody, lambda _: None)
        self.delays.led(self.partition)

    @staticmethod
    def _nobody(*_: object) -> Partition | None:
        return None

    # The metadata engine.

    @property
    def image(self) -> Any:
        """What is known of topics now."""
        by_name = {
            name: SimpleNamespace(topic_id=topic_id, partitions=(0,), configs={})
            for name, topic_id in self.topics.items()
        }
        by_id = {topic.topic_id: topic for topic in by_name.values()}
        return SimpleNamespace(topics=by_name, topic_by_id=by_id.get, level=self.level)

    @staticmethod
    def read_barrier(*, timeout_ms: float) -> Promise[None]:
        """It is known at once."""
        assert timeout_ms > 0
        return Promise.resolved(None)

    # Tasks, all of them at once.

    async def sleep(self, _seconds: float) -> None:
        """Nothing else is to run."""

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Here."""
        return work()

    async def wait(self, promise: Promise[T]) -> T:
        """A majority is quick."""
        if not promise.is_done:
            self.commit()
        return promise.result()

    def _take(self, _leader: int, topic_id: TopicId, _index: int, batch: bytes) -> Any:
        if not self.is_answering or topic_id not in self.topics.values():
            return Promise.resolved(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        if topic_id != DEAD and not (self.is_taking or self.is_heard):
            return Promise.resolved(ErrorCode.NOT_ENOUGH_REPLICAS)
        header = parse_header(batch)
        key = topic_id, header.producer_id, header.producer_epoch, header.base_sequence
        if key not in self.sent:
            self.sent.add(key)
            self.taken[topic_id] += read_records(batch)
        is_heard = self.is_heard or topic_id == DEAD
        return Promise.resolved(ErrorCode.NONE if is_heard else ErrorCode.REQUEST_TIMED_OUT)

    # What a test does.

    def commit(self) -> None:
        self.replica.commit(self.replica.log_end_offset)

    def write(
        self,
        values: Iterable[str],
        *headers: tuple[str, bytes],
        producer_id: int = -1,
        key: bytes | None = None,
    ) -> None:
        """Append records, committed; of a transaction where a producer is named."""
        batch = build_batch(
            [NewRecord(key, value.encode(), None, headers) for value in values],
            timestamp=self.now_ms,
            producer_id=producer_id,
            producer_epoch=0 if producer_id >= 0 else -1,
            base_sequence=0 if producer_id >= 0 else -1,
            transactional=producer_id >= 0,
        )
        self._append(batch)

    def end(self, producer_id: int, *, is_commit: bool) -> None:
        """A transaction's marker."""
        marker = Marker(is_commit)
        self._append(
            build_marker(marker, producer_id=producer_id, producer_epoch=0, timestamp=self.now_ms)
        )

    def _append(self, batch: bytearray) -> None:
        set_log_append_time(batch, self.partition._stamp_ms(self.partition.settings))
        self.replica.append(batch, parse_header(batch))
        self.commit()

    def led(self, lane: Lane = ORDINARY) -> Led:
        return self.delays._led[self.partition.group, lane.is_dead]

    def run(self, steps: int = 30) -> None:
        """Let each lane do so many steps at most."""
        for led in list(self.delays._led.values()):
            for _ in range(steps):
                coroutine = self.delays._step(led)
                try:
                    coroutine.send(None)
                    pytest.fail("it waits for what never comes")
                except StopIteration as done:
                    if done.value:
                        break
                except KafkaError as error:
                    self.delays._failed(led, str(error))
                    break

    def values(self, topic: TopicId = TARGET) -> list[str]:
        return [(record.value or b"").decode() for record in self.taken[topic]]


# ---- transactions ----


def test_what_a_transaction_holds_is_pending_once_it_is_committed() -> None:
    world = World()
    world.write(["a", "b"], producer_id=7)
    world.write(["never"], producer_id=8)
    world.write(["plain"])
    world.run()
    assert world.values() == ["plain"], "it waits for no transaction"
    world.end(8, is_commit=False)
    world.end(7, is_commit=True)
    world.run()
    assert world.values() == ["plain"], "due a millisecond after the marker"
    world.now_ms += 1
    world.run()
    assert world.values() == ["plain", "a", "b"]
    world.lead()
    world.now_ms += 10_000
    world.run()
    assert world.values() == ["plain", "a", "b"], "nor does another leader deliver it again"


def test_a_new_leader_finds_the_order_of_what_was_committed_late() -> None:
    """Its cursor stands above the append of the transaction's records, not above its marker."""
    world = World()
    world.write(["late"], ("deliver-after", b"1"), producer_id=7)
    for number in range(5):
        world.now_ms += 100
        world.write([str(number)])
        world.run()
    world.end(7, is_commit=True)
    world.lead()
    world.now_ms += 1
    world.run()
    assert world.values() == ["0", "1", "2", "3", "4", "late"]


def test_retention_leaves_an_open_transaction() -> None:
    world = World()
    world.write(["plain"])
    world.write(["open"], producer_id=7)
    world.write(["behind"])
    world.run()
    world.write(["behind, too"])
    world.run()
    assert world.delays.kept_from(world.partition) == 1, "the last note names its own alone"
    world.end(7, is_commit=False)
    world.now_ms += 1
    world.write(["last"])
    world.run()
    kept = world.delays.kept_from(world.partition)
    assert kept is not None
    assert kept > 2


# ---- given up ----


def gone(world: World) -> None:
    """The target is deleted, and everything is late."""
    del world.topics["orders"]
    world.run()
    world.now_ms += max(GIVEUP_MS, GONE_MS_MIN)


@with_a_dead_topic
def test_what_has_no_target_any_more_is_dead_once_each(configs: dict[str, str]) -> None:
    world = World(**configs)
    world.write([str(number) for number in range(250)])
    world.now_ms += 10
    gone(world)
    world.run()
    world.now_ms += 1
    world.run()
    assert world.values(DEAD) == [str(number) for number in range(250)]
    assert world.delays.given_up_count == 250
    assert dict(world.taken[DEAD][0].headers)[GIVEN_UP] == NOT_DELIVERED
    world.lead()
    world.now_ms += 100_000
    world.run()
    assert len(world.values(DEAD)) == 250
    world.topics["orders"] = TopicId(UUID(int=103))
    world.taken[world.topics["orders"]] = []
    world.write(["again"])
    world.now_ms += 10
    world.run()
    assert world.values(world.topics["orders"]) == ["again"]


@with_a_dead_topic
def test_what_was_noted_for_a_target_that_is_gone_is_dead_too(configs: dict[str, str]) -> None:
    world = World(**configs)
    world.is_answering = False
    world.write(["a", "b"])
    world.now_ms += 10
    world.run()
    assert world.led().is_owed
    gone(world)
    world.is_answering = True
    for _ in range(3):
        world.run()
        world.now_ms += 1
    assert world.values(DEAD) == ["a", "b"]


def refused(world: World, *, is_taken: bool) -> None:
    """Some records are due; the target takes the first one, or not, and is silent for long."""
    world.level = LEVEL_OF_DEAD_TOPICS
    if is_taken:
        world.is_heard = False
    else:
        refuse(world)
    world.write(["first"])
    world.now_ms += 10
    world.run()
    world.write(["b", "c", "d"])
    world.write(["never"], ("deliver-after", b"1"), key=b"k")
    world.write([""], ("deliver-at", b"never"), key=b"k")
    world.write(["far"], ("deliver-after", b"1h"))
    world.now_ms += max(GIVEUP_MS, GONE_MS_MIN)
    world.run()
    world.run()
    world.now_ms += 1
    world.run()


def refuse(world: World) -> None:
    """The target takes nothing until it is heard again; that of the dead does."""
    world.is_heard = world.is_taking = False


@with_a_dead_topic
@pytest.mark.parametrize("is_taken", [True, False], ids=["it took it", "it did not"])
@pytest.mark.parametrize("is_led_anew", [True, False], ids=["led anew", ""])
def test_what_a_target_does_not_take_is_dead_but_for_what_it_may_have_taken(
    configs: dict[str, str], is_taken: bool, is_led_anew: bool
) -> None:
    world = World(**configs)
    refused(world, is_taken=is_taken)
    assert world.values(DEAD) == ["b", "c", "d"]
    assert world.values() == (["first"] if is_taken else [])
    assert world.led().is_owed
    assert world.led().trouble
    assert world.delays.given_up_count == 3
    assert world.delays.kept_from(world.partition) == 0, "what is owed is sent again from there"
    if is_led_anew:
        world.lead()
        world.run()
    world.write(["e"])
    world.now_ms += 10
    world.run()
    assert world.values(DEAD) == ["b", "c", "d"], "it is not as late"
    world.is_heard = True
    world.run()
    assert world.values() == ["first", "e"], "once"
    world.now_ms += 3_600_000
    world.run()
    world.lead()
    world.run()
    assert (world.values(), world.values(DEAD)) == (["first", "e", "far"], ["b", "c", "d"])


def test_a_target_that_goes_after_it_refused_for_long() -> None:
    """What was owed is dead then, too, and nothing is so twice."""
    world = World(**PLAIN)
    refused(world, is_taken=False)
    world.lead()
    gone(world)
    for _ in range(3):
        world.run()
        world.now_ms += 1
    assert world.values(DEAD) == ["b", "c", "d", "first"]
    assert world.delays.given_up_count == 1


def test_a_target_that_is_made_again_after_it_refused_for_long() -> None:
    world = World(**PLAIN)
    refused(world, is_taken=False)
    again = world.topics["orders"] = TopicId(UUID(int=103))
    world.taken[again] = []
    world.is_heard = True
    for _ in range(3):
        world.run()
        world.now_ms += 1
    assert (world.values(again), world.values(DEAD)) == (["first"], ["b", "c", "d"])


@pytest.mark.parametrize("why", ["level", "no dead topic", "taken in time"])
def test_a_target_that_refuses_is_waited_for(why: str) -> None:
    world = World(**(PLAIN if why != "no dead topic" else {}))
    refuse(world)
    world.level = LEVEL_OF_DEAD_TOPICS - (why == "level")
    world.write(["first"])
    world.now_ms += 10
    world.run()
    world.write(["b"])
    for _ in range(3):
        world.now_ms += max(GIVEUP_MS, GONE_MS_MIN) - (GONE_MS_MIN if why == "taken in time" else 1)
        world.is_heard = why == "taken in time"
        world.run()
        world.is_heard = False
        world.run()
    assert world.delays.given_up_count == 0
    world.is_heard = True
    world.run()
    assert world.values() == ["first", "b"]


@pytest.mark.parametrize("why", ["young", "just gone", "level", "unanswered", "no dead topic"])
@with_a_dead_topic
def test_nothing_is_given_up_too_soon(configs: dict[str, str], why: str) -> None:
    world = World(**(configs if why != "no dead topic" else {}))
    world.write(["a"])
    world.now_ms += 10
    if why == "unanswered":
        world.is_answering = False
    elif why == "just gone":
        world.now_ms += GIVEUP_MS  # late for another reason
        del world.topics["orders"]
    else:
        del world.topics["orders"]
    world.run()
    if why not in ("young", "just gone"):
        world.now_ms += GONE_MS_MIN + GIVEUP_MS
    if why == "level":
        world.level = LEVEL_OF_CONDITIONS - 1
    for _ in range(3):
        world.run()
        world.now_ms += 1
    assert world.delays.given_up_count == 0
    assert world.values(DEAD) == []
    assert world.led().trouble


def test_only_what_its_target_was_there_for_comes_there() -> None:
    """Without retries no record is dead by itself, and none waits for a back-off."""
    world = World(**PLAIN)
    world.write(["often"], ("raftmq-attempt", b"1000"))
    world.write(["later"], ("deliver-after", b"500"))
    world.run()
    assert world.values() == ["often"], "at once"
    assert dict(world.taken[TARGET][0].headers)["raftmq-attempt"] == b"1000", "as any header"
    world.now_ms += 500
    gone(world)
    world.run()
    world.now_ms += 1
    world.run()
    assert (world.values(), world.values(DEAD)) == (["often"], ["later"])
    (dead,) = world.taken[DEAD]
    told = dict(dead.headers)
    assert told.pop("raftmq-created-at", None)
    assert told == {"raftmq-delayed-at": b"t/0/1", GIVEN_UP: NOT_DELIVERED}


def test_what_is_cancelled_before_it_is_given_up_is_not_dead() -> None:
    world = World(**PLAIN)
    world.write(["a", "b"], ("deliver-after", b"10"), key=b"k")
    world.write([""], ("deliver-at", b"never"), key=b"k")
    world.write(["c"], ("deliver-after", b"10"))
    world.now_ms += 10
    gone(world)
    world.run()
    world.now_ms += 1
    world.run()
    assert world.values(DEAD) == ["c"]


@with_a_dead_topic
def test_retention_leaves_what_is_given_up_until_it_is_pending_as_dead(
    configs: dict[str, str],
) -> None:
    world = World(**configs)
    world.write(["a"])
    world.now_ms += 10
    gone(world)
    dead = world.led(Lane(is_dead=True))
    del world.delays._led[dead.key]  # it lags
    world.run()
    world.write(["b"])
    world.now_ms += 2 * GIVEUP_MS
    world.run()
    assert world.delays.given_up_count == 2
    world.delays._led[dead.key] = dead
    assert world.delays.kept_from(world.partition) == 0
    world.run()
    world.now_ms += 1
    world.run()
    world.write(["c"])
    world.run()
    assert world.values(DEAD) == ["a", "b"]


# ---- long logs ----


def test_lanes_share_what_a_node_holds() -> None:
    """A lane may hold what the others leave, and its share at least."""
    world = World(**RETRY)
    world.delays._node_entries = 100 * ENTRIES_MIN
    led, dead = world.led(), world.led(Lane(is_dead=True))
    assert world.delays._room_of(led) == 100 * ENTRIES_MIN
    world.write([str(number) for number in range(30)], ("deliver-after", b"1h"))
    world.run()
    assert world.delays._room_of(led) == 100 * ENTRIES_MIN
    assert world.delays._room_of(dead) == 100 * ENTRIES_MIN - 30
    world.delays._node_entries = 30
    for number in range(1_000):
        world.delays._led[number, False] = led  # type: ignore[index]
    assert world.delays._room_of(dead) == ENTRIES_MIN


def test_a_log_that_holds_more_than_memory_is_read_ahead_of_need() -> None:
    world = World()
    world.delays.entries_max = 8
    for number in range(0, 60, 3):
        values = [str(number + index) for index in range(3)]
        world.write(values, ("deliver-after", b"%d" % (1_000 + (number * 7) % 60)))
    world.run()
    led = world.led()
    assert led.reading is not None
    assert led.reading.pending.beyond_count > 0
    passes = {id(led.reading)}
    world.delays._read_anew = pytest.fail  # type: ignore[assignment]  # that would be a pause
    for _ in range(150):
        world.now_ms += 10
        world.run(steps=3)
        passes.add(id(led.reading))
        assert world.delays.kept_from(world.partition) is not None
    assert sorted(map(int, world.values())) == list(range(60)), "each once"
    assert len(passes) > 1


# ---- followers ----


def never_from_the_start(delays: Delays) -> None:
    """Who reads the log from its start fails."""

    def fail(*_: object) -> Any:
        pytest.fail("it reads from the start")

    delays._reader.begin = fail  # type: ignore[method-assign]


class Standby:
    """Another node's replica of the partition, which follows it."""

    def __init__(self, world: World) -> None:
        leader = world.delays
        world.lead()
        self.world, self.delays = world, world.delays
        self.delays._led.clear()
        world.delays = leader
        self.delays.opened(world.partition)

    def follow(self, leader: ReplicaId | None = REPLICAS[1]) -> None:
        """Read on."""
        replica = self.world.replica
        replica.is_leader, replica.is_writable, replica.leader = False, False, leader
        replica.log.flushed_end_offset = replica.log_end_offset
        for item in list(self.delays.followers._items.values()):
            for _ in range(5):
                turn = self.delays.followers._turn(item)
                with pytest.raises(StopIteration):
                    turn.send(None)
        replica.is_leader, replica.is_writable, replica.leader = True, True, REPLICAS[0]

    def is_reading(self, *, is_leader: bool = False) -> bool:
        """What it tells of itself."""
        self.world.replica.is_writable = is_leader
        says = self.delays.followers.is_reading
        self.world.replica.is_writable = True
        return says

    def lead(self) -> None:
        """It is elected, and may not read the log from its start."""
        self.world.delays = self.delays
        self.delays.led(self.world.partition)


def test_a_follower_knows_what_is_pending_once_it_leads() -> None:
    world = World()
    standby = Standby(world)
    for number in range(8):
        world.write([str(number)], ("deliver-after", b"%d" % (1_000 - 100 * (number % 4))))
    standby.follow()
    world.now_ms += 800
    world.run()
    assert world.values() == ["3", "7", "2", "6"]
    world.write(["late"], ("deliver-after", b"1"), producer_id=7)
    standby.follow()
    world.end(7, is_commit=True)
    never_from_the_start(standby.delays)
    standby.lead()
    world.now_ms += 50
    world.run()
    assert world.values() == ["3", "7", "2", "6", "late"]
    world.now_ms += 1_000
    world.run()
    assert world.values() == ["3", "7", "2", "6", "late", "1", "5", "0", "4"]
    assert world.led().reading is not None


def test_a_follower_is_reading_until_it_was_at_the_end_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raftmq.node.delay_readings.READ_BYTES", 1)
    world = World()
    standby = Standby(world)
    for number in range(8):
        world.write([str(number)], ("deliver-after", b"1000"))
    assert not standby.is_reading(is_leader=True)
    assert standby.is_reading()
    standby.follow()
    assert standby.is_reading(), "five of eight batches are read"
    assert world.replica.stands_last
    standby.follow()
    assert not standby.is_reading()
    assert not world.replica.stands_last
    world.write(["8"], ("deliver-after", b"1000"))
    assert not standby.is_reading(), "of what comes it is a moment behind"
    standby.delays.followers.closed(world.partition)
    assert not standby.is_reading()


def test_lanes_that_are_followed_are_read_after_those_that_are_led() -> None:
    followed, world = World(), World()
    for one in (followed, world):
        one.write(["a", "b"], ("deliver-after", b"1000"))
    standby = Standby(followed)
    standby.delays._led[world.led().key] = led = world.led()
    standby.delays._behind = world.delays._behind
    assert not standby.delays.is_reading, "it has still to find its last note"
    world.run(steps=1)
    assert standby.delays.is_reading
    standby.follow()
    (item,) = standby.delays.followers._items.values()
    assert item.reading is None
    led.failed("the log cannot be read")
    assert not standby.delays.is_reading, "that may last"
    led.succeeded()
    world.run()
    assert not standby.delays.is_reading, "of what comes it is a moment behind"
    world.delays._read_anew(led, led.reading.pending.cursor if led.reading else FIRST)
    assert standby.delays.is_reading
    world.run()
    standby.follow()
    assert item.reading is not None
    assert item.reading.pending.count == 2


def test_of_lanes_that_are_led_the_one_with_least_left_is_read_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raftmq.node.delays.CATCH_UP_BYTES", 1)
    monkeypatch.setattr("raftmq.node.delay_readings.READ_BYTES", 1)
    long, short = World(), World()
    for world, count in ((long, 9), (short, 3)):
        for number in range(count):
            world.write([str(number)])
    slow, fast = long.led(), short.led()
    woken: list[Led] = []
    for led in (slow, fast):
        led.wake = lambda led=led: woken.append(led)
    delays = long.delays
    fast.lane = Lane(is_dead=True, has_dead=True)
    delays._led[fast.key] = fast
    delays._behind[fast] = None

    def step(led: Led) -> float | None:
        coroutine = delays._step(led)
        with pytest.raises(StopIteration) as done:
            coroutine.send(None)
        pause_ms: float | None = done.value.value
        return pause_ms

    assert step(slow) == step(fast) == 0, "both find their last notes"
    assert step(slow) == LOOK_MS_MAX
    while fast in delays._behind:
        assert woken == []
        assert step(slow) == LOOK_MS_MAX
        assert step(fast) == 0
    assert woken == [slow]
    assert slow.reading is not None
    assert slow.reading.end == 0
    assert step(slow) == 0
    assert slow.reading.end == 1
    long.write(["9"])
    for _ in range(9):
        assert slow in delays._behind
        assert step(slow) == 0
    assert slow not in delays._behind
    assert slow.reading.end == 10


def test_a_lane_that_cannot_send_keeps_no_other_from_being_read() -> None:
    stuck, world = World(), World()
    stuck.is_answering = False
    stuck.write(["a"])
    stuck.now_ms += 10
    stuck.run()
    stuck.lead()
    stuck.run(steps=1)
    world.write([str(number) for number in range(9)])
    delays = world.delays
    led = stuck.led()
    assert led.is_owed
    led.lane = Lane(is_dead=True, has_dead=True)
    delays._led[led.key] = led
    delays._behind[led] = None
    world.now_ms += 10
    world.run()
    assert len(world.values()) == 9


def test_a_leader_that_knows_no_time_yet_reads_the_log_and_delivers_nothing() -> None:
    world = World()
    world.write(["a"])
    world.now_ms += 10
    now_ms: int | None = None
    world.delays._now_ms = lambda: now_ms
    world.run()
    led = world.led()
    assert led.reading is not None
    assert led.reading.pending.count == 1
    assert world.values() == []
    now_ms = world.now_ms
    world.run()
    assert world.values() == ["a"]


def test_what_is_noted_is_sent_by_a_leader_that_knows_no_time() -> None:
    world = World()
    world.is_answering = False
    world.write(["a"])
    world.now_ms += 10
    world.run()
    assert world.values() == []
    world.lead()
    world.delays._now_ms = lambda: None
    world.is_answering = True
    world.run()
    assert world.values() == ["a"]


def test_a_leader_that_lost_its_leadership_knows_what_is_pending() -> None:
    world = World()
    world.delays.opened(world.partition)
    world.write(["a", "b"], ("deliver-after", b"1000"))
    world.run()
    led = world.led()
    world.replica.leader_epoch = LeaderEpoch(6)
    world.run()
    assert world.delays._led == {}
    assert led.reading is None
    never_from_the_start(world.delays)
    world.delays.led(world.partition)
    world.now_ms += 1_000
    world.run()
    assert world.values() == ["a", "b"]


def test_a_follower_reads_anew_where_the_log_does_not_go_on() -> None:
    """A cancellation may stand in what it has not read, and retention has taken."""
    world = World()
    standby = Standby(world)
    world.write(["a", "b"], ("deliver-after", b"1000"))
    standby.follow()
    (item,) = standby.delays.followers._items.values()
    assert item.reading is not None
    assert item.reading.pending.count == 2
    world.write(["c"])
    world.replica.log.log_start = attrs.evolve(world.replica.log.log_start, offset=Offset(3))
    standby.lead()
    world.now_ms += 2_000
    world.run()
    assert world.values() == []
    world.delays.followers.closed(world.partition)
    assert world.delays.followers.count == 0


def test_a_follower_without_a_leader_keeps_what_it_read() -> None:
    world = World()
    standby = Standby(world)
    world.write(["a"], ("deliver-after", b"1000"))
    standby.follow()
    world.write(["b"], ("deliver-after", b"1000"))
    standby.follow(leader=None)
    never_from_the_start(standby.delays)
    standby.lead()
    world.now_ms += 2_000
    world.run()
    assert world.values() == ["a", "b"]


def test_what_was_taken_in_by_half_is_read_anew() -> None:
    """The second batch of a transaction cannot be read when its marker comes; the first one was."""
    world = World()
    world.write(["a"], producer_id=7)
    world.write(["b"], producer_id=7)
    world.run()
    spans = world.delays._reader.spans

    async def fail(partition: Partition, offset: int, bytes_max: int) -> list[FileSpan]:
        if bytes_max == 1 and offset == 1:
            raise KafkaError("the disk", code=ErrorCode.KAFKA_STORAGE_ERROR)
        return await spans(partition, offset, bytes_max)

    world.delays._reader.spans = fail  # type: ignore[method-assign]
    world.end(7, is_commit=True)
    world.now_ms += 10
    world.run()
    assert world.values() == []
    assert world.led().trouble
    world.delays._reader.spans = spans  # type: ignore[method-assign]
    world.run()
    assert world.values() == ["a", "b"]
