"""`raftmq group ...`: consumer groups, their members and lags, and moving their offsets.

Columns are those of kafka-consumer-groups.sh. A dash stands for what is not known: a partition
without a leader, an offset never committed.

`seek` does as kafka-consumer-groups.sh --reset-offsets: offsets beyond a log's ends become its
ends, a time after the last record means the end, and a group with members is refused, since they
would commit over what was set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, TypeVar

import typer
from attrs import frozen

from raftmq.cli import completion
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bootstrap,
    CommandError,
    Timeout,
    known_offsets,
    open_admin,
    parse_time,
    reported,
    show,
    show_json,
)
from raftmq.cli.console import EXIT_USAGE, out
from raftmq.errors import ErrorCode
from raftmq.types import TopicPartition
from raftmq_client.blocking.admin import Admin
from raftmq_client.core.admin import EARLIEST, LATEST, READ_COMMITTED
from raftmq_client.core.group_admin import CommittedOffset, GroupDescription
from raftmq_client.errors import BrokerError

group_app = typer.Typer(help="Consumer groups.", no_args_is_help=True)

Group = Annotated[
    str, typer.Argument(metavar="GROUP", autocompletion=completion.groups, help="The group's name.")
]
LIST_COLUMNS = ("GROUP", "TYPE", "STATE", "PROTOCOL", "COORDINATOR")
LAG_COLUMNS = (
    "GROUP",
    "TOPIC",
    "PARTITION",
    "CURRENT-OFFSET",
    "LOG-END-OFFSET",
    "LAG",
    "STABLE-LAG",
    "CONSUMER-ID",
    "HOST",
    "CLIENT-ID",
)
SEEK_COLUMNS: Final = ("GROUP", "TOPIC", "PARTITION", "CURRENT-OFFSET", "NEW-OFFSET")
_ENDS: Final = {"earliest": EARLIEST, "latest": LATEST}
_STABLE_LAG: Final = LAG_COLUMNS.index("STABLE-LAG")
"""To the last stable offset, where consumers of committed records wait; shown to people where a
transaction makes a difference."""
_T = TypeVar("_T")
_WITHOUT_MEMBERS: Final = ("Empty", "Dead")


@frozen
class _Target:
    """Where to: an end or a time (`timestamp`), an `offset`, or so many records on (`shift`)."""

    timestamp: int | None = None
    offset: int | None = None
    shift: int | None = None


@group_app.command()
def seek(
    group: Annotated[
        str,
        typer.Argument(metavar="GROUP", autocompletion=completion.groups, help="The group's name."),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="earliest|latest|TIME|OFFSET",
            help="TIME is ISO 8601 (2026-03-01T12:00:00Z), or @ and milliseconds.",
        ),
    ] = None,
    shift: Annotated[
        int | None, typer.Option(metavar="N", help="So many records on; back when negative.")
    ] = None,
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "-t",
            "--topic",
            metavar="TOPIC[:PARTITION,...]",
            autocompletion=completion.topics,
            help="Repeatable; default: all that the group has offsets of.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the new offsets; change nothing.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Move a group's committed offsets. Its members must be stopped.

    Examples: raftmq group seek billing --to 2026-03-01T12:00:00Z -t orders:0,1 --dry-run
    """
    with reported():
        target = _target(to, shift)
        scopes = [parse_scope(word) for word in topic or ()]
        with open_admin(bootstrap, timeout) as admin:
            if admin.describe_group(group).state not in _WITHOUT_MEMBERS:
                raise BrokerError(
                    ErrorCode.NON_EMPTY_GROUP, "it has members", about=f"group {group!r}"
                )
            current = {key: item.offset for key, item in admin.group_offsets(group).items()}
            keys = _partitions(admin, scopes) if scopes else sorted(current)
            if not keys:
                raise CommandError(
                    f"group {group!r} has no offsets; -t names topics to give it some"
                )
            found = _find(admin, keys, target, current)
            if not dry_run:
                admin.alter_group_offsets(
                    group, {key: CommittedOffset(offset) for key, offset in found.items()}
                )
        rows = [(group, *key, current.get(key), found[key]) for key in keys]
        show(SEEK_COLUMNS, rows, as_json=as_json)


def _target(to: str | None, shift: int | None) -> _Target:
    if (to is None) == (shift is None):
        raise CommandError("where to? give one of --to and --shift", EXIT_USAGE)
    if to is None:
        return _Target(shift=shift)
    if to in _ENDS:
        return _Target(timestamp=_ENDS[to])
    if to.isdecimal():
        return _Target(offset=int(to))
    moment = parse_time(to.removeprefix("@"))
    if moment < 0:
        raise CommandError(f"--to {to!r}: neither offsets nor times are negative", EXIT_USAGE)
    return _Target(timestamp=moment)


