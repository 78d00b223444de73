"""Terms of positions, and the search for where two logs part, against lists of terms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.raft.epoch_history import EpochHistory
from raftmq.types import RaftIndex, Term

terms_lists = st.lists(st.integers(1, 6), max_size=12).map(sorted)


def history(terms: list[int], start: int = 0, previous_term: int = 0) -> EpochHistory:
    """The epochs of a log whose position `start + n` has the n-th term."""
    epochs: list[tuple[Term, RaftIndex]] = []
    for position, term in enumerate(terms, start):
        if not epochs or epochs[-1][0] != term:
            epochs.append((Term(term), RaftIndex(position)))
    return EpochHistory(
        epochs,
        log_start=RaftIndex(start),
        previous_term=Term(previous_term),
        log_end=RaftIndex(start + len(terms)),
    )


def appended(terms: list[int]) -> EpochHistory:
    """The same, built entry by entry."""
    grown = EpochHistory()
    for position, term in enumerate(terms):
        grown.append(Term(term), RaftIndex(position), RaftIndex(position + 1))
    return grown


def same(one: EpochHistory, other: EpochHistory) -> bool:
    return (one.pairs(), one.log_start, one.log_end, one.previous_term, one.last_term) == (
        other.pairs(),
        other.log_start,
        other.log_end,
        other.previous_term,
        other.last_term,
    )


@given(terms_lists)
def test_terms_of_positions(terms: list[int]) -> None:
    """Every end has the term of the entry before it."""
    epochs = history(terms)
    assert same(epochs, appended(terms))
    for end in range(len(terms) + 1):
        term = terms[end - 1] if end else 0
        assert epochs.term_at_end(RaftIndex(end)) == term
        assert epochs.matches(RaftIndex(end), Term(term))
        assert not epochs.matches(RaftIndex(end), Term(term + 1))
    assert not epochs.matches(RaftIndex(len(terms) + 1), epochs.last_term)
    assert epochs.last_start == (terms.index(terms[-1]) if terms else 0)


@given(terms_lists, st.integers(0, 12))
def test_truncation(terms: list[int], end: int) -> None:
    """What is left is the history of the shorter log."""
    end = min(end, len(terms))
    epochs = history(terms)
    epochs.truncate_to(RaftIndex(end))
    assert same(epochs, history(terms[:end]))


@given(terms_lists, st.integers(0, 12))
def test_moving_the_start(terms: list[int], start: int) -> None:
    """What is left is the history of the log from there."""
    start = min(start, len(terms))
    previous_term = terms[start - 1] if start else 0
    epochs = history(terms)
    epochs.move_start(RaftIndex(start), Term(previous_term))
    assert same(epochs, history(terms[start:], start, previous_term))
    epochs.reset(RaftIndex(40), Term(9))
    assert same(epochs, history([], 40, 9))


@st.composite
def two_logs(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """A leader's and a follower's log that obey Log Matching, and the leader's log start.

    They agree up to a fork; after it no term of the one is a term of the other, except that one of
    them may hold more of the term at the fork.
    """
    common = draw(terms_lists)
    last = common[-1] if common else 0
    ours: list[int] = []
    theirs: list[int] = []
    longer = draw(st.integers(0, 3))
    if last and draw(st.booleans()):
        (ours if draw(st.booleans()) else theirs).extend([last] * longer)
    later = draw(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=5))
    for step, (count, is_ours) in enumerate(later):
        (ours if is_ours else theirs).extend([last + 1 + step] * count)
    return common + ours, common + theirs, draw(st.integers(0, len(common + ours)))


@given(two_logs())
def test_the_search_ends_where_the_logs_agree(logs: tuple[list[int], list[int], int]) -> None:
    """Few questions lead to a point where the logs agree, and to no lower one than needed."""
    ours, theirs, start = logs
    leader = history(ours)
    leader.move_start(RaftIndex(start), leader.term_at_end(RaftIndex(start)))
    follower = history(theirs)
    agree = 0
    while agree < min(len(ours), len(theirs)) and ours[agree] == theirs[agree]:
        agree += 1
    asked: RaftIndex | None = leader.log_end
    terms_seen = len(dict.fromkeys(ours + theirs))
    for _ in range(terms_seen + 2):
        assert asked is not None
        if follower.matches(asked, leader.term_at_end(asked)):
            break
        asked_before = asked
        asked = leader.next_end_after(*follower.hint(asked, leader.term_at_end(asked)))
        if asked is None:
            break
        assert start <= asked < asked_before
    else:
        pytest.fail("the search does not end")
    if asked is None:
        assert agree < start  # the follower needs the log start
    else:
        # All that agrees, cut back at most to where an epoch ends, never below the log start.
        assert asked <= agree
        assert asked == agree or ours[asked - 1 : asked] != ours[asked : asked + 1]


def test_hints_of_a_follower_behind_its_own_start() -> None:
    """A log of later terms alone has nothing to offer but its start."""
    follower = history([5, 5], 10, 4)
    assert follower.hint(RaftIndex(20), Term(3)) == (10, 4)
    leader = history([6], 12, 4)
    assert leader.next_end_after(RaftIndex(20), Term(4)) == 12
    assert leader.next_end_after(RaftIndex(11), Term(4)) is None
    assert leader.next_end_after(RaftIndex(20), Term(3)) is None


def test_gaps_belong_to_the_earlier_epoch() -> None:
    """Compaction leaves positions without entries; their term is that of what was there."""
    epochs = EpochHistory(log_start=RaftIndex(3), previous_term=Term(1), log_end=RaftIndex(3))
    epochs.append(Term(2), RaftIndex(5), RaftIndex(6))
    epochs.append(Term(3), RaftIndex(9), RaftIndex(10))
    assert epochs.pairs() == [(2, 3), (3, 9)]
    assert [epochs.term_at_end(RaftIndex(end)) for end in range(3, 11)] == [1, 2, 2, 2, 2, 2, 2, 3]


@pytest.mark.parametrize(
    ("epochs", "log_start", "log_end"),
    [
        ([], 2, 1),
        ([], 0, 1),
        ([(1, 1)], 0, 2),
        ([(1, 0), (1, 1)], 0, 2),
        ([(1, 0), (2, 0)], 0, 2),
        ([(1, 0), (2, 2)], 0, 2),
    ],
    ids=["backwards", "no epoch", "late epoch", "same term", "same start", "beyond the end"],
)
def test_impossible_histories(epochs: list[tuple[int, int]], log_start: int, log_end: int) -> None:
    """A recovered log that breaks the rules stops its replica."""
    with pytest.raises(AssertionError):
        EpochHistory(
            [(Term(term), RaftIndex(start)) for term, start in epochs],
            log_start=RaftIndex(log_start),
            log_end=RaftIndex(log_end),
        )


def test_terms_never_fall() -> None:
    """Along a log (Raft §5.3)."""
    epochs = history([2])
    with pytest.raises(AssertionError):
        epochs.append(Term(1), RaftIndex(1), RaftIndex(2))
    with pytest.raises(AssertionError):
        epochs.append(Term(2), RaftIndex(0), RaftIndex(1))
    with pytest.raises(AssertionError):
        epochs.term_at_end(RaftIndex(2))
    with pytest.raises(AssertionError):
        epochs.truncate_to(RaftIndex(2))
    with pytest.raises(AssertionError):
        epochs.move_start(RaftIndex(1), Term(1))
