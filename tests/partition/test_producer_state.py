"""Idempotent producers: Kafka's rules as a table, and properties over random histories."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.errors import ErrorCode, KafkaError
from raftmq.partition.producer_state import (
    ACCEPT,
    BATCHES_REMEMBERED,
    PRODUCERS_KEPT,
    Duplicate,
    EndedTransactionError,
    ProducerStateError,
    ProducerStateTable,
    at_once,
    check_beginning,
    check_encoded,
)
from raftmq.records import SEQUENCE_MODULUS, BatchHeader
from raftmq.types import Offset

LAST = SEQUENCE_MODULUS - 1


@pytest.fixture(autouse=True, scope="module")
def expire_all() -> Iterator[None]:
    """Let every producer expire: those who wrote last are kept otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raftmq.partition.producer_state.PRODUCERS_KEPT", 0)
        yield


def header(
    sequence: int,
    count: int = 1,
    *,
    pid: int = 1,
    epoch: int = 0,
    offset: int = 0,
    time: int = 0,
    attributes: int = 0,
) -> BatchHeader:
    return BatchHeader(
        offset, 100, 0, 2, 0, attributes, count - 1, time, time, pid, epoch, sequence, count
    )


def add(table: ProducerStateTable, batch: BatchHeader) -> int:
    """Append at the table's end; returns the base offset."""
    base = int(table.next_offset)
    placed = batch._replace(base_offset=base)
    if placed.is_control:
        table.end(placed)
    else:
        table.append(placed)
    return base


def code_of(table: ProducerStateTable, batch: BatchHeader) -> ErrorCode:
    before = table.encode()
    with pytest.raises(KafkaError) as caught:
        table.check(batch)
    assert table.encode() == before, "check changes nothing"
    return caught.value.code


def with_batches(*batches: BatchHeader) -> ProducerStateTable:
    table = ProducerStateTable()
    for batch in batches:
        add(table, batch)
    return table


OUT_OF_ORDER = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
FENCED = ErrorCode.INVALID_PRODUCER_EPOCH

CASES = [
    # history, next batch, what is said
    pytest.param([], header(0), None, id="first batch"),
    pytest.param([], header(3), None, id="unknown producer above 0"),
    pytest.param([], header(-1, pid=-1, epoch=-1), None, id="no producer id"),
    pytest.param([], header(0, epoch=-1), FENCED, id="producer id without epoch"),
    pytest.param([header(0, 5)], header(5), None, id="next in sequence"),
    pytest.param([header(0, 5)], header(6), OUT_OF_ORDER, id="gap"),
    pytest.param([header(0, 5)], header(4), OUT_OF_ORDER, id="overlap"),
    pytest.param([header(0, 5)], header(0, 4), OUT_OF_ORDER, id="same start, other length"),
    pytest.param([header(0, 5)], header(0, epoch=1), None, id="new epoch at 0"),
    pytest.param([header(0, 5)], header(5, epoch=1), OUT_OF_ORDER, id="new epoch above 0"),
    pytest.param([header(0, epoch=3)], header(1, epoch=2), FENCED, id="older epoch"),
    pytest.param([header(0, epoch=3)], header(0, epoch=2), FENCED, id="older epoch at 0"),
    pytest.param([header(LAST)], header(0), None, id="wraps after 2^31-1"),
    pytest.param([header(LAST - 1, 4)], header(2), None, id="wraps inside a batch"),
    pytest.param([header(LAST)], header(1), OUT_OF_ORDER, id="gap over the wrap"),
    pytest.param([header(0)], header(0, pid=2), None, id="another producer"),
    pytest.param([header(0), header(0, epoch=1)], header(1), FENCED, id="fenced by a bump"),
]


@pytest.mark.parametrize(("history", "batch", "code"), CASES)
def test_rules(history: list[BatchHeader], batch: BatchHeader, code: ErrorCode | None) -> None:
    table = with_batches(*history)
    if code is None:
        assert table.check(batch) is ACCEPT
    else:
        assert code_of(table, batch) is code


