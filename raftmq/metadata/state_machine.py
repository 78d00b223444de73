"""The state machine of the metadata Raft group: committed batches in, images out.

Owns the current image and the position up to which it was applied. Reads nothing but committed
entries, in log order, each once. Never proposes, never answers anybody: `engine.py` does.

A command is tried before it enters the log (`raft_engine.py`). One that slipped through
nevertheless would end every node at each of its starts. An operator may have it passed over: a
`Skip` names it so exactly that another command at the same offset is never meant. The data folder
keeps skips, and `tools/command_skip.py` makes them.

Invariants: `image` is a pure function of the log below `applied_end`; an exception while applying
leaves `failure` set and is raised on, and the node stops, since a machine that skips a command
drifts away from the others. A log with a skipped command gets a new snapshot soon, which holds no
trace of the command. The image at a log-start entry is kept until its snapshot was asked for: every
replica meets that entry at the same state.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Protocol

import msgspec
from attrs import evolve

from raftmq.errors import AheadError, NodeMustStopError
from raftmq.foreign import visible
from raftmq.log.model import DamagedError, LogEntry
from raftmq.metadata.apply import apply
from raftmq.metadata.commands import Envelope, decode_envelope
from raftmq.metadata.credentials import masked
from raftmq.metadata.features import SUPPORTED, Ranges, check_supported, outside
from raftmq.metadata.image import EMPTY_IMAGE, MetadataImage
from raftmq.metadata.results import Result
from raftmq.metadata.snapshot import SnapshotEncoder, SnapshotError, decode_image
from raftmq.ports import Runnable
from raftmq.raft.messages import EntryKind, SoftState
from raftmq.records import Record, check_batch, read_records
from raftmq.types import Buffer, Offset, RaftIndex

SHOWN_MAX: Final = 1_000
"""Characters of a command in a log line."""
DIGEST_SHOWN: Final = 12
AHEAD: Final = "this cluster is ahead of this version"
"""How every refusal begins whose cure is a newer raftmq."""


class Skip(msgspec.Struct, frozen=True):
    """One command to pass over: where it is, the term that wrote it, and its exact bytes.

    `sha256` is hexadecimal, of the record's value.
    """

    offset: int
    leader_epoch: int
    sha256: str

    @classmethod
    def of(cls, offset: int, leader_epoch: int, value: bytes) -> Skip:
        """That of a record of the metadata log."""
        return cls(offset, leader_epoch, hashlib.sha256(value).hexdigest())

    @property
    def short(self) -> str:
        """OFFSET:EPOCH:DIGEST, for people to compare."""
        return f"{self.offset}:{self.leader_epoch}:{self.sha256[:DIGEST_SHOWN]}"


class UnappliableCommandError(NodeMustStopError):
    """A committed command raises when it is applied: every node stops there until it is skipped.

    Attributes:
        skip: names the command.
        value: its bytes.
        cause: what was raised.
        is_newer: a newer version can apply it, so it must not be skipped.
    """

    def __init__(self, skip: Skip, value: bytes, cause: Exception) -> None:
        self.skip = skip
        self.value = value
        self.cause = cause
        self.is_newer = isinstance(cause, AheadError)
        text = (
            f"the metadata command at offset {skip.offset} (leader epoch {skip.leader_epoch}) "
            f"cannot be applied: {self.reason}. The command: {shown(value)}."
        )
        if self.is_newer:
            text = f"{AHEAD}: {text} Nothing is lost: start a newer raftmq on this node"
        else:
            text += (
                " Nodes stop here: the way out is `raftmq recover --skip-command "
                f"{skip.offset}` on a majority of stopped nodes, and then on all others"
            )
        super().__init__(text)

    @property
    def reason(self) -> str:
        """The exception, on one line."""
        return visible(f"{type(self.cause).__name__}: {self.cause}")[:SHOWN_MAX]


def shown(value: bytes) -> str:
    """A command for people: on one line, shortened."""
    more = len(value) - SHOWN_MAX
    text = visible(masked(value)[:SHOWN_MAX].decode("utf-8", "backslashreplace"))
    return f"{text}... ({more} more bytes)" if more > 0 else text


DECODE_INLINE_BYTES_MAX: Final = 32 << 10
READ_BYTES_MAX: Final = 1 << 20
RECENT_BYTES_MAX: Final = 4 << 20
KEPT_IMAGES_MAX: Final = 2


class CommittedEntries(Protocol):
    """Where committed entries are read from (`ReplicatedLog`)."""

    @property
    def log_start(self) -> StateOrigin:
        """Where the log begins, and with what state."""
        ...

    def entries(self, start: RaftIndex, bytes_max: int) -> tuple[LogEntry, ...]:
        """Entries from an entry boundary on; at least one if there is any."""
        ...


class StateOrigin(Protocol):
    """The part of a log start that the state begins with (`LogStart`)."""

    @property
    def offset(self) -> Offset:
        """First offset of the log."""
        ...

    @property
    def index(self) -> RaftIndex:
        """Its position."""
        ...

    @property
    def state(self) -> bytes:
        """The snapshot at `offset`; empty where the log begins with nothing."""
        ...


class MetadataListener(Protocol):
    """A part that is told of each command and image (the engine)."""

    def command_applied(self, envelope: Envelope, result: Result, offset: Offset) -> None:
        """One command took its effect; `machine.image` is not published yet."""
        ...

    def command_skipped(self, skip: Skip) -> None:
        """One command was passed over."""
        ...

    def state_restored(self, image: MetadataImage) -> None:
        """A snapshot took the place of commands whose results this node will never see."""
        ...

    def image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        """`machine.image` is `after` now."""
        ...

    def advanced(self, applied_end: RaftIndex) -> None:
        """Everything below `applied_end` is applied and published."""
        ...

    def role_changed(self, soft: SoftState) -> None:
        """The group has another leader or term."""
        ...


class Decoding:
    """Decodes a snapshot in a thread of its own; an error in it is found again on the loop."""

    def __init__(self, state: Buffer) -> None:
        self._state = state
        self.image: MetadataImage | None = None
        self.is_done = False

    def run(self) -> None:
        """Decode it."""
        with suppress(SnapshotError):
            self.image = decode_image(self._state)
        self.is_done = True

    def is_of(self, state: Buffer) -> bool:
        """True when the decoded state has these bytes."""
        return memoryview(self._state) == memoryview(state)


class MetadataMachine:
    """Implements the replica's `StateMachine` port."""

    def __init__(self, skips: Iterable[Skip] = (), supported: Ranges = SUPPORTED) -> None:
        """Make one at the empty state.

        Args:
            skips: commands to pass over.
            supported: the levels of features with which this node can go on.
        """
        self.supported = supported
        self.image: MetadataImage = EMPTY_IMAGE
        self.applied_end = RaftIndex(0)
        self.log_bytes = 0
        """Bytes of batches applied since the log start."""
        self.state_bytes = 0
        """Size of the last snapshot that was written or read."""
        self.failure: Exception | None = None
        self._skips = {skip.offset: skip for skip in skips}
        self._skipped_offset = Offset(-1)
        self._damage: DamagedError | None = None
        self._commit_end = RaftIndex(0)
        self._log: CommittedEntries | None = None
        self._listeners: list[MetadataListener] = []
        self.on_progress: list[Callable[[], None]] = []
        """Called when readers of the log may see more."""
        self._recent: deque[LogEntry] = deque()
        self._recent_bytes = 0
        self._kept: dict[Offset, MetadataImage] = {}
        self._encoder = SnapshotEncoder()
        self.is_encoding = False
        """A snapshot was asked for, and some of it is still to be encoded."""
        self._decoding: Decoding | None = None

    def attach_log(self, log: CommittedEntries) -> None:
        """Set the log that holds committed entries; before `restore`."""
        self._log = log

    def add_listener(self, listener: MetadataListener) -> None:
        """Report to `listener` from now on."""
        self._listeners.append(listener)

    @property
    def applied_offset(self) -> Offset:
        """The offset after the last applied command."""
        return Offset(self.image.version + 1)

    @property
    def is_current(self) -> bool:
        """True when everything that is known to be committed is applied."""
        return self.applied_end >= self._commit_end

    @property
    def has_skipped(self) -> bool:
        """True while the log holds a command that was passed over: after the next snapshot a new
        node need not pass over it."""
        return self._skipped_offset >= 0

    def prepare_snapshot(self, parts_max: int) -> None:
        """Encode a part of the state ahead of the snapshot that will be asked for."""
        if not self.is_encoding:
            self._encoder.warm(self.image, parts_max)

    # ---- the replica's port ----

    def appended(self, entry: LogEntry) -> None:
        """Remember an entry until it is committed, so that it need not be read back."""
        if self._recent and self._recent[-1].end > entry.start:
            self._forget()  # it does not follow what is remembered: the log is right
        self._recent.append(entry)
        self._recent_bytes += len(entry.payload)
        if self._recent_bytes > RECENT_BYTES_MAX:
            self._forget()

    def truncated(self, end: RaftIndex) -> None:
        """Forget entries at and above `end`; they were never committed."""
        assert end >= self.applied_end, "an applied entry was truncated"
        while self._recent and self._recent[-1].end > end:
            self._recent_bytes -= len(self._recent.pop().payload)

    def committed(self, high_watermark: Offset, commit_end: RaftIndex) -> None:
        """Apply everything below `commit_end`; what is damaged here waits for its repair.

        Raises:
            Exception: an entry could not be applied; the node must stop.
        """
        self._commit_end = max(self._commit_end, commit_end)
        self.catch_up()

    def catch_up(self) -> None:
        """Apply what is committed and was not readable before.

        Raises:
            Exception: an entry could not be applied; the node must stop.
        """
        commit_end = self._commit_end
        if commit_end <= self.applied_end or self.failure is not None:
            return
        self._damage = None
        assert self._log is not None, "attach_log() comes first"
        if self._log.log_start.index > self.applied_end:
            # Damaged entries waited for a repair, but all others have dropped them: the repair took
            # over a peer's log start, and the state with it.
            self.restore(self._log.log_start)
            self._commit_end = max(commit_end, self.applied_end)
        before = self.image
        try:
            while self.applied_end < commit_end:
                entry = self._next_entry()
                if entry is None:
                    break  # under repair; tried again at the next commit or tick
                if entry.end > commit_end:
                    break  # a faulty peer moved the commit into the midst of an entry
                self._apply_entry(entry)
        except Exception as error:  # after any exception the images would drift apart
            self.failure = error
            raise
        for listener in self._listeners:
            if self.image is not before:
                listener.image_changed(before, self.image)
            listener.advanced(self.applied_end)

    def role_changed(self, soft: SoftState) -> None:
        """Pass on another leader or term."""
        for listener in self._listeners:
            listener.role_changed(soft)

    def progressed(self) -> None:
        """Readers of the log may see more: a flushed end or the log start moved."""
        for reader in self.on_progress:
            reader()

    def state_at(self, offset: Offset, index: RaftIndex) -> bytes | None:
        """The snapshot of the state exactly at `offset`, which is committed. None: a part of it was
        encoded, and the next call goes on.

        Raises:
            DamagedError: entries below are not readable; ask again when they are repaired.
        """
        if self.applied_offset < offset:
            self.committed(offset, index)
        if self.applied_offset < offset and self._damage is not None:
            raise self._damage
        image = self.image if self.applied_offset == offset else self._kept.get(offset)
        assert image is not None, f"the state at {offset} was asked for without a log-start entry"
        self.is_encoding = not self._encoder.prepare(image)
        if self.is_encoding:
            return None
        state = self._encoder.encode(image)
        self.state_bytes = len(state)
        self.log_bytes = 0
        self._forget_skipped(offset)
        return state

    def restoring(self, state: Buffer) -> Runnable | None:
        """Decode a large state in another thread before `restore` begins with it."""
        if len(state) < DECODE_INLINE_BYTES_MAX:
            return None
        self._decoding = Decoding(state)
        return self._decoding

    def check_state(self, log_start: StateOrigin) -> None:
        """Refuse a state that `restore` could not begin with; a large one once it was read.

        Raises:
            SnapshotError: it is no snapshot, or that of another position.
        """
        decoding = self._decoding
        if decoding is not None and decoding.is_done and decoding.is_of(log_start.state):
            image = decoding.image
        elif len(log_start.state) < DECODE_INLINE_BYTES_MAX:
            image = decode_image(log_start.state)
        else:
            return
        if image is not None and outside(image.features, self.supported):
            raise SnapshotError("a state with levels that this version does not support")
        if image is None or image.version + 1 != log_start.offset:
            raise SnapshotError("no snapshot of the state at its log start")

    def restore(self, log_start: StateOrigin) -> None:
        """Begin at a log start: at recovery, or because a leader sent one.

        Raises:
            SnapshotError: its state is damaged or of a newer format.
            UnsupportedLevelError: it is of a cluster that is ahead of this version.
        """
        before = self.image
        decoding, self._decoding = self._decoding, None
        if decoding is not None and decoding.image is not None and decoding.is_of(log_start.state):
            image = decoding.image
        else:
            image = decode_image(log_start.state)
        check_supported(image, self.supported)
        self.image = image
        assert self.applied_offset == log_start.offset, (
            "a snapshot is of the state at its log start"
        )
        self.applied_end = log_start.index
        self.state_bytes = len(log_start.state)
        self.log_bytes = 0
        self._forget_skipped(log_start.offset)
        self._forget()
        self._kept.clear()
        self.is_encoding = False
        self._commit_end = self.applied_end
        for listener in self._listeners:
            listener.state_restored(self.image)
            listener.image_changed(before, self.image)
            listener.advanced(self.applied_end)

    # ---- inside ----

    def _forget(self) -> None:
        self._recent.clear()
        self._recent_bytes = 0

    def _forget_skipped(self, log_start: Offset) -> None:
        if self._skipped_offset < log_start:
            self._skipped_offset = Offset(-1)

    def _next_entry(self) -> LogEntry | None:
        while self._recent and self._recent[0].end <= self.applied_end:
            self._recent_bytes -= len(self._recent.popleft().payload)
        if self._recent and self._recent[0].start == self.applied_end:
            return self._recent[0]
        assert self._log is not None, "attach_log() comes first"
        try:
            entries = self._log.entries(self.applied_end, READ_BYTES_MAX)
        except DamagedError as error:
            self._damage = error
            return None
        if not entries:
            return None
        assert entries[0].start == self.applied_end, "the log gives entries from where it is asked"
        if not self._recent:
            self._recent.extend(entries)
            self._recent_bytes = sum(len(entry.payload) for entry in entries)
        return entries[0]

    def _apply_entry(self, entry: LogEntry) -> None:
        if entry.kind == EntryKind.BATCH:
            check_batch(entry.payload)
            for record in read_records(entry.payload):
                self._apply_record(record)
            self.log_bytes += len(entry.payload)
        elif entry.kind == EntryKind.LOG_START:
            self._kept[self.applied_offset] = self.image
            while len(self._kept) > KEPT_IMAGES_MAX:
                del self._kept[min(self._kept)]
        self.applied_end = entry.end

    def _apply_record(self, record: Record) -> None:
        value = bytes(record.value or b"")
        offset = Offset(record.offset)
        if offset in self._skips:
            skip = Skip.of(offset, record.leader_epoch, value)
            if skip == self._skips[offset]:
                self._pass_over(skip)
                return
        try:
            envelope = decode_envelope(value)
            image, result = apply(self.image, envelope, offset)
            if image.features is not self.image.features:
                check_supported(image, self.supported)
        except Exception as error:
            skip = Skip.of(offset, record.leader_epoch, value)
            raise UnappliableCommandError(skip, value, error) from error
        self.image = image
        for listener in self._listeners:
            listener.command_applied(envelope, result, offset)

    def _pass_over(self, skip: Skip) -> None:
        self.image = evolve(self.image, version=Offset(skip.offset))
        self._skipped_offset = Offset(skip.offset)
        for listener in self._listeners:
            listener.command_skipped(skip)
