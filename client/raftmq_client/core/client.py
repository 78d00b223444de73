"""Routes calls to brokers over connections that it opens, reuses and gives up. No socket.

Owns the links (one per broker, and one per bootstrap address until metadata is known), reconnect
back-off and call deadlines. The driver opens what `take_connects()` names, moves bytes, and reports
back. Cores (producer, fetcher, group) are asked for calls in `step()`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final, Protocol

from attrs import define, field

from raftmq.protocol import ApiKey
from raftmq_client.core.call import ANY_NODE, Call
from raftmq_client.core.connection import ConnectionCore
from raftmq_client.core.metadata import MetadataCore, MetadataOptions
from raftmq_client.core.security import Security
from raftmq_client.errors import (
    AuthenticationError,
    ClientError,
    ConnectionFailedError,
    TimedOutError,
)

LOG: Final = logging.getLogger("raftmq_client.connection")

COORDINATOR_LINKS: Final = 1 << 40
"""Added to a node's id: a second connection for its duties as coordinator. A parked JoinGroup
would hold up every Fetch behind it, since a connection is answered in order."""


def coordinator_link(node: int) -> int:
    """The link for group requests to a node."""
    return node + COORDINATOR_LINKS


_STAGGER_MS: Final = 250.0
"""A broker that accepts but does not speak (frozen, perhaps) does not keep us from the next."""


BASIC_APIS: Final = (ApiKey.API_VERSIONS, ApiKey.METADATA)


class Core(Protocol):
    """Deciding code that wants requests sent."""

    def calls(self, now: float) -> Iterable[Call]:
        """The requests that are due now."""
        ...

    def deadline(self) -> float:
        """When `calls` should be asked again even if nothing happens."""
        ...


@define
class ClientOptions:
    """What all clients have in common."""

    bootstrap: tuple[tuple[str, int], ...] = (("127.0.0.1", 9092),)
    client_id: str = "raftmq"
    security: Security | None = None
    request_timeout_ms: float = 30_000
    connect_timeout_ms: float = 3_000
    reconnect_backoff_ms: float = 50
    reconnect_backoff_max_ms: float = 1_000
    metadata: MetadataOptions = field(factory=MetadataOptions)


@define(eq=False)
class Link:
    """A broker's address and the connection to it, if any."""

    node_id: int
    host: str
    port: int
    connection: ConnectionCore | None = None
    is_open: bool = False
    opened_at: float = 0.0
    connect_deadline: float = float("inf")
    not_before: float = 0.0
    failures: int = 0
    waiting: list[Call] = field(factory=list)
    """Calls for this node, kept until a connection stands or fails."""

    @property
    def in_flight(self) -> int:
        """Calls that wait on this link."""
        return len(self.waiting) + (self.connection.in_flight if self.connection else 0)