def test_duplicates_name_their_first_copy() -> None:
    table = ProducerStateTable()
    offsets = [add(table, header(i * 3, 3, time=100 + i)) for i in range(8)]
    for i in range(8 - BATCHES_REMEMBERED, 8):
        verdict = table.check(header(i * 3, 3))
        assert verdict == Duplicate(offsets[i], offsets[i] + 3, 100 + i)
    # Beyond the last five it is merely out of order.
    assert code_of(table, header(0, 3)) is OUT_OF_ORDER


def test_a_new_epoch_forgets_the_duplicates_of_the_old_one() -> None:
    table = with_batches(header(0, 2), header(0, 2, epoch=1))
    verdict = table.check(header(0, 2, epoch=1))
    assert isinstance(verdict, Duplicate)
    assert verdict.base_offset == 2
    assert code_of(table, header(2, epoch=0)) is FENCED


def test_a_duplicate_across_the_wrap() -> None:
    table = with_batches(header(LAST - 1, 4))
    assert isinstance(table.check(header(LAST - 1, 4)), Duplicate)


# ---- expiry ----


def test_a_clock_that_is_ahead_expires_nobody_who_just_wrote() -> None:
    table = ProducerStateTable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raftmq.partition.producer_state.PRODUCERS_KEPT", PRODUCERS_KEPT)
        add(table, header(0, time=1_000_000))
        add(table, header(0, pid=2, time=1_000_000 + 15 * 86_400_000))
    assert isinstance(table.check(header(0)), Duplicate), "its first answer may be lost"


def test_idle_producers_expire_by_the_logs_own_time() -> None:
    table = ProducerStateTable(expiration_ms=1000)
    add(table, header(0, time=5000))
    add(table, header(0, pid=2, time=5500))
    add(table, header(-1, pid=-1, epoch=-1, time=5999))
    assert len(table) == 2
    add(table, header(-1, pid=-1, epoch=-1, time=6000))
    assert table.get(1) is None
    assert table.get(2) is not None
    # Forgotten: it goes on, under its epoch or a new one.
    assert table.check(header(1)) is ACCEPT
    assert table.check(header(0, epoch=1)) is ACCEPT


def test_old_create_times_do_not_expire_an_active_producer() -> None:
    table = ProducerStateTable(expiration_ms=1000)
    add(table, header(-1, pid=-1, epoch=-1, time=1_000_000))
    add(table, header(0, time=5))  # a back-fill of records from long ago
    add(table, header(-1, pid=-1, epoch=-1, time=1_000_500))
    assert table.check(header(1, time=6)) is ACCEPT


def test_an_open_transaction_keeps_its_producer() -> None:
    table = ProducerStateTable(expiration_ms=1000)
    add(table, header(0, time=1, attributes=0x10))
    add(table, header(-1, pid=-1, epoch=-1, time=1_000_000))
    assert table.get(1) is not None
    assert table.first_open_offset == 0
    assert table.oldest_open is not None
    assert table.oldest_open[1].open_since == 0
    add(table, header(-1, 1, time=1_000_000, attributes=0x30))
    assert table.first_open_offset is None
    assert table.oldest_open is None
    add(table, header(-1, pid=-1, epoch=-1, time=3_000_000))
    assert table.get(1) is None


def test_the_number_of_producers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftmq.partition.producer_state.PRODUCERS_MAX", 10)
    table = with_batches(*(header(0, pid=i) for i in range(25)))
    assert len(table) == 10
    assert table.get(3) is None
    assert table.check(header(1, pid=24)) is ACCEPT
    opened = with_batches(*(header(0, pid=i, attributes=0x10) for i in range(25)))
    assert len(opened) == 25, "an open transaction keeps its producer, whatever their number"
    for _ in range(11):
        add(opened, header(-1, pid=int(opened.first_open_offset or 0), attributes=0x30))
    assert len(opened) == 14 + 10


# ---- transactions ----


def test_the_oldest_open_transaction_is_known_at_once() -> None:
    table = with_batches(*(header(0, pid=i, attributes=0x10) for i in range(5)))
    add(table, header(1, pid=0, attributes=0x10))  # goes on, and stays the oldest
    for pid in range(5):
        assert table.first_open_offset == pid
        add(table, header(-1, pid=pid, attributes=0x30))
    assert table.first_open_offset is None


