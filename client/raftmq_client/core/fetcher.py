"""Reads assigned partitions: where to fetch next, what is buffered, when to start over.

One fetch is in flight per broker, over all partitions whose buffer has room, with long polling.
Batches are checked (CRC-32C) on arrival and read into records only when taken. A position moves
when records are handed out; what a fetch brings after a seek or a revocation is dropped by its
token. `PartitionReader` holds position, buffer, errors and aborted transactions of one partition:
isolation `read_committed` hides aborted transactions (KIP-98). No clock, no socket.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

from attrs import define, field, frozen

from raftmq.errors import CorruptBatchError, ErrorCode
from raftmq.protocol import ApiKey
from raftmq.protocol.fetch import (
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    decode_fetch_response,
    encode_fetch_request,
)
from raftmq.records import BatchHeader, check_batch, parse_header, read_records, split_batches
from raftmq.types import TopicPartition
from raftmq_client.core.admin import (
    EARLIEST,
    LATEST,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    OffsetFound,
    list_offsets,
    read_offsets,
)
from raftmq_client.core.call import Call, struct_call
from raftmq_client.core.messages import ConsumerRecord, read_messages
from raftmq_client.core.metadata import Broker, MetadataCore
from raftmq_client.errors import (
    BrokerError,
    ClientError,
    CorruptAnswerError,
    CorruptRecordsError,
    NoOffsetError,
)


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


FETCH_VERSION_MAX: Final = 12
"""v13 names topics by id; names are kept so that a recreated topic goes on."""
_STALL_MS: Final = 1_000.0
_log: Final = logging.getLogger("raftmq_client.fetcher")
_PREFERRED_MS: Final = 300_000.0
_FROZEN_MS: Final = 60_000.0
"""How long a follower that did not answer is not asked."""


class Reset(Enum):
    """Where to start without a position, or when it is out of range."""

    EARLIEST = "earliest"
    LATEST = "latest"
    NONE = "none"


_START: Final = {Reset.EARLIEST: EARLIEST, Reset.LATEST: LATEST, Reset.NONE: None}


@frozen
class FetcherOptions:
    """How partitions are read. Times in milliseconds."""

    reset: Reset = Reset.LATEST
    isolation: int = READ_UNCOMMITTED
    max_wait_ms: int = 500
    min_bytes: int = 1
    max_bytes: int = 50 << 20
    partition_bytes_max: int = 1 << 20
    buffer_bytes_max: int = 64 << 20
    partition_buffer_bytes: int = 4 << 20
    request_timeout_ms: float = 30_000
    backoff_ms: float = 50
    backoff_max_ms: float = 1_000
    rack: str = ""
    skips_unreadable: bool = False
    """Pass by batches whose records cannot be read, with a warning in the log."""


class FetcherCore:
    """One consumer's reading."""

    def __init__(self, options: FetcherOptions, metadata: MetadataCore) -> None:
        self.options = options
        self.readers: dict[TopicPartition, PartitionReader] = {}
        self.touched: list[TopicPartition] = []
        """The partitions whose positions the last `take` moved: by records, or past what nobody is
        given, such as the ends of transactions."""
        self.starts: dict[TopicPartition, int] = {}
        """Positions that lookups have chosen; whoever commits takes them from here."""
        self._metadata = metadata
        self._busy: dict[int, int] = {}
        self._frozen_until: dict[int, float] = {}  # followers that did not answer in time
        self._asked_bytes = 0  # that fetches under way may bring
        self._buffered_bytes = 0
        self._turn = 0
        self._served = 0
        self._wake_at = 0.0

    # What users do.

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these; those that stay keep their position and buffer."""
        wanted = dict.fromkeys(partitions)
        for key in [key for key in self.readers if key not in wanted]:
            self._drop_buffer(self.readers.pop(key))
            self.starts.pop(key, None)
        for key in wanted:
            self.readers.setdefault(key, PartitionReader(key))
        self._metadata.want(dict.fromkeys(key.topic for key in wanted))

    def seek(self, key: TopicPartition, offset: int | None) -> None:
        """Go on at `offset`, or where EARLIEST or LATEST is; None asks the reset policy."""
        reader = self.readers[key]
        self._drop_buffer(reader)
        self.starts.pop(key, None)
        reader.move(offset)

    def positions(self) -> dict[TopicPartition, int]:
        """Known positions: the offset after the last record handed out."""
        return {
            key: reader.position
            for key, reader in self.readers.items()
            if reader.position is not None
        }

    def take(self, records_max: int) -> list[ConsumerRecord]:
        """Hand out buffered records, partitions taking turns.

        Raises:
            ClientError: a partition cannot go on; nothing was handed out with it.
        """
        readers = list(self.readers.values())
        taken: list[ConsumerRecord] = []
        self.touched.clear()
        for step in range(len(readers)):
            reader = readers[(self._turn + step) % len(readers)]
            if reader.is_paused:
                continue
            if reader.error is not None and not reader.has_buffered:
                if taken:
                    continue  # told by the next call
                error, reader.error = reader.error, None
                raise error
            before, position = len(taken), reader.position
            try:
                self._take_from(reader, records_max - before, taken)
            except CorruptRecordsError:
                if not taken:
                    raise  # else told by the next call: the positions of these have moved
            if reader.position != position:
                self.touched.append(reader.key)
            if len(taken) >= records_max:
                self._turn += step
                break
        self._turn += 1
        return taken

    def take_batches(self, key: TopicPartition) -> list[tuple[BatchHeader, memoryview]]:
        """Hand out what is buffered of one partition as the batches that were written.

        Their checksums hold. Control batches and aborted ones are left out, and counted by the
        position. A first batch may begin below the position, as fetches do.

        Raises:
            ClientError: the partition cannot go on; nothing was handed out with it.
        """
        reader = self.readers[key]
        if reader.error is not None and not reader.has_buffered:
            error, reader.error = reader.error, None
            raise error
        assert not reader.ready, "records and batches are not taken by turns"
        taken: list[tuple[BatchHeader, memoryview]] = []
        while reader.buffered:
            batch = reader.buffered.popleft()
            header = parse_header(batch)
            if reader.is_data(header, batch):
                taken.append((header, batch))
                reader.epoch = header.leader_epoch
            reader.position = header.next_offset
        self._buffered_bytes -= reader.buffered_bytes
        reader.buffered_bytes = 0
        return taken

    def lag(self, key: TopicPartition, position: int) -> int | None:
        """How far a position is from the end that this consumer may see; None: not known yet."""
        reader = self.readers[key]
        end = reader.high_watermark
        if self.options.isolation == READ_COMMITTED and reader.last_stable_offset >= 0:
            end = reader.last_stable_offset
        return None if end < 0 else max(0, end - position)

    @property
    def has_records(self) -> bool:
        """True when `take` would give something, or raise."""
        return any(
            reader.has_buffered or reader.error is not None
            for reader in self.readers.values()
            if not reader.is_paused
        )

    # What drivers ask.

    def calls(self, now: float) -> list[Call]:
        """Fetches and lookups that are due."""
        self._wake_at = float("inf")
        lookups: dict[int, list[PartitionReader]] = {}
        fetches: dict[int, list[PartitionReader]] = {}
        for reader in self.readers.values():
            node = self._node_for(reader, now)
            if node is None:
                continue
            if reader.position is None:
                lookups.setdefault(node, []).append(reader)
            elif self._has_room(reader) and not self._busy.get(node, 0):
                fetches.setdefault(node, []).append(reader)
        calls = [self._lookup(node, readers) for node, readers in lookups.items()]
        for node, readers in fetches.items():
            share = self._share(len(readers))
            if share:
                calls.append(self._fetch(node, readers, share, now))
        return calls

    def deadline(self) -> float:
        """When `calls` should next be asked."""
        return self._wake_at

    def _node_for(self, reader: PartitionReader, now: float) -> int | None:
        """Whom to ask for this partition now; None when nothing is due."""
        leader = self._metadata.leader(*reader.key)
        if reader.fetching_from is not None:
            self._watch(reader, leader, now)
            return None
        if reader.is_looking_up or reader.is_paused or reader.error is not None:
            return None
        if reader.not_before > now:
            self._wake(reader.not_before)
            return None
        if reader.position is None and self._wanted_start(reader) is None:
            reader.error = NoOffsetError(f"{reader.key} has no position, and reset is none")
            return None
        if leader is None:
            self._metadata.invalidate()
            return None
        if (
            reader.preferred is not None
            and reader.position is not None
            and now < reader.preferred_until
            and now >= self._frozen_until.get(reader.preferred, now)
            and reader.preferred in self._metadata.brokers
        ):
            return reader.preferred
        return leader[0]

    def _watch(self, reader: PartitionReader, leader: tuple[int, int] | None, now: float) -> None:
        """A frozen broker never answers: go on with who can, as soon as there is one.

        For a leader it is its successor, for a follower the leader.
        """
        limit = self.options.max_wait_ms + _STALL_MS
        node = reader.fetching_from
        is_late = now - reader.fetching_since >= limit
        is_follower = node == reader.preferred and leader is not None and leader[0] != node
        if is_late and is_follower and node is not None:
            self._frozen_until[node] = now + max(
                _FROZEN_MS, limit + self.options.request_timeout_ms
            )
            self._metadata.invalidate()
            for other in self.readers.values():
                if other.fetching_from == node == other.preferred:
                    other.preferred = other.fetching_from = None
                    other.token += 1
            self._wake(now)
            return
        if leader is not None and node not in (leader[0], reader.preferred):
            reader.token += 1
            reader.fetching_from = None
            self._wake(now)
        elif is_late:
            reader.fetching_since = now
            self._metadata.invalidate()
        self._wake(reader.fetching_since + limit)

    def _share(self, partitions: int) -> int:
        """How many bytes a fetch of so many partitions may ask for now; 0: none.

        What is buffered and what is asked for stay within the buffer. Every broker may have a part
        of it, so that a long poll at one of them does not keep the others waiting. A broker gives
        at least one batch: one larger than its share is all that goes beyond.
        """
        options = self.options
        brokers = min(len(self._metadata.brokers), len(self.readers))
        part = options.buffer_bytes_max // max(1, brokers)
        need = max(1, min(options.partition_bytes_max, part // 4))
        if options.buffer_bytes_max - self._buffered_bytes - self._asked_bytes < need:
            self._forget_paused()
        free = options.buffer_bytes_max - self._buffered_bytes - self._asked_bytes
        if free < need:
            return 0
        wanted = min(options.max_bytes, partitions * options.partition_bytes_max)
        return max(1, min(wanted, part, free))

    def _forget_paused(self) -> None:
        """What is buffered of paused partitions must not keep the others from being read."""
        for key, reader in self.readers.items():
            if reader.is_paused and reader.buffered_bytes:
                self.seek(key, reader.position)

    def _has_room(self, reader: PartitionReader) -> bool:
        return reader.buffered_bytes < self.options.partition_buffer_bytes

    # Looking up positions.

    def _wanted_start(self, reader: PartitionReader) -> int | None:
        """EARLIEST or LATEST, as a seek or the policy says; None when the policy is none."""
        return _START[self.options.reset] if reader.start is None else reader.start

    def _lookup(self, node: int, readers: Sequence[PartitionReader]) -> Call:
        tokens = [(reader, reader.token) for reader in readers]
        starts = {reader.key: self._wanted_start(reader) for reader in readers}
        wanted = {key: start for key, start in starts.items() if start is not None}
        operation = list_offsets(node, wanted, isolation=self.options.isolation)

        def finish(response: Any, error: ClientError | None, now: float) -> None:
            found = {} if error is not None else read_offsets(response)
            for reader, token in tokens:
                if reader.token != token:
                    continue
                reader.is_looking_up = False
                offset = found.get(reader.key)
                if isinstance(offset, OffsetFound) and offset.offset >= 0:
                    reader.move(offset.offset)
                    self.starts[reader.key] = offset.offset
                    reader.failures = 0
                else:
                    missing = CorruptAnswerError(f"no offset of {reader.key} in an answer")
                    failure = offset if isinstance(offset, BrokerError) else missing
                    self._failed(reader, error or failure, now)

        for reader in readers:
            reader.is_looking_up = True
        return struct_call(
            operation.api,
            operation.request,
            finish,
            node=node,
            min_version=operation.min_version,
            max_version=operation.max_version,
            timeout_ms=self.options.request_timeout_ms,
        )

    # Fetching.

    def _fetch(self, node: int, readers: Sequence[PartitionReader], share: int, now: float) -> Call:
        tokens: dict[TopicPartition, tuple[PartitionReader, int]] = {}
        for reader in readers:
            reader.fetching_from = node
            reader.fetching_since = now
            tokens[reader.key] = (reader, reader.token)
            self._wake(now + self.options.max_wait_ms + _STALL_MS)
        self._busy[node] = self._busy.get(node, 0) + 1
        self._asked_bytes += share
        request = self._request(readers, share, now)

        def finish(response: Any, error: ClientError | None, at: float) -> None:
            self._busy[node] -= 1
            self._asked_bytes -= share
            if error is None:
                self._frozen_until.pop(node, None)
            self._fetched(node, tokens, response, error, at)

        return Call(
            api=ApiKey.FETCH,
            body=lambda version: (encode_fetch_request(version, request),),
            read=decode_fetch_response,
            finish=finish,
            node=node,
            min_version=4,
            max_version=FETCH_VERSION_MAX,
            timeout_ms=self.options.request_timeout_ms + self.options.max_wait_ms,
        )

    def _request(self, readers: Sequence[PartitionReader], share: int, now: float) -> FetchRequest:
        options = self.options
        # A leader that knows the rack sends us back to the closest replica, and no records.
        is_one_frozen = any(now < until for until in self._frozen_until.values())
        topics: dict[str, FetchTopic] = {}
        # A broker fills its answer in this order: first those that waited longest for something.
        for reader in sorted(readers, key=lambda reader: reader.served):
            key = reader.key
            leader = self._metadata.leader(*key)
            topic = topics.setdefault(key.topic, FetchTopic(key.topic, None, []))
            topic.partitions.append(
                FetchPartition(
                    partition=key.partition,
                    current_leader_epoch=leader[1] if leader else -1,
                    fetch_offset=reader.fetch_offset,
                    partition_max_bytes=options.partition_bytes_max,
                )
            )
        return FetchRequest(
            max_wait_ms=options.max_wait_ms,
            min_bytes=options.min_bytes,
            max_bytes=share,
            isolation_level=options.isolation,
            topics=list(topics.values()),
            rack_id="" if is_one_frozen else options.rack,
        )

    def _fetched(
        self,
        node: int,
        tokens: Mapping[TopicPartition, tuple[PartitionReader, int]],
        response: FetchResponse | None,
        error: ClientError | None,
        now: float,
    ) -> None:
        if error is None and response is not None and response.error_code:
            error = BrokerError(response.error_code, about="fetch")
        answers: dict[TopicPartition, FetchPartitionResponse] = {}
        nodes: list[Broker] = []
        if error is None and response is not None:
            nodes = [Broker(n.node_id, n.host, n.port, n.rack) for n in response.node_endpoints]
            for topic in response.topics:
                for item in topic.partitions:
                    answers[TopicPartition(topic.name or "", item.partition)] = item
        for key, (reader, token) in tokens.items():
            if reader.token != token:
                continue
            reader.fetching_from = None
            answer = answers.get(key)
            if error is not None:
                reader.preferred = None
                self._failed(reader, error, now)
            elif answer is not None:
                self._answered(node, reader, answer, nodes, now)

    def _answered(
        self,
        node: int,
        reader: PartitionReader,
        answer: FetchPartitionResponse,
        nodes: Sequence[Broker],
        now: float,
    ) -> None:
        code = answer.error_code
        if code == ErrorCode.OFFSET_OUT_OF_RANGE:
            self._out_of_range(node, reader, now)
            return
        if code != ErrorCode.NONE:
            leader = answer.current_leader
            if leader is not None:
                self._metadata.learn_leader(
                    *reader.key, leader.leader_id, leader.leader_epoch, nodes
                )
            reader.preferred = None
            self._failed(reader, BrokerError(code, about=f"partition {reader.key}"), now)
            return
        reader.high_watermark = answer.high_watermark
        reader.last_stable_offset = answer.last_stable_offset
        reader.log_start_offset = answer.log_start_offset
        if answer.preferred_read_replica >= 0:
            reader.preferred = answer.preferred_read_replica
            reader.preferred_until = now + _PREFERRED_MS
        try:
            self._store(reader, answer)
            reader.failures = 0
        except CorruptRecordsError as error:
            self._failed(reader, error, now)

    def _store(self, reader: PartitionReader, answer: FetchPartitionResponse) -> None:
        if answer.aborted_transactions and self.options.isolation == READ_COMMITTED:
            known = dict.fromkeys(reader.aborted)
            for item in answer.aborted_transactions:
                known[(item.first_offset, item.producer_id)] = None
            reader.aborted = sorted(known)
        end: int | None = None
        try:
            for records in answer.records or ():
                for header, batch in split_batches(records):
                    end = header.next_offset
                    if end <= reader.fetch_offset:
                        continue
                    check_batch(batch)
                    reader.buffered.append(batch)
                    reader.served = self._served = self._served + 1
                    reader.buffered_bytes += len(batch)
                    self._buffered_bytes += len(batch)
                    reader.fetch_offset = end
        except CorruptBatchError as error:
            offset = reader.fetch_offset
            where = f"{reader.key} at offset {offset}"
            raise CorruptRecordsError(f"{where}: {error}", *reader.key, offset, end) from error

    def _out_of_range(self, node: int, reader: PartitionReader, now: float) -> None:
        if reader.preferred == node:
            # A follower may lag; its leader knows, and may send us back to it.
            reader.preferred = None
            reader.not_before = now + self.options.backoff_ms
            self._wake(reader.not_before)
            return
        if reader.buffered or reader.ready_index < len(reader.ready):
            reader.not_before = now + self.options.backoff_ms  # first hand out what is here
            return
        if self.options.reset is Reset.NONE:
            offset = reader.fetch_offset
            reader.error = NoOffsetError(f"offset {offset} of {reader.key} is out of range")
            return
        reader.move(None)

    def _failed(self, reader: PartitionReader, error: ClientError, now: float) -> None:
        backoff = self.options.backoff_ms * 2 ** min(reader.failures, 8)
        reader.not_before = now + min(backoff, self.options.backoff_max_ms)
        reader.failures += 1
        self._wake(reader.not_before)
        if error.retriable and not (isinstance(error, CorruptAnswerError) and reader.failures > 3):
            self._metadata.invalidate()
            return
        reader.error = error

    # From batches to records.

    def _take_from(self, reader: PartitionReader, count: int, taken: list[ConsumerRecord]) -> None:
        while count > 0:
            if reader.ready_index >= len(reader.ready):
                if not reader.buffered:
                    return
                self._unpack(reader)
                continue
            part = reader.ready[reader.ready_index : reader.ready_index + count]
            reader.ready_index += len(part)
            count -= len(part)
            taken.extend(part)
            reader.epoch = part[-1].leader_epoch
            is_last = reader.ready_index >= len(reader.ready)
            reader.position = reader.ready_end if is_last else part[-1].offset + 1

    def _unpack(self, reader: PartitionReader) -> None:
        batch = reader.buffered[0]
        header = parse_header(batch)
        start = reader.position or 0
        try:
            records: list[ConsumerRecord] = []
            if reader.is_data(header, batch):
                records = read_messages(header, batch, *reader.key, start)
        except CorruptBatchError as error:
            # Its checksum held, so asking again would bring the same bytes.
            offset = max(start, header.base_offset)
            where = f"{reader.key} at offset {offset}"
            if not self.options.skips_unreadable:
                raise CorruptRecordsError(
                    f"{where}: {error}; seek to {header.next_offset} to go on, or set"
                    " skip_unreadable=True to pass such batches by",
                    *reader.key,
                    offset,
                    header.next_offset,
                ) from error
            _log.warning("%s up to %d cannot be read: %s", where, header.next_offset, error)
            records = []
        reader.buffered.popleft()
        reader.buffered_bytes -= len(batch)
        self._buffered_bytes -= len(batch)
        reader.ready = records
        reader.ready_index = 0
        reader.ready_end = header.next_offset
        if not records:
            reader.position = header.next_offset

    def _drop_buffer(self, reader: PartitionReader) -> None:
        self._buffered_bytes -= reader.buffered_bytes
        reader.buffered_bytes = 0
        reader.token += 1

    def _wake(self, at: float) -> None:
        self._wake_at = min(self._wake_at, at)
