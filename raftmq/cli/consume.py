"""`raftmq consume`: records of a topic, alone or in a group, with kcat's letters.

Without `--follow` it ends where the log ended when it began to read, or where other members of its
group read all partitions. In a group, what was printed is committed at the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import msgspec
import typer

from raftmq.cli import completion
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    UNKNOWN_S,
    Bootstrap,
    CommandError,
    check_reachable,
    client_security,
    parse_time,
    printable,
    reported,
)
from raftmq.cli.console import EXIT_USAGE
from raftmq.types import TopicPartition
from raftmq_client.blocking.consumer import Consumer
from raftmq_client.core.admin import EARLIEST, LATEST
from raftmq_client.core.messages import ConsumerRecord
from raftmq_client.errors import TimedOutError

_POLL_S: Final = 0.5
TOPIC_TIMEOUT_S: Final = 10.0
_TIMESTAMP_TYPES: Final = {0: "CreateTime", 1: "LogAppendTime"}
Formatter = Callable[[ConsumerRecord], bytes]

TopicWord = Annotated[
    str | None,
    typer.Argument(metavar="TOPIC", autocompletion=completion.topics, show_default=False),
]
TopicOption = Annotated[
    str | None,
    typer.Option("-t", "--topic", autocompletion=completion.topics, help="The topic, kcat's way."),
]
Start = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--offset",
        metavar="N|earliest|latest|@TIME",
        help="Where to start; default: earliest. -N: N before the end.",
    ),
]
Idle = Annotated[
    float | None,
    typer.Option("--idle", metavar="SECONDS", help="End after so long without a record.", min=0),
]
MemberOf = Annotated[
    str | None,
    typer.Option(
        "-G",
        "--group",
        autocompletion=completion.groups,
        help="Read as a member of this group.",
    ),
]


def consume(
    topic: TopicWord = None,
    topic_option: TopicOption = None,
    partition: Annotated[
        list[int] | None, typer.Option("-p", "--partition", help="Only this one; repeatable.")
    ] = None,
    offset: Start = None,
    count: Annotated[
        int | None, typer.Option("-c", "--count", help="Stop after so many records.", min=0)
    ] = None,
    group: MemberOf = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for new records.")] = False,
    exit_at_end: Annotated[
        bool, typer.Option("-e", "--exit", help="End at the log's end (the default).")
    ] = False,
    headers: Annotated[bool, typer.Option("--headers", help="Print record headers too.")] = False,
    as_json: Annotated[
        bool, typer.Option("-J", "--json", help="One JSON object per record.")
    ] = False,
    key_delimiter: Annotated[
        str | None, typer.Option("-K", "--key-delimiter", help="Print keys, followed by this.")
    ] = None,
    delimiter: Annotated[str, typer.Option("-D", "--delimiter", help="Ends a record.")] = "\\n",
    record_format: Annotated[
        str | None,
        typer.Option("-f", "--format", metavar="FORMAT", help="%t %p %o %k %s %h %T %K %S %%"),
    ] = None,
    committed_only: Annotated[
        bool, typer.Option("--read-committed", help="Hide aborted transactions.")
    ] = False,
    idle: Idle = None,
    _kcat: Annotated[
        bool, typer.Option("-C", "-q", "-u", hidden=True, help="kcat's, no effect.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Read records of a topic.

    Examples: raftmq consume orders --json; raftmq consume orders -G billing --follow
    """
    with reported():
        name = _topic(topic_option or topic)
        if group is not None and (partition or (offset or "").lstrip("-")[:1].isdigit()):
            message = "a group decides partitions and offsets itself; leave out --partition"
            raise CommandError(f"{message}, or --group", EXIT_USAGE)
        check_reachable(bootstrap)
        write = _formatter(as_json, record_format, key_delimiter, delimiter, headers)
        is_member = group is not None
        reader = _Reader(write, count, follow and not exit_at_end, idle, is_member=is_member)
        with Consumer(
            bootstrap,
            security=client_security(),
            group=group,
            topics=(name,) if is_member else (),
            reset="latest" if offset in ("latest", "end") else "earliest",
            isolation="read_committed" if committed_only else "read_uncommitted",
            client_id="raftmq-cli",
            on_assigned=reader.assigned,
        ) as consumer:
            if group is None:
                _assign(consumer, name, partition, offset or "earliest")
            elif not follow:  # a member without a topic would wait for good
                _partitions(consumer, name)
            reader.run(consumer)


