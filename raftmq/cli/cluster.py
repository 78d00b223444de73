"""`raftmq cluster ...`: which nodes are there, which lead, what lags.

`cluster status` is made for people and for scripts: it ends with 1 while a partition has no live
leader or too few replicas in sync, can wait for that to pass, and shows what every node reports of
itself (`picture.py`), so that one need not look at each.

`cluster balance` evens out replicas and preferred leaderships over brokers and racks. The
controller plans the moves and the cluster makes them by itself, a few at a time; the command shows
what and why, how far it is, and in the end whether every partition is where the plan wanted it. It
may be ended at any time, and run again to go on watching.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from attrs import define, field

from raftmq.cli.admin_port import AdminPort, give_order, open_admin_port
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    REFUSED_S,
    SHOWN_MAX,
    WAIT_S,
    AdminPorts,
    AsJson,
    Bootstrap,
    CommandError,
    NoWait,
    Progress,
    Timeout,
    Wait,
    check_reachable,
    client_security,
    format_time,
    open_admin,
    out_first,
    out_left,
    parse_addresses,
    reported,
    show,
    show_json,
    time_left_text,
    watch,
)
from raftmq.cli.configs import cluster_config_app
from raftmq.cli.console import EXIT_FAILED, EXIT_USAGE, clear_screen, out
from raftmq.cli.node_changes import DryRun, Voters, change_voters
from raftmq.cli.picture import (
    CATCH_UP_COLUMNS,
    NODE_COLUMNS,
    STUCK_COLUMNS,
    Picture,
    take_picture,
)
from raftmq.errors import ErrorCode
from raftmq.types import TopicPartition
from raftmq_client.blocking.admin import Admin
from raftmq_client.core.admin import FeaturesInfo, QuorumInfo
from raftmq_client.core.metadata import ClusterInfo
from raftmq_client.errors import BrokerError, ClientError

cluster_app = typer.Typer(help="The cluster as a whole.", no_args_is_help=True)
cluster_app.add_typer(cluster_config_app, name="config")

QUORUM_COLUMNS = ("NodeId", "LogEndOffset", "Lag", "LastCaughtUpTimestamp", "Status")
FEATURE_COLUMNS = ("Level", "RaisableTo", "SupportedByNode")
BAD_COLUMNS = ("Topic", "Partition", "Leader", "Replicas", "Isr")
SECTION_TITLES: Final = {
    "Nodes": "nodes, as they tell it themselves:",
    "CatchingUp": "catching up:",
    "Stuck": "in trouble, and why:",
}
_POLL_S: Final = 0.1
NODE_TIMEOUT_S: Final = 5.0
"""How long a node may take to answer; one that hangs is part of the picture."""


@cluster_app.command()
def status(
    wait: Annotated[
        float,
        typer.Option("--wait", metavar="SECONDS", help="Wait so long for it to be healthy.", min=0),
    ] = 0.0,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again and again until Ctrl-C.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", help="Between two looks.", min=0.1)
    ] = 2.0,
    admin_ports: AdminPorts = "",
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Is all well? Every node with its state, what catches up, what is stuck and why.

    Ends with 1 while partitions are without leader or short of replicas (as metadata says, or the
    leader's own page), a metadata voter is not there, or a disk is full or stuck. A node that does
    not answer is shown as such.

    Examples: raftmq cluster status --wait 30; raftmq cluster status --watch
    """
    with reported():
        addresses = parse_addresses(admin_ports, "--admin")
        if not watch:
            look = _look_until(wait, bootstrap, timeout, addresses)
            _show_look(look, as_json=as_json)
            if look.is_bad:
                raise typer.Exit(EXIT_FAILED)
            return
        with contextlib.suppress(KeyboardInterrupt):  # that is how watching ends
            while True:
                look = _look_until(0, bootstrap, timeout, addresses)
                if sys.stdout.isatty() and not as_json:
                    clear_screen()
                    out(time.strftime("%H:%M:%S"))
                _show_look(look, as_json=as_json)
                time.sleep(interval)


@define(slots=True)
class _Look:
    """What one look at the cluster saw; `info` None: no client port answered, for `failure`."""

    info: ClusterInfo | None
    picture: Picture
    failure: str = ""
    offline: list[tuple[object, ...]] = field(factory=list)
    under: list[tuple[object, ...]] = field(factory=list)

    @property
    def is_bad(self) -> bool:
        return self.info is None or bool(self.offline or self.under or self.troubles)

    @property
    def troubles(self) -> list[str]:
        """What is wrong with nodes."""
        alive = [] if self.info is None else [broker.node_id for broker in self.info.brokers]
        return self.picture.troubles(alive)


