"""Delay topics under any faults: records for later, some of them called back or replaced.

Every sender writes to a partition of its own, through idempotent producers that give nothing up,
and one in transactions, of which some are aborted. Each record has a key of its own, by which a
later one of the same partition cancels or replaces it, once at most. Now and then all move on to
another delay topic of the same target: time in a topic never falls, so one that was written to
while most clocks were days ahead holds everything back as long. A reader follows what comes;
`look_back` reads all of it once everything was due.

Times in histories are of the monotonic clock, as everywhere; headers and timestamps are of the
clients' wall clock, which nobody moves.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from attrs import define, field

from jepsen_like.history_events import OFFSET_UNKNOWN, Event, Value
from jepsen_like.live.workloads.base import (
    Around,
    Crowd,
    Headers,
    Restarting,
    UnansweredError,
    key_of,
)
from jepsen_like.live.workloads.members import ANSWER_S
from jepsen_like.live.workloads.poll import (
    POLL_RECORDS_MAX,
    POLL_S,
    assign,
    ends_in,
    new_consumer,
    records_of,
)
from jepsen_like.live.workloads.senders import LIBRDKAFKA, Librdkafka, OwnClient, Sender
from jepsen_like.live.workloads.transactors import (
    DoomedError,
    Made,
    OverError,
    Transactor,
)
from jepsen_like.live.workloads.transactors import OwnClient as OwnTransactor
from raftmq_client.blocking import Admin
from raftmq_client.errors import ClientError

TOPIC: Final = "later"
PARTITIONS: Final = 3
MOVE_ON_S: Final = (40.0, 70.0)
PAUSE_S: Final = (0.05, 0.3)
DELAY_S: Final = (0.0, 8.0)
SOON: Final = 0.3
"""So many are due within a second."""
RECORDS_MAX: Final = 6
CALLED_BACK: Final = 0.25
REPLACED: Final = 0.4
"""Of those that are called back."""
ABORTED: Final = 0.3
KNOWN_MAX: Final = 12
SLACK_NS: Final = 1_500_000_000
"""Who counts from the append goes by the agreed clock, which is behind by a heartbeat, or by its
own where that differs by a second at most."""
TRANSACTION_MS: Final = 10_000
BEGIN_ANEW_S: Final = (30.0, 90.0)
LOOK_BACK_S: Final = 90.0
QUIET_S: Final = 25.0
"""Where nothing more comes for so long on a healed cluster, nothing will."""


def now_ns() -> int:
    """What time it is, by the run's clock."""
    return time.monotonic_ns()


