"""`raftmq recover`: unsafe recovery of a stopped node's data folder.

It takes the folder's lock, so it is refused while the node runs. It first reports what would be
done and what may be lost, and changes nothing without a yes. `tools/` does the work.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
import typer

from raftmq.cli.common import AsJson, CommandError, reported, show_json
from raftmq.cli.console import EXIT_USAGE, out
from raftmq.types import NodeId

if TYPE_CHECKING:
    from raftmq.metadata.image import MetadataImage
    from raftmq.raft.membership import Configuration
    from raftmq.runtime.data_folder import DataFolder
    from raftmq.tools.command_skip import StuckCommand
    from raftmq.tools.term_reset import HeldTerm
    from raftmq.tools.unsafe_recovery import Findings, GroupReport, Loss, Place

PROBE_S: Final = 1.0
NAMES_MAX: Final = 20

TopicName: TypeAlias = Annotated[
    str | None, typer.Argument(metavar="TOPIC", help="With --accept-loss or --reset-term.")
]
PartitionIndex: TypeAlias = Annotated[
    int | None,
    typer.Argument(metavar="PARTITION", help="With --accept-loss or --reset-term.", min=0),
]
SkipCommand: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--skip-command",
        metavar="OFFSET",
        help="Pass over a metadata command that no node can apply.",
        min=0,
    ),
]
Agree: TypeAlias = Annotated[
    str,
    typer.Option(
        "--agree",
        metavar="TOKEN,...",
        help="What --dry-run printed: with --skip-command on a majority of metadata voters, "
        "with --reset-term on every voter of the partition.",
    ),
]
Survivors: TypeAlias = Annotated[
    str,
    typer.Option(
        "--survivors",
        metavar="ID,...",
        help="All nodes that go on, the same list on each of them. Default: this one, with "
        "--reset-term all voters.",
    ),
]


def recover(
    topic: TopicName = None,
    partition: PartitionIndex = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="The stopped node's data folder.")
    ] = None,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="Go on without the majority that is lost for good.")
    ] = False,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Go on without records nobody can repair.")
    ] = False,
    skip_command: SkipCommand = None,
    reset_term: Annotated[
        bool,
        typer.Option("--reset-term", help="Set back a term that no election can have reached."),
    ] = False,
    agree: Agree = "",
    survivors: Survivors = "",
    even_if_alive: Annotated[
        bool,
        typer.Option("--even-if-alive", help="Although something answers where a lost node was."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give up what is lost: a majority of nodes, damage that no replica can repair, a metadata
    command that no node can apply, or a term that no election can have reached.

    Last resort, on a stopped node. Acknowledged records may be gone afterwards; what and where is
    told first. Nodes that were given up must never come back with their old data.

    Examples: raftmq recover --unsafe --data DATA --survivors 1,4
              raftmq recover --accept-loss orders 3 --data DATA
              raftmq recover --skip-command 812 --data DATA --dry-run
              raftmq recover --reset-term orders 3 --data DATA --dry-run
    """
    with reported():
        if unsafe + accept_loss + (skip_command is not None) + reset_term != 1:
            raise CommandError(
                "say --unsafe, --accept-loss, --skip-command or --reset-term", EXIT_USAGE
            )
        if data is None:
            raise CommandError("say --data DIR, the stopped node's data folder", EXIT_USAGE)
        _check_topic(topic, partition, unsafe=unsafe, of_partition=accept_loss or reset_term)
        opened = _StoppedNode(data)
        try:
            ids = _parse_ids(survivors)
            if unsafe:
                own = (opened.node_id,)
                _recover_majority(opened, ids or own, even_if_alive, yes, dry_run, as_json)
            elif skip_command is not None:
                _recover_command(opened, skip_command, agree, yes, dry_run, as_json)
            elif reset_term:
                assert topic is not None
                assert partition is not None
                held = _held_term(opened, topic, partition, as_json)
                if not dry_run:
                    _recover_term(opened, held, _words(agree), ids, even_if_alive, yes, as_json)
            else:
                assert topic is not None
                assert partition is not None
                _recover_damage(opened, topic, partition, yes, dry_run, as_json)
        finally:
            opened.close()


def _check_topic(
    topic: str | None, partition: int | None, *, unsafe: bool, of_partition: bool
) -> None:
    if of_partition and (topic is None or partition is None):
        raise CommandError("--accept-loss and --reset-term take TOPIC and PARTITION", EXIT_USAGE)
    if unsafe and topic is not None:
        raise CommandError("--unsafe is about all groups of the node", EXIT_USAGE)
    if not of_partition and topic is not None:
        raise CommandError("--skip-command is about metadata, no topic", EXIT_USAGE)


