"""`raftmq recover`: give up what is lost, on a stopped node's data folder, at an operator's word.

Offline: it takes the folder's lock, so it is refused while the node runs. Says first what would be
done and what may be lost, and does nothing without a yes. `cluster/giving_up.py` does the work.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from raftmq.cli.common import AsJson, CommandError, reported, show_json
from raftmq.cli.console import out
from raftmq.cli.main import EXIT_USAGE
from raftmq.types import NodeId

if TYPE_CHECKING:
    from raftmq.adapters.data_folder import DataFolder
    from raftmq.cluster.giving_up import Account, Findings, Loss, Place
    from raftmq.cluster.skipping import Stuck
    from raftmq.raft.membership import Configuration

PROBE_S: Final = 1.0
NAMES_MAX: Final = 20


def recover(
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="With --accept-loss.")
    ] = None,
    partition: Annotated[
        int | None, typer.Argument(metavar="PARTITION", help="With --accept-loss.", min=0)
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="The stopped node's data folder.")
    ] = None,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="Go on without the majority that is lost for good.")
    ] = False,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Go on without records nobody can repair.")
    ] = False,
    skip_command: Annotated[
        int | None,
        typer.Option(
            "--skip-command",
            metavar="OFFSET",
            help="Pass over a metadata command that no node can apply.",
            min=0,
        ),
    ] = None,
    agree: Annotated[
        str,
        typer.Option(
            "--agree",
            metavar="TOKEN,...",
            help="With --skip-command: what --dry-run printed on a majority of metadata voters.",
        ),
    ] = "",
    survivors: Annotated[
        str,
        typer.Option(
            "--survivors",
            metavar="ID,...",
            help="All nodes that go on, the same list on each of them. Default: this one.",
        ),
    ] = "",
    even_if_alive: Annotated[
        bool,
        typer.Option("--even-if-alive", help="Although something answers where a lost node was."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give up what is lost: a majority of nodes, damage that no replica can repair, or a metadata
    command that no node can apply.

    Last resort, on a stopped node. Acknowledged records may be gone afterwards; what and where is
    told first. Nodes that were given up must never come back with their old data.

    Examples: raftmq recover --unsafe --data DATA --survivors 1,4
              raftmq recover --accept-loss orders 3 --data DATA
              raftmq recover --skip-command 812 --data DATA --dry-run
    """
    with reported():
        if unsafe + accept_loss + (skip_command is not None) != 1:
            raise CommandError("say --unsafe, --accept-loss or --skip-command", EXIT_USAGE)
        if data is None:
            raise CommandError("say --data DIR, the stopped node's data folder", EXIT_USAGE)
        _check_topic(topic, partition, unsafe=unsafe, accept_loss=accept_loss)
        opened = _Opened(data)
        try:
            if unsafe:
                ids = _parse_ids(survivors) or (opened.node_id,)
                _recover_majority(opened, ids, even_if_alive, yes, dry_run, as_json)
            elif skip_command is not None:
                _recover_command(opened, skip_command, agree, yes, dry_run, as_json)
            else:
                assert topic is not None
                assert partition is not None
                _recover_damage(opened, topic, partition, yes, dry_run, as_json)
        finally:
            opened.close()


def _check_topic(
    topic: str | None, partition: int | None, *, unsafe: bool, accept_loss: bool
) -> None:
    if accept_loss and (topic is None or partition is None):
        raise CommandError("--accept-loss takes TOPIC and PARTITION", EXIT_USAGE)
    if unsafe and topic is not None:
        raise CommandError("--unsafe is about all groups of the node", EXIT_USAGE)
    if not accept_loss and topic is not None:
        raise CommandError("--skip-command is about metadata, no topic", EXIT_USAGE)


class _Opened:
    """A stopped node's folder, locked, with its journal."""

    def __init__(self, data: Path) -> None:
        from raftmq.adapters.clock import RealClock
        from raftmq.adapters.data_folder import DataFolder
        from raftmq.adapters.disk import RealDisk
        from raftmq.cluster.giving_up import Place
        from raftmq.log.hard_state import HardStateJournal
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


def _parse_ids(text: str) -> tuple[NodeId, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdigit() for word in words):
        raise CommandError(f"--survivors {text!r}: node ids, such as 1,4", EXIT_USAGE)
    return tuple(sorted({NodeId(int(word)) for word in words}))


# ---- a lost majority ----