def _look_until(wait: float, bootstrap: str, timeout: float, addresses: list[str]) -> _Look:
    """Look until all is well or the time is up."""
    deadline = time.monotonic() + wait
    patience_s = min(timeout, NODE_TIMEOUT_S)
    try:
        check_reachable(bootstrap, max(wait, min(REFUSED_S, timeout)))
        with (
            Admin(bootstrap, security=client_security(), timeout_ms=timeout * 1000) as admin,
            Admin(bootstrap, security=client_security(), timeout_ms=patience_s * 1000) as finder,
        ):
            while True:
                info = admin.cluster()
                offline, under = _troubles(info, finder)
                if (offline or under) and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
                    continue
                picture = take_picture(finder, addresses, patience_s)
                known = {row[:2] for row in (*offline, *under)}
                under += [row for row in picture.behind() if row[:2] not in known]
                look = _Look(info, picture, "", offline, under)
                if not look.is_bad or time.monotonic() >= deadline:
                    return look
                time.sleep(_POLL_S)
    except ClientError as error:
        if not addresses:
            raise
        return _Look(None, take_picture(None, addresses, patience_s), str(error))


def _show_look(look: _Look, *, as_json: bool) -> None:
    info, picture = look.info, look.picture
    sections = (
        ("Nodes", NODE_COLUMNS, picture.nodes()),
        ("CatchingUp", CATCH_UP_COLUMNS, picture.catching_up()),
        ("Stuck", STUCK_COLUMNS, picture.stuck()),
    )
    partitions = 0 if info is None else sum(len(topic.partitions) for topic in info.topics)
    if as_json:
        show_json(
            {
                "ClusterId": None if info is None else info.cluster_id,
                "Controller": None if info is None else info.controller,
                "Brokers": [] if info is None else [broker.node_id for broker in info.brokers],
                "Topics": None if info is None else len(info.topics),
                "Partitions": None if info is None else partitions,
                "OfflinePartitions": _as_dicts(BAD_COLUMNS, look.offline),
                "UnderReplicatedPartitions": _as_dicts(BAD_COLUMNS, look.under),
                **{name: _as_dicts(columns, rows) for name, columns, rows in sections},
                "Metadata": picture.metadata(),
                "Troubles": look.troubles,
                "Failure": look.failure or None,
            }
        )
        return
    if info is None:
        out(f"no client port answers: {look.failure}")
    else:
        ids = ", ".join(str(broker.node_id) for broker in info.brokers)
        out(f"cluster {info.cluster_id}: brokers {ids}; controller {info.controller}")
        out(
            f"{len(info.topics)} topics, {partitions} partitions: {len(look.offline)} without "
            f"leader, {len(look.under)} under-replicated"
        )
    for trouble in look.troubles:
        out(trouble)
    if look.offline or look.under:
        show(BAD_COLUMNS, [*look.offline, *look.under], as_json=False)
    for name, columns, rows in sections:
        if rows:
            out("")
            out(SECTION_TITLES[name])
            show(columns, rows, as_json=False)


def _as_dicts(
    columns: Sequence[str], rows: Sequence[tuple[object, ...]]
) -> list[dict[str, object]]:
    return [dict(zip(columns, row, strict=True)) for row in rows]


