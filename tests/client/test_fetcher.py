"""Positions move with what is handed out, and nothing stale is handed out."""

from __future__ import annotations

import random

import pytest
from crc32c import crc32c

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct
from raftmq.protocol.fetch import (
    AbortedTransaction,
    FetchPartitionResponse,
    FetchRequest,
    FetchResponse,
    FetchTopicResponse,
    decode_fetch_request,
)
from raftmq.protocol.wire import CurrentLeader
from raftmq.records import NewRecord, build_batch
from raftmq.types import TopicPartition
from raftmq_client.core.admin import READ_COMMITTED
from raftmq_client.core.call import Call
from raftmq_client.core.fetcher import FetcherCore, FetcherOptions, Reset
from raftmq_client.core.metadata import (
    Broker,
    ClusterInfo,
    MetadataCore,
    PartitionInfo,
    TopicInfo,
)
from raftmq_client.errors import (
    BrokerError,
    ConnectionLostError,
    CorruptAnswerError,
    CorruptRecordsError,
    NoOffsetError,
)

KEY = TopicPartition("t", 0)


def cluster(leader: int = 1, epoch: int = 0, partitions: int = 1) -> ClusterInfo:
    parts = tuple(PartitionInfo("t", p, leader, epoch) for p in range(partitions))
    brokers = (Broker(1, "h", 1), Broker(2, "h", 2))
    return ClusterInfo("c", 1, brokers, (TopicInfo("t", None, False, parts),))


def batch(base: int, *values: bytes, producer_id: int = -1, control: bytes = b"") -> bytes:
    records = [NewRecord(control or None, value, 5) for value in values]
    return bytes(
        build_batch(
            records,
            base_offset=base,
            producer_id=producer_id,
            producer_epoch=0 if producer_id >= 0 else -1,
            base_sequence=0 if producer_id >= 0 else -1,
            transactional=producer_id >= 0,
            control=bool(control),
        )
    )


class Reader:
    """A fetcher, its clock and a broker that answers as the test says."""

    def __init__(self, partitions: int = 1, **options: object) -> None:
        self.metadata = MetadataCore()
        self.metadata.apply(cluster(partitions=partitions), 0)
        self.core = FetcherCore(FetcherOptions(**options), self.metadata)  # type: ignore[arg-type]
        self.now = 0.0
        self.core.assign([TopicPartition("t", p) for p in range(partitions)])

    def due(self) -> Call:
        (call,) = self.core.calls(self.now)
        return call

    def answer(self, call: Call, *batches: bytes, code: int = 0, **fields: object) -> None:
        data = [memoryview(b"".join(batches))] if batches else []
        part = FetchPartitionResponse(0, code, 100, records=data, **fields)  # type: ignore[arg-type]
        response = FetchResponse([FetchTopicResponse("t", None, [part])])
        call.complete(response, None, self.now)

    def values(self, count: int = 500) -> list[bytes | None]:
        return [record.value for record in self.core.take(count)]


@pytest.mark.parametrize(("reset", "asked"), [(Reset.EARLIEST, -2), (Reset.LATEST, -1)])
def test_without_a_position_the_policy_decides(reset: Reset, asked: int) -> None:
    reader = Reader(reset=reset)
    call = reader.due()
    assert call.api == ApiKey.LIST_OFFSETS
    item = Struct(partition_index=0, error_code=0, offset=42, timestamp=-1, leader_epoch=0)
    call.complete(Struct(topics=[Struct(name="t", partitions=[item])]), None, 0)
    assert reader.core.positions() == {KEY: 42}
    assert reader.due().api == ApiKey.FETCH


def test_positions_move_as_records_are_handed_out() -> None:
    reader = Reader()
    reader.core.seek(KEY, 11)
    reader.answer(reader.due(), batch(10, b"0", b"1", b"2"), batch(13, b"3"))
    assert reader.values(1) == [b"1"], "records before the position are passed over"
    assert reader.core.positions() == {KEY: 12}
    assert reader.values() == [b"2", b"3"]
    assert reader.core.positions() == {KEY: 14}


def test_a_batch_cut_off_by_the_limit_is_left_for_the_next_fetch() -> None:
    reader = Reader()
    reader.core.seek(KEY, 0)
    whole, cut = batch(0, b"a"), batch(1, b"b")
    reader.answer(reader.due(), whole, cut[:-3])
    assert reader.values() == [b"a"]
    reader.answer(reader.due(), cut)
    assert reader.values() == [b"b"]