def _topic(name: str | None) -> str:
    if name is None:
        raise CommandError("which topic? `raftmq consume TOPIC`", EXIT_USAGE)
    return name


class _Reader:
    """Prints records until it has enough, or has read what there was at the beginning."""

    def __init__(
        self,
        write: Formatter,
        count: int | None,
        follow: bool,
        idle_s: float | None,
        *,
        is_member: bool,
    ) -> None:
        self._write = write
        self._left = count
        self._follow = follow
        self._idle_s = idle_s
        self._is_member = is_member
        self._is_left_out = False
        self._ends: dict[TopicPartition, int] = {}
        self._printed: dict[TopicPartition, int] = {}

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """This member has its place in the group, perhaps without a partition."""
        self._is_left_out = not partitions

    def run(self, consumer: Consumer) -> None:
        stream = sys.stdout.buffer
        heard_at = time.monotonic()
        try:
            while self._left is None or self._left > 0:
                wanted = 500 if self._left is None else min(500, self._left)
                records = consumer.poll(_POLL_S if self._follow else 0.1, wanted)
                if records:
                    heard_at = time.monotonic()
                for record in records:
                    stream.write(self._write(record))
                    key = TopicPartition(record.topic, record.partition)
                    self._printed[key] = record.offset + 1
                if self._left is not None:
                    self._left -= len(records)
                if self._follow:
                    stream.flush()
                elif self._is_at_end(consumer):
                    return
                if self._idle_s is not None and time.monotonic() - heard_at > self._idle_s:
                    return
        except KeyboardInterrupt:
            # That is how following ends, and no error after which records should come again.
            stream.flush()
            self._commit(consumer)
            raise
        finally:
            stream.flush()

    def _commit(self, consumer: Consumer) -> None:
        if self._is_member:
            mine = consumer.assignment
            consumer.commit({key: end for key, end in self._printed.items() if key in mine})

    def _is_at_end(self, consumer: Consumer) -> bool:
        assignment = consumer.assignment
        if not assignment:
            if self._is_left_out:
                typer.echo("other members of the group read all partitions", err=True)
            return self._is_left_out  # else a member still waiting for its partitions
        missing = [key for key in assignment if key not in self._ends]
        if missing:
            found = consumer.offsets(missing, LATEST)
            self._ends.update({key: item.offset for key, item in found.items()})
        for key in assignment:
            position = consumer.position(key)
            if position is None or position < self._ends[key]:
                return False
        return True


def _assign(consumer: Consumer, topic: str, partitions: list[int] | None, offset: str) -> None:
    total = _partitions(consumer, topic)
    numbers = partitions if partitions else list(range(total))
    for number in numbers:
        if not 0 <= number < total:
            raise CommandError(f"topic {topic} has {total} partitions, none is {number}")
    keys = [TopicPartition(topic, number) for number in numbers]
    consumer.assign(_positions(consumer, keys, offset))


def _partitions(consumer: Consumer, topic: str) -> int:
    """How many a topic has. One that no broker knows is no topic: those that were just made are
    known to all of them; but a broker that does not answer yet may."""
    try:
        return consumer.partitions(topic, UNKNOWN_S)
    except TimedOutError:
        return consumer.partitions(topic, TOPIC_TIMEOUT_S)


