"""What is written down of who came, what was refused and what was changed: one line of JSON each.

Kinds of lines: `authentication` (by SASL, by a certificate, at the admin port; what failed and what
did not), `denial` (somebody had no right to something), `administration` (a request that changes
the cluster, and what came of each part of it), `left_out` (so many lines were not written, and
why). A line says who (principal, host, listener, client id) and what, and never holds records,
passwords, tokens or values of settings that are not known to be harmless.

What strangers can cause is bounded: so many lines of a kind by a listener in ten seconds, the rest
is counted and told in a line of its own. What a node asked for others is bounded as that of the
peer port, since the node itself says by which listener they came. Changes that were made are never
left out for that. Texts of others are cut, and characters that do not print are escaped. Where no
file is kept nothing is done.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, Protocol

import msgspec
import structlog
from attrs import frozen

from raftmq.errors import ErrorCode
from raftmq.foreign import ascii_json
from raftmq.ports import Clock

TEXT_LENGTH_MAX: Final = 256
"""Of a text that others chose."""
ROWS_PER_LINE: Final = 100
UNKNOWN_CODE: Final = "UNKNOWN"
"""The code of what was not answered."""
PERIOD_MS: Final = 10_000.0
PEER_LISTENER: Final = "peer_listener"
"""The name of the port of nodes."""

_log = structlog.get_logger("raftmq.audit")


class AuditKind(StrEnum):
    """What a line is about."""

    AUTHENTICATION = "authentication"
    DENIAL = "denial"
    ADMINISTRATION = "administration"


class AuditOutcome(StrEnum):
    """What came of it; `unknown` may yet happen, `partial` is a change of which a part was made."""

    OK = "ok"
    PARTIAL = "partial"
    UNKNOWN = "unknown"
    FAILED = "failed"
    DENIED = "denied"


_UNCERTAIN: Final = frozenset(
    {
        UNKNOWN_CODE,
        ErrorCode.REQUEST_TIMED_OUT.name,
        ErrorCode.UNKNOWN_SERVER_ERROR.name,
        ErrorCode.NETWORK_EXCEPTION.name,
        ErrorCode.NOT_CONTROLLER.name,
        ErrorCode.COORDINATOR_NOT_AVAILABLE.name,
    }
)
"""After these a change may have been made, or may yet be."""


def outcome_of(codes: Set[str]) -> AuditOutcome:
    """What came of a change whose parts came to these codes, by name."""
    if codes & _UNCERTAIN:
        return AuditOutcome.UNKNOWN
    if ErrorCode.NONE.name not in codes:
        return AuditOutcome.FAILED
    return AuditOutcome.OK if len(codes) == 1 else AuditOutcome.PARTIAL


_Kind, _Outcome = AuditKind, AuditOutcome
LINES_MAX: Final = {
    (_Kind.AUTHENTICATION, _Outcome.OK): 1_000,
    (_Kind.AUTHENTICATION, _Outcome.FAILED): 50,
    (_Kind.DENIAL, _Outcome.DENIED): 50,
    (_Kind.ADMINISTRATION, _Outcome.FAILED): 50,
}
"""Most lines in ten seconds by each listener; kinds that are not named have no bound but that of
memory."""


@frozen(slots=True)
class Who:
    """Who did something.

    Attributes:
        principal: None where none was proved, or a node asks in its own name.
        listener: the name of the listener that it came by; `admin_listener` for the admin port,
            `peer_listener` for that of nodes.
    """

    principal: str | None
    host: str
    listener: str
    client_id: str | None = None


@frozen(slots=True)
class AuditRow:
    """One part of a change: what it is about, what it says, and what came of that (a code)."""

    resource: str
    detail: str
    code: str


class AuditSink(Protocol):
    """Where lines go."""

    @property
    def failure(self) -> str:
        """Why lines cannot be written at the moment; "" while they can."""
        ...

    def write(self, line: bytes) -> bool:
        """Have a line written soon; False where too many wait already."""
        ...


class Audit:
    """The audit of one node.

    Attributes:
        is_kept: lines are written.
        lines: how many were written, by kind and outcome.
        left_out: how many were not, by why: rate (of what strangers cause), memory.
    """

    def __init__(self, sink: AuditSink | None, clock: Clock, *, cluster: str, node: int) -> None:
        self.is_kept = sink is not None
        self.lines: dict[tuple[str, str], int] = {}
        # From nothing on: an alert on the increase sees the first one.
        self.left_out = {"rate": 0, "memory": 0} if self.is_kept else {}
        self._sink = sink
        self._clock = clock
        self._origin = {"cluster": cluster, "node": node}
        self._periods: dict[tuple[AuditKind, AuditOutcome, str], tuple[float, int]] = {}
        self._untold = 0  # lines for which there was no memory
        self._failure = ""

    def authentication(
        self,
        who: Who,
        mechanism: str,
        outcome: AuditOutcome,
        *,
        why: str | None = None,
        is_again: bool = False,
    ) -> None:
        """Somebody proved who it is, or failed to."""
        said = {"mechanism": mechanism, "again": is_again, "why": why}
        self._tell(AuditKind.AUTHENTICATION, outcome, who, said)

    def denial(
        self,
        who: Who,
        request: str,
        operation: str,
        resource: str,
        *,
        by_node: int | None = None,
        why: str | None = None,
    ) -> None:
        """Somebody had no right to something.

        Args:
            by_node: the node that asked, in its own name or for `who`, as that node says; None:
                `who` asked this node.
        """
        said = {"request": request, "operation": operation, "resource": resource}
        more = {"by_node": by_node, "why": why}
        bound = who.listener if by_node is None else PEER_LISTENER
        self._tell(AuditKind.DENIAL, AuditOutcome.DENIED, who, said | more, bound=bound)

    def administration(
        self,
        who: Who,
        request: str,
        outcome: AuditOutcome,
        rows: Sequence[AuditRow],
        *,
        part: tuple[int, int] = (1, 1),
        is_dry_run: bool = False,
        why: str | None = None,
    ) -> None:
        """Somebody asked for a change.

        Args:
            rows: at most `ROWS_PER_LINE`; a request with more is told in several lines.
            part: the number of this line among those of the request, from 1, and how many they are.
        """
        said: dict[str, Any] = {"request": request}
        if part != (1, 1):
            said["part"], said["parts"] = part
        if is_dry_run:
            said["dry_run"] = True
        said["why"] = why
        said["changes"] = [
            {"resource": _cut(row.resource), "detail": _cut(row.detail), "code": row.code}
            for row in rows
        ]
        self._tell(AuditKind.ADMINISTRATION, outcome, who, said)

    def tick(self) -> None:
        """Tell what was left out, and whether lines can be written; about once a second."""
        if self._sink is None:
            return
        now_ms = self._clock.monotonic_ms()
        for key, (start_ms, count) in list(self._periods.items()):
            if now_ms - start_ms >= PERIOD_MS:
                del self._periods[key]
                self._tell_left_out(key, count)
        if self._untold:
            count = self._untold
            if self._put({"kind": "left_out", "reason": "memory", "count": count}):
                self._untold -= count
                _log.warning("lines of the audit file were left out: no memory", count=count)
        self._look_at_sink(self._sink)

    def _look_at_sink(self, sink: AuditSink) -> None:
        before, self._failure = self._failure, sink.failure
        if self._failure and not before:
            _log.error("the audit file cannot be written", why=self._failure)
        elif before and not self._failure:
            _log.info("the audit file is written again")

    # ---- lines ----

    def _tell(
        self,
        kind: AuditKind,
        outcome: AuditOutcome,
        who: Who,
        said: dict[str, Any],
        *,
        bound: str | None = None,
    ) -> None:
        """Write a line; `bound` names the listener whose share it takes, None: that of `who`."""
        if self._sink is None or not self._has_room(kind, outcome, bound or who.listener):
            return
        line = {
            "kind": kind,
            "outcome": outcome,
            "principal": who.principal,
            "host": who.host,
            "listener": who.listener,
            "client_id": who.client_id,
            **said,
        }
        if self._put({key: _cut(value) for key, value in line.items() if value is not None}):
            key = str(kind), str(outcome)
            self.lines[key] = self.lines.get(key, 0) + 1
        else:
            self._untold += 1
            self._count_left_out("memory", 1)

    def _has_room(self, kind: AuditKind, outcome: AuditOutcome, listener: str) -> bool:
        lines_max = LINES_MAX.get((kind, outcome))
        if lines_max is None:
            return True
        now_ms = self._clock.monotonic_ms()
        key = kind, outcome, listener
        start_ms, count = self._periods.get(key, (now_ms, 0))
        if now_ms - start_ms >= PERIOD_MS:
            self._tell_left_out(key, count)
            start_ms, count = now_ms, 0
        self._periods[key] = start_ms, count + 1
        if count < lines_max:
            return True
        self._count_left_out("rate", 1)
        return False

    def _tell_left_out(self, key: tuple[AuditKind, AuditOutcome, str], count: int) -> None:
        kind, outcome, listener = key
        left = count - LINES_MAX[kind, outcome]
        if left <= 0:
            return
        of = {"of": kind, "outcome": outcome, "listener": listener}
        if not self._put({"kind": "left_out", **of, "reason": "rate", "count": left}):
            self._untold += 1
            self._count_left_out("memory", 1)

    def _count_left_out(self, why: str, count: int) -> None:
        self.left_out[why] += count

    def _put(self, said: dict[str, Any]) -> bool:
        assert self._sink is not None, "there are lines only where they are kept"
        at = datetime.fromtimestamp(self._clock.wall_ms() / 1e3, UTC)
        line = {"at": at.isoformat(timespec="milliseconds"), **self._origin, **said}
        return self._sink.write(_encoded(line) + b"\n")


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > TEXT_LENGTH_MAX:
        return f"{value[:TEXT_LENGTH_MAX]}... ({len(value)} characters)"
    return value


def _encoded(line: dict[str, Any]) -> bytes:
    try:
        return ascii_json(msgspec.json.encode(line)).encode()
    except UnicodeEncodeError:  # a lone surrogate, in a text that others chose
        return json.dumps(line).replace("\x7f", "\\u007f").encode()
