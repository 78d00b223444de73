"""Produce requests: what a partition has in flight, the bytes of a batch, and those of one request.

Owns the per-partition state of a producer and the snapshot that an attempt takes of a batch's
sequence: a body is encoded only when its connection stands, and must not pick up numbers that the
batch was given later. Many new records become one batch quickly, with the same bytes as
`raftmq.records.build_batch` gives: numbers come from tables where they are small, and every byte of
a record is copied once, when all pieces of a batch are joined. Headers, which are rare, are left to
`raftmq.records`. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from attrs import define, field, frozen

from raftmq.codec import Codec
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.protocol.produce import (
    ProducePartition,
    ProducePartitionResponse,
    ProduceRequest,
    ProduceResponse,
    ProduceTopic,
    decode_produce_response,
    encode_produce_request,
)
from raftmq.records import NewRecord, assemble_batch, encode_record, encode_varint
from raftmq.types import Buffer, TopicPartition
from raftmq_client.core.accumulator import Batch, Fields, Receipt
from raftmq_client.core.call import Call, Finish
from raftmq_client.core.metadata import Broker
from raftmq_client.errors import TimedOutError

_TABLE: Final = tuple(encode_varint(number) for number in range(2_048))
_TABLE_SIZE: Final = len(_TABLE)
_NULL: Final = encode_varint(-1)


def encode_batch(
    records: Sequence[Fields],
    *,
    codec: Codec,
    level: int | None,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    transactional: bool = False,
) -> bytearray:
    """The batch of these records, all of which have a timestamp."""
    stamps = [record[2] or 0 for record in records]
    base = stamps[0]
    return assemble_batch(
        _encode(records, base),
        record_count=len(records),
        base_timestamp=base,
        max_timestamp=max(stamps),
        codec=codec,
        level=level,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        transactional=transactional,
    )


def _encode(records: Sequence[Fields], base: int) -> list[bytes]:
    """The pieces of all records."""
    pieces: list[bytes] = []
    extend, table, top = pieces.extend, _TABLE, _TABLE_SIZE
    for number, record in enumerate(records):
        key, value, stamp, headers = record
        later = (stamp or 0) - base
        if headers:
            pieces.append(encode_record(NewRecord._make(record), later, number))
            continue
        at = table[later] if 0 <= later < top else encode_varint(later)
        place = table[number] if number < top else encode_varint(number)
        size = 2 + len(at) + len(place)  # attributes and the number of headers take a byte each
        if key is None:
            key, key_size = b"", _NULL
        else:
            length = len(key)
            key_size = table[length] if length < top else encode_varint(length)
            size += length
        if value is None:
            value, value_size = b"", _NULL
        else:
            length = len(value)
            value_size = table[length] if length < top else encode_varint(length)
            size += length
        size += len(key_size) + len(value_size)
        whole = table[size] if size < top else encode_varint(size)
        extend((whole, b"\x00", at, place, key_size, key, value_size, value, b"\x00"))
    return pieces


ACKS_ALL: Final = -1
PRODUCE_VERSION_MAX: Final = 12
"""v13 names topics by id; names are kept so that a recreated topic goes on."""


STALL_MS: Final = 250.0
"""In flight for so long: ask whether the partition has another leader by now."""

CONCURRENT_MS: Final = 20.0
"""The transaction before is not over yet at this partition: ask again soon."""

SEQUENCE_CODES: Final = frozenset(
    {
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        ErrorCode.UNKNOWN_PRODUCER_ID,
        ErrorCode.INVALID_PRODUCER_EPOCH,
    }
)
NOT_APPENDED: Final = frozenset(
    {
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.MESSAGE_TOO_LARGE,
        ErrorCode.CONCURRENT_TRANSACTIONS,
    }
)
"""Refusals before the append. After the others (a leader that lost its role while it waited for
its followers, say) the record may stand in the log."""


@frozen
class ProducerOptions:
    """How a producer behaves. Times in milliseconds."""

    acks: int = ACKS_ALL
    idempotent: bool | None = None
    """None: exactly when acks is all, as Kafka's own default."""
    transactional_id: str | None = None
    transaction_timeout_ms: int = 60_000
    sends_once: bool = False
    """Nothing is sent again once its bytes may have been appended."""
    codec: Codec = Codec.NONE
    compression_level: int | None = None
    linger_ms: float = 5.0
    batch_bytes: int = 128 * 1024
    buffer_memory: int = 32 << 20
    max_block_ms: float = 60_000
    request_bytes_max: int = 1 << 20
    in_flight_max: int = 5
    request_timeout_ms: float = 30_000
    delivery_timeout_ms: float = 120_000
    backoff_ms: float = 50
    backoff_max_ms: float = 1_000

    @property
    def is_idempotent(self) -> bool:
        """True when batches carry sequences."""
        return self.acks == ACKS_ALL if self.idempotent is None else self.idempotent


@define(eq=False)
class Unrouted:
    """A record whose topic, or whose partition, is not known yet."""

    record: Fields
    receipt: Receipt
    deadline: float
    size: int
    partition: int | None
    """Which one is wanted."""
    question: int = 0
    """An answer about topics that is newer than the record; before it no partition is refused."""