def _recover_majority(
    opened: _Opened,
    survivors: tuple[NodeId, ...],
    even_if_alive: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    from raftmq.cluster.giving_up import account_for, check_is_lost, give_up_lost

    formation = opened.folder.load_formation()
    ids = ",".join(str(node_id) for node_id in survivors)
    if formation.recovering not in ("", ids):
        raise CommandError(
            f"a recovery with --survivors {formation.recovering} was begun here: finish that one"
        )
    findings = account_for(opened.place, survivors)
    if not formation.recovering:
        check_is_lost(findings, survivors)
        if not even_if_alive:
            _check_silence(findings, survivors)
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
        # From here on the node does not start before this is finished; who finds it begun goes on.
        fences = (ids,) if _loses_metadata(findings) else ()
        recoveries = (*formation.recoveries, *fences)
        formation = replace(formation, recovering=ids, recoveries=recoveries)
        opened.folder.save_formation(formation)
    give_up_lost(opened.place, findings)
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
    from raftmq.cluster.giving_up import Verdict

    return findings.metadata.verdict is Verdict.RECOVERED


def _lost_nodes(findings: Findings, survivors: Sequence[NodeId]) -> list[NodeId]:
    from raftmq.cluster.giving_up import Verdict

    members = {
        member.node_id: True
        for account in findings.of(Verdict.RECOVERED)
        for member in account.before.members
    }
    return sorted(node_id for node_id in members if node_id not in survivors)


def _unknown_nodes(findings: Findings, survivors: Sequence[NodeId]) -> list[NodeId]:
    """Survivors that nothing on this node's disk mentions: perhaps a typing error, perhaps newer
    than what this node has heard."""
    known = {
        member.node_id: True for account in findings.accounts for member in account.before.members
    }
    brokers = {} if findings.image is None else findings.image.brokers
    return [n for n in survivors if n not in known and n not in brokers]


def _check_silence(findings: Findings, survivors: Sequence[NodeId]) -> None:
    """Refuse where something listens at a lost node's address.

    Raises:
        CommandError: something does.
    """
    if findings.image is None:
        return
    for node_id in _lost_nodes(findings, survivors):
        broker = findings.image.brokers.get(node_id)
        endpoint = None if broker is None else broker.endpoint("peer")
        if endpoint is None:
            continue
        try:
            socket.create_connection((endpoint.host, endpoint.port), PROBE_S).close()
        except OSError:
            continue  # as expected of a node that is gone
        raise CommandError(
            f"something answers at {endpoint.host}:{endpoint.port}, where node {node_id} was: it "
            "is not lost. If it is no raftmq node any more, say --even-if-alive"
        )


def _majority_text(opened: _Opened, findings: Findings, survivors: Sequence[NodeId]) -> list[str]:
    from raftmq.cluster.giving_up import Verdict

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
    for account in recovered:
        lines += _account_text(account)
    stays = findings.of(Verdict.STAYS)
    if stays:
        lines += ["", f"{len(stays)} groups keep a majority and stay as they are."]
    for account in findings.of(Verdict.UNREADABLE):
        lines += ["", f"{account.name} cannot be read here and is left: {account.note}"]
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


def _account_text(account: Account) -> list[str]:
    assert account.after is not None
    lines = [
        f"  {account.name}: voters {_members(account.before)} -> {_members(account.after)}",
        f"    has offsets [{account.log_start}, {account.log_end}), flushed to "
        f"{account.flushed_end}, last known commit {account.high_watermark}, leader epoch "
        f"{account.last_epoch}",
        f"    acknowledged records at or above {account.log_end} may be gone",
    ]
    if account.damaged:
        spans = ", ".join(f"[{start}, {end})" for start, end in account.damaged)
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
                "name": account.name,
                "verdict": account.verdict.name.lower(),
                "voters": [v.node_id for v in account.before.voters],
                "voters_after": None
                if account.after is None
                else [v.node_id for v in account.after.voters],
                "log_start": account.log_start,
                "log_end": account.log_end,
                "flushed_end": account.flushed_end,
                "high_watermark": account.high_watermark,
                "leader_epoch": account.last_epoch,
                "damaged": [list(span) for span in account.damaged],
                "note": account.note,
            }
            for account in findings.accounts
        ],
    }


# ---- damage ----


def _recover_damage(
    opened: _Opened, topic: str, partition: int, yes: bool, dry_run: bool, as_json: bool
) -> None:
    from raftmq.cluster.giving_up import accept_loss, account_for_loss

    loss = account_for_loss(opened.place, topic, partition)
    if as_json:
        show_json(
            {
                "name": loss.account.name,
                "log_start": loss.account.log_start,
                "log_end": loss.account.log_end,
                "damaged": [list(span) for span in loss.damaged],
                "cut": None if loss.cut is None else list(loss.cut),
                "is_anew": loss.is_anew,
                "others": list(loss.others),
            }
        )
    else:
        for line in _loss_text(loss):
            out(line)
    if dry_run:
        return
    _confirm(yes, f"Accept the loss on {loss.account.name}?")
    accept_loss(opened.place, loss)
    if not as_json:
        out(f"Done. Start node {opened.node_id}.")


def _loss_text(loss: Loss) -> list[str]:
    account = loss.account
    lines = [f"{account.name}: offsets [{account.log_start}, {account.log_end}) on this node"]
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
    if loss.others:
        ids = ", ".join(str(node_id) for node_id in loss.others)
        lines.append(
            f"  nodes {ids} have replicas, too: what one of them still has is repaired from it by "
            "itself. Accept the loss only where none of them ever comes back with it"
        )
    return lines


# ---- a command that cannot be applied ----


def _recover_command(
    opened: _Opened, offset: int, agree: str, yes: bool, dry_run: bool, as_json: bool
) -> None:
    from raftmq.cluster.skipping import account_for_skip, check_agreed

    formation = opened.folder.load_formation()
    if formation.recovering:
        raise CommandError(
            f"a recovery with --survivors {formation.recovering} was begun here: finish that one"
        )
    stuck = account_for_skip(opened.place, offset)
    if as_json:
        show_json(_stuck_json(stuck))
    else:
        for line in _stuck_text(opened, stuck):
            out(line)
    if dry_run:
        return
    check_agreed(stuck, [token.strip() for token in agree.split(",") if token.strip()])
    _confirm(yes, f"Have node {opened.node_id} pass over this command for good?")
    skips = (*formation.skips, stuck.skip)
    opened.folder.save_formation(msgspec.structs.replace(formation, skips=skips))
    if not as_json:
        out(f"Done. Start node {opened.node_id} after the same on all other nodes.")


def _stuck_json(stuck: Stuck) -> dict[str, Any]:
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


def _stuck_text(opened: _Opened, stuck: Stuck) -> list[str]:
    from raftmq.cluster.skips import shown

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


def _confirm(yes: bool, question: str) -> None:
    if yes:
        return
    try:
        answer = typer.prompt(f"{question} Type yes", default="no", show_default=False)
    except typer.Abort:
        answer = "no"
    if answer.strip().lower() != "yes":
        raise CommandError("nothing was changed")
