"""Why a partition or a node stands still: the `/status` of all nodes, put into words.

`explain` is a pure function of what nodes answered, those that did not answer included: it says
what is the matter, who can mend it, and which command does. A finding *blocks* when somebody has to
do something, *waits* when the cluster goes on by itself, and is a *note* otherwise. What only the
planner of moves knows (`GET /moves`) is used where it was asked for and answered.

Nothing here asks or changes anything. An answer of another version may lack a field: what cannot be
told from the others is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import combinations
from typing import Any, Final, TypeAlias

from attrs import frozen

from raftmq.cli.picture import NodeReport, Picture

Row: TypeAlias = Mapping[str, Any]
Name: TypeAlias = tuple[str, int]

BRIEF_MS: Final = 10_000
"""A transaction that is open for less is no news."""
NAMED_MAX: Final = 5
METADATA_LOST: Final = "metadata without majority"
START: Final = "raftmq start --config FILE"
_LEFT: Final = {"leaders": "leadership", "groups": "group claim"}
_KINDS: Final = {
    "damaged": "peers repair it; where all copies are bad: stop the node, then",
    "no member": "its leader admits it; it needs a leader for that",
    "lost bytes": "peers that hold more have to come back",
    "absurd epoch": "on every voter, stopped",
    "disk stuck": "mend or replace the disk of that node, then start the node again",
}
"""Troubles of single replicas that are passed on in the node's words, and who mends them."""


class Level(StrEnum):
    """What a finding means for whoever asks."""

    BLOCKS = "blocks"
    WAITS = "waits"
    NOTE = "note"


@frozen(slots=True)
class PartitionAsked:
    """One partition."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


@frozen(slots=True)
class NodeAsked:
    """One node."""

    node_id: int

    def __str__(self) -> str:
        return f"node {self.node_id}"


@frozen(slots=True)
class MetadataAsked:
    """The metadata group."""

    def __str__(self) -> str:
        return "the metadata group"


Asked: TypeAlias = PartitionAsked | NodeAsked | MetadataAsked


@frozen(slots=True)
class Finding:
    """One thing that is the matter.

    Attributes:
        kind: a fixed word for it, for scripts.
        remedy: who can mend it, or what happens without anybody.
        commands: that would; with words in capitals where only an operator knows.
        otherwise: another way, at a price: in words, and the command.
    """

    level: Level
    kind: str
    text: str
    remedy: str = ""
    commands: tuple[str, ...] = ()
    otherwise: tuple[str, str] | None = None


def explain(
    reports: Sequence[NodeReport],
    what: Asked,
    moves: Sequence[Row] = (),
    changes: Sequence[Row] = (),
) -> list[Finding]:
    """What the matter is with a partition or a node, what blocks first.

    Args:
        reports: every node that could be found, with its `/status` or the reason why there is none.
        moves: rows of `GET /moves`, where some node gave them.
        changes: nodes that are not simply active, as `GET /nodes` has them, likewise.
    """
    view = _View(reports, moves, changes)
    if isinstance(what, NodeAsked):
        found = [*_node(view, what.node_id), *_metadata(view)]
    elif isinstance(what, PartitionAsked):
        found = [*_partition(view, (what.topic, what.partition)), *_metadata(view)]
    else:
        found = [*_metadata(view)]
    return sorted(found, key=lambda finding: list(Level).index(finding.level))


def partitions_in_trouble(reports: Sequence[NodeReport]) -> list[PartitionAsked]:
    """The partitions of which a replica, or the lack of any, tells of trouble, a move or a lag."""
    picture = Picture(list(reports))
    names = {(row["topic"], row["partition"]) for row in picture.unheld()}
    for answer in picture.answers:
        names |= {
            (row["topic"], row["partition"])
            for row in answer["partitions"]
            if row["troubles"] or row["catching_up"] or row.get("lagging") or row.get("move")
        }
    return [PartitionAsked(*name) for name in sorted(names)]


# ---- what is known ----


class _View:
    """All answers, looked at from every side."""

    def __init__(
        self,
        reports: Sequence[NodeReport],
        moves: Sequence[Row] = (),
        changes: Sequence[Row] = (),
    ) -> None:
        self.picture = Picture(list(reports))
        self.moves = moves
        self.changes = {change["node_id"]: change for change in changes}
        self.answers: dict[int, Row] = {a["node_id"]: a for a in self.picture.answers}
        self.failures = {r.node_id: r.failure for r in reports if r.status is None}
        self.newest: Row = max(
            self.answers.values(), key=lambda a: int(a["metadata"].get("version", -1)), default={}
        )
        self.brokers: dict[int, Row] = {b["node_id"]: b for b in self.newest.get("brokers", ())}
        self.metadata: Row = self.picture.metadata() or {}
        self.rows: dict[Name, dict[int, Row]] = {}
        for node_id, answer in self.answers.items():
            for row in answer["partitions"]:
                self.rows.setdefault((row["topic"], row["partition"]), {})[node_id] = row

    @property
    def node_ids(self) -> list[int]:
        """Every node that is known in any way."""
        known = {*self.answers, *self.failures, *self.brokers, *self.metadata.get("voters", ())}
        return sorted(node_id for node_id in known if node_id >= 0)

    def leader_of(self, name: Name) -> tuple[int, Row] | None:
        """The node that leads, and its row; the newest where two say so."""
        led = [(n, row) for n, row in self.rows.get(name, {}).items() if row["is_leader"]]
        return max(led, key=lambda item: int(item[1]["leader_epoch"]), default=None)

    def fills_of(self, name: str) -> list[tuple[int, Row]]:
        """Each node's rows about the indexes of a view of that name; none where it is no view."""
        return [
            (node_id, row)
            for node_id, answer in sorted(self.answers.items())
            for row in answer.get("views", ())
            if row["view"] == name
        ]

    def silence(self, node_id: int, name: str = "") -> str:
        """Why there is no answer of a node, and since when it is fenced."""
        reason = self.failures.get(node_id, "")
        text = f"{name or f'node {node_id}'} does not answer" + (f" ({reason})" if reason else "")
        fenced_ms = self.brokers.get(node_id, {}).get("fenced_ms")
        return text + (f", fenced for {lasting(fenced_ms)}" if fenced_ms is not None else "")

    def can_hear(self, a: int, b: int) -> bool:
        """False when two nodes that answer do not reach each other."""
        pairs = ((a, b), (b, a))
        peers = [self.answers[x].get("peers", {}).get(str(y)) for x, y in pairs]
        return all(peer is None or peer["is_connected"] for peer in peers)