def test_the_last_stable_offset_passes_only_committed_markers() -> None:
    table = with_batches(
        header(0, pid=1, attributes=0x10),  # 0
        header(0, pid=2, attributes=0x10),  # 1
        header(-1, pid=1, attributes=0x30),  # 2
        header(-1, pid=2, attributes=0x30),  # 3
        header(-1, pid=-1),  # 4
    )
    assert [table.last_stable_offset(Offset(end)) for end in range(6)] == [0, 0, 0, 1, 4, 5]


def test_whoever_reads_less_later_is_told_the_same() -> None:
    """A leader that is deposed goes by what it has flushed itself, which may be less."""
    table = with_batches(
        header(0, pid=1, attributes=0x10),  # 0
        header(-1, pid=1, attributes=0x30),  # 1
    )
    assert [table.last_stable_offset(Offset(end)) for end in (2, 1)] == [2, 0]


def test_a_later_end_of_an_earlier_transaction_holds_back() -> None:
    table = with_batches(
        header(0, pid=1, attributes=0x10),  # 0
        header(0, pid=2, attributes=0x10),  # 1
        header(-1, pid=2, attributes=0x30),  # 2
        header(-1, pid=1, attributes=0x30),  # 3
    )
    assert [table.last_stable_offset(Offset(end)) for end in range(5)] == [0, 0, 0, 0, 4]


def test_what_ended_is_forgotten_once_it_is_committed() -> None:
    table = ProducerStateTable()
    for pid in range(100):
        add(table, header(0, pid=pid, attributes=0x10))
        add(table, header(-1, pid=pid, attributes=0x30))
    table.settle(Offset(150))
    assert len(table._ended) == 25
    table.settle(Offset(200))
    assert not table._ended


def test_ends_of_nothing_hold_nothing_back() -> None:
    table = with_batches(header(0), header(-1, pid=1, attributes=0x30))
    assert table.last_stable_offset(Offset(1)) == 1
    assert table.end(header(-1, pid=-1, offset=2, attributes=0x30)) == -1, "of nobody"


def test_records_outside_of_an_open_transaction_are_refused() -> None:
    table = with_batches(header(0, attributes=0x10))
    assert code_of(table, header(1)) is ErrorCode.INVALID_TXN_STATE
    assert code_of(table, header(0, epoch=1)) is ErrorCode.INVALID_TXN_STATE
    assert table.check(header(1, attributes=0x10)) is ACCEPT
    assert isinstance(table.check(header(0)), Duplicate)
    add(table, header(-1, attributes=0x30))
    assert table.check(header(1)) is ACCEPT


def test_markers_end_transactions_and_keep_the_sequence() -> None:
    table = with_batches(header(0, 2, attributes=0x10), header(2, 2, attributes=0x10))
    assert table.first_open_offset == 0
    add(table, header(-1, 1, attributes=0x30))
    assert table.first_open_offset is None
    assert table.check(header(4)) is ACCEPT
    assert table.last_stable_offset(table.next_offset) == table.next_offset


def test_a_sequence_of_an_ended_transaction_is_not_taken_for_its_batch() -> None:
    """It would be acknowledged as one that is there, and its records were nowhere."""
    table = with_batches(header(0, 2, attributes=0x10))
    assert isinstance(table.check(header(0, 2, attributes=0x10)), Duplicate), "sent again"
    add(table, header(-1, 1, attributes=0x30))
    with pytest.raises(EndedTransactionError) as refused:
        table.check(header(0, 2, attributes=0x10))
    assert refused.value.code is OUT_OF_ORDER
    add(table, header(2, 2, attributes=0x10))
    assert code_of(table, header(0, 2, attributes=0x10)) is OUT_OF_ORDER
    assert isinstance(table.check(header(2, 2, attributes=0x10)), Duplicate)


