"""`raftmq why`: what blocks a partition or a node, who could unblock it, and with which command.

Asks every node that can be found for its `/status`, those whose clients nobody serves too, and lets
`explain.py` say what that means. Ends with 1 while something blocks, as `cluster status` does.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import typer

from raftmq.cli import completion
from raftmq.cli.admin_port import admin_request, open_page
from raftmq.cli.cluster import NODE_TIMEOUT_S
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    AdminPorts,
    AsJson,
    Bootstrap,
    CommandError,
    Timeout,
    check_reachable,
    client_security,
    parse_addresses,
    reported,
    show_json,
)
from raftmq.cli.console import EXIT_FAILED, EXIT_UNKNOWN, EXIT_USAGE, out
from raftmq.cli.explain import (
    METADATA_LOST,
    Asked,
    Finding,
    Level,
    MetadataAsked,
    NodeAsked,
    PartitionAsked,
    explain,
    partitions_in_trouble,
    summary,
)
from raftmq.cli.picture import Picture, take_picture
from raftmq.foreign import visible
from raftmq_client.blocking.admin import Admin
from raftmq_client.errors import ClientError

WIDTH: Final = 80
SHOWN_MAX: Final = 20
_HEADS: Final = {Level.BLOCKS: "BLOCKED", Level.WAITS: "under way", Level.NOTE: "note"}
_USAGE: Final = "what? A partition (orders/3), a node (node 2), or nothing for all that is stuck"


def why(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TOPIC/PARTITION | node ID",
            autocompletion=completion.stuck,
            help="Nothing: all that is stuck.",
        ),
    ] = None,
    admin_ports: AdminPorts = "",
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Say what blocks a partition or a node, who could unblock it, and which command would.

    Ends with 0 when nothing blocks (what goes on by itself is shown, too), with 1 when something
    does, with 3 when no node tells.

    Examples: raftmq why orders/3; raftmq why node 2; raftmq why
    """
    with reported():
        asked = parse_asked(what or [])
        addresses = parse_addresses(admin_ports, "--admin")
        picture = _picture(bootstrap, timeout, addresses)
        if not picture.answers:
            said = "; ".join(f"{r.address}: {r.failure}" for r in picture.reports)
            raise CommandError(f"no node tells: {said or 'no admin port is known'}", EXIT_UNKNOWN)
        patience_s = min(timeout, NODE_TIMEOUT_S)
        moves = _page(picture, "/moves", "moves", patience_s)
        changes = _page(picture, "/nodes", "changes", patience_s)
        answers = [
            (one, explain(picture.reports, one, moves, changes)) for one in _all_of(picture, asked)
        ]
        if asked is None:
            answers = _once(answers)
        _show(picture, answers, as_json=as_json)
        if any(one.level is Level.BLOCKS for _, found in answers for one in found):
            raise typer.Exit(EXIT_FAILED)


def parse_asked(words: Sequence[str]) -> Asked | None:
    """What the words ask about; None: about everything.

    Raises:
        CommandError: they name neither a partition nor a node.
    """
    if not words:
        return None
    if len(words) == 2 and words[0] == "node" and words[1].isdecimal():
        return NodeAsked(int(words[1]))
    topic, slash, number = words[0].rpartition("/")
    if len(words) == 1 and slash and topic and number.isdecimal():
        return PartitionAsked(topic, int(number))
    raise CommandError(_USAGE, EXIT_USAGE)


def _picture(bootstrap: str, timeout: float, addresses: list[str]) -> Picture:
    """What all nodes tell; an admin port that was named does where no client port answers."""
    patience_s = min(timeout, NODE_TIMEOUT_S)
    try:
        check_reachable(bootstrap, 0.0)
        with Admin(bootstrap, security=client_security(), timeout_ms=patience_s * 1e3) as admin:
            return take_picture(admin, addresses, patience_s)
    except ClientError:
        if not addresses:
            raise
        return take_picture(None, addresses, patience_s)


def _page(picture: Picture, page: str, key: str, timeout_s: float) -> list[dict[str, Any]]:
    """The rows of a page of the first node that has them."""
    for report in picture.reports:
        if report.status is None:
            continue
        try:
            request = admin_request(report.address, page)
            with open_page(request, timeout_s) as answer:
                told = msgspec.json.decode(answer.read(), type=dict[str, Any])
        except (OSError, ValueError, msgspec.MsgspecError):
            continue  # an older node, or one that went away: the others may know
        rows: list[dict[str, Any]] = told.get(key, [])
        return rows
    return []


def _all_of(picture: Picture, asked: Asked | None) -> list[Asked]:
    if asked is not None:
        return [asked]
    voters = (picture.metadata() or {}).get("voters", ())
    brokers = [b["node_id"] for answer in picture.answers for b in answer["brokers"]]
    known = sorted({r.node_id for r in picture.reports if r.node_id >= 0}.union(voters, brokers))
    partitions = partitions_in_trouble(picture.reports)
    return [MetadataAsked(), *map(NodeAsked, known), *partitions]


def _once(answers: Sequence[tuple[Asked, list[Finding]]]) -> list[tuple[Asked, list[Finding]]]:
    """What is more than a note; what the metadata group lacks is said of that alone."""
    rows = []
    for one, found in answers:
        if not isinstance(one, MetadataAsked):
            found = [each for each in found if each.kind != METADATA_LOST]
        if _is_news(found):
            rows.append((one, found))
    return rows


def _is_news(found: Sequence[Finding]) -> bool:
    return any(one.level is not Level.NOTE for one in found)


def _show(
    picture: Picture, answers: Sequence[tuple[Asked, list[Finding]]], *, as_json: bool
) -> None:
    if as_json:
        show_json([_as_dict(one, found) for one, found in answers])
        return
    if not answers:
        out("nothing is stuck, and nothing is under way")
    for one, found in answers[:SHOWN_MAX]:
        line = summary(picture.reports, one) if isinstance(one, PartitionAsked) else ""
        _out_wrapped(f"{one}: {line}" if line else f"{one}:", 0)
        for finding in found:
            _show_finding(finding)
        if not _is_news(found):
            _out_wrapped("nothing blocks it", 2)
    if len(answers) > SHOWN_MAX:
        out(f"... and {len(answers) - SHOWN_MAX} more (--json has all)")


def _show_finding(finding: Finding) -> None:
    _out_wrapped(f"{_HEADS[finding.level]}: {finding.text}", 2)
    if finding.remedy:
        _out_wrapped(f"-> {finding.remedy}{':' if finding.commands else ''}", 4)
    for command in finding.commands:
        out(f"       {visible(command)}")
    if finding.otherwise is not None:
        words, command = finding.otherwise
        _out_wrapped(f"-> or, {words}:", 4)
        out(f"       {visible(command)}")


def _out_wrapped(text: str, indent: int) -> None:
    first, rest = " " * indent, " " * (indent + 2)
    for line in textwrap.wrap(
        visible(text), WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    ):
        out(line)


def _as_dict(one: Asked, found: Sequence[Finding]) -> dict[str, Any]:
    return {
        "What": str(one),
        "IsBlocked": any(finding.level is Level.BLOCKS for finding in found),
        "Findings": [
            {
                "Level": finding.level.value,
                "Kind": finding.kind,
                "Text": finding.text,
                "Remedy": finding.remedy or None,
                "Commands": list(finding.commands),
                "Otherwise": finding.otherwise and finding.otherwise[1],
            }
            for finding in found
        ],
    }
