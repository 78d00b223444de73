"""`raftmq node add`, `drain`, `remove`, `cordon`, `uncordon`, `maintenance`: brokers come and go.

Each posts one change to the admin port of a live node, which has the controller judge and make it;
the cluster then does the work by itself. The command shows how far that is, and when it may be
over, until it is done; it may be ended at any time, and run again to go on watching.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from raftmq.cli import completion
from raftmq.cli.admin_port import AdminPort, give_order, open_admin_port
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    WAIT_S,
    AsJson,
    Bootstrap,
    CommandError,
    NoWait,
    Pace,
    Progress,
    Timeout,
    Wait,
    out_first,
    reported,
    show_json,
    watch,
)
from raftmq.cli.console import EXIT_USAGE, out

STUCK_SHOWN_MAX: Final = 5

NodeIds = Annotated[
    list[int],
    typer.Argument(metavar="ID", autocompletion=completion.nodes, help="Nodes.", min=0),
]
NodeId = Annotated[
    int, typer.Argument(metavar="ID", autocompletion=completion.nodes, help="The node.", min=0)
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would happen; change nothing.")]
Voters = Annotated[
    int | None,
    typer.Option(
        "--voters",
        metavar="N",
        help="How many nodes should vote on metadata from now on: 1, 3, 5, 7 or 9.",
    ),
]


class NodesAnswer:
    """What a node answers about all nodes and the moves."""

    def __init__(self, port: AdminPort) -> None:
        pages = port.get("/nodes"), port.get("/moves")
        self.nodes: dict[int, dict[str, Any]] = {n["node_id"]: n for n in pages[0]["nodes"]}
        self.changes: dict[int, dict[str, Any]] = {r["node_id"]: r for r in pages[0]["changes"]}
        self.is_voting_settled = bool(pages[0]["is_voting_settled"])
        self.moves: list[dict[str, Any]] = pages[1]["moves"]

    def state(self, node_id: int) -> str | None:
        """The state of a node, None when it is not known."""
        state = self.nodes.get(node_id, {}).get("node_state")
        return None if state is None else str(state)

    @property
    def votes(self) -> str:
        """Who votes."""
        ids = [str(n) for n, node in self.nodes.items() if node["role"] == "voter"]
        return ", ".join(ids)


Look = Callable[[NodesAnswer], Progress]


def add(
    ids: NodeIds,
    voters: Voters = None,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    wait: Wait = WAIT_S,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Let new nodes take data: they get their share of the partitions, and votes if more are due.

    A new node has joined before, with the `peers` and `cluster_id` of this cluster.

    Examples: raftmq node add 4 5 --dry-run
    """

    def look(answer: NodesAnswer) -> Progress:
        moves = [
            m for m in answer.moves if any(n in m["after"] and n not in m["before"] for n in ids)
        ]
        is_in = all(answer.state(n) not in (None, "new") for n in ids)
        voting = f"metadata voters: {answer.votes}"
        if not answer.is_voting_settled:
            voting += " (more to come)"
        text = f"{voting}; partitions still to come: {len(moves)}"
        if is_in and answer.is_voting_settled and not moves:
            text = f"done: {_named(ids)} part of the cluster; {voting}"
            return Progress(text, 0, is_done=True)
        return Progress(text, len(moves), is_done=False)

    asked = {"ids": ids, "change": "add", "voters": voters}
    _run(asked, look, bootstrap, timeout, wait, dry_run=dry_run, no_wait=no_wait, as_json=as_json)


def drain(
    ids: NodeIds,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Stop draining; what has not moved stays.")
    ] = False,
    voters: Voters = None,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    wait: Wait = WAIT_S,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Move everything off nodes: leaderships, groups, replicas, and votes on metadata.

    Examples: raftmq node drain 3; raftmq node drain 3 --cancel
    """

    def look(answer: NodesAnswer) -> Progress:
        rows = [answer.changes[n] for n in ids if n in answer.changes]
        for node_id in ids:
            if answer.state(node_id) not in (None, "draining"):
                raise CommandError(f"node {node_id} does not drain any more: it was cancelled")
        if all(row["is_empty"] for row in rows):
            removal = " ".join(f"`raftmq node remove {n}`" for n in ids if n in answer.nodes)
            text = f"done: {_named(ids)} empty; stop it, then {removal}"
            return Progress(text, 0, is_done=True)
        return Progress(
            "; ".join(_left_text(row) for row in rows if not row["is_empty"]),
            sum(row["partitions"] for row in rows),
            is_done=False,
            waiting=[
                f"{item['topic']}-{item['partition']} waits: {item['reason']}"
                for row in rows
                for item in row["stuck"]
            ],
        )

    def look_back(answer: NodesAnswer) -> Progress:
        moves = [m for m in answer.moves if m["origin"] == "drain" and set(ids) & set(m["before"])]
        text = f"partitions on their way back: {len(moves)}"
        if not moves:
            text = f"done: {_named(ids)} active again, with what had not moved"
        return Progress(text, len(moves), is_done=not moves)

    asked = {"ids": ids, "change": "cancel-drain" if cancel else "drain", "voters": voters}
    _run(
        asked,
        look_back if cancel else look,
        *(bootstrap, timeout, wait),
        dry_run=dry_run,
        no_wait=no_wait,
        as_json=as_json,
    )


def remove(
    node_id: NodeId,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    wait: Wait = WAIT_S,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Forget a node for good that is stopped and holds nothing; its storage is refused afterwards.

    Refused while it holds replicas, votes on metadata, or lives: `raftmq node drain` comes first.

    Examples: raftmq node remove 3
    """

    def look(answer: NodesAnswer) -> Progress:
        is_gone = node_id not in answer.nodes
        text = f"done: node {node_id} is gone" if is_gone else "it leaves the metadata group"
        return Progress(text, int(not is_gone), is_done=is_gone)

    asked = {"ids": [node_id], "change": "remove"}
    _run(asked, look, bootstrap, timeout, wait, dry_run=dry_run, no_wait=no_wait, as_json=as_json)