def test_what_comes_after_a_seek_or_revocation_is_dropped() -> None:
    reader = Reader()
    reader.core.seek(KEY, 0)
    stale = reader.due()
    reader.core.seek(KEY, 5)
    reader.answer(stale, batch(0, b"old"))
    assert reader.values() == []
    assert reader.core.positions() == {KEY: 5}
    reader.core.assign([])
    assert reader.core.take(10) == []


def test_it_fetches_ahead_but_only_so_far() -> None:
    reader = Reader(partition_buffer_bytes=100)
    reader.core.seek(KEY, 0)
    reader.answer(reader.due(), batch(0, b"x" * 200))
    assert reader.core.calls(0) == [], "the buffer is full"
    assert reader.values() == [b"x" * 200]
    assert reader.due().api == ApiKey.FETCH


def test_a_fetch_asks_for_no_more_than_the_buffer_has_room_for() -> None:
    reader = Reader(buffer_bytes_max=1_000)
    reader.core.seek(KEY, 0)
    for expected, values in ((1_000, [b"x" * 200]), (None, [])):
        call = reader.due()
        request = decode_fetch_request(12, memoryview(b"".join(call.body(12))))
        if expected is not None:
            assert request.max_bytes == expected
        else:
            assert 1 <= request.max_bytes < 800, "what is buffered counts"
        reader.answer(call, *(batch(0, value) for value in values))


def spread(partitions: int, brokers: int) -> ClusterInfo:
    parts = tuple(PartitionInfo("t", p, p % brokers + 1, 0) for p in range(partitions))
    nodes = tuple(Broker(number, "h", number) for number in range(1, brokers + 1))
    return ClusterInfo("c", 1, nodes, (TopicInfo("t", None, False, parts),))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_fetched_ahead_never_exceeds_its_bound(seed: int) -> None:
    """Brokers that answer in any order, each with all it was asked for."""
    draw = random.Random(seed)
    bound, partitions, size = 40_000, 8, len(batch(0, b"x" * 900))
    reader = Reader(partitions, buffer_bytes_max=bound, partition_bytes_max=3_000)
    reader.metadata.apply(spread(partitions, 3), 0)
    ends = dict.fromkeys(range(partitions), 0)
    for partition in ends:
        reader.core.seek(TopicPartition("t", partition), 0)
    open_calls: list[Call] = []
    peak = 0
    for _ in range(300):
        open_calls += reader.core.calls(reader.now)
        if open_calls and draw.random() < 0.7:
            call = open_calls.pop(draw.randrange(len(open_calls)))
            request = decode_fetch_request(12, memoryview(b"".join(call.body(12))))
            left, answers = request.max_bytes, []
            for item in request.topics[0].partitions:
                count = min(3_000, left) // size
                left -= count * size
                found = [batch(item.fetch_offset + n, b"x" * 900) for n in range(count)]
                data = [memoryview(b"".join(found))] if found else []
                answers.append(FetchPartitionResponse(item.partition, 0, 1 << 40, records=data))
            response = FetchResponse([FetchTopicResponse("t", None, answers)])
            call.complete(response, None, reader.now)
        elif draw.random() < 0.5:
            reader.core.take(draw.randrange(1, 20))
        held = sum(item.buffered_bytes for item in reader.core.readers.values())
        assert held == reader.core._buffered_bytes
        peak = max(peak, held)
        assert held <= bound
    assert peak > bound // 2, "the bound is used"


def test_every_broker_has_its_part_of_the_buffer() -> None:
    reader = Reader(2, buffer_bytes_max=8_000, partition_bytes_max=1 << 20)
    reader.metadata.apply(spread(2, 2), 0)
    reader.core.seek(TopicPartition("t", 0), 0)
    reader.core.readers[TopicPartition("t", 1)].is_paused = True
    (first,) = reader.core.calls(0)
    reader.core.readers[TopicPartition("t", 1)].is_paused = False
    reader.core.seek(TopicPartition("t", 1), 0)
    (second,) = reader.core.calls(0)
    shares = [
        decode_fetch_request(12, memoryview(b"".join(call.body(12)))).max_bytes
        for call in (first, second)
    ]
    assert shares == [4_000, 4_000], "the first one's long poll leaves room for the second"