class ClientCore:
    """All links of one client, its metadata, and the cores it serves."""

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self.metadata = MetadataCore(options.metadata)
        self.cores: list[Core] = [self.metadata]
        self.apis: tuple[ApiKey, ...] = BASIC_APIS
        """What it will ask, for drivers that prepare for it."""
        self.is_closing = False
        """Set by drivers: what is lost from now on is nobody's fault."""
        self._links: dict[int, Link] = {}
        # Bootstrap addresses have ids below -1, as no broker has.
        for number, (host, port) in enumerate(options.bootstrap):
            self._links[-2 - number] = Link(-2 - number, host, port)
        self._anywhere: list[Call] = []
        self._connects: list[Link] = []
        self._last_failure = ""
        self._features: tuple[int, dict[str, int]] = (-1, {})  # epoch, levels

    @property
    def links(self) -> list[Link]:
        """All links, for the driver to look for bytes to write."""
        return list(self._links.values())

    def submit(self, call: Call, now: float) -> None:
        """Take a call; its deadline starts now."""
        call.deadline = now + call.timeout_ms
        if call.node == ANY_NODE:
            self._anywhere.append(call)
            return
        link = self._links.get(call.node)
        if link is None or not self._address_is_current(link):
            link = self._open_link(call.node)
        if link is None:
            error = ConnectionFailedError(f"broker {call.node} is not in the metadata")
            call.complete(None, error, now)
            return
        if link.connection is not None and link.is_open:
            link.connection.submit(call, now)
        else:
            link.waiting.append(call)

    def step(self, now: float) -> None:
        """Collect due calls, route them, and give up what is overdue."""
        for core in self.cores:
            for call in core.calls(now):
                self.submit(call, now)
        self._route_anywhere(now)
        for link in self._links.values():
            self._maintain(link, now)

    def take_connects(self) -> list[Link]:
        """Links to open, each reported back by `connected` or `failed`."""
        connects, self._connects = self._connects, []
        return connects

    def connected(self, link: Link, now: float) -> None:
        """The driver's socket stands."""
        assert link.connection is not None
        LOG.debug("connected to %s:%d (node %d)", ascii(link.host), link.port, link.node_id)
        link.is_open = True
        link.connect_deadline = float("inf")
        link.connection.start(now)
        waiting, link.waiting = link.waiting, []
        for call in waiting:
            link.connection.submit(call, now)

    def failed(self, link: Link, reason: str, now: float) -> None:
        """The driver's socket is gone, or never came to be."""
        cause = link.connection.error if link.connection is not None else None
        connection, link.connection = link.connection, None
        link.is_open = False
        link.connect_deadline = float("inf")
        backoff = self.options.reconnect_backoff_ms * 2 ** min(link.failures, 10)
        link.not_before = now + min(backoff, self.options.reconnect_backoff_max_ms)
        link.failures += 1
        self._last_failure = reason
        self._log_failure(link, reason, connection, cause)
        # One that was not tried yet, or stands, may answer still.
        if all(other.failures and not _is_ready(other) for other in self._links.values()):
            if not self.metadata.unreachable and not self.is_closing:
                LOG.warning("no broker can be reached: %s", ascii(self._why_nobody()))
            self.metadata.unreachable = f"no broker answered: {self._why_nobody()}"
        self.metadata.invalidate()
        if connection is not None:
            connection.fail(reason, now)
        waiting, link.waiting = link.waiting, []
        where = f"{link.host}:{link.port}"
        for call in waiting:
            call.complete(None, ConnectionFailedError(f"no connection to {where}: {reason}"), now)
        if isinstance(cause, AuthenticationError):
            # No broker will answer: whoever waits shall hear why, and not at his deadline.
            anywhere, self._anywhere = self._anywhere, []
            for call in anywhere:
                call.complete(None, cause, now)

    def _log_failure(
        self,
        link: Link,
        reason: str,
        connection: ConnectionCore | None,
        cause: ClientError | None,
    ) -> None:
        """Once for each change: what fails again and again is for those who debug."""
        level = logging.INFO if link.failures == 1 else logging.DEBUG
        if isinstance(cause, AuthenticationError) and link.failures == 1:
            level = logging.ERROR
        if self.is_closing:
            level = logging.DEBUG
        was_ready = connection is not None and connection.versions is not None
        what = "lost the connection to" if was_ready else "no connection to"
        where = f"{link.host!a}:{link.port}"
        LOG.log(level, "%s %s (node %d): %s", what, where, link.node_id, ascii(reason))

    def feature_level(self, name: str) -> int:
        """The level of one of the cluster's features, by the newest word of any broker; 0: none."""
        for link in self._links.values():
            connection = link.connection
            if connection is not None and connection.features_epoch > self._features[0]:
                self._features = connection.features_epoch, connection.features
        return self._features[1].get(name, 0)

    def backoff_until(self, node: int) -> float:
        """Until when a node that just failed is not to be tried; 0 when it may be."""
        link = self._links.get(node)
        if link is None or link.connection is not None or not self._address_is_current(link):
            return 0.0
        return link.not_before

    def deadline(self) -> float:
        """When `step` should next run."""
        result = min((core.deadline() for core in self.cores), default=float("inf"))
        for call in self._anywhere:
            result = min(result, call.deadline)
        for link in self._links.values():
            result = min(result, link.connect_deadline)
            if link.connection is not None and link.is_open:
                result = min(result, link.connection.deadline())
            for call in link.waiting:
                result = min(result, call.deadline)
            if link.connection is None and link.waiting:
                result = min(result, link.not_before)
            if link.connection is None and self._anywhere:
                result = min(result, max(link.not_before, self._stagger_end()))
        return result

    def _address_is_current(self, link: Link) -> bool:
        broker = self.metadata.brokers.get(link.node_id & (COORDINATOR_LINKS - 1))
        return broker is None or (broker.host, broker.port) == (link.host, link.port)

    def _open_link(self, node: int) -> Link | None:
        broker = self.metadata.brokers.get(node & (COORDINATOR_LINKS - 1))
        if broker is None:
            return None
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = Link(node, broker.host, broker.port)
        elif link.connection is None:
            link.host, link.port = broker.host, broker.port
        return link

    def _route_anywhere(self, now: float) -> None:
        overdue = [call for call in self._anywhere if call.deadline <= now]
        for call in overdue:
            reason = self._why_nobody()
            call.complete(None, TimedOutError(f"no broker answered: {reason}", sent=False), now)
        self._anywhere = [call for call in self._anywhere if not call.is_done]
        if not self._anywhere:
            return
        ready = [link for link in self._links.values() if _is_ready(link)]
        if ready:
            link = min(ready, key=lambda item: item.in_flight)
            assert link.connection is not None
            calls, self._anywhere = self._anywhere, []
            for call in calls:
                link.connection.submit(call, now)
            return
        for node in [*self.metadata.brokers]:
            self._open_link(node)
        if now < self._stagger_end():
            return  # give it a moment before another one is tried beside it
        candidates = [
            link
            for link in self._links.values()
            if link.connection is None and link.not_before <= now
        ]
        if candidates:
            self._connect(min(candidates, key=lambda item: (item.failures, -item.node_id)), now)

    def _stagger_end(self) -> float:
        """Until when a link that is being opened keeps others from being opened beside it."""
        return max((link.opened_at + _STAGGER_MS for link in self._opening()), default=0.0)

    def _opening(self) -> list[Link]:
        return [link for link in self._links.values() if link.connection and not _is_ready(link)]

    def _maintain(self, link: Link, now: float) -> None:
        for call in [call for call in link.waiting if call.deadline <= now]:
            link.waiting.remove(call)
            where = f"{link.host}:{link.port}"
            call.complete(None, TimedOutError(f"no connection to {where}", sent=False), now)
        if link.waiting and link.connection is None and link.not_before <= now:
            self._connect(link, now)
        if link.connection is not None and link.is_open:
            if link.connection.is_ready:
                link.failures = 0
            link.connection.expire(now)

    def _connect(self, link: Link, now: float) -> None:
        try:
            link.connection = ConnectionCore(
                self.options.client_id, security=self.options.security, host=link.host
            )
        except (ValueError, TypeError) as error:  # TLS: nobody can be called that
            self.failed(link, f"{link.host!r} is no host name: {error}", now)
            return
        link.opened_at = now
        link.connect_deadline = now + self.options.connect_timeout_ms
        self._connects.append(link)

    def _why_nobody(self) -> str:
        where = ", ".join(f"{host}:{port}" for host, port in self.options.bootstrap)
        return f"tried {where}" + (f" ({self._last_failure})" if self._last_failure else "")


def _is_ready(link: Link) -> bool:
    connection = link.connection
    return connection is not None and connection.is_ready and not connection.is_suspect
