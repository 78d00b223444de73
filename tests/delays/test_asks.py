"""What the headers of a delayed record mean, and which are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.delays.asks import (
    ADDED_BYTES_MAX,
    CREATED,
    DELAY_MAX_MS,
    SOURCE,
    Ask,
    Kind,
    delivered,
    key_digest,
    read_ask,
)
from raftmq.errors import ErrorCode
from raftmq.records import InvalidRecordError, NewRecord, Record, encode_record

NOW = 1_700_000_000_000  # 2023-11-14T22:13:20Z


def ask(*headers: tuple[str, bytes | None], key: bytes | None = b"k") -> Ask:
    return read_ask(key, headers, NOW)


@pytest.mark.parametrize(
    ("name", "text", "due_ms"),
    [
        ("deliver-at", b"1700000000250", NOW + 250),
        ("deliver-at", b"1600000000000", NOW),  # it is late already
        ("deliver-at", b"2023-11-14T22:13:21Z", NOW + 1_000),
        ("deliver-at", b"2023-11-14T23:13:21+01:00", NOW + 1_000),
        ("deliver-at", b"2023-11-14T22:13:20.0001Z", NOW + 1),  # never early
        ("deliver-at", b" 1700000000250 ", NOW + 250),
        ("deliver-after", b"0", NOW),
        ("deliver-after", b"2000", NOW + 2_000),
        ("deliver-after", b"250ms", NOW + 250),
        ("deliver-after", b"90s", NOW + 90_000),
        ("deliver-after", b"30m", NOW + 1_800_000),
        ("deliver-after", b"1h30m", NOW + 5_400_000),
        ("deliver-after", b"30d", NOW + DELAY_MAX_MS),
    ],
)
def test_when_a_record_is_due(name: str, text: bytes, due_ms: int) -> None:
    assert ask((name, text), key=None) == Ask(Kind.ADD, due_ms)


def test_without_headers_a_record_is_due_at_once() -> None:
    assert ask(("trace", b"x"), key=None) == Ask(Kind.ADD, NOW)


def test_what_cancels_and_what_replaces() -> None:
    assert ask(("deliver-at", b"never")) == Ask(Kind.CANCEL, NOW)
    both = ask(("deliver-mode", b"replace"), ("deliver-after", b"1s"))
    assert both == Ask(Kind.REPLACE, NOW + 1_000)
    assert ask(("deliver-mode", b"add"), ("deliver-after", b"1s")).kind is Kind.ADD
    assert ask(("deliver-mode", b"replace"), ("deliver-at", b"never")).kind is Kind.CANCEL


@pytest.mark.parametrize(
    "headers",
    [
        [("deliver-at", b"soon")],
        [("deliver-at", b"")],
        [("deliver-at", None)],
        [("deliver-at", b"-5")],
        [("deliver-at", b"2023-11-14T22:13:21")],  # which zone?
        [("deliver-at", b"2023-11-14")],
        [("deliver-at", b"0001-01-01T00:00+23:59"), ("deliver-after", b"1")],
        [("deliver-at", "１７".encode())],
        [("deliver-at", b"9" * 65)],
        [("deliver-at", b"9999-12-31T23:59-23:59")],
        [("deliver-after", b"1w")],
        [("deliver-after", b"1.5s")],
        [("deliver-after", b"never")],
        [("deliver-after", b"2592000001")],
        [("deliver-at", b"1"), ("deliver-at", b"2")],
        [("deliver-at", b"1"), ("deliver-after", b"2")],
        [("deliver-mode", b"cancel")],
        [("deliver-afer", b"1s")],
    ],
    ids=str,
)
def test_what_is_refused(headers: list[tuple[str, bytes | None]]) -> None:
    with pytest.raises(InvalidRecordError) as caught:
        ask(*headers)
    assert caught.value.code is ErrorCode.INVALID_RECORD


@pytest.mark.parametrize("header", [("deliver-at", b"never"), ("deliver-mode", b"replace")])
def test_without_a_key_there_is_nothing_to_cancel(header: tuple[str, bytes]) -> None:
    with pytest.raises(InvalidRecordError, match="needs a key"):
        ask(header, key=None)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["deliver-at", "deliver-after", "deliver-mode", "deliver-x", "x"]),
            st.none() | st.binary(max_size=70) | st.text("0123456789smhd-:TZ").map(str.encode),
        ),
        max_size=3,
    )
)
def test_any_headers_are_read_or_refused(headers: list[tuple[str, bytes | None]]) -> None:
    try:
        found = ask(*headers)
    except InvalidRecordError:
        return
    assert NOW <= found.due_ms <= NOW + DELAY_MAX_MS


@given(st.binary(max_size=20), st.none() | st.binary(max_size=20), st.integers(0, 1 << 62))
def test_a_delivered_record_is_the_original(
    key: bytes, value: bytes | None, created_ms: int
) -> None:
    headers = (("a", b"1"), ("deliver-after", b"1s"), (CREATED, b"old"), ("a", None))
    source = f"{'t' * 249}/9999/{1 << 62}"
    record = delivered(Record(7, 5, key, value, headers), created_ms, source)
    assert (record.key, record.value) == (key, value)
    assert record.headers == [
        ("a", b"1"),
        ("a", None),
        (CREATED, str(created_ms).encode()),
        (SOURCE, source.encode()),
    ]
    bare = NewRecord(key, value, None, [("a", b"1"), ("a", None)])
    added = len(encode_record(record, 0, 0)) - len(encode_record(bare, 0, 0))
    assert added <= ADDED_BYTES_MAX


def test_keys_are_told_apart() -> None:
    assert len({key_digest(bytes([n])) for n in range(256)}) == 256
    assert len(key_digest(b"x" * 1_000_000)) == 16