@pytest.mark.parametrize("size", [1_900, 2_100])
def test_paused_partitions_do_not_fill_the_buffer_for_good(size: int) -> None:
    reader = Reader(2, buffer_bytes_max=2_000, partition_bytes_max=2_000)
    paused, other = TopicPartition("t", 0), TopicPartition("t", 1)
    reader.core.seek(paused, 0)
    reader.answer(reader.core.calls(0)[-1], batch(0, b"x" * size))
    reader.core.readers[paused].is_paused = True
    reader.core.seek(other, 0)
    (call,) = reader.core.calls(0)
    request = decode_fetch_request(12, memoryview(b"".join(call.body(12))))
    assert [item.partition for item in request.topics[0].partitions] == [1]
    reader.core.readers[paused].is_paused = False
    reader.answer(call)
    reader.answer(reader.due(), batch(0, b"x" * size))
    assert reader.values() == [b"x" * size], "it is fetched again"


def test_a_damaged_batch_is_asked_for_again_then_told() -> None:
    reader = Reader()
    reader.core.seek(KEY, 0)
    bad = bytearray(batch(0, b"abc"))
    bad[-1] ^= 1
    for _ in range(4):
        reader.answer(reader.due(), bytes(bad))
        reader.now = reader.core.deadline() if reader.core.deadline() < 1e9 else reader.now
    with pytest.raises(CorruptAnswerError, match="t-0 at offset 0"):
        reader.core.take(1)


def test_a_fallen_leader_is_followed_after_a_pause() -> None:
    reader = Reader()
    reader.core.seek(KEY, 0)
    reader.due().complete(None, ConnectionLostError("gone"), 0)
    assert reader.core.calls(0) == []
    reader.metadata.apply(cluster(2, 1), 1)
    reader.now = 1_000
    assert reader.due().node == 2


def test_a_frozen_leader_is_left_for_its_successor() -> None:
    reader = Reader()
    reader.core.seek(KEY, 0)
    frozen = reader.due()
    reader.metadata.apply(cluster(2, 1), 1)
    assert reader.core.calls(1) == []
    call = reader.due()
    assert call.node == 2
    reader.answer(frozen, batch(0, b"stale"))
    assert reader.values() == []


def test_out_of_range_resets_or_tells() -> None:
    reader = Reader(reset=Reset.EARLIEST)
    reader.core.seek(KEY, 9)
    reader.answer(reader.due(), code=ErrorCode.OFFSET_OUT_OF_RANGE)
    assert reader.due().api == ApiKey.LIST_OFFSETS
    reader = Reader(reset=Reset.NONE)
    reader.core.seek(KEY, 9)
    reader.answer(reader.due(), code=ErrorCode.OFFSET_OUT_OF_RANGE)
    with pytest.raises(NoOffsetError):
        reader.core.take(1)


def sent_request(call: Call) -> FetchRequest:
    return decode_fetch_request(12, memoryview(b"".join(bytes(b) for b in call.body(12))))


def test_a_frozen_follower_costs_as_long_as_a_frozen_leader_and_the_leader_serves() -> None:
    reader = Reader(rack="r", max_wait_ms=500, request_timeout_ms=30_000)
    reader.core.seek(KEY, 0)
    call = reader.due()
    assert (call.node, sent_request(call).rack_id) == (1, "r")
    reader.answer(call, preferred_read_replica=2)
    frozen = reader.due()
    assert frozen.node == 2
    reader.now = 1_499
    assert reader.core.calls(reader.now) == []
    assert reader.core.deadline() == 1_500
    reader.now = 1_500
    assert reader.core.calls(reader.now) == []
    assert reader.core.deadline() == reader.now, "at once"
    call = reader.due()
    assert (call.node, sent_request(call).rack_id) == (1, ""), "the rack would send us back"
    reader.answer(call, batch(0, b"a"))
    assert reader.values() == [b"a"]
    reader.answer(frozen, batch(0, b"late"))
    assert reader.values() == [], "what it brings in the end is void"
    call = reader.due()
    assert (call.node, sent_request(call).rack_id) == (1, "r"), "it has thawed: ask for it again"


def test_a_frozen_follower_is_tried_again_after_a_while() -> None:
    reader = Reader(rack="r", max_wait_ms=500, request_timeout_ms=30_000)
    reader.core.seek(KEY, 0)
    reader.answer(reader.due(), preferred_read_replica=2)
    frozen = reader.due()
    reader.now = 1_500
    reader.core.calls(reader.now)
    frozen.complete(None, ConnectionLostError("gone"), 30_500)
    reader.now = 61_499
    assert sent_request(reader.due()).rack_id == ""
    reader = Reader(rack="r")
    reader.core.seek(KEY, 0)
    reader.core._frozen_until[2] = 61_500
    reader.now = 61_500
    assert sent_request(reader.due()).rack_id == "r"