@cluster_app.command("quorum")
@cluster_app.command("describe")
def quorum(
    voters: Voters = None,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Show the metadata group: its leader, voters, observers and how far they are.

    With --voters another number of nodes votes from now on, by steps with a live majority each.

    Examples: raftmq cluster quorum; raftmq cluster quorum --voters 5 --dry-run
    """
    if voters is not None:
        change_voters(voters, bootstrap, timeout, dry_run=dry_run, no_wait=no_wait, as_json=as_json)
        return
    with reported(), open_admin(bootstrap, timeout) as admin:
        info = admin.cluster([])
        try:
            found = admin.quorum()
        except BrokerError as error:
            if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise
            message = f"cluster {info.cluster_id} keeps its metadata elsewhere than in a Raft group"
            raise CommandError(message) from error
        rows = _quorum_rows(found)
        if as_json:
            show_json(
                {
                    "ClusterId": info.cluster_id,
                    "LeaderId": found.leader,
                    "LeaderEpoch": found.leader_epoch,
                    "HighWatermark": found.high_watermark,
                    "Replicas": [dict(zip(QUORUM_COLUMNS, row, strict=True)) for row in rows],
                }
            )
            return
        out(f"ClusterId: {info.cluster_id}")
        out(f"LeaderId: {found.leader}  LeaderEpoch: {found.leader_epoch}")
        out(f"HighWatermark: {found.high_watermark}")
        show(QUORUM_COLUMNS, rows, as_json=False)


@cluster_app.command("features")
def features(
    raised: Annotated[
        list[str] | None,
        typer.Option("--raise", metavar="NAME=LEVEL", help="Raise a level; may be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say whether it would do.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Show what the nodes' versions support and what the cluster has agreed on, or raise that.

    A level is raised once every node runs a version that supports it, and not lowered again: up to
    then each node can go back to the version before.

    Examples: raftmq cluster features; raftmq cluster features --raise raftmq.level=2
    """
    with reported():
        levels = dict(_named_level(text) for text in raised or ())
        with open_admin(bootstrap, timeout) as admin:
            if levels:
                admin.update_features(levels, validate_only=dry_run)
            info = admin.features()
            nodes = [broker.node_id for broker in admin.brokers()]
            told = {node: admin.features(node) for node in nodes}
        rows = _feature_rows(info, told)
        if as_json:
            show_json(
                {"Epoch": info.epoch, "Features": _as_dicts(("Feature", *FEATURE_COLUMNS), rows)}
            )
            return
        if dry_run and levels:
            out("it can be done: every node supports it")
        show(("Feature", *FEATURE_COLUMNS), [_for_people(row) for row in rows], as_json=False)


def _for_people(row: tuple[Any, ...]) -> tuple[object, ...]:
    """Nodes that support the same in one word: `1,2,3: 1-4`."""
    *others, by_node = row
    nodes: dict[str, list[str]] = {}
    for node, span in by_node.items():
        nodes.setdefault(span, []).append(node)
    return (*others, "; ".join(f"{','.join(same)}: {span}" for span, same in nodes.items()))


def _named_level(text: str) -> tuple[str, int]:
    name, _, level = text.partition("=")
    if not name or not level.isdecimal():
        raise CommandError(
            f"--raise {text!r}: NAME=LEVEL is wanted, such as raftmq.level=2", EXIT_USAGE
        )
    return name, int(level)


def _feature_rows(info: FeaturesInfo, told: Mapping[int, FeaturesInfo]) -> list[tuple[object, ...]]:
    """Each feature with the span that all live nodes support, and each node's own."""
    rows: list[tuple[object, ...]] = []
    names = {item.name for one in (info, *told.values()) for item in one.features}
    levels = {item.name: item.level for item in info.features}
    for name in sorted(names):
        spans = {
            node: (item.min_supported, item.max_supported)
            for node, one in told.items()
            for item in one.features
            if item.name == name
        }
        common = min((spans.get(node, (0, 0))[1] for node in told), default=0)
        nodes = {str(node): f"{low}-{high}" for node, (low, high) in sorted(spans.items())}
        rows.append((name, levels.get(name, 0), common, nodes))
    return rows


def _troubles(
    info: ClusterInfo, finder: Admin
) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    """(partitions without a live leader, those short of replicas in sync).

    As in Kafka, replicas that a move adds need not be in sync yet.
    """
    alive = {broker.node_id for broker in info.brokers}
    coming = _coming(info, finder)
    offline: list[tuple[object, ...]] = []
    under: list[tuple[object, ...]] = []
    for topic in info.topics:
        for item in topic.partitions:
            row = (
                topic.name,
                item.partition,
                item.leader,
                list(item.replicas),
                list(item.in_sync),
            )
            if item.leader not in alive:
                offline.append(row)
            elif len(item.in_sync) < len(item.replicas) - coming.get(row[:2], 0):
                under.append(row)
    return offline, under


def _coming(info: ClusterInfo, finder: Admin) -> dict[tuple[object, ...], int]:
    """How many replicas are being added to partitions that have fewer in sync."""
    short = [
        TopicPartition(topic.name, item.partition)
        for topic in info.topics
        for item in topic.partitions
        if len(item.in_sync) < len(item.replicas)
    ]
    if not short:
        return {}
    try:
        moves = finder.list_partition_reassignments(short)
    except ClientError:
        return {}  # nobody knows: they are shown
    return {tuple(key): len(move.adding) for key, move in moves.items()}


def _quorum_rows(quorum: QuorumInfo) -> list[tuple[object, ...]]:
    end = max((item.log_end_offset for item in quorum.voters), default=0)
    rows: list[tuple[object, ...]] = []
    for kind, replicas in (("Follower", quorum.voters), ("Observer", quorum.observers)):
        for item in replicas:
            status = "Leader" if item.node_id == quorum.leader else kind
            caught_up = format_time(item.last_caught_up_timestamp)
            known = item.log_end_offset if item.log_end_offset >= 0 else None
            lag = None if known is None else max(0, end - known)
            rows.append((item.node_id, known, lag, caught_up, status))
    return rows


MOVE_COLUMNS: Final = ("Partition", "From", "To", "Bytes", "Why")
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")

Move = Mapping[str, Any]


@cluster_app.command()
def balance(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show each move, why, and its quorums; move nothing.")
    ] = False,
    no_wait: NoWait = False,
    wait: Wait = WAIT_S,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> None:
    """Even out replicas and preferred leaderships over brokers and racks.

    As few replicas as can be are moved, and of these the smallest. Two replicas of a partition in
    one rack are parted first. Refused while moves of an operator are not done.

    Examples: raftmq cluster balance --dry-run; raftmq cluster balance
    """
    with reported():
        port = open_admin_port(bootstrap, timeout)
        ends_here = dry_run or no_wait
        answer = give_order(
            port, "/balance", {"dry_run": dry_run}, timeout, as_json=as_json, ends_here=ends_here
        )
        if not as_json:
            _show_plan(answer)
        if not ends_here:
            _watch(port, answer, wait, as_json=as_json)


def _show_plan(answer: Mapping[str, Any]) -> None:
    moves: list[Move] = answer["moves"]
    if moves:
        first = moves[:SHOWN_MAX]
        show(MOVE_COLUMNS, [row for move in first for row in _rows(move)], as_json=False)
        out_left(len(moves))
        for step in (step for move in first for step in move["steps"]):
            out(step)
    copies = sum(_copies(move) for move in moves)
    total = sum(max(0, move["copied_bytes"]) for move in moves)
    more = " and more" if any(move["copied_bytes"] < 0 for move in moves) else ""
    counts = f"{len(moves)} partitions, {copies} replicas to copy, {_bytes_text(total)}{more}"
    out(f"{answer['message']}: {counts}" if moves else answer["message"])
    refused = [move for move in moves if move["code"] != "NONE"]
    out_first([f"not {_name(move)}: {move['message'] or move['code']}" for move in refused])


def _name(move: Move) -> str:
    return f"{move['topic']}-{move['partition']}"


def _rows(move: Move) -> list[tuple[object, ...]]:
    """A move, each of its reasons on a line of its own."""
    size = move["copied_bytes"]
    told = "unknown" if size < 0 else _bytes_text(size) if _copies(move) else "-"
    first, *more = move["why"].split("; ")
    return [
        (_name(move), list(move["before"]), list(move["after"]), told, first),
        *(("", "", "", "", why) for why in more),
    ]


def _copies(move: Move) -> int:
    return len(set(move["after"]) - set(move["before"]))


def _bytes_text(size: float) -> str:
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


# ---- progress ----


def _watch(port: AdminPort, answer: Mapping[str, Any], wait: float, *, as_json: bool) -> None:
    """Show how far it is until no move of a balance is left, and what came of these."""
    ours = {(m["topic"], m["partition"]): m for m in answer["moves"] if m["code"] == "NONE"}
    began = time.monotonic()
    left: list[Move] = []

    def look() -> Progress:
        left[:] = [m for m in port.get("/moves")["moves"] if m["origin"] == "balance"]
        running = [move for move in left if move["is_running"]]
        return Progress(
            f"left: {len(left)} partitions, {len(running)} of them on their way" if left else "",
            len(left),
            is_done=not left,
            waiting=[f"{_name(m)} waits: {m['reason']}" for m in running if m["reason"]],
        )

    watch(
        look,
        lambda _progress, now: _time_left(ours, left, now - began),
        wait,
        unfinished="it is not even yet",
        waiting_max=SHOWN_MAX,
        as_json=as_json,
    )
    _end(port, answer, ours, as_json=as_json)


def _time_left(ours: Mapping[tuple[str, int], Move], left: Sequence[Move], passed_s: float) -> str:
    """How long it may still take, by the bytes of what is done already."""
    keys = [(move["topic"], move["partition"]) for move in left]
    weights = {key: 1 + max(0, move["copied_bytes"]) for key, move in ours.items()}
    to_go = sum(weights.get(key, 1) for key in keys)
    done = sum(weights.values()) - sum(weights.get(key, 0) for key in keys)
    return time_left_text(done, to_go, passed_s)


def _end(
    port: AdminPort,
    answer: Mapping[str, Any],
    ours: Mapping[tuple[str, int], Move],
    *,
    as_json: bool,
) -> None:
    """Compare what came of it with what was planned."""
    now = {(p["topic"], p["partition"]): p["replicas"] for p in port.get("/leaders")["partitions"]}
    changed = []
    for key, move in ours.items():
        if key not in now:
            changed.append(f"{_name(move)} was deleted meanwhile")
        elif now[key] != list(move["after"]):
            there = ",".join(map(str, now[key]))
            wanted = ",".join(map(str, move["after"]))
            changed.append(f"{_name(move)} is on {there} and not on {wanted}: changed meanwhile")
    if as_json:
        show_json({**answer, "is_done": True, "changed": changed})
        return
    out_first(changed)
    others = ", the others not as planned" if changed else ", as planned"
    moved = len(ours) - len(changed)
    out(f"done: {moved} partitions moved{others}" if ours else "done: it is even")
