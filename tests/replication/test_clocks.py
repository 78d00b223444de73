"""What time it is for expiry: sound whatever a minority of the clocks shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.replication.clocks import (
    AGREED_WITHIN_MS,
    HEAR_AGAIN_MS,
    HEAR_EVERY_MS,
    HEAR_FIRST_MS,
    HEAR_SOON_MS,
    HEARD_WITHIN_MS,
    AgreedTime,
    TimeBounds,
)
from raftmq.types import NodeId, ReplicaId, StorageId

DAY = 86_400_000
NOW = 20_000 * DAY


def bounds(clocks: list[int], voters: int) -> tuple[int | None, int | None]:
    heard = TimeBounds()
    heard.hear([(clock_ms, 0.0) for clock_ms in clocks], voters, 0.0)
    return heard.earliest_ms(0.0), heard.latest_ms(0.0)


@pytest.mark.parametrize(
    ("clocks", "voters", "expected"),
    [
        ([5], 1, (5, 5)),
        ([5], 2, (5, 5)),
        ([5], 3, (None, None)),
        ([], 1, (None, None)),
        ([5, 9], 3, (5, 9)),
        ([5, 7, 99], 3, (7, 7)),
        ([1, 2, 7], 5, (1, 7)),
        ([1, 2], 5, (None, None)),
        ([1, 5, 6, 7, 99, 100, 101], 3, (7, 7)),
    ],
)
def test_bounds(clocks: list[int], voters: int, expected: tuple[int | None, int | None]) -> None:
    assert bounds(clocks, voters) == expected


@given(
    voters=st.sampled_from([1, 3, 5, 7]),
    right=st.integers(0, 7),
    wrong=st.lists(st.integers(0, 40_000 * DAY), max_size=3),
)
def test_a_minority_moves_no_bound_past_what_is_right(
    voters: int, right: int, wrong: list[int]
) -> None:
    clocks = [NOW] * right + wrong[: (voters - 1) // 2]
    earliest, latest = bounds(clocks, voters)
    if len(clocks) > (voters - 1) // 2:
        assert earliest is not None
        assert latest is not None
        assert earliest <= NOW <= latest


def test_time_goes_on_without_clocks_and_never_jumps() -> None:
    heard = TimeBounds()

    def hear(clock_ms: int, at_ms: float) -> None:
        heard.hear([(clock_ms, at_ms)] * 3, 3, at_ms)

    hear(NOW, 1_000.0)
    assert heard.earliest_ms(6_000.0) == heard.latest_ms(6_000.0) == NOW + 5_000
    hear(NOW + 9 * DAY, 2_000.0)
    assert heard.earliest_ms(2_000.0) == NOW + 1_000, "a majority jumped together"
    assert heard.latest_ms(2_000.0) == NOW + 9 * DAY
    hear(NOW - 9 * DAY, 2_000.0)
    assert heard.earliest_ms(2_000.0) == heard.latest_ms(2_000.0) == NOW - 9 * DAY
    hear(NOW + 1_000, 2_000.0)
    assert heard.earliest_ms(2_000.0) == NOW + 1_000


def test_a_dead_clock_that_was_heard_first_holds_nothing_back() -> None:
    heard = TimeBounds()
    heard.hear([(NOW, 0.0), (0, 0.0)], 3, 0.0)
    assert heard.earliest_ms(0.0) == 0
    heard.hear([(NOW, 0.0), (0, 0.0), (NOW, 0.0)], 3, 0.0)
    assert heard.earliest_ms(0.0) == NOW


class FakeClock:
    """Both clocks of a node, set by hand."""

    monotonic = 0.0
    wall = NOW - 12 * DAY

    def monotonic_ms(self) -> float:
        return self.monotonic

    def wall_ms(self) -> int:
        return self.wall


def led(*clocks_ms: int, asked_ms: float = 0.0) -> Any:
    """A leader's core that asked these clocks at that time, of nodes 2, 3, ..."""
    peers = {ReplicaId(NodeId(2 + i), StorageId(7)): ms for i, ms in enumerate(clocks_ms)}
    return SimpleNamespace(
        configuration=SimpleNamespace(voters={*peers, ReplicaId(NodeId(1), StorageId(7))}),
        progress={
            peer: SimpleNamespace(told_clock=(clock_ms, asked_ms) if clock_ms else None)
            for peer, clock_ms in peers.items()
        },
    )


