"""The coordinator over the real commands: claims, take-overs, doubt, offsets, expiry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from raftmq.errors import ErrorCode
from raftmq.groups.coordinator import Coordinator
from raftmq.groups.model import GroupConfig, JoinRequest, Phase
from raftmq.groups.offsets import expired_offsets, subscribed_topics
from raftmq.groups.owned_groups import GIVE_EVERY_MS, GIVE_MAX, TIMER_MS_MIN
from raftmq.metadata.commands import (
    NO_TOPIC_ID,
    UNDATED,
    CommitOffsets,
    CommittedOffset,
    DeleteOffsets,
    ExpiredOffset,
)
from raftmq.metadata.image import LEVEL_OF_MOVES, GroupImage, candidate
from raftmq.types import NodeId, TopicId, TopicPartition
from tests.groups.world import Nodes, Proposal, got

NONE = ErrorCode.NONE
DAY = 86_400_000
SUBSCRIPTION = b"\x00\x01\x00\x00\x00\x01\x00\x01t\xff\xff\xff\xff"


def request(member_id: str = "", **kwargs: Any) -> JoinRequest:
    kwargs.setdefault("session_timeout_ms", 10_000)
    kwargs.setdefault("protocols", (("range", SUBSCRIPTION),))
    kwargs.setdefault("client_id", "c")
    return JoinRequest(member_id, **kwargs)


def position(offset: int, topic: str = "t", partition: int = 0, meta: str = "") -> CommittedOffset:
    return CommittedOffset(topic, partition, offset, 3, meta)


def join_alone(coordinator: Coordinator, group: str = "g", assignment: bytes = b"all") -> str:
    joined = got(coordinator.join(group, request()))
    assert joined.error is NONE
    synced = got(
        coordinator.sync(
            group, joined.generation, joined.member_id, None, [(joined.member_id, assignment)]
        )
    )
    assert (synced.error, synced.assignment) == (NONE, assignment)
    member_id: str = joined.member_id
    return member_id


# ---- where a group lives ----


def test_every_node_names_the_same_candidate_and_few_groups_move() -> None:
    nodes = [NodeId(n) for n in (1, 2, 3)]
    names = [f"group-{i}" for i in range(300)]
    before = {name: candidate(name, nodes) for name in names}
    counts = [sum(1 for n in before.values() if n == node) for node in nodes]
    assert min(counts) > 60
    after = {name: candidate(name, nodes[:2]) for name in names}
    assert all(after[n] == before[n] for n in names if before[n] != 3)
    assert candidate("g", []) is None


def test_a_group_is_claimed_before_it_is_served() -> None:
    nodes = Nodes(1, 2, 3, is_prompt=False)
    log = nodes.log
    home = nodes.of("g")
    parked = home.join("g", request())
    also = home.join("g", request())
    assert not parked.is_done
    assert len(log.in_flight) == 1, "one claim for all who wait"
    log.commit(log.in_flight[0])
    log.apply_all()
    assert parked.is_done
    assert not also.is_done  # it waits for the first one to join again
    state = home._engine.image.groups.get("g")
    assert state is not None
    assert (state.coordinator, state.coordinator_epoch) == (home.node_id, 1)


def test_other_nodes_refuse() -> None:
    nodes = Nodes(1, 2, 3)
    home = nodes.of("g")
    away = next(c for c in nodes.coordinators.values() if c is not home)
    join_alone(home)
    at = [TopicPartition("t", 0)]
    assert got(away.join("g", request())).error is ErrorCode.NOT_COORDINATOR
    assert got(away.sync("g", 1, "m", None, [])).error is ErrorCode.NOT_COORDINATOR
    assert got(away.heartbeat("g", 1, "m", None)) is ErrorCode.NOT_COORDINATOR
    assert got(away.leave("g", [("m", None)])).error is ErrorCode.NOT_COORDINATOR
    assert got(away.commit("g", 1, "m", None, [position(1)])) == (ErrorCode.NOT_COORDINATOR,)
    assert got(away.fetch_offsets("g")).error is ErrorCode.NOT_COORDINATOR
    assert got(away.describe("g")).error is ErrorCode.NOT_COORDINATOR
    assert got(away.delete("g")) is ErrorCode.NOT_COORDINATOR
    assert got(away.delete_offsets("g", at)).error is ErrorCode.NOT_COORDINATOR
    assert away.list_groups() == []
    assert [g.name for g in home.list_groups()] == ["g"]


def test_groups_that_do_not_exist() -> None:
    home = Nodes(1).coordinators[NodeId(1)]
    unknown = ErrorCode.UNKNOWN_MEMBER_ID
    assert got(home.join("g", request("m"))).error is unknown
    assert got(home.sync("g", 1, "m", None, [])).error is unknown
    assert got(home.heartbeat("g", 1, "m", None)) is unknown
    assert got(home.leave("g", [("m", None)])).members == (unknown,)
    assert got(home.commit("g", 1, "m", None, [position(1)])) == (ErrorCode.ILLEGAL_GENERATION,)
    assert not got(home.fetch_offsets("g")).offsets
    assert got(home.delete("g")) is ErrorCode.GROUP_ID_NOT_FOUND
    assert got(home.delete_offsets("g", [])).error is ErrorCode.GROUP_ID_NOT_FOUND
    described = got(home.describe("g"))
    assert (described.error, described.phase) == (ErrorCode.GROUP_ID_NOT_FOUND, Phase.DEAD)
    assert home._engine.image.groups.names() == [], "questions make no groups"


@pytest.mark.parametrize("name", ["", "x" * 5_000])
def test_bad_group_names(name: str) -> None:
    home = Nodes(1).coordinators[NodeId(1)]
    bad = ErrorCode.INVALID_GROUP_ID
    assert got(home.join(name, request())).error is bad
    assert got(home.sync(name, 1, "m", None, [])).error is bad
    assert got(home.heartbeat(name, 1, "m", None)) is bad
    assert got(home.leave(name, [])).error is bad
    assert got(home.delete(name)) is bad
    assert got(home.delete_offsets(name, [])).error is bad


@pytest.mark.parametrize("session_ms", [5_999, 1_800_001])
def test_session_timeouts_have_bounds(session_ms: int) -> None:
    home = Nodes(1).coordinators[NodeId(1)]
    refused = got(home.join("g", request(session_timeout_ms=session_ms)))
    assert refused.error is ErrorCode.INVALID_SESSION_TIMEOUT


# ---- take-overs ----


def test_a_new_coordinator_goes_on_with_generation_and_members() -> None:
    nodes = Nodes(1, 2, 3)
    first = nodes.of("g")
    member_id = join_alone(first)
    assert got(first.commit("g", 1, member_id, None, [position(5)])) == (NONE,)
    nodes.log.fence(first.node_id)
    nodes.log.apply_all()
    second = nodes.of("g")
    assert second is not first
    assert got(second.heartbeat("g", 1, member_id, None)) is NONE
    assert got(second.sync("g", 1, member_id, None, [])).assignment == b"all"
    assert got(second.commit("g", 1, member_id, None, [position(6)])) == (NONE,)
    assert got(first.heartbeat("g", 1, member_id, None)) is ErrorCode.NOT_COORDINATOR
    # A broker that comes back takes nothing away.
    nodes.log.fence(first.node_id, 999)
    nodes.log.apply_all()
    assert nodes.of("g") is second
    assert got(second.heartbeat("g", 1, member_id, None)) is NONE


def test_a_deposed_coordinator_changes_nothing() -> None:
    nodes = Nodes(1, 2, is_prompt=False)
    log = nodes.log
    first = nodes.of("g")
    second = next(c for c in nodes.coordinators.values() if c is not first)

    def settle() -> None:
        while log.in_flight:
            log.commit(log.in_flight[0])
            log.apply_all()

    joined = first.join("g", request())
    settle()
    member_id = got(joined).member_id
    synced = first.sync("g", 1, member_id, None, [(member_id, b"old")])
    (stale,) = log.in_flight
    # The claim passes on while the generation is on its way.
    log.fence(first.node_id)
    log.apply_all()
    log.in_flight.remove(stale)
    other = second.join("g", request())
    settle()
    log.in_flight.append(stale)
    settle()
    assert got(synced).error is ErrorCode.NOT_COORDINATOR
    assert got(other).error is NONE
    image = second._engine.image.groups.get("g")
    assert image is not None
    assert image.members == ()
    # Nor does a commit that was on its way.
    late = first.commit("g", 1, member_id, None, [position(1)])
    assert got(late) == (ErrorCode.NOT_COORDINATOR,)


def test_after_an_unknown_outcome_the_group_is_loaded_anew() -> None:
    nodes = Nodes(1, is_prompt=False)
    log = nodes.log
    home = nodes.coordinators[NodeId(1)]
    joined = home.join("g", request())
    log.commit(log.in_flight[0])
    log.apply_all()
    member_id = got(joined).member_id
    synced = home.sync("g", 1, member_id, None, [(member_id, b"all")])
    (proposal,) = log.in_flight
    log.lose(proposal)
    assert got(synced).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    # It is applied after all, before the next claim: the image rules.
    log.entries.append(proposal)
    again = home.heartbeat("g", 1, member_id, None)
    log.commit(log.in_flight[0])
    log.apply_all()
    assert got(again) is NONE
    synced = home.sync("g", 1, member_id, None, [])
    assert got(synced).assignment == b"all"


def test_a_failed_claim_is_retriable() -> None:
    nodes = Nodes(1, is_prompt=False)
    home = nodes.coordinators[NodeId(1)]
    joined = home.join("g", request())
    nodes.log.lose(nodes.log.in_flight[0])
    assert got(joined).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    nodes.log.fence(1)
    nodes.log.apply_all()
    assert home.find("g") is None
    assert got(home.join("g", request())).error is ErrorCode.NOT_COORDINATOR


def test_a_coordinator_cut_off_from_metadata_refuses_and_lets_nobody_expire() -> None:
    nodes = Nodes(1)
    home = nodes.coordinators[NodeId(1)]
    member_id = join_alone(home)
    engine = nodes.log.engines[NodeId(1)]
    assert home.unconfirmed_ms() < 2_000
    engine.is_cut_off = True
    nodes.pass_time(4_000)
    assert 4_000 <= home.unconfirmed_ms() < 5_000
    assert got(home.heartbeat("g", 1, member_id, None)) is NONE
    nodes.pass_time(2_000)
    assert got(home.heartbeat("g", 1, member_id, None)) is ErrorCode.NOT_COORDINATOR
    assert got(home.commit("g", 1, member_id, None, [position(1)])) == (ErrorCode.NOT_COORDINATOR,)
    nodes.pass_time(60_000)
    engine.is_cut_off = False
    nodes.pass_time(9_000)
    assert got(home.heartbeat("g", 1, member_id, None)) is NONE
    nodes.pass_time(10_100)
    assert got(home.heartbeat("g", 1, member_id, None)) is ErrorCode.UNKNOWN_MEMBER_ID


def test_draining_gives_the_claims_back() -> None:
    nodes = Nodes(1, 2, 3)
    first = nodes.of("g")
    member_id = join_alone(first)
    (promise,) = first.drain()
    assert promise.is_done
    assert got(first.heartbeat("g", 1, member_id, None)) is ErrorCode.NOT_COORDINATOR
    second = nodes.of("g")
    assert second is not first, "named at once, not only when the first one is fenced"
    assert got(second.heartbeat("g", 1, member_id, None)) is NONE
    assert got(first.describe("g")).error is ErrorCode.NOT_COORDINATOR


def test_a_node_that_lives_on_gives_its_claims_away_and_takes_none() -> None:
    nodes = Nodes(1, 2, 3)
    names = [f"g{i}" for i in range(GIVE_MAX + 20)]
    home = nodes.coordinators[NodeId(1)]
    for engine in nodes.log.engines.values():
        engine.image.shunned = (NodeId(2), NodeId(3))
    member_id = join_alone(home, names[0])
    for name in names[1:]:
        join_alone(home, name)
    for engine in nodes.log.engines.values():
        engine.image.shunned = (NodeId(1),)
    assert nodes.of(names[0]) is home, "a claim is kept until it is given away"
    assert got(home.heartbeat(names[0], 1, member_id, None)) is NONE
    nodes.log.is_prompt = False
    home.give_away(0.0)
    home.give_away(100.0)
    assert len(nodes.log.in_flight) == GIVE_MAX, "few at a time, and none of them twice"
    assert got(home.heartbeat(names[0], 1, member_id, None)) is ErrorCode.NOT_COORDINATOR
    assert len(nodes.log.in_flight) == GIVE_MAX, "what is given away is not claimed again"
    nodes.log.is_prompt = True
    nodes.log.settle_if_prompt()
    home.give_away(GIVE_EVERY_MS)
    groups = home._engine.image.groups
    assert {groups.groups[name].coordinator for name in names} == {2, 3}
    second = nodes.of(names[0])
    assert second is not home
    assert got(second.heartbeat(names[0], 1, member_id, None)) is NONE
    assert nodes.of("another") is not home


def test_the_only_node_keeps_its_claims() -> None:
    nodes = Nodes(1)
    home = nodes.coordinators[NodeId(1)]
    member_id = join_alone(home)
    home.give_away(0.0)
    assert got(home.heartbeat("g", 1, member_id, None)) is NONE


def test_the_only_node_drains() -> None:
    nodes = Nodes(1)
    home = nodes.coordinators[NodeId(1)]
    assert home.unconfirmed_ms() == 0
    join_alone(home)
    home.drain()
    assert home.unconfirmed_ms() == 0
    state = home._engine.image.groups.get("g")
    assert state is not None
    assert state.coordinator == -1


# ---- time ----

LATE_MS = 20


def test_the_end_of_a_session_is_seen_at_once() -> None:
    """Of many groups each has its turn at a tick in ten only; what is due does not wait for it."""
    nodes = Nodes(1, has_deadlines=True)
    home = nodes.coordinators[NodeId(1)]
    names = [f"g{i}" for i in range(40)]
    ends: dict[str, float] = {}
    for name in names:  # one after the other, in time as well
        nodes.pass_time(7, step_ms=25)
        member_id = join_alone(home, name)
        ends[name] = nodes.clock.now_ms + 10_000
    nodes.pass_time(3_000, step_ms=25)
    assert got(home.heartbeat("g39", 1, member_id, None)) is NONE
    ends["g39"] = nodes.clock.now_ms + 10_000
    seen: dict[str, float] = {}
    while len(seen) < len(names):
        now_ms = nodes.clock.now_ms + 1
        nodes.pass_deadlines(now_ms)
        if not now_ms % 25:
            home.tick(now_ms)
        gone = [n for n in names if n not in seen and not home._groups[n].members]
        seen.update(dict.fromkeys(gone, now_ms))
        assert now_ms < 20_000, "some never end"
    late_ms = [seen[name] - ends[name] for name in names]
    assert min(late_ms) >= 0
    assert max(late_ms) <= LATE_MS


def test_members_that_are_heard_cost_one_look_in_a_session() -> None:
    nodes = Nodes(1, has_deadlines=True)
    home = nodes.coordinators[NodeId(1)]
    member_id = join_alone(home)
    looks = 0
    for _ in range(100):  # 50 seconds, in sessions of ten
        nodes.pass_time(1)  # the tick, which keeps the claim
        looks += nodes.pass_deadlines(nodes.clock.now_ms + 499)
        assert got(home.heartbeat("g", 1, member_id, None)) is NONE
    assert 3 <= looks <= 6
    assert nodes.deadlines is not None
    home.drain()
    assert len(nodes.deadlines) == 0


def test_no_session_ends_after_a_doubt_before_sessions_were_extended() -> None:
    nodes = Nodes(1, has_deadlines=True)
    home = nodes.coordinators[NodeId(1)]
    member_id = join_alone(home)
    engine = nodes.log.engines[NodeId(1)]
    nodes.pass_time(1_000)
    engine.is_cut_off = True
    nodes.pass_time(8_990)
    engine.is_cut_off = False
    home._confirm(nodes.clock.now_ms)
    assert nodes.pass_deadlines(10_020) == 1, "its session ends before the next tick"
    nodes.pass_time(9_000)
    assert got(home.heartbeat("g", 1, member_id, None)) is NONE
    nodes.pass_time(10_000 + LATE_MS)
    assert got(home.heartbeat("g", 1, member_id, None)) is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_rebalance_that_may_last_no_time_is_not_looked_at_all_the_time() -> None:
    nodes = Nodes(1, has_deadlines=True)
    home = nodes.coordinators[NodeId(1)]
    join_alone(home, "other")
    nodes.pass_time(25)
    for name in ("a", "b"):
        joined = got(home.join("g", request(instance_id=name, rebalance_timeout_ms=0)))
        assert got(home.sync("g", joined.generation, joined.member_id, name, [])).error is NONE
    assert got(home.leave("g", [("", "b")])).members == (NONE,)
    assert got(home.describe("g")).phase is Phase.PREPARING, "the other one may still be back"
    assert 10 <= nodes.pass_deadlines(nodes.clock.now_ms + 4_000) <= 4_000 / TIMER_MS_MIN


# ---- offsets ----


def test_offsets_are_answered_when_applied() -> None:
    nodes = Nodes(1, is_prompt=False)
    log = nodes.log
    home = nodes.coordinators[NodeId(1)]
    committed = home.commit("free", -1, "", None, [position(7), position(8, partition=1)])
    log.commit(log.in_flight[0])
    log.apply_all()
    assert not committed.is_done
    log.commit(log.in_flight[0])
    fetched = home.fetch_offsets("free")
    assert not fetched.is_done, "the barrier waits for what was committed before it"
    log.apply_all()
    assert got(committed) == (NONE, NONE)
    offsets = got(fetched).offsets
    assert {at: o.offset for at, o in offsets.items()} == {
        TopicPartition("t", 0): 7,
        TopicPartition("t", 1): 8,
    }
    assert offsets[TopicPartition("t", 0)].leader_epoch == 3
    assert offsets[TopicPartition("t", 0)].timestamp_ms == nodes.clock.wall_ms()


def test_commits_are_fenced_by_member_and_generation() -> None:
    home = Nodes(1).coordinators[NodeId(1)]
    member_id = join_alone(home)
    one = [position(1)]
    assert got(home.commit("g", 1, member_id, None, one)) == (NONE,)
    assert got(home.commit("g", 0, member_id, None, one)) == (ErrorCode.ILLEGAL_GENERATION,)
    assert got(home.commit("g", 1, "stranger", None, one)) == (ErrorCode.UNKNOWN_MEMBER_ID,)
    assert got(home.commit("g", -1, "", None, one)) == (ErrorCode.UNKNOWN_MEMBER_ID,)
    assert got(home.commit("g", 1, member_id, None, [])) == ()


@pytest.mark.parametrize(("level", "known_version"), [(2, -1), (3, 17)])
def test_a_commit_says_in_which_version_its_partitions_were_seen(
    level: int, known_version: int
) -> None:
    """Once every node can read that."""
    nodes = Nodes(1)
    home = nodes.coordinators[NodeId(1)]
    nodes.log.engines[NodeId(1)].image.level = level
    got(home.commit("g", -1, "", None, [position(7)], known_version=17))
    proposed = [entry.command for entry in nodes.log.entries if isinstance(entry, Proposal)]
    [said] = [c.known_version for c in proposed if isinstance(c, CommitOffsets)]
    assert said == known_version


def test_a_consumer_outside_of_group_management_may_have_an_instance_id() -> None:
    home = Nodes(1).coordinators[NodeId(1)]
    assert got(home.commit("free", -1, "", "instance", [position(7)])) == (NONE,)
    assert got(home.commit("other", -1, "gone", None, [position(7)])) == (NONE,)


@pytest.mark.parametrize("letter", ["a", "ü", "\N{SNOWMAN}"])
def test_metadata_of_offsets_is_limited_in_characters(letter: str) -> None:
    home = Nodes(1).coordinators[NodeId(1)]
    longest, longer = letter * 4_096, letter * 4_097
    codes = got(
        home.commit(
            "g", -1, "", None, [position(1, meta=longer), position(2, partition=1, meta=longest)]
        )
    )
    assert codes == (ErrorCode.OFFSET_METADATA_TOO_LARGE, NONE)
    assert list(got(home.fetch_offsets("g")).offsets) == [TopicPartition("t", 1)]


@pytest.mark.parametrize("letter", ["a", "ü"])
def test_a_commit_of_too_much_metadata_is_refused_whole(letter: str) -> None:
    home = Nodes(1).coordinators[NodeId(1)]
    meta = letter * (4_096 // len(letter.encode()))
    full = [position(1, partition=at, meta=meta) for at in range(256)]  # 1 MiB
    too_large = [*full, position(1, partition=256, meta="a")]
    long = position(1, partition=257, meta="a" * 4_097)
    codes = got(home.commit("g", -1, "", None, [*too_large, long]))
    assert codes == (
        *[ErrorCode.INVALID_COMMIT_OFFSET_SIZE] * 257,
        ErrorCode.OFFSET_METADATA_TOO_LARGE,
    )
    assert not got(home.fetch_offsets("g")).offsets
    codes = got(home.commit("g", -1, "", None, [*full, long]))
    assert codes == (*[NONE] * 256, ErrorCode.OFFSET_METADATA_TOO_LARGE)


def test_a_character_of_metadata_is_what_java_calls_one() -> None:
    home = Nodes(1).coordinators[NodeId(1)]
    pair = "\N{GRINNING FACE}"  # two chars of a Java string
    metas = [pair * 2_048, pair * 2_048 + "a"]
    offsets = [position(1, partition=at, meta=meta) for at, meta in enumerate(metas)]
    codes = got(home.commit("g", -1, "", None, offsets))
    assert codes == (NONE, ErrorCode.OFFSET_METADATA_TOO_LARGE)


def test_an_unknown_commit_is_said_to_be_so() -> None:
    nodes = Nodes(1, is_prompt=False)
    home = nodes.coordinators[NodeId(1)]
    committed = home.commit("g", -1, "", None, [position(1)])
    nodes.log.commit(nodes.log.in_flight[0])
    nodes.log.apply_all()
    nodes.log.lose(nodes.log.in_flight[0])
    assert got(committed) == (ErrorCode.COORDINATOR_NOT_AVAILABLE,)
    nodes.log.engines[NodeId(1)].is_cut_off = True
    assert got(home.fetch_offsets("g")).error is ErrorCode.NOT_COORDINATOR


def test_offsets_of_topics_in_use_are_not_deleted() -> None:
    home = Nodes(1).coordinators[NodeId(1)]
    member_id = join_alone(home)
    got(home.commit("g", 1, member_id, None, [position(1), position(2, topic="u")]))
    at = [TopicPartition("t", 0), TopicPartition("u", 0), TopicPartition("u", 9)]
    deleted = got(home.delete_offsets("g", at))
    assert deleted.partitions == (ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC, NONE, NONE)
    assert list(got(home.fetch_offsets("g")).offsets) == [TopicPartition("t", 0)]
    got(home.leave("g", [(member_id, None)]))
    assert got(home.delete_offsets("g", at[:1])).partitions == (NONE,)
    assert not got(home.fetch_offsets("g")).offsets


def test_a_deletion_of_offsets_names_topics_by_id_where_the_level_has_that() -> None:
    nodes = Nodes(1)
    home, engine = nodes.coordinators[NodeId(1)], nodes.log.engines[NodeId(1)]
    at = [TopicPartition("t", 0), TopicPartition("u", 0)]
    topic_id = TopicId(UUID(int=7))
    engine.image.topics = {"t": SimpleNamespace(topic_id=topic_id)}

    def named() -> tuple[TopicId, ...]:
        got(home.delete_offsets("h", at))
        [command] = [
            entry.command
            for entry in nodes.log.entries[-1:]
            if isinstance(entry, Proposal) and isinstance(entry.command, DeleteOffsets)
        ]
        return command.topic_ids

    got(home.commit("h", -1, "", None, [position(1)]))
    assert named() == ()
    engine.image.level = LEVEL_OF_MOVES
    assert named() == (topic_id, NO_TOPIC_ID)


def test_offsets_of_other_group_types_need_an_empty_group() -> None:
    home = Nodes(1).coordinators[NodeId(1)]
    got(home.join("g", request(protocol_type="connect")))
    deleted = got(home.delete_offsets("g", [TopicPartition("t", 0)]))
    assert deleted.error is ErrorCode.NON_EMPTY_GROUP


def test_subscriptions_in_no_known_form() -> None:
    assert subscribed_topics(SUBSCRIPTION) == ("t",)
    for broken in (
        b"",
        SUBSCRIPTION[:7],
        b"\xff\xff" + SUBSCRIPTION[2:],
        SUBSCRIPTION[:8] + b"\xff",
    ):
        assert subscribed_topics(broken) is None
    assert subscribed_topics(b"\x00\x00\x7f\xff\xff\xff") is None


# ---- operators ----


def test_describe_and_list() -> None:
    nodes = Nodes(1)
    home = nodes.coordinators[NodeId(1)]
    member_id = join_alone(home)
    live = got(home.describe("g"))
    assert (live.phase, live.protocol_type, live.protocol) == (Phase.STABLE, "consumer", "range")
    (member,) = live.members
    assert (member.member_id, member.client_id, member.assignment) == (member_id, "c", b"all")
    nodes.log.fence(1)
    nodes.log.fence(1, 7)
    nodes.log.apply_all()
    assert got(home.describe("g")) == live, "the same from what is saved"
    (listing,) = home.list_groups()
    assert (listing.name, listing.phase) == ("g", Phase.STABLE)
    assert got(home.heartbeat("g", 1, member_id, None)) is NONE
    assert got(home.leave("g", [(member_id, None), ("x", None)])).members == (
        NONE,
        ErrorCode.UNKNOWN_MEMBER_ID,
    )
    assert got(home.describe("g")).phase is Phase.EMPTY


def test_only_empty_groups_are_deleted() -> None:
    home = Nodes(1).coordinators[NodeId(1)]
    member_id = join_alone(home)
    assert got(home.delete("g")) is ErrorCode.NON_EMPTY_GROUP
    got(home.leave("g", [(member_id, None)]))
    assert got(home.delete("g")) is NONE
    assert home._engine.image.groups.names() == []
    assert got(home.delete("g")) is ErrorCode.GROUP_ID_NOT_FOUND
    # Its coordinator epochs are not given again.
    join_alone(home)
    state = home._engine.image.groups.get("g")
    assert state is not None
    assert state.coordinator_epoch == 2


# ---- expiry ----


def test_offsets_expire_seven_days_after_the_group_is_empty() -> None:
    nodes = Nodes(1)
    home = nodes.coordinators[NodeId(1)]
    member_id = join_alone(home)
    got(home.commit("g", 1, member_id, None, [position(1)]))
    got(home.leave("g", [(member_id, None)]))
    nodes.pass_time(7 * DAY - 700_000, step_ms=DAY)
    assert got(home.fetch_offsets("g")).offsets
    nodes.pass_time(2_000_000, step_ms=100_000)
    assert home._engine.image.groups.names() == []
    join_alone(home)


def test_offsets_of_an_active_group_live_on_while_their_topic_is_read() -> None:
    nodes = Nodes(1)
    home = nodes.coordinators[NodeId(1)]
    member_id = join_alone(home)
    got(home.commit("g", 1, member_id, None, [position(1), position(1, topic="u")]))
    nodes.clock.skew_ms += 8 * DAY
    nodes.clock.now_ms += 600_000
    for _ in range(3):
        got(home.heartbeat("g", 1, member_id, None))
        nodes.pass_time(50)
    assert list(got(home.fetch_offsets("g")).offsets) == [TopicPartition("t", 0)]


def test_free_consumers_keep_their_offsets_by_committing() -> None:
    nodes = Nodes(1, config=GroupConfig(offsets_retention_ms=DAY))
    home = nodes.coordinators[NodeId(1)]
    for offset in range(5):
        assert got(home.commit("g", -1, "", None, [position(offset)])) == (NONE,)
        nodes.pass_time(DAY // 2, step_ms=DAY // 8)
    assert got(home.fetch_offsets("g")).offsets
    nodes.pass_time(DAY, step_ms=DAY // 8)
    assert not got(home.fetch_offsets("g")).offsets


def test_an_idle_group_without_offsets_is_forgotten() -> None:
    nodes = Nodes(1)
    home = nodes.coordinators[NodeId(1)]
    got(home.leave("g", [(join_alone(home), None)]))
    nodes.pass_time(500_000, step_ms=50_000)
    assert home._engine.image.groups.names() == ["g"]
    nodes.pass_time(1_300_000, step_ms=50_000)
    assert home._engine.image.groups.names() == []


def test_groups_of_a_dead_coordinator_expire_too() -> None:
    nodes = Nodes(1, 2, 3, config=GroupConfig(offsets_retention_ms=DAY))
    first = nodes.of("g")
    got(first.commit("g", -1, "", None, [position(1)]))
    nodes.log.fence(first.node_id)
    nodes.log.apply_all()
    nodes.pass_time(2 * DAY, step_ms=DAY // 8)
    assert nodes.of("g")._engine.image.groups.names() == []


def test_expiry_goes_by_the_time_that_a_majority_agrees_on() -> None:
    nodes = Nodes(1)
    home = nodes.coordinators[NodeId(1)]
    committed_ms = nodes.clock.wall_ms()
    agreed_ms: list[int | None] = [None]
    home._retention_now_ms = lambda: agreed_ms[0]
    got(home.commit("g", -1, "", None, [position(1)]))
    nodes.clock.skew_ms += 100 * DAY  # its own clock is far ahead
    for agreed, is_kept in ((None, True), (committed_ms + 6 * DAY, True)):
        agreed_ms[0] = agreed
        nodes.pass_time(DAY // 4, step_ms=DAY // 4)
        assert bool(got(home.fetch_offsets("g")).offsets) == is_kept
    agreed_ms[0] = committed_ms + 7 * DAY
    nodes.pass_time(DAY // 4, step_ms=DAY // 4)
    assert not got(home.fetch_offsets("g")).offsets


def test_commits_are_not_stamped_with_a_clock_that_is_behind() -> None:
    nodes = Nodes(1)
    home = nodes.coordinators[NodeId(1)]
    agreed_ms = nodes.clock.wall_ms()
    home._latest_now_ms = lambda: agreed_ms
    nodes.clock.skew_ms -= 100 * DAY
    nodes.pass_time(50)
    got(home.commit("g", -1, "", None, [position(1)]))
    (saved,) = got(home.fetch_offsets("g")).offsets.values()
    assert saved.timestamp_ms == agreed_ms


@pytest.mark.parametrize("has_members", [False, True], ids=["by-hand", "members"])
def test_nothing_ages_before_anybody_could_tell_the_time(has_members: bool) -> None:
    """A coordinator that leads nothing has only its own clock, which may be weeks behind: what it
    stamped was expired as soon as it, or the next one, knew better."""
    nodes = Nodes(1)
    home = nodes.coordinators[NodeId(1)]
    right_ms = nodes.clock.wall_ms
    known: list[bool] = [False]
    home._retention_now_ms = home._latest_now_ms = lambda: (
        right_ms() + 100 * DAY if known[0] else None
    )
    nodes.pass_time(50)
    if has_members:
        member = join_alone(home)
        got(home.commit("g", 1, member, None, [position(1)]))
        got(home.leave("g", [(member, None)]))
    else:
        got(home.commit("g", -1, "", None, [position(1)]))
    for is_known in (False, True):
        known[0] = is_known
        nodes.pass_time(DAY // 2, step_ms=DAY // 8)
        (saved,) = got(home.fetch_offsets("g")).offsets.values()
        assert (saved.timestamp_ms == UNDATED) != is_known
    nodes.pass_time(6 * DAY, step_ms=DAY // 8)
    assert got(home.fetch_offsets("g")).offsets, "it is seven days from then on"
    nodes.pass_time(DAY, step_ms=DAY // 8)
    assert not got(home.fetch_offsets("g")).offsets


def test_many_groups_expire_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftmq.groups.coordinator._EXPIRIES_AT_ONCE", 2)
    nodes = Nodes(1)
    home = nodes.coordinators[NodeId(1)]
    for i in range(5):
        got(home.commit(f"g{i}", -1, "", None, [position(1)]))
    nodes.clock.now_ms += 8 * DAY
    nodes.pass_time(50)
    assert len(home._engine.image.groups.names()) == 3
    nodes.pass_time(2_500)
    assert home._engine.image.groups.names() == []


def test_no_look_for_expiry_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand groups would else cost seconds of the loop at once."""
    monkeypatch.setattr("raftmq.groups.coordinator._LOOKED_AT_ONCE", 4)
    looked: list[str] = []

    def look(state: GroupImage, *how: Any) -> tuple[ExpiredOffset, ...]:
        looked.append(state.name)
        return expired_offsets(state, *how)

    monkeypatch.setattr("raftmq.groups.coordinator.expired_offsets", look)
    nodes = Nodes(1)
    home = nodes.coordinators[NodeId(1)]
    for i in range(6):
        got(home.commit(f"g{i}", -1, "", None, [position(1)]))
    nodes.clock.now_ms += 600_000
    for expected in (["g0", "g1"], ["g2", "g3"], ["g4", "g5"], []):
        looked.clear()
        nodes.pass_time(50)
        assert looked == expected


def test_a_group_that_nobody_loaded_without_a_barrier() -> None:
    nodes = Nodes(1)
    home = nodes.coordinators[NodeId(1)]
    nodes.log.engines[NodeId(1)].is_cut_off = True
    assert got(home.describe("g")).error is ErrorCode.COORDINATOR_NOT_AVAILABLE


def test_a_claim_that_is_overtaken_is_not_served() -> None:
    home = Nodes(1).coordinators[NodeId(1)]
    join_alone(home)
    assert home._load("g", 99, 0.0) is ErrorCode.NOT_COORDINATOR
    assert home._load("gone", 1, 0.0) is ErrorCode.NOT_COORDINATOR
