"""Histories of views and of delayed records, each of which one verdict must reject, or accept."""

from __future__ import annotations

from jepsen_like.checkers.delays import MS
from jepsen_like.checkers.views import tag_of
from jepsen_like.history_events import Event, Value
from tests.jepsen_like.checkers.histories import accepted, rejected
from tests.jepsen_like.checkers.scribe import Scribe

NAME = "ViewEqualsFilter"
VIEW = "reds-0"
RED = [value for value in range(40) if tag_of(value) == "red"]
BLUE = [value for value in range(40) if tag_of(value) == "blue"]


def made(s: Scribe) -> None:
    """A view, and the base that it is to be of: red at 0, 2, 4 and 6, blue between."""
    s.note(0, "view_made", topics=["reds", "t"], tags=["red"])
    rows: dict[int, Value] = {}
    for number in range(4):
        rows |= {2 * number: RED[number], 2 * number + 1: BLUE[number]}
    s.append(1, rows)
    s.poll(2, rows)


def shown(
    s: Scribe,
    *rows: tuple[int, int],
    process: int = 3,
    start: int = -1,
    end: int = -1,
    group: str = "",
    moved: bool = False,
) -> None:
    invoked = s.invoke(process, "poll_view", offsets={} if start < 0 else {VIEW: start})
    s.ok(
        invoked,
        group=group,
        records={VIEW: [*rows]} if rows else {},
        offsets={} if end < 0 else {VIEW: end},
        partitions=[VIEW] if moved else [],
    )


def committed(s: Scribe, offset: int) -> None:
    s.ok(s.invoke(4, "commit", group="viewers", generation=1, offsets={VIEW: offset}))


ALL = [(2 * number, RED[number]) for number in range(4)]


@accepted(NAME)
def all_that_matches(s: Scribe) -> None:
    made(s)
    shown(s, *ALL[:1], start=0)
    shown(s, *ALL[1:], end=7)


@accepted(NAME)
def a_member_reads_on_where_another_one_was(s: Scribe) -> None:
    made(s)
    shown(s, *ALL[:2], process=4, start=0, group="viewers")
    committed(s, 3)
    shown(s, ALL[2], process=5, group="viewers", moved=True)
    shown(s, ALL[3], process=5, group="viewers")
    committed(s, 7)


@accepted(NAME)
def what_is_read_again_after_a_rebalance(s: Scribe) -> None:
    made(s)
    shown(s, *ALL, start=0)
    shown(s, *ALL[1:], moved=True)


@rejected(NAME)
def one_is_missing(s: Scribe) -> None:
    made(s)
    shown(s, ALL[0], *ALL[2:], start=0)


@rejected(NAME)
def one_is_missing_between_two_polls(s: Scribe) -> None:
    made(s)
    shown(s, *ALL[:2], start=0)
    shown(s, ALL[3])


@rejected(NAME)
def the_last_is_missing(s: Scribe) -> None:
    made(s)
    shown(s, *ALL[:3], start=0, end=8)


@rejected(NAME)
def nobody_comes_to_the_last(s: Scribe) -> None:
    made(s)
    shown(s, *ALL[:3], start=0, end=5)


@rejected(NAME)
def nobody_reads_at_all(s: Scribe) -> None:
    made(s)


@rejected(NAME)
def one_does_not_match(s: Scribe) -> None:
    made(s)
    shown(s, ALL[0], (1, BLUE[0]), *ALL[1:], start=0)


@rejected(NAME)
def one_was_never_committed(s: Scribe) -> None:
    made(s)
    shown(s, *ALL, (8, RED[5]), start=0)


@rejected(NAME)
def one_is_not_where_it_is_in_the_base(s: Scribe) -> None:
    made(s)
    shown(s, *ALL, start=0)
    shown(s, (0, RED[1]), process=5, start=0)


@rejected(NAME)
def one_comes_twice(s: Scribe) -> None:
    made(s)
    shown(s, *ALL, start=0)
    shown(s, ALL[3])


@rejected(NAME)
def a_group_commits_what_no_member_was_given(s: Scribe) -> None:
    made(s)
    shown(s, *ALL, start=0)
    shown(s, *ALL[:1], process=4, start=0, group="viewers")
    shown(s, *ALL[2:], process=5, group="viewers", moved=True)
    committed(s, 7)


# ---- delayed records ----