def test_a_marker_of_a_higher_epoch_starts_the_sequence_anew() -> None:
    table = with_batches(header(0, 2, attributes=0x10))
    add(table, header(-1, 1, epoch=1, attributes=0x30))
    assert table.check(header(0, epoch=1)) is ACCEPT
    assert code_of(table, header(2, epoch=1)) is OUT_OF_ORDER
    assert code_of(table, header(2, epoch=0)) is FENCED


# ---- bytes ----


def test_round_trip_and_damage() -> None:
    table = with_batches(header(0, 3, time=9), header(0, pid=9, epoch=4), header(3, 2, time=12))
    encoded = table.encode()
    again = ProducerStateTable.decode(memoryview(encoded))
    assert again == table
    assert again.encode() == encoded
    assert table.copy() == table == at_once(table.copying())
    for position in range(len(encoded)):
        damaged = bytearray(encoded)
        damaged[position] ^= 0x10
        with pytest.raises(ProducerStateError):
            ProducerStateTable.decode(damaged)
    for size in range(1, len(encoded)):
        with pytest.raises(ProducerStateError):
            ProducerStateTable.decode(encoded[:size])
    assert ProducerStateTable.decode(b"") == ProducerStateTable()


def with_open() -> ProducerStateTable:
    return with_batches(
        header(0, pid=1, attributes=0x10),
        header(0, pid=2),
        header(0, pid=3, attributes=0x10),
        header(0, pid=4, attributes=0x10),
        header(-1, pid=1, epoch=1, attributes=0x30),
        header(1, pid=3, attributes=0x10),
        header(0, pid=2, epoch=2, attributes=0x10),
    )


def _written(*producer_ids: int, batches: int = 1) -> ProducerStateTable:
    table = ProducerStateTable(Offset(40))
    for producer_id in producer_ids:
        for sequence in range(batches):
            add(table, header(sequence, pid=producer_id, time=90 - producer_id))
    return table


def test_the_next_log_of_a_number_begins_with_the_last_ones_that_wrote() -> None:
    table = _written(1, 2, 3, 4, batches=2)
    add(table, header(2, pid=2, time=5))  # last of all, by the log's order and not by its time
    bytes_max = len(ProducerStateTable.newest(_written(1, 2, batches=3), 1 << 15))
    kept = ProducerStateTable.decode(table.newest(bytes_max))
    assert [producer_id for producer_id, _ in kept.producers()] == [2, 4]
    assert kept.get(2) == table.get(2)
    assert (kept.next_offset, kept.greatest_timestamp) == (49, table.greatest_timestamp)
    assert ProducerStateTable.decode(table.newest(1 << 15)) == table
    assert table.newest(60) == b"", "no room for any"
    assert ProducerStateTable(Offset(40)).newest(1 << 15) == b"", "nothing is known"


def test_the_next_log_of_a_number_has_nothing_open() -> None:
    table = _written(1)
    add(table, header(0, pid=7, attributes=0x10))
    kept = ProducerStateTable.decode(table.newest(1 << 15))
    assert [producer_id for producer_id, _ in kept.producers()] == [1]
    check_beginning(table.newest(1 << 15), table.next_offset)


def test_what_no_log_can_begin_with_is_refused() -> None:
    data = _written(1, 2).newest(1 << 15)
    check_beginning(data, Offset(42))
    check_beginning(b"", Offset(42))
    for told, begins_at in ((data, 41), (data, 43), (data[:-1], 42), (b"whatever", 42)):
        with pytest.raises(ProducerStateError):
            check_beginning(told, Offset(begins_at))
    table = _written(1)
    add(table, header(0, pid=7, attributes=0x10))
    with pytest.raises(ProducerStateError, match="open transactions"):
        check_beginning(table.encode(), table.next_offset)


@pytest.mark.parametrize("version", [1, 2])
def test_open_transactions_survive_both_formats(version: int) -> None:
    table = with_open()
    encoded = table.encode(version)
    assert int.from_bytes(encoded[4:6], "big") == version
    check_encoded(encoded)
    again = ProducerStateTable.decode(encoded)
    assert again == table
    assert again.first_open_offset == 2
    assert list(again._open) == [3, 4, 2]
    assert again.copy() == at_once(again.copying()) == table


