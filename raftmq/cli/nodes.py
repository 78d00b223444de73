"""`raftmq node ...` and `raftmq leader ...`: which nodes are there, and which of them lead what;
replacing a node that is gone for good, and moving leaderships.

What only raftmq knows (storage ids, who votes on metadata, what is being replaced, a leader of
one's own choice) is asked of the admin port of any live node, whose address a broker's
configuration names. `node list` shows what the Kafka protocol tells where there is no such port;
`leader list` and `leader balance` speak that protocol (Metadata, ElectLeaders) with any brokers.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

import typer

from raftmq.cli import completion
from raftmq.cli.admin_port import AdminPort, give_order, open_admin_port
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    LOST_S,
    POLL_S,
    AsJson,
    Bootstrap,
    CommandError,
    Timeout,
    Wait,
    open_admin,
    out_first,
    reported,
    show,
    show_json,
)
from raftmq.cli.configs import node_config_app
from raftmq.cli.console import EXIT_FAILED, EXIT_UNKNOWN, note, out
from raftmq.cli.node_changes import add, cordon, drain, maintenance, remove, uncordon
from raftmq.errors import ErrorCode
from raftmq.types import TopicPartition
from raftmq_client.blocking.admin import Admin
from raftmq_client.errors import BrokerError

node_app = typer.Typer(help="Nodes (brokers).", no_args_is_help=True)
node_app.add_typer(node_config_app, name="config")
for _change in (add, drain, remove, cordon, uncordon, maintenance):
    node_app.command()(_change)

NODE_COLUMNS: Final = (
    "NodeId",
    "Host",
    "Port",
    "Rack",
    "StorageId",
    "Role",
    "State",
    "Controller",
    "Leaders",
    "Replicas",
)


@node_app.command("list")
def list_nodes(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """List nodes: role in the metadata group, live or fenced, what they lead and keep.

    Examples: raftmq node list --json
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        found = AdminPort.find(admin, timeout)
        told = None if found is None else found.get("/nodes")
        rows = _rows_of_cluster(admin) if told is None else [*map(_row, _nodes(told))]
        show(NODE_COLUMNS, rows, as_json=as_json)


