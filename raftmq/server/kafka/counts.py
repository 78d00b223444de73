"""Counts of the client port and of each API, plain integers; `node/metrics/` shows them if asked.

The hot path adds to integers and nothing else. Nothing here imports prometheus_client, which
`ready` does not need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raftmq.counts import Histogram
from raftmq.errors import ErrorCode
from raftmq.protocol import Struct


class ApiCounts:
    """Counts of one API.

    Attributes:
        requests: answered ones.
        failures: those that could not be answered and closed their connection.
        errors: Kafka's error codes in answers, by name; a partition's counts like a topic's.
    """

    __slots__ = ("errors", "failures", "latency", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.failures = 0
        self.errors: dict[str, int] = {}
        self.latency = Histogram()

    def observe(self, seconds: float) -> None:
        """Count one answered request."""
        self.requests += 1
        self.latency.observe(seconds)

    def error(self, code: int) -> None:
        """Count one error code of an answer."""
        name = _NAMES.get(code, "UNKNOWN")
        self.errors[name] = self.errors.get(name, 0) + 1

    def count_errors(self, answer: Struct | Mapping[str, Any]) -> None:
        """Count every error code of an answer, at any depth."""
        for items in self.count_own_errors(answer):
            for item in items:
                self.count_errors(item)

    def count_own_errors(self, answer: Struct | Mapping[str, Any]) -> list[Sequence[Any]]:
        """Count the error code of one part of an answer; gives the lists of parts in it."""
        lists: list[Sequence[Any]] = []
        fields = answer if isinstance(answer, Mapping) else answer.__dict__
        for name, value in fields.items():
            if name == "error_code":
                if value:
                    self.error(value)
            elif isinstance(value, list | tuple) and value and isinstance(value[0], _PARTS):
                lists.append(value)
        return lists


_PARTS = (Mapping, Struct)


class EncodedAnswer(bytes):
    """An answer that its handler encoded, with the error codes in it."""

    errors: tuple[int, ...] = ()


_NAMES = {int(code): code.name for code in ErrorCode}


class ServerCounts:
    """Everything that the client port counts, and the bugs of the admin port.

    Attributes:
        authentications: how often clients authenticated, by mechanism and outcome.
        admin_bugs: exceptions of ours that cost a request at the admin port, by kind.
        bugs: exceptions of ours that cost a connection, by kind.
        denials: what callers had no right to, by kind of resource and operation.
        refusals: what was refused or closed, by the bound (a config key) that was reached.
        handshakes: those of TLS that came to their end.
        handshake_failures: those that did not, by what was wrong.
    """

    __slots__ = (
        "admin_bugs",
        "apis",
        "authentications",
        "bugs",
        "bytes_in",
        "bytes_out",
        "bytes_sendfile",
        "connections",
        "connections_accepted",
        "connections_refused",
        "denials",
        "direct_sends",
        "handshake_failures",
        "handshakes",
        "parked_fetches",
        "protocol_errors",
        "read_aheads",
        "refusals",
        "writer_wakes",
    )

    def __init__(self) -> None:
        self.apis: dict[str, ApiCounts] = {}
        self.admin_bugs: dict[str, int] = {}
        self.authentications: dict[tuple[str, str], int] = {}
        self.bugs: dict[str, int] = {}
        self.denials: dict[tuple[str, str], int] = {}
        self.refusals: dict[str, int] = {}
        self.handshake_failures: dict[str, int] = {}
        self.handshakes = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.bytes_sendfile = 0
        self.connections = 0
        self.connections_accepted = 0
        self.connections_refused = 0
        self.protocol_errors = 0
        self.direct_sends = 0
        self.writer_wakes = 0
        self.read_aheads = 0
        self.parked_fetches = 0

    def api(self, name: str) -> ApiCounts:
        """The counts of one API, made at first use."""
        found = self.apis.get(name)
        if found is None:
            found = self.apis[name] = ApiCounts()
        return found

    def authentication(self, mechanism: str, outcome: str) -> None:
        """Count how an authentication ended, or a session."""
        key = mechanism, outcome
        self.authentications[key] = self.authentications.get(key, 0) + 1

    def bug(self, error: Exception) -> None:
        """Count an exception of ours that cost a connection."""
        kind = type(error).__name__
        self.bugs[kind] = self.bugs.get(kind, 0) + 1

    def admin_bug(self, error: Exception) -> None:
        """Count an exception of ours that cost a request at the admin port, or its connection."""
        kind = type(error).__name__
        self.admin_bugs[kind] = self.admin_bugs.get(kind, 0) + 1

    def fail_handshake(self, why: str) -> None:
        """Count a handshake of TLS that failed."""
        self.handshake_failures[why] = self.handshake_failures.get(why, 0) + 1

    def deny(self, kind: str, operation: str) -> None:
        """Count what a caller had no right to."""
        self.denials[kind, operation] = self.denials.get((kind, operation), 0) + 1

    def refuse(self, bound: str) -> None:
        """Count something that a bound refused."""
        self.refusals[bound] = self.refusals.get(bound, 0) + 1
