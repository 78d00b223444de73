"""`raftmq produce`: records from arguments or standard input, with kcat's letters.

Exit code 3 when the outcome of any record is unknown, 1 when one certainly failed.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from raftmq.cli import completion
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    REFUSED_S,
    UNKNOWN_S,
    Bootstrap,
    CommandError,
    check_reachable,
    client_security,
    hint_for,
    open_admin,
    reported,
)
from raftmq.cli.console import EXIT_FAILED, EXIT_UNKNOWN, EXIT_USAGE, note, out
from raftmq.errors import ErrorCode
from raftmq_client.blocking.admin import Admin
from raftmq_client.blocking.producer import Producer
from raftmq_client.core.accumulator import Receipt
from raftmq_client.core.admin import ResourceType
from raftmq_client.errors import BrokerError, ClientError, Outcome, TimedOutError

_CHUNK_BYTES = 1 << 16
_UNSETTLED_MAX = 100_000


class Compression(StrEnum):
    """Codecs by Kafka's names."""

    none = "none"
    gzip = "gzip"
    snappy = "snappy"
    lz4 = "lz4"
    zstd = "zstd"


class Acks(StrEnum):
    """When a record counts as written."""

    all = "all"
    one = "1"
    zero = "0"


TopicWord = Annotated[
    str | None,
    typer.Argument(metavar="TOPIC", autocompletion=completion.topics, show_default=False),
]
TopicOption = Annotated[
    str | None,
    typer.Option("-t", "--topic", autocompletion=completion.topics, help="The topic, kcat's way."),
]

KeyDelimiter = Annotated[
    str | None, typer.Option("-K", "--key-delimiter", help="Splits records into key and value.")
]
Headers = Annotated[
    list[str] | None, typer.Option("-H", "--header", metavar="NAME=VALUE", help="Repeatable.")
]
DeliveryTimeout = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", help="For each record's delivery.", min=0.1),
]