@node_app.command("replace")
def replace_node(
    old: Annotated[
        int,
        typer.Argument(
            metavar="OLD", autocompletion=completion.nodes, help="The node that is gone.", min=0
        ),
    ],
    new: Annotated[
        int,
        typer.Argument(metavar="NEW", autocompletion=completion.nodes, help="A live node.", min=0),
    ],
    even_if_alive: Annotated[
        bool, typer.Option("--even-if-alive", help="Empty OLD while it still runs.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show each step and its quorum; change nothing.")
    ] = False,
    wait: Wait = 3600.0,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Let NEW take the place of OLD: as a voter of metadata, and for every partition replica.

    The cluster does it by itself once begun; the command shows how far it is, may be ended at any
    time, and run again to go on watching. NEW has joined before, with the `peers` of this cluster.

    Examples: raftmq node replace 1 4 --dry-run
    """
    with reported():
        port = open_admin_port(bootstrap, timeout)
        asked = {
            "old_id": old,
            "new_id": new,
            "even_if_alive": even_if_alive,
            "dry_run": dry_run,
        }
        answer = give_order(
            port, "/nodes/replace", asked, timeout, as_json=as_json, ends_here=dry_run
        )
        if not as_json:
            out_first(answer["steps"])
            out(f"replacing node {old} by node {new}: {answer['message']}")
        if not dry_run:
            _watch(port, old, wait, as_json)


def _watch(port: AdminPort, old: int, wait: float, as_json: bool) -> None:
    """Show how far a replacement is until it is done."""
    deadline = time.monotonic() + wait
    heard = seen = time.monotonic()
    shown = ""
    while True:
        try:
            told = port.get("/nodes")
            heard = time.monotonic()
        except CommandError:
            if time.monotonic() - heard > LOST_S:
                raise
            told = {"replacements": []}
        row = next((r for r in told["replacements"] if r["old_id"] == old), None)
        if row is None and time.monotonic() - seen > LOST_S:
            raise CommandError(f"no node knows of a replacement of node {old} any more")
        if row is not None:
            seen = time.monotonic()
            text = _progress_text(row)
            if text != shown and not as_json:
                out(text)
            shown = text
            if row["is_done"] or row["waits_for_end"]:
                if as_json:
                    show_json(row)
                if row["is_done"] or _is_live(told, old):
                    return
        if time.monotonic() >= deadline:
            note("The cluster goes on by itself; run the same again to watch it.")
            raise CommandError(f"node {old} is not replaced yet: {shown}", EXIT_UNKNOWN)
        time.sleep(POLL_S)


def _is_live(told: dict[str, Any], node_id: int) -> bool:
    return any(n["node_id"] == node_id and n["state"] == "live" for n in told["nodes"])


def _progress_text(row: dict[str, Any]) -> str:
    old, new = row["old_id"], row["new_id"]
    if row["is_done"]:
        return f"done: node {new} has taken the place of node {old}, which is forgotten"
    if row["waits_for_end"]:
        return f"node {old} holds nothing any more; it is forgotten once it has been stopped"
    voting = "metadata: settled" if row["is_voting_settled"] else "metadata: under way"
    text = f"{voting}; partitions to move: {row['partitions']}"
    if row["stuck"]:
        names = ", ".join(row["stuck"][:5])
        text += f", of which {len(row['stuck'])} have no leader ({names})"
    return text


def _nodes(told: dict[str, Any]) -> list[dict[str, Any]]:
    for node in told["nodes"]:
        node["is_controller"] = node["node_id"] == told["controller_id"]
    nodes: list[dict[str, Any]] = told["nodes"]
    return nodes


def _row(node: dict[str, Any]) -> tuple[object, ...]:
    others = (node[key] for key in sorted(node) if key.startswith("client."))
    host, _, port = (node.get("client_address") or next(others, "")).rpartition(":")
    return (
        node["node_id"],
        host or None,
        int(port) if port else None,
        node.get("rack"),
        node.get("storage_id"),
        node["role"],
        _state(node),
        node["is_controller"],
        node["leaders"],
        node["replicas"],
    )


def _state(node: dict[str, Any]) -> str:
    wanted = node.get("node_state", "active")
    return str(node["state"]) if wanted == "active" else f"{node['state']}, {wanted}"


def _rows_of_cluster(admin: Admin) -> list[tuple[object, ...]]:
    info = admin.cluster()
    partitions = [item for topic in info.topics for item in topic.partitions]
    return [
        (
            broker.node_id,
            broker.host,
            broker.port,
            broker.rack,
            None,
            None,
            "live",
            broker.node_id == info.controller,
            sum(item.leader == broker.node_id for item in partitions),
            sum(broker.node_id in item.replicas for item in partitions),
        )
        for broker in sorted(info.brokers, key=lambda item: item.node_id)
    ]


leader_app = typer.Typer(help="Leaders of partitions.", no_args_is_help=True)

LEADER_COLUMNS: Final = ("Topic", "Partition", "Leader", "Preferred", "Replicas", "Isr")
MOVE_COLUMNS: Final = ("Topic", "Partition", "From", "To", "Result")
PARTITIONS_PER_CALL: Final = 50
"""How many leaderships move at once; each move costs its producers some milliseconds."""
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
        rows = _leader_rows(admin, topic)
        show(LEADER_COLUMNS, [r for r in rows if not unbalanced or r[2] != r[3]], as_json=as_json)


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
        wanted = [
            row for row in _leader_rows(admin, topic) if row[2] != row[3] and row[3] is not None
        ]
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
        port = open_admin_port(bootstrap, timeout)
        asked = {"topic": topic, "partition": partition, "to": node}
        answer = give_order(
            port, "/leaders/transfer", asked, timeout, as_json=as_json, ends_here=True
        )
        if not as_json:
            out(answer["message"])


def _leader_rows(admin: Admin, topics: list[str] | None) -> list[tuple[object, ...]]:
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
