"""The headers of records in delay topics: the schedule that they ask for, and what delivery leaves.

| header | |
|---|---|
| `deliver-at` | milliseconds since 1970, or RFC 3339 with its zone; `never` cancels by key |
| `deliver-after` | milliseconds, or numbers with units: `90s`, `1h30m`; from the leader's append |
| `deliver-mode` | `add` (the default), or `replace`: cancels by key, then is pending itself |

Without any of them a record is due at once; in a retry topic (`RetryPolicy`) after a back-off that
grows with `raftmq-attempt`, which says how often the record was tried: delivery counts it up, and
after the last attempt the record is *dead*, and goes at once to another topic, as does in any delay
topic that has one what is given up since no target takes it. Whatever begins with
`deliver-` and is not understood is refused: a typing error would else be delivered at once. A
cancellation needs a key; a record without a value is a record like any other.

Invariant: no record is due before its append, so that due times and append times are one order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import Enum
from hashlib import blake2b
from typing import Final, TypeAlias

from attrs import frozen

from raftmq.records import InvalidRecordError, NewRecord, Record

PREFIX: Final = "deliver-"
OWN_PREFIX: Final = "raftmq-"
AT: Final = "deliver-at"
AFTER: Final = "deliver-after"
MODE: Final = "deliver-mode"
NEVER: Final = "never"
CREATED: Final = "raftmq-created-at"
SOURCE: Final = "raftmq-delayed-at"
ATTEMPT: Final = "raftmq-attempt"
GIVEN_UP: Final = "raftmq-given-up"
NOT_DELIVERED: Final = b"it could not be delivered in time"
ATTEMPTS_MAX: Final = 1_000
"""So many may a retry topic allow: back-offs are found by counting up to there."""
VALUE_BYTES_MAX: Final = 64
DELAY_MAX_MS: Final = 30 * 86_400_000
ADDED_BYTES_MAX: Final = 512
"""What delivery adds to a record at most: its own headers, and some bytes of framing."""

Headers: TypeAlias = Sequence[tuple[str, bytes | None]]

_ONE_NUMBER: Final = re.compile(
    rb"\x02(?:\x14(deliver-at)|\x1adeliver-after)[\x02-\x1e]([0-9]{1,15})"
)
"""Stored headers (their count and lengths in zigzag) that are one number of milliseconds."""
_UNITS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_ATTEMPT: Final = re.compile(r"[1-9][0-9]{0,5}")
_NUMBER: Final = re.compile(r"[0-9]{1,15}")
_PART: Final = re.compile(r"([0-9]{1,15})(ms|s|m|h|d)")
_PARTS: Final = re.compile(r"(?:[0-9]{1,15}(?:ms|s|m|h|d))+")


class Kind(Enum):
    """What becomes of what is pending under the same key."""

    ADD = "add"
    REPLACE = "replace"
    CANCEL = "cancel"


@frozen(slots=True, kw_only=True)
class RetryPolicy:
    """How a retry topic lets records be tried again. It never changes in the life of a topic: what
    is pending is ordered by it, and a cursor may have passed what another policy would order later.

    Attributes:
        attempts: after so many in all, the first one included, a record is dead.
        factor_percent: each back-off is so much of the one before it, in whole milliseconds.
    """

    attempts: int
    min_ms: int
    max_ms: int
    factor_percent: int

    def back_off_ms(self, attempt: int) -> int:
        """The least time that a record waits which was tried `attempt` times. Computed in whole
        numbers, so that every leader finds the same."""
        assert 0 < attempt < ATTEMPTS_MAX, "others are dead"
        back_off_ms = min(self.min_ms, self.max_ms)
        for _ in range(attempt - 1 if self.factor_percent > 100 else 0):
            back_off_ms = min(self.max_ms, -(-back_off_ms * self.factor_percent // 100))
            if back_off_ms == self.max_ms:
                break
        return back_off_ms


@frozen(slots=True)
class Schedule:
    """What one record asks for.

    Attributes:
        kind: whether it is to be delivered itself, and what becomes of others of its key.
        due_ms: when it is due, never before its append.
        attempt: how often it was tried; 0 where the topic does not count.
        is_dead: it was tried too often, and goes to the topic of the dead.
    """

    kind: Kind
    due_ms: int
    attempt: int = 0
    is_dead: bool = False


def read_brief(data: bytes, position: int, end: int, appended_ms: int) -> int | None:
    """When a stored record is due whose headers are `data` from `position` to `end`, and say no
    more than a number of milliseconds; None where `read_schedule` has to look at them. Most records
    have such headers, or none."""
    if end == position + 1:
        return appended_ms
    found = _ONE_NUMBER.fullmatch(data, position, end)
    if found is None:
        return None
    is_at, number = found.groups()
    return max(appended_ms, int(number)) if is_at else appended_ms + int(number)


def read_schedule(
    key: bytes | None,
    headers: Headers,
    appended_ms: int,
    delay_max_ms: int = DELAY_MAX_MS,
    retry: RetryPolicy | None = None,
) -> Schedule:
    """The schedule of a record that is appended at `appended_ms`.

    Raises:
        InvalidRecordError: a header that is not understood, and why.
    """
    found: dict[str, str] = {}
    for name, content in headers:
        if name.startswith(PREFIX):
            if name in found:
                raise InvalidRecordError(f"{name} is there twice")
            found[name] = _text(name, content)
    schedule = Schedule(Kind.ADD, appended_ms)
    if found:
        schedule = _read_delay(key, found, appended_ms, delay_max_ms)
    if retry is None or schedule.kind is Kind.CANCEL:
        return schedule
    return _retried(schedule, read_attempt(headers), appended_ms, retry)


def _retried(schedule: Schedule, attempt: int, appended_ms: int, retry: RetryPolicy) -> Schedule:
    """The schedule in a retry topic: nothing comes back before its back-off is over."""
    if attempt >= retry.attempts:
        return Schedule(schedule.kind, appended_ms, attempt, is_dead=True)
    due_ms = max(schedule.due_ms, appended_ms + retry.back_off_ms(attempt))
    return Schedule(schedule.kind, due_ms, attempt)


def read_attempt(headers: Headers) -> int:
    """How often a record was tried before it came to a retry topic: as its header says, else once.

    Raises:
        InvalidRecordError: the header is no such number, or there are two.
    """
    told = [content for name, content in headers if name == ATTEMPT]
    if not told:
        return 1
    text = "" if len(told) > 1 else _text(ATTEMPT, told[0])
    if not _ATTEMPT.fullmatch(text):
        raise InvalidRecordError(f"{ATTEMPT} is one number, 1 to 999999")
    return int(text)


def _read_delay(
    key: bytes | None, found: dict[str, str], appended_ms: int, delay_max_ms: int
) -> Schedule:
    unknown = [name for name in found if name not in (AT, AFTER, MODE)]
    if unknown:
        raise InvalidRecordError(f"there is no header {unknown[0][:VALUE_BYTES_MAX]!r}")
    kind = _kind(found)
    if kind is not Kind.ADD and key is None:
        raise InvalidRecordError("what cancels or replaces needs a key")
    due_ms = appended_ms
    if AFTER in found:
        due_ms += read_span(found[AFTER])
    elif AT in found and kind is not Kind.CANCEL:
        due_ms = max(appended_ms, read_time(found[AT]))
    if due_ms - appended_ms > delay_max_ms:
        raise InvalidRecordError(f"due in more than raftmq.delay.max.ms {delay_max_ms}")
    return Schedule(kind, due_ms)


def _kind(found: dict[str, str]) -> Kind:
    mode = found.get(MODE, Kind.ADD.value)
    if mode not in (Kind.ADD.value, Kind.REPLACE.value):
        raise InvalidRecordError(f"{MODE} is add or replace, not {mode!r}")
    if AT in found and AFTER in found:
        raise InvalidRecordError(f"{AT} and {AFTER} in one record")
    if found.get(AT) == NEVER:
        return Kind.CANCEL
    return Kind(mode)


def _text(name: str, content: bytes | None) -> str:
    if content is None or len(content) > VALUE_BYTES_MAX or not content.isascii():
        raise InvalidRecordError(f"{name[:VALUE_BYTES_MAX]} is no short text")
    return content.decode("ascii").strip()


def read_time(text: str) -> int:
    """Milliseconds since 1970 of a `deliver-at`.

    Raises:
        InvalidRecordError: it is no such time.
    """
    if _NUMBER.fullmatch(text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRecordError(f"{AT} is no time: {text!r}") from error
    if moment.tzinfo is None or len(text) < len("2000-01-01T00:00Z"):
        raise InvalidRecordError(f"{AT} has no zone: {text!r}")
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    # Up to the next whole millisecond: never early.
    return since.days * 86_400_000 + since.seconds * 1_000 + -(-since.microseconds // 1_000)


def read_span(text: str) -> int:
    """Milliseconds of a `deliver-after`.

    Raises:
        InvalidRecordError: it is no such span.
    """
    if _NUMBER.fullmatch(text):
        return int(text)
    if not _PARTS.fullmatch(text):
        raise InvalidRecordError(f"{AFTER} is no span of time: {text!r}")
    return sum(int(number) * _UNITS[unit] for number, unit in _PART.findall(text))


def key_digest(key: bytes) -> bytes:
    """What stands for a key in memory: 16 bytes, whatever its length."""
    return blake2b(key, digest_size=16).digest()


def delivered(
    record: Record, created_ms: int, source: str, attempt: int = 0, is_given_up: bool = False
) -> NewRecord:
    """A record as it is delivered.

    Args:
        source: where it waited.
        attempt: the number of the attempt that it is delivered for, of a dead record that of the
            last one; 0 where attempts are not counted.
    """
    kept = [
        (name, content)
        for name, content in record.headers
        if not name.startswith(PREFIX) and not _is_own(name, attempt)
    ]
    kept.append((CREATED, str(created_ms).encode()))
    kept.append((SOURCE, source.encode()))
    if attempt:
        kept.append((ATTEMPT, str(attempt).encode()))
    if is_given_up:
        kept.append((GIVEN_UP, NOT_DELIVERED))
    return NewRecord(record.key, record.value, None, kept)


def _is_own(name: str, attempt: int) -> bool:
    """True for headers that delivery replaces."""
    return name in (CREATED, SOURCE, GIVEN_UP) or (attempt > 0 and name == ATTEMPT)
