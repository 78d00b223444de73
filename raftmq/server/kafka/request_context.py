"""What one request says of itself and where it came from: built once, handed to its handler.

Everything that a handler may know of the client stands here, and nowhere on the broker, so that an
answer that is made later, or in turns, is about the request that asked for it. Frozen: what the
connection learns afterwards (another principal) is of later requests.
"""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

from raftmq.server.kafka.elections import Hold


class ClientConnection(Protocol):
    """What requests know of the connection that they came by."""

    peer: str
    """Address and port of the client."""
    hold: Hold
    principal: str | None
    """Who the client proved to be; None while nobody has to."""

    @property
    def listener_name(self) -> str:
        """The listener that accepted it."""
        ...


@frozen(slots=True, eq=False)
class RequestContext:
    """One request without its body."""

    connection: ClientConnection
    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    principal: str | None
    received_ms: float
    """Monotonic time at which it was begun; its own timeouts count from there."""

    @property
    def host(self) -> str:
        """Address of the client."""
        return self.connection.peer.rpartition(":")[0]

    @property
    def listener_name(self) -> str:
        """The listener by which it came."""
        return self.connection.listener_name

    @property
    def hold(self) -> Hold:
        """How far the answers of its connection were held up of late."""
        return self.connection.hold
