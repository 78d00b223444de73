"""A small model of a cluster with transactions, for tests of deciding code: no socket, no clock.

Keeps what Kafka keeps of one transactional id (epoch, state, what is added, pending offsets) and of
producers in logs (open transactions, markers, sequences), and answers requests as their versions
say. `lose_before` and `lose_after` are lost requests and lost answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from attrs import define, field

from raftmq.errors import ErrorCode
from raftmq.protocol import SPOKEN, ApiKey, Struct, decode_request
from raftmq.protocol.produce import (
    ProducePartitionResponse,
    ProduceResponse,
    ProduceTopicResponse,
    decode_produce_request,
)
from raftmq.records import BatchHeader, check_batch, read_records
from raftmq.types import TopicPartition
from raftmq_client.core.call import Call
from raftmq_client.errors import ConnectionLostError

TOPIC = "t"


@define
class Entry:
    """A record in a log."""

    value: bytes
    is_open: bool = True
    is_committed: bool = False


@define
class Log:
    """One partition."""

    entries: list[Entry] = field(factory=list)
    producer: tuple[int, int] = (-1, -1)
    next_sequence: int = 0
    recent: deque[tuple[int, int, int]] = field(factory=lambda: deque(maxlen=5))
    fence: int = -1
    """The epoch of the last marker: nothing below it is taken."""

    def append(self, header: BatchHeader, values: list[bytes]) -> tuple[ErrorCode, int]:
        who = (header.producer_id, header.producer_epoch)
        if header.producer_epoch < max(self.fence, self.producer[1]):
            return ErrorCode.INVALID_PRODUCER_EPOCH, -1
        if who != self.producer:
            if header.base_sequence:
                return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, -1
            self.producer, self.next_sequence = who, 0
            self.recent.clear()
        for sequence, count, offset in self.recent:
            if (sequence, count) == (header.base_sequence, header.record_count):
                return ErrorCode.NONE, offset
        if header.base_sequence != self.next_sequence:
            return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, -1
        offset = len(self.entries)
        self.entries += [Entry(value) for value in values]
        self.next_sequence += header.record_count
        self.recent.append((header.base_sequence, header.record_count, offset))
        return ErrorCode.NONE, offset

    def mark(self, epoch: int, *, commit: bool) -> None:
        self.fence = max(self.fence, epoch)
        for entry in self.entries:
            if entry.is_open:
                entry.is_open, entry.is_committed = False, commit


@define
class Cluster:
    """Coordinator and logs, all on node 1."""

    logs: list[Log]
    producer_id: int = 500
    epoch: int = -1
    last_epoch: int = -1
    state: str = "empty"
    partitions: set[int] = field(factory=set)
    groups: set[str] = field(factory=set)
    pending: dict[str, dict[TopicPartition, int]] = field(factory=dict)
    committed: dict[str, dict[TopicPartition, int]] = field(factory=dict)
    generation: int = 1
    """Of every group."""
    seen: list[tuple[ApiKey, int]] = field(factory=list)
    refusals: dict[ApiKey, deque[ErrorCode]] = field(factory=dict)

    # What happens without the producer under test.

    def time_out(self) -> None:
        """The transaction took too long."""
        if self.state == "ongoing":
            self.last_epoch, self.epoch = self.epoch, self.epoch + 1
            self._end(commit=False)

    def take_over(self) -> None:
        """A newer producer of the same id."""
        if self.state == "ongoing":
            self.epoch += 1
            self._end(commit=False)
        self.epoch, self.last_epoch, self.state = self.epoch + 1, -1, "empty"

    def _end(self, *, commit: bool) -> None:
        for partition in self.partitions:
            self.logs[partition].mark(self.epoch, commit=commit)
        for group, offsets in self.pending.items():
            if commit:
                self.committed.setdefault(group, {}).update(offsets)
        self.partitions, self.groups, self.pending = set(), set(), {}
        self.state = "committed" if commit else "aborted"

    # Requests.

    def serve(self, call: Call) -> Any:
        """Do the work; the answer."""
        api = ApiKey(call.api)
        version = min(call.max_version, SPOKEN[api][1])
        assert version >= call.min_version
        self.seen.append((api, version))
        if api is ApiKey.PRODUCE:
            return self._produce(call, version)
        body = b"".join(bytes(piece) for piece in call.body(version))
        request = decode_request(api, version, memoryview(body))
        code = ErrorCode.NONE
        if self.refusals.get(api):
            code = self.refusals[api].popleft()
        handler: Callable[..., Any] = getattr(self, f"_{api.name.lower()}")
        return handler(request, version, code)

    def _produce(self, call: Call, version: int) -> ProduceResponse:
        body = b"".join(bytes(piece) for piece in call.body(version))
        request = decode_produce_request(version, memoryview(body))
        assert request.transactional_id == "x"
        parts = []
        for topic in request.topics:
            for part in topic.partitions:
                assert part.records is not None
                header = check_batch(part.records)
                assert header.is_transactional
                values = [record.value or b"" for record in read_records(part.records)]
                code, offset = ErrorCode.NONE, -1
                if self.refusals.get(ApiKey.PRODUCE):
                    code = self.refusals[ApiKey.PRODUCE].popleft()
                if not code:
                    code = self._verify(header, part.index, version)
                if not code:
                    code, offset = self.logs[part.index].append(header, values)
                parts.append(ProducePartitionResponse(part.index, code, offset))
        return ProduceResponse([ProduceTopicResponse(TOPIC, None, parts)])

    def _verify(self, header: BatchHeader, partition: int, version: int) -> ErrorCode:
        if header.producer_epoch != self.epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if version >= 12:
            self.state = "ongoing"
            self.partitions.add(partition)
        elif partition not in self.partitions:
            return ErrorCode.INVALID_TXN_STATE
        return ErrorCode.NONE

    def _find_coordinator(self, request: Struct, version: int, code: ErrorCode) -> Struct:
        place = {"node_id": 1, "host": "h", "port": 1, "error_code": code, "error_message": None}
        return Struct(coordinators=[Struct(key=k, **place) for k in request.coordinator_keys])

    def _init_producer_id(self, request: Struct, version: int, code: ErrorCode) -> Struct:
        if code:
            return Struct(error_code=code, producer_id=-1, producer_epoch=-1)
        if request.producer_id >= 0:
            given = request.producer_epoch
            if given == self.last_epoch and self.state != "ongoing":
                return Struct(error_code=0, producer_id=self.producer_id, producer_epoch=self.epoch)
            if given != self.epoch:
                return Struct(
                    error_code=ErrorCode.PRODUCER_FENCED, producer_id=-1, producer_epoch=-1
                )
            self.last_epoch = self.epoch
        else:
            self.last_epoch = -1
        self.epoch += 1
        if self.state == "ongoing":
            self._end(commit=False)
        self.state = "empty"
        return Struct(error_code=0, producer_id=self.producer_id, producer_epoch=self.epoch)

    def _fenced(self, epoch: int) -> ErrorCode:
        return ErrorCode.NONE if epoch == self.epoch else ErrorCode.PRODUCER_FENCED

    def _add_partitions_to_txn(self, request: Struct, version: int, code: ErrorCode) -> Struct:
        code = code or self._fenced(request.v3_and_below_producer_epoch)
        topics = []
        for topic in request.v3_and_below_topics:
            if not code:
                self.state = "ongoing"
                self.partitions.update(topic.partitions)
            results = [
                Struct(partition_index=p, partition_error_code=code) for p in topic.partitions
            ]
            topics.append(Struct(name=topic.name, results_by_partition=results))
        return Struct(results_by_topic_v3_and_below=topics)

    def _add_offsets_to_txn(self, request: Struct, version: int, code: ErrorCode) -> Struct:
        code = code or self._fenced(request.producer_epoch)
        if not code:
            self.state = "ongoing"
            self.groups.add(request.group_id)
        return Struct(error_code=code)

    def _txn_offset_commit(self, request: Struct, version: int, code: ErrorCode) -> Struct:
        code = code or self._fenced(request.producer_epoch)
        if not code and request.generation_id not in (-1, self.generation):
            code = ErrorCode.ILLEGAL_GENERATION
        if not code and version >= 5:
            self.state = "ongoing"
            self.groups.add(request.group_id)
        if not code and request.group_id not in self.groups:
            code = ErrorCode.INVALID_TXN_STATE
        topics = []
        for topic in request.topics:
            for part in topic.partitions:
                if not code:
                    key = TopicPartition(topic.name, part.partition_index)
                    self.pending.setdefault(request.group_id, {})[key] = part.committed_offset
            parts = [
                Struct(partition_index=part.partition_index, error_code=code)
                for part in topic.partitions
            ]
            topics.append(Struct(name=topic.name, partitions=parts))
        return Struct(topics=topics)

    def _end_txn(self, request: Struct, version: int, code: ErrorCode) -> Struct:
        commit, epoch = request.committed, request.producer_epoch
        raises = version >= 5
        if not code and epoch == self.epoch and self.state == "ongoing":
            if raises:
                self.last_epoch, self.epoch = self.epoch, self.epoch + 1
            self._end(commit=commit)
        elif not code:
            wanted = "committed" if commit else "aborted"
            is_retry = epoch == (self.last_epoch if raises else self.epoch)
            if raises and not commit and epoch == self.epoch:
                self.last_epoch, self.epoch = self.epoch, self.epoch + 1
                self.state = "aborted"
            elif not is_retry:
                code = ErrorCode.PRODUCER_FENCED
            elif self.state != wanted:
                code = ErrorCode.INVALID_TXN_STATE
        found = self.producer_id, self.epoch
        return Struct(
            error_code=code,
            producer_id=found[0] if raises and not code else -1,
            producer_epoch=found[1] if raises and not code else -1,
        )


def lose_before(_cluster: Cluster, call: Call, now: float) -> None:
    """The request never arrives."""
    call.complete(None, ConnectionLostError("gone"), now)


def lose_after(cluster: Cluster, call: Call, now: float) -> None:
    """The work is done, and nobody hears of it."""
    cluster.serve(call)
    call.complete(None, ConnectionLostError("gone"), now)