def test_a_node_hears_clocks_in_the_groups_that_it_leads() -> None:
    clock = FakeClock()
    clock.monotonic = 20_000.0
    silent, alone = led(NOW, NOW), led(0, 0)
    replicas = [silent, alone]
    voters = 0
    agreed = AgreedTime(NodeId(1), clock, lambda: replicas, lambda: voters)
    assert agreed.latest_ms() is None, "the metadata voters are not known"
    voters = 3
    assert agreed.latest_ms() is None, "its own clock alone decides nothing"
    assert agreed.earliest_ms() is None
    replicas.append(led(NOW, asked_ms=20_000.0))
    assert agreed.latest_ms() is None, "it asks again soon"
    clock.monotonic += HEAR_FIRST_MS
    assert agreed.latest_ms() == NOW + HEAR_FIRST_MS, "it may have shown that when it was asked"
    assert agreed.earliest_ms() == clock.wall
    replicas[:] = [led(NOW + DAY, asked_ms=20_000.0)]
    assert agreed.latest_ms() == NOW + HEAR_FIRST_MS, "it asks again in a second"
    replicas.clear()
    clock.monotonic += HEAR_EVERY_MS
    assert agreed.latest_ms() == NOW + HEAR_FIRST_MS + HEAR_EVERY_MS


def test_what_was_asked_before_a_pause_is_old() -> None:
    """The replicas' ticks stood still with the process, and its sockets are full of answers."""
    clock, asked_ms = FakeClock(), 0.0
    clock.wall = NOW
    agreed = AgreedTime(NodeId(1), clock, lambda: [led(NOW, NOW, asked_ms=asked_ms)], lambda: 3)
    assert agreed.latest_ms() == agreed.reached_ms() == NOW
    clock.monotonic = 9.0 * DAY
    assert agreed.latest_ms() == NOW + 9 * DAY
    assert agreed.reached_ms() is None, "much may have happened to clocks since"
    assert agreed.stamp_ms() is None
    asked_ms = clock.monotonic
    clock.monotonic += HEAR_EVERY_MS
    assert agreed.reached_ms() == NOW, "the first answer to what it asked since"
    assert agreed.latest_ms() == NOW + HEAR_EVERY_MS


def test_after_a_short_pause_an_answer_counts_for_as_much_as_it_may_tell() -> None:
    clock = FakeClock()
    clock.wall = NOW + 5_000
    clock.monotonic = 5_000.0
    agreed = AgreedTime(NodeId(1), clock, lambda: [led(NOW, NOW)], lambda: 3)
    assert agreed.reached_ms() == agreed.earliest_ms() == NOW, "never early"
    assert agreed.latest_ms() == NOW + 5_000, "nothing ages before its time"
    assert not agreed.is_sure
    assert agreed.stamp_ms() == NOW + 5_000, "a delay that counts from here ends in time"
    clock.monotonic += AGREED_WITHIN_MS
    assert agreed.stamp_ms() == NOW + 5_000 + AGREED_WITHIN_MS, "of the hearing before"
    late = AgreedTime(NodeId(1), clock, lambda: [led(NOW, NOW)], lambda: 3)
    assert late.stamp_ms() is None, "that is too old to agree with"


def test_a_node_that_stalls_as_it_starts_knows_the_time_by_the_first_answer() -> None:
    clock, replicas = FakeClock(), [led(0, 0)]
    clock.wall = NOW
    agreed = AgreedTime(NodeId(1), clock, lambda: replicas, lambda: 3)
    agreed.tick()
    clock.monotonic += 3_000.0
    agreed.tick()
    assert agreed.reached_ms() is None
    replicas[:] = [led(NOW, NOW, asked_ms=clock.monotonic)]
    clock.monotonic += HEAR_FIRST_MS
    assert agreed.reached_ms() == NOW


def test_what_was_heard_long_ago_does_not_count() -> None:
    """Most clocks were a day ahead, and are set right while nothing is heard."""
    clock, replicas = FakeClock(), [led(NOW + DAY, NOW + DAY)]
    clock.wall = NOW + DAY
    agreed = AgreedTime(NodeId(1), clock, lambda: replicas, lambda: 3)
    assert agreed.reached_ms() == NOW + DAY
    replicas.clear()
    while clock.monotonic < HEAR_AGAIN_MS:
        assert agreed.is_sure
        clock.monotonic += HEAR_EVERY_MS
        clock.wall = NOW + int(clock.monotonic)
    clock.monotonic += 1.0
    assert not agreed.is_sure, "another hearing is wanted in time"
    assert agreed.stamp_ms() is not None
    clock.monotonic = HEARD_WITHIN_MS
    assert agreed.reached_ms() == NOW + DAY + HEARD_WITHIN_MS
    clock.monotonic += 1.0
    assert agreed.reached_ms() is None
    assert agreed.stamp_ms() is None
    assert not agreed.is_sure
    replicas[:] = [led(NOW + 60_000, NOW + 60_000, asked_ms=clock.monotonic)]
    clock.monotonic += HEAR_EVERY_MS
    assert agreed.reached_ms() == NOW + 60_000
    assert agreed.is_sure