@define(eq=False)
class PartitionState:
    """What one partition has on its way."""

    key: TopicPartition
    producer_id: int = -1
    producer_epoch: int = -1
    next_sequence: int = 0
    is_known: bool = False
    """The broker has acknowledged a batch of this producer id and epoch."""
    next_slot: int = 0
    in_flight: list[Batch] = field(factory=list)
    node: int = -1
    retries: deque[Batch] = field(factory=deque)
    is_recovering: bool = False
    failures: int = 0
    not_before: float = 0.0
    sent_at: float = 0.0

    def in_flight_limit(self, options: ProducerOptions) -> int:
        """How many batches may be on their way at once without being appended out of order.

        Without sequences one: a retry behind a later batch would reorder. With them one, too, until
        the broker has acknowledged the first: Kafka takes any sequence from a producer that it does
        not know, so the second would be appended where the first was refused (a leader that has
        just begun refuses for a moment).
        """
        if options.acks == 0 or (options.is_idempotent and self.is_known):
            return options.in_flight_max
        return 1

    def put_back(self, batch: Batch) -> None:
        """Send a batch again, in the order of sending."""
        position = 0
        for other in self.retries:
            if batch.order < other.order:
                break
            position += 1
        self.retries.insert(position, batch)

    def may_number(self, slot: int, window: int) -> bool:
        """True when a broker would still recognise everything unsettled before this batch.

        Brokers remember the last five batches of a producer. Were a sixth appended behind one whose
        outcome is open, repeating that one would look like a gap, not like a duplicate.
        """
        unsettled = [batch.slot for batch in (*self.in_flight, *self.retries) if batch.slot >= 0]
        return not unsettled or slot - min(unsettled) < window

    def renumber_slots(self, split: Batch) -> None:
        """After a split nothing behind it was appended: count what is unsettled anew."""
        slot = split.slot
        for batch in sorted((*self.in_flight, *self.retries), key=lambda item: item.order):
            if batch.order >= split.order and max(batch.slot, batch.base_sequence) >= 0:
                batch.slot = slot
                slot += 1
        self.next_slot = max(self.next_slot, slot)


@frozen(eq=False)
class Attempt:
    """One batch in one request; stale once the batch was sent again."""

    partition: PartitionState
    batch: Batch
    number: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records: Sequence[Fields]

    @classmethod
    def of(cls, partition: PartitionState, batch: Batch) -> Attempt:
        """Snapshot a batch that is about to be sent."""
        producer_id = partition.producer_id if batch.base_sequence >= 0 else -1
        epoch, sequence = batch.producer_epoch, batch.base_sequence
        records = batch.records  # a batch that is settled meanwhile lets them go
        return cls(partition, batch, batch.attempts, producer_id, epoch, sequence, records)

    @property
    def is_stale(self) -> bool:
        """True when its answer means nothing any more."""
        return self.number != self.batch.attempts or self.batch not in self.partition.in_flight

    @property
    def is_wanted(self) -> bool:
        """True while somebody waits for its answer."""
        return not (self.is_stale or self.batch.is_done)


def build_request(
    options: ProducerOptions,
    attempts: Sequence[Attempt],
    timeout_ms: int,
    transactional_id: str | None = None,
) -> ProduceRequest:
    """The request of some attempts, records encoded and compressed."""
    topics: dict[str, ProduceTopic] = {}
    for attempt in attempts:
        key = attempt.batch.key
        records = encode_batch(
            attempt.records,
            codec=options.codec,
            level=options.compression_level,
            producer_id=attempt.producer_id,
            producer_epoch=attempt.producer_epoch if attempt.producer_id >= 0 else -1,
            base_sequence=attempt.base_sequence,
            transactional=transactional_id is not None,
        )
        topic = topics.setdefault(key.topic, ProduceTopic(key.topic, None, []))
        topic.partitions.append(ProducePartition(key.partition, memoryview(records)))
    return ProduceRequest(transactional_id, options.acks, timeout_ms, list(topics.values()))


@frozen(eq=False)
class Request:
    """A request on its way and what it says."""

    call: Call
    attempts: Sequence[Attempt]

    def drop(self, now: float) -> None:
        """Give it up if it has not left and has nothing left to say."""
        if not (self.call.sent or any(attempt.is_wanted for attempt in self.attempts)):
            self.call.complete(None, TimedOutError("given up before it left", sent=False), now)


def make_request(
    options: ProducerOptions,
    node: int,
    attempts: Sequence[Attempt],
    finish: Finish,
    transactional_id: str | None = None,
    versions: tuple[int, int] = (3, PRODUCE_VERSION_MAX),
) -> Call:
    """The call of one request.

    Its body is made when its connection stands. What was given up by then is left out: it was told
    as never sent, or is sent to another leader.
    """
    timeout = min(options.request_timeout_ms, options.delivery_timeout_ms)

    def body(version: int) -> list[Buffer]:
        wanted = [attempt for attempt in attempts if attempt.is_wanted]
        request = build_request(options, wanted, int(timeout), transactional_id)
        return encode_produce_request(version, request)

    call = Call(
        api=ApiKey.PRODUCE,
        body=body,
        read=decode_produce_response,
        finish=finish,
        node=node,
        min_version=versions[0],
        max_version=versions[1],
        timeout_ms=timeout,
        expects_answer=options.acks != 0,
    )
    for attempt in attempts:
        attempt.batch.request = Request(call, attempts)
    return call


def answers_of(
    response: ProduceResponse | None,
) -> tuple[dict[TopicPartition, ProducePartitionResponse], list[Broker]]:
    """What an answer says of each partition, and the brokers that it names."""
    answers: dict[TopicPartition, ProducePartitionResponse] = {}
    if response is None:
        return answers, []
    for topic in response.topics:
        for item in topic.partitions:
            answers[TopicPartition(topic.name or "", item.index)] = item
    nodes = [Broker(n.node_id, n.host, n.port, n.rack) for n in response.node_endpoints]
    return answers, nodes


def refusal(answer: ProducePartitionResponse) -> str | None:
    """What a broker said of a refused batch, for people."""
    if answer.error_message:
        return answer.error_message
    for item in answer.record_errors:
        return f"record {item.batch_index} of its batch: {item.message or 'refused'}"
    return None