def _positions(
    consumer: Consumer, keys: list[TopicPartition], offset: str
) -> dict[TopicPartition, int | None]:
    """Where to start in each partition, in our words and kcat's."""
    if offset in ("earliest", "beginning", "latest", "end"):
        which = EARLIEST if offset in ("earliest", "beginning") else LATEST
        return {key: item.offset for key, item in consumer.offsets(keys, which).items()}
    when = offset[1:] if offset.startswith("@") else offset.removeprefix("s@")
    if when != offset:
        found = consumer.offsets(keys, parse_time(when))
        ends = consumer.offsets(keys, LATEST)
        # No record is as late: start at the end.
        return {
            key: item.offset if item.offset >= 0 else ends[key].offset
            for key, item in found.items()
        }
    try:
        number = int(offset)
    except ValueError:
        raise CommandError(
            f"--offset {offset!r} is none of N, -N, earliest, latest, @TIME", EXIT_USAGE
        ) from None
    ends = consumer.offsets(keys, LATEST)
    if number >= 0:
        # What is beyond the end begins there, as with Kafka's own tools and kcat.
        return {key: min(number, ends[key].offset) for key in keys}
    starts = consumer.offsets(keys, EARLIEST)
    return {key: max(starts[key].offset, ends[key].offset + number) for key in keys}


def _formatter(
    as_json: bool,
    record_format: str | None,
    key_delimiter: str | None,
    delimiter: str,
    headers: bool,
) -> Formatter:
    if as_json:
        return _json_line
    end = _unescape(delimiter)
    if record_format is not None:
        return _format_writer(record_format)
    split = _unescape(key_delimiter) if key_delimiter is not None else None

    def write(record: ConsumerRecord) -> bytes:
        pieces = []
        if headers:
            pieces.append(_headers_text(record) + b"\t")
        if split is not None:
            pieces.append((record.key or b"") + split)
        pieces.append(record.value or b"")
        pieces.append(end)
        return b"".join(pieces)

    return write


def _json_line(record: ConsumerRecord) -> bytes:
    content: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "timestamp_type": _TIMESTAMP_TYPES.get(record.timestamp_type, "NoTimestampType"),
        "key": printable(record.key),
        "value": printable(record.value),
        "headers": [[name, printable(value)] for name, value in record.headers],
    }
    return msgspec.json.encode(content) + b"\n"


def _format_writer(text: str) -> Formatter:
    """kcat's -f: pieces of text and %-letters."""
    parts: list[bytes | Callable[[ConsumerRecord], bytes]] = []
    rest = text
    while rest:
        plain, percent, rest = rest.partition("%")
        if plain:
            parts.append(_unescape(plain))
        if percent:
            letter, rest = rest[:1], rest[1:]
            if letter == "%":
                parts.append(b"%")
            elif letter in _LETTERS:
                parts.append(_LETTERS[letter])
            else:
                known = " ".join(f"%{name}" for name in _LETTERS)
                raise CommandError(f"--format: %{letter} is none of {known}", EXIT_USAGE)
    return lambda record: b"".join(p if isinstance(p, bytes) else p(record) for p in parts)


def _headers_text(record: ConsumerRecord) -> bytes:
    return b",".join(
        name.encode() + b"=" + (b"NULL" if value is None else value)
        for name, value in record.headers
    )


def _size(data: bytes | None) -> bytes:
    return b"-1" if data is None else b"%d" % len(data)


_LETTERS: Final[dict[str, Callable[[ConsumerRecord], bytes]]] = {
    "t": lambda record: record.topic.encode(),
    "p": lambda record: b"%d" % record.partition,
    "o": lambda record: b"%d" % record.offset,
    "k": lambda record: record.key or b"",
    "K": lambda record: _size(record.key),
    "s": lambda record: record.value or b"",
    "S": lambda record: _size(record.value),
    "h": _headers_text,
    "T": lambda record: b"%d" % record.timestamp,
}


def _unescape(text: str) -> bytes:
    r"""Read `\n`, `\t`, `\0`, `\xNN` as kcat does."""
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape").encode("latin-1")
