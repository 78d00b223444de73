"""A leader's log as its core reads it: entries for followers, from memory or from the disk.

`LogSource` gives the core entries that are in memory, and the state that a core begins with; with
`replica.py` it is the only place where leader epochs become terms. For replicas that are far behind
its `StoredReader` prepares chunks of the log, one ahead of those that leave: a job in a worker
finds, checks and sums them, and so brings them into memory. When they may leave is the node's
decision, over all its groups: `CatchUpRate` holds them back beyond so many bytes per second, and a
full stream does. Where the commit waits for the replica, the rate does not hold: then nobody is
protected by it.

Invariants: never reads cold bytes on the loop; what was prepared is forgotten with the leadership
in which it was read; a chunk is kept as positions only, its bytes lie in the page cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

from attrs import define, field

from raftmq.log.model import DamagedError
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.verification import StoredJob
from raftmq.ports import Buggify, Clock, DiskError, Random, Runnable
from raftmq.raft.core import RaftConfig, RaftCore
from raftmq.raft.epochs import EpochHistory
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import Entry, EntryKind, HardState, StoredChunk
from raftmq.types import Buffer, NodeId, RaftIndex, ReplicaId, Term

PREPARED_MAX: Final = 16
"""Chunks that one leader keeps; followers that pass through the same place share them."""
BATCH_CHARGE_BYTES: Final = 8 << 10
"""A smaller batch costs its follower as much time as this many bytes do."""
BURST_MS: Final = 50.0


class CatchUp(Protocol):
    """The node's workers and limits for reads from the disk."""

    def run(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        """Run `job.run()` in a worker, then call `done` on the loop."""
        ...

    def run_long(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        """As `run`, for a job that may take seconds, which no short one waits behind."""
        ...

    def admit(self, to: NodeId, size_bytes: int, batches: int, *, is_needed: bool) -> bool:
        """True when a chunk of this size may leave for a node now, for which it is charged."""
        ...


class CatchUpRate:
    """A limit in bytes per second, over all replicas that this node serves; 0 is no limit.

    Attributes:
        bytes_total: of all chunks that left, also those that the limit did not hold back.
    """

    def __init__(self, clock: Clock, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self.bytes_total = 0
        self._clock = clock
        self._free_at_ms = 0.0  # when the bytes that left are paid for

    def admit(self, size_bytes: int, batches: int, *, is_needed: bool) -> bool:
        """Charge a chunk, unless it has to wait."""
        now_ms = self._clock.monotonic_ms()
        if self.bytes_per_s > 0:
            if not is_needed and self._free_at_ms > now_ms:
                return False
            charge = max(size_bytes, batches * BATCH_CHARGE_BYTES)
            paid_ms = max(self._free_at_ms, now_ms - BURST_MS)
            self._free_at_ms = paid_ms + charge * 1e3 / self.bytes_per_s
        self.bytes_total += size_bytes
        return True


@define(slots=True, eq=False)
class StoredReader:
    """One log's chunks for the replicas that are far behind."""

    _log: ReplicatedLog
    _port: CatchUp
    _on_prepared: Callable[[], None]
    _on_damaged: Callable[[], None]
    _on_failed: Callable[[DiskError], None]
    _prepared: OrderedDict[RaftIndex, StoredChunk] = field(init=False, factory=OrderedDict)
    _pending: dict[RaftIndex, StoredJob] = field(init=False, factory=dict)

    def forget(self) -> None:
        """Forget all chunks: with another leadership, or none, their bytes may have been cut."""
        self._prepared.clear()
        self._pending.clear()

    def take(
        self, start: RaftIndex, bytes_max: int, to: NodeId, *, is_needed: bool
    ) -> StoredChunk | None:
        """The chunk at `start`, if it is prepared and may leave; otherwise it is being prepared."""
        chunk = self._get(start, bytes_max)
        if chunk is None:
            return None
        if not self._port.admit(to, chunk.size_bytes, len(chunk.entries), is_needed=is_needed):
            return None
        end = chunk.entries[-1].end
        if not self._log.is_at_hand(end):
            self._get(end, bytes_max)  # prepare the next one
        return chunk

    def _get(self, start: RaftIndex, bytes_max: int) -> StoredChunk | None:
        if start not in self._prepared and start not in self._pending:
            self._prepare(start, bytes_max)
        return self._prepared.get(start)

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

    __slots__ = ("_log", "_on_damaged", "_on_failed", "_stored", "forget_stored")

    def __init__(
        self,
        log: ReplicatedLog,
        on_damaged: Callable[[], None],
        on_failed: Callable[[DiskError], None],
        on_prepared: Callable[[], None],
        catch_up: CatchUp,
    ) -> None:
        self._log = log
        self._on_damaged = on_damaged
        self._on_failed = on_failed
        self._stored = StoredReader(log, catch_up, on_prepared, on_damaged, on_failed)
        self.forget_stored = self._stored.forget

    def stored(
        self, start: RaftIndex, bytes_max: int, to: ReplicaId, *, is_needed: bool
    ) -> StoredChunk | None:
        """Entries that are not in memory, for a replica that is far behind; None: not yet."""
        return self._stored.take(start, bytes_max, to.node_id, is_needed=is_needed)

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