def cordon(
    node_id: NodeId,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Give a node no new replicas; what it has stays and is served.

    Examples: raftmq node cordon 3
    """
    look = _reached(node_id, "cordoned", "cordoned")
    asked = {"ids": [node_id], "change": "cordon"}
    _run(
        asked, look, bootstrap, timeout, timeout, dry_run=dry_run, no_wait=no_wait, as_json=as_json
    )


def uncordon(
    node_id: NodeId,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Let a cordoned node have new replicas again.

    Examples: raftmq node uncordon 3
    """
    look = _reached(node_id, "active", "active")
    asked = {"ids": [node_id], "change": "uncordon"}
    _run(
        asked, look, bootstrap, timeout, timeout, dry_run=dry_run, no_wait=no_wait, as_json=as_json
    )


def maintenance(
    node_id: NodeId,
    end: Annotated[
        bool, typer.Option("--end", help="It is over: the node may lead again.")
    ] = False,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    wait: Wait = 600.0,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Let a node lead and coordinate nothing for a while, so that nobody misses it when it stops.

    Its replicas stay; they catch up after a restart. With --end the leaderships that it is
    preferred for come back by themselves (`raftmq leader balance` does it at once).

    Examples: raftmq node maintenance 3; raftmq node maintenance 3 --end
    """

    def look(answer: NodesAnswer) -> Progress:
        row = answer.changes.get(node_id)
        if row is None or row["state"] != "maintenance":
            return Progress(f"node {node_id} is in no maintenance", 1, is_done=False)
        if row["is_idle"]:
            kept = row["kept_leaders"]
            text = f"done: node {node_id} leads and coordinates nothing"
            if kept:
                text = f"done: node {node_id} leads only {kept} partitions that no other could lead"
            return Progress(text, 0, is_done=True)
        return Progress(_left_text(row), row["leaders"], is_done=False)

    asked = {"ids": [node_id], "change": "end-maintenance" if end else "maintenance"}
    _run(
        asked,
        _reached(node_id, "active", "active again") if end else look,
        *(bootstrap, timeout, wait),
        dry_run=dry_run,
        no_wait=no_wait,
        as_json=as_json,
    )


def change_voters(
    voters: int, bootstrap: str, timeout: float, *, dry_run: bool, no_wait: bool, as_json: bool
) -> None:
    """Have another number of nodes vote on metadata, and watch it."""

    def look(answer: NodesAnswer) -> Progress:
        text = f"metadata voters: {answer.votes}"
        is_done = answer.is_voting_settled
        return Progress(f"done: {text}" if is_done else text, int(not is_done), is_done=is_done)

    asked = {"ids": [], "change": "", "voters": voters}
    _run(asked, look, bootstrap, timeout, WAIT_S, dry_run=dry_run, no_wait=no_wait, as_json=as_json)


def _reached(node_id: int, state: str, word: str) -> Look:
    def look(answer: NodesAnswer) -> Progress:
        is_done = answer.state(node_id) == state
        text = f"done: node {node_id} is {word}" if is_done else f"node {node_id} is not {word} yet"
        return Progress(text, int(not is_done), is_done=is_done)

    return look


def _named(ids: Sequence[int]) -> str:
    names = ", ".join(map(str, ids))
    return f"node {names} is" if len(ids) == 1 else f"nodes {names} are"


def _left_text(row: Mapping[str, Any]) -> str:
    counts = {"leadership": row["leaders"], "group": row["groups"]}
    if row["state"] == "draining":
        counts["partition"] = row["partitions"]
    parts = [f"{n} {word}{'s' if n > 1 else ''}" for word, n in counts.items() if n]
    if row["state"] == "draining" and row["is_voter"]:
        parts.append("a vote on metadata")
    if row["is_controller"]:
        parts.append("the controller's part")
    return f"node {row['node_id']} still has {', '.join(parts) or 'nothing'}"


# ---- the run ----


def _run(
    asked: dict[str, Any],
    look: Look,
    bootstrap: str,
    timeout: float,
    wait: float,
    *,
    dry_run: bool,
    no_wait: bool,
    as_json: bool,
) -> None:
    with reported():
        if asked.get("voters") is not None and asked["voters"] < 1:
            raise CommandError("--voters: 1, 3, 5, 7 or 9 is wanted", EXIT_USAGE)
        port = open_admin_port(bootstrap, timeout)
        ends_here = dry_run or no_wait
        answer = give_order(
            port,
            "/nodes/change",
            {**asked, "dry_run": dry_run},
            timeout,
            as_json=as_json,
            ends_here=ends_here,
        )
        if not as_json:
            out_first(answer["steps"])
            out(answer["message"])
        if ends_here:
            return
        pace = Pace()
        end = watch(
            lambda: look(NodesAnswer(port)),
            lambda progress, now: pace.left_text(progress.left, now),
            wait,
            unfinished="it is not done yet",
            waiting_max=STUCK_SHOWN_MAX,
            as_json=as_json,
        )
        if as_json:
            show_json({**answer, "message": end.text, "is_done": True})
