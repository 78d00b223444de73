"""Histories of transactions, each of which one verdict must reject, or all must accept."""

from __future__ import annotations

from jepsen_like.history_events import Event, Value
from tests.jepsen_like.checkers.histories import accepted, rejected
from tests.jepsen_like.checkers.scribe import Scribe

ID = "id"
INPUT = "t-0"
A, B = "x-0", "x-1"


def begin(
    s: Scribe,
    epoch: int = 0,
    *,
    protocol: int = 2,
    offset: int = -1,
    group: str = "",
    **records: list[int],
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
        group=group,
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
    s: Scribe,
    name: str,
    rows: dict[int, Value],
    end: int,
    *,
    start: int = 0,
    process: int = 2,
    within: Event | None = None,
) -> None:
    invoked = s.invoke(
        process,
        "poll_committed",
        offsets={name: start},
        transaction=-1 if within is None else within.op,
        group="" if within is None else within.group,
    )
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


# ---- plain batches and commits, deleted groups ----


def plain(s: Scribe, *, offset: int = -1, **records: list[int]) -> None:
    s.ok(begin(s, protocol=0, offset=offset, **records))


def delete(s: Scribe) -> None:
    s.ok(s.invoke(3, "delete_group", transactional_id=ID))


@accepted("early-read")
def a_plain_batch_is_read_at_once(s: Scribe) -> None:
    batch = begin(s, protocol=0, x_0=[10])
    read(s, A, {0: 10}, 1)
    s.ok(batch)


@rejected("lost-transaction")
def a_plain_batch_is_lost(s: Scribe) -> None:
    plain(s, x_0=[10])
    read(s, A, {}, 1)


@rejected("committed-aborted-read")
def a_plain_batch_was_refused_and_read(s: Scribe) -> None:
    s.fail(begin(s, protocol=0, x_0=[10]))
    read(s, A, {0: 10}, 1)


@accepted("lost-transactional-offset")
def a_plain_commit_between(s: Scribe) -> None:
    """It beats what was pending when it came."""
    running = begin(s, offset=5)
    plain(s, offset=6)
    commit(s, running)
    told(s, 6)
    told(s, 5)
    commit(s, begin(s, 1, offset=7))
    told(s, 7)


@rejected("lost-transactional-offset")
def a_plain_commit_that_was_replaced(s: Scribe) -> None:
    plain(s, offset=5)
    commit(s, begin(s, offset=6))
    told(s, 5)


@rejected("lost-transactional-offset")
def a_transaction_that_a_plain_commit_replaced(s: Scribe) -> None:
    commit(s, begin(s, offset=5))
    plain(s, offset=6)
    told(s, 5)


@accepted("lost-transactional-offset")
def a_group_that_was_deleted_meanwhile(s: Scribe) -> None:
    running = begin(s, offset=5)
    delete(s)
    commit(s, running)
    told(s, -1)
    commit(s, begin(s, 1, offset=6))
    told(s, 6)


@rejected("lost-transactional-offset")
def a_group_that_was_deleted_before(s: Scribe) -> None:
    delete(s)
    commit(s, begin(s, offset=5))
    told(s, -1)


@rejected("lost-transactional-offset")
def a_deleted_group_comes_back(s: Scribe) -> None:
    commit(s, begin(s, offset=5))
    delete(s)
    told(s, 5)


@accepted("lost-transactional-offset")
def a_plain_commit_without_an_answer_comes_after_a_deletion(s: Scribe) -> None:
    s.info(begin(s, protocol=0, offset=5))
    delete(s)
    told(s, -1)
    told(s, 5)


# ---- transactions that read ----


@accepted("circular-flow")
def a_chain(s: Scribe) -> None:
    first = begin(s, x_0=[10])
    read(s, A, {}, 0, within=first)
    commit(s, first)
    second = begin(s, 1, x_1=[11])
    read(s, A, {0: 10}, 2, within=second)
    commit(s, second)
    third = begin(s, 2, x_0=[12])
    read(s, B, {0: 11}, 2, within=third)
    commit(s, third)
    read(s, A, {0: 10, 2: 12}, 4, process=4)
    read(s, B, {0: 11}, 2, process=4)


