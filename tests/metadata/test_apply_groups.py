"""What each group command does to the image: a table of rejections, then the state it leaves."""

from __future__ import annotations

import msgspec
import pytest

from raftmq.errors import ErrorCode
from raftmq.metadata.apply_groups import apply_group, remove_topics
from raftmq.metadata.commands import (
    GROUP_COMMANDS,
    UNDATED,
    ClaimGroup,
    CommitMany,
    CommitOffsets,
    CommittedOffset,
    DeleteGroup,
    DeleteOffsets,
    Envelope,
    ExpiredOffset,
    ExpireOffsets,
    Generation,
    GroupCommand,
    GroupMember,
    ReleaseGroup,
    ReplaceMember,
    decode_envelope,
    encode_envelope,
)
from raftmq.metadata.image import GroupImage, GroupsImage, MetadataImage, holder
from raftmq.metadata.results import Claimed, CommitsDone, GroupDone, Rejection
from raftmq.metadata.snapshot import decode_image, encode_image
from raftmq.types import NodeId, TopicPartition

ONE, TWO = NodeId(1), NodeId(2)
LIVE = {ONE: 10, TWO: 20}
AT = TopicPartition("t", 0)


def member(member_id: str, instance_id: str | None = None, assignment: bytes = b"") -> GroupMember:
    return GroupMember(
        member_id=member_id,
        instance_id=instance_id,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=60_000,
        subscription=b"s",
        assignment=assignment,
    )


def applied(image: GroupsImage, *commands: GroupCommand) -> GroupsImage:
    for command in commands:
        image, result = apply_group(image, command, LIVE.get)
        assert not isinstance(result, Rejection), (command, result)
    return image


def snapshotted(image: GroupsImage) -> GroupsImage:
    """What a snapshot leaves of the groups; the same state gives the same bytes."""
    encoded = encode_image(MetadataImage(groups=image))
    decoded = decode_image(encoded)
    assert encode_image(decoded) == encoded
    return decoded.groups


def refused(image: GroupsImage, command: GroupCommand) -> ErrorCode:
    after, result = apply_group(image, command, LIVE.get)
    assert isinstance(result, Rejection), result
    assert after is image, "a rejection changes nothing"
    return result.code


def group(image: GroupsImage, name: str = "g") -> GroupImage:
    state = image.get(name)
    assert state is not None
    return state


CLAIM = ClaimGroup(group="g", node_id=ONE, broker_epoch=10)
COMPLETE = Generation(
    group="g",
    coordinator_epoch=1,
    generation=3,
    protocol_type="consumer",
    protocol="range",
    leader="a",
    members=(member("a", assignment=b"1"), member("b", "static-b")),
    timestamp_ms=77,
)
SAVED = CommittedOffset("t", 0, 5, 2, "note", 99)
COMMIT = CommitOffsets(
    group="g", coordinator_epoch=1, generation=3, member_id="a", offsets=(SAVED,)
)


def changed(command: GroupCommand, **fields: object) -> GroupCommand:
    return msgspec.structs.replace(command, **fields)


FILLED = applied(GroupsImage(), CLAIM, COMPLETE, COMMIT)
REPLACE = ReplaceMember(
    group="g",
    coordinator_epoch=1,
    generation=3,
    instance_id="static-b",
    old_member_id="b",
    new_member_id="b2",
    session_timeout_ms=7,
    rebalance_timeout_ms=8,
)
NOT_COORDINATOR = ErrorCode.NOT_COORDINATOR


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (changed(CLAIM, node_id=TWO, broker_epoch=20), NOT_COORDINATOR),
        (changed(CLAIM, broker_epoch=9), ErrorCode.STALE_BROKER_EPOCH),
        (changed(CLAIM, node_id=NodeId(3)), ErrorCode.STALE_BROKER_EPOCH),
        (changed(COMPLETE, coordinator_epoch=2, generation=4), NOT_COORDINATOR),
        (changed(COMPLETE, coordinator_epoch=0, generation=4), NOT_COORDINATOR),
        (COMPLETE, ErrorCode.ILLEGAL_GENERATION),
        (changed(COMPLETE, generation=2), ErrorCode.ILLEGAL_GENERATION),
        (changed(COMMIT, group="other"), NOT_COORDINATOR),
        (changed(COMMIT, coordinator_epoch=0), NOT_COORDINATOR),
        (changed(COMMIT, generation=2), ErrorCode.ILLEGAL_GENERATION),
        (changed(COMMIT, generation=4), ErrorCode.ILLEGAL_GENERATION),
        (changed(COMMIT, member_id="c"), ErrorCode.UNKNOWN_MEMBER_ID),
        (changed(COMMIT, generation=-1, member_id=""), ErrorCode.UNKNOWN_MEMBER_ID),
        (changed(COMMIT, instance_id="static-b"), ErrorCode.FENCED_INSTANCE_ID),
        (changed(REPLACE, generation=2), ErrorCode.ILLEGAL_GENERATION),
        (changed(REPLACE, old_member_id="x"), ErrorCode.FENCED_INSTANCE_ID),
        (changed(REPLACE, instance_id="x"), ErrorCode.FENCED_INSTANCE_ID),
        (DeleteGroup(group="g", coordinator_epoch=1), ErrorCode.NON_EMPTY_GROUP),
        (DeleteGroup(group="g", coordinator_epoch=3), NOT_COORDINATOR),
        (DeleteOffsets(group="g", coordinator_epoch=3, partitions=()), NOT_COORDINATOR),
        (ExpireOffsets(group="g", coordinator_epoch=3), NOT_COORDINATOR),
        (ReleaseGroup(group="g", coordinator_epoch=3), NOT_COORDINATOR),
        (GroupCommand(group="g"), NOT_COORDINATOR),
    ],
)
def test_rejections(command: GroupCommand, code: ErrorCode) -> None:
    assert refused(FILLED, command) is code


