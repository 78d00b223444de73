"""The client's errors: what happened to the work, and whether asking again may help.

Every error carries an `outcome`: FAILED means the work was certainly not done, UNKNOWN that it may
have been done or may yet be (bytes had left and no answer came). A timeout after bytes left is
never called a failure. `retriable` says that the same call may succeed later.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal, Self

from raftmq.errors import INDEFINITE, RETRIABLE, ErrorCode, RaftmqError


class Outcome(Enum):
    """What is known about a piece of work."""

    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"


class ClientError(RaftmqError):
    """Base of all that the client raises on purpose."""

    outcome: Outcome = Outcome.FAILED
    retriable: bool = False
    records: int = 1
    """How many records of a producer it stands for, in an `UndeliveredError`."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Constructors differ: copy and pickle must not call them with `args`.
        return _rebuild, (type(self), self.args, self.__dict__)

    def fresh(self) -> Self:
        """An equal error with the same cause and no traceback, to be raised.

        Several may wait for what one error ends. Each `raise` of one object would make its
        traceback longer, and keep alive what the frames of the others hold.
        """
        error = copy.copy(self)
        error.__cause__ = self.__cause__
        error.__suppress_context__ = self.__suppress_context__
        return error


def _rebuild(kind: type[ClientError], args: tuple[Any, ...], state: dict[str, Any]) -> ClientError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class BrokerError(ClientError):
    """A broker answered with an error code.

    `number` is the code as the broker sent it, `code` its name; one that this client does not know
    is UNKNOWN_SERVER_ERROR, and nothing is claimed about the outcome.
    """

    def __init__(self, code: int, message: str | None = None, *, about: str = "") -> None:
        self.code = ErrorCode(code) if code in _KNOWN else ErrorCode.UNKNOWN_SERVER_ERROR
        self.number = int(code)
        self.message = message or ""
        self.about = about
        self.retriable = self.code in RETRIABLE
        self.outcome = Outcome.UNKNOWN if self.code in INDEFINITE else Outcome.FAILED
        name = self.code.name if code in _KNOWN else f"error {code}"
        # Brokers that have nothing to add send the name once more.
        said = "" if self.message == name else self.message
        super().__init__(": ".join(part for part in (about, name, said) if part))


_KNOWN = frozenset(int(code) for code in ErrorCode)


class ConnectionFailedError(ClientError):
    """No connection: refused, unreachable, or lost before the request left."""

    retriable = True


class AuthenticationError(ConnectionFailedError):
    """The broker does not know us, or we do not know the broker. Trying again does not help."""

    retriable = False


class ConnectionLostError(ClientError):
    """The connection ended after the request had left: its outcome is unknown."""

    outcome = Outcome.UNKNOWN
    retriable = True


class TimedOutError(ClientError):
    """No outcome in time. `outcome` tells whether bytes had left."""

    retriable = True

    def __init__(self, message: str, *, sent: bool) -> None:
        self.outcome = Outcome.UNKNOWN if sent else Outcome.FAILED
        super().__init__(message)


class UnsupportedError(ClientError):
    """The broker offers no version of this API that we speak."""


class UsageError(ClientError):
    """The caller asked for something that cannot be: a closed client, a bad option."""


class RecordTooLargeError(ClientError):
    """A record does not fit into a request."""


class SerializationError(ClientError):
    """A key or value could not be turned into bytes; nothing was sent."""


class DeserializationError(ClientError):
    """A record's bytes could not be read; `seek` past it to go on."""

    def __init__(self, message: str, topic: str, partition: int, offset: int) -> None:
        self.topic = topic
        self.partition = partition
        self.offset = offset
        super().__init__(message)


class PollIntervalError(ClientError):
    """The consumer did not poll within `max_poll_interval_ms` and left its group.

    The next poll joins again; its partitions have moved meanwhile.
    """

    retriable = True


class BufferFullError(ClientError):
    """The producer's buffer stayed full for `max_block_ms`; the record was not taken."""

    retriable = True


class CorruptAnswerError(ClientError):
    """A broker sent bytes that break the protocol, or left out what it was asked.

    The request had been read, so what it asked for may have been done.
    """

    outcome = Outcome.UNKNOWN
    retriable = True


class CorruptRecordsError(CorruptAnswerError):
    """A batch whose bytes do not hold; none of it was delivered.

    `offset` is its first record that was due, `next_offset` where a `seek` gets past it, as far as
    its header can be believed.
    """

    outcome = Outcome.FAILED

    def __init__(
        self, message: str, topic: str, partition: int, offset: int, next_offset: int | None = None
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.next_offset = max(offset + 1, next_offset or 0)
        super().__init__(message)


class NoOffsetError(ClientError):
    """A position is out of range or unknown, and the reset policy is `none`."""


class TransactionError(ClientError):
    """A transaction does not go on; `advice` is what to do.

    "abort": abort it, and do its work again in a new one. "retry": call `commit` again. "close":
    this producer is over.
    """

    advice: Literal["abort", "retry", "close"] = "close"

    def __init__(self, message: str, *, outcome: Outcome = Outcome.FAILED) -> None:
        self.outcome = outcome
        super().__init__(message)


class MustAbortError(TransactionError):
    """This transaction cannot be committed: abort it, and do its work again in a new one."""

    advice = "abort"


class EndUnknownError(TransactionError):
    """No answer told that the transaction ended: call `commit` (or `abort`) again until one does.

    It may have ended meanwhile. Asking again changes nothing of that, and tells it.
    """

    advice = "retry"
    retriable = True

    def __init__(self, message: str) -> None:
        super().__init__(message, outcome=Outcome.UNKNOWN)


class FencedError(TransactionError):
    """A newer producer has this transactional id: close this one, it may write nothing more."""


class UndeliveredError(ClientError, ExceptionGroup[ClientError]):
    """A producer ended with records that were not acknowledged, and nobody had heard of it.

    One error for each partition and kind, with the number of its `records`. `failed` of them are
    certainly not in the log, `unknown` may be.
    """

    def derive(self, excs: Sequence[Any]) -> UndeliveredError:  # type: ignore[override]  # of ours
        """A part of the group, for `except*`."""
        return UndeliveredError(self.message, excs)

    @property
    def leaves(self) -> tuple[ClientError, ...]:
        """The errors, one for each partition and kind."""
        return tuple(error for error in self.exceptions if isinstance(error, ClientError))

    @property
    def failed(self) -> int:
        """Records that are certainly not in the log."""
        return self._sum(Outcome.FAILED)

    @property
    def unknown(self) -> int:
        """Records that may be in the log."""
        return self._sum(Outcome.UNKNOWN)

    @property
    def outcome(self) -> Outcome:  # type: ignore[override]  # of all of them
        """UNKNOWN if any may be in the log."""
        return Outcome.UNKNOWN if self.unknown else Outcome.FAILED

    def _sum(self, outcome: Outcome) -> int:
        return sum(error.records for error in self.leaves if error.outcome is outcome)


class ForkedError(ClientError):
    """The client was made in another process; sockets and threads do not survive a fork."""


def check_code(code: int, message: str | None = None, *, about: str = "") -> None:
    """Raise `BrokerError` unless `code` is NONE."""
    if code != ErrorCode.NONE:
        raise BrokerError(code, message, about=about)
