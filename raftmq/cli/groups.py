"""`raftmq group ...`: consumer groups, their members and how far behind they are.

Columns are those of kafka-consumer-groups.sh. A dash stands for what nobody could tell: a partition
without a leader, an offset never committed.
"""

from __future__ import annotations

from typing import Annotated

import typer

from raftmq.cli import completion
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bootstrap,
    CommandError,
    Timeout,
    open_admin,
    reported,
    show,
    show_json,
)
from raftmq.cli.console import out
from raftmq.cli.offsets import known_offsets
from raftmq.cli.seek import seek
from raftmq.types import TopicPartition
from raftmq_client.blocking.admin import Admin
from raftmq_client.core.admin import LATEST
from raftmq_client.core.group_admin import GroupDescription

group_app = typer.Typer(help="Consumer groups.", no_args_is_help=True)
group_app.command()(seek)

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
    "CONSUMER-ID",
    "HOST",
    "CLIENT-ID",
)


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
        show(LAG_COLUMNS, rows, as_json=False)


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
    rows: list[tuple[object, ...]] = []
    for key in keys:
        member, current, end = readers.get(key), committed.get(key), ends.get(key)
        lag = end - current if end is not None and current is not None else None
        who = (member.member_id, member.client_host, member.client_id) if member else (None,) * 3
        rows.append((description.group, key.topic, key.partition, current, end, lag, *who))
    return rows
