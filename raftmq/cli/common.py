"""What all commands share: options, tables or JSON, progress, errors told in one line, exit codes.

Exit codes: 0 done, 1 failed, 2 usage, 3 unknown outcome (the work may have been done), 130 ended by
Ctrl-C. No command shows a traceback for anything that can happen to an operator.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

import msgspec
import typer
from attrs import frozen

from raftmq.cli.console import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_UNKNOWN,
    EXIT_USAGE,
    note,
    out,
    out_json,
)
from raftmq.config import Address, ConfigError
from raftmq.errors import ErrorCode, RaftmqError
from raftmq.foreign import ascii_json, visible
from raftmq.ports import DiskError
from raftmq.types import TopicPartition
from raftmq_client.blocking.admin import Admin
from raftmq_client.core.security import Security
from raftmq_client.errors import (
    AuthenticationError,
    BrokerError,
    ClientError,
    ConnectionFailedError,
    Outcome,
    TimedOutError,
    UsageError,
)
from raftmq_client.options import parse_bootstrap
from raftmq_client.security_file import (
    AdminAccess,
    ClientAccess,
    SecurityFile,
    read_security_file,
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
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text, errors too.")]
AdminPorts = Annotated[
    str,
    typer.Option(
        "--admin",
        envvar="RAFTMQ_ADMIN",
        metavar="HOST:PORT,...",
        help="Admin ports to ask, also where no client port answers; the rest is found.",
    ),
]
SecurityOption = Annotated[
    Path | None,
    typer.Option(
        "--security",
        envvar="RAFTMQ_SECURITY",
        metavar="FILE",
        help="TLS, SASL and the admin port's token: TOML or Kafka's properties.",
    ),
]
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
    ErrorCode.TRANSACTIONAL_ID_NOT_FOUND: "`raftmq txn list` shows what there is.",
    ErrorCode.INVALID_CONFIG: "`raftmq topic describe --configs` shows names and values.",
    ErrorCode.INVALID_TOPIC_EXCEPTION: "Nobody writes to a view; `raftmq view list` shows them.",
}


class CommandError(RaftmqError):
    """A command cannot go on; `code` is its exit code, `name` the broker's word for it."""

    def __init__(
        self, message: str, code: int = EXIT_FAILED, *, name: str | None = None, hint: str = ""
    ) -> None:
        self.code = code
        self.name = name
        self.hint = hint
        super().__init__(message)


SHOWN_MAX: Final = 20
"""So many moves, or lines of what will happen, are shown to people."""
REFUSED_S: Final = 1.0
"""How long ports that refuse connections are tried: a broker that restarts is back in less."""
UNKNOWN_S: Final = 0.5
"""How long a topic is looked for that brokers do not know: it may be quite new."""
CONNECT_S: Final = 0.25
"""A host that takes longer to answer may be far away: the client knows how long to wait for it."""


def check_reachable(bootstrap: str, patience_s: float | None = None) -> None:
    """Check that a broker takes connections, so that no command waits long where all are refused.

    Raises:
        UsageError: no addresses.
        ConnectionFailedError: every address refuses, or is no host, until the time is over.
    """
    deadline = time.monotonic() + (REFUSED_S if patience_s is None else patience_s)
    addresses = parse_bootstrap(bootstrap)
    while True:
        reason = ""
        for host, port in addresses:
            try:
                socket.create_connection((host, port), CONNECT_S).close()
            except TimeoutError:
                return
            except (OSError, UnicodeError) as error:
                reason = getattr(error, "strerror", None) or str(error)
            else:
                return
        if time.monotonic() >= deadline:
            tried = ", ".join(f"{host}:{port}" for host, port in addresses)
            raise ConnectionFailedError(f"no broker answered: tried {tried} ({reason})")
        time.sleep(_AGAIN_S)


_AGAIN_S: Final = 0.1


def open_admin(bootstrap: str, timeout_s: float) -> Admin:
    """A client that administers the cluster; `with open_admin(...) as admin`.

    Raises:
        UsageError, ConnectionFailedError: as `check_reachable`.
    """
    check_reachable(bootstrap, min(REFUSED_S, timeout_s))
    return Admin(bootstrap, security=client_security(), timeout_ms=timeout_s * 1000)


