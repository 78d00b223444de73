"""Batches of idempotent producers that were refused and may come again, of one partition.

A producer has up to five requests under way. When the first is refused because this node is not
(yet) the leader, or too few replicas are in sync, and the reason is gone before the second is
looked at, that one leaves a gap in the sequence. To call it out of order would be true and do harm:
librdkafka then begins a new epoch of its producer id, for all its partitions, and sends under that
whatever has an unknown outcome anywhere, which no broker can tell from new records (Kafka has the
same gap, and its users the second copies). So what follows a refused batch is refused for the same
reason, and both come again in their order.

A new leader sees the same without having refused anything: the first of several batches still waits
for an answer of the leader before it, or for its time to run out, when the next one is sent here.
What is missing is then waited for by refusing what follows it, as if it were refused here.

The same for a repeated batch behind a refused one, both of which the log has: told that the second
is there and the first is refused, librdkafka believes in the first as well, but has no offset of
it to tell.

A producer that the log does not know may start at any sequence, as in Kafka, unless a batch before
is remembered here: that one comes first.

Owns which sequences were refused lately and why. Never takes a batch: it only names the reason.
Invariants: bounded in producers, and in answers per refusal, so that a producer that never sends
the refused batch again is told the truth in the end; lost with the process, as the connections are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from attrs import define

from raftmq.errors import ErrorCode
from raftmq.partition.producer_state import BATCHES_REMEMBERED
from raftmq.records import SEQUENCE_MODULUS, BatchHeader

PRODUCERS_MAX: Final = 100
"""So many producers are remembered per partition; the one refused longest ago goes first."""
NEW_LEADER_ANSWERS: Final = 100
"""So often a new leader refuses what follows a missing batch: clients come again after 20 ms to a
second each time, and give a silent leader 30 seconds (`request.timeout.ms`)."""


@define(slots=True)
class _Refused:
    epoch: int
    sequences: tuple[int, ...]  # first sequences of the last refused batches
    code: ErrorCode
    answers_left: int


class RefusedBatches:
    """What was refused lately, by producer id."""

    __slots__ = ("_refused", "forgotten_count")

    def __init__(self) -> None:
        self._refused: dict[int, _Refused] = {}
        self.forgotten_count = 0
        """So many producers had to go for others, with what was refused of them."""

    def __len__(self) -> int:
        return len(self._refused)

    def note(
        self,
        producer_id: int,
        epoch: int,
        sequence: int,
        code: ErrorCode,
        answers: int = BATCHES_REMEMBERED,
    ) -> None:
        """The batch that begins at `sequence` was refused, or taken back; it may come again, and so
        many that follow it are refused meanwhile: by default as many as can be under way."""
        known = self._refused.pop(producer_id, None)
        sequences: tuple[int, ...] = (sequence,)
        if known is not None and known.epoch == epoch:
            others = [other for other in known.sequences if other != sequence]
            sequences = (*others[1 - BATCHES_REMEMBERED :], sequence)
        while len(self._refused) >= PRODUCERS_MAX:
            del self._refused[next(iter(self._refused))]
            self.forgotten_count += 1
        self._refused[producer_id] = _Refused(epoch, sequences, code, answers)

    def await_missing(self, producer_id: int, epoch: int, sequence: int) -> None:
        """The batch that begins at `sequence` may be on its way from the leader before this one.

        It is waited for once: when all answers were given, the producer is told the truth.
        """
        known = self._refused.get(producer_id)
        if known is not None and known.epoch == epoch and sequence in known.sequences:
            return
        code = ErrorCode.NOT_LEADER_OR_FOLLOWER
        self.note(producer_id, epoch, sequence, code, NEW_LEADER_ANSWERS)

    def refuse_for_good(self, producer_id: int, epoch: int, sequence: int) -> None:
        """That batch will not come again: what follows it is out of order. Where another one still
        may, that one counts: it comes first."""
        known = self._refused.get(producer_id)
        if known is None or known.epoch != epoch or not known.answers_left:
            code = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
            self.note(producer_id, epoch, sequence, code, 0)

    def reason_behind(self, header: BatchHeader, expected: int) -> ErrorCode | None:
        """Why the batch was refused that this one follows; None when none of those that were
        refused is the one that the log expects next."""
        known = self._refused.get(header.producer_id)
        if known is None or known.epoch != header.producer_epoch:
            return None
        if expected not in known.sequences or not known.answers_left:
            return None
        known.answers_left -= 1
        return known.code

    def reason_first(self, header: BatchHeader) -> ErrorCode | None:
        """Why the first batch of a producer that the log does not know is refused: one before it
        was, and may come again (or will not: then this one is out of order). None otherwise."""
        known = self._refused.get(header.producer_id)
        if known is None or known.epoch != header.producer_epoch:
            return None
        ahead = ((header.base_sequence - other) % SEQUENCE_MODULUS for other in known.sequences)
        if not any(0 < distance < SEQUENCE_MODULUS // 2 for distance in ahead):
            return None
        if not known.answers_left:
            return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        known.answers_left -= 1
        return known.code

    def reason_before(self, header: BatchHeader, earlier: Iterable[int]) -> ErrorCode | None:
        """Why to refuse a batch that the log has: one of the `earlier` sequences, which it has as
        well, was refused and did not come again yet. None otherwise; then this one has come."""
        known = self._refused.get(header.producer_id)
        if known is None or known.epoch != header.producer_epoch:
            return None
        if known.answers_left and any(other in known.sequences for other in earlier):
            known.answers_left -= 1
            return known.code
        if header.base_sequence in known.sequences:
            left = tuple(other for other in known.sequences if other != header.base_sequence)
            known.sequences = left
            if not left:
                self.forget(header.producer_id)
        return None

    def forget(self, producer_id: int) -> None:
        """What the log expects of this producer was taken."""
        self._refused.pop(producer_id, None)
