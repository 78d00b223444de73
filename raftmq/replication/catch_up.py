"""A leader's log as its core reads it: entries for followers, from memory or from the disk.

`LogSource` gives the core entries that are in memory, and the state that a core begins with; with
`replica.py` it is the only place where leader epochs become terms. For replicas that are far behind
its `StoredReader` prepares chunks of the log, one ahead of those that leave: a job in a worker
finds, checks and sums them, and so brings them into memory. When they may leave is the node's
decision, over all its groups: `CatchUpRate` holds back what goes to replicas that are behind, from
memory or disk, beyond so many bytes per second, and a full stream does. Where the commit waits for
the replica, the rate does not hold: then nobody is protected by it. Nor does it hold for the
metadata group, whose log is small and without which a node can do nothing.

Invariants: never reads cold bytes on the loop; what was prepared is forgotten with the leadership
in which it was read; a chunk is kept as positions only, its bytes lie in the page cache.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

from attrs import define, field

from raftmq.log.model import DamagedError
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.verification import StoredJob
from raftmq.ports import Buggify, Clock, DiskError, Random, Runnable
from raftmq.raft.core import RaftCore
from raftmq.raft.epoch_history import EpochHistory
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import Entry, EntryKind, HardState, StoredChunk
from raftmq.raft.replica_state import RaftConfig
from raftmq.types import (
    METADATA_GROUP,
    Buffer,
    NodeId,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
    Term,
)

PREPARED_MAX: Final = 16
"""Chunks that one leader keeps; followers that pass through the same place share them."""
BATCH_CHARGE_BYTES: Final = 8 << 10
"""A smaller batch costs its follower as much time as this many bytes do."""
BATCH_MS_MAX: Final = 0.65
"""But no more than this, or a low limit would let hardly any small ones pass."""
BURST_MS: Final = 50.0
GROWN_BYTES_MAX: Final = 16 << 20
"""What is written meanwhile and comes on top is remembered up to here."""

SAMPLE_MS: Final = 1_000.0
SAMPLES: Final = 10
"""The speed that operators are shown is the mean over so many seconds."""

Wake: TypeAlias = Callable[[], None]
"""Has a replica look again at what it may send; the same object for the same replica."""


class CatchUp(Protocol):
    """The node's workers and limits for what replicas that are behind are sent."""

    @property
    def rate(self) -> CatchUpRate:
        """The node's limit."""
        ...

    def run(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        """Run `job.run()` in a worker, then call `done` on the loop."""
        ...

    def run_long(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        """As `run`, for a job that may take seconds, which no short one waits behind."""
        ...

    def has_room(self, to: NodeId, size_bytes: int) -> bool:
        """True when the stream of stored chunks to a node would take this one now."""
        ...


class CatchUpRate:
    """A limit in bytes per second, over all replicas that this node serves; 0 is no limit.

    One bucket on the monotonic clock. Those that are refused stand in a queue and are woken in
    their order, each when its turn has come and no earlier: a thousand replicas that are held back
    cost nothing until then. What is written to a log while a replica of it catches up comes on top
    of the limit, so that a limit below the rate of writes delays a catch-up and never prevents it.

    Attributes:
        bytes_total: of all that left for replicas that were behind, held back or not.
        holds_total: how often one had to wait for the limit.
    """

    def __init__(self, clock: Clock, bytes_per_s: int) -> None:
        self.bytes_total = 0
        self.holds_total = 0
        self._bytes_per_s = max(0, bytes_per_s)
        self._clock = clock
        self._free_at_ms = 0.0  # when the bytes that left are paid for
        self._grown_ms = 0.0  # of what was written to logs whose replicas catch up, and not sent
        self._waiting: dict[Wake, float] = {}  # with what each would be charged; the first is next
        self._soon: dict[Wake, None] = {}  # that look again at the next tick, whatever the limit
        self._turn: Wake | None = None
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES + 1)

    @property
    def speed(self) -> int:
        """Bytes per second that left of late."""
        if len(self._samples) < 2:
            return 0
        (from_ms, from_bytes), (to_ms, to_bytes) = self._samples[0], self._samples[-1]
        return round((to_bytes - from_bytes) * 1e3 / (to_ms - from_ms))

    @property
    def bytes_per_s(self) -> int:
        """The limit in force."""
        return self._bytes_per_s

    @property
    def waiting_count(self) -> int:
        """How many replicas are held back now."""
        return len(self._waiting)

    def set_limit(self, bytes_per_s: int) -> None:
        """Change the limit, at once: what is owed is paid for at the new rate."""
        now_ms, bytes_per_s = self._clock.monotonic_ms(), max(0, bytes_per_s)
        if bytes_per_s == self._bytes_per_s:
            return
        owed_ms = max(0.0, self._free_at_ms - now_ms) if bytes_per_s else 0.0
        self._free_at_ms = now_ms + owed_ms * self._bytes_per_s / max(1, bytes_per_s)
        self._bytes_per_s = bytes_per_s
        self._grown_ms = 0.0

    def admit(self, size_bytes: int, batches: int, wake: Wake, *, is_needed: bool) -> bool:
        """Charge what is to leave; False when it has to wait: `wake` is called when it need not."""
        if self._bytes_per_s:
            charge_ms, now_ms = self._cost_ms(size_bytes, batches), self._clock.monotonic_ms()
            if not is_needed:
                is_next = not self._waiting or wake == self._turn
                if not is_next or not self._is_free(charge_ms, now_ms):
                    if wake not in self._waiting:
                        self._waiting[wake] = charge_ms
                        self.holds_total += 1
                    return False
            grown_ms = min(charge_ms, self._grown_ms)
            self._grown_ms -= grown_ms
            paid_ms = max(self._free_at_ms, now_ms - BURST_MS)
            self._free_at_ms = paid_ms + charge_ms - grown_ms
        self.bytes_total += size_bytes
        return True

    def grown(self, size_bytes: int, batches: int) -> None:
        """So much was written to a log that a replica is behind in: it has to be sent as well."""
        if self._bytes_per_s:
            grown_ms = self._grown_ms + self._cost_ms(size_bytes, batches)
            self._grown_ms = min(grown_ms, GROWN_BYTES_MAX * 1e3 / self._bytes_per_s)

    def is_waiting(self, wake: Wake) -> bool:
        """True for one that is held back and whose turn has not come."""
        return wake in self._waiting

    def look_again(self, wake: Wake) -> None:
        """Call `wake` at the next tick: it waits for something that says nothing when it comes."""
        self._soon[wake] = None

    def tick(self) -> None:
        """Wake those whose time has come; outside of any round of drains."""
        now_ms = self._clock.monotonic_ms()
        if not self._samples or now_ms - self._samples[-1][0] >= SAMPLE_MS:
            self._samples.append((now_ms, self.bytes_total))
        soon, self._soon = self._soon, {}
        for wake in soon:
            wake()
        for _ in range(len(self._waiting)):
            wake, charge_ms = next(iter(self._waiting.items()))
            if not self._is_free(charge_ms, self._clock.monotonic_ms()):
                break
            del self._waiting[wake]
            self._turn = wake
            wake()
        self._turn = None

    def _is_free(self, charge_ms: float, now_ms: float) -> bool:
        is_paid = not self._bytes_per_s or self._free_at_ms <= now_ms
        return is_paid or self._grown_ms >= charge_ms

    def _cost_ms(self, size_bytes: int, batches: int) -> float:
        byte_ms = 1e3 / self._bytes_per_s
        batch_ms = min(BATCH_CHARGE_BYTES * byte_ms, BATCH_MS_MAX)
        return max(size_bytes * byte_ms, batches * batch_ms)


@define(slots=True, eq=False)
class StoredReader:
    """One log's chunks for the replicas that are far behind."""

    _log: ReplicatedLog
    _port: CatchUp
    _on_prepared: Wake
    _on_damaged: Callable[[], None]
    _on_failed: Callable[[DiskError], None]
    _prepared: OrderedDict[RaftIndex, StoredChunk] = field(init=False, factory=OrderedDict)
    _pending: dict[RaftIndex, StoredJob] = field(init=False, factory=dict)

    def forget(self) -> None:
        """Forget all chunks: with another leadership, or none, their bytes may have been cut."""
        self._prepared.clear()
        self._pending.clear()

    def take(self, start: RaftIndex, bytes_max: int) -> StoredChunk | None:
        """The chunk at `start`, if it is prepared; otherwise it is being prepared."""
        if start not in self._prepared and start not in self._pending:
            self._prepare(start, bytes_max)
        return self._prepared.get(start)

    def left(self, end: RaftIndex, bytes_max: int) -> None:
        """A chunk left that ends at `end`: prepare the next one."""
        if not self._log.is_at_hand(end):
            self.take(end, bytes_max)

    def _prepare(self, start: RaftIndex, bytes_max: int) -> None:
        bare = self._log.bare_run(start)
        if bare:
            entries = tuple(
                Entry(e.start, e.end, Term(e.leader_epoch), EntryKind(e.kind), e.payload)
                for e in bare
            )
            self._keep(StoredChunk(entries, sum(len(entry.payload) for entry in entries)))
            return
        try:
            job = self._log.stored_job(start, bytes_max)
        except DamagedError:
            self._on_damaged()
            return
        except DiskError as error:
            self._on_failed(error)
            return
        if job is None:
            return
        self._pending[start] = job
        self._port.run(job, lambda error: self._done(start, job, error))

    def _done(self, start: RaftIndex, job: StoredJob, error: DiskError | None) -> None:
        if self._pending.get(start) is not job:
            return  # asked for in an earlier leadership
        del self._pending[start]
        if error is not None:
            self._on_failed(error)
            return
        try:
            found = self._log.checked(job)
        except DiskError as failure:
            self._on_failed(failure)
            return
        if found:
            self._on_damaged()
        if not job.batches:
            return
        shift = start - job.batches[0][0]
        entries = tuple(
            Entry(
                RaftIndex(base + shift), RaftIndex(end + shift), Term(epoch), EntryKind.BATCH, b""
            )
            for base, end, epoch, _ in job.batches
        )
        span = job.span
        sizes = tuple(size for *_, size in job.batches)
        self._keep(StoredChunk(entries, span.size, span, sizes, job.checksum))
        self._on_prepared()

    def _keep(self, chunk: StoredChunk) -> None:
        self._prepared[chunk.entries[0].start] = chunk
        while len(self._prepared) > PREPARED_MAX:
            self._prepared.popitem(last=False)


class LogSource:
    """The core's `EntrySource` over one log."""

    __slots__ = (
        "_is_exempt",
        "_log",
        "_on_damaged",
        "_on_failed",
        "_port",
        "_stored",
        "_wake",
        "forget_stored",
    )

    def __init__(
        self,
        group: RaftGroupId,
        log: ReplicatedLog,
        on_damaged: Callable[[], None],
        on_failed: Callable[[DiskError], None],
        wake: Wake,
        catch_up: CatchUp,
    ) -> None:
        self._log = log
        self._on_damaged = on_damaged
        self._on_failed = on_failed
        self._port = catch_up
        self._wake = wake
        self._is_exempt = group == METADATA_GROUP
        self._stored = StoredReader(log, catch_up, wake, on_damaged, on_failed)
        self.forget_stored = self._stored.forget

    def stored(self, start: RaftIndex, bytes_max: int) -> StoredChunk | None:
        """Entries that are not in memory, for a replica that is far behind; None: not yet."""
        return self._stored.take(start, bytes_max)

    def admit(
        self,
        to: ReplicaId,
        entries: Sequence[Entry],
        size_bytes: int,
        *,
        is_needed: bool,
        next_bytes_max: int,
    ) -> bool:
        """Let entries go to a replica that catches up, or wake the core when they may."""
        rate, is_stored = self._port.rate, next_bytes_max > 0
        if is_stored and not self._port.has_room(to.node_id, size_bytes):
            rate.look_again(self._wake)
            return False
        is_needed = is_needed or self._is_exempt
        if not rate.admit(size_bytes, len(entries), self._wake, is_needed=is_needed):
            return False
        if is_stored:
            self._stored.left(entries[-1].end, next_bytes_max)
        return True

    def is_waiting(self) -> bool:
        """True while this log's turn at the limit has not come."""
        return not self._is_exempt and self._port.rate.is_waiting(self._wake)

    def grown(self, entries: Sequence[Entry]) -> None:
        """Count what was appended while a replica catches up."""
        size_bytes = sum(len(entry.payload) for entry in entries)
        self._port.rate.grown(size_bytes, len(entries))

    def entries(self, start: RaftIndex, bytes_max: int) -> tuple[Entry, ...]:
        """Entries from `start`; () when they are not in memory, or cannot be read now."""
        if not self._log.is_at_hand(start):
            return ()
        try:
            found = self._log.entries(start, bytes_max)
        except DamagedError:
            self._on_damaged()
            return ()
        except DiskError as error:
            self._on_failed(error)
            return ()
        return tuple(
            Entry(e.start, e.end, Term(e.leader_epoch), EntryKind(e.kind), e.payload) for e in found
        )

    def log_start_payload(self) -> Buffer:
        """The encoded log start, for a follower that is behind it."""
        return self._log.log_start.encode()

    def new_core(
        self,
        config: RaftConfig,
        hard_state: HardState,
        commit_end: RaftIndex,
        random: Random,
        buggify: Buggify,
    ) -> RaftCore:
        """A core that continues at the end of the log."""
        log = self._log
        log_start = log.log_start
        epochs = EpochHistory(
            [(Term(epoch), start) for epoch, start in log.epochs()],
            log_start=log_start.index,
            previous_term=Term(log_start.previous_epoch),
            log_end=log.end_index,
        )
        history = [
            (RaftIndex(bare.index), Configuration.decode(bare.payload))
            for bare in log.bare_entries()
            if bare.kind == EntryKind.MEMBERSHIP
        ]
        return RaftCore(
            config,
            hard_state=hard_state,
            epochs=epochs,
            configuration=Configuration.decode(log_start.configuration),
            configuration_history=history,
            flushed_end=log.flushed_end,
            commit_end=min(commit_end, log.flushed_end),
            source=self,
            random=random,
            buggify=buggify,
        )