@frozen
class _Chosen:
    file: SecurityFile = SecurityFile()
    security: Security | None = None


_NOTHING: Final = _Chosen()
_chosen: Final = ContextVar("security", default=_NOTHING)


@contextmanager
def secured_by(file: Path | None) -> Iterator[SecurityFile]:
    """Let all clients of a command, and those of admin ports, do as the file says; gives what it
    says. Every command that asks a cluster runs in this block.

    Raises:
        UsageError: the file, or one that it names, cannot be used.
    """
    said = SecurityFile() if file is None else read_security_file(file)
    shown = said.access.security()  # what cannot be loaded is told before anybody is asked
    said.admin.context()
    before = _chosen.set(_Chosen(said, shown))
    try:
        yield said
    finally:
        _chosen.reset(before)


def bootstrap_of(ctx: typer.Context, said: SecurityFile) -> str:
    """The brokers that a command asks first: as its words or the environment say, else the file."""
    given = str(ctx.params.get("bootstrap") or DEFAULT_BOOTSTRAP)
    source = ctx.get_parameter_source("bootstrap")
    is_said = source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")
    return given if is_said or not said.bootstrap else said.bootstrap


def client_security() -> Security | None:
    """What every client of a command takes as `security=`."""
    return _chosen.get().security


def client_access() -> ClientAccess:
    """The same as plain data, for processes elsewhere."""
    return _chosen.get().file.access


def admin_access() -> AdminAccess:
    """How admin ports are asked, as far as the file says."""
    return _chosen.get().file.admin


_as_json: Final = ContextVar("errors_as_json", default=False)


def tell_errors_as_json(wanted: bool) -> None:
    """Set how errors are shown: as a JSON object, or as a line for people."""
    _as_json.set(wanted)


def tells_errors_as_json() -> bool:
    """Whether an error is a JSON object."""
    return _as_json.get()


@contextmanager
def reported() -> Iterator[None]:
    """Turn errors into a line on standard error and an exit code."""
    try:
        yield
    except CommandError as error:
        end(str(error), error.code, error.hint, error.name)
    except UsageError as error:
        end(str(error), EXIT_USAGE)
    except ClientError as error:
        is_unknown = error.outcome is Outcome.UNKNOWN
        what = f"outcome unknown: {error}" if is_unknown else str(error)
        code = EXIT_UNKNOWN if is_unknown else EXIT_FAILED
        end(what, code, hint_for(error), code_name(error))
    except (RaftmqError, DiskError) as error:
        end(str(error), EXIT_FAILED)
    except TimeoutError as error:
        end(str(error), EXIT_UNKNOWN)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of the pipe has seen enough (`raftmq consume t | head`).
        sys.stderr.close()
        raise typer.Exit(0) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        end(f"{where}{error.strerror or error}", EXIT_FAILED)


def raise_failures(failures: Mapping[str, ClientError], of: int, what: str) -> None:
    """Raise the failures of some of several things, by name; nothing where there are none.

    Raises:
        ClientError: the only thing that was asked for failed.
        CommandError: names all failures; its outcome is unknown when that of one is.
    """
    if not failures:
        return
    if of == 1:
        raise next(iter(failures.values()))
    is_unknown = any(error.outcome is Outcome.UNKNOWN for error in failures.values())
    hints = dict.fromkeys(filter(None, map(hint_for, failures.values())))
    told = "; ".join(
        str(error) if name in str(error) else f"{name}: {error}" for name, error in failures.items()
    )
    names = {code_name(error) for error in failures.values()}
    raise CommandError(
        f"{len(failures)} of {of} {what}: {told}",
        EXIT_UNKNOWN if is_unknown else EXIT_FAILED,
        name=names.pop() if len(names) == 1 else None,
        hint=" ".join(hints),
    )


def code_name(error: ClientError) -> str | None:
    """A broker's code by name, or None where no broker gave one."""
    return error.code.name if isinstance(error, BrokerError) else None


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


