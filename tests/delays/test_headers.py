"""What the headers of a delayed record mean, and which are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.delays.headers import (
    ADDED_BYTES_MAX,
    ATTEMPT,
    CREATED,
    DELAY_MAX_MS,
    SOURCE,
    Kind,
    RetryPolicy,
    Schedule,
    delivered,
    key_digest,
    read_schedule,
)
from raftmq.errors import ErrorCode
from raftmq.records import InvalidRecordError, NewRecord, Record, encode_record

NOW = 1_700_000_000_000  # 2023-11-14T22:13:20Z


def schedule(*headers: tuple[str, bytes | None], key: bytes | None = b"k") -> Schedule:
    return read_schedule(key, headers, NOW)


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
    assert schedule((name, text), key=None) == Schedule(Kind.ADD, due_ms)


def test_without_headers_a_record_is_due_at_once() -> None:
    assert schedule(("trace", b"x"), key=None) == Schedule(Kind.ADD, NOW)


def test_what_cancels_and_what_replaces() -> None:
    assert schedule(("deliver-at", b"never")) == Schedule(Kind.CANCEL, NOW)
    both = schedule(("deliver-mode", b"replace"), ("deliver-after", b"1s"))
    assert both == Schedule(Kind.REPLACE, NOW + 1_000)
    assert schedule(("deliver-mode", b"add"), ("deliver-after", b"1s")).kind is Kind.ADD
    assert schedule(("deliver-mode", b"replace"), ("deliver-at", b"never")).kind is Kind.CANCEL


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
        schedule(*headers)
    assert caught.value.code is ErrorCode.INVALID_RECORD


@pytest.mark.parametrize("header", [("deliver-at", b"never"), ("deliver-mode", b"replace")])
def test_without_a_key_there_is_nothing_to_cancel(header: tuple[str, bytes]) -> None:
    with pytest.raises(InvalidRecordError, match="needs a key"):
        schedule(header, key=None)


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
        found = schedule(*headers)
    except InvalidRecordError:
        return
    assert NOW <= found.due_ms <= NOW + DELAY_MAX_MS


@given(st.binary(max_size=20), st.none() | st.binary(max_size=20), st.integers(0, 1 << 62))
def test_a_delivered_record_is_the_original(
    key: bytes, value: bytes | None, created_ms: int
) -> None:
    headers = (("a", b"1"), ("deliver-after", b"1s"), (CREATED, b"old"), ("a", None))
    source = f"{'t' * 249}/9999/{1 << 62}"
    for attempt in (0, 1_000):
        record = delivered(Record(7, 5, key, value, headers), created_ms, source, attempt)
        bare = NewRecord(key, value, None, [("a", b"1"), ("a", None)])
        added = len(encode_record(record, 0, 0)) - len(encode_record(bare, 0, 0))
        assert added <= ADDED_BYTES_MAX
    record = delivered(Record(7, 5, key, value, headers), created_ms, source)
    assert (record.key, record.value) == (key, value)
    assert record.headers == [
        ("a", b"1"),
        ("a", None),
        (CREATED, str(created_ms).encode()),
        (SOURCE, source.encode()),
    ]


def test_keys_are_told_apart() -> None:
    assert len({key_digest(bytes([n])) for n in range(256)}) == 256
    assert len(key_digest(b"x" * 1_000_000)) == 16


RETRY = RetryPolicy(attempts=5, min_ms=1_000, max_ms=3_000, factor_percent=150)


def retried(*headers: tuple[str, bytes], key: bytes | None = b"k") -> Schedule:
    return read_schedule(key, headers, NOW, retry=RETRY)


@pytest.mark.parametrize(
    ("attempt", "due_ms"), [(None, 1_000), (1, 1_000), (2, 1_500), (3, 2_250), (4, 3_000)]
)
def test_the_wait_grows_with_each_attempt(attempt: int | None, due_ms: int) -> None:
    told = [] if attempt is None else [(ATTEMPT, b"%d" % attempt)]
    assert retried(*told, key=None) == Schedule(Kind.ADD, NOW + due_ms, attempt or 1)


@pytest.mark.parametrize("attempt", [5, 6, 999_999])
def test_after_the_last_attempt_a_record_is_dead_at_once(attempt: int) -> None:
    told = (ATTEMPT, b"%d" % attempt)
    assert retried(told) == Schedule(Kind.ADD, NOW, attempt, is_dead=True)
    assert retried(told, ("deliver-after", b"1h")) == Schedule(Kind.ADD, NOW, attempt, is_dead=True)
    assert retried(told, ("deliver-at", b"never")).kind is Kind.CANCEL


def test_who_retries_may_ask_for_a_longer_wait_and_not_for_a_shorter_one() -> None:
    assert retried(("deliver-after", b"1h")).due_ms == NOW + 3_600_000
    assert retried(("deliver-after", b"0")).due_ms == NOW + 1_000
    assert retried(("deliver-at", b"0")).due_ms == NOW + 1_000


@pytest.mark.parametrize("text", [b"0", b"-1", b"1000000", b"two", b""])
def test_an_attempt_that_is_no_number_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRecordError, match="raftmq-attempt is one number"):
        retried((ATTEMPT, text))
    assert schedule((ATTEMPT, text)) == Schedule(Kind.ADD, NOW), "nothing is counted here"


def test_two_attempts_are_refused() -> None:
    with pytest.raises(InvalidRecordError):
        retried((ATTEMPT, b"1"), (ATTEMPT, b"2"))


@given(
    st.builds(
        RetryPolicy,
        attempts=st.just(1_000),
        min_ms=st.integers(1, 1 << 50),
        max_ms=st.integers(1, 1 << 50),
        factor_percent=st.integers(100, 100_000),
    ),
    st.integers(1, 998),
)
def test_waits_never_fall_and_have_a_limit(policy: RetryPolicy, attempt: int) -> None:
    first, second = policy.back_off_ms(attempt), policy.back_off_ms(attempt + 1)
    assert 1 <= first <= second <= policy.max_ms
    assert policy.factor_percent == 100 or second > first or second == policy.max_ms
