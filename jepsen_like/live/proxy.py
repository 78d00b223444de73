"""A TCP proxy between clients and nodes and between nodes, whose links can be broken.

Runs as a process of its own (`python -m jepsen_like.live.proxy`) whose standard input is a socket:
it takes JSON lines, answers each with one, and ends when the other side does. A link is an ordered
pair of ends: 0 is all clients, other numbers are nodes. Who dials a node's peer port is read off
the hello that opens each stream.

A blocked link is silence, as when a switch dies: bytes stay where they are, the end of a connection
is not passed on, a new connection is not answered; what was held arrives when the link is whole, as
TCP sends lost segments again. Nothing is ever reordered or lost within a connection.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import json
import select
import socket
import struct
import time
from collections import deque
from typing import Any, Final

from attrs import define, field

CLIENTS: Final = 0
CHUNK_BYTES: Final = 64 << 10
HELD_BYTES_MAX: Final = 1 << 20
HELLO_BYTES_MAX: Final = 4096
_SIZE: Final = struct.Struct(">I")
_RESET: Final = struct.pack("ii", 1, 0)


@define(eq=False)
class Link:
    """The way from one end to another."""

    is_blocked: bool = False
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    """0 is no limit."""
    free_at: float = 0.0
    """When a limited link may carry the next bytes."""


@define(eq=False)
class Half:
    """One direction of one connection."""

    link: Link
    source: socket.socket
    target: socket.socket
    held: deque[tuple[float, memoryview]] = field(factory=deque)
    held_bytes: int = 0
    has_ended: bool = False
    """The source will send no more."""
    is_shut: bool = False
    """The target was told so, or takes no more."""

    def may_read(self, now: float) -> bool:
        """True when the link would take bytes of the source now."""
        link = self.link
        return not (
            self.has_ended or link.is_blocked or self.held_bytes >= HELD_BYTES_MAX
        ) and not (link.bytes_per_s and link.free_at > now)

    def may_write(self, now: float) -> bool:
        """True when something is due at the target."""
        if self.link.is_blocked or self.is_shut:
            return False
        return bool(self.held) and self.held[0][0] <= now

    def next_turn(self) -> float | None:
        """When to look again though neither socket stirs."""
        if self.link.is_blocked or self.is_shut:
            return None
        times = [self.held[0][0]] if self.held else []
        if self.link.bytes_per_s and not self.has_ended:
            times.append(self.link.free_at)
        return min(times, default=None)

    def pump(self, now: float) -> None:
        """Take what the link takes, give what is due, and pass on the end."""
        if self.may_read(now):
            with contextlib.suppress(BlockingIOError):
                received = self.source.recv(CHUNK_BYTES)
                if received:
                    self.take(received, now)
                else:
                    self.has_ended = True
        try:
            while self.may_write(now):
                due, data = self.held[0]
                sent = self.target.send(data)
                self.held_bytes -= sent
                if sent == len(data):
                    self.held.popleft()
                else:
                    self.held[0] = (due, data[sent:])
            if self.has_ended and not (self.held or self.is_shut or self.link.is_blocked):
                self.is_shut = True
                self.target.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            # The target is gone, which the other direction tells the source when it may.
            self.held.clear()
            self.has_ended = self.is_shut = True

    def take(self, data: bytes, now: float) -> None:
        """Hold bytes of the source until they are due."""
        link = self.link
        self.held.append((now + link.delay_s, memoryview(data)))
        self.held_bytes += len(data)
        if link.bytes_per_s:
            link.free_at = max(now, link.free_at) + len(data) / link.bytes_per_s


@define(eq=False)
class Target:
    """A port of a node, and the listener that stands for it."""

    node: int
    is_peer: bool
    listener: socket.socket
    address: tuple[str, int]


@define(eq=False)
class Connection:
    """Two sockets and the two directions between them; before the dial there is only the first."""

    target: Target
    near: socket.socket
    dialler: int | None
    """None until the hello of a peer came."""
    opening: bytes = b""
    far: socket.socket | None = None
    halves: tuple[Half, ...] = ()
    timer_at: float = 0.0

    @property
    def sockets(self) -> list[socket.socket]:
        return [self.near] if self.far is None else [self.near, self.far]


def dialler_of(opening: bytes) -> int | None:
    """Who opens a peer stream with these bytes; None while more of them are needed.

    Raises:
        ValueError: they are no hello.
    """
    if len(opening) < _SIZE.size:
        return None
    (size,) = _SIZE.unpack_from(opening)
    if size > HELLO_BYTES_MAX:
        raise ValueError("not a hello")
    if len(opening) < _SIZE.size + size:
        return None
    return int(json.loads(opening[_SIZE.size : _SIZE.size + size])["node_id"])


class Proxy:
    """All listeners, links and connections, driven by one loop."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._links: dict[tuple[int, int], Link] = {}
        self._targets: dict[int, Target] = {}
        self._connections: dict[Connection, None] = {}
        self._by_fd: dict[int, Connection] = {}
        self._interest: dict[int, int] = {}
        self._timers: list[tuple[float, int, Connection]] = []
        self._numbers = itertools.count()

    def run(self, control: socket.socket) -> None:
        """Serve until the other side of `control` ends."""
        self._epoll.register(control, select.EPOLLIN)
        commands = b""
        while True:
            timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else -1
            for fd, _ in self._epoll.poll(timeout):
                if fd == control.fileno():
                    data = control.recv(CHUNK_BYTES)
                    if not data:
                        return
                    *lines, commands = (commands + data).split(b"\n")
                    for line in lines:
                        answer = json.dumps(self.obey(json.loads(line)))
                        control.sendall(answer.encode() + b"\n")
                elif fd in self._targets:
                    self._accept(self._targets[fd])
                elif fd in self._by_fd:
                    self._move(self._by_fd[fd])
            self._run_timers(time.monotonic())

    def _run_timers(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            _, _, connection = heapq.heappop(self._timers)
            connection.timer_at = 0.0
            self._move(connection)

    # ---- commands ----

    def obey(self, command: dict[str, Any]) -> int:
        """Carry out one command of `links.ProxyLinks`."""
        match command:
            case {"listen": int(node), "is_peer": bool(is_peer), "host": str(h), "port": int(p)}:
                return self._listen(node, is_peer, (h, p))
            case {"links": list(rows)}:
                return self._set_links(rows)
            case {"reset": list(pairs)}:
                return self._reset({(a, b) for a, b in pairs})
        raise ValueError(f"no such command: {command}")

    def _listen(self, node: int, is_peer: bool, address: tuple[str, int]) -> int:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        listener.setblocking(False)
        self._targets[listener.fileno()] = Target(node, is_peer, listener, address)
        self._epoll.register(listener, select.EPOLLIN)
        return int(listener.getsockname()[1])

    def _set_links(self, rows: list[dict[str, Any]]) -> int:
        wanted = {(row["from"], row["to"]): row for row in rows}
        for pair in wanted.keys() | self._links.keys():
            row, link = wanted.get(pair, {}), self._link(*pair)
            link.is_blocked = bool(row.get("is_blocked", False))
            link.delay_s = float(row.get("delay_ms", 0)) / 1e3
            link.bytes_per_s = float(row.get("bytes_per_s", 0))
            link.free_at = 0.0
        for connection in list(self._connections):
            self._move(connection)
        return len(rows)

    def _reset(self, pairs: set[tuple[int, int]]) -> int:
        struck = [c for c in self._connections if (c.dialler, c.target.node) in pairs]
        for connection in struck:
            self._end(connection, hard=True)
        return len(struck)

    def _link(self, sender: int, receiver: int) -> Link:
        return self._links.setdefault((sender, receiver), Link())

    # ---- connections ----

    def _accept(self, target: Target) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            near, _ = target.listener.accept()
            connection = Connection(target, near, None if target.is_peer else CLIENTS)
            self._connections[connection] = None
            self._adopt(connection, near)
            self._move(connection)

    def _adopt(self, connection: Connection, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._by_fd[sock.fileno()] = connection

    def _move(self, connection: Connection) -> None:
        """Do what can be done for a connection now, and say what to wait for."""
        if connection not in self._connections:
            return
        try:
            if connection.halves or self._open(connection):
                now = time.monotonic()
                for half in connection.halves:
                    half.pump(now)
                if all(half.is_shut for half in connection.halves):
                    self._end(connection, hard=False)
                else:
                    self._wait(connection, now)
        except (OSError, ValueError):
            self._end(connection, hard=True)

    def _open(self, connection: Connection) -> bool:
        """One step towards both sockets standing; True when they do."""
        near, node = connection.near, connection.target.node
        if connection.dialler is None:
            with contextlib.suppress(BlockingIOError):
                data = near.recv(CHUNK_BYTES)
                if not data:
                    raise ConnectionResetError
                connection.opening += data
            connection.dialler = dialler_of(connection.opening)
            if connection.dialler is None:
                self._watch(near, select.EPOLLIN)
                return False
        there = self._link(connection.dialler, node)
        back = self._link(node, connection.dialler)
        if connection.far is None:
            if there.is_blocked or back.is_blocked:
                self._watch(near, 0)
                return False
            self._watch(near, 0)
            connection.far = socket.socket()
            self._adopt(connection, connection.far)
            problem = connection.far.connect_ex(connection.target.address)
            if problem not in (0, errno.EINPROGRESS):
                raise OSError(problem, "cannot connect")
            self._watch(connection.far, select.EPOLLOUT)
            return False
        problem = connection.far.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise OSError(problem, "cannot connect")
        try:
            connection.far.getpeername()
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
            return False  # still connecting
        forth = Half(there, near, connection.far)
        if connection.opening:
            forth.take(connection.opening, time.monotonic())
        connection.halves = (forth, Half(back, connection.far, near))
        return True

    def _wait(self, connection: Connection, now: float) -> None:
        forth, back = connection.halves
        for half, other in ((forth, back), (back, forth)):
            events = select.EPOLLIN if half.may_read(now) else 0
            events |= select.EPOLLOUT if other.may_write(now) else 0
            self._watch(half.source, events)
            turn = half.next_turn()
            if turn is not None and turn > now and not now < connection.timer_at <= turn:
                connection.timer_at = turn
                heapq.heappush(self._timers, (turn, next(self._numbers), connection))

    def _watch(self, sock: socket.socket, events: int) -> None:
        """Wait for these events alone; without any, not even an error is news."""
        fd = sock.fileno()
        before = self._interest.get(fd, 0)
        if events == before:
            return
        if not events:
            self._epoll.unregister(fd)
        elif not before:
            self._epoll.register(fd, events)
        else:
            self._epoll.modify(fd, events)
        self._interest[fd] = events

    def _end(self, connection: Connection, *, hard: bool) -> None:
        del self._connections[connection]
        for sock in connection.sockets:
            self._watch(sock, 0)
            self._interest.pop(sock.fileno(), None)
            self._by_fd.pop(sock.fileno(), None)
            if hard:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sock.close()


def main() -> None:
    """Serve whoever holds the other side of standard input."""
    with contextlib.closing(socket.socket(fileno=0)) as control:
        Proxy().run(control)


if __name__ == "__main__":
    main()
