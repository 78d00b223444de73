"""Transactions: all of it or nothing, in every partition and in the offsets of its group.

In one pass; what was `fail` in the end is known to be aborted, what was `info` may be either.

- aborted-read (G1a): a record of an aborted transaction was read as committed.
- early-read (G1b): a record was read before anybody had asked for its commit.
- intermediate-read (G1b): a reader passed over some records of a transaction in a partition, and
  was given others of them.
- torn-transaction: at the end one partition has it and another has not.
- lost-transaction: it was committed, and no reader was given it.
- transaction-twice: a record of a transaction stands at two offsets.
- transaction-phantom: a record that no transaction was to write, read by whomever.
- aborted-offset, early-offset: a group was told an offset of an aborted or undecided transaction.
- lost-transactional-offset: it was told one that a committed transaction had replaced, or none.

What is plain, a batch or a commit of offsets outside of all transactions, is told as a transaction
by protocol 0, whose commit is asked for as it begins. A group may be deleted: it has none of the
offsets that were on their way to it. Transactions of one transactional id follow each other: by
their producer's epoch, and within it as they began. Readers read everything to its end; where
`must_see_all` is False, only a record that a reader has passed is missed.

KAFKA-17754: by protocol 1, where nothing in a request says which transaction it ends, an EndTxn
whose answer was lost may end the next transaction of the same epoch. That is excused where the
history has such a request: unanswered, of an earlier transaction under the same credentials, that
asks for what came of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import define, field

from jepsen_like.checkers.checker import Checker
from jepsen_like.checkers.verdict import Findings, Verdict
from jepsen_like.history_events import OFFSET_UNKNOWN, Event, Value

COMMITTED, ABORTED, UNKNOWN = "ok", "fail", "info"
PLAIN = 0


@define(eq=False)
class Transaction:
    """One transaction."""

    op: int
    transactional_id: str
    order: tuple[int, int, int]
    protocol: int
    records: dict[str, list[Value]]
    offsets: dict[str, int]
    began_at: int
    outcome: str = UNKNOWN
    ended_at: int = -1
    asked_at: int = -1
    """When its commit was first asked for; -1: never."""
    placed: dict[Value, int] = field(factory=dict)
    """Offsets that its producer was told."""
    delayed: list[bool] = field(factory=list)
    """What EndTxns of it that got no answer asked for: True is a commit."""


@define(eq=False)
class Deletion:
    """A group was deleted, or may have been."""

    began_at: int
    outcome: str = UNKNOWN
    ended_at: int = -1


@define(eq=False)
class OffsetRead:
    """What a group was told, to be judged at the end."""

    transactional_id: str
    name: str
    offset: int
    began_at: int
    op: int


class TransactionChecker(Checker):
    """Judges transactions by what committed reads show."""

    operations: ClassVar = frozenset(
        {
            *("transaction", "end", "poll_committed", "poll_uncommitted"),
            *("stable_offset", "log_start", "delete_group"),
        }
    )

    def __init__(self, *, must_see_all: bool = True) -> None:
        self._must_see_all = must_see_all
        names = (
            "committed-aborted-read",
            "early-read",
            "intermediate-read",
            "torn-transaction",
            "lost-transaction",
            "transaction-twice",
            "transaction-phantom",
            "aborted-offset",
            "early-offset",
            "lost-transactional-offset",
        )
        self._findings = {name: Findings(name) for name in names}
        self._transactions: dict[int, Transaction] = {}
        self._by_value: dict[tuple[str, Value], Transaction] = {}
        self._seen: dict[tuple[str, Value], dict[int, int]] = {}
        """By offset, the first poll that was given it there."""
        self._by_reader: dict[tuple[int, str], set[Value]] = {}
        self._passed: dict[tuple[int, str], int] = {}
        """How far a reader came."""
        self._log_starts: dict[str, int] = {}
        self._begun_at: dict[int, int] = {}
        self._reads: list[OffsetRead] = []
        self._deletions: dict[str, dict[int, Deletion]] = {}
        """By transactional id."""
        self._moment = 0

    def invoked(self, event: Event) -> None:
        """Something begins."""
        self._moment += 1
        if event.f == "transaction":
            self._begin(event)
        elif event.f == "end" and event.is_commit:
            transaction = self._transactions[event.transaction]
            if transaction.asked_at < 0:
                transaction.asked_at = self._moment
        elif event.f == "stable_offset":
            self._begun_at[event.op] = self._moment
        elif event.f == "delete_group":
            deletions = self._deletions.setdefault(event.transactional_id, {})
            deletions[event.op] = Deletion(self._moment)

    def _begin(self, event: Event) -> None:
        producer_id, epoch = event.producer
        transaction = self._transactions[event.op] = Transaction(
            op=event.op,
            transactional_id=event.transactional_id,
            order=(producer_id, epoch, event.op),
            protocol=event.protocol,
            records={name: [value for _, value in rows] for name, rows in event.records.items()},
            offsets=dict(event.offsets),
            began_at=self._moment,
            asked_at=self._moment if event.protocol == PLAIN else -1,
        )
        for name, values in transaction.records.items():
            for value in values:
                self._by_value[name, value] = transaction

    def completed(self, event: Event, invoked: Event) -> None:
        """Something ended."""
        self._moment += 1
        if event.f == "log_start":
            for name, offset in event.offsets.items():
                self._log_starts[name] = max(offset, self._log_starts.get(name, 0))
        elif event.f == "transaction":
            transaction = self._transactions[invoked.op]
            transaction.outcome, transaction.ended_at = event.type, self._moment
            for rows in event.records.values():
                transaction.placed.update({value: at for at, value in rows if at >= 0})
        elif event.f == "end":
            if event.type == "info":
                self._transactions[invoked.transaction].delayed.append(invoked.is_commit)
        elif event.f == "delete_group":
            deletion = self._deletions[invoked.transactional_id][invoked.op]
            deletion.outcome, deletion.ended_at = event.type, self._moment
        elif event.type == "ok" and event.f == "poll_committed":
            within = self._transactions.get(invoked.transaction)
            self._polled(event, goes_through=within is None or not invoked.group)
        elif event.type == "ok" and event.f == "poll_uncommitted":
            self._polled_all(event)
        elif event.f == "stable_offset":
            began_at = self._begun_at.pop(invoked.op)
            if event.type == "ok":
                for name, offset in event.offsets.items():
                    read = OffsetRead(invoked.transactional_id, name, offset, began_at, invoked.op)
                    self._told(read)

    def _polled(self, event: Event, *, goes_through: bool) -> None:
        """`goes_through`: this process reads each partition from its beginning on."""
        for name, rows in event.records.items():
            seen_here = self._by_reader.setdefault((event.process, name), set())
            for offset, value in rows:
                if goes_through:
                    seen_here.add(value)
                self._seen.setdefault((name, value), {}).setdefault(offset, event.op)
                transaction = self._by_value.get((name, value))
                if transaction is None:
                    told = f"{value} at {offset}"
                    self._findings["transaction-phantom"].add(name, told, event.op)
                elif transaction.asked_at < 0:
                    told = f"{value} at {offset} before its commit was asked for"
                    self._find("early-read", transaction, name, told, event.op, is_commit=True)
        for name, end in event.offsets.items() if goes_through else ():
            key = event.process, name
            self._passed[key] = max(end, self._passed.get(key, 0))

    def _polled_all(self, event: Event) -> None:
        """Readers of all records are given what is aborted, too, and of what is none nothing."""
        for name, rows in event.records.items():
            for offset, value in rows:
                if (name, value) not in self._by_value:
                    told = f"{value} at {offset}"
                    self._findings["transaction-phantom"].add(name, told, event.op)

    def _find(
        self, which: str, about: Transaction, where: str, told: str, op: int, *, is_commit: bool
    ) -> None:
        """An anomaly, if it is not what KAFKA-17754 comes to; `is_commit`: what a delayed EndTxn
        must have asked for then."""
        if self._is_delayed_end(about, is_commit=is_commit):
            self._findings[which].excused += 1
        else:
            told = f"{about.transactional_id} {about.order[:2]}: {told}"
            self._findings[which].add(where, told, about.op, op)

    def _is_delayed_end(self, about: Transaction, *, is_commit: bool) -> bool:
        return about.protocol == 1 and any(
            is_commit in earlier.delayed
            for earlier in self._transactions.values()
            if earlier.transactional_id == about.transactional_id
            and earlier.order[:2] == about.order[:2]
            and earlier.op < about.op
        )

    # ---- offsets ----

    def _told(self, read: OffsetRead) -> None:
        """Judge at once what is known now; the rest at the end."""
        self._reads.append(read)
        mine = self._writers(read)
        found = [t for t in mine if t.offsets[read.name] == read.offset]
        where = f"{read.transactional_id} {read.name}"
        if read.offset == OFFSET_UNKNOWN:
            for last in mine:
                if _is_over(last, read.began_at) and not self._may_be_deleted(last, read):
                    told = f"no offset, after {last.offsets[read.name]} was committed"
                    self._find(
                        "lost-transactional-offset", last, where, told, read.op, is_commit=False
                    )
                    break
            return
        if not found:
            told = f"offset {read.offset} of no transaction"
            self._findings["transaction-phantom"].add(where, told, read.op)
            return
        (writer,) = found
        if writer.asked_at < 0:
            told = f"offset {read.offset} before its commit was asked for"
            self._find("early-offset", writer, where, told, read.op, is_commit=True)
            return
        for last in mine:
            if _is_over(last, read.began_at) and _follows(last, writer):
                told = f"offset {read.offset}, after {last.offsets[read.name]} was committed"
                self._find("lost-transactional-offset", last, where, told, read.op, is_commit=False)
                return
        for deletion in self._deletions.get(read.transactional_id, {}).values():
            if _is_over(deletion, read.began_at) and _is_over(writer, deletion.began_at):
                told = f"offset {read.offset}, after the group was deleted"
                self._find(
                    "lost-transactional-offset", writer, where, told, read.op, is_commit=False
                )
                return

    def _may_be_deleted(self, writer: Transaction, read: OffsetRead) -> bool:
        """The group may have been deleted after what it wrote, or while that was pending."""
        return any(
            deletion.outcome != ABORTED
            and not (deletion.outcome == COMMITTED and deletion.ended_at < writer.began_at)
            for deletion in self._deletions.get(read.transactional_id, {}).values()
        )

    def _writers(self, read: OffsetRead) -> list[Transaction]:
        return [
            t
            for t in self._transactions.values()
            if t.transactional_id == read.transactional_id and read.name in t.offsets
        ]

    # ---- the end ----

    def finish(self) -> Sequence[Verdict]:
        """What was found."""
        for read in self._reads:
            for writer in self._writers(read):
                if writer.outcome == ABORTED and writer.offsets[read.name] == read.offset:
                    told = f"offset {read.offset} was aborted"
                    where = f"{read.transactional_id} {read.name}"
                    self._find("aborted-offset", writer, where, told, read.op, is_commit=True)
        for transaction in self._transactions.values():
            self._judge(transaction)
        for (name, value), places in self._seen.items():
            if len(places) > 1 and (name, value) in self._by_value:
                told = f"{value} at {sorted(places)}"
                about, ops = self._by_value[name, value], sorted(places.values())
                self._findings["transaction-twice"].add(name, told, about.op, *ops[:2])
        return [findings.verdict() for findings in self._findings.values()]

    def _judge(self, about: Transaction) -> None:
        given: list[tuple[str, Value]] = []
        missing: list[tuple[str, Value]] = []
        for name, values in about.records.items():
            for value in values:
                if (name, value) in self._seen:
                    given.append((name, value))
                elif not self._may_be_gone(about, name, value) and self._is_missed(
                    about, name, value
                ):
                    missing.append((name, value))
            self._judge_readers(about, name)
        op = next((next(iter(self._seen[at].values())) for at in given), -1)
        if about.outcome == ABORTED and given:
            name, value = given[0]
            told = f"{value} is of an aborted transaction, {len(given)} records were read"
            self._find("committed-aborted-read", about, name, told, op, is_commit=True)
        elif given and missing:
            told = f"{given[0]} was read, {missing[0]} never"
            self._find("torn-transaction", about, missing[0][0], told, op, is_commit=True)
        elif about.outcome == COMMITTED and missing:
            told = f"{missing[0][1]} and {len(missing) - 1} more were never read"
            self._find("lost-transaction", about, missing[0][0], told, op, is_commit=False)

    def _may_be_gone(self, about: Transaction, name: str, value: Value) -> bool:
        """Retention may have taken it before anybody read it."""
        log_start = self._log_starts.get(name, 0)
        return about.placed.get(value, 0) < log_start

    def _is_missed(self, about: Transaction, name: str, value: Value) -> bool:
        """Who reads it was to come to it: all do in the end, or somebody has passed its place."""
        place = about.placed.get(value, -1)
        return self._must_see_all or any(
            0 <= place < end for (_, where), end in self._passed.items() if where == name
        )

    def _judge_readers(self, about: Transaction, name: str) -> None:
        """Whoever was given one record of it in a partition, and came behind all, has all."""
        values = about.records[name]
        places = [min(self._seen[name, v]) for v in values if (name, v) in self._seen]
        if not places or len(places) < len(values):
            return
        for (process, where), given in self._by_reader.items():
            if where != name or self._passed.get((process, name), 0) <= max(places):
                continue
            lacking = [v for v in values if v not in given]
            if 0 < len(lacking) < len(values) and self._log_starts.get(name, 0) <= min(places):
                told = f"process {process} was not given {lacking[0]}, but others of it"
                self._find("intermediate-read", about, name, told, -1, is_commit=True)


def _is_over(what: Transaction | Deletion, moment: int) -> bool:
    """True when it was certainly done before."""
    return what.outcome == COMMITTED and 0 <= what.ended_at < moment


def _follows(last: Transaction, writer: Transaction) -> bool:
    """True when what `last` committed certainly came after what `writer` did."""
    if PLAIN in (last.protocol, writer.protocol):
        return 0 <= writer.ended_at < last.began_at and writer.outcome != UNKNOWN
    return writer.order < last.order