class _StoppedNode:
    """A stopped node's folder, locked, with its journal."""

    def __init__(self, data: Path) -> None:
        from raftmq.log.journal import HardStateJournal
        from raftmq.runtime.clock import RealClock
        from raftmq.runtime.data_folder import DataFolder
        from raftmq.runtime.disk import RealDisk
        from raftmq.tools.unsafe_recovery import Place
        from raftmq.types import ReplicaId

        disk = RealDisk()
        self.folder: DataFolder = DataFolder.open_known(disk, data)
        self.node_id = NodeId(self.folder.node.node_id)
        path = f"{self.folder.path}/state.journal"
        self.place: Place = Place(
            disk=disk,
            path=self.folder.path,
            node=ReplicaId(self.node_id, self.folder.storage_id),
            journal=HardStateJournal.open(disk, path, is_expected=True),
            clock=RealClock(),
            skips=self.folder.load_formation().skips,
        )

    def close(self) -> None:
        """Let go of journal and lock."""
        self.place.journal.close()
        self.folder.close()


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _parse_ids(text: str) -> tuple[NodeId, ...]:
    words = _words(text)
    if not all(word.isdigit() for word in words):
        raise CommandError(f"--survivors {text!r}: node ids, such as 1,4", EXIT_USAGE)
    return tuple(sorted({NodeId(int(word)) for word in words}))


# ---- a lost majority ----


