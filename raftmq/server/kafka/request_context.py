"""What is known of one request besides its body: built once, handed to its handler.

Everything that a handler may know of the client stands here, and nothing of it on the broker: so an
answer that is made later, or in turns, never mixes two requests. Frozen: what changes on the
connection afterwards (another principal) concerns later requests.
"""

from __future__ import annotations

from typing import Final, Protocol

from attrs import frozen

from raftmq.server.audit import Who
from raftmq.server.kafka.authentication import Authentication, Caller
from raftmq.server.kafka.leader_waits import Hold

ON_RDKAFKA: Final = frozenset(
    {
        "confluent-kafka-dotnet",
        "confluent-kafka-go",
        "confluent-kafka-javascript",
        "confluent-kafka-python",
        "karafka",
        "kafka-ruby",
        "zig-kafka",
        "ClickHouse",
    }
)
"""Programs on librdkafka that name themselves, and not always librdkafka."""


class ClientConnection(Protocol):
    """What requests know of the connection by which they came."""

    peer: str
    """Address and port of the client."""
    software: str
    """What the client is and its version, where it has said so (KIP-511)."""
    hold: Hold
    caller: Caller
    """Who its requests come from, at the moment."""
    authentication: Authentication | None
    """How it authenticates; None where its listener has no SASL."""


@frozen(slots=True, eq=False)
class RequestContext:
    """One request without its body."""

    connection: ClientConnection
    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    caller: Caller
    received_ms: float
    """Monotonic time at which it was begun; its timeouts count from there."""

    @property
    def is_of_rdkafka(self) -> bool:
        """True where the client says that it is librdkafka, or is known to be a program on it."""
        software = self.connection.software
        return "rdkafka" in software or software.partition(" ")[0] in ON_RDKAFKA

    @property
    def host(self) -> str:
        """Address of the client."""
        return self.caller.host

    @property
    def principal(self) -> str:
        """Whom the client is, `User:ANONYMOUS` where it did not say."""
        return self.caller.principal

    @property
    def listener_name(self) -> str:
        """The listener by which it came."""
        return self.caller.listener

    @property
    def who(self) -> Who:
        """Who sent it, for the audit."""
        return Who(self.principal, self.host, self.listener_name, self.client_id)

    @property
    def hold(self) -> Hold:
        """How long answers of its connection waited for elections lately."""
        return self.connection.hold
