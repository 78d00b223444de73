"""The classic group's state machine: a table per request, then stories."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raftmq.errors import ErrorCode
from raftmq.groups.model import TRANSITIONS, GroupConfig, Phase
from raftmq.metadata.commands import Generation
from tests.groups.driver import Driver, completing, dead, empty, preparing, stable

NONE = ErrorCode.NONE


PHASES = [empty, preparing, completing, stable, dead]
UNKNOWN, GONE = ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.COORDINATOR_NOT_AVAILABLE
REBALANCE, ILLEGAL = ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.ILLEGAL_GENERATION


@pytest.mark.parametrize(
    ("make", "code"),
    [(empty, UNKNOWN), (preparing, REBALANCE), (completing, NONE), (stable, NONE), (dead, GONE)],
)
def test_heartbeat(make: Callable[[], Driver], code: ErrorCode) -> None:
    driver = make()
    assert driver.heartbeat("m1") is code
    if code not in (UNKNOWN, GONE):
        assert driver.heartbeat("m1", driver.group.generation - 1) is ILLEGAL
        assert driver.heartbeat("stranger") is UNKNOWN


@pytest.mark.parametrize(
    ("make", "code"),
    [(empty, UNKNOWN), (preparing, REBALANCE), (completing, None), (stable, NONE), (dead, GONE)],
)
def test_sync(make: Callable[[], Driver], code: ErrorCode | None) -> None:
    driver = make()
    promise = driver.sync("m2")
    assert promise.is_done == (code is not None)
    if code is not None:
        assert promise.result().error is code
    if make in (preparing, completing, stable):
        assert driver.sync("m2", generation=0).result().error is ILLEGAL
        assert driver.sync("stranger").result().error is UNKNOWN
    if make in (completing, stable):
        wrong = driver.sync("m2", protocol="roundrobin")
        assert wrong.result().error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        wrong = driver.sync("m2", protocol_type="connect")
        assert wrong.result().error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def test_nobody_commits_in_a_generation_that_was_never_stored() -> None:
    driver = completing()
    generation = driver.group.generation
    driver.join()  # before the leader brought its assignments
    assert driver.group.phase is Phase.PREPARING
    assert driver.group.check_commit(generation, "m1", None, driver.now) is REBALANCE
    assert driver.group.check_commit(generation - 1, "m1", None, driver.now) is ILLEGAL


@pytest.mark.parametrize(
    ("make", "member", "free"),
    [
        (empty, UNKNOWN, NONE),
        (preparing, NONE, UNKNOWN),
        (completing, REBALANCE, UNKNOWN),
        (stable, NONE, UNKNOWN),
        (dead, GONE, GONE),
    ],
)
def test_commit(make: Callable[[], Driver], member: ErrorCode, free: ErrorCode) -> None:
    driver = make()
    group = driver.group
    assert group.check_commit(group.generation, "m1", None, driver.now) is member
    assert group.check_commit(-1, "", None, driver.now) is free
    for names in (("gone", None), ("", "instance"), ("gone", "instance")):
        # In an empty group whoever it says it is: librdkafka names the instance it is set to.
        assert group.check_commit(-1, *names, driver.now) is free
    if make is stable:
        assert group.check_commit(group.generation - 1, "m1", None, 0) is ILLEGAL
        assert group.check_commit(group.generation, "stranger", None, 0) is UNKNOWN


@pytest.mark.parametrize(
    ("make", "code", "phase"),
    [
        (empty, UNKNOWN, Phase.EMPTY),
        (preparing, NONE, Phase.COMPLETING),  # the one that had not joined yet
        (completing, NONE, Phase.PREPARING),
        (stable, NONE, Phase.PREPARING),
        (dead, GONE, Phase.DEAD),
    ],
)
def test_leave(make: Callable[[], Driver], code: ErrorCode, phase: Phase) -> None:
    driver = make()
    assert driver.leave("m2") is code
    assert driver.group.phase is phase
    assert driver.leave("stranger") in (UNKNOWN, GONE)


@pytest.mark.parametrize("make", PHASES)
def test_join_of_a_stranger(make: Callable[[], Driver]) -> None:
    driver = make()
    expected = GONE if make is dead else UNKNOWN
    assert driver.join("stranger").result().error is expected


@pytest.mark.parametrize("make", PHASES[:-1])
def test_join_of_a_new_member_starts_a_rebalance(make: Callable[[], Driver]) -> None:
    driver = make()
    before = driver.group.generation
    promise = driver.join()
    if make is empty:
        result = promise.result()
        assert result.error is NONE
        assert (result.generation, result.leader, result.protocol) == (1, result.member_id, "range")
        assert [m.metadata for m in result.members] == [b"sub"]
    else:
        assert not promise.is_done
        assert driver.group.phase is Phase.PREPARING
        assert driver.group.generation == before


def test_transitions_name_every_phase() -> None:
    assert list(TRANSITIONS) == list(Phase)
    driver = stable()
    with pytest.raises(AssertionError):
        driver.group._enter(Phase.COMPLETING)


# ---- joining ----


def test_new_members_need_an_id_first() -> None:
    driver = Driver()
    given = driver.join(requires_member_id=True).result()
    assert given.error is ErrorCode.MEMBER_ID_REQUIRED
    assert given.member_id == "m1"
    assert not driver.group.members
    assert driver.heartbeat("m1") is UNKNOWN
    joined = driver.join("m1", requires_member_id=True).result()
    assert (joined.error, joined.member_id) == (NONE, "m1")
    assert not driver.group.pending


def test_ids_that_nobody_uses_expire() -> None:
    driver = Driver()
    driver.join(requires_member_id=True)
    driver.wait(9_999)
    assert driver.group.pending
    driver.wait(1)
    assert not driver.group.pending
    assert driver.join("m1").result().error is UNKNOWN


def test_a_pending_member_is_waited_for() -> None:
    driver = stable()
    driver.join(requires_member_id=True)
    one, two = driver.join("m1"), driver.join("m2")
    assert not one.is_done  # m1 leads and joined again, so a rebalance began
    assert not two.is_done
    assert driver.leave("m9") is UNKNOWN
    pending = next(iter(driver.group.pending))
    assert driver.leave(pending) is NONE
    assert one.result().generation == two.result().generation == 3


@pytest.mark.parametrize(
    ("kwargs", "is_refused"),
    [
        ({"protocol_type": "connect"}, True),
        ({"protocols": (("sticky", b""),)}, True),
        ({"protocols": ()}, True),
        ({"protocol_type": ""}, True),
        ({"protocols": (("sticky", b""), ("range", b""))}, False),
    ],
)
def test_protocols_must_be_common(kwargs: dict[str, object], is_refused: bool) -> None:
    driver = stable()
    promise = driver.join(**kwargs)
    assert promise.is_done == is_refused
    if is_refused:
        assert promise.result().error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        assert driver.group.phase is Phase.STABLE


def test_an_empty_group_takes_any_protocol_type() -> None:
    driver = stable()
    driver.leave("m1")
    driver.leave("m2")
    assert driver.group.phase is Phase.EMPTY
    result = driver.join(protocol_type="connect", protocols=(("default", b""),)).result()
    assert (result.error, result.protocol_type) == (NONE, "connect")


def test_group_size_is_limited() -> None:
    driver = Driver()
    driver.stable(3)
    assert driver.join(requires_member_id=True).result().error is ErrorCode.MEMBER_ID_REQUIRED
    assert driver.join().result().error is ErrorCode.GROUP_MAX_SIZE_REACHED
    pending = next(iter(driver.group.pending))
    assert not driver.join(pending).is_done  # its place was counted


def test_protocol_with_most_votes_wins() -> None:
    driver = Driver()
    both = (("range", b"1"), ("sticky", b"2"))
    other = (("sticky", b"3"), ("range", b"4"))
    first = driver.join(protocols=both).result()
    second, third = driver.join(protocols=other), driver.join(protocols=other)
    again = driver.join(first.member_id, protocols=both).result()
    assert again.protocol == second.result().protocol == third.result().protocol == "sticky"
    assert [m.metadata for m in again.members] == [b"2", b"3", b"3"]
    assert second.result().members == ()  # only the leader is told


def test_a_lost_answer_to_join_is_repeated() -> None:
    driver = completing()
    before = driver.group.generation
    for member_id in ("m1", "m2"):
        again = driver.join(member_id).result()
        assert again.generation == before
        assert len(again.members) == (2 if member_id == "m1" else 0)
    changed = driver.join("m2", protocols=(("range", b"new"),))
    assert not changed.is_done
    assert driver.group.phase is Phase.PREPARING


def test_in_a_stable_group_only_the_leader_or_a_change_causes_a_rebalance() -> None:
    driver = stable()
    assert driver.join("m2").result().generation == driver.group.generation
    assert driver.group.phase is Phase.STABLE
    assert not driver.join("m2", protocols=(("range", b"new"),)).is_done
    assert driver.group.phase is Phase.PREPARING
    driver = stable()
    assert not driver.join("m1").is_done
    assert driver.group.phase is Phase.PREPARING


def test_a_request_repeated_on_a_new_connection_settles_the_old_one() -> None:
    driver = preparing()
    first = driver.group.members["m1"].join
    assert first is not None
    driver.join("m1")
    assert first.result().error is REBALANCE
    driver = completing()
    one = driver.sync("m2")
    two = driver.sync("m2")
    assert one.result().error is REBALANCE
    assert not two.is_done


# ---- the wait of an empty group ----


def test_an_empty_group_waits_for_more_members() -> None:
    driver = Driver(GroupConfig(initial_rebalance_delay_ms=500))
    one = driver.join(rebalance_timeout_ms=1_200)
    driver.wait(400)
    two = driver.join(rebalance_timeout_ms=1_200)
    driver.wait(100)  # somebody came meanwhile: another round
    assert not one.is_done
    driver.wait(499)
    assert not one.is_done
    driver.wait(1)
    assert one.result().generation == two.result().generation == 1
    assert len(one.result().members) == 2


def test_the_wait_ends_with_the_rebalance_timeout() -> None:
    driver = Driver(GroupConfig(initial_rebalance_delay_ms=500))
    one = driver.join(rebalance_timeout_ms=1_200)
    for _ in range(3):
        driver.wait(390)
        driver.join(rebalance_timeout_ms=1_200)
    assert not one.is_done
    driver.wait(30)
    assert one.is_done


def test_all_leave_while_the_group_waits() -> None:
    driver = Driver(GroupConfig(initial_rebalance_delay_ms=500))
    one = driver.join()
    assert driver.leave("m1") is NONE
    assert one.result().error is UNKNOWN
    assert driver.group.phase is Phase.EMPTY


# ---- syncing ----


def test_sync_waits_until_the_generation_is_applied() -> None:
    driver = completing()
    follower = driver.sync("m2")
    leader = driver.sync("m1", {"m1": b"one", "m2": b"two"})
    assert not follower.is_done
    assert not leader.is_done, "sent to the metadata group, not yet applied"
    (command,) = driver.commands
    assert isinstance(command, Generation)
    assert command.coordinator_epoch == 7
    assert [(m.member_id, m.assignment) for m in command.members] == [
        ("m1", b"one"),
        ("m2", b"two"),
    ]
    assert driver.group.phase is Phase.COMPLETING
    driver.apply()
    assert leader.result().assignment == b"one"
    assert follower.result().assignment == b"two"
    assert driver.group.phase is Phase.STABLE
    assert driver.sync("m2").result().assignment == b"two"


def test_a_leader_that_syncs_twice_is_stored_once() -> None:
    driver = completing()
    driver.sync("m1", {"m1": b"one"})
    driver.sync("m1", {"m1": b"other"})
    assert len(driver.commands) == 1


def test_a_rebalance_before_the_generation_is_applied_tells_nobody() -> None:
    driver = completing()
    follower = driver.sync("m2")
    leader = driver.sync("m1", {"m1": b"one", "m2": b"two"})
    driver.join()
    assert follower.result().error is leader.result().error is REBALANCE
    driver.apply()
    assert driver.group.phase is Phase.PREPARING
    assert driver.group.members["m1"].assignment == b""


def test_the_leader_is_replaced_when_it_does_not_come_back() -> None:
    driver = stable()
    driver.join()
    two = driver.join("m2")
    for _ in range(9):
        driver.wait(1_000)
        assert driver.heartbeat("m1") is REBALANCE  # alive, but it does not join
    driver.wait(52_000)
    assert two.result().leader == "m2"
    assert "m1" not in driver.group.members


def test_members_that_do_not_sync_are_removed() -> None:
    driver = completing()
    parked = driver.sync("m2")
    for _ in range(12):
        driver.heartbeat("m1")
        driver.wait(5_000)
    assert parked.result().error is REBALANCE
    assert list(driver.group.members) == ["m2"]
    assert driver.group.phase is Phase.PREPARING


# ---- sessions ----


def test_members_that_sync_late_have_synced_too() -> None:
    driver = completing()
    driver.sync("m1", {"m1": b"one", "m2": b"two"})
    driver.apply()
    assert driver.sync("m2").result().assignment == b"two"
    for _ in range(30):
        driver.wait(5_000)
        assert driver.heartbeat("m1") is driver.heartbeat("m2") is NONE


def test_a_new_member_that_joins_again_is_waited_for_as_long_as_before() -> None:
    driver = stable()
    parked = driver.join()
    driver.wait(8_000)
    again = driver.join("m4")  # on another connection
    assert parked.result().error is REBALANCE
    for _ in range(5):
        driver.heartbeat("m1")
        driver.wait(9_000)
    assert not again.is_done
    driver.join("m1")
    driver.wait(7_000)
    assert again.result().error is NONE, "the others had their rebalance timeout"


def test_silence_ends_a_session() -> None:
    driver = stable()
    driver.wait(6_000)
    driver.heartbeat("m1")
    driver.wait(3_999)
    assert len(driver.group.members) == 2
    driver.wait(1)
    assert list(driver.group.members) == ["m1"]
    assert driver.heartbeat("m1") is REBALANCE
    assert driver.heartbeat("m2") is UNKNOWN


def test_parked_members_are_alive() -> None:
    driver = stable()
    parked = driver.join("m1")
    for _ in range(5):
        driver.heartbeat("m2")
        driver.wait(9_000)
    assert "m1" in driver.group.members
    assert driver.join("m2").is_done
    assert parked.is_done


def test_the_last_member_leaves_an_empty_generation() -> None:
    driver = Driver()
    driver.stable(1)
    assert driver.leave("m1") is NONE
    assert driver.group.phase is Phase.EMPTY
    (command,) = driver.commands
    assert isinstance(command, Generation)
    assert (command.generation, command.members, command.protocol) == (2, (), None)
    assert driver.group.is_quiet


def test_giving_up_answers_all_that_is_parked() -> None:
    for make in (preparing, completing):
        driver = make()
        parked = driver.join("m2") if make is preparing else driver.sync("m2")
        other = driver.join() if make is completing else parked
        driver.group.close(ErrorCode.NOT_COORDINATOR)
        driver.perform()
        assert parked.is_done
        assert other.is_done
        assert driver.group.phase is Phase.DEAD