LATER, DUE = "later-0", "due-0"


def delay(
    s: Scribe, *values: int, due: int, slack: int = 0, cancels: tuple[int, ...] = ()
) -> Event:
    """Begin to send records that are due then, in milliseconds."""
    return s.invoke(
        1,
        "delay",
        records={LATER: [(-1, value) for value in values]},
        due=[due * MS] * len(values),
        slack=slack * MS,
        cancels=[*cancels],
    )


def wait(s: Scribe, ms: int) -> None:
    """Let time pass."""
    s.pass_by(ms * MS)


def come(s: Scribe, *rows: tuple[int, int], stamp: int, name: str = DUE) -> None:
    """These are in the target, stamped then, in milliseconds."""
    invoked = s.invoke(2, "poll_due")
    s.ok(invoked, records={name: [*rows]}, stamps={name: [stamp * MS] * len(rows)})


@accepted("NeverEarly")
def each_when_it_is_due(s: Scribe) -> None:
    s.ok(delay(s, 10, 11, due=100))
    wait(s, 100)
    come(s, (0, 10), stamp=100)
    come(s, (1, 11), stamp=100)
    come(s, (0, 10), (1, 11), stamp=100)


@accepted("NeverEarly")
def within_the_slack(s: Scribe) -> None:
    s.ok(delay(s, 10, due=100, slack=50))
    wait(s, 60)
    come(s, (0, 10), stamp=60)


@accepted("CancelledStaysAway")
def called_back_too_late_or_in_time(s: Scribe) -> None:
    s.ok(delay(s, 10, due=100))
    s.ok(delay(s, 11, due=200))
    wait(s, 120)
    s.ok(delay(s, due=0, cancels=(10,)))
    s.ok(delay(s, due=0, cancels=(11,)))
    wait(s, 100)
    come(s, (0, 10), stamp=120)


@accepted("CancelledStaysAway")
def called_back_while_nobody_knew_whether_it_was_there(s: Scribe) -> None:
    sent = delay(s, 10, due=100)
    s.ok(delay(s, due=0, cancels=(10,)))
    s.ok(sent)
    wait(s, 100)
    come(s, (0, 10), stamp=100)


@accepted("NothingPendingIsDropped")
def what_nobody_promised(s: Scribe) -> None:
    s.info(delay(s, 10, due=1))
    s.fail(delay(s, 11, due=1))
    s.ok(delay(s, 12, due=1))
    s.info(delay(s, due=0, cancels=(12,)))


@rejected("NeverEarly")
def seen_before_it_is_due(s: Scribe) -> None:
    s.ok(delay(s, 10, due=100))
    wait(s, 60)
    come(s, (0, 10), stamp=100)


@rejected("NeverEarly")
def stamped_before_it_is_due(s: Scribe) -> None:
    s.ok(delay(s, 10, due=100))
    wait(s, 100)
    come(s, (0, 10), stamp=60)


@rejected("DeliveredOnce")
def at_two_offsets(s: Scribe) -> None:
    s.ok(delay(s, 10, due=0))
    wait(s, 10)
    come(s, (0, 10), (4, 10), stamp=5)


@rejected("DeliveredOnce")
def in_a_partition_of_others(s: Scribe) -> None:
    s.ok(delay(s, 10, due=0))
    wait(s, 10)
    come(s, (0, 10), stamp=5, name="due-1")


@rejected("DeliveredOnce")
def aborted_and_delivered(s: Scribe) -> None:
    s.fail(delay(s, 10, due=0))
    wait(s, 10)
    come(s, (0, 10), stamp=5)


@rejected("DeliveredOnce")
def sent_by_nobody(s: Scribe) -> None:
    come(s, (0, 10), stamp=5)


@rejected("NothingPendingIsDropped")
def acknowledged_and_away(s: Scribe) -> None:
    s.ok(delay(s, 10, due=0))


@rejected("NothingPendingIsDropped")
def replaced_and_the_new_one_is_away(s: Scribe) -> None:
    s.ok(delay(s, 10, due=100))
    s.ok(delay(s, 11, due=100, cancels=(10,)))


@rejected("CancelledStaysAway")
def called_back_in_time(s: Scribe) -> None:
    s.ok(delay(s, 10, due=100))
    s.ok(delay(s, due=0, cancels=(10,)))
    wait(s, 120)
    come(s, (0, 10), stamp=100)