def circle(s: Scribe, *, last: bool = True, protocol: int = 2) -> None:
    """Each of three transactions reads what another one wrote."""
    three = [begin(s, protocol=protocol, x_0=[10 + i], x_1=[20 + i]) for i in range(3)]
    for i, running in enumerate(three):
        read(s, A, {(i + 1) % 3: 10 + (i + 1) % 3}, 3, within=running, process=5 + i)
    for running in three[:2]:
        commit(s, running)
    (commit if last else abort)(s, three[2])
    read(s, B, {0: 20, 1: 21, 2: 22} if last else {0: 20, 1: 21}, 6, process=4)


@rejected("circular-flow")
def three_of_them_in_a_circle(s: Scribe) -> None:
    circle(s)


@rejected("circular-flow")
def two_of_them_in_a_circle_and_one_beside(s: Scribe) -> None:
    beside, one, other = (begin(s, i, x_0=[10 + i], x_1=[20 + i]) for i in range(3))
    read(s, A, {1: 11}, 3, within=beside, process=5)
    read(s, A, {2: 12}, 3, within=one, process=6)
    read(s, A, {1: 11}, 3, within=other, process=7)
    for running in (beside, one, other):
        commit(s, running)


@accepted("circular-flow")
def an_aborted_one_closes_no_circle(s: Scribe) -> None:
    first = begin(s, x_0=[10])
    second = begin(s, 1, x_1=[11])
    asked = ask(s, first)
    read(s, A, {0: 10}, 2, within=second)
    s.ok(asked)
    s.ok(first)
    abort(s, second)
    read(s, A, {0: 10}, 2, process=4)
    read(s, B, {}, 2, process=4)


def piped(s: Scribe, values: dict[int, Value], end: int, *, start: int, value: int) -> Event:
    """A transaction of a group that read these."""
    running = begin(s, value, group="g", x_1=[value])
    read(s, A, values, end, start=start, within=running, process=5)
    return running


def pipe(s: Scribe) -> None:
    """What there is to be read, and who reads the outcome."""
    for value in (10, 11, 12):
        plain(s, x_0=[value])
    read(s, A, {0: 10, 1: 11, 2: 12}, 3, process=4)


@accepted("input-skipped")
def each_is_given_once(s: Scribe) -> None:
    pipe(s)
    commit(s, piped(s, {0: 10}, 1, start=0, value=20))
    abort(s, piped(s, {1: 11}, 2, start=1, value=21))
    commit(s, piped(s, {1: 11}, 2, start=1, value=22))
    read(s, B, {0: 20, 4: 22}, 6)


@rejected("input-twice")
def one_is_given_twice(s: Scribe) -> None:
    pipe(s)
    commit(s, piped(s, {0: 10, 1: 11}, 2, start=0, value=20))
    commit(s, piped(s, {1: 11, 2: 12}, 3, start=1, value=21))
    read(s, B, {0: 20, 2: 21}, 4)


@rejected("input-skipped")
def one_is_given_to_none(s: Scribe) -> None:
    pipe(s)
    commit(s, piped(s, {0: 10}, 1, start=0, value=20))
    commit(s, piped(s, {2: 12}, 3, start=2, value=21))
    read(s, B, {0: 20, 2: 21}, 4)


@rejected("input-skipped")
def one_is_given_to_an_aborted_one_alone(s: Scribe) -> None:
    pipe(s)
    abort(s, piped(s, {0: 10}, 1, start=0, value=20))
    commit(s, piped(s, {1: 11, 2: 12}, 3, start=1, value=21))
    read(s, B, {2: 21}, 4)


@accepted("input-skipped")
def one_is_given_to_an_unknown_one(s: Scribe) -> None:
    pipe(s)
    unknown = piped(s, {0: 10}, 1, start=0, value=20)
    s.info(ask(s, unknown))
    s.info(unknown)
    commit(s, piped(s, {1: 11}, 2, start=1, value=21))
    read(s, B, {2: 21}, 4)


