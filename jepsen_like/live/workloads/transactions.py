"""Transactions under any faults: producers of both protocols, and all who read what they write.

A producer writes some records to some partitions, mostly commits an offset in a group of its own
with them, and commits, or aborts by wish. Some transactions stand still until they expire, and some
are taken over: another producer of the same transactional id fences theirs, which goes on as a
zombie, its last records and its commit coming late. Values and offsets are numbers, each written
once, and the topic is written by transactions alone. Who reads them is `stable.py`'s.

What is told to the history of a transaction: `ok` once its commit was answered, `fail` where nobody
asked for a commit, or every answer refused it, and `info` else: what is unknown stays unknown.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from functools import partial
from typing import Final

from attrs import define

from jepsen_like.history_events import OFFSET_UNKNOWN, Event, Value
from jepsen_like.live.workloads.base import Around, Crowd, UnansweredError, tagged
from jepsen_like.live.workloads.stable import Askers, TransactionReaders
from jepsen_like.live.workloads.transactors import (
    DoomedError,
    Librdkafka,
    Made,
    OverError,
    OwnClient,
    Transactor,
)

KINDS: Final = (Librdkafka, Librdkafka, Librdkafka, OwnClient, OwnClient)
"""By number of the producer."""
TIMEOUTS_MS: Final = (10_000, 2_500)
LEFT_OPEN_MS: Final = 900_000
"""What the cluster lets a transaction take at most."""
PAUSE_S: Final = (0.02, 0.3)
LATE_S: Final = (0.0, 0.5)
RECORDS_MAX: Final = 5
"""Of one transaction, in one partition."""
ABORTED: Final = 0.25
EXPIRED: Final = 0.02
TAKEN_OVER: Final = 0.04
WITH_OFFSETS: Final = 0.5


def id_of(number: int) -> str:
    """The transactional id of a producer."""
    return f"transactor-{number}"


def group_of(transactional_id: str) -> str:
    """The group in which transactions of that id commit offsets, and nobody else."""
    return f"group-of-{transactional_id}"


GROUPS: Final = {id_of(number): group_of(id_of(number)) for number in range(len(KINDS))}
"""By transactional id."""


@define(eq=False)
class Running:
    """One transaction."""

    transactor: Transactor
    process: int
    operation: Event
    placed: dict[str, list[tuple[int, Value]]]
    """What was told of its records, all of them named from the beginning."""
    offset: int
    is_commit_asked: bool = False
    is_commit_lost: bool = False
    """An EndTxn that asked for the commit got no answer."""

    @property
    def records(self) -> dict[str, list[tuple[int, Value]]]:
        """What it is to write."""
        return self.operation.records


@define(eq=False)
class Identity:
    """A transactional id, and the producer that is its present one."""

    number: int
    rng: random.Random
    timeout_ms: int
    transactor: Transactor | None = None
    process: int = -1


class Producers(Crowd):
    """One transactional id for each thread."""

    def __init__(self, around: Around) -> None:
        super().__init__(around, "transactor", len(KINDS))
        self._values = itertools.count(1)
        self._left_open: list[Transactor] = []

    def _run(self, number: int) -> None:
        around = self._around
        rng = random.Random(around.plan.seed * 44 + number)
        mine = Identity(number, rng, TIMEOUTS_MS[number % len(TIMEOUTS_MS)])
        if number == 0 and around.plan.plant == "left-open":
            self._leave_open()
        try:
            while not around.stop.wait(rng.uniform(*PAUSE_S)):
                self._transact(mine)
        finally:
            self._drop(mine)

    # ---- one transaction ----

    def _transact(self, mine: Identity) -> None:
        rng = mine.rng
        running = self._begin(mine)
        if running is None:
            return
        fate = rng.random()
        is_commit = rng.random() >= ABORTED
        if fate < TAKEN_OVER:
            self._be_taken_over(mine, running)
            return
        is_doomed = not self._write(mine, running, list(running.records))
        if fate < TAKEN_OVER + EXPIRED and not is_doomed:
            self._around.stop.wait(rng.uniform(0.8, 1.6) * mine.timeout_ms / 1e3)
        self._finish(mine, running, is_commit=is_commit and not is_doomed)

    def _begin(self, mine: Identity) -> Running | None:
        """Begin one, by a new producer if there is none; None where that is not answered."""
        around, rng = self._around, mine.rng
        if mine.transactor is None:
            made = Made(around, id_of(mine.number), mine.timeout_ms, mine.number)
            mine.transactor = KINDS[mine.number](made)
            mine.process = around.process()
        transactor = mine.transactor
        try:
            producer = transactor.begin()
        except (DoomedError, OverError, UnansweredError):
            self._drop(mine)
            return None
        keys = around.plan.transactional_keys
        chosen = sorted(rng.sample(keys, rng.randint(1, len(keys))))
        records: dict[str, list[tuple[int, Value]]] = {
            key: [(OFFSET_UNKNOWN, next(self._values)) for _ in range(rng.randint(1, RECORDS_MAX))]
            for key in chosen
        }
        offset = next(self._values) if rng.random() < WITH_OFFSETS else OFFSET_UNKNOWN
        operation = around.recorder.invoke(
            mine.process,
            "transaction",
            transactional_id=id_of(mine.number),
            producer=list(producer),
            protocol=transactor.protocol,
            records=records,
            offsets={} if offset == OFFSET_UNKNOWN else {keys[0]: offset},
        )
        placed: dict[str, list[tuple[int, Value]]] = {key: [] for key in records}
        return Running(transactor, mine.process, operation, placed, offset)

    def _write(self, mine: Identity, running: Running, keys: list[str]) -> bool:
        """Write the records of these partitions, and the offset; False when it is doomed."""
        around, transactor = self._around, running.transactor
        padding = b"." * around.plan.size
        try:
            for key in keys:
                for _, value in running.records[key]:
                    data = (b"%d " % int(value) + padding)[: around.plan.size]
                    told = partial(_note, running.placed[key], value)
                    transactor.send(key, data, told, tagged(int(value)))
            if running.offset != OFFSET_UNKNOWN:
                group = group_of(id_of(mine.number))
                transactor.commit_offset(group, around.plan.transactional_keys[0], running.offset)
        except (DoomedError, OverError, UnansweredError):
            return False
        return True

    def _be_taken_over(self, mine: Identity, running: Running) -> None:
        """Another producer of the id comes and goes on, while this one does not know of it; then
        what is left of its transaction comes, too late."""
        keys = list(running.records)
        few = mine.rng.choice((len(keys), mine.rng.randint(0, len(keys))))
        is_doomed = not self._write(mine, running, keys[:few])
        mine.transactor = None
        is_stopped = self._around.stop.wait(mine.rng.uniform(*LATE_S))
        if not is_stopped:
            self._transact_plainly(mine)
            is_stopped = self._around.stop.is_set()
        # What is under way has a time to end in that would not do for two calls that hang.
        is_doomed = is_doomed or is_stopped or not self._write(mine, running, keys[few:])
        zombie = Identity(mine.number, mine.rng, mine.timeout_ms, running.transactor)
        self._finish(zombie, running, is_commit=not is_doomed)
        self._drop(zombie)

    def _transact_plainly(self, mine: Identity) -> None:
        running = self._begin(mine)
        if running is not None:
            is_written = self._write(mine, running, list(running.records))
            self._finish(mine, running, is_commit=is_written)

    # ---- its end ----

    def _finish(self, mine: Identity, running: Running, *, is_commit: bool) -> None:
        """End it, and tell what is known of that."""
        around, recorder = self._around, self._around.recorder
        is_committed = False
        if running.transactor.is_hung:
            self._drop(mine)  # it would refuse to end anything as long as it hangs
        else:
            is_committed = self._commit_or_abort(mine, running, is_commit=is_commit)
        records = {key: list(rows) for key, rows in running.placed.items()}
        if is_committed:
            around.acked_records += sum(map(len, running.records.values()))
            recorder.ok(running.operation, records=records)
        elif running.is_commit_lost:
            recorder.info(running.operation, records=records)
        else:
            recorder.fail(running.operation, records=records)

    def _commit_or_abort(self, mine: Identity, running: Running, *, is_commit: bool) -> bool:
        """Ask for its end; True when it was committed."""
        try:
            if is_commit:
                with contextlib.suppress(DoomedError):
                    self._end(running, is_commit=True)
                    return True
            self._end(running, is_commit=False)
        except (DoomedError, OverError, UnansweredError):
            self._drop(mine)
        return False

    def _end(self, running: Running, *, is_commit: bool) -> None:
        recorder, transactor = self._around.recorder, running.transactor
        asked = partial(
            recorder.invoke,
            running.process,
            "end",
            transactional_id=running.operation.transactional_id,
            transaction=running.operation.op,
            is_commit=is_commit,
        )
        invoked = asked()
        try:
            transactor.end(is_commit=is_commit)
        except (DoomedError, OverError) as error:
            running.is_commit_lost |= is_commit and not getattr(error, "is_certain", True)
            recorder.fail(invoked, error=str(error))
            raise
        except UnansweredError as error:
            running.is_commit_lost |= is_commit
            recorder.info(invoked, error=str(error))
            raise
        else:
            recorder.ok(invoked)
        finally:
            for _ in range(transactor.lost_ends()):
                running.is_commit_lost |= is_commit
                recorder.info(asked(), error="an answer was lost")

    def _drop(self, mine: Identity) -> None:
        if mine.transactor is not None:
            mine.transactor.close()
            mine.transactor = None

    # ---- planted ----

    def _leave_open(self) -> None:
        """A transaction that nobody ends, and that does not expire for long."""
        made = Made(self._around, id_of(len(KINDS)), LEFT_OPEN_MS, len(KINDS))
        left = Identity(len(KINDS), random.Random(1), LEFT_OPEN_MS, Librdkafka(made))
        running = self._begin(left)
        assert running is not None
        assert self._write(left, running, list(running.records))
        assert left.transactor is not None
        self._left_open.append(left.transactor)  # or it would be at an end


def _note(rows: list[tuple[int, Value]], value: Value, offset: int, error: str) -> None:
    if not error:
        rows.append((offset, value))


class Transactions:
    """Producers, readers, and who asks for last stable offsets and offsets of groups."""

    def __init__(self, around: Around) -> None:
        self._producers = Producers(around)
        self._others = (TransactionReaders(around), Askers(around, GROUPS))

    def start(self) -> None:
        """Begin."""
        self._producers.start()
        for crowd in self._others:
            crowd.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of every transaction."""
        return self._producers.join(timeout_s) & all(
            crowd.join(timeout_s) for crowd in self._others
        )
