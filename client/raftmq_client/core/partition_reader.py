"""What a fetcher knows of one partition: position, buffer, errors, aborted transactions.

Owns the rule of what a consumer sees of a batch (KIP-98). Pure; `FetcherCore` decides when to fetch
and what to hand out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attrs import define, field

from raftmq.records import BatchHeader, read_records
from raftmq.types import TopicPartition
from raftmq_client.core.messages import ConsumerRecord
from raftmq_client.errors import ClientError


@define(eq=False)
class PartitionReader:
    """One assigned partition."""

    key: TopicPartition
    position: int | None = None
    """Offset of the next record to hand out; None until it is looked up."""
    start: int | None = None
    """What is looked up while there is no position: EARLIEST, LATEST, or as the policy says."""
    epoch: int = -1
    """Leader epoch of the last record handed out."""
    fetch_offset: int = -1
    """Where the next fetch starts: the end of what is buffered."""
    token: int = 0
    is_paused: bool = False
    is_looking_up: bool = False
    fetching_from: int | None = None
    fetching_since: float = 0.0
    buffered: deque[memoryview] = field(factory=deque)
    buffered_bytes: int = 0
    ready: Sequence[ConsumerRecord] = ()
    ready_index: int = 0
    ready_end: int = -1
    served: int = 0
    """When a fetch last brought something, as a count of batches of all partitions."""
    not_before: float = 0.0
    failures: int = 0
    error: ClientError | None = None
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    preferred: int | None = None
    preferred_until: float = 0.0
    aborted: list[tuple[int, int]] = field(factory=list)  # (first offset, producer id), sorted
    aborted_now: dict[int, None] = field(factory=dict)

    @property
    def has_buffered(self) -> bool:
        """True while something that was fetched is not handed out."""
        return bool(self.buffered) or self.ready_index < len(self.ready)

    def move(self, offset: int | None) -> None:
        """Take another position; everything buffered or on its way is void.

        Below 0 it is EARLIEST or LATEST, and to be looked up, as None is by the policy.
        """
        self.token += 1
        is_known = offset is not None and offset >= 0
        self.position = offset if is_known else None
        self.start = None if is_known else offset
        self.epoch = -1
        self.fetch_offset = -1 if self.position is None else self.position
        self.is_looking_up = False
        self.fetching_from = None
        self.buffered.clear()
        self.buffered_bytes = 0
        self.ready = ()
        self.ready_index = 0
        self.error = None
        self.aborted.clear()
        self.aborted_now.clear()

    def is_data(self, header: BatchHeader, batch: memoryview) -> bool:
        """False for what consumers never see; transactions are followed batch by batch.

        Raises:
            CorruptBatchError: a control batch that cannot be read.
        """
        # At markers, too: a fetch may begin at that of a transaction it is told of.
        while self.aborted and self.aborted[0][0] < header.next_offset:
            self.aborted_now[self.aborted.pop(0)[1]] = None
        if header.is_control:
            self._end_transaction(batch, header.producer_id)
            return False
        return not (header.is_transactional and header.producer_id in self.aborted_now)

    def _end_transaction(self, batch: memoryview, producer_id: int) -> None:
        for record in read_records(batch):
            # Control record key: version int16, type int16; type 0 is an abort (KIP-98).
            if record.key is not None and record.key[2:4] == b"\x00\x00":
                self.aborted_now.pop(producer_id, None)