def spoilt(encoded: bytes, position: int, value: int) -> bytes:
    body = bytearray(encoded[:-4])
    body[position : position + 8] = value.to_bytes(8, "big", signed=True)
    return bytes(body + crc32c(body).to_bytes(4, "big"))


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (26, -2),  # so many open ones
        (26, 5),
        (26, 2),
        (26, 4),
        (-32, 0),  # where the last one begins: before the one before it
        (-32, 99),  # beyond the end
        (-32, -1),
    ],
)
def test_open_transactions_that_cannot_be_are_refused(position: int, value: int) -> None:
    encoded = with_open().encode(2)
    at = position if position > 0 else len(encoded) - 4 - 24 - 8
    with pytest.raises(ProducerStateError):
        check_encoded(spoilt(encoded, at, value))


def test_a_newer_format_is_refused_by_name() -> None:
    body = bytearray(ProducerStateTable().encode()[:-4])
    body[5] = 9
    with pytest.raises(ProducerStateError, match="format 9"):
        ProducerStateTable.decode(body + crc32c(body).to_bytes(4, "big"))


# ---- properties ----

steps = st.lists(
    st.tuples(
        st.integers(1, 3),  # producer
        st.sampled_from(["next", "next", "next", "repeat", "gap", "bump", "anonymous"]),
        st.integers(1, 4),  # records
        st.integers(0, 400),  # time passes
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(steps, st.integers(0, 60))
def test_accepted_batches_are_each_producers_sequence_once(
    moves: list[tuple[int, str, int, int]], cut: int
) -> None:
    """Against a model: no gap, no second copy; replay and decode at any point end the same."""
    table = ProducerStateTable(expiration_ms=100_000_000)
    log: list[BatchHeader] = []
    model: dict[int, tuple[int, int]] = {}  # producer -> epoch, next sequence
    sent: dict[int, list[BatchHeader]] = {}
    now = 0
    for pid, move, count, passed in moves:
        now += passed
        epoch, sequence = model.get(pid, (0, 0))
        if move == "anonymous":
            batch = header(-1, count, pid=-1, epoch=-1, time=now)
        elif move == "repeat" and sent.get(pid):
            batch = sent[pid][-1]
        elif move == "gap" and pid in model:  # else it may start anywhere
            batch = header(sequence + 1, count, pid=pid, epoch=epoch, time=now)
        elif move == "bump":
            epoch, sequence = epoch + 1, 0
            batch = header(0, count, pid=pid, epoch=epoch, time=now)
        else:
            batch = header(sequence, count, pid=pid, epoch=epoch, time=now)
        try:
            verdict = table.check(batch)
        except KafkaError:
            assert move == "gap"
            continue
        if isinstance(verdict, Duplicate):
            assert move == "repeat"
            first = log[[h.base_offset for h in log].index(verdict.base_offset)]
            assert first.base_sequence == batch.base_sequence
            continue
        batch = batch._replace(base_offset=int(table.next_offset))
        table.append(batch)
        log.append(batch)
        if pid == batch.producer_id:
            model[pid] = (epoch, sequence + count)
            sent.setdefault(pid, []).append(batch)
    replayed = ProducerStateTable(expiration_ms=100_000_000)
    for index, entry in enumerate(log):
        if index == cut:  # a truncation, a restart: state at an offset, then the rest
            replayed = ProducerStateTable.decode(replayed.encode(), expiration_ms=100_000_000)
        replayed.append(entry)
    assert replayed.encode() == table.encode()


@given(steps)
def test_expiry_depends_on_the_log_alone(moves: list[tuple[int, str, int, int]]) -> None:
    """Two replicas that read the same log, one with a snapshot in between, forget the same."""
    one = ProducerStateTable(expiration_ms=500)
    two = ProducerStateTable(expiration_ms=500)
    now = 0
    for pid, _move, count, passed in moves:
        now += passed
        batch = header(0, count, pid=pid, time=now, offset=int(one.next_offset))
        one.append(batch)
        two.append(batch)
        two = ProducerStateTable.decode(two.encode(), expiration_ms=500)
        assert one.encode() == two.encode()
        assert [p for p, _ in one.producers()] == sorted(p for p, _ in one.producers())