def _recover_majority(
    opened: _StoppedNode,
    survivors: tuple[NodeId, ...],
    even_if_alive: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    from raftmq.tools.unsafe_recovery import check_is_lost, recover_lost_majorities, report_groups

    formation = opened.folder.load_formation()
    ids = ",".join(str(node_id) for node_id in survivors)
    if formation.recovering not in ("", ids):
        raise CommandError(
            f"a recovery with --survivors {formation.recovering} was begun here: finish that one"
        )
    findings = report_groups(opened.place, survivors)
    if not formation.recovering:
        check_is_lost(findings, survivors)
        if not even_if_alive:
            _check_silence(
                findings.image,
                _lost_nodes(findings, survivors),
                "it is not lost. If it is no raftmq node any more, say --even-if-alive",
            )
    if as_json:
        show_json(_json_of(findings, survivors))
    else:
        for line in _majority_text(opened, findings, survivors):
            out(line)
    if dry_run:
        return
    _confirm(yes, f"Go on with nodes {ids} alone?")
    replace = msgspec.structs.replace
    if not formation.recovering:
        # From here on the node does not start before this recovery is finished: a run that finds
        # one begun goes on with it.
        fences = (ids,) if _loses_metadata(findings) else ()
        recoveries = (*formation.recoveries, *fences)
        formation = replace(formation, recovering=ids, recoveries=recoveries)
        opened.folder.save_formation(formation)
    recover_lost_majorities(opened.place, findings)
    opened.folder.save_formation(replace(formation, recovering=""))
    if not as_json:
        replace_lost = (
            "Then let new nodes take the place of the lost: `raftmq node replace LOST NEW`."
        )
        out(
            f"Done. Start node {opened.node_id}"
            + (f", after the same on the others of {ids}." if len(survivors) > 1 else ".")
            + (f" {replace_lost}" if _lost_nodes(findings, survivors) else "")
        )


def _loses_metadata(findings: Findings) -> bool:
    from raftmq.tools.unsafe_recovery import Verdict

    return findings.metadata.verdict is Verdict.RECOVERED


def _lost_nodes(findings: Findings, survivors: Sequence[NodeId]) -> list[NodeId]:
    from raftmq.tools.unsafe_recovery import Verdict

    members = {
        member.node_id: True
        for report in findings.of(Verdict.RECOVERED)
        for member in report.before.members
    }
    return sorted(node_id for node_id in members if node_id not in survivors)


def _unknown_nodes(findings: Findings, survivors: Sequence[NodeId]) -> list[NodeId]:
    """Survivors that nothing on this node's disk mentions: typing errors, or nodes that joined
    after this one was last up."""
    known = {member.node_id: True for report in findings.groups for member in report.before.members}
    brokers = {} if findings.image is None else findings.image.brokers
    return [n for n in survivors if n not in known and n not in brokers]


def _check_silence(image: MetadataImage | None, nodes: Sequence[NodeId], says: str) -> None:
    """Refuse where something listens at the address of one of these nodes.

    Raises:
        CommandError: something does; `says` what that means.
    """
    if image is None:
        return
    for node_id in nodes:
        broker = image.brokers.get(node_id)
        endpoint = None if broker is None else broker.endpoint("peer")
        if endpoint is None:
            continue
        try:
            socket.create_connection((endpoint.host, endpoint.port), PROBE_S).close()
        except OSError:
            continue  # as expected of a node that does not run
        raise CommandError(
            f"something answers at {endpoint.host}:{endpoint.port}, where node {node_id} was: "
            f"{says}"
        )


def _majority_text(
    opened: _StoppedNode, findings: Findings, survivors: Sequence[NodeId]
) -> list[str]:
    from raftmq.tools.unsafe_recovery import Verdict

    recovered = findings.of(Verdict.RECOVERED)
    lost = ", ".join(str(n) for n in _lost_nodes(findings, survivors))
    ids = ", ".join(str(n) for n in survivors)
    lines = [
        f"Node {opened.node_id} of cluster {opened.folder.node.cluster_id!r}, "
        f"data {opened.folder.path}",
        f"Survivors: {ids}. Given up: {lost or 'nobody'}.",
        "",
        *(_FORGOTTEN if findings.metadata.is_forgotten else ()),
        *_unknown_text(_unknown_nodes(findings, survivors)),
        f"{len(recovered)} groups lost their majority and go on with the survivors:",
    ]
    for report in recovered:
        lines += _group_text(report)
    stays = findings.of(Verdict.STAYS)
    if stays:
        lines += ["", f"{len(stays)} groups keep a majority and stay as they are."]
    for report in findings.of(Verdict.UNREADABLE):
        lines += ["", f"{report.name} cannot be read here and is left: {report.note}"]
    if findings.image is None:
        lines += [
            "",
            "Metadata cannot be read to its end here: topics that survive nowhere are not listed.",
        ]
    if findings.gone:
        lines += [
            "",
            f"{len(findings.gone)} partitions had no replica on a survivor: all of their records "
            f"are lost: {_shortened(findings.gone)}",
        ]
    lines += ["", *_warning(findings, lost)]
    return lines


_FORGOTTEN: Final = (
    "state.journal is lost: nobody knows any more how this node voted, and how far its logs were",
    "flushed. They are taken as they are, so an end that a crash tore off is not missed.",
    "",
)


def _unknown_text(unknown: Sequence[NodeId]) -> list[str]:
    if not unknown:
        return []
    ids = ", ".join(str(n) for n in unknown)
    return [
        f"Nothing here mentions node {ids}. If that is a typing error, stop now: the node that was",
        "meant would be given up. If it joined after this node was last up, go on.",
        "",
    ]


def _warning(findings: Findings, lost: str) -> list[str]:
    if not lost:
        return []
    lines = [
        "What may be lost: records that were acknowledged by the nodes given up and had not",
        "reached a survivor. They can only lie at or above the end shown; how many there were,",
        "nobody here can know. Offsets from there on are given out again, to other records.",
        "What may appear: records between the last known commit and the end, some of which were",
        "never acknowledged.",
    ]
    if _loses_metadata(findings):
        lines += [
            "Metadata, too, ends where this log ends: topics, configs, group offsets and group",
            "generations that were decided later are gone. Producer ids are skipped by a million.",
            f"Nodes {lost} are fenced by a new formation: they are refused with their old data,",
            "and must come back with empty disks only, while a survivor is up.",
        ]
    else:
        lines += [
            f"Nodes {lost} must never come back with their old data: wipe them first. Metadata",
            "keeps its majority, so nothing else fences them.",
        ]
    return lines


def _group_text(report: GroupReport) -> list[str]:
    assert report.after is not None
    lines = [
        f"  {report.name}: voters {_members(report.before)} -> {_members(report.after)}",
        f"    has offsets [{report.log_start}, {report.log_end}), flushed to "
        f"{report.flushed_end}, last known commit {report.high_watermark}, leader epoch "
        f"{report.last_epoch}",
        f"    acknowledged records at or above {report.log_end} may be gone",
    ]
    if report.damaged:
        spans = ", ".join(f"[{start}, {end})" for start, end in report.damaged)
        lines.append(f"    damaged here: {spans}; see `raftmq recover --accept-loss`")
    return lines


def _members(configuration: Configuration) -> str:
    text = ",".join(str(voter.node_id) for voter in configuration.voters)
    learners = ",".join(str(learner.node_id) for learner in configuration.learners)
    return f"{text} (learners {learners})" if learners else text


def _shortened(names: Sequence[str]) -> str:
    more = len(names) - NAMES_MAX
    return ", ".join(names[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


def _json_of(findings: Findings, survivors: Sequence[NodeId]) -> dict[str, Any]:
    return {
        "survivors": list(survivors),
        "given_up": _lost_nodes(findings, survivors),
        "unknown": _unknown_nodes(findings, survivors),
        "gone": list(findings.gone),
        "groups": [
            {
                "name": report.name,
                "verdict": report.verdict.name.lower(),
                "voters": [v.node_id for v in report.before.voters],
                "voters_after": None
                if report.after is None
                else [v.node_id for v in report.after.voters],
                "log_start": report.log_start,
                "log_end": report.log_end,
                "flushed_end": report.flushed_end,
                "high_watermark": report.high_watermark,
                "leader_epoch": report.last_epoch,
                "damaged": [list(span) for span in report.damaged],
                "note": report.note,
            }
            for report in findings.groups
        ],
    }


# ---- damage ----


def _recover_damage(
    opened: _StoppedNode, topic: str, partition: int, yes: bool, dry_run: bool, as_json: bool
) -> None:
    from raftmq.tools.unsafe_recovery import accept_loss, report_loss

    loss = report_loss(opened.place, topic, partition)
    if as_json:
        show_json(
            {
                "name": loss.report.name,
                "log_start": loss.report.log_start,
                "log_end": loss.report.log_end,
                "damaged": [list(span) for span in loss.damaged],
                "cut": None if loss.cut is None else list(loss.cut),
                "is_anew": loss.is_anew,
                "others": list(loss.others),
                "endless_transactions": [
                    {"producer_id": one.producer_id, "epoch": one.epoch, "first_offset": one.first}
                    for one in loss.endless
                ],
            }
        )
    else:
        for line in _loss_text(loss):
            out(line)
    if dry_run:
        return
    _confirm(yes, f"Accept the loss on {loss.report.name}?")
    accept_loss(opened.place, loss)
    if not as_json:
        out(f"Done. Start node {opened.node_id}.")


def _loss_text(loss: Loss) -> list[str]:
    report = loss.report
    lines = [f"{report.name}: offsets [{report.log_start}, {report.log_end}) on this node"]
    for start, end in loss.damaged:
        lines.append(
            f"  damaged: [{start}, {end}): these {end - start} offsets go; readers pass over them"
        )
    if loss.cut is not None:
        start, end = loss.cut
        lines.append(
            f"  cut off by a crash: [{start}, {end}) was written and perhaps promised; this node "
            "will vote and lead without it, and those offsets are given out again"
        )
    if loss.is_anew:
        lines.append(
            "  nothing that this partition held before can be read: everything goes, and offsets "
            "begin at 0 again"
        )
    where = report.name.rpartition("-")
    for one in loss.endless:
        lines.append(
            f"  the end of a transaction may be lost: that of producer {one.producer_id}, epoch "
            f"{one.epoch}, from offset {one.first} on. If it is, readers of committed records stop "
            f"there (`raftmq txn hanging`) until `raftmq txn abort -t {where[0]}:{where[2]} "
            f"--producer-id {one.producer_id}` aborts it"
        )
    if loss.others:
        ids = ", ".join(str(node_id) for node_id in loss.others)
        lines.append(
            f"  nodes {ids} have replicas, too: what one of them still has is repaired from it by "
            "itself. Accept the loss only where none of them ever comes back with it"
        )
    return lines


# ---- a command that cannot be applied ----


def _recover_command(
    opened: _StoppedNode, offset: int, agree: str, yes: bool, dry_run: bool, as_json: bool
) -> None:
    from raftmq.tools.command_skip import check_agreed, find_stuck_command

    formation = opened.folder.load_formation()
    if formation.recovering:
        raise CommandError(
            f"a recovery with --survivors {formation.recovering} was begun here: finish that one"
        )
    stuck = find_stuck_command(opened.place, offset)
    if as_json:
        show_json(_stuck_json(stuck))
    else:
        for line in _stuck_text(opened, stuck):
            out(line)
    if dry_run:
        return
    check_agreed(stuck, _words(agree))
    _confirm(yes, f"Have node {opened.node_id} pass over this command for good?")
    skips = (*formation.skips, stuck.skip)
    opened.folder.save_formation(msgspec.structs.replace(formation, skips=skips))
    if not as_json:
        out(f"Done. Start node {opened.node_id} after the same on all other nodes.")


def _stuck_json(stuck: StuckCommand) -> dict[str, Any]:
    skip = stuck.skip
    return {
        "offset": skip.offset,
        "leader_epoch": skip.leader_epoch,
        "sha256": skip.sha256,
        "command": stuck.error.value.decode("utf-8", "backslashreplace"),
        "error": stuck.error.reason,
        "voters": list(stuck.voters),
        "token": stuck.token,
    }


def _stuck_text(opened: _StoppedNode, stuck: StuckCommand) -> list[str]:
    from raftmq.metadata.state_machine import shown

    skip = stuck.skip
    voters = ",".join(str(node_id) for node_id in stuck.voters)
    return [
        f"Node {opened.node_id} of cluster {opened.folder.node.cluster_id!r}, "
        f"data {opened.folder.path}",
        f"The metadata command at offset {skip.offset}, leader epoch {skip.leader_epoch}, cannot "
        "be applied:",
        f"  command: {shown(stuck.error.value)}",
        f"  sha256: {skip.sha256}",
        f"  error: {stuck.error.reason}",
        "Skipped, it has no effect on any node: whoever sent it is not told, and what it was to "
        "change stays as it was.",
        f"{stuck.majority} of the metadata voters {voters} must agree.",
        f"token: {stuck.token}",
    ]


# ---- a term that no election can have reached ----


def _held_term(opened: _StoppedNode, topic: str, partition: int, as_json: bool) -> HeldTerm:
    """Read the term on this node's disk, and show it."""
    from raftmq.tools.term_reset import read_held_term

    held = read_held_term(opened.place, topic, partition)
    token = held.token
    if as_json:
        show_json(
            {
                "name": held.name,
                "term": token.term,
                "leader_epoch": token.last_epoch,
                "is_absurd": token.is_absurd,
                "vote": None if held.state.vote is None else held.state.vote.node_id,
                "voters": list(token.voters),
                "token": str(token),
            }
        )
        return held
    vote = "nobody" if held.state.vote is None else f"node {held.state.vote.node_id}"
    voters = ",".join(str(node_id) for node_id in token.voters)
    judged = "no election can have led there" if token.is_absurd else "an election can lead there"
    for line in (
        f"Node {opened.node_id} of cluster {opened.folder.node.cluster_id!r}, "
        f"data {opened.folder.path}",
        f"{held.name}: term {token.term}, last leader epoch in the log {token.last_epoch}: "
        f"{judged}.",
        f"In that term this node voted for {vote}.",
        f"All voters {voters} must be stopped, and stay so until the last of them is done.",
        f"token: {token}",
    ):
        out(line)
    return held


def _recover_term(
    opened: _StoppedNode,
    held: HeldTerm,
    tokens: Sequence[str],
    survivors: Sequence[NodeId],
    even_if_alive: bool,
    yes: bool,
    as_json: bool,
) -> None:
    from raftmq.tools.term_reset import TermToken, agreed_term, record_of, reset_term
    from raftmq.tools.unsafe_recovery import read_image

    formation = opened.folder.load_formation()
    if formation.recovering:
        raise CommandError(
            f"a recovery with --survivors {formation.recovering} was begun here: finish that one"
        )
    new_term = agreed_term(held, tokens, survivors)
    spoken = [held.token, *(TermToken.parse(token) for token in tokens)]
    nodes = {node_id for token in spoken for node_id in (token.node_id, *token.voters)}
    others = sorted(nodes - {opened.node_id})
    if not even_if_alive:
        _check_silence(
            read_image(opened.place),
            others,
            "stop it, and take new tokens of all voters. If it is no raftmq node any more, say "
            "--even-if-alive",
        )
    lost = [node_id for node_id in others if survivors and node_id not in survivors]
    if lost and not as_json:
        ids = ", ".join(str(node_id) for node_id in lost)
        out(f"Nodes {ids} must never come back with their old data: wipe them first.")
    _confirm(yes, f"Set {held.name} back to term {new_term}, without a vote, on this node?")
    # The record comes first: a reset without one could not be told from none.
    record = record_of(held, new_term, tokens)
    resets = (*(known for known in formation.term_resets if known != record), record)
    opened.folder.save_formation(msgspec.structs.replace(formation, term_resets=resets))
    reset_term(opened.place, held, new_term)
    if not as_json:
        out(f"Done. Start node {opened.node_id} after the same on all other voters.")


def _confirm(yes: bool, question: str) -> None:
    if yes:
        return
    try:
        answer = typer.prompt(f"{question} Type yes", default="no", show_default=False)
    except typer.Abort:
        answer = "no"
    if answer.strip().lower() != "yes":
        raise CommandError("nothing was changed")