def test_the_newest_clock_of_a_node_counts_that_any_group_heard() -> None:
    clock, replicas = FakeClock(), [led(NOW - 40, NOW - 90), led(NOW - 10, NOW - 700)]
    clock.wall = NOW - DAY
    agreed = AgreedTime(NodeId(1), clock, lambda: replicas, lambda: 3)
    assert agreed.reached_ms() == NOW - 90


def test_the_metadata_group_is_kept_awake_until_the_time_is_known() -> None:
    clock, replicas, woken = FakeClock(), [led(0)], []
    agreed = AgreedTime(
        NodeId(1), clock, lambda: replicas, lambda: 3, lambda: woken.append(clock.monotonic)
    )
    for _ in range(3):
        agreed.tick()
        clock.monotonic += 500.0
    assert woken == [0.0, 500.0, 1_000.0]
    replicas.append(led(NOW, asked_ms=clock.monotonic))
    agreed.tick()
    assert agreed.latest_ms() == NOW
    clock.monotonic += HEAR_EVERY_MS
    replicas.clear()
    agreed.tick()
    assert len(woken) == 3, "what was heard once goes on by itself"


def test_what_was_reached_is_the_newest_of_what_was_heard_lately() -> None:
    """Clocks that were heard are as old as their message; and a correct step is followed."""
    clock, heard = FakeClock(), [NOW - 200, NOW - 200]
    agreed = AgreedTime(
        NodeId(1), clock, lambda: [led(*heard, asked_ms=clock.monotonic)], lambda: 3
    )
    assert agreed.reached_ms() == NOW - 200
    clock.monotonic += HEAR_EVERY_MS
    heard[:] = [NOW + 950, NOW + 950]
    clock.wall = NOW + 1_000
    reached = agreed.reached_ms()
    assert reached == NOW + 950
    heard[:] = [NOW + 1_500, NOW + 1_500]  # by now as old as half a second
    clock.monotonic += HEAR_EVERY_MS
    clock.wall = NOW + 2_000
    assert agreed.reached_ms() == NOW + 1_950, "time does not fall"
    heard[:] = [NOW + DAY, NOW + DAY]
    clock.monotonic += HEAR_EVERY_MS
    assert agreed.reached_ms() == NOW + DAY, "most clocks were set right"


class HeldUpClock(FakeClock):
    """Whoever reads a clock is held up for a while right after it."""

    wall = NOW
    held_ms = 40

    def _hold_up(self) -> None:
        self.monotonic += self.held_ms
        self.wall += self.held_ms

    def monotonic_ms(self) -> float:
        now_ms = self.monotonic
        self._hold_up()
        return now_ms

    def wall_ms(self) -> int:
        now_ms = self.wall
        self._hold_up()
        return now_ms


def test_time_does_not_run_ahead_where_the_reader_is_held_up() -> None:
    clock = HeldUpClock()
    agreed = AgreedTime(NodeId(1), clock, lambda: (), lambda: 1)
    agreed.tick()
    clock.held_ms = 0
    assert agreed.reached_ms() == clock.wall - 40, "nothing is delivered early"
    assert agreed.latest_ms() == clock.wall + 40, "and nothing begins to age before its time"


def test_a_delay_that_counts_from_a_stamp_never_ends_early() -> None:
    """Whatever its leader heard before: the clocks that it heard may have been read at once, or as
    late as their answers came."""
    clock, heard = FakeClock(), [NOW, NOW]
    asked_ms = 0.0
    agreed = AgreedTime(NodeId(1), clock, lambda: [led(*heard, asked_ms=asked_ms)], lambda: 3)
    clock.wall, clock.monotonic = NOW - DAY, 3_000.4
    assert agreed.reached_ms() == NOW
    assert agreed.stamp_ms() == NOW + 3_001
    asked_ms = 4_000.0
    clock.wall, clock.monotonic = NOW - DAY, 4_010.0
    heard[:] = [NOW + 4_000] * 2
    assert agreed.reached_ms() == NOW + 4_000
    assert agreed.stamp_ms() == NOW + 4_010
    asked_ms = 4_500.0
    clock.monotonic = 7_500.0
    heard[:] = [NOW + 4_600] * 2
    assert agreed.reached_ms() == NOW + 7_490
    assert agreed.stamp_ms() == NOW + 7_500, "a slow hearing leaves more open than the one before"


