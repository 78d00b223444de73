"""The open connections of the admin port: how many there may be, and which one gives way.

A port that is full of silent connections must not shut out an operator. So beyond the bound a new
one takes the place of another at which this node does nothing: one whose handshake or request is
not complete, that rests between two requests, or that does not read its answer. Of those it is the
oldest one of the address that has most, so that a flood of one address costs that address alone.
Where this node works for all of them the new one is refused.
"""

from __future__ import annotations

from typing import Any, Final

import trio
from attrs import define, field

ENDING_MAX: Final = 16
"""So many connections at most are told to end and have not ended yet, beyond the bound."""


@define(eq=False)
class OpenConnection:
    """One connection.

    Attributes:
        host: the address that it came from.
        is_busy: this node works on a request of it.
        scope: in which it is served; cancelled when it gives way.
    """

    host: str
    is_busy: bool = False
    scope: trio.CancelScope = field(factory=trio.CancelScope)

    def working(self, app: Any) -> Any:
        """The same pages; what waits for the client is no work."""

        async def serve_one(scope: Any, receive: Any, send: Any) -> None:
            async def receive_idly() -> Any:
                self.is_busy = False
                try:
                    return await receive()
                finally:
                    self.is_busy = True

            async def send_idly(message: Any) -> None:
                self.is_busy = False
                try:
                    await send(message)
                finally:
                    self.is_busy = True

            self.is_busy = True
            try:
                await app(scope, receive_idly, send_idly)
            finally:
                self.is_busy = False

        return serve_one


class OpenConnections:
    """All of a port."""

    def __init__(self, connections_max: int) -> None:
        self._connections_max = connections_max
        self._open: dict[OpenConnection, None] = {}  # the oldest first
        self._ending: set[OpenConnection] = set()
        self.gave_way = 0
        self.refused = 0

    def __len__(self) -> int:
        return len(self._open) + len(self._ending)

    @property
    def is_full(self) -> bool:
        """True while a new one takes the place of another, or is refused."""
        return len(self._open) >= self._connections_max

    def enter(self, host: str) -> OpenConnection | None:
        """A connection from there; None when there is no room for it."""
        if self.is_full and not self._make_room():
            self.refused += 1
            return None
        connection = OpenConnection(host)
        self._open[connection] = None
        return connection

    def leave(self, connection: OpenConnection) -> None:
        """It is closed."""
        self._open.pop(connection, None)
        self._ending.discard(connection)

    def _make_room(self) -> bool:
        idle = [one for one in self._open if not one.is_busy]
        if not idle or len(self._ending) >= ENDING_MAX:
            return False
        of_host: dict[str, int] = {}
        for one in self._open:
            of_host[one.host] = of_host.get(one.host, 0) + 1
        oldest = max(idle, key=lambda one: of_host[one.host])  # the first of equals
        del self._open[oldest]
        self._ending.add(oldest)
        oldest.scope.cancel()
        self.gave_way += 1
        return True
