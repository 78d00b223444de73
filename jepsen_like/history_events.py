"""The history of a run: what clients asked and were told, as lines of JSON.

One format for simulated and live clients; clock, lock and file are the caller's, so nothing here
knows trio, threads or the time. An operation is one `invoke` and at most one later line, `ok`,
`fail` or `info`, tied to it by `op`, the number of the line that invoked it. `fail` promises that
nothing happened; a timeout or a lost connection is `info`, and so is an operation without an end.
The order of lines is the order of events: invoke before the request leaves, complete after the
answer came. Checkers go by that order and by `op`; `time` is for people.
docs/testing.md lists the operations and what each of them carries.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from io import BufferedReader, RawIOBase
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, TypedDict, Unpack, cast

import msgspec
import zstandard

Value = int | str
"""What a record carries; unique within its partition."""

Type = Literal["invoke", "ok", "fail", "info"]

OFFSET_UNKNOWN = -1
NODE_UNKNOWN = -1
NEMESIS = -1
"""The process that faults belong to."""

NOTES = frozenset(
    {
        *("assigned", "revoked", "crash", "fault", "group_gone", "heal", "log_start", "phase"),
        "view_made",
    }
)
"""Operations told in one line: something that happened to a process, not something it asked."""


class MalformedHistoryError(Exception):
    """A history that no client can have written."""


class Event(msgspec.Struct, omit_defaults=True, gc=False):
    """One line. Which of the fields below `time` are there depends on the operation."""

    type: Type
    f: str
    process: int
    op: int
    time: int
    """Nanoseconds of the run's own clock, virtual or monotonic."""
    records: dict[str, list[tuple[int, Value]]] = msgspec.field(default_factory=dict)
    """By partition (offset, value): appended or polled; offset -1 where it is unknown."""
    offsets: dict[str, int] = msgspec.field(default_factory=dict)
    """By partition: a position to read from, a committed offset, a log start."""
    partitions: list[str] = msgspec.field(default_factory=list)
    topics: list[str] = msgspec.field(default_factory=list)
    group: str = ""
    generation: int = -1
    member: str = ""
    node: int = NODE_UNKNOWN
    code: int = 0
    """Kafka's error code, or a client's own below zero."""
    error: str = ""
    idempotent: bool = True
    """False for an append whose producer may repeat or reorder what it has under way: without
    idempotence, or after it gave something up. Either line of an operation may say so."""
    stale: bool = False
    """A read that promises no freshness: checked for what it shows, not for what it lacks."""
    transactional_id: str = ""
    producer: list[int] = msgspec.field(default_factory=list)
    """Producer id and epoch."""
    protocol: int = 0
    """Of a transaction: 1 (KIP-98) or 2 (KIP-890)."""
    transaction: int = -1
    """The operation that began the transaction whose end this is."""
    is_commit: bool = False
    leader_epoch: int = -1
    """Of who answered."""
    tags: list[str] = msgspec.field(default_factory=list)
    """Of which a view has the records."""
    due: list[int] = msgspec.field(default_factory=list)
    """When the delayed records of one partition are due, in their order: in nanoseconds of the
    run's own clock, as all times."""
    slack: int = 0
    """So much sooner may they be delivered, in nanoseconds: who counts from the append knows the
    time of the append that well."""
    cancels: list[Value] = msgspec.field(default_factory=list)
    """Delayed records that are called back, by value."""
    sent: int = 1
    """How often the request of a commit left, at its end: who loses an answer sends it again, and
    each of them is a commit."""
    stamps: dict[str, list[int]] = msgspec.field(default_factory=dict)
    """By partition the timestamps of `records`, in nanoseconds of the run's own clock."""


class Payload(TypedDict, total=False):
    """The fields that an operation may carry, for the recorder's arguments."""

    records: dict[str, list[tuple[int, Value]]]
    offsets: dict[str, int]
    partitions: list[str]
    topics: list[str]
    group: str
    generation: int
    member: str
    node: int
    code: int
    error: str
    idempotent: bool
    stale: bool
    transactional_id: str
    producer: list[int]
    protocol: int
    transaction: int
    is_commit: bool
    leader_epoch: int
    tags: list[str]
    due: list[int]
    slack: int
    cancels: list[Value]
    sent: int
    stamps: dict[str, list[int]]


