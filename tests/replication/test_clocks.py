"""What time it is for expiry: sound whatever a minority of the clocks shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.replication.clocks import (
    AFTER_PAUSE_MS,
    HEAR_EVERY_MS,
    HEAR_SOON_MS,
    AgreedTime,
    TimeBounds,
)
from raftmq.types import NodeId, ReplicaId, StorageId

DAY = 86_400_000
NOW = 20_000 * DAY


def bounds(clocks: list[int], voters: int) -> tuple[int | None, int | None]:
    heard = TimeBounds()
    heard.hear(clocks, voters, 0.0)
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
    heard.hear([NOW, NOW, NOW], 3, 1_000.0)
    assert heard.earliest_ms(6_000.0) == heard.latest_ms(6_000.0) == NOW + 5_000
    heard.hear([NOW + 9 * DAY] * 3, 3, 2_000.0)
    assert heard.earliest_ms(2_000.0) == NOW + 1_000, "a majority jumped together"
    assert heard.latest_ms(2_000.0) == NOW + 9 * DAY
    heard.hear([NOW - 9 * DAY] * 3, 3, 2_000.0)
    assert heard.earliest_ms(2_000.0) == heard.latest_ms(2_000.0) == NOW - 9 * DAY
    heard.hear([NOW + 1_000] * 3, 3, 2_000.0)
    assert heard.earliest_ms(2_000.0) == NOW + 1_000


def test_a_dead_clock_that_was_heard_first_holds_nothing_back() -> None:
    heard = TimeBounds()
    heard.hear([NOW, 0], 3, 0.0)
    assert heard.earliest_ms(0.0) == 0
    heard.hear([NOW, 0, NOW], 3, 0.0)
    assert heard.earliest_ms(0.0) == NOW


class FakeClock:
    """Both clocks of a node, set by hand."""

    monotonic = 0.0
    wall = NOW - 12 * DAY

    def monotonic_ms(self) -> float:
        return self.monotonic

    def wall_ms(self) -> int:
        return self.wall


def led(*clocks_ms: int, heard_tick: int = 10) -> Any:
    """A leader's core that heard these clocks, of nodes 2, 3, ..."""
    peers = {ReplicaId(NodeId(2 + i), StorageId(7)): ms for i, ms in enumerate(clocks_ms)}
    return SimpleNamespace(
        now=10,
        configuration=SimpleNamespace(voters=set(peers)),
        config=SimpleNamespace(election_ticks=3),
        progress={
            peer: SimpleNamespace(clock_ms=clock_ms, last_heard_tick=heard_tick)
            for peer, clock_ms in peers.items()
        },
    )


def test_a_node_hears_clocks_in_the_groups_that_it_leads() -> None:
    clock = FakeClock()
    silent, alone = led(NOW, NOW, heard_tick=2), led()
    replicas = [silent, alone]
    voters = 0
    agreed = AgreedTime(NodeId(1), clock, lambda: replicas, lambda: voters)
    assert agreed.latest_ms() is None, "the metadata voters are not known"
    voters = 3
    assert agreed.latest_ms() is None, "its own clock alone decides nothing"
    assert agreed.earliest_ms() is None
    replicas.append(led(NOW))
    assert agreed.latest_ms() is None, "it asks again soon"
    clock.monotonic += HEAR_SOON_MS
    assert agreed.latest_ms() == NOW
    assert agreed.earliest_ms() == clock.wall
    replicas[:] = [led(NOW + DAY)]
    assert agreed.latest_ms() == NOW, "it asks again in a second"
    replicas.clear()
    clock.monotonic += HEAR_EVERY_MS
    assert agreed.latest_ms() == NOW + HEAR_EVERY_MS


def test_what_was_heard_before_a_pause_is_old() -> None:
    """The replicas' ticks stood still with the process."""
    clock = FakeClock()
    clock.wall = NOW
    agreed = AgreedTime(NodeId(1), clock, lambda: [led(NOW, NOW)], lambda: 3)
    assert agreed.latest_ms() == NOW
    clock.monotonic = 9.0 * DAY
    for _ in range(int(AFTER_PAUSE_MS / HEAR_EVERY_MS)):
        assert agreed.latest_ms() == NOW + clock.monotonic
        clock.monotonic += HEAR_EVERY_MS
    assert agreed.latest_ms() == NOW, "it hears again"


def test_the_metadata_group_is_kept_awake_until_the_time_is_known() -> None:
    clock, replicas, woken = FakeClock(), [led()], []
    agreed = AgreedTime(
        NodeId(1), clock, lambda: replicas, lambda: 3, lambda: woken.append(clock.monotonic)
    )
    clock.monotonic = 2_000.0
    agreed.tick()
    assert woken == [], "after a pause it hears nothing yet"
    while clock.monotonic < 2_000.0 + AFTER_PAUSE_MS:
        clock.monotonic += 500.0
        agreed.tick()
    assert woken == [12_000.0]
    replicas.append(led(NOW))
    clock.monotonic += HEAR_SOON_MS
    agreed.tick()
    assert agreed.latest_ms() == NOW
    clock.monotonic += HEAR_EVERY_MS
    replicas.clear()
    agreed.tick()
    assert woken == [12_000.0], "what was heard once goes on by itself"