def test_a_frozen_leader_is_left_also_by_who_once_had_a_closer_replica() -> None:
    reader = Reader(rack="r", max_wait_ms=500)
    reader.core.seek(KEY, 0)
    reader.answer(reader.due(), preferred_read_replica=2)
    reader.now = 300_001
    reader.metadata.apply(cluster(), reader.now)
    reader.answer(reader.due(), batch(0, b"a"))  # by the follower, whose time is over now
    assert reader.due().node == 1
    reader.metadata.apply(cluster(leader=3, epoch=1), reader.now)
    reader.metadata.brokers[3] = Broker(3, "h", 3)
    reader.core.calls(reader.now)
    assert reader.due().node == 3


def test_the_closest_replica_is_used_until_it_fails() -> None:
    reader = Reader(rack="here")
    reader.core.seek(KEY, 0)
    reader.answer(reader.due(), preferred_read_replica=2)
    call = reader.due()
    assert call.node == 2
    reader.answer(call, code=ErrorCode.OFFSET_OUT_OF_RANGE)  # it lags
    assert reader.core.calls(reader.now) == [], "the leader may name it again, and again"
    reader.now = reader.core.deadline()
    assert reader.due().node == 1


def test_a_fetch_goes_on_at_the_leader_that_a_refusal_names() -> None:
    reader = Reader()
    reader.core.seek(KEY, 0)
    hint = CurrentLeader(2, 5)
    code = ErrorCode.NOT_LEADER_OR_FOLLOWER
    reader.answer(reader.due(), code=code, current_leader=hint)
    reader.now += 100
    assert reader.due().node == 2, "without waiting for metadata (KIP-951)"


def test_aborted_transactions_are_hidden_and_markers_never_shown() -> None:
    abort, commit = b"\x00\x00\x00\x00", b"\x00\x00\x00\x01"
    stored = (
        batch(0, b"aborted", producer_id=7),
        batch(1, b"committed", producer_id=8),
        batch(2, b"", producer_id=7, control=abort),
        batch(3, b"", producer_id=8, control=commit),
        batch(4, b"later", producer_id=7),
        batch(5, b"", producer_id=7, control=commit),
    )
    aborted = [AbortedTransaction(7, 0)]
    reader = Reader(isolation=READ_COMMITTED)
    reader.core.seek(KEY, 0)
    reader.answer(reader.due(), *stored, aborted_transactions=aborted)
    assert reader.values() == [b"committed", b"later"]
    assert reader.core.positions() == {KEY: 6}
    bulk = Reader(isolation=READ_COMMITTED)
    bulk.core.seek(KEY, 0)
    bulk.answer(bulk.due(), *stored, aborted_transactions=aborted)
    taken = bulk.core.take_batches(KEY)
    assert [(header.base_offset, bytes(batch)) for header, batch in taken] == [
        (1, stored[1]),
        (4, stored[4]),
    ]
    assert bulk.core.positions() == {KEY: 6}
    assert bulk.core.take_batches(KEY) == []
    plain = Reader()
    plain.core.seek(KEY, 0)
    plain.answer(plain.due(), *stored)
    assert plain.values() == [b"aborted", b"committed", b"later"]


def test_partitions_take_turns() -> None:
    reader = Reader(partitions=2)
    for p in range(2):
        reader.core.seek(TopicPartition("t", p), 0)
    call = reader.due()
    parts = [
        FetchPartitionResponse(p, 0, 100, records=[memoryview(batch(0, *[b"%d" % p] * 10))])
        for p in range(2)
    ]
    call.complete(FetchResponse([FetchTopicResponse("t", None, parts)]), None, 0)
    first = {value for _ in range(4) for value in reader.values(3)}
    assert first == {b"0", b"1"}


def test_a_paused_partition_keeps_its_records() -> None:
    reader = Reader()
    reader.core.seek(KEY, 0)
    reader.answer(reader.due(), batch(0, b"x"))
    reader.core.readers[KEY].is_paused = True
    assert not reader.core.has_records
    assert reader.values() == []
    reader.core.readers[KEY].is_paused = False
    assert reader.values() == [b"x"]