def parse_scope(word: str) -> tuple[str, list[int] | None]:
    """A topic and its partitions; None: all of them.

    Raises:
        CommandError: the word is not of that form.
    """
    name, colon, numbers = word.partition(":")
    parts = numbers.split(",") if colon else []
    if not name or not all(part.isdecimal() for part in parts):
        raise CommandError(f"-t {word!r} is not TOPIC[:PARTITION,...]", EXIT_USAGE)
    return name, [int(part) for part in parts] if colon else None


def _partitions(
    admin: Admin, scopes: Sequence[tuple[str, list[int] | None]]
) -> list[TopicPartition]:
    keys: set[TopicPartition] = set()
    for name, numbers in scopes:
        if numbers is None:
            numbers = [item.partition for item in admin.topic(name).partitions]
        keys.update(TopicPartition(name, number) for number in numbers)
    return sorted(keys)


def _find(
    admin: Admin,
    keys: Sequence[TopicPartition],
    target: _Target,
    current: dict[TopicPartition, int],
) -> dict[TopicPartition, int]:
    """The new offset of each partition, within its log."""
    lows = admin.list_offsets(dict.fromkeys(keys, EARLIEST))
    highs = admin.list_offsets(dict.fromkeys(keys, LATEST))
    if target.timestamp is not None:
        times = admin.list_offsets(dict.fromkeys(keys, target.timestamp))
        wanted = {
            key: item.offset if item.offset >= 0 else highs[key].offset
            for key, item in times.items()
        }
    elif target.shift is not None:
        missing = [str(key) for key in keys if key not in current]
        if missing:
            raise CommandError(f"no offset to shift: {', '.join(missing)}; --to sets one")
        wanted = {key: current[key] + target.shift for key in keys}
    else:
        assert target.offset is not None
        wanted = dict.fromkeys(keys, target.offset)
    return {key: min(max(wanted[key], lows[key].offset), highs[key].offset) for key in keys}


@group_app.command("list")
def list_groups(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """List groups.

    Examples: raftmq group list
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        rows = [
            (item.group, item.group_type, item.state, item.protocol_type, item.coordinator)
            for item in admin.list_groups()
        ]
        show(LIST_COLUMNS, rows, as_json=as_json)


@group_app.command()
def describe(
    group: Group,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Show a group's committed offsets, lag and members.

    Examples: raftmq group describe billing
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        description = admin.describe_group(group)
        committed = {key: item.offset for key, item in admin.group_offsets(group).items()}
        if description.state == "Dead" and not committed:
            raise CommandError(f"no group {group!r}; `raftmq group list` shows what there is")
        rows = _rows(admin, description, committed)
        if as_json:
            show_json(
                {
                    "GROUP": group,
                    "STATE": description.state,
                    "ASSIGNMENT-STRATEGY": description.protocol,
                    "COORDINATOR": admin.coordinator(group),
                    "MEMBERS": len(description.members),
                    "PARTITIONS": [dict(zip(LAG_COLUMNS, row, strict=True)) for row in rows],
                }
            )
            return
        out(
            f"STATE: {description.state}  ASSIGNMENT-STRATEGY: {description.protocol or '-'}  "
            f"COORDINATOR: {admin.coordinator(group)}  #MEMBERS: {len(description.members)}"
        )
        if all(row[_STABLE_LAG] == row[_STABLE_LAG - 1] for row in rows):
            columns = _without(_STABLE_LAG, LAG_COLUMNS)
            show(columns, [_without(_STABLE_LAG, row) for row in rows], as_json=False)
        else:
            show(LAG_COLUMNS, rows, as_json=False)


def _without(index: int, row: tuple[_T, ...]) -> tuple[_T, ...]:
    return (*row[:index], *row[index + 1 :])


@group_app.command()
def delete(
    group: Group,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Forget a group without members, and its committed offsets.

    Examples: raftmq group delete billing
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        admin.delete_group(group)
        if as_json:
            show_json({"Deleted": [group]})
        else:
            out(f"group {group} deleted")


def _rows(
    admin: Admin, description: GroupDescription, committed: dict[TopicPartition, int]
) -> list[tuple[object, ...]]:
    readers = {key: member for member in description.members for key in member.assignment}
    keys = sorted(dict.fromkeys([*committed, *readers]))
    ends = known_offsets(admin, keys, LATEST)
    stable = known_offsets(admin, keys, LATEST, isolation=READ_COMMITTED)
    rows: list[tuple[object, ...]] = []
    for key in keys:
        member, current, end = readers.get(key), committed.get(key), ends.get(key)
        lag = _less(end, current)
        # Asked for later, it may be above the end that was told, where nothing holds it.
        is_held = end is not None and stable.get(key, end) < end
        stable_lag = _less(max(stable[key], current or 0), current) if is_held else lag
        who = (member.member_id, member.client_host, member.client_id) if member else (None,) * 3
        rows.append(
            (description.group, key.topic, key.partition, current, end, lag, stable_lag, *who)
        )
    return rows


def _less(end: int | None, current: int | None) -> int | None:
    return None if end is None or current is None else end - current
