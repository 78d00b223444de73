"""The watch over partitions that are retired, sealed, gone and listed again.

    NothingBehindASeal      no log has a batch behind a seal that nothing has opened again
    NothingOpenBehindASeal  who writes a seal leaves no transaction open
    SealedEndIsFinal        while a partition is sealed nothing is committed behind its end
    GoneIsEmpty             a partition is gone when all its records were to go
    NumbersGoOn             how far a number has come never falls, and whatever has that number
                            later begins there: its offsets, and its leader epochs
    SequencesGoOn           whoever leads a number knows of each idempotent producer what was
                            committed of it under that number, also in logs that are gone

The second one is judged where the log is watched, as the first one.

Observes only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attrs import define, frozen

from jepsen_like.cluster.commands_watch import CommandListener
from jepsen_like.invariants import Invariants
from raftmq.metadata.commands import Envelope, PartitionState
from raftmq.metadata.image import LEVEL_OF_KNOWN_PRODUCERS, MetadataImage, TopicImage
from raftmq.metadata.results import Result
from raftmq.metadata.state_machine import MetadataMachine, Skip
from raftmq.partition.producer_state import ProducerStateTable
from raftmq.types import Offset, RaftGroupId, TopicId

_NEVER: Final = -1


@define
class _Reach:
    """How far a partition has come."""

    leader_epoch: int = _NEVER
    end: int = 0


@frozen
class Sequence:
    """Where a batch of an idempotent producer ends.

    Attributes:
        end: of its entry in the log.
        last: the sequence of its last record.
    """

    end: int
    producer_id: int
    epoch: int
    last: int


class SealsWatch:
    """One for a run: it sees what any node applies first."""

    def __init__(
        self,
        invariants: Invariants,
        committed_offset: Callable[[RaftGroupId], int],
        log_start_of: Callable[[RaftGroupId], int],
    ) -> None:
        """`committed_offset` says how far anybody knows records of a group to be committed,
        `log_start_of` below which offset they were to go."""
        self._invariants = invariants
        self._committed_offset = committed_offset
        self._log_start_of = log_start_of
        self._final: dict[RaftGroupId, int] = {}
        """The ends of what is sealed now."""
        self._reach: dict[tuple[TopicId, int], dict[int, _Reach]] = {}
        """By number, and by the creation epoch of what had that number."""
        self._committed: dict[tuple[TopicId, int], dict[int, Sequence]] = {}
        """The last batch of each producer that was committed, by number and producer id."""
        self._level = 1
        self._applied = _NEVER

    def attach(self, machine: MetadataMachine) -> None:
        """Be told what one node applies."""
        machine.add_listener(_Listener(self, machine))

    def applied(self, before: MetadataImage, after: MetadataImage, offset: Offset) -> None:
        """A command was applied by some node."""
        self._level = max(self._level, after.level)
        if offset <= self._applied or before.topics is after.topics:
            return
        self._applied = int(offset)
        for name, topic in after.topics.items():
            known = before.topics.get(name)
            if known is topic:
                continue
            if known is not None and known.topic_id == topic.topic_id:
                self._judge_numbers(known, topic)
                self._judge_gone(known, topic)
            self._note_states(topic)

    def _judge_numbers(self, before: TopicImage, after: TopicImage) -> None:
        for number, known in before.numbers.items():
            now = after.numbers.get(number)
            if now is None or (
                now.end_offset < known.end_offset or now.leader_epoch < known.leader_epoch
            ):
                told = f"{after.name}-{number} fell from {known} to {now}"
                self._invariants.breach("NumbersGoOn", told)

    def _judge_gone(self, before: TopicImage, after: TopicImage) -> None:
        for partition in before.retired:
            group = before.group_id(partition.index)
            if after.has(group):
                continue
            start = max(self._log_start_of(group), partition.begins_at)
            if start < (end := self._committed_offset(group)):
                told = f"{group} is gone with {start} to {end}"
                self._invariants.breach("GoneIsEmpty", told)

    def _note_states(self, topic: TopicImage) -> None:
        for partition in topic.held:
            group = topic.group_id(partition.index)
            if partition.state is not PartitionState.SEALED:
                self._final.pop(group, None)
            elif group not in self._final:
                self._final[group] = topic.numbers[partition.index].end_offset
                self.commits(group, self._committed_offset(group))

    def commits(self, group: RaftGroupId, high_watermark: int) -> None:
        """A replica knows that records are committed up to there."""
        final = self._final.get(group)
        if final is not None and high_watermark > final:
            told = f"{group} was sealed at {final}, and goes to {high_watermark}"
            self._invariants.breach("SealedEndIsFinal", told)
        reach = self._reach_of(group)
        reach.end = max(reach.end, high_watermark)

    def leads(self, group: RaftGroupId, leader_epoch: int, log_end_offset: int) -> None:
        """A replica leads from now on."""
        reach = self._reach_of(group)
        for life, other in self._reach[group.topic_id, group.partition].items():
            if life >= group.creation_epoch:
                continue
            if leader_epoch <= other.leader_epoch or log_end_offset < other.end:
                told = f"{group} begins with {log_end_offset} in {leader_epoch} behind {other}"
                self._invariants.breach("NumbersGoOn", told)
        reach.leader_epoch = max(reach.leader_epoch, leader_epoch)

    def writes(self, group: RaftGroupId, batch: Sequence) -> None:
        """A batch is known to be committed."""
        known = self._committed.setdefault((group.topic_id, group.partition), {})
        last = known.get(batch.producer_id)
        if last is None or last.end < batch.end:  # indexes of a number go on, too
            known[batch.producer_id] = batch

    def knows(self, group: RaftGroupId, table: ProducerStateTable) -> None:
        """A replica leads and knows this of producers. Producers are few here: none is forgotten
        to make room for others."""
        number = group.topic_id, group.partition
        is_first = all(life >= group.creation_epoch for life in self._reach.get(number, ()))
        if is_first or self._level < LEVEL_OF_KNOWN_PRODUCERS:
            return
        for producer_id, batch in self._committed.get(number, {}).items():
            known = table.get(producer_id)
            if known is None or known.epoch < batch.epoch:
                self._invariants.breach("SequencesGoOn", f"{group} does not know {batch}: {known}")
            elif known.epoch == batch.epoch and known.last_sequence < batch.last:
                self._invariants.breach("SequencesGoOn", f"{group} has {known} behind {batch}")

    def _reach_of(self, group: RaftGroupId) -> _Reach:
        lives = self._reach.setdefault((group.topic_id, group.partition), {})
        return lives.setdefault(group.creation_epoch, _Reach())


class _Listener(CommandListener):
    """One node's machine, as it applies."""

    def __init__(self, watch: SealsWatch, machine: MetadataMachine) -> None:
        self._watch = watch
        self._machine = machine
        self._image = machine.image

    def command_applied(self, envelope: Envelope, result: Result, offset: Offset) -> None:
        """Judge one command."""
        before, self._image = self._image, self._machine.image
        self._watch.applied(before, self._image, offset)

    def command_skipped(self, skip: Skip) -> None:
        """It changed nothing."""
        self._image = self._machine.image

    def state_restored(self, image: MetadataImage) -> None:
        """A snapshot: who applied what it holds has told of it."""
        self._image = image
