"""Commits gather while one command is under way, and no group waits for another's storm."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import define, evolve, field
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map

from raftmq.errors import ErrorCode, KafkaError
from raftmq.groups.offsets import CommitQueue, expired_offsets
from raftmq.metadata.commands import (
    CommitMany,
    CommitOffsets,
    CommittedOffset,
    GroupCommand,
)
from raftmq.metadata.image import GroupImage
from raftmq.metadata.results import CommitsDone, GroupDone
from raftmq.partition.parked import Deadlines
from raftmq.promise import Promise
from raftmq.types import TopicPartition
from tests.groups.world import FakeClock


def commit(group: str, member: str, *positions: tuple[int, int]) -> CommitOffsets:
    return CommitOffsets(
        group=group,
        coordinator_epoch=1,
        generation=1,
        member_id=member,
        offsets=tuple(CommittedOffset("t", p, offset) for p, offset in positions),
    )


@define
class World:
    """A metadata group whose answers are given by hand."""

    limits: dict[str, int] = field(factory=dict)
    proposed: list[tuple[GroupCommand, Promise[Any]]] = field(factory=list)
    settled: list[tuple[str, ErrorCode]] = field(factory=list)
    queue: CommitQueue = field(init=False)
    clock: FakeClock = field(factory=FakeClock)
    deadlines: Deadlines = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.deadlines = Deadlines(self.clock)
        self.queue = CommitQueue(
            self._propose, _error_of, clock=self.clock, later=self.deadlines.after, **self.limits
        )

    def _propose(self, command: GroupCommand) -> Promise[Any]:
        promise: Promise[Any] = Promise()
        self.proposed.append((command, promise))
        return promise

    def add(self, name: str, command: CommitOffsets) -> None:
        self.queue.add(command, lambda code: self.settled.append((name, code)))

    def answer(self, at: int, *codes: ErrorCode) -> None:
        command, promise = self.proposed[at]
        many = isinstance(command, CommitMany)
        promise.resolve(CommitsDone(tuple(map(int, codes))) if many else GroupDone())

    def wait(self, ms: float) -> None:
        self.clock.now_ms += ms
        self.deadlines.expire(self.clock.now_ms)

    def commits(self, at: int) -> list[CommitOffsets]:
        command = self.proposed[at][0]
        return list(command.commits) if isinstance(command, CommitMany) else [command]


def _error_of(promise: Promise[Any]) -> ErrorCode:
    error = promise.error
    return error.code if isinstance(error, KafkaError) else ErrorCode.NONE


OK = ErrorCode.NONE


def test_a_commit_leaves_at_once_and_the_next_ones_together() -> None:
    world = World()
    first = commit("g", "a", (0, 1))
    world.add("first", first)
    assert world.proposed[0][0] == first, "alone: as it came"
    world.add("b", commit("g", "b", (1, 2)))
    world.add("h", commit("h", "c", (0, 3)))
    assert len(world.proposed) == 1, "one command under way"
    assert len(world.queue) == 2
    world.answer(0)
    assert world.settled == [("first", OK)]
    assert [c.group for c in world.commits(1)] == ["g", "h"]
    world.answer(1, OK, ErrorCode.ILLEGAL_GENERATION)
    assert world.settled[1:] == [("b", OK), ("h", ErrorCode.ILLEGAL_GENERATION)]
    assert len(world.queue) == 0
    assert (world.queue.commits_count, world.queue.commands_count) == (3, 2)


def test_a_member_that_commits_again_replaces_what_has_not_left() -> None:
    world = World()
    world.add("under way", commit("g", "a", (0, 1)))
    world.add("second", commit("g", "a", (0, 2), (1, 2)))
    world.add("third", commit("g", "a", (0, 3)))
    world.answer(0)
    (merged,) = world.commits(1)
    assert {o.partition: o.offset for o in merged.offsets} == {0: 3, 1: 2}
    world.answer(1)
    assert world.settled[1:] == [("second", OK), ("third", OK)]


def test_a_storm_of_one_group_costs_another_one_turn() -> None:
    world = World({"offsets_per_command_max": 10})
    for i in range(100):
        world.add("storm", commit("storm", f"m{i}", *((p, i) for p in range(5))))
    world.add("calm", commit("calm", "a", (0, 1)))
    world.answer(0)
    assert [c.group for c in world.commits(1)] == ["storm", "calm", "storm"], "in turns, up to ten"
    world.answer(1, OK, OK, OK)
    assert ("calm", OK) in world.settled


def test_what_waits_is_bounded_and_says_so_in_a_way_that_clients_repeat() -> None:
    world = World({"offsets_waiting_max": 2})
    world.add("under way", commit("g", "a", (0, 1)))
    world.add("fits", commit("g", "b", (1, 1), (2, 1)))
    world.add("too much", commit("g", "c", (3, 1)))
    assert world.settled == [("too much", ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)]
    world.answer(0)
    world.answer(1)
    world.add("fits again", commit("g", "c", (3, 1)))
    assert len(world.proposed) == 3


def test_commands_keep_a_distance_and_a_rare_commit_waits_for_nothing() -> None:
    world = World({"linger_ms": 5})
    world.add("a", commit("g", "a", (0, 1)))
    world.answer(0)
    world.add("b", commit("g", "b", (1, 1)))
    world.wait(4)
    world.add("c", commit("g", "c", (2, 1)))
    assert len(world.proposed) == 1
    world.wait(1)
    assert [c.member_id for c in world.commits(1)] == ["b", "c"]
    world.wait(4)
    world.add("d", commit("g", "d", (3, 1)))
    world.answer(1, OK, OK)
    assert len(world.proposed) == 2
    world.wait(1)
    assert len(world.proposed) == 3
    world.answer(2)
    world.wait(5)
    world.add("e", commit("g", "e", (0, 2)))
    assert len(world.proposed) == 4, "at once"


def test_what_is_flushed_meanwhile_is_not_sent_twice() -> None:
    world = World({"linger_ms": 5})
    world.add("a", commit("g", "a", (0, 1)))
    world.answer(0)
    world.add("b", commit("g", "b", (1, 1)))
    world.queue.flush("g")
    world.wait(5)
    assert len(world.proposed) == 2
    world.answer(1)
    assert [name for name, _ in world.settled] == ["a", "b"]


def test_a_failure_is_everybodys() -> None:
    world = World()
    world.add("first", commit("g", "a", (0, 1)))
    for name in ("b", "c"):
        world.add(name, commit("g", name, (1, 1)))
    world.answer(0)
    world.proposed[1][1].fail(KafkaError(code=ErrorCode.COORDINATOR_NOT_AVAILABLE))
    assert world.settled[1:] == [(n, ErrorCode.COORDINATOR_NOT_AVAILABLE) for n in ("b", "c")]
    world.add("afterwards", commit("g", "a", (0, 2)))
    assert len(world.proposed) == 3, "the queue goes on"


def test_a_group_can_be_sent_ahead() -> None:
    world = World()
    world.add("under way", commit("g", "a", (0, 1)))
    world.add("of g", commit("g", "b", (1, 1)))
    world.add("of h", commit("h", "c", (0, 1)))
    world.queue.flush("g")
    assert [c.member_id for c in world.commits(1)] == ["b"]
    world.queue.flush_all()
    assert [c.member_id for c in world.commits(2)] == ["c"]
    for i in range(3):
        world.answer(i)
    assert len(world.settled) == 3


@pytest.mark.parametrize("per_command", [1, 3, 1000])
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.sampled_from("gh"), st.sampled_from("ab"), st.integers(0, 2)),
            st.none(),
        ),
        max_size=40,
    )
)
def test_ends_as_one_after_the_other_would(
    per_command: int, steps: list[tuple[str, str, int] | None]
) -> None:
    """Each member's commits in order, every one settled once, the last position wins."""
    world = World({"offsets_per_command_max": per_command})
    expected: dict[tuple[str, str, int], int] = {}
    count = answered = 0
    for number, step in enumerate(steps):
        if step is not None:
            group, member, partition = step
            expected[step] = number
            count += 1
            world.add(str(number), commit(group, member, (partition, number)))
        elif answered < len(world.proposed):
            world.answer(answered, *[OK] * len(world.commits(answered)))
            answered += 1
    while answered < len(world.proposed):
        world.answer(answered, *[OK] * len(world.commits(answered)))
        answered += 1
    found: dict[tuple[str, str, int], int] = {}
    for at in range(len(world.proposed)):
        for one in world.commits(at):
            for entry in one.offsets:
                key = (one.group, one.member_id, entry.partition)
                assert found.get(key, -1) < entry.offset, "order of one member"
                found[key] = entry.offset
    assert found == expected
    assert len(world.settled) == count
    assert len(world.queue) == 0


def test_commands_may_follow_each_other_closely_where_a_round_is_long() -> None:
    world = World({"in_flight_max": 2})
    for number in range(4):
        world.add(str(number), commit("g", "a", (0, number)))
    assert len(world.proposed) == 2
    world.answer(0)
    assert [o.offset for c in world.commits(2) for o in c.offsets] == [3], "in the member's order"
    world.answer(1)
    world.answer(2)
    assert [name for name, _ in world.settled] == ["0", "1", "2", "3"]


def test_what_a_running_transaction_may_change_does_not_expire() -> None:
    offsets = {TopicPartition("t", n): CommittedOffset("t", n, 5, timestamp_ms=1) for n in (0, 1)}
    group = GroupImage(name="g", offsets=Map(offsets), changed_at_ms=1)
    assert [row.partition for row in expired_offsets(group, 1_000, 100)] == [0, 1]
    pending = Map({TopicPartition("t", 0): CommittedOffset("t", 0, 6, timestamp_ms=1)})
    group = evolve(group, pending=Map({7: pending}))
    assert [row.partition for row in expired_offsets(group, 1_000, 100)] == [1]
