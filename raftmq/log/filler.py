"""Batches without records that stand where records were lost.

An operator who accepts the loss of damaged bytes that nobody can repair gets a log that is whole
again: its offsets stay as they are, and readers pass over the range as they pass over what
compaction took. A filler keeps the leader epoch of the range, so the log's history stays true.
"""

from __future__ import annotations

from typing import Final

from raftmq.log.batch_reader import Epochs
from raftmq.records import BatchHeader, empty_batch
from raftmq.types import Buffer

OFFSETS_MAX: Final = 1 << 31
"""Of one batch: its last offset delta is a signed 32-bit number."""


def fillers(start: int, end: int, epochs: Epochs) -> list[bytes]:
    """Batches without records that fill `[start, end)`."""
    batches = []
    while start < end:
        epoch, epoch_end = epochs.span(start)
        stop = min(end, epoch_end, start + OFFSETS_MAX)
        batches.append(empty_batch(start, stop, epoch))
        start = stop
    return batches


def is_filler(header: BatchHeader) -> bool:
    """True for a batch that may be cut into smaller ones: there is nothing in it."""
    return header.record_count == 0 and not header.is_control and not header.has_producer_id


def cut_filler(batch: Buffer, header: BatchHeader, start: int, end: int) -> Buffer:
    """The part of a filler in `[start, end)`."""
    first, last = max(start, header.base_offset), min(end, header.next_offset)
    if (first, last) == (header.base_offset, header.next_offset):
        return batch
    return empty_batch(first, last, header.leader_epoch)
