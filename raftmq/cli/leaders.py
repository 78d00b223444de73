"""`raftmq leader ...`: who leads which partition, and moving leaderships.

`list` and `balance` speak the Kafka protocol (Metadata, ElectLeaders) and work with any brokers;
`transfer` names a leader of one's own choice, which only raftmq's admin port understands.
"""

from __future__ import annotations

from typing import Annotated, Final

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
from raftmq.cli.main import EXIT_FAILED, EXIT_UNKNOWN
from raftmq.cli.nodes import AdminPort
from raftmq.errors import ErrorCode
from raftmq.types import TopicPartition
from raftmq_client.blocking.admin import Admin
from raftmq_client.errors import BrokerError

leader_app = typer.Typer(help="Leaders of partitions.", no_args_is_help=True)

COLUMNS: Final = ("Topic", "Partition", "Leader", "Preferred", "Replicas", "Isr")
MOVE_COLUMNS: Final = ("Topic", "Partition", "From", "To", "Result")
PARTITIONS_PER_CALL: Final = 50
"""So many leaderships move at once, and each costs its producers some milliseconds."""
_MOVED: Final = (ErrorCode.NONE, ErrorCode.ELECTION_NOT_NEEDED)


@leader_app.command("list")
def list_leaders(
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "-t", "--topic", autocompletion=completion.topics, help="Only this topic; repeatable."
        ),
    ] = None,
    unbalanced: Annotated[
        bool, typer.Option("--unbalanced", help="Only where another than the preferred one leads.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """List partitions with their leaders.

    Examples: raftmq leader list --unbalanced
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        rows = _rows(admin, topic)
        show(COLUMNS, [r for r in rows if not unbalanced or r[2] != r[3]], as_json=as_json)


@leader_app.command()
def balance(
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "-t", "--topic", autocompletion=completion.topics, help="Only this topic; repeatable."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would move; change nothing.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Give preferred leaders their partitions back, now; the cluster does it by itself in a while.

    Ends with 1 when a leadership could not be moved.

    Examples: raftmq leader balance --dry-run
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        wanted = [row for row in _rows(admin, topic) if row[2] != row[3] and row[3] is not None]
        results: dict[TopicPartition, str] = {}
        failed = 0
        for start in range(0, 0 if dry_run else len(wanted), PARTITIONS_PER_CALL):
            part = wanted[start : start + PARTITIONS_PER_CALL]
            names = [TopicPartition(str(row[0]), int(str(row[1]))) for row in part]
            for name, code in admin.elect_leaders(names).items():
                results[name] = "moved" if code is ErrorCode.NONE else code.name.lower()
                failed += code not in _MOVED
        moves = [
            (
                *(row[0], row[1], row[2], row[3]),
                results.get(TopicPartition(str(row[0]), int(str(row[1]))), "would move"),
            )
            for row in wanted
        ]
        if as_json:
            show_json([dict(zip(MOVE_COLUMNS, row, strict=True)) for row in moves])
        elif moves:
            show(MOVE_COLUMNS, moves, as_json=False)
        else:
            out("every partition is led by its preferred leader")
        if failed:
            raise typer.Exit(EXIT_FAILED)


@leader_app.command()
def transfer(
    topic: Annotated[
        str,
        typer.Argument(metavar="TOPIC", autocompletion=completion.topics, help="The topic's name."),
    ],
    partition: Annotated[int, typer.Argument(metavar="PARTITION", help="Its number.", min=0)],
    node: Annotated[
        int,
        typer.Argument(
            metavar="NODE",
            autocompletion=completion.nodes,
            help="An in-sync replica's node.",
            min=0,
        ),
    ],
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Make NODE the leader of a partition, and its preferred leader from now on.

    Examples: raftmq leader transfer orders 0 2
    """
    with reported():
        with open_admin(bootstrap, timeout) as admin:
            port = AdminPort.find(admin, timeout)
        if port is None:
            raise CommandError("no node of this cluster tells of an admin port")
        wish = {
            "topic": topic,
            "partition": partition,
            "to": node,
            "timeout_ms": round(timeout * 1000),
        }
        answer = port.post("/leaders/transfer", wish)
        code = answer.get("code", "UNKNOWN_SERVER_ERROR")
        if as_json:
            show_json(answer)
        if code != "NONE":
            message = answer.get("message") or answer.get("error") or code
            is_unknown = code == "REQUEST_TIMED_OUT"
            raise CommandError(f"{message} ({code})", EXIT_UNKNOWN if is_unknown else EXIT_FAILED)
        if not as_json:
            out(answer["message"])


def _rows(admin: Admin, topics: list[str] | None) -> list[tuple[object, ...]]:
    info = admin.cluster(topics)
    rows: list[tuple[object, ...]] = []
    for topic in info.topics:
        if topic.error_code:
            raise BrokerError(topic.error_code, about=f"topic {topic.name!r}")
        for item in sorted(topic.partitions, key=lambda one: one.partition):
            preferred = item.replicas[0] if item.replicas else None
            rows.append(
                (
                    *(topic.name, item.partition, item.leader, preferred),
                    *(list(item.replicas), list(item.in_sync)),
                )
            )
    return rows