def test_a_generation_and_its_offsets() -> None:
    state = group(FILLED)
    assert (state.coordinator, state.coordinator_broker_epoch, state.coordinator_epoch) == (
        1,
        10,
        1,
    )
    assert (state.generation, state.protocol, state.leader, state.changed_at_ms) == (
        3,
        "range",
        "a",
        77,
    )
    assert state.members == COMPLETE.members
    assert state.offsets[AT] == SAVED
    assert holder(state, LIVE.get) == ONE
    assert holder(state, {ONE: 11}.get) is None, "another incarnation holds nothing"
    assert holder(None, LIVE.get) is None


def test_claims() -> None:
    again = applied(FILLED, CLAIM)
    assert group(again).coordinator_epoch == 2
    assert refused(again, COMMIT) is NOT_COORDINATOR, "its own older commands are fenced"
    # The holder is fenced: another may claim and finds all as it was.
    after, result = apply_group(FILLED, changed(CLAIM, node_id=TWO, broker_epoch=20), {TWO: 20}.get)
    assert result == Claimed(2)
    assert group(after).members == COMPLETE.members
    assert group(after).offsets == group(FILLED).offsets
    assert refused(after, COMMIT) is NOT_COORDINATOR


def test_releases() -> None:
    to_two = applied(FILLED, ReleaseGroup(group="g", coordinator_epoch=1, successor=TWO))
    assert holder(group(to_two), LIVE.get) == TWO
    assert refused(to_two, COMMIT) is NOT_COORDINATOR
    to_nobody = applied(FILLED, ReleaseGroup(group="g", coordinator_epoch=1))
    assert holder(group(to_nobody), LIVE.get) is None
    assert refused(to_nobody, changed(COMMIT, coordinator_epoch=2)) is NOT_COORDINATOR
    applied(to_nobody, changed(CLAIM, node_id=TWO, broker_epoch=20))


def test_epochs_are_never_given_twice() -> None:
    image = applied(GroupsImage(), CLAIM, DeleteGroup(group="g", coordinator_epoch=1), CLAIM)
    assert group(image).coordinator_epoch == 2
    image = applied(image, changed(CLAIM, group="h"))
    assert group(image, "h").coordinator_epoch == 3


def test_free_consumers_commit_while_the_group_has_no_members() -> None:
    free = CommitOffsets(group="g", coordinator_epoch=1, offsets=(SAVED,))
    for names in ({}, {"instance_id": "i"}, {"member_id": "gone", "instance_id": "i"}):
        image = applied(GroupsImage(), CLAIM, changed(free, **names))
        assert group(image).offsets[AT] == SAVED
    static = changed(COMMIT, member_id="b", instance_id="static-b")
    assert group(applied(FILLED, static)).offsets[AT] == SAVED


def test_a_static_member_is_replaced() -> None:
    image = applied(FILLED, REPLACE)
    new = group(image).static_member("static-b")
    assert new is not None
    assert (new.member_id, new.subscription, new.session_timeout_ms) == ("b2", b"s", 7)
    assert group(image).member("b") is None
    assert group(image).leader == "a"
    leading = applied(FILLED, changed(COMPLETE, generation=4, leader="b"))
    replaced = applied(leading, changed(REPLACE, generation=4))
    assert group(replaced).leader == "b2"