@define(eq=False)
class Ledger:
    """What was sent, for whoever waits for it."""

    clock_ahead_ns: int = field(factory=lambda: time.time_ns() - time.monotonic_ns())
    """How far the wall clock is ahead of the run's."""
    values: itertools.count[int] = field(factory=lambda: itertools.count(1))
    wanted: set[int] = field(factory=set)
    """Acknowledged, and not called back."""
    last_due_ns: int = 0
    lock: threading.Lock = field(factory=threading.Lock)

    def acknowledged(self, values: list[int], due_ns: list[int]) -> None:
        """These have to come."""
        with self.lock:
            self.wanted.update(values)
            self.last_due_ns = max(self.last_due_ns, *due_ns, 0)

    def called_back(self, values: list[int]) -> None:
        """These need not."""
        with self.lock:
            self.wanted.difference_update(values)

    def wall_ms(self, at_ns: int) -> int:
        """A time of the run as headers have it, never earlier."""
        return -(-(at_ns + self.clock_ahead_ns) // 1_000_000)

    def run_ns(self, wall_ms: int) -> int:
        """A timestamp by the run's clock."""
        return wall_ms * 1_000_000 - self.clock_ahead_ns


@define(eq=False)
class Asked:
    """One operation: records for one partition, all with times of one kind."""

    values: list[int] = field(factory=list)
    due_ns: list[int] = field(factory=list)
    cancels: list[int] = field(factory=list)
    rows: list[tuple[bytes, bytes, Headers]] = field(factory=list)
    """Key, value and headers of each record, those that only cancel among them."""
    originals: list[int] = field(factory=list)
    """Values of records under a key of their own."""
    is_after: bool = False

    def invoke(self, around: Around, process: int, key: str) -> Event:
        """It begins."""
        cancels: list[Value] = [*self.cancels]
        return around.recorder.invoke(
            process,
            "delay",
            records={key: [(OFFSET_UNKNOWN, value) for value in self.values]},
            due=self.due_ns,
            slack=SLACK_NS if self.is_after else 0,
            cancels=cancels,
        )


def ask(
    ledger: Ledger, rng: random.Random, known: list[int], size: int, *, may_recall: bool = True
) -> Asked:
    """Draw an operation; what it calls back is taken out of `known`."""
    asked = Asked(is_after=rng.random() < 0.5)
    padding = b"." * size
    began_ns = now_ns()
    for _ in range(rng.randint(1, RECORDS_MAX)):
        old = None
        if may_recall and known and rng.random() < CALLED_BACK:
            old = known.pop(rng.randrange(len(known)))
            asked.cancels.append(old)
            if rng.random() >= REPLACED:
                asked.rows.append((b"%d" % old, b"", [("deliver-at", b"never")]))
                continue
        value = next(ledger.values)
        delay_s = rng.uniform(*DELAY_S) if rng.random() >= SOON else rng.random()
        delay_ms = int(delay_s * 1e3)
        due_ns = began_ns + delay_ms * 1_000_000
        headers: list[tuple[str, bytes | None]] = [("deliver-after", b"%d" % delay_ms)]
        if not asked.is_after:
            headers = [("deliver-at", b"%d" % ledger.wall_ms(due_ns))]
        if old is None:
            asked.originals.append(value)
        else:
            headers.append(("deliver-mode", b"replace"))
        asked.values.append(value)
        asked.due_ns.append(due_ns)
        key = value if old is None else old
        asked.rows.append((b"%d" % key, (b"%d " % value + padding)[:size], headers))
    return asked


@define(eq=False)
class Outcome:
    """What became of the records of an operation."""

    missing: int
    errors: set[str] = field(factory=set)
    done: threading.Event = field(factory=threading.Event)

    def settle(self, _offset: int, error: str) -> None:
        """Note the outcome of one record."""
        if error:
            self.errors.add(error)
        self.missing -= 1
        if not self.missing:
            self.done.set()


class Senders(Crowd):
    """One for each partition; the last one's records are sent in transactions."""

    def __init__(self, around: Around, ledger: Ledger) -> None:
        super().__init__(around, "delayer", PARTITIONS)
        self._ledger = ledger
        self._topic = ""
        self._number = itertools.count()
        self._kinds: tuple[Callable[[], Sender], ...] = (
            partial(Librdkafka, around, len(LIBRDKAFKA) - 1),
            partial(OwnClient, around, len(LIBRDKAFKA) + 1),
        )

    def make_topic(self) -> bool:
        """Make the next delay topic, and have all write to it; False where nobody says that it is
        there: then they stay where they are."""
        plan = self._around.plan
        name = f"{TOPIC}{next(self._number)}"
        (target,) = plan.due
        with Admin(plan.bootstrap, timeout_ms=ANSWER_S * 1e3) as admin:
            try:
                configs = {"raftmq.delivers.to": target}
                admin.create_topic(name, PARTITIONS, plan.replicas, configs)
            except ClientError:
                return False
        self._topic = name
        return True

    def _run(self, number: int) -> None:
        around = self._around
        rng = random.Random(around.plan.seed * 33 + number)
        if number == PARTITIONS - 1:
            self._transact(number, rng)
            return
        sender = self._kinds[number]()
        try:
            self._send(number, rng, sender)
        finally:
            sender.close()

    def _send(self, number: int, rng: random.Random, sender: Sender) -> None:
        around = self._around
        process, topic = around.process(), self._topic
        known: list[int] = []
        move_on = time.monotonic() + rng.uniform(*MOVE_ON_S)
        while not around.stop.wait(rng.uniform(*PAUSE_S)):
            if number == 0 and time.monotonic() > move_on:
                self.make_topic()
                move_on = time.monotonic() + rng.uniform(*MOVE_ON_S)
            if topic != self._topic:
                topic = self._topic
                known.clear()
            asked = ask(self._ledger, rng, known, around.plan.size)
            self._ledger.called_back(asked.cancels)
            invoked = asked.invoke(around, process, key_of(topic, number))
            outcome = Outcome(len(asked.rows))
            for key, data, headers in asked.rows:
                sender.send(topic, number, data, outcome.settle, headers, key)
            if not self._settled(invoked, outcome):
                return
            if outcome.errors:
                error = "; ".join(sorted(outcome.errors))
                around.refused.add(f"{key_of(topic, number)}: {error}")
                around.recorder.info(invoked, error=error)
                continue
            around.recorder.ok(invoked)
            around.acked_records += len(asked.values)
            self._ledger.acknowledged(asked.values, asked.due_ns)
            known += asked.originals
            del known[:-KNOWN_MAX]

    def _settled(self, invoked: Event, outcome: Outcome) -> bool:
        """Wait for what became of an operation; False where that is given up."""
        while not outcome.done.wait(1.0):
            if self._around.is_over.is_set():
                self._around.recorder.info(invoked, error="no answer to the end")
                return False
        return True

    # ---- in transactions ----

    def _transact(self, number: int, rng: random.Random) -> None:
        around = self._around
        transactor: Transactor | None = None
        process = around.process()
        while not around.stop.wait(rng.uniform(*PAUSE_S)):
            if transactor is None:
                made = Made(around, "delayer", TRANSACTION_MS, number)
                transactor, process = OwnTransactor(made), around.process()
            try:
                transactor.begin()
            except (DoomedError, OverError, UnansweredError):
                transactor.close()
                transactor = None
                continue
            if not self._one(transactor, process, key_of(self._topic, number), rng):
                transactor.close()
                transactor = None
        if transactor is not None:
            transactor.close()

    def _one(self, transactor: Transactor, process: int, key: str, rng: random.Random) -> bool:
        """One transaction; False when its producer is over."""
        around = self._around
        asked = ask(self._ledger, rng, [], around.plan.size, may_recall=False)
        invoked = asked.invoke(around, process, key)
        is_commit, is_asked = rng.random() >= ABORTED, False
        try:
            try:
                for _, data, headers in asked.rows:
                    transactor.send(key, data, _nothing, headers)
                is_asked = is_commit
                transactor.end(is_commit=is_commit)
            except DoomedError:
                is_commit = is_asked = False
                transactor.end(is_commit=False)
        except (DoomedError, OverError, UnansweredError) as error:
            is_certain = isinstance(error, DoomedError) or getattr(error, "is_certain", False)
            if is_asked and not is_certain:
                around.recorder.info(invoked, error=str(error))
            else:
                around.recorder.fail(invoked, error=str(error))
            return False
        if is_commit:
            around.recorder.ok(invoked)
            around.acked_records += len(asked.values)
            self._ledger.acknowledged(asked.values, asked.due_ns)
        else:
            around.recorder.fail(invoked)
        return True


def _nothing(_offset: int, _error: str) -> None:
    """What became of a record is told by the end of its transaction."""


class DueReader(Restarting):
    """A reader of the target, from its beginning on, that begins anew now and then."""

    def __init__(self, around: Around, ledger: Ledger) -> None:
        super().__init__(around, "due-reader", 1, 22, BEGIN_ANEW_S)
        self._ledger = ledger

    def _live(self, number: int, until: float) -> None:
        del number
        read_due(self._around, self._ledger, lambda _seen, _ended: not self._goes_on(until))


def read_due(around: Around, ledger: Ledger, is_enough: Callable[[set[int], bool], bool]) -> None:
    """Read the target from its start until that is enough of what was seen; also told is whether
    every partition was read to its end."""
    (target,), (partitions,) = around.plan.due, around.plan.due.values()
    process = around.process()
    consumer = new_consumer(
        around.plan.bootstrap,
        "due",
        **{"enable.partition.eof": True, "fetch.wait.max.ms": 50},
    )
    ended: set[str] = set()
    seen: set[int] = set()
    try:
        assign(consumer, {key_of(target, number): 0 for number in range(partitions)})
        while not is_enough(seen, len(ended) == partitions):
            invoked = around.recorder.invoke(process, "poll_due")
            messages = consumer.consume(POLL_RECORDS_MAX, POLL_S)
            found, errors = records_of(messages)
            stamps: dict[str, list[int]] = {}
            for message in messages:
                if message.error() is None:
                    key = key_of(message.topic(), message.partition())
                    stamps.setdefault(key, []).append(ledger.run_ns(message.timestamp()[1]))
            ended.update(ends_in(messages))
            seen.update(int(value) for rows in found.values() for _, value in rows)
            around.polled_records += sum(map(len, found.values()))
            error = "; ".join(sorted(errors))
            around.recorder.ok(invoked, records=found, stamps=stamps, error=error)
    finally:
        consumer.close()


class Delays:
    """Senders, and a reader of what comes."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._ledger = Ledger()
        self._senders = Senders(around, self._ledger)
        self._reader = DueReader(around, self._ledger)

    def start(self) -> None:
        """Make the first delay topic, before anything breaks, and begin."""
        if not self._senders.make_topic():
            raise RuntimeError("no delay topic could be made on a healthy cluster")
        self._senders.start()
        self._reader.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until it is known what became of all that was sent."""
        return self._senders.join(timeout_s) and self._reader.join(timeout_s)

    def look_back(self) -> bool:
        """Wait until all that was acknowledged has come, or nothing comes any more; False where
        the target could not be read to its end."""
        ledger, has_ended = self._ledger, False
        deadline = time.monotonic() + LOOK_BACK_S
        count, changed = 0, time.monotonic()

        def is_enough(seen: set[int], ended: bool) -> bool:
            nonlocal has_ended, count, changed
            has_ended = ended
            if len(seen) != count:
                count, changed = len(seen), time.monotonic()
            now = time.monotonic()
            is_quiet = now > max(changed, ledger.last_due_ns / 1e9) + QUIET_S
            return now > deadline or (ended and (is_quiet or ledger.wanted <= seen))

        read_due(self._around, ledger, is_enough)
        return has_ended