class Recorder:
    """Numbers events in the order in which it is told of them, and hands them to a sink.

    Clients in several threads give one lock for all; the sink is called under it.
    """

    def __init__(
        self,
        sink: Callable[[Event], object],
        clock_ns: Callable[[], int],
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._sink = sink
        self._clock_ns = clock_ns
        self._lock = lock or nullcontext()
        self._lines = 0
        self._open: set[int] = set()

    def invoke(self, process: int, f: str, **payload: Unpack[Payload]) -> Event:
        """An operation begins: call this before its request leaves."""
        assert f not in NOTES, f"{f} is told by note()"
        with self._lock:
            event = Event("invoke", f, process, self._lines, self._clock_ns(), **payload)
            self._open.add(event.op)
            self._put(event)
        return event

    def ok(self, invoked: Event, **payload: Unpack[Payload]) -> bool:
        """It took effect, with this answer; False if the operation had ended before."""
        return self._end(invoked, "ok", payload)

    def fail(self, invoked: Event, **payload: Unpack[Payload]) -> bool:
        """It certainly had no effect and never will; False if the operation had ended before."""
        return self._end(invoked, "fail", payload)

    def info(self, invoked: Event, **payload: Unpack[Payload]) -> bool:
        """Nobody knows, or will: timeouts, lost connections, crashed clients."""
        return self._end(invoked, "info", payload)

    def note(self, process: int, f: str, **payload: Unpack[Payload]) -> Event:
        """Something happened to a process (see NOTES)."""
        assert f in NOTES, f"{f} is not a note"
        with self._lock:
            event = Event("ok", f, process, self._lines, self._clock_ns(), **payload)
            self._put(event)
        return event

    def _end(self, invoked: Event, how: Type, payload: Payload) -> bool:
        with self._lock:
            if invoked.op not in self._open:
                return False
            self._open.remove(invoked.op)
            self._put(
                Event(how, invoked.f, invoked.process, invoked.op, self._clock_ns(), **payload)
            )
        return True

    def _put(self, event: Event) -> None:
        self._lines += 1
        self._sink(event)


class HistoryFile:
    """Writes events to a file, compressed where its name ends with `.zst`; a recorder's sink."""

    def __init__(self, path: Path) -> None:
        self._exits = ExitStack()
        self._stream: IO[bytes] = self._exits.enter_context(path.open("wb"))
        if path.suffix == ".zst":
            compressed = zstandard.ZstdCompressor(level=3).stream_writer(self._stream)
            self._stream = cast("IO[bytes]", self._exits.enter_context(compressed))
        self._encoder = msgspec.json.Encoder()

    def __call__(self, event: Event) -> None:
        self._stream.write(self._encoder.encode(event) + b"\n")

    def __enter__(self) -> HistoryFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._exits.__exit__(kind, error, at)


def write_history(path: Path, events: Iterable[Event]) -> None:
    """Write a whole history."""
    with HistoryFile(path) as file:
        for event in events:
            file(event)


def read_history(path: Path) -> Iterator[Event]:
    """Read a history line by line; a last line that was cut off by a crash is left out.

    Raises:
        MalformedHistoryError: A line is no event.
    """
    with path.open("rb") as file, ExitStack() as exits:
        stream: IO[bytes] = file
        if path.suffix == ".zst":
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            raw = cast("RawIOBase", exits.enter_context(reader))
            stream = exits.enter_context(BufferedReader(raw, 1 << 18))
        yield from decode_history(stream)


def decode_history(lines: Iterable[bytes]) -> Iterator[Event]:
    """Decode lines.

    Raises:
        MalformedHistoryError: A line is no event.
    """
    decode = msgspec.json.Decoder(Event).decode
    for number, line in enumerate(lines):
        try:
            yield decode(line)
        except msgspec.DecodeError as error:
            if not line.endswith(b"\n"):
                return
            raise MalformedHistoryError(f"line {number + 1}: {error}") from error


def merge_histories(histories: Iterable[Iterable[Event]]) -> Iterator[Event]:
    """One history of several that share a clock: by time, operations numbered anew.

    Processes must be named apart by whoever wrote them.
    """
    marked = [zip(itertools.repeat(which), events) for which, events in enumerate(histories)]
    merged = heapq.merge(*marked, key=lambda row: row[1].time)
    renumbered: dict[tuple[int, int], int] = {}
    for number, (which, event) in enumerate(merged):
        if event.type == "invoke":
            op = renumbered[which, event.op] = number
        elif event.f in NOTES:
            op = number
        else:
            found = renumbered.pop((which, event.op), None)
            if found is None:
                raise MalformedHistoryError(f"{event.f} {event.op} ends and never began")
            op = found
        yield msgspec.structs.replace(event, op=op)