def test_offsets_are_deleted_and_expire() -> None:
    two = CommittedOffset("u", 1, 9, timestamp_ms=50)
    image = applied(FILLED, changed(COMMIT, offsets=(two,)))
    deleted = applied(
        image, DeleteOffsets(group="g", coordinator_epoch=1, partitions=(("t", 0), ("x", 0)))
    )
    assert list(group(deleted).offsets) == [TopicPartition("u", 1)]
    expiring = ExpireOffsets(
        group="g",
        coordinator_epoch=1,
        expired=(ExpiredOffset("t", 0, 98), ExpiredOffset("u", 1, 50), ExpiredOffset("x", 1, 5)),
    )
    expired = applied(image, expiring)
    assert list(group(expired).offsets) == [AT], "committed anew at 99, so it lives on"
    emptied = applied(expired, Generation(group="g", coordinator_epoch=1, generation=4))
    assert group(emptied).members == ()
    last = ExpireOffsets(group="g", coordinator_epoch=1, expired=(ExpiredOffset("t", 0, 99),))
    assert applied(emptied, last).names() == [], "the group goes with its last offset"
    assert applied(emptied, DeleteGroup(group="g", coordinator_epoch=1)).names() == []


def test_what_is_undated_is_dated_once() -> None:
    undated = CommittedOffset("u", 1, 9, timestamp_ms=UNDATED)
    image = applied(FILLED, changed(COMMIT, offsets=(undated,)))
    emptied = Generation(group="g", coordinator_epoch=1, generation=4, timestamp_ms=UNDATED)
    image = snapshotted(applied(image, emptied))
    before = group(image).offsets
    for now_ms, expected in ((UNDATED, UNDATED), (500, 500), (600, 500)):
        image = applied(image, ExpireOffsets(group="g", coordinator_epoch=1, now_ms=now_ms))
        assert group(image).changed_at_ms == expected
        assert group(image).offsets[TopicPartition("u", 1)].timestamp_ms == expected
        assert group(image).offsets[AT] == before[AT], "it had its time already"


def test_offsets_in_deleted_topics_go() -> None:
    image = applied(FILLED, changed(CLAIM, group="h"))
    assert remove_topics(image, ["x"]) == image
    removed = remove_topics(image, ["t", "x"])
    assert not group(removed).offsets
    assert group(removed).members == COMPLETE.members


def test_snapshots() -> None:
    image = applied(FILLED, changed(CLAIM, group="h"), REPLACE)
    assert snapshotted(image) == image
    assert snapshotted(GroupsImage()) == GroupsImage()


@pytest.mark.parametrize(
    "command",
    [
        CLAIM,
        ReleaseGroup(group="g", coordinator_epoch=1, successor=TWO),
        COMPLETE,
        REPLACE,
        COMMIT,
        DeleteOffsets(group="g", coordinator_epoch=1, partitions=(("t", 0),)),
        ExpireOffsets(group="g", coordinator_epoch=1, expired=(ExpiredOffset("t", 0, 1),)),
        DeleteGroup(group="g", coordinator_epoch=1),
    ],
    ids=lambda command: type(command).__name__,
)
def test_commands_survive_their_encoding(command: GroupCommand) -> None:
    envelope = Envelope(version=1, node_id=ONE, incarnation=2, sequence=3, command=command)
    assert decode_envelope(encode_envelope(envelope)) == envelope
    assert type(command) in GROUP_COMMANDS


def test_every_result_is_a_value() -> None:
    assert apply_group(FILLED, changed(COMMIT), LIVE.get)[1] == GroupDone()


def test_many_commits_in_one_command_are_judged_each_by_itself() -> None:
    other = changed(CLAIM, group="h")
    image = applied(FILLED, other)
    epoch = group(image, "h").coordinator_epoch
    free = CommitOffsets(group="h", coordinator_epoch=epoch, offsets=(SAVED,))
    later = CommittedOffset("t", 1, 8)
    many = CommitMany(
        commits=(
            CommitOffsets(
                group="g", coordinator_epoch=1, generation=3, member_id="b", offsets=(later,)
            ),
            CommitOffsets(
                group="g", coordinator_epoch=1, generation=2, member_id="a", offsets=(later,)
            ),
            free,
            CommitOffsets(group="h", coordinator_epoch=1, offsets=(later,)),
            CommitOffsets(group="unknown", coordinator_epoch=1, offsets=(later,)),
        )
    )
    after, result = apply_group(image, many, LIVE.get)
    assert result == CommitsDone(
        (
            int(ErrorCode.NONE),
            int(ErrorCode.ILLEGAL_GENERATION),
            int(ErrorCode.NONE),
            int(NOT_COORDINATOR),
            int(NOT_COORDINATOR),
        )
    )
    assert dict(group(after).offsets) == {
        TopicPartition("t", 0): SAVED,
        TopicPartition("t", 1): later,
    }
    assert dict(group(after, "h").offsets) == {TopicPartition("t", 0): SAVED}
    one_by_one = applied(image, many.commits[0], free)
    assert after == one_by_one
    assert after.get("unknown") is None