def produce(
    topic: TopicWord = None,
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="VALUE", help="Records; without any, standard input."),
    ] = None,
    topic_option: TopicOption = None,
    partition: Annotated[
        int | None, typer.Option("-p", "--partition", help="Default: by key, or sticky.", min=-1)
    ] = None,
    key: Annotated[str | None, typer.Option("-k", "--key", help="Key of every record.")] = None,
    key_delimiter: KeyDelimiter = None,
    delimiter: Annotated[
        str, typer.Option("-D", "--delimiter", help="Ends a record on standard input.")
    ] = "\\n",
    header: Headers = None,
    compression: Annotated[
        Compression, typer.Option("-z", "--compression", help="How batches are compressed.")
    ] = Compression.none,
    null_empty: Annotated[
        bool, typer.Option("-Z", "--null", help="Empty keys and values are null.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option("-l", "--file", help="Read records from this file.")
    ] = None,
    count: Annotated[
        int | None, typer.Option("-c", "--count", help="Stop after so many records.", min=0)
    ] = None,
    acks: Annotated[Acks, typer.Option("-a", "--acks", help="all, 1 or 0.")] = Acks.all,
    timeout: DeliveryTimeout = 30.0,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Print each record's partition and offset.")
    ] = False,
    _kcat: Annotated[
        bool, typer.Option("-P", "-q", hidden=True, help="kcat's, no effect.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Write records to a topic.

    Examples: raftmq produce orders hello; seq 1000 | raftmq produce -t orders -K : -z zstd
    """
    with reported():
        topic, values = _topic_and_values(topic, topic_option, values or [])
        if partition == -1:  # kcat's word for any
            partition = None
        headers = [_header(word) for word in header or ()]
        records = _records(values, file, _unescape(delimiter), count)
        split = _unescape(key_delimiter) if key_delimiter is not None else None
        fixed_key = key.encode() if key is not None else None
        tally = _Tally(verbose)
        check_reachable(bootstrap, min(REFUSED_S, timeout))
        with Producer(
            bootstrap,
            security=client_security(),
            acks=acks.value,
            compression=compression.value,
            delivery_timeout_ms=timeout * 1000,
            max_block_ms=timeout * 1000,
            client_id="raftmq-cli",
        ) as producer:
            _check_topic(producer, topic, bootstrap, timeout)
            for line in records:
                found, value = _split(line, split)
                name = fixed_key if found is None else found
                if null_empty:
                    name, value = name or None, value or None
                tally.add(producer.send(topic, value, name, headers, partition))
            tally.finish()  # within the block, at whose end the producer raises unread failures


def _check_topic(producer: Producer, topic: str, bootstrap: str, timeout_s: float) -> None:
    """Whether there is such a topic, or will be: where brokers make none, waiting is for nothing.

    Raises:
        BrokerError: there is none, and no broker makes it.
    """
    try:
        producer.partitions(topic, min(UNKNOWN_S, timeout_s))
    except TimedOutError:
        return  # no broker answered yet: the records wait for one themselves
    except BrokerError as error:
        if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            raise
        with open_admin(bootstrap, timeout_s) as admin:
            if not _makes_topics(admin):
                raise


def _makes_topics(admin: Admin) -> bool:
    """Whether a broker makes the topics that clients name; one that does not say may."""
    for broker in admin.brokers()[:1]:
        entries = admin.describe_configs(ResourceType.BROKER, str(broker.node_id))
        return all(e.value != "false" for e in entries if e.name == "auto.create.topics.enable")
    return True


class _Tally:
    """Settles receipts in order and remembers what went wrong."""

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self._waiting: deque[Receipt] = deque()
        self._failed: list[ClientError] = []
        self._unknown: list[ClientError] = []
        self._done = 0

    def add(self, receipt: Receipt) -> None:
        self._waiting.append(receipt)
        while self._waiting and (self._waiting[0].is_done or len(self._waiting) > _UNSETTLED_MAX):
            self._settle(self._waiting.popleft())

    def finish(self) -> None:
        """Report, and end with the exit code that fits."""
        while self._waiting:
            self._settle(self._waiting.popleft())
        if self._failed or self._unknown:
            first = (self._unknown or self._failed)[0]
            note(
                f"raftmq: {self._done} records written, {len(self._failed)} failed, "
                f"{len(self._unknown)} unknown; first: {first}"
            )
            if hint := hint_for(first):
                note(hint)
            raise typer.Exit(EXIT_UNKNOWN if self._unknown else EXIT_FAILED)

    def _settle(self, receipt: Receipt) -> None:
        if not receipt.is_done:
            try:
                receipt.result()
            except TimeoutError:
                self._unknown.append(TimedOutError("no outcome in time", sent=True))
                return
            except Exception:  # noqa: BLE001 - read from the receipt below
                pass
        error = receipt.error
        if error is None:
            self._done += 1
            if self._verbose:
                place = receipt.result()
                out(f"{place.topic} [{place.partition}] at offset {place.offset}")
        elif error.outcome is Outcome.UNKNOWN:
            self._unknown.append(error)
        else:
            self._failed.append(error)


def _topic_and_values(
    topic: str | None, option: str | None, values: Sequence[str]
) -> tuple[str, list[str]]:
    if option is not None:
        return option, [*([topic] if topic is not None else []), *values]
    if topic is None:
        raise CommandError("which topic? `raftmq produce TOPIC`", EXIT_USAGE)
    return topic, list(values)


def _records(
    values: Sequence[str], file: Path | None, delimiter: bytes, count: int | None
) -> Iterator[bytes]:
    lines: Iterator[bytes]
    if values:
        lines = (value.encode() for value in values)
    elif file is not None:
        lines = _lines(file.open("rb"), delimiter)
    else:
        lines = _lines(sys.stdin.buffer, delimiter)
    for number, line in enumerate(lines):
        if count is not None and number >= count:
            return
        yield line


def _lines(stream: BinaryIO, delimiter: bytes) -> Iterator[bytes]:
    """Cut a stream at a delimiter as it arrives; the last record needs none."""
    with stream:
        rest = b""
        read = getattr(stream, "read1", stream.read)
        while chunk := read(_CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(delimiter)
            yield from lines
        if rest:
            yield rest


def _split(line: bytes, delimiter: bytes | None) -> tuple[bytes | None, bytes | None]:
    if delimiter is None or delimiter not in line:
        return None, line
    key, _, value = line.partition(delimiter)
    return key, value


def _header(word: str) -> tuple[str, bytes | None]:
    name, equals, value = word.partition("=")
    return name, value.encode() if equals else None


def _unescape(text: str) -> bytes:
    r"""Read `\n`, `\t`, `\0`, `\xNN` as kcat does."""
    data = text.encode("latin-1", "backslashreplace").decode("unicode_escape").encode("latin-1")
    if not data:
        raise CommandError("an empty delimiter", EXIT_USAGE)
    return data
