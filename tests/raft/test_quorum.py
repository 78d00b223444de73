"""The arithmetic of majorities against a twin that enumerates subsets."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from raftmq.raft.membership import VoteOutcome, majority, quorum_end, vote_outcome
from raftmq.types import RaftIndex

ends = st.lists(st.integers(0, 20).map(RaftIndex), min_size=1, max_size=7)
ballots = st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=7)


def brute_quorum_end(of: list[RaftIndex]) -> int:
    """The greatest number that all members of some smallest majority have reached."""
    best = 0
    for size in range(1, len(of) + 1):
        if 2 * size > len(of):
            for some in combinations(of, size):
                best = max(best, min(some))
    return best


@given(ends)
def test_quorum_end_is_what_some_majority_has(of: list[RaftIndex]) -> None:
    """And nothing beyond it is on a majority."""
    assert quorum_end(of) == brute_quorum_end(of)
    reached = [each for each in of if each >= quorum_end(of)]
    beyond = [each for each in of if each > quorum_end(of)]
    assert 2 * len(reached) > len(of)
    assert 2 * len(beyond) <= len(of)


@given(ends, st.integers(0, 6), st.integers(0, 20))
def test_quorum_end_never_falls_by_progress(of: list[RaftIndex], who: int, more: int) -> None:
    """A replica that flushes more can only raise it."""
    later = list(of)
    later[who % len(of)] = RaftIndex(later[who % len(of)] + more)
    assert quorum_end(later) >= quorum_end(of)


@given(ballots)
def test_vote_outcome_is_what_every_ending_agrees_on(cast: list[bool | None]) -> None:
    """Won or lost as soon as no open vote can change it."""
    votes = {who: vote for who, vote in enumerate(cast) if vote is not None}
    missing = len(cast) - len(votes)
    granted = sum(votes.values())
    endings = [2 * (granted + more) > len(cast) for more in range(missing + 1)]
    expected = VoteOutcome.PENDING
    if all(endings):
        expected = VoteOutcome.WON
    elif not any(endings):
        expected = VoteOutcome.LOST
    assert vote_outcome(range(len(cast)), votes) is expected


@given(ballots, st.lists(st.booleans(), max_size=5))
def test_votes_of_others_are_not_looked_at(cast: list[bool | None], others: list[bool]) -> None:
    """A learner's or a stranger's vote changes nothing."""
    votes = {who: vote for who, vote in enumerate(cast) if vote is not None}
    crowd = {len(cast) + who: vote for who, vote in enumerate(others)}
    assert vote_outcome(range(len(cast)), {**votes, **crowd}) is vote_outcome(
        range(len(cast)), votes
    )


@given(st.integers(1, 30), st.integers(-1, 1))
def test_majorities_overlap_across_one_change(voters: int, change: int) -> None:
    """Also those of sets that differ by one voter (Raft thesis §4.1, figure 4.3)."""
    other = max(1, voters + change)
    assert majority(voters) + majority(other) > max(voters, other)
    assert 2 * majority(voters) > voters
