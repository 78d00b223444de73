"""`raftmq cluster balance`: even out replicas and preferred leaderships over brokers and racks.

The controller plans the moves and the cluster makes them by itself, a few at a time; the command
shows what and why, how far it is, and in the end whether every partition is where the plan wanted
it. It may be ended at any time, and run again to go on watching.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from raftmq.cli.admin_port import AdminPort, give_order, open_admin_port
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    SHOWN_MAX,
    WAIT_S,
    AsJson,
    Bootstrap,
    NoWait,
    Progress,
    Timeout,
    Wait,
    out_first,
    out_left,
    reported,
    show,
    show_json,
    time_left_text,
    watch,
)
from raftmq.cli.console import out

MOVE_COLUMNS: Final = ("Partition", "From", "To", "Bytes", "Why")
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")

Move = Mapping[str, Any]


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