def test_stamps_follow_clocks_that_are_set_right() -> None:
    clock, heard = FakeClock(), [NOW, NOW]
    agreed = AgreedTime(
        NodeId(1), clock, lambda: [led(*heard, asked_ms=clock.monotonic - 30)], lambda: 3
    )
    for ahead_ms, stamp_ahead_ms in ((0, 20), (DAY, DAY + 20), (0, DAY - 10)):
        clock.monotonic += HEAR_EVERY_MS
        clock.wall = NOW + int(clock.monotonic)
        heard[:] = [clock.wall + ahead_ms - 10] * 2
        stamp_ms = agreed.stamp_ms()
        assert stamp_ms == clock.wall + stamp_ahead_ms
        reached_ms = agreed.reached_ms()
        assert reached_ms is not None
        assert stamp_ms >= reached_ms


def test_nobody_stamps_while_two_clocks_are_far_apart() -> None:
    clock = FakeClock()
    agreed = AgreedTime(NodeId(1), clock, lambda: [led(NOW)], lambda: 3)
    assert agreed.reached_ms() == clock.wall
    assert agreed.stamp_ms() is None, "which of the two is wrong?"


@given(
    hearings=st.lists(
        st.tuples(
            st.floats(0, 4_000),
            st.floats(0, 4_000),
            st.integers(-2_000, 2_000) | st.integers(-10 * DAY, 10 * DAY),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_one_wrong_clock_and_slow_answers_keep_the_time_between_the_two(
    hearings: list[tuple[float, float, int]],
) -> None:
    """The time is NOW at 0; of one clock it is known how long ago it was asked, and it was read
    since."""
    heard, at_ms = TimeBounds(), 0.0
    for *ago_ms, wrong_ms in hearings:
        at_ms += 4_000.0
        now_ms, asked_ms = int(NOW + at_ms), at_ms - max(ago_ms)
        slow = int(NOW + at_ms - min(ago_ms)), asked_ms
        heard.hear([slow, (now_ms + wrong_ms, asked_ms), (now_ms, at_ms)], 3, at_ms)
        reached_ms, coming_ms = heard.reached_ms(at_ms), heard.coming_ms(at_ms)
        assert reached_ms is not None
        assert coming_ms is not None
        assert reached_ms <= NOW + at_ms
        assert coming_ms >= int(NOW + at_ms)


def test_more_clocks_are_sought_while_it_is_not_known_which_is_wrong() -> None:
    clock = FakeClock()
    heard = [NOW]
    agreed = AgreedTime(
        NodeId(1), clock, lambda: [led(*heard, asked_ms=clock.monotonic)], lambda: 3
    )
    assert (agreed.reached_ms(), agreed.is_sure) == (clock.wall, False)
    heard[:] = [NOW, NOW]
    clock.monotonic += HEAR_SOON_MS
    assert not agreed.is_sure, "it hears again in a second"
    agreed.seek()
    clock.monotonic += HEAR_SOON_MS
    assert agreed.is_sure
    assert agreed.reached_ms() == NOW


@pytest.mark.parametrize(
    ("clocks", "voters", "reached", "doubt"),
    [
        ([5], 1, 5, 0),
        ([5], 2, None, 0),
        ([5], 3, None, 0),
        ([5], 5, None, 0),
        ([5, 9], 1, 5, 4),
        ([5, 9], 2, 5, 4),
        ([5, 9], 3, 5, 4),
        ([5, 9], 5, 5, 4),
        ([1, 7, 7], 3, 7, 0),
        ([1, 7, 7], 5, 7, 0),
        ([7, 7, 99], 5, 7, 0),
        ([1, 7, 7, 7], 3, 7, 0),
        ([7, 7, 7, 99], 5, 7, 0),
        ([1, 2, 7, 7, 7], 5, 7, 0),
        ([7, 7, 7, 98, 99], 5, 7, 0),
    ],
)
def test_one_wrong_clock_does_not_move_what_was_reached(
    clocks: list[int], voters: int, reached: int | None, doubt: int
) -> None:
    heard = TimeBounds()
    heard.hear([(clock_ms, 0.0) for clock_ms in clocks], voters, 0.0)
    assert (heard.reached_ms(0.0), heard.doubt_ms(0.0)) == (reached, doubt)