@accepted("circular-flow")
def a_circle_of_a_delayed_end_by_protocol_1(s: Scribe) -> None:
    first = begin(s, protocol=1, x_0=[9])
    s.info(ask(s, first))
    s.ok(ask(s, first))
    s.ok(first)
    read(s, A, {0: 9}, 2, process=4)
    late = begin(s, protocol=1, x_0=[10])
    reader = begin(s, 1, x_1=[11])
    read(s, A, {2: 10}, 4, start=2, within=reader, process=5)
    commit(s, reader)
    read(s, B, {0: 11}, 2, within=late, process=6)
    s.ok(ask(s, late))
    s.ok(late)


@accepted("input-twice")
def what_is_of_no_group_reads_as_it_likes(s: Scribe) -> None:
    """Nor is it of the group without a name, which was forgotten (seed 700630)."""
    pipe(s)
    s.note(-1, "group_gone", group="")
    for value in (20, 21):
        running = begin(s, value, x_1=[value])
        read(s, A, {0: 10}, 1, within=running, process=5)
        commit(s, running)
    read(s, B, {0: 20, 2: 21}, 4)


# ---- last stable offsets, and readers of all records ----


def stable(s: Scribe, offset: int, epoch: int, *, asked: Event | None = None) -> None:
    invoked = asked or s.invoke(4, "stable_end", partitions=[A])
    s.ok(invoked, offsets={A: offset}, leader_epoch=epoch)


def read_all(s: Scribe, rows: dict[int, Value], end: int, *, process: int = 5) -> None:
    s.ok(
        s.invoke(process, "poll_uncommitted"),
        records={A: list(rows.items())} if rows else {},
        offsets={A: end},
    )


@accepted("stable-offset-back")
def a_deposed_leader_tells_what_it_knows(s: Scribe) -> None:
    stable(s, 5, 1)
    stable(s, 9, 2)
    stable(s, 7, 1)
    stable(s, 9, 3)


@accepted("stable-offset-back")
def asked_before_the_other_was_told(s: Scribe) -> None:
    asked = s.invoke(5, "stable_end", partitions=[A])
    stable(s, 9, 1)
    stable(s, 7, 1, asked=asked)


@rejected("stable-offset-back")
def lower_by_the_same_leader(s: Scribe) -> None:
    stable(s, 9, 1)
    stable(s, 8, 1)


@rejected("stable-offset-back")
def lower_by_a_later_leader(s: Scribe) -> None:
    stable(s, 9, 1)
    stable(s, 12, 3)
    stable(s, 8, 2)


@accepted("hanging-transaction")
def all_have_ended(s: Scribe) -> None:
    s.ok(s.invoke(6, "settle", partitions=[A, B]))


@rejected("hanging-transaction")
def one_holds_back_a_last_stable_offset(s: Scribe) -> None:
    s.ok(s.invoke(6, "settle", partitions=[A, B]), partitions=[B], offsets={B: 7})


@rejected("hanging-transaction")
def one_is_still_listed(s: Scribe) -> None:
    s.ok(s.invoke(6, "settle", partitions=[A, B]), error="id PrepareCommit")


@accepted("uncommitted-skip")
def all_records_are_read(s: Scribe) -> None:
    commit(s, begin(s, x_0=[10]))
    abort(s, begin(s, 1, x_0=[11]))
    read(s, A, {0: 10}, 4)
    read_all(s, {0: 10, 2: 11}, 3)


@rejected("uncommitted-skip")
def one_that_is_committed_is_passed_over(s: Scribe) -> None:
    commit(s, begin(s, x_0=[10]))
    commit(s, begin(s, 1, x_0=[11]))
    read(s, A, {0: 10, 2: 11}, 4)
    read_all(s, {2: 11}, 3)


@rejected("stable-divergence")
def two_records_at_one_offset(s: Scribe) -> None:
    commit(s, begin(s, x_0=[10]))
    abort(s, begin(s, 1, x_0=[11]))
    read(s, A, {0: 10}, 2)
    read_all(s, {0: 11}, 1)


@rejected("transaction-phantom")
def one_that_nobody_wrote_is_among_all(s: Scribe) -> None:
    read_all(s, {0: 10}, 1)
