"""What all commands share: options, tables or JSON, errors told in one line, exit codes.

Exit codes: 0 done, 1 failed, 2 usage, 3 unknown outcome (the work may have been done). No command
shows a traceback for anything that can happen to an operator.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
import typer

from raftmq.cli.console import note, out, out_json
from raftmq.cli.main import EXIT_FAILED, EXIT_UNKNOWN, EXIT_USAGE
from raftmq.config import Address, ConfigError
from raftmq.errors import ErrorCode, RaftmqError
from raftmq.ports import DiskError
from raftmq.visible import visible
from raftmq_client.errors import (
    BrokerError,
    ClientError,
    ConnectionFailedError,
    Outcome,
    TimedOutError,
    UsageError,
)

DEFAULT_BOOTSTRAP: Final = "127.0.0.1:9092"

Bootstrap = Annotated[
    str,
    typer.Option(
        "-b",
        "--bootstrap",
        envvar="RAFTMQ_BOOTSTRAP",
        metavar="HOST:PORT,...",
        help="Brokers to ask first.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="How long to try.", min=0.1)
]

HINTS: Final[dict[ErrorCode, str]] = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: "`raftmq topic list` shows what there is.",
    ErrorCode.TOPIC_ALREADY_EXISTS: "`raftmq topic describe` shows it; --if-not-exists accepts it.",
    ErrorCode.INVALID_REPLICATION_FACTOR: "`raftmq node list` shows how many brokers are alive.",
    ErrorCode.INVALID_PARTITIONS: "A topic has one partition at least, and they can only grow.",
    ErrorCode.NON_EMPTY_GROUP: "Stop its members first; `raftmq group describe` names them.",
    ErrorCode.GROUP_ID_NOT_FOUND: "`raftmq group list` shows what there is.",
    ErrorCode.NOT_ENOUGH_REPLICAS: "Too few replicas are in sync for min.insync.replicas.",
    ErrorCode.OFFSET_OUT_OF_RANGE: "`raftmq topic describe` shows the first and next offsets.",
    ErrorCode.INVALID_CONFIG: "`raftmq topic describe --configs` shows names and values.",
}


class CommandError(RaftmqError):
    """A command cannot go on; `code` is its exit code."""

    def __init__(self, message: str, code: int = EXIT_FAILED) -> None:
        self.code = code
        super().__init__(message)


@contextmanager
def reported() -> Iterator[None]:
    """Turn errors into a line on standard error and an exit code."""
    try:
        yield
    except CommandError as error:
        _end(str(error), error.code)
    except UsageError as error:
        _end(str(error), EXIT_USAGE)
    except ClientError as error:
        is_unknown = error.outcome is Outcome.UNKNOWN
        what = f"outcome unknown: {error}" if is_unknown else str(error)
        _end(what, EXIT_UNKNOWN if is_unknown else EXIT_FAILED, hint_for(error))
    except (RaftmqError, DiskError) as error:
        _end(str(error), EXIT_FAILED)
    except TimeoutError as error:
        _end(str(error), EXIT_UNKNOWN)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # Whoever read us has seen enough (`raftmq consume t | head`).
        sys.stderr.close()
        raise typer.Exit(0) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _end(f"{where}{error.strerror or error}", EXIT_FAILED)


def parse_addresses(text: str, option: str) -> list[str]:
    """Read `HOST:PORT,...`; none in an empty text.

    Raises:
        CommandError: one of them is not of that form.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        try:
            Address.parse(word)
        except ConfigError as error:
            raise CommandError(f"{option}: {error}", EXIT_USAGE) from error
    return words


def _end(message: str, code: int, hint: str = "") -> None:
    note(f"raftmq: {visible(message)}")
    if hint:
        note(hint)
    raise typer.Exit(code) from None


def hint_for(error: ClientError) -> str:
    """What to do about an error, where we know it; else empty."""
    if isinstance(error, BrokerError):
        return HINTS.get(error.code, "")
    if ErrorCode.UNKNOWN_TOPIC_OR_PARTITION.name in str(error):  # brokers said so until the end
        return HINTS[ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    if isinstance(error, ConnectionFailedError) or (
        isinstance(error, TimedOutError) and error.outcome is Outcome.FAILED
    ):
        return (
            "Is the cluster up? `raftmq dev` starts one here; -b or RAFTMQ_BOOTSTRAP names another."
        )
    return ""


def show(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    as_json: bool,
    title: str = "",
) -> None:
    """Print rows as JSON objects, or as a table; an empty table is its heading alone."""
    if as_json:
        show_json([dict(zip(columns, row, strict=True)) for row in rows])
    elif sys.stdout.isatty():
        _show_rich(columns, rows, title)
    else:
        _show_plain(columns, rows)


def show_json(value: object) -> None:
    """Print a value as indented JSON."""
    out_json(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=1))


def text_of(value: object) -> str:
    """A cell as text on one line: lists as Kafka's tools write them, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return visible(",".join(str(item) for item in value))
    return visible(str(value))


def _show_plain(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    cells = [list(columns), *([text_of(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        out("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _show_rich(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", header_style="bold", box=None)
    for i, column in enumerate(columns):
        numbers = all(isinstance(row[i], int) for row in rows) and bool(rows)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(text_of(value)) for value in row))
    Console().print(table)


def parse_pairs(words: Sequence[str], what: str) -> dict[str, str]:
    """Read `KEY=VALUE` words.

    Raises:
        CommandError: one is not of that form.
    """
    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise CommandError(f"{what} {word!r} is not KEY=VALUE", EXIT_USAGE)
        pairs[key] = value
    return pairs


def parse_time(text: str) -> int:
    """Milliseconds since the epoch, from a number or an ISO 8601 time (local without a zone).

    Raises:
        CommandError: it is neither.
    """
    if text.lstrip("-").isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        message = f"{text!r} is neither milliseconds nor a time such as 2026-03-01T12:00:00Z"
        raise CommandError(message, EXIT_USAGE) from None
    return int(moment.timestamp() * 1000)


def format_time(timestamp_ms: int) -> str:
    """A timestamp for people."""
    if timestamp_ms < 0:
        return "-"
    moment = datetime.fromtimestamp(timestamp_ms / 1000, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def printable(data: bytes | None) -> Any:
    """Bytes for JSON: text where they are UTF-8, else `{"base64": ...}`."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        import base64

        return {"base64": base64.b64encode(data).decode()}
