"""The classic group's state machine: a table per request, then stories."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raftmq.cluster.group_commands import Generation, GroupMember, ReplaceMember
from raftmq.cluster.group_image import GroupState
from raftmq.errors import ErrorCode
from raftmq.groups.group import Group
from raftmq.groups.group_config import GroupConfig
from raftmq.groups.membership import TRANSITIONS, JoinRequest, JoinResult, Phase, SyncResult
from raftmq.promise import Promise

NONE = ErrorCode.NONE
CONFIG = GroupConfig(initial_rebalance_delay_ms=0, size_max=4)
RANGE = (("range", b"sub"),)


class Driver:
    """A group and its time; performs its work as a coordinator would."""

    def __init__(self, config: GroupConfig = CONFIG) -> None:
        self.group = Group("g", config, coordinator_epoch=7)
        self.now = 0.0
        self.commands: list[object] = []
        self.ids = 0

    def perform(self) -> None:
        work = self.group.take_work()
        self.commands += work.commands
        for promise, result in work.answers:
            promise.resolve(result)

    def join(self, member_id: str = "", **kwargs: object) -> Promise[JoinResult]:
        self.ids += 1
        kwargs.setdefault("protocols", RANGE)
        kwargs.setdefault("session_timeout_ms", 10_000)
        kwargs.setdefault("rebalance_timeout_ms", 60_000)
        request = JoinRequest(member_id, **kwargs)  # type: ignore[arg-type]
        promise = self.group.join(request, f"m{self.ids}", self.now)
        self.perform()
        return promise

    def sync(
        self, member_id: str, assignments: dict[str, bytes] | None = None, **kwargs: object
    ) -> Promise[SyncResult]:
        generation = kwargs.pop("generation", self.group.generation)
        instance_id = kwargs.pop("instance_id", None)
        promise = self.group.sync(
            generation,  # type: ignore[arg-type]
            member_id,
            instance_id,  # type: ignore[arg-type]
            (assignments or {}).items(),
            self.now,
            **kwargs,  # type: ignore[arg-type]
        )
        self.perform()
        return promise

    def heartbeat(self, member_id: str, generation: int | None = None) -> ErrorCode:
        generation = self.group.generation if generation is None else generation
        return self.group.heartbeat(generation, member_id, None, self.now)

    def leave(self, member_id: str, instance_id: str | None = None) -> ErrorCode:
        error = self.group.leave(member_id, instance_id, self.now)
        self.perform()
        return error

    def apply(self) -> None:
        """The metadata group applies what was proposed."""
        commands, self.commands = self.commands, []
        for command in commands:
            if isinstance(command, Generation):
                self.group.generation_applied(command, self.now)
            else:
                assert isinstance(command, ReplaceMember)
                self.group.member_replaced(command)
            self.perform()

    def wait(self, ms: float) -> None:
        self.now += ms
        self.group.tick(self.now)
        self.perform()

    def stable(self, count: int = 2) -> list[str]:
        """Bring the group to Stable with so many members; returns their ids, the leader first."""
        joins = [self.join()]
        for _ in range(count - 1):
            joins.append(self.join())
            first = joins[0].result()
            joins[0] = self.join(first.member_id)
            for i, earlier in enumerate(joins[1:-1], 1):
                joins[i] = self.join(earlier.result().member_id)
        ids = [join.result().member_id for join in joins]
        for member_id in reversed(ids):
            self.sync(member_id, {m: m.encode() for m in ids} if member_id == ids[0] else None)
        self.apply()
        assert self.group.phase is Phase.STABLE
        return ids


def empty() -> Driver:
    return Driver()


def preparing() -> Driver:
    driver = Driver()
    ids = driver.stable(2)
    assert not driver.join(ids[0]).is_done
    assert driver.group.phase is Phase.PREPARING
    return driver


def completing() -> Driver:
    driver = Driver()
    ids = driver.stable(2)
    driver.join(ids[0])
    driver.join(ids[1])
    assert driver.group.phase is Phase.COMPLETING
    return driver


def stable() -> Driver:
    driver = Driver()
    driver.stable(2)
    return driver


def dead() -> Driver:
    driver = Driver()
    driver.stable(2)
    driver.group.give_up(ErrorCode.NOT_COORDINATOR)
    driver.perform()
    return driver


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
        driver.group.give_up(ErrorCode.NOT_COORDINATOR)
        driver.perform()
        assert parked.is_done
        assert other.is_done
        assert driver.group.phase is Phase.DEAD


# ---- static members ----


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
    state = GroupState(
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
    fresh = Group.load(GroupState(name="g"), CONFIG, 0)
    assert fresh.phase is Phase.EMPTY
