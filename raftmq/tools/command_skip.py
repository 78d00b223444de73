"""Skip of a metadata command that no node can apply: offline work on a stopped node's data.

`find_stuck_command` applies the log as a start would and finds the command at which it stops. Only
that one can be skipped, so no node leaves out a command that others have applied. `check_agreed`
demands that a majority of the metadata voters found the very same: a command that only one node
holds is damage of that node, or was never committed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from attrs import frozen

from raftmq.metadata.state_machine import MetadataMachine, Skip, UnappliableCommandError
from raftmq.tools.unsafe_recovery import Place, RecoveryRefusedError, open_group
from raftmq.types import METADATA_GROUP, METADATA_TOPIC, NodeId

_TOKEN: Final = re.compile(r"([0-9]{1,10}):([0-9]{1,20}:[0-9]{1,10}:[0-9a-f]{12})")


@frozen(slots=True)
class StuckCommand:
    """The command at which a node stops.

    Attributes:
        error: what it raises there, with the command.
        node_id: the node whose folder this is.
        voters: those of the metadata group, by the newest entry of this log.
    """

    error: UnappliableCommandError
    node_id: NodeId
    voters: tuple[NodeId, ...]

    @property
    def skip(self) -> Skip:
        """Names the command."""
        return self.error.skip

    @property
    def token(self) -> str:
        """This node's token: NODE:OFFSET:EPOCH:DIGEST."""
        return f"{self.node_id}:{self.skip.short}"

    @property
    def majority(self) -> int:
        """How many voters must give the same token."""
        return len(self.voters) // 2 + 1


def find_stuck_command(place: Place, offset: int) -> StuckCommand:
    """Find the command at `offset`, at which this node stops.

    Raises:
        RecoveryRefusedError: it does not stop there; the message says why.
        DiskError: the device failed.
    """
    if not place.disk.exists(f"{place.path}/meta/log-start"):
        raise RecoveryRefusedError(f"{place.path} holds no metadata: this node never joined")
    if any(skip.offset == offset for skip in place.skips):
        raise RecoveryRefusedError(f"the command at offset {offset} is skipped here already")
    report, log = open_group(place, METADATA_TOPIC, METADATA_GROUP, f"{place.path}/meta")
    if log is None:
        raise RecoveryRefusedError(f"metadata cannot be read here: {report.note}")
    machine = MetadataMachine(place.skips)
    machine.attach_log(log)
    try:
        machine.restore(log.log_start)
        machine.committed(log.log_end_offset, log.end_index)
    except UnappliableCommandError as error:
        _check_is_it(error, offset)
        voters = tuple(voter.node_id for voter in report.before.voters)
        return StuckCommand(error, place.node.node_id, voters)
    finally:
        log.close()
    if machine.applied_end < log.end_index:
        raise RecoveryRefusedError(
            f"metadata is damaged here at offset {machine.applied_offset}: this node cannot say "
            "what follows"
        )
    raise RecoveryRefusedError(
        f"every metadata command in [{log.log_start.offset}, {log.log_end_offset}) can be applied "
        "here: there is nothing to skip"
    )


def _check_is_it(error: UnappliableCommandError, offset: int) -> None:
    if error.skip.offset != offset:
        raise RecoveryRefusedError(
            f"this node does not stop at offset {offset}: the first command that cannot be applied "
            f"here is at {error.skip.offset}"
        )
    if error.is_newer:
        raise RecoveryRefusedError(
            f"the command at offset {offset} is one of a newer raftmq ({error.reason}): start that "
            "on this node; to skip it would take this node's metadata away from the others'"
        )


def check_agreed(stuck: StuckCommand, tokens: Sequence[str]) -> None:
    """Demand the tokens of a majority of the metadata voters, all about this very command.

    Raises:
        RecoveryRefusedError: too few, or not all the same.
    """
    agreed: dict[NodeId, bool] = {}
    for token in tokens:
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise RecoveryRefusedError(f"{token!r} is no token that --dry-run printed")
        node_id, command = NodeId(int(match[1])), match[2]
        if command != stuck.skip.short:
            raise RecoveryRefusedError(
                f"node {node_id} has another command: {token}, here it is {stuck.token}"
            )
        if node_id not in stuck.voters:
            raise RecoveryRefusedError(f"node {node_id} is no voter of the metadata group")
        agreed[node_id] = True
    if len(agreed) < stuck.majority:
        raise RecoveryRefusedError(
            f"{len(agreed)} of the metadata voters {_listed(stuck.voters)} agree, "
            f"{stuck.majority} must: run `raftmq recover --skip-command {stuck.skip.offset} "
            "--dry-run` on each of their stopped data folders, and hand the tokens to "
            "--agree TOKEN,TOKEN,..."
        )


def _listed(ids: Sequence[NodeId]) -> str:
    return ",".join(str(node_id) for node_id in ids)