@pytest.mark.parametrize("in_bulk", [False, True])
def test_a_transaction_that_ended_where_a_fetch_begins_hides_nothing_behind_it(
    in_bulk: bool,
) -> None:
    """Brokers name an aborted transaction to every fetch up to its marker, the marker's too."""
    abort, commit = b"\x00\x00\x00\x00", b"\x00\x00\x00\x01"
    reader = Reader(isolation=READ_COMMITTED)
    reader.core.seek(KEY, 1)
    reader.answer(
        reader.due(),
        batch(1, b"", producer_id=7, control=abort),
        batch(2, b"kept", producer_id=7),
        batch(3, b"", producer_id=7, control=commit),
        aborted_transactions=[AbortedTransaction(7, 0)],
    )
    if in_bulk:
        assert [header.base_offset for header, _ in reader.core.take_batches(KEY)] == [2]
    else:
        assert reader.values() == [b"kept"]
    assert reader.core.positions() == {KEY: 4}


def broken(base: int) -> bytes:
    """A batch whose checksum holds and whose records do not."""
    made = bytearray(batch(base, b"x", b"y"))
    made[61] = 0x7F  # the first record's length
    made[17:21] = crc32c(bytes(made[21:])).to_bytes(4, "big")
    return bytes(made)


def test_records_taken_before_damage_are_handed_out_before_it_is_told() -> None:
    reader = Reader(partitions=2)
    for p in range(2):
        reader.core.seek(TopicPartition("t", p), 0)
    stored = [[batch(0, b"a")], [batch(0, b"b"), broken(1)]]
    parts = [
        FetchPartitionResponse(p, 0, 100, records=[memoryview(b"".join(batches))])
        for p, batches in enumerate(stored)
    ]
    reader.due().complete(FetchResponse([FetchTopicResponse("t", None, parts)]), None, 0)
    assert sorted(filter(None, reader.values())) == [b"a", b"b"]
    with pytest.raises(CorruptRecordsError) as caught:
        reader.values()
    assert (caught.value.partition, caught.value.offset, caught.value.next_offset) == (1, 1, 3)
    assert reader.core.positions() == {KEY: 1, TopicPartition("t", 1): 1}


def test_what_breaks_its_format_is_passed_by_on_request(caplog: pytest.LogCaptureFixture) -> None:
    refusing, skipping = Reader(), Reader(skips_unreadable=True)
    for reader in (refusing, skipping):
        reader.core.seek(KEY, 0)
        reader.answer(reader.due(), batch(0, b"a"), broken(1), batch(3, b"b"))
    assert refusing.values() == [b"a"]
    with pytest.raises(CorruptRecordsError, match=r"t-0 at offset 1: .* skip_unreadable=True"):
        refusing.values()
    assert skipping.values() == [b"a", b"b"]
    assert skipping.core.positions() == {KEY: 4}
    assert "at offset 1 up to 3 cannot be read" in caplog.text


def test_damage_is_told_by_the_first_record_that_was_due() -> None:
    reader = Reader()
    reader.core.seek(KEY, 2)
    reader.answer(reader.due(), broken(1))
    with pytest.raises(CorruptRecordsError, match="offset 2") as caught:
        reader.values()
    assert (caught.value.offset, caught.value.next_offset) == (2, 3)


def test_one_partition_without_an_offset_does_not_keep_the_others() -> None:
    reader = Reader(partitions=2, reset=Reset.EARLIEST)
    items = [
        Struct(partition_index=p, error_code=code, offset=42, timestamp=-1, leader_epoch=0)
        for p, code in enumerate((ErrorCode.TOPIC_AUTHORIZATION_FAILED, 0))
    ]
    reader.due().complete(Struct(topics=[Struct(name="t", partitions=items)]), None, 0)
    assert reader.core.positions() == {TopicPartition("t", 1): 42}
    with pytest.raises(BrokerError, match="TOPIC_AUTHORIZATION_FAILED"):
        reader.values()


def test_partitions_with_much_to_read_do_not_keep_the_others_from_their_turn() -> None:
    """A broker fills an answer in the order of the request, and may stop at its first partition."""
    reader = Reader(partitions=3, max_bytes=100)
    for p in range(3):
        reader.core.seek(TopicPartition("t", p), 0)
    ends = [0, 0, 0]
    for _ in range(6):
        call = reader.due()
        request = decode_fetch_request(12, memoryview(b"".join(call.body(12))))
        p = request.topics[0].partitions[0].partition
        part = FetchPartitionResponse(p, 0, 100, records=[memoryview(batch(ends[p], b"x" * 200))])
        ends[p] += 1
        call.complete(FetchResponse([FetchTopicResponse("t", None, [part])]), None, 0)
        assert reader.values() == [b"x" * 200]
    assert ends == [2, 2, 2]
