"""What `topic shrink` does to the state, and what it refuses."""

from __future__ import annotations

import struct

import pytest
from attrs import evolve

from raftmq.controller.shrinking import plan_shrink
from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import Outcome, ShrinkTopicCall
from raftmq.metadata.commands import (
    NO_TOPIC_ID,
    AnyCommand,
    ClaimGroup,
    CommitOffsets,
    CommittedOffset,
    CreateTopics,
    Generation,
    GroupMember,
    SealPartitions,
    ShrinkTopic,
)
from raftmq.metadata.image import LEVEL_OF_ALIASES, LEVEL_OF_MOVES
from raftmq.types import READS_RETIRED, VIEW_SUFFIX
from tests.metadata.metadata_commands import Machine, creation, node, raised, topic_id

CONFIGS = {
    "cleanup.policy": "delete",
    "retention.ms": "1000",
    "raftmq.closing.quiet.ms": "5000",
}
VIEW = f"a{VIEW_SUFFIX}"
NEW_IDS = topic_id(9), topic_id(10)


def call(partitions: int = 1, **how: object) -> ShrinkTopicCall:
    return ShrinkTopicCall(name="a", partitions=partitions, **how)  # type: ignore[arg-type]


class Planned(Machine):
    """A topic of three partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_all(1, 2, 3)
        self.image = raised(self.image)
        self.apply(CreateTopics(topics=(creation("a", 1, (1,), (2,), (3,)),)))

    def plan(self, wanted: ShrinkTopicCall, **configs: str) -> tuple[AnyCommand | None, list[str]]:
        """The command, and all rows in words."""
        known = CONFIGS | {key.replace("_", "."): value for key, value in configs.items()}
        command, rows = plan_shrink(self.image, wanted, NEW_IDS, known)
        return command, [told(row) for row in rows]

    def delay(self, **targets: str) -> None:
        """Some topics deliver to others."""
        for name, target in targets.items():
            topic = self.image.topics[name]
            topic = evolve(topic, configs=topic.configs.set("raftmq.delivers.to", target))
            self.image = evolve(self.image, topics=self.image.topics.set(name, topic))

    def claim(self, group: str) -> None:
        epoch = self.image.brokers[node(1)].epoch
        self.apply(ClaimGroup(group=group, node_id=node(1), broker_epoch=epoch))

    def join(
        self, group: str, *topics: str, protocol_type: str = "consumer", data: bytes | None = None
    ) -> None:
        """A member reads these topics."""
        told = struct.pack(">i", -1) if data is None else struct.pack(">i", len(data)) + data
        named = b"".join(struct.pack(">h", len(name)) + name.encode() for name in topics)
        subscription = struct.pack(">hi", 0, len(topics)) + named + told
        known = self.image.groups.groups[group]
        member = GroupMember(
            member_id="m",
            session_timeout_ms=1_000,
            rebalance_timeout_ms=1_000,
            subscription=subscription,
        )
        self.apply(
            Generation(
                group=group,
                coordinator_epoch=known.coordinator_epoch,
                generation=known.generation + 1,
                protocol_type=protocol_type,
                members=(member,),
            )
        )

    def commit(self, group: str, partition: int) -> None:
        """A group without members has read something."""
        self.claim(group)
        offset = CommittedOffset(
            topic="a", partition=partition, offset=1, leader_epoch=-1, metadata=""
        )
        self.apply(
            CommitOffsets(
                group=group,
                coordinator_epoch=self.image.groups.groups[group].coordinator_epoch,
                generation=-1,
                member_id="",
                instance_id=None,
                offsets=(offset,),
            )
        )


def told(row: Outcome) -> str:
    return f"{row.name}: {row.message}" if row.code is ErrorCode.NONE else row.code.name


@pytest.fixture
def machine() -> Planned:
    return Planned()


def test_what_is_planned_is_said_and_done(machine: Planned) -> None:
    command, rows = machine.plan(call(dry_run=True))
    assert command is None
    assert rows == [
        "verdict: would begin",
        "step: partitions 1 to 2 of a are listed no more, and sealed once nobody has written to "
        "them for 5 s",
        "step: what they hold is read as a.retired, under the same numbers and offsets, until "
        "retention.ms=1000 ends them",
    ]
    command, rows = machine.plan(call())
    assert rows[0] == "verdict: begun"
    assert command == ShrinkTopic(
        topic_id=topic_id(1),
        partitions=1,
        listed=3,
        view=VIEW,
        view_id=topic_id(9),
        alias=topic_id(10),
    )
    machine.apply(command)
    assert machine.plan(call()) == (None, ["verdict: done already"])
    command, rows = machine.plan(call(now=True))
    assert isinstance(command, SealPartitions)
    assert rows[1] == "step: partitions 1 to 2 are sealed now"
    machine.apply(command)
    assert machine.plan(call(now=True)) == (None, ["verdict: done already"])


def test_there_is_no_alias_while_a_node_may_not_find_it(machine: Planned) -> None:
    machine.image = raised(machine.image, LEVEL_OF_ALIASES - 1)
    command, _ = machine.plan(call())
    assert isinstance(command, ShrinkTopic)
    assert command.alias == NO_TOPIC_ID


def test_now_seals_with_the_same_command(machine: Planned) -> None:
    command, rows = machine.plan(call(2, now=True, view="old"))
    assert isinstance(command, ShrinkTopic)
    assert (command.is_sealed_now, command.view) == (True, "old")
    assert rows[1] == "step: partitions 2 of a are listed no more, and sealed at once"
    machine.apply(command)
    command, _ = machine.plan(call(1))
    assert isinstance(command, ShrinkTopic)
    assert (command.view, command.view_id) == ("old", topic_id(9)), "there is one already"


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (call(3), "INVALID_PARTITIONS"),
        (call(4), "INVALID_PARTITIONS"),
        (call(0), "INVALID_PARTITIONS"),
        (ShrinkTopicCall(name="b", partitions=1), "UNKNOWN_TOPIC_OR_PARTITION"),
    ],
)
def test_what_cannot_be_is_refused(machine: Planned, wanted: ShrinkTopicCall, code: str) -> None:
    assert machine.plan(wanted) == (None, [code])


def test_below_the_level_nothing_shrinks(machine: Planned) -> None:
    machine.image = raised(machine.image, LEVEL_OF_MOVES)
    assert machine.plan(call()) == (None, ["UNSUPPORTED_VERSION"])


@pytest.mark.parametrize("configs", [{"cleanup_policy": "compact"}, {"retention_ms": "-1"}])
def test_what_would_never_go_is_kept_only_when_that_is_asked_for(
    machine: Planned, configs: dict[str, str]
) -> None:
    assert machine.plan(call(), **configs) == (None, ["POLICY_VIOLATION"])
    command, rows = machine.plan(call(keep=True), **configs)
    assert isinstance(command, ShrinkTopic)
    assert rows[2].endswith(", for good")


@pytest.mark.parametrize("wanted", [call(), call(force=True, keep=True, now=True, dry_run=True)])
@pytest.mark.parametrize(
    ("configs", "why"),
    [
        ({"a": "b"}, "a is a delay topic, which does not shrink"),
        ({"b": "a"}, "the delay topic b delivers in a, which therefore does not shrink"),
    ],
)
def test_what_delays_or_is_delivered_in_does_not_shrink(
    machine: Planned, wanted: ShrinkTopicCall, configs: dict[str, str], why: str
) -> None:
    machine.apply(CreateTopics(topics=(creation("b", 2, (1,)),)))
    assert machine.plan(wanted)[1][0].startswith("verdict: ")
    machine.delay(**configs)
    command, (row,) = plan_shrink(machine.image, wanted, NEW_IDS, CONFIGS)
    assert (command, row.code) == (None, ErrorCode.INVALID_REQUEST)
    assert why in row.message


def test_groups_that_would_lose_something_are_named(machine: Planned) -> None:
    machine.commit("g", 2)
    machine.commit("h", 0)
    machine.claim("idle")
    command, rows = machine.plan(call())
    assert (command, rows) == (None, ["GROUP_SUBSCRIBED_TO_TOPIC", "group: g", "group: h"])
    machine.join("g", "a", VIEW)
    machine.join("h", "a")
    machine.join("idle", "b")
    command, rows = machine.plan(call())
    assert rows == ["GROUP_SUBSCRIBED_TO_TOPIC", "group: h"]
    command, rows = machine.plan(call(force=True))
    assert isinstance(command, ShrinkTopic)
    assert rows[-1] == "group: h"
    machine.join("h", VIEW)
    assert isinstance(machine.plan(call())[0], ShrinkTopic)


def test_groups_whose_members_read_on_by_themselves_lose_nothing(machine: Planned) -> None:
    machine.commit("g", 2)
    machine.join("g", "a", data=READS_RETIRED)
    assert isinstance(machine.plan(call())[0], ShrinkTopic)
    machine.join("g", "a", data=b"\0\0\0\7" + READS_RETIRED)
    assert isinstance(machine.plan(call())[0], ShrinkTopic)
    for data in (READS_RETIRED + b"2", b"", None):
        machine.join("g", "a", data=data)
        assert machine.plan(call())[1][1:] == ["group: g"]
    machine.join("g", "b", data=READS_RETIRED)
    assert machine.plan(call())[1][1:] == ["group: g"], "it has read it, and may come back"


def test_a_member_whose_subscription_nobody_can_read_counts_by_its_offsets(
    machine: Planned,
) -> None:
    machine.claim("g")
    machine.join("g", "a", protocol_type="other")
    assert isinstance(machine.plan(call())[0], ShrinkTopic)
