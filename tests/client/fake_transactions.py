"""The part of the fake broker that coordinates transactions: it notes what it is asked.

Takes whatever it is asked, so that drivers can be tried with lost and late answers; which answers
are right is the matter of `model_transactions.py` and of real brokers.
"""

from __future__ import annotations

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct, decode_request
from raftmq.records import BatchHeader

PRODUCER_ID = 77


class Transactions:
    """Mixed into `FakeBroker`."""

    def __init__(self) -> None:
        self.transaction_version = 2
        """What the cluster has finalized."""
        self.epochs: dict[str, int] = {}
        """By transactional id."""
        self.ends: list[tuple[int, bool]] = []
        """Epoch and decision of every EndTxn that was taken."""
        self.transactional_offsets: list[tuple[str, int, dict[tuple[str, int], int]]] = []
        """Group, generation and offsets of every TxnOffsetCommit that was taken."""

    @property
    def features(self) -> list[Struct]:
        """As ApiVersions tells them."""
        level = self.transaction_version
        return [Struct(name="transaction.version", max_version_level=level, min_version_level=0)]

    def is_outdated(self, transactional_id: str | None, header: BatchHeader) -> bool:
        """Whether a batch has not the epoch of its transactional id."""
        if transactional_id is None:
            return False
        known = PRODUCER_ID, self.epochs[transactional_id]
        return (header.producer_id, header.producer_epoch) != known

    def _epoch(self, transactional_id: str) -> int:
        self.epochs[transactional_id] = self.epochs.get(transactional_id, -1) + 1
        return self.epochs[transactional_id]

    def _on_add_partitions_to_txn(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.ADD_PARTITIONS_TO_TXN, version, body)
        topics = [
            Struct(
                name=topic.name,
                results_by_partition=[
                    Struct(partition_index=p, partition_error_code=code) for p in topic.partitions
                ],
            )
            for topic in request.v3_and_below_topics
        ]
        return Struct(results_by_topic_v3_and_below=topics)

    def _on_add_offsets_to_txn(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        return Struct(error_code=code)

    def _on_txn_offset_commit(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.TXN_OFFSET_COMMIT, version, body)
        offsets = {
            (topic.name, part.partition_index): part.committed_offset
            for topic in request.topics
            for part in topic.partitions
        }
        if not code:
            self.transactional_offsets.append((request.group_id, request.generation_id, offsets))
        topics = [
            Struct(
                name=topic.name,
                partitions=[
                    Struct(partition_index=part.partition_index, error_code=code)
                    for part in topic.partitions
                ],
            )
            for topic in request.topics
        ]
        return Struct(topics=topics)

    def _on_end_txn(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.END_TXN, version, body)
        if code:
            return Struct(error_code=code, producer_id=-1, producer_epoch=-1)
        name, epoch = request.transactional_id, request.producer_epoch
        self.epochs.setdefault(name, epoch)
        is_retry = version >= 5 and epoch == self.epochs[name] - 1
        if request.producer_id != PRODUCER_ID or not (is_retry or epoch == self.epochs[name]):
            code = ErrorCode.PRODUCER_FENCED
            return Struct(error_code=code, producer_id=-1, producer_epoch=-1)
        if not is_retry:
            self.ends.append((epoch, request.committed))
            if version >= 5:
                self._epoch(name)
        if version < 5:
            return Struct(error_code=0)
        return Struct(error_code=0, producer_id=PRODUCER_ID, producer_epoch=self.epochs[name])