def end(message: str, code: int, hint: str = "", name: str | None = None) -> NoReturn:
    """Show an error, as a line or as a JSON object, and end the command with `code`."""
    if tells_errors_as_json():
        outcome = Outcome.UNKNOWN if code == EXIT_UNKNOWN else Outcome.FAILED
        told = {"message": message, "code": name, "outcome": outcome.value, "hint": hint or None}
        note(ascii_json(msgspec.json.encode({"error": told})))
    else:
        note(f"raftmq: {visible(message)}")
        if hint:
            note(hint)
    raise typer.Exit(code) from None


def hint_for(error: ClientError) -> str:
    """What to do about an error, where that is known; else empty."""
    if isinstance(error, BrokerError):
        return HINTS.get(error.code, "")
    if ErrorCode.UNKNOWN_TOPIC_OR_PARTITION.name in str(error):  # brokers said so until the end
        return HINTS[ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    if isinstance(error, AuthenticationError):
        return (
            "--security FILE, or RAFTMQ_SECURITY, says who you are and whom you trust: "
            "docs/security.md."
        )
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


def out_first(lines: Sequence[str]) -> None:
    """Print the first lines, and how many more there are."""
    for line in lines[:SHOWN_MAX]:
        out(line)
    out_left(len(lines))


def out_left(count: int) -> None:
    """Say how many there are of what only the first were shown of, where there are more."""
    if count > SHOWN_MAX:
        out(f"... and {count - SHOWN_MAX} more (--json shows all)")


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

    console = Console()
    cells = [list(columns), *([text_of(value) for value in row] for row in rows)]
    widths = column_widths(cells, console.width)
    table = Table(
        title=title or None,
        title_justify="left",
        header_style="bold",
        box=None,
        padding=(0, _GAP, 0, 0),
        pad_edge=False,
    )
    for i, column in enumerate(columns):
        numbers = all(isinstance(row[i], int) for row in rows) and bool(rows)
        justify: Literal["right", "left"] = "right" if numbers else "left"
        table.add_column(column, justify=justify, overflow="fold", width=widths[i])
    for row in rows:
        table.add_row(*(Text(text_of(value)) for value in row))
    console.print(table)


_GAP: Final = 2
"""Spaces between columns."""


_NARROW: Final = 12
"""A column as wide as this still reads well when its words are broken."""


def column_widths(cells: Sequence[Sequence[str]], room: int) -> list[int]:
    """How wide columns are within `room` characters.

    The widest give way first, none below its longest word while another still can, and the first
    column, which names what a row is about, after the others.
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    floors = [
        max(len(word) for cell in column for word in (cell.split() or [""]))
        for column in zip(*cells, strict=True)
    ]
    excess = sum(widths) + _GAP * (len(widths) - 1) - room
    while excess > 0 and max(widths) > 1:
        can = [i for i, width in enumerate(widths) if width > floors[i]]
        others = [i for i in range(1, len(widths)) if widths[i] > _NARROW]
        widest = max(can or others or range(len(widths)), key=widths.__getitem__)
        widths[widest] -= 1
        excess -= 1
    return widths


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


def partitions_of(admin: Admin, topic: str) -> list[TopicPartition]:
    """The partitions that a topic lists."""
    return [TopicPartition(topic, item.partition) for item in admin.topic(topic).partitions]


def known_offsets(
    admin: Admin, partitions: Iterable[TopicPartition], which: int, *, isolation: int = 0
) -> dict[TopicPartition, int]:
    """Earliest or latest offsets, in few requests; partitions without a live leader, or gone, are
    left out: a table of a cluster in trouble is when it is read most."""
    wanted = list(partitions)
    if not wanted:
        return {}
    info = admin.cluster(sorted({key.topic for key in wanted}))
    alive = {broker.node_id for broker in info.brokers}
    led = {
        TopicPartition(topic.name, item.partition)
        for topic in info.topics
        for item in topic.partitions
        if item.leader in alive
    }
    try:
        found = admin.list_offsets(
            {key: which for key in wanted if key in led}, isolation=isolation
        )
    except ClientError as error:
        if isinstance(error, BrokerError) and not error.retriable:
            raise
        return {}  # leaders are moving: the table shows dashes rather than nothing
    return {key: item.offset for key, item in found.items()}


class Bar:
    """A progress bar on a terminal's standard error; elsewhere only the lines of `say`."""

    def __init__(self, progress: Any, name: str) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task(name, total=None, told="")

    def name(self, text: str) -> None:
        """Name the present step."""
        if self._progress is not None:
            self._progress.update(self._task, description=text)

    def update(self, done: int, of: int, told: str) -> None:
        """Show how far it is."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=of, told=told)

    def say(self, text: str) -> None:
        """Write a line for people."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            note(text)


@contextmanager
def progress_bar(name: str, as_json: bool) -> Iterator[Bar]:
    """A bar while the block runs; none with JSON, or where standard error is no terminal."""
    if as_json or not sys.stderr.isatty():
        yield Bar(None, name)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[told]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Bar(progress, name)


POLL_S: Final = 0.25
LOST_S: Final = 30.0
"""When no node has answered for so long it is not known how far anything is."""
RATE_AFTER_S: Final = 2.0
"""Before that a guess of how long it takes would be worth nothing."""
WAIT_S: Final = 24 * 3600.0

NoWait = Annotated[bool, typer.Option("--no-wait", help="Begin it and return at once.")]
Wait = Annotated[float, typer.Option("--wait", metavar="SECONDS", help="Watch it so long.", min=0)]


class Progress:
    """How far something is: in words, what is left as a number, and what does not get on."""

    def __init__(self, text: str, left: int, *, is_done: bool, waiting: Sequence[str] = ()) -> None:
        """`text` is "" where nothing is to be shown, `left` 0 where nobody can count it."""
        self.text = text
        self.left = left
        self.is_done = is_done
        self.waiting = waiting

    def lines(self, time_left: str, waiting_max: int) -> list[str]:
        """What people are shown."""
        if not self.text:
            return []
        lines = [self.text + time_left, *(f"  {line}" for line in self.waiting[:waiting_max])]
        if len(self.waiting) > waiting_max:
            lines.append(f"  and {len(self.waiting) - waiting_max} more wait")
        return lines


def watch(
    look: Callable[[], Progress],
    time_left: Callable[[Progress, float], str],
    wait_s: float,
    *,
    unfinished: str,
    waiting_max: int,
    as_json: bool,
) -> Progress:
    """Show how far it is until it is done, and return what the last look saw.

    Args:
        look: asks the cluster.
        time_left: how long it may still take, in words, of what was seen at a time.
        unfinished: what is told where the wait is over before.
        waiting_max: so much of what does not get on is named.

    Raises:
        CommandError: it is not done in time, nobody answers, or `look` says that it cannot end.
    """
    began = heard = time.monotonic()
    shown = ""
    while True:
        now = time.monotonic()
        try:
            progress = look()
            heard = now
        except CommandError as error:
            if error.code != EXIT_UNKNOWN or now - heard > LOST_S:
                raise
        else:
            text = "; ".join(line.strip() for line in progress.lines("", waiting_max))
            left = time_left(progress, now)
            if text != shown and not as_json:
                for line in progress.lines(left, waiting_max):
                    out(line)
            shown = text
            if progress.is_done:
                return progress
        if now - began >= wait_s:
            note("The cluster goes on by itself; run the same again to watch it.")
            raise CommandError(f"{unfinished}: {shown}", EXIT_UNKNOWN)
        time.sleep(POLL_S)


class Pace:
    """Guesses when something will be done, by how fast it has become less so far."""

    def __init__(self) -> None:
        self._began = 0.0
        self._first: int | None = None

    def left_text(self, left: int, now: float) -> str:
        """How long it may still take, in words; "" when nobody knows."""
        if self._first is None:
            self._first = left
            self._began = now
        return time_left_text(self._first - left, left, now - self._began)


def time_left_text(done: float, left: float, passed_s: float) -> str:
    """How long it may still take, in words; "" when nobody knows."""
    if done <= 0 or not left or passed_s < RATE_AFTER_S:
        return ""
    seconds = passed_s * left / done
    if seconds < 90:
        return f" (about {max(1, round(seconds))} s to go)"
    if seconds < 90 * 60:
        return f" (about {round(seconds / 60)} min to go)"
    return f" (about {seconds / 3600:.1f} h to go)"
