"""Histories of transactions, each of which one verdict must reject, or all must accept."""

from __future__ import annotations

from jepsen_like.history_events import Event, Value
from tests.jepsen_like.checkers.histories import accepted, rejected
from tests.jepsen_like.checkers.scribe import Scribe

ID = "id"
INPUT = "t-0"
A, B = "x-0", "x-1"


def begin(
    s: Scribe, epoch: int = 0, *, protocol: int = 2, offset: int = -1, **records: list[int]
) -> Event:
    wanted: dict[str, list[tuple[int, Value]]] = {
        name.replace("_", "-"): [(-1, value) for value in values]
        for name, values in records.items()
    }
    return s.invoke(
        1,
        "transaction",
        transactional_id=ID,
        producer=[7, epoch],
        protocol=protocol,
        records=wanted,
        offsets={} if offset < 0 else {INPUT: offset},
    )


def ask(s: Scribe, of: Event, *, is_commit: bool = True) -> Event:
    return s.invoke(1, "end", transactional_id=ID, transaction=of.op, is_commit=is_commit)


def commit(s: Scribe, of: Event) -> None:
    s.ok(ask(s, of))
    s.ok(of)


def abort(s: Scribe, of: Event) -> None:
    s.ok(ask(s, of, is_commit=False))
    s.fail(of)


def read(
    s: Scribe, name: str, rows: dict[int, Value], end: int, *, start: int = 0, process: int = 2
) -> None:
    invoked = s.invoke(process, "poll_committed", offsets={name: start})
    s.ok(invoked, records={name: list(rows.items())} if rows else {}, offsets={name: end})


def told(s: Scribe, offset: int) -> None:
    s.ok(s.invoke(2, "stable_offset", transactional_id=ID), offsets={INPUT: offset})


@accepted("torn-transaction")
def all_of_it(s: Scribe) -> None:
    commit(s, begin(s, x_0=[10, 11], x_1=[12], offset=5))
    abort(s, begin(s, 1, x_0=[13], offset=6))
    read(s, A, {0: 10, 1: 11}, 5)
    read(s, B, {0: 12}, 2)
    told(s, 5)


@accepted("torn-transaction")
def unknown_and_all_of_it(s: Scribe) -> None:
    unknown = begin(s, x_0=[10], x_1=[11], offset=5)
    s.info(ask(s, unknown))
    s.info(unknown)
    told(s, -1)
    read(s, A, {0: 10}, 2)
    read(s, B, {0: 11}, 2)
    told(s, 5)


@accepted("lost-transaction")
def gone_with_the_log_start(s: Scribe) -> None:
    running = begin(s, x_0=[10])
    s.ok(ask(s, running))
    s.ok(running, records={A: [(3, 10)]})
    s.note(-1, "log_start", offsets={A: 4})


@rejected("committed-aborted-read")
def aborted_and_read(s: Scribe) -> None:
    running = begin(s, x_0=[10])
    s.fail(ask(s, running))
    s.fail(running)
    read(s, A, {0: 10}, 2)


@rejected("early-read")
def read_before_its_end(s: Scribe) -> None:
    running = begin(s, x_0=[10])
    read(s, A, {0: 10}, 1)
    commit(s, running)


@rejected("early-read")
def read_though_only_the_abort_was_asked_for(s: Scribe) -> None:
    running = begin(s, x_0=[10])
    s.info(ask(s, running, is_commit=False))
    read(s, A, {0: 10}, 1)


@rejected("intermediate-read")
def one_reader_is_given_a_part(s: Scribe) -> None:
    commit(s, begin(s, x_0=[10, 11]))
    read(s, A, {0: 10, 1: 11}, 3)
    read(s, A, {1: 11}, 3, process=3)


@rejected("torn-transaction")
def one_partition_lacks_it(s: Scribe) -> None:
    unknown = begin(s, x_0=[10], x_1=[11])
    s.info(ask(s, unknown))
    read(s, A, {0: 10}, 2)
    read(s, B, {}, 2)


@rejected("lost-transaction")
def nobody_is_given_it(s: Scribe) -> None:
    commit(s, begin(s, x_0=[10]))
    read(s, A, {}, 2)


@rejected("transaction-twice")
def at_two_offsets(s: Scribe) -> None:
    commit(s, begin(s, x_0=[10]))
    read(s, A, {0: 10, 1: 10}, 3)


@rejected("transaction-phantom")
def of_no_transaction(s: Scribe) -> None:
    read(s, A, {0: 10}, 1)


@rejected("aborted-offset")
def an_aborted_offset_is_kept(s: Scribe) -> None:
    running = begin(s, offset=5)
    s.fail(ask(s, running))
    s.fail(running)
    told(s, 5)


@rejected("early-offset")
def an_offset_before_the_end(s: Scribe) -> None:
    running = begin(s, offset=5)
    told(s, 5)
    commit(s, running)


@rejected("lost-transactional-offset")
def an_offset_that_was_replaced(s: Scribe) -> None:
    commit(s, begin(s, offset=5))
    commit(s, begin(s, 1, offset=6))
    told(s, 5)


@rejected("lost-transactional-offset")
def no_offset_after_a_commit(s: Scribe) -> None:
    commit(s, begin(s, offset=5))
    told(s, -1)


@accepted("lost-transactional-offset")
def an_offset_under_way(s: Scribe) -> None:
    commit(s, begin(s, offset=5))
    later = begin(s, 1, offset=6)
    end = ask(s, later)
    told(s, 5)
    told(s, 6)
    s.ok(end)
    s.ok(later)


def delayed(s: Scribe, protocol: int, *, is_commit: bool, epoch: int = 0) -> None:
    """The next transaction is committed, though only its abort was asked for."""
    first = begin(s, protocol=protocol, x_0=[10])
    s.info(ask(s, first, is_commit=is_commit))
    s.ok(ask(s, first, is_commit=is_commit))
    (s.ok if is_commit else s.fail)(first)
    read(s, A, {0: 10} if is_commit else {}, 2)
    second = begin(s, epoch, protocol=protocol, x_0=[11])
    read(s, A, {2: 11}, 4, start=2)
    s.fail(ask(s, second, is_commit=False))
    s.fail(second)


@accepted("early-read")
def a_delayed_end_by_protocol_1(s: Scribe) -> None:
    delayed(s, 1, is_commit=True)
    assert "1 excused" in s.report()["early-read"].note


@rejected("early-read")
def a_delayed_abort_commits_nothing(s: Scribe) -> None:
    delayed(s, 1, is_commit=False)


@rejected("early-read")
def a_delayed_end_of_another_epoch(s: Scribe) -> None:
    delayed(s, 1, is_commit=True, epoch=1)


@rejected("early-read")
def a_delayed_end_by_protocol_2(s: Scribe) -> None:
    delayed(s, 2, is_commit=True)
