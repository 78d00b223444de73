"""Static members, and groups that a new coordinator goes on with."""

from __future__ import annotations

import struct

import pytest

from raftmq.errors import ErrorCode
from raftmq.groups.group import Group
from raftmq.groups.model import JoinRequest, Phase
from raftmq.metadata.commands import GroupMember, ReplaceMember
from raftmq.metadata.image import GroupImage
from tests.groups.driver import CONFIG, RANGE, Driver

NONE, UNKNOWN = ErrorCode.NONE, ErrorCode.UNKNOWN_MEMBER_ID


def static_group() -> Driver:
    driver = Driver()
    driver.join(instance_id="a")
    driver.join(instance_id="b")
    driver.join("m1", instance_id="a")
    driver.sync("m2", instance_id="b")
    driver.sync("m1", {"m1": b"one", "m2": b"two"}, instance_id="a")
    driver.apply()
    assert driver.group.phase is Phase.STABLE
    return driver


def test_static_members_need_no_id_first() -> None:
    driver = Driver()
    assert driver.join(instance_id="a", requires_member_id=True).result().error is NONE


def test_a_static_member_comes_back_without_a_rebalance() -> None:
    driver = static_group()
    back = driver.join(instance_id="b")
    assert not back.is_done, "its new id is not persisted yet"
    (command,) = driver.commands
    assert isinstance(command, ReplaceMember)
    new_id = command.new_member_id
    assert (command.instance_id, command.old_member_id) == ("b", "m2")
    driver.apply()
    assert back.result().member_id == new_id
    assert back.result().generation == driver.group.generation == 2
    assert driver.group.phase is Phase.STABLE
    assert driver.sync(new_id, instance_id="b").result().assignment == b"two"
    fenced = driver.group.heartbeat(2, "m2", "b", driver.now)
    assert fenced is ErrorCode.FENCED_INSTANCE_ID
    assert driver.join("m2", instance_id="b").result().error is ErrorCode.FENCED_INSTANCE_ID
    assert driver.sync("m2", instance_id="b").result().error is ErrorCode.FENCED_INSTANCE_ID
    assert driver.leave("m2", "b") is ErrorCode.FENCED_INSTANCE_ID


@pytest.mark.parametrize("may_skip", [False, True])
def test_a_static_leader_comes_back(may_skip: bool) -> None:
    driver = static_group()
    back = driver.join(instance_id="a", may_skip_assignment=may_skip)
    driver.apply()
    result = back.result()
    if may_skip:
        assert result.leader == result.member_id
        assert result.skip_assignment
        assert len(result.members) == 2
    else:  # an older client must not compute an assignment
        assert result.leader == "m1"
        assert not result.members


def test_a_static_member_with_a_new_subscription_causes_a_rebalance() -> None:
    driver = static_group()
    back = driver.join(instance_id="b", protocols=(("range", b"new"),))
    assert not back.is_done
    assert driver.group.phase is Phase.PREPARING
    assert driver.join("m1", instance_id="a").result().generation == 3
    assert back.result().generation == 3


def subscription(topics: list[str], rest: bytes) -> tuple[tuple[str, bytes], ...]:
    names = b"".join(struct.pack(">h", len(name)) + name.encode() for name in topics)
    return (("range", struct.pack(">hi", 3, len(topics)) + names + rest),)


def test_what_a_java_client_says_of_its_last_life_causes_no_rebalance() -> None:
    driver = Driver()
    before = subscription(["t", "u"], b"it owned three partitions in generation 7")
    driver.join(instance_id="a", protocols=before)
    driver.sync("m1", {"m1": b"one"}, instance_id="a")
    driver.apply()
    back = driver.join(instance_id="a", protocols=subscription(["u", "t"], b"it owns nothing"))
    driver.apply()
    assert back.result().generation == 1
    assert driver.group.phase is Phase.STABLE
    again = driver.join(instance_id="a", protocols=subscription(["u"], b"it owns nothing"))
    assert again.result().generation == 2


def test_a_static_member_that_turns_the_vote_causes_a_rebalance() -> None:
    driver = Driver()
    driver.join(instance_id="a", protocols=(("range", b"sub"), ("sticky", b"sub")))
    driver.sync("m1", {"m1": b"one"}, instance_id="a")
    driver.apply()
    back = driver.join(instance_id="a", protocols=(("sticky", b"sub"), ("range", b"sub")))
    assert back.result().protocol == "sticky"


def test_a_rebalance_overtakes_a_static_member_that_comes_back() -> None:
    driver = static_group()
    back = driver.join(instance_id="b")
    driver.join()
    driver.apply()
    assert not back.is_done
    driver.join("m1", instance_id="a")
    assert back.result().generation == 3


def test_a_parked_static_member_is_fenced_by_its_successor() -> None:
    driver = static_group()
    driver.join("m1", instance_id="a")
    old = driver.join("m2", instance_id="b", protocols=RANGE)
    assert old.is_done  # both were there
    parked = driver.sync("m2", instance_id="b")
    back = driver.join(instance_id="b")
    assert parked.result().error is ErrorCode.FENCED_INSTANCE_ID
    assert not back.is_done


def test_an_operator_removes_a_static_member_by_its_instance() -> None:
    driver = static_group()
    assert driver.leave("", "b") is NONE
    assert driver.leave("", "nobody") is UNKNOWN
    assert list(driver.group.members) == ["m1"]


def test_absent_static_members_keep_their_place_until_their_session_ends() -> None:
    driver = static_group()
    one = driver.join("m1", instance_id="a")
    for _ in range(6):
        driver.group.heartbeat(2, "m2", "b", driver.now)
        driver.wait(9_999)
    driver.group.heartbeat(2, "m2", "b", driver.now)
    driver.wait(10)
    assert len(one.result().members) == 2, "its partitions are still planned for"
    # Nobody at all is back: the rebalance waits on.
    driver = static_group()
    driver.group.members["m1"].request = JoinRequest(
        "m1", "a", session_timeout_ms=200_000, rebalance_timeout_ms=1_000, protocols=RANGE
    )
    driver.group.members["m1"].hear(driver.now)
    driver.leave("", "b")
    assert driver.group.phase is Phase.PREPARING
    driver.wait(10_000)
    assert driver.group.phase is Phase.PREPARING
    assert list(driver.group.members) == ["m1"]


# ---- a new coordinator ----


def test_a_loaded_group_goes_on_without_a_rebalance() -> None:
    members = tuple(
        GroupMember(
            member_id=f"m{i}",
            client_id="c",
            session_timeout_ms=10_000,
            rebalance_timeout_ms=60_000,
            subscription=b"sub",
            assignment=b"%d" % i,
        )
        for i in (1, 2)
    )
    state = GroupImage(
        name="g",
        coordinator_epoch=9,
        generation=5,
        protocol_type="consumer",
        protocol="range",
        leader="m1",
        members=members,
    )
    driver = Driver()
    driver.now = 1_000_000
    driver.group = Group.load(state, CONFIG, driver.now)
    assert driver.group.phase is Phase.STABLE
    assert driver.heartbeat("m1", 5) is NONE
    assert driver.sync("m2").result().assignment == b"2"
    driver.wait(9_999)
    assert len(driver.group.members) == 2, "everybody has a full session"
    driver.wait(1)
    assert list(driver.group.members) == []
    assert driver.group.generation == 6
    fresh = Group.load(GroupImage(name="g"), CONFIG, 0)
    assert fresh.phase is Phase.EMPTY
