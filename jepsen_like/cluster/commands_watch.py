"""The watch over the metadata group's commands: what must hold of each one that takes effect.

    CommandsApplyOnce      a command takes effect once, though its submitter may send it again
    CoordinatorIsFenced    a group changes only by commands of the coordinator that has claimed it
    GroupsEndEmpty         a group that is forgotten has no members

One for a run: it sees the commands as every node applies them, and tells the history when a group
is forgotten. Observes only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from jepsen_like.invariants import Invariants
from raftmq.errors import ErrorCode
from raftmq.metadata.commands import (
    AbortExpired,
    CommitMany,
    CommitOffsets,
    DeleteGroup,
    DeleteOffsets,
    Envelope,
    ExpireOffsets,
    Generation,
    ReplaceMember,
    TransactionRows,
)
from raftmq.metadata.image import GroupsImage, MetadataImage
from raftmq.metadata.results import CommitsDone, GroupDone, Rejection, Result, RowsDone
from raftmq.metadata.state_machine import MetadataMachine, Skip
from raftmq.metadata.transactions import TransactionsImage, TransactionState
from raftmq.raft.messages import SoftState
from raftmq.types import Offset, RaftIndex

OfCoordinator: TypeAlias = (
    Generation | CommitOffsets | DeleteOffsets | ExpireOffsets | ReplaceMember
)
"""What only the coordinator may have done to a group, and keeps it as its coordinator."""


class CommandsWatch:
    """What took effect so far, by submitter and sequence."""

    def __init__(
        self,
        invariants: Invariants,
        group_gone: Callable[[str], object] = lambda _: None,
        now_ms: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._invariants = invariants
        self._group_gone = group_gone
        self._now_ms = now_ms
        self._running_since: dict[tuple[str, int], float] = {}
        """When each transaction was first seen to run on any node, by id and number."""
        self._gone: set[Offset] = set()
        self._applied: dict[tuple[int, int, int], Offset] = {}

    def attach(self, machine: MetadataMachine) -> None:
        """Be told what one node applies."""
        machine.add_listener(_Listener(self, machine))

    def applied(self, envelope: Envelope, result: Result, offset: Offset) -> None:
        """A command was applied by some node."""
        if isinstance(result, Rejection):
            return
        key = (int(envelope.node_id), envelope.incarnation, envelope.sequence)
        first = self._applied.setdefault(key, offset)
        if first != offset:
            name = type(envelope.command).__name__
            self._invariants.breach(
                "CommandsApplyOnce",
                f"{name} {key} took effect at {first} and again at {offset}",
            )

    def changed_group(self, image: MetadataImage, command: OfCoordinator, offset: Offset) -> None:
        """A coordinator's command changed its group; `image` is what came of it."""
        group = image.groups.get(command.group)
        if group is not None and group.coordinator_epoch != command.coordinator_epoch:
            self._invariants.breach(
                "CoordinatorIsFenced",
                f"{type(command).__name__} at {offset} of coordinator epoch "
                f"{command.coordinator_epoch} changed {command.group}, whose coordinator is "
                f"{group.coordinator} of epoch {group.coordinator_epoch}",
            )

    def forgot_group(self, name: str, offset: Offset) -> None:
        """The group is not there any more since the command at `offset`."""
        if offset not in self._gone:  # the first node to apply it
            self._gone.add(offset)
            self._group_gone(name)

    def changed_transactions(
        self, before: TransactionsImage, after: TransactionsImage, command: object, result: object
    ) -> None:
        """A command changed transactional ids; no transaction expires before its time."""
        now_ms = self._now_ms()
        for name, known in after.ids.items():
            if known.state is TransactionState.ONGOING:
                self._running_since.setdefault((name, known.txn_seq), now_ms)
        if not (isinstance(command, TransactionRows) and isinstance(result, RowsDone)):
            return
        for row, done in zip(command.rows, result.rows, strict=True):
            ran = before.get(row.transactional_id) if isinstance(row, AbortExpired) else None
            if ran is None or done.code != ErrorCode.NONE:
                continue
            key = ran.transactional_id, ran.txn_seq
            age_ms = now_ms - self._running_since.get(key, now_ms)
            if age_ms < ran.timeout_ms:
                told = f"{key} ran for {age_ms:.0f} ms of {ran.timeout_ms}"
                self._invariants.breach("ExpiryWaits", told)

    def groups_changed(self, before: GroupsImage, after: GroupsImage) -> None:
        """Some command changed groups; those that are gone had no members."""
        if len(after.groups) >= len(before.groups):
            return
        for name, group in before.groups.items():
            if group.members and after.get(name) is None:
                self._invariants.breach(
                    "GroupsEndEmpty", f"{name} had {len(group.members)} members"
                )


class CommandListener:
    """Part of a listener to one node's machine that judges command by command."""

    def image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        """Seen command by command."""

    def advanced(self, applied_end: RaftIndex) -> None:
        """Seen command by command."""

    def role_changed(self, soft: SoftState) -> None:
        """Replicas are watched elsewhere."""


class _Listener(CommandListener):
    """One node's machine, as it applies."""

    def __init__(self, watch: CommandsWatch, machine: MetadataMachine) -> None:
        self._watch = watch
        self._machine = machine
        self._groups = machine.image.groups
        """After the last command, which is not always when an image is published."""
        self._transactions = machine.image.transactions

    def command_applied(self, envelope: Envelope, result: Result, offset: Offset) -> None:
        """Judge one command."""
        watch, image, command = self._watch, self._machine.image, envelope.command
        before, self._groups = self._groups, image.groups
        known, self._transactions = self._transactions, image.transactions
        if known is not image.transactions:
            watch.changed_transactions(known, image.transactions, command, result)
        if before is not image.groups:
            watch.groups_changed(before, image.groups)
        watch.applied(envelope, result, offset)
        if isinstance(result, CommitsDone) and isinstance(command, CommitMany):
            for commit, code in zip(command.commits, result.codes, strict=True):
                if code == ErrorCode.NONE:
                    watch.changed_group(image, commit, offset)
        elif isinstance(command, OfCoordinator) and not isinstance(result, Rejection):
            watch.changed_group(image, command, offset)
        if isinstance(command, ExpireOffsets | DeleteGroup) and (
            isinstance(result, GroupDone) and image.groups.get(command.group) is None
        ):
            watch.forgot_group(command.group, offset)

    def command_skipped(self, skip: Skip) -> None:
        """Not judged: no checker knows of skips."""

    def state_restored(self, image: MetadataImage) -> None:
        """A snapshot: nothing is applied twice by it, and what groups went through is not seen."""
        self._groups = image.groups
        self._transactions = image.transactions
