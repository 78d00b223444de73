"""Records that wait, are retried or are dead: what a client writes for it, and where it goes.

Delays are headers of text (docs/delays.md). A record that a group could not process goes to
`TOPIC.GROUP.retry` with the attempt that it was read for, which the broker counts up, or to
`TOPIC.GROUP.dead`; both have the error headers of Kafka 4.4, which say where it was read first. So
what is read from `TOPIC.GROUP` goes where its first reader would have sent it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from attrs import frozen

from raftmq_client.core.accumulator import Fields, Receipt, RecordMetadata
from raftmq_client.core.messages import ConsumerRecord, DecodedRecord
from raftmq_client.errors import TimedOutError, UsageError

Headers: TypeAlias = Iterable[tuple[str, bytes | None]]

ATTEMPT: Final = "raftmq-attempt"
ERRORS: Final = "__dlq.errors."
REASON_BYTES_MAX: Final = 1_024
RESEND_TIMEOUT_MS: Final = 30_000
_OURS: Final = ("deliver-", "raftmq-", ERRORS)
_MS: Final = timedelta(milliseconds=1)


def with_delay(
    headers: Headers, deliver_at: datetime | int | None, deliver_after: timedelta | float | None
) -> list[tuple[str, bytes | None]]:
    """Headers, with the one that asks for a delay.

    Raises:
        UsageError: both are given, or one makes no sense.
    """
    if deliver_at is not None and deliver_after is not None:
        raise UsageError("deliver_at and deliver_after exclude each other")
    if deliver_after is not None:
        return [*headers, ("deliver-after", b"%d" % _span_ms("deliver_after", deliver_after))]
    return [*headers, ("deliver-at", b"%d" % _time_ms(deliver_at))]


def _time_ms(at: object) -> int:
    if isinstance(at, datetime) and at.tzinfo is not None:
        ms = -((datetime(1970, 1, 1, tzinfo=UTC) - at) // _MS)  # rounded up: never early
    elif type(at) is int:
        ms = at
    else:
        raise UsageError(f"deliver_at is a datetime with a zone, or milliseconds, not {at!r}")
    if ms < 0:
        raise UsageError(f"deliver_at is before 1970: {at!r}")
    return ms


def _span_ms(name: str, span: object) -> int:
    if isinstance(span, timedelta):
        span = span / timedelta(seconds=1)
    is_number = isinstance(span, int | float) and not isinstance(span, bool)
    if not is_number or not 0 <= span < 1e12:  # type: ignore[operator]  # nor is NaN
        raise UsageError(f"{name} is a timedelta or seconds, not {span!r}")
    return round(span * 1000)  # type: ignore[operator]


@frozen
class Resent:
    """A record on its way to be tried again, or to the dead ones."""

    topic: str
    partition: int
    """Where it was read; it goes to that of the same number, modulo how many there are."""
    record: Fields


def retried(
    message: ConsumerRecord, group: str | None, reason: str, after: timedelta | float | None
) -> Resent:
    """What `retry` sends of a record.

    Raises:
        UsageError: there is no group, or `after` makes no sense.
    """
    topic, headers = _resent(message, group, reason)
    if after is not None:
        headers.append(("deliver-after", b"%d" % _span_ms("after", after)))
    return Resent(f"{topic}.retry", message.partition, (*_raw(message), None, headers))


def buried(message: ConsumerRecord, group: str | None, reason: str) -> Resent:
    """What `dead` sends of a record.

    Raises:
        UsageError: there is no group.
    """
    topic, headers = _resent(message, group, reason)
    return Resent(f"{topic}.dead", message.partition, (*_raw(message), None, headers))


def _resent(
    message: ConsumerRecord, group: str | None, reason: str
) -> tuple[str, list[tuple[str, bytes | None]]]:
    if group is None:
        raise UsageError("retries are those of a group, and this consumer has none")
    told = {
        name: text for name, text in message.headers if name == ATTEMPT or name.startswith(ERRORS)
    }
    attempt = told.get(ATTEMPT) or b"1"
    is_retried = ATTEMPT in told and message.topic.endswith(f".{group}")
    topic = message.topic if is_retried else f"{message.topic}.{group}"
    headers = [pair for pair in message.headers if not pair[0].startswith(_OURS)]
    for name, text in (
        ("topic", message.topic.encode()),
        ("partition", b"%d" % message.partition),
        ("offset", b"%d" % message.offset),
    ):
        first = told.get(f"{ERRORS}{name}") if is_retried else None
        headers.append((f"{ERRORS}{name}", first or text))
    headers.append((f"{ERRORS}group", group.encode()))
    headers.append((f"{ERRORS}delivery.count", attempt))
    if reason:
        headers.append((f"{ERRORS}message", _cut(reason)))
    headers.append((ATTEMPT, attempt))
    return topic, headers


def _cut(reason: str) -> bytes:
    data = reason.encode(errors="replace")
    return data[:REASON_BYTES_MAX].decode(errors="ignore").encode()


def _raw(message: ConsumerRecord) -> tuple[bytes | None, bytes | None]:
    """Key and value as they came."""
    if isinstance(message, DecodedRecord):
        return message.raw
    return message.key, message.value


def settled(receipt: Receipt) -> RecordMetadata:
    """Where a record is that was waited for.

    Raises:
        ClientError: it is not known to be anywhere.
    """
    if not receipt.is_done:
        raise TimedOutError("no answer in time", sent=True)
    if receipt.error is not None:
        raise receipt.error.fresh()
    assert receipt.place is not None
    return receipt.place