# ---- words ----


def lasting(ms: float) -> str:
    """A duration for people."""
    seconds = ms / 1e3
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def sized(size_bytes: float) -> str:
    """A number of bytes for people."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.1f} {unit}"
    return f"{size_bytes:.0f} bytes"


def listed(items: Iterable[object], word: str = "and") -> str:
    """`1, 2 and 3`."""
    texts = [str(item) for item in items]
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} {word} {texts[-1]}"


def nodes(node_ids: Collection[int]) -> str:
    """`node 1`, or `nodes 1, 2 and 3`."""
    return f"node{'s' if len(node_ids) > 1 else ''} {listed(node_ids)}"


def counted(count: int, word: str) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def _few(names: Sequence[object]) -> str:
    """The first names, and how many there are besides."""
    shown = ", ".join(str(name) for name in names[:NAMED_MAX])
    return shown + (f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else "")


def _start(gone: Sequence[int], needed: int) -> tuple[str, tuple[str, ...]]:
    """How to get so many of the nodes that do not answer back."""
    if needed >= len(gone):
        return f"start {nodes(gone)}", (START,)
    if needed == 1:
        return f"start {listed([f'node {n}' for n in gone], 'or')}", (START,)
    return f"start {needed} of {nodes(gone)}", (START,)


# ---- the metadata group ----


def _metadata(view: _View) -> Iterator[Finding]:
    """Without its majority nothing is decided, whatever is asked about."""
    voters = list(view.metadata.get("voters", ()))
    if not voters or any(
        a["metadata"].get("leader") is not None and not a["isolation"]["is_isolated"]
        for a in view.answers.values()
    ):
        return
    gone = [n for n in voters if n not in view.answers]
    quorum = len(voters) // 2 + 1
    since_ms = max(a["isolation"]["isolated_ms"] for a in view.answers.values())
    text = (
        f"the metadata group has had no majority for {lasting(since_ms)}: no topics, moves, group "
        f"claims or commits of offsets. Its voters are {nodes(voters)} (quorum {quorum}); "
    )
    needed = quorum - (len(voters) - len(gone))
    if needed <= 0:
        text += "all that it needs answer: an election is under way, or they are cut off"
        yield Finding(Level.WAITS, METADATA_LOST, text)
        return
    text += "; ".join(view.silence(n) for n in gone)
    remedy, commands = _start(gone, needed)
    otherwise = _recover([n for n in voters if n not in gone])
    yield Finding(Level.BLOCKS, METADATA_LOST, text, remedy, commands, otherwise=otherwise)


def _is_lost(view: _View) -> bool:
    """True while the metadata group has no majority."""
    return any(True for _ in _metadata(view))


def _recover(survivors: Sequence[int]) -> tuple[str, str]:
    """Going on without nodes that nobody can start any more."""
    return (
        "where their disks are lost for good: stop the others, and on each of them (what only the "
        "lost ones had is gone)",
        f"raftmq recover --unsafe --data DATA --survivors {','.join(map(str, survivors))}",
    )


# ---- partitions ----


def _partition(view: _View, name: Name) -> Iterator[Finding]:
    topics = view.newest.get("topics", {})
    fills = view.fills_of(name[0])
    if fills and name[0] not in topics:
        yield from _of_view(view, name, fills)
        return
    if topics and not 0 <= name[1] < topics.get(name[0], 0):
        text = f"there is no partition {name[0]}/{name[1]}"
        if name[0] in topics:
            text += f": the topic has {topics[name[0]]}"
        yield Finding(Level.BLOCKS, "unknown", text, "", ("raftmq topic list",))
        return
    led = view.leader_of(name)
    if led is None:
        yield from _leaderless(view, name)
    else:
        yield from _led(view, name, *led)
        yield from _transaction(name, led[1])
    for node_id, row in sorted(view.rows.get(name, {}).items()):
        yield from _replica(name, node_id, row)
    yield from _moves(view, name, None if led is None else led[1])
    yield from _removals(view, lambda row: (row["topic"], row["partition"]) == name)


def _of_view(view: _View, name: Name, fills: Sequence[tuple[int, Row]]) -> Iterator[Finding]:
    """A partition of a view: how far its indexes are, and all that is the matter with its topic."""
    topic = fills[0][1]["topic"]
    text = f"{name[0]} is a view of {topic}: what holds up {topic}/{name[1]} holds it up as well"
    yield Finding(Level.NOTE, "view", text)
    for node_id, row in fills:
        if row["partition"] != name[1]:
            continue
        if row["trouble"]:
            text = f"node {node_id} cannot fill its index of it: {row['trouble']}"
            yield Finding(Level.WAITS, "view_index", text, "it tries again by itself")
        elif row["lacks_bytes"]:
            text = f"node {node_id} still has {sized(row['lacks_bytes'])} to examine for it"
            yield Finding(Level.WAITS, "view_index", text, "it goes on by itself")
    yield from _partition(view, (topic, name[1]))


def _leaderless(view: _View, name: Name) -> Iterator[Finding]:
    rows = view.rows.get(name, {})
    for row in view.picture.unheld():
        if (row["topic"], row["partition"]) == name and not rows:
            yield Finding(Level.BLOCKS, "unheld", row["why"], "", (START,))
            return
    if not rows:
        silent = [n for n in view.node_ids if n not in view.answers]
        said = "; ".join(view.silence(n) for n in silent) or "it may be quite new"
        text = f"no node that answers holds it: {said}"
        remedy = f"start {nodes(silent)}" if silent else "nodes take new partitions by themselves"
        level = Level.BLOCKS if silent else Level.WAITS
        yield Finding(level, "unheld", text, remedy, (START,) if silent else ())
        return
    newest = max(rows.values(), key=lambda row: int(row["leader_epoch"]))
    voters = list(newest["voters"])
    quorum = len(voters) // 2 + 1
    there = [n for n in voters if n in rows and rows[n]["failure"] is None]
    since = max((row.get("leaderless_ms") or 0 for row in rows.values()), default=0)
    ago = f" for {lasting(since)}" if since else ""
    if len(there) >= quorum:
        yield from _unelected(view, rows, there, ago)
        return
    gone = [n for n in voters if n not in view.answers]
    others = [n for n in voters if n in view.answers and n not in there]
    here = f"only {nodes(there)} is there" if there else "none is there"
    if len(there) > 1:
        here = f"only {nodes(there)} are there"
    reasons = [view.silence(n) for n in gone]
    reasons += [
        f"the replica on node {n} stopped" if n in rows else f"node {n} does not run it yet"
        for n in others
    ]
    text = (
        f"no leader{ago}: of its voters {listed(voters)} (quorum {quorum}) {here}; "
        f"{'; '.join(reasons)}"
    )
    needed = quorum - len(there)
    remedy, commands = _start(gone, min(needed, len(gone))) if gone else ("", ())
    otherwise = _recover(sorted(view.answers)) if gone and there else None
    yield Finding(Level.BLOCKS, "no quorum", text, remedy, commands, otherwise=otherwise)


def _unelected(
    view: _View, rows: Mapping[int, Row], there: Sequence[int], ago: str
) -> Iterator[Finding]:
    """A majority is there and none leads."""
    cut = [pair for pair in combinations(sorted(there), 2) if not view.can_hear(*pair)]
    if cut:
        said = "; ".join(f"nodes {a} and {b}" for a, b in cut)
        yield Finding(
            Level.BLOCKS,
            "cut off",
            f"no leader{ago}: these answer here and do not reach each other: {said}",
            "whoever runs the network between their peer ports",
        )
        return
    kinds = {kind for n in there for kind in rows[n].get("kinds", ())}
    if kinds & {"damaged", "lost bytes", "absurd epoch"}:
        text = f"no leader{ago}: not enough of its replicas may vote for one another, see below"
        yield Finding(Level.BLOCKS, "no election", text)
        return
    yield Finding(
        Level.WAITS,
        "election",
        f"no leader{ago}: an election is under way among {nodes(sorted(there))}",
        "their votes decide, within a second or so",
    )


def _led(view: _View, name: Name, leader: int, row: Row) -> Iterator[Finding]:
    in_sync, wanted = row["isr"], row.get("min_insync_replicas", 1)
    behind = {item["node_id"]: item for item in row["catching_up"]}
    lags = {item["node_id"]: item["lag_ms"] for item in row.get("lagging", ())}
    if "new leader" in row.get("kinds", ()):
        text = f"node {leader} was elected and waits for a majority to flush its first entry"
        yield Finding(Level.WAITS, "new leader", text, "that takes one flush of a voter")
    out = [n for n in row["voters"] if n not in in_sync]
    if len(in_sync) < wanted:
        gone = [n for n in out if n not in view.answers]
        remedy, commands = _start(gone, wanted - len(in_sync)) if gone else ("", ())
        if not gone:
            remedy = "the others catch up by themselves, see below"
        lower = f"raftmq topic alter {name[0]} --set min.insync.replicas={len(in_sync)}"
        yield Finding(
            Level.BLOCKS,
            "too few in sync",
            f"acks=all is refused: in sync {'is' if len(in_sync) == 1 else 'are'} "
            f"{nodes(in_sync)}, min.insync.replicas is {wanted}",
            remedy,
            commands,
            otherwise=("writing with fewer copies meanwhile", lower),
        )
    for node_id in out:
        lag_ms = lags.get(node_id)
        since = "" if lag_ms is None else f" (last known in sync {lasting(lag_ms)} ago)"
        yield from _behind(view, leader, node_id, since, behind.get(node_id))
    for node_id in row["learners"]:
        if node_id in behind:
            yield _catching_up(view, leader, node_id, behind[node_id], "is made a replica of it")
        elif node_id not in view.answers:
            text = (
                f"node {node_id} is to be a replica of it and {view.silence(node_id, ' ').strip()}"
            )
            yield Finding(Level.BLOCKS, "learner down", text, f"start node {node_id}", (START,))
        else:
            text = f"node {node_id} is made a replica of it, and has all but the newest"
            yield Finding(Level.WAITS, "learner", text, "its leader lets it vote next")
    members = {*row["voters"], *row["learners"]}
    for node_id in row.get("replicas", ()):
        if node_id not in members:
            yield from _not_admitted(view, node_id)


def _behind(
    view: _View, leader: int, node_id: int, since: str, behind: Row | None
) -> Iterator[Finding]:
    """A voter that is not in sync."""
    start = f"under-replicated: node {node_id} is out of sync{since}"
    if node_id not in view.answers:
        text = f"{start}: {view.silence(node_id, 'it')}"
        yield Finding(Level.BLOCKS, "replica down", text, f"start node {node_id}", (START,))
    elif not view.can_hear(leader, node_id):
        text = f"{start}: its leader, node {leader}, does not reach it, though both answer here"
        remedy = "whoever runs the network between their peer ports"
        yield Finding(Level.BLOCKS, "cut off", text, remedy)
    elif view.answers[node_id]["disk"]["is_full"]:
        text = f"{start}: its disk is full"
        yield Finding(Level.BLOCKS, "disk full", text, f"make room on the disk of node {node_id}")
    elif behind is not None:
        yield _catching_up(view, leader, node_id, behind, f"is out of sync{since}")
    else:
        yield Finding(Level.WAITS, "out of sync", start, "its leader goes on sending to it")


def _catching_up(view: _View, leader: int, node_id: int, behind: Row, what: str) -> Finding:
    """A replica that gets what it lacks: how much, at what speed, for how long."""
    told = view.answers[leader].get("catch_up", {})
    speed, limit = told.get("bytes_per_s", 0), told.get("limit_bytes_per_s", 0)
    left = behind["bytes_left"]
    all_left = sum(
        item["bytes_left"]
        for row in view.answers[leader]["partitions"]
        for item in row["catching_up"]
    )
    text = f"node {node_id} {what}, and catches up: {sized(left)} left"
    if speed:
        text += (
            f"; node {leader} sends {sized(speed)} a second to all that catch up "
            f"({sized(all_left)}): some {lasting(all_left / speed * 1e3)}"
        )
    if not (limit and told.get("held")):
        return Finding(Level.WAITS, "catching up", text, "it ends by itself")
    text += f"; the limit is {sized(limit)} a second"
    faster = f"raftmq node config set {leader} replica.catchup.bytes.per.s={2 * limit}"
    remedy = "it ends by itself; faster, at the cost of others (or a throttle of moves is set)"
    return Finding(Level.WAITS, "catching up", text, remedy, (faster,))


def _not_admitted(view: _View, node_id: int) -> Iterator[Finding]:
    start = f"node {node_id} should hold it and has not been admitted"
    if node_id not in view.answers:
        text = f"{start}: {view.silence(node_id, 'it')}"
        yield Finding(Level.BLOCKS, "replica down", text, f"start node {node_id}", (START,))
    else:
        yield Finding(Level.WAITS, "not admitted", start, "its leader does that next")


def _replica(name: Name, node_id: int, row: Row) -> Iterator[Finding]:
    """What one replica says of itself."""
    if row["failure"] is not None:
        text = f"the replica on node {node_id} stopped: {row['failure']}"
        if row["failure"].startswith("disk full"):
            remedy = f"make room on the disk of node {node_id}: it begins again by itself then"
            yield Finding(Level.BLOCKS, "stopped", text, remedy)
            return
        remedy = f"look at the disk and the log of node {node_id}, then start it again"
        yield Finding(Level.BLOCKS, "stopped", text, remedy, (START,))
        return
    troubles: list[str] = row["troubles"]
    for kind, text in zip(row.get("kinds", ()), troubles, strict=False):
        if kind not in _KINDS:
            continue
        commands: tuple[str, ...] = ()
        if kind == "damaged":
            commands = (f"raftmq recover --accept-loss {name[0]} {name[1]} --data DATA --dry-run",)
        elif kind == "absurd epoch":
            commands = (f"raftmq recover --reset-term {name[0]} {name[1]} --data DATA --dry-run",)
        level = Level.WAITS if kind in ("damaged", "no member") else Level.BLOCKS
        yield Finding(level, kind, text, _KINDS[kind], commands)
    if "disk full" in row.get("kinds", ()) and row["is_leader"]:
        text = f"the disk of node {node_id}, which leads, is full: produces are refused"
        remedy = f"make room on the disk of node {node_id}, or let another replica lead"
        command = f"raftmq leader transfer {name[0]} {name[1]} NODE"
        yield Finding(Level.BLOCKS, "disk full", text, remedy, (command,))


def _transaction(name: Name, row: Row) -> Iterator[Finding]:
    """What holds back readers of committed records."""
    held = row.get("open_transaction")
    if held is None or held["first_offset"] >= row["high_watermark"]:
        return
    start = (
        f"readers of committed records stop at offset {held['first_offset']} (high watermark "
        f"{row['high_watermark']}): "
    )
    producer = f"producer {held['producer_id']}, epoch {held['epoch']}"
    identity = held["transactional_id"]
    if identity is None:
        yield Finding(
            Level.BLOCKS,
            "orphaned transaction",
            f"{start}a transaction of {producer} is open there, and no transactional id owns it",
            "look whether it really hangs, then end it",
            (
                f"raftmq txn hanging -t {name[0]}",
                f"raftmq txn abort -t {name[0]}:{name[1]} --dry-run",
            ),
        )
        return
    open_ms, timeout_ms = held.get("open_ms"), held["timeout_ms"]
    ago = "" if open_ms is None else f" for {lasting(open_ms)}"
    text = f"{start}the transaction of {identity!r} ({producer}) is {held['state']}{ago}"
    if held["state"] != "Ongoing":
        remedy = "it is decided; each leader that owes a marker writes it"
        command = f"raftmq txn describe {identity}"
        yield Finding(Level.WAITS, "transaction ends", text, remedy, (command,))
        return
    text += f", its timeout is {lasting(timeout_ms)}"
    level = Level.WAITS if (open_ms or 0) <= timeout_ms else Level.BLOCKS
    if open_ms is not None and open_ms < BRIEF_MS:
        level = Level.NOTE
    remedy = "its producer ends it, or its timeout does"
    otherwise = ("at once, which shuts its producer out", f"raftmq txn abort {identity}")
    yield Finding(level, "open transaction", text, remedy, otherwise=otherwise)


# ---- moves ----


def _moves(view: _View, name: Name, row: Row | None) -> Iterator[Finding]:
    told = [m for m in view.moves if (m["topic"], m["partition"]) == name]
    reasons = {bool(m.get("is_running")): m.get("reason") or "" for m in told}
    rows = view.rows.get(name, {})
    if row is None:
        if not rows:
            return
        row = max(rows.values(), key=lambda r: int(r["leader_epoch"]))
    move, replicas = row.get("move") or {}, row.get("replicas", [])
    origin = f" ({move['origin']})" if move.get("origin") else ""
    if move.get("from"):
        text = (
            f"a move{origin} from {listed(move['from'])} to {listed(replicas)} is under way, "
            f"its voters are {listed(row['voters'])}"
        )
        reason = reasons.get(True, "")
        if reason:
            left = [n for n in move["from"] if n not in replicas]
            commands = _cancel(str(move.get("origin")), left)
            remedy = "it goes on once that is mended" + (", or take it back" if commands else "")
            yield Finding(Level.BLOCKS, "move is stuck", f"{text}: {reason}", remedy, commands)
        else:
            remedy = "its leader takes one step after the other"
            yield Finding(Level.WAITS, "move", text, remedy)
    if move.get("planned"):
        yield _planned(view, name, move["planned"], origin, reasons.get(False, ""))
    going = [n for n in replicas if view.brokers.get(n, {}).get("state") == "draining"]
    if going and not move.get("planned") and not move.get("from"):
        yield from _to_leave(view, name, going[0], replicas)


def _cancel(origin: str, left: Sequence[int]) -> tuple[str, ...]:
    """How whoever wanted a move takes it back."""
    if origin == "operator":
        return ("kafka-reassign-partitions.sh --cancel --reassignment-json-file FILE",)
    if origin == "drain" and left:
        return (f"raftmq node drain {left[0]} --cancel",)
    return ()


def _planned(view: _View, name: Name, planned: Sequence[int], origin: str, reason: str) -> Finding:
    text = f"a move{origin} to {listed(planned)} is planned and waits"
    if reason:
        commands = _cancel(origin.strip(" ()"), [])
        remedy = "it begins once that is mended" + (", or take it back" if commands else "")
        return Finding(Level.BLOCKS, "planned move is stuck", f"{text}: {reason}", remedy, commands)
    before = [f"{t}/{p}" for t, p in _running(view) if (t, p) != name]
    if not before:
        return Finding(Level.WAITS, "planned move", text, "the controller begins it next")
    return Finding(
        Level.WAITS,
        "planned move",
        f"{text} behind {len(before)} under way: {_few(before)}",
        "it begins when one of them ends; more at a time",
        ("raftmq cluster config set raftmq.moves.max=N",),
    )


def _running(view: _View) -> list[Name]:
    """Partitions that move now."""
    return sorted(
        name
        for name, rows in view.rows.items()
        if any((row.get("move") or {}).get("from") for row in rows.values())
    )


def _to_leave(view: _View, name: Name, going: int, replicas: Sequence[int]) -> Iterator[Finding]:
    """A replica that should go and does not yet: whether it has anywhere to go."""
    start = f"it is to leave node {going}, which is drained"
    if going in view.changes:
        told = view.changes[going]["stuck"]
        reasons = [row["reason"] for row in told if (row["topic"], row["partition"]) == name]
        fit: list[int] = []
    else:
        reasons, fit = _takers(view, going, replicas)
        reasons = [] if fit else [f"no broker can take it: {'; '.join(reasons) or 'none is left'}"]
    if not reasons:
        takers = listed([f"node {n}" for n in fit], "or")
        text = start + (f"; {takers} can take it" if fit else "")
        yield Finding(Level.WAITS, "drain", text, "the controller plans it in its turn")
        return
    yield Finding(
        Level.BLOCKS,
        "no target",
        f"{start}: {reasons[0]}",
        "add a node, or let one take replicas again",
        ("raftmq node add ID", "raftmq node uncordon ID"),
        otherwise=("keeping this one", f"raftmq node drain {going} --cancel"),
    )


def _takers(view: _View, going: int, replicas: Sequence[int]) -> tuple[list[str], list[int]]:
    """Why brokers cannot take a replica, and those that can: a guess where no planner tells."""
    racks = {view.brokers[n]["rack"] for n in replicas if n in view.brokers and n != going}
    reasons, fit = [], []
    for node_id, broker in sorted(view.brokers.items()):
        if node_id in replicas:
            continue
        state = broker.get("state", "active")
        if broker["is_fenced"]:
            reasons.append(f"node {node_id} is down")
        elif state != "active":
            reasons.append(f"node {node_id} is {state}")
        elif node_id in view.answers and view.answers[node_id]["disk"]["is_full"]:
            reasons.append(f"the disk of node {node_id} is full")
        elif broker["rack"] is not None and broker["rack"] in racks:
            reasons.append(f"rack {broker['rack']} of node {node_id} has a replica already")
        else:
            fit.append(node_id)
    return reasons, fit


def _removals(view: _View, is_wanted: Any) -> Iterator[Finding]:
    """Orders to delete that were not obeyed yet."""
    for row in filter(is_wanted, view.newest.get("removals", ())):
        for node_id in row["nodes"]:
            text = f"node {node_id} was ordered to delete its data of {row['topic']}/"
            text += f"{row['partition']} and has not"
            if node_id in view.answers:
                yield Finding(Level.WAITS, "removal", text, "it does once it has read the order")
                continue
            remedy = f"it does when it is back: start node {node_id}"
            otherwise = ("where it is gone for good", f"raftmq node remove {node_id}")
            text += f": {view.silence(node_id, 'it')}"
            yield Finding(Level.WAITS, "removal", text, remedy, (START,), otherwise=otherwise)


# ---- nodes ----


def _node(view: _View, node_id: int) -> Iterator[Finding]:
    if node_id not in view.node_ids:
        text = f"no node that answers knows a node {node_id}"
        yield Finding(Level.BLOCKS, "unknown", text, "", ("raftmq node list",))
        return
    for other in view.answers.values():
        if text := other.get("turned_away", {}).get(str(node_id)):
            yield Finding(Level.BLOCKS, "turned away", text)
            break
    answer = view.answers.get(node_id)
    if answer is None:
        yield from _silent_node(view, node_id)
    else:
        yield from _answering_node(view, node_id, answer)
    yield from _node_state(view, node_id)
    yield from _removals(view, lambda row: node_id in row["nodes"])
    troubled = [
        f"{topic}/{partition}"
        for (topic, partition), rows in sorted(view.rows.items())
        if any(node_id in row["voters"] and row["troubles"] for row in rows.values())
    ]
    if troubled:
        text = f"in trouble: {counted(len(troubled), 'partition')} of it ({_few(troubled)})"
        yield Finding(Level.NOTE, "partitions", text, "", (f"raftmq why {troubled[0]}",))


def _silent_node(view: _View, node_id: int) -> Iterator[Finding]:
    held = view.brokers.get(node_id, {}).get("replicas", 0)
    lost = [
        f"{topic}/{partition}"
        for (topic, partition), rows in sorted(view.rows.items())
        if view.leader_of((topic, partition)) is None
        and any(node_id in row["voters"] for row in rows.values())
    ]
    text = view.silence(node_id)
    if held:
        text += f"; it holds {counted(held, 'replica')}"
    if lost:
        text += f"; without it these have no leader: {_few(lost)}"
    otherwise = (
        "where it is gone for good, another may take its place",
        f"raftmq node replace {node_id} NEW",
    )
    yield Finding(Level.BLOCKS, "node down", text, "start it", (START,), otherwise=otherwise)


def _answering_node(view: _View, node_id: int, answer: Row) -> Iterator[Finding]:
    disk, isolation = answer["disk"], answer["isolation"]
    if isolation["is_isolated"] and not _is_lost(view):
        since = lasting(isolation["isolated_ms"])
        deaf = [n for n in view.answers if n != node_id and not view.can_hear(node_id, n)]
        text = f"it has seen no majority of the metadata group for {since}: it leads nothing new"
        if deaf:
            text += f"; it does not reach {nodes(deaf)}"
        yield Finding(Level.BLOCKS, "isolated", text, "whoever runs the network to its peer port")
    elif answer["health"]["status"] != "ok":
        text = f"clients are not sent to it: {answer['health'].get('reason', 'it is not ready')}"
        level = Level.WAITS if answer["health"].get("is_live", True) else Level.BLOCKS
        yield Finding(level, "not ready", text)
    if disk["is_full"]:
        text = f"its disk is full: produces are refused ({sized(disk['free_bytes'])} free)"
        remedy = "make room there, or keep less"
        command = "raftmq topic alter TOPIC --set retention.bytes=N"
        yield Finding(Level.BLOCKS, "disk full", text, remedy, (command,))
    if disk.get("is_stuck"):
        text = "its disk does not answer: a flush has not come back"
        yield Finding(Level.BLOCKS, "disk stuck", text, _KINDS["disk stuck"], (START,))
    if answer["metadata"].get("failure"):
        text = f"its replica of the metadata group stopped: {answer['metadata']['failure']}"
        yield Finding(Level.BLOCKS, "metadata stopped", text, "start it again", (START,))
    if answer["journal_is_damaged"]:
        text = "its journal of votes was damaged: its replicas vote once leaders admitted them anew"
        yield Finding(Level.WAITS, "journal damaged", text)
    for rival in answer.get("rivals", ()):
        text = (
            f"node_id {rival['node_id']} is used twice: a process at {rival['address']} is refused"
        )
        yield Finding(Level.BLOCKS, "rival", text, "stop it, or give it a node_id of its own")
    stopped = [f"{r['topic']}/{r['partition']}" for r in answer["partitions"] if r["failure"]]
    if stopped:
        text = f"stopped: {counted(len(stopped), 'replica')} of it ({_few(stopped)})"
        yield Finding(Level.BLOCKS, "stopped", text, "", (f"raftmq why {stopped[0]}",))
    if answer["not_running"]:
        text = f"not running yet, as they should: {counted(len(answer['not_running']), 'replica')}"
        yield Finding(Level.WAITS, "not running", text)
    if answer["quarantined"]:
        text = (
            f"in quarantine, as no order names it: {counted(len(answer['quarantined']), 'folder')}"
        )
        yield Finding(Level.NOTE, "quarantine", text, "look at them, then delete them by hand")
    yield from _level(view, node_id, answer)


def _level(view: _View, node_id: int, answer: Row) -> Iterator[Finding]:
    """Its version, against those of the others."""
    told = {n: a["features"] for n, a in view.answers.items() if "features" in a}
    if node_id not in told:
        return
    own, level = told[node_id]["supported_level"], told[node_id]["level"]
    best = max(one["supported_level"] for one in told.values())
    if own < best:
        text = (
            f"its version supports raftmq.level {own}, others {best}: the cluster stays at {level}"
        )
        yield Finding(
            Level.NOTE, "older version", text, "start it with the newer version", (START,)
        )
    elif all(one["supported_level"] > level for one in told.values()):
        text = f"all nodes that answer support raftmq.level {best}, the cluster is at {level}"
        command = f"raftmq cluster features --raise raftmq.level={best}"
        yield Finding(Level.NOTE, "level", text, "an operator raises it, for good", (command,))


def _node_state(view: _View, node_id: int) -> Iterator[Finding]:
    """What the cluster makes of it."""
    broker = view.brokers.get(node_id)
    if broker is None:
        text = "it is not registered as a broker yet"
        yield Finding(Level.WAITS, "unregistered", text, "it registers once it sees a controller")
        return
    held = broker.get("replicas", 0)
    if broker["is_fenced"] and node_id in view.answers:
        since = broker.get("fenced_ms")
        ago = "" if since is None else f" for {lasting(since)}"
        text = f"the controller has it fenced{ago}: out of Metadata, though it answers here"
        yield Finding(Level.WAITS, "fenced", text, "it is let in once its heartbeats arrive")
    state = broker.get("state", "active")
    if state == "new":
        text = "it is new: it takes no data until it is asked to"
        yield Finding(Level.BLOCKS, "new", text, "an operator", (f"raftmq node add {node_id}",))
    elif state == "cordoned":
        text = f"it is cordoned: it keeps {counted(held, 'replica')} and gets no new ones"
        command = f"raftmq node uncordon {node_id}"
        yield Finding(Level.NOTE, "cordoned", text, "an operator", (command,))
    elif state == "maintenance":
        text = f"it is in maintenance: it leads nothing and gets no new replicas (it has {held})"
        command = f"raftmq node maintenance {node_id} --end"
        yield Finding(Level.NOTE, "maintenance", text, "an operator", (command,))
    elif state == "draining":
        yield from _draining(view, node_id, held)


def _draining(view: _View, node_id: int, held: int) -> Iterator[Finding]:
    change = view.changes.get(node_id, {})
    left = [counted(change.get("partitions", held), "replica")]
    left += [counted(change[key], word) for key, word in _LEFT.items() if change.get(key)]
    if not (held or change.get("partitions") or change.get("groups")):
        text = "it is drained and holds nothing any more"
        command = f"raftmq node remove {node_id}"
        yield Finding(Level.NOTE, "drained", text, "stop it, then", (command,))
        return
    stuck = [(f"{row['topic']}/{row['partition']}") for row in change.get("stuck", ())]
    if not change:
        for name, rows in sorted(view.rows.items()):
            if any(node_id in row.get("replicas", ()) for row in rows.values()):
                led = view.leader_of(name)
                found = [*_moves(view, name, None if led is None else led[1])]
                if led is None or any(one.level is Level.BLOCKS for one in found):
                    stuck.append(f"{name[0]}/{name[1]}")
    text = f"it is drained; left on it: {listed(left)}"
    cancel = f"raftmq node drain {node_id} --cancel"
    if not stuck:
        otherwise = ("to keep it", cancel)
        remedy = "that goes on by itself"
        yield Finding(Level.WAITS, "draining", text, remedy, otherwise=otherwise)
        return
    text += f", of which {len(stuck)} cannot go now: {_few(stuck)}"
    why = (f"raftmq why {stuck[0]}",)
    otherwise = ("to keep it", cancel)
    yield Finding(
        Level.BLOCKS, "draining is stuck", text, "each says why", why, otherwise=otherwise
    )


def summary(reports: Sequence[NodeReport], what: PartitionAsked) -> str:
    """Who leads a partition, and who is in sync, in a line."""
    view = _View(reports)
    led = view.leader_of((what.topic, what.partition))
    if led is None:
        return ""
    leader, row = led
    return (
        f"node {leader} leads at epoch {row['leader_epoch']}; voters {listed(row['voters'])}, "
        f"in sync {listed(row['isr'])}"
    )
