"""The part of the fake broker that coordinates transactions: it notes what it is asked.

Takes whatever it is asked, so that drivers can be tried with lost and late answers; which answers
are right is the matter of `model_transactions.py` and of real brokers.
"""

from __future__ import annotations

import re
import time

from attrs import define, field

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct, decode_request
from raftmq.records import BatchHeader

PRODUCER_ID = 77


@define
class Listed:
    """A transactional id, as `txn list` and `txn describe` are told."""

    producer_id: int
    state: str = "Ongoing"
    epoch: int = 3
    timeout_ms: int = 60_000
    started_at_ms: int = 1_000
    partitions: list[tuple[str, int]] = field(factory=list)


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

        self.listed: dict[str, Listed] = {}
        """Ids that operators are told of."""
        self.opened: dict[tuple[str, int], dict[int, int]] = {}
        """First offsets of open transactions, by partition and producer id."""
        self.markers: list[tuple[str, int, int, int]] = []
        """Topic, partition, producer id and epoch of every abort marker."""

    def stable_end(self, topic: str, partition: int, end: int) -> int:
        """The last stable offset of a partition with that high watermark."""
        return min([end, *self.opened.get((topic, partition), {}).values()])

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

    def _on_list_transactions(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.LIST_TRANSACTIONS, version, body)
        now_ms = time.time() * 1000
        rows = [
            Struct(transactional_id=name, producer_id=one.producer_id, transaction_state=one.state)
            for name, one in self.listed.items()
            if (not request.state_filters or one.state in request.state_filters)
            and (not request.producer_id_filters or one.producer_id in request.producer_id_filters)
            and now_ms - one.started_at_ms > request.duration_filter
            and re.fullmatch(request.transactional_id_pattern or ".*", name)
        ]
        return Struct(error_code=code, unknown_state_filters=[], transaction_states=rows)

    def _on_describe_transactions(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.DESCRIBE_TRANSACTIONS, version, body)
        missing = Listed(-1, "", -1, 0, -1)
        rows = []
        for name in request.transactional_ids:
            one = self.listed.get(name, missing)
            topics: dict[str, list[int]] = {}
            for topic, partition in one.partitions:
                topics.setdefault(topic, []).append(partition)
            rows.append(
                Struct(
                    error_code=ErrorCode.TRANSACTIONAL_ID_NOT_FOUND if one is missing else code,
                    transactional_id=name,
                    transaction_state=one.state,
                    transaction_timeout=one.timeout_ms,
                    transaction_start_time=one.started_at_ms,
                    producer_id=one.producer_id,
                    producer_epoch=one.epoch,
                    topics=[Struct(topic=t, partitions=p) for t, p in topics.items()],
                )
            )
        return Struct(transaction_states=rows)

    def _on_describe_producers(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.DESCRIBE_PRODUCERS, version, body)
        topics = [
            Struct(
                name=topic.name,
                partitions=[
                    Struct(
                        partition_index=index,
                        error_code=code,
                        error_message=None,
                        active_producers=[
                            Struct(
                                producer_id=producer_id,
                                producer_epoch=3,
                                last_sequence=0,
                                last_timestamp=2_000,
                                coordinator_epoch=-1,
                                current_txn_start_offset=start,
                            )
                            for producer_id, start in self.opened.get(
                                (topic.name, index), {}
                            ).items()
                        ],
                    )
                    for index in topic.partition_indexes
                ],
            )
            for topic in request.topics
        ]
        return Struct(topics=topics)

    def _on_write_txn_markers(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.WRITE_TXN_MARKERS, version, body)
        markers = []
        for marker in request.markers:
            assert not marker.transaction_result, "only aborts are asked for"
            topics = []
            for topic in marker.topics:
                for index in topic.partition_indexes:
                    row = topic.name, index, marker.producer_id, marker.producer_epoch
                    self.markers.append(row)
                    self.opened.get((topic.name, index), {}).pop(marker.producer_id, None)
                rows = [Struct(partition_index=p, error_code=code) for p in topic.partition_indexes]
                topics.append(Struct(name=topic.name, partitions=rows))
            markers.append(Struct(producer_id=marker.producer_id, topics=topics))
        return Struct(markers=markers)
