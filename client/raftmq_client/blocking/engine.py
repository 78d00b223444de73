"""The blocking driver: one background thread that moves bytes and time for a `ClientCore`.

All deciding code runs under `lock`, in whichever thread holds it, and so does all that is done with
sockets: by the background thread, or by one that polls. `changed` is notified after anything
happened, so that callers wait for facts, not for time. A fork is detected and refused: the thread
does not survive it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from raftmq.types import Buffer
from raftmq_client.core.admin_flow import Flow, Pause
from raftmq_client.core.call import Call
from raftmq_client.core.client import ClientCore, Link
from raftmq_client.core.connection import ConnectionCore, Errand
from raftmq_client.errors import ClientError, ForkedError, TimedOutError, UsageError
from raftmq_client.forks import Lineage

_T = TypeVar("_T")
LOG: Final = logging.getLogger("raftmq_client")
_SEND_PIECES_MAX: Final = 64
_RECEIVE_TURNS_MAX: Final = 16
_LEFT_ALONE_MS: Final = 20.0
"""So long after a poll that received by itself the background thread does not do it, too."""


def now_ms() -> float:
    """Monotonic milliseconds, the clock of all cores."""
    return time.monotonic() * 1000.0


Place: TypeAlias = tuple[int, Any]
"""Address family and socket address."""


def _look_up(link: Link) -> tuple[list[Place], str]:
    """The addresses of a link's host, or why there are none. May take seconds: hold no lock."""
    try:
        found = socket.getaddrinfo(link.host, link.port, type=socket.SOCK_STREAM)
    except (OSError, ValueError, OverflowError) as error:  # or nobody can be called that
        return [], _say(error)
    return [(family, address) for family, _, _, _, address in found], ""


class _Channel:
    """A link's socket and the bytes not yet written to it."""

    def __init__(self, link: Link, sock: socket.socket) -> None:
        assert link.connection is not None
        self.link = link
        self.connection: ConnectionCore = link.connection
        self.socket = sock
        self.out: deque[Buffer] = deque()
        self.events = 0
        self.is_connecting = True


class Engine:
    """Runs one client's I/O. Made by `Producer`, `Consumer` and `Admin`."""

    def __init__(self, client: ClientCore, *, name: str = "raftmq-client") -> None:
        self._make_lock()
        Lineage.after.add(self)
        self.client = client
        self.crash: BaseException | None = None
        self.after_turn: Callable[[], None] | None = None
        """Called by the background thread without the lock, after the cores have worked."""
        self.after_crash: Callable[[], None] | None = None
        """Called with the lock held when an error ends the background thread."""
        self._forks = Lineage.number
        self._selector = selectors.DefaultSelector()
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._wake_send.setblocking(False)
        self._selector.register(self._wake_receive, selectors.EVENT_READ, None)
        self._wakes = selectors.DefaultSelector()
        self._wakes.register(self._wake_receive, selectors.EVENT_READ, None)
        self._is_awake = False
        self._sleeps_until_ms = 0.0
        self._pumped_ms = float("-inf")
        self._channels: dict[int, _Channel] = {}
        self._to_open: list[Link] = []
        self._is_closing = False  # the thread shall end, or has
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _make_lock(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        is_owned: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]  # as Condition
        self.is_held = is_owned
        """True in a thread that is inside already."""

    def after_fork(self) -> None:
        """In the child: nobody is left who would release the lock. `check` refuses all else."""
        self._make_lock()

    @property
    def is_foreign(self) -> bool:
        """True in a fork of the process that made the client."""
        return self._forks != Lineage.number

    @property
    def is_open(self) -> bool:
        """True until it is closed or dies, in the process that made it."""
        return not (self._is_closing or self._is_closed or self.is_foreign or self.crash)

    def refuse_reentry(self) -> None:
        """Refuse a call into the middle of another one of the same thread.

        Raises:
            UsageError: a signal handler, or what the garbage collector or a logging handler runs,
                interrupted a call that holds the lock.
        """
        if self.is_held():
            raise UsageError(
                "this thread is inside the client already (a signal handler?): set a flag there,"
                " and call the client where it is looked at"
            )

    def check_wait(self) -> None:
        """Refuse to wait where that would stop all I/O, or tear a call that is under way.

        Raises:
            UsageError: the caller is a callback in the background thread, or `refuse_reentry`.
        """
        self.refuse_reentry()
        self.refuse_wait()

    def refuse_wait(self) -> None:
        """Refuse to wait in the background thread.

        Raises:
            UsageError: the caller is a callback in it.
        """
        if threading.get_ident() == self._thread.ident and not self.is_foreign:
            raise UsageError(
                "a callback may not wait: it runs in the thread that does the I/O. Hand the work"
                " to a thread of your own, by a queue"
            )

    def start(self) -> None:
        """Start the background thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close every socket; unfinished calls fail."""
        if self.is_foreign:
            return
        self.check_wait()
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = self._is_closing = self.client.is_closing = True
            self.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._selector.close()
        self._wakes.close()
        self._wake_receive.close()
        self._wake_send.close()

    def refuse(self) -> None:
        """Refuse use from now on; `close` is still to be called. Call with the lock held."""
        self._is_closing = self.client.is_closing = True
        self.wake()

    @property
    def is_closed(self) -> bool:
        """True once `close` was called."""
        return self._is_closed

    def check(self) -> None:
        """Refuse use after close, after a fork, or when the thread died.

        Raises:
            ForkedError: this process is a fork of the one that made the client.
            UsageError: the client is closed.
        """
        if self._forks != Lineage.number:
            raise ForkedError("a client cannot be used after fork(); make a new one in the child")
        if self.crash is not None:
            raise UsageError(f"the client's thread died: {self.crash!r}") from self.crash
        if self._is_closing:
            raise UsageError("the client is closed")

    def wake(self) -> None:
        """Make the background thread look at everything now. Call with the lock held."""
        self._pumped_ms = float("-inf")
        if self._is_awake:
            return
        self._is_awake = True
        try:
            self._wake_send.send(b"\0")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already

    def wait_for(self, predicate: Callable[[], bool], deadline_ms: float) -> bool:
        """Wait, with the lock held, until `predicate` or the deadline; whether it came true."""
        while not predicate():
            self.check()
            left = deadline_ms - now_ms()
            if left <= 0:
                return False
            self.changed.wait(min(left / 1000.0, 3600.0))
        return True

    def call(self, make: Callable[[Callable[[Any, ClientError | None, float], None]], Call]) -> Any:
        """Send one call and wait for its answer.

        Raises:
            ClientError: no answer.
        """
        result: list[tuple[Any, ClientError | None]] = []

        def finish(response: Any, error: ClientError | None, _now: float) -> None:
            result.append((response, error))

        with self.lock:
            self.check()
            call = make(finish)
            self.client.submit(call, now_ms())
            self.wake()
            if not self.wait_for(lambda: bool(result), call.deadline + 1_000):
                raise TimedOutError("no answer in time", sent=call.sent)
        response, error = result[0]
        if error is not None:
            raise error.fresh()
        return response

    def partitions(self, topic: str, timeout: float) -> int:
        """How many partitions a topic has.

        Raises:
            BrokerError: the cluster knew no such topic until the time was over.
            TimedOutError: nobody could tell in time.
            AuthenticationError: no broker lets this client in.
        """
        metadata = self.client.metadata
        self.check_wait()
        with self.lock:
            self.check()
            metadata.want((topic,))
            self.wake()
            self.wait_for(lambda: metadata.is_settled(topic), now_ms() + timeout * 1000)
            count = metadata.partition_count(topic)
        if count is None:
            raise metadata.not_found(topic)
        return count

    def run(self, flow: Flow[_T]) -> _T:
        """Run a flow to its end.

        Raises:
            ClientError: what the flow ends with.
        """
        self.check_wait()
        answer: Any = None
        error: ClientError | None = None
        while True:
            try:
                with self.lock:
                    step = flow.send(answer) if error is None else flow.throw(error)
            except StopIteration as end:
                result: _T = end.value
                return result
            answer = error = None
            if isinstance(step, Pause):
                with self.lock:
                    self.wait_for(lambda: False, now_ms() + step.duration_ms)
                continue
            try:
                answer = self.call(step.make)
            except ClientError as failure:
                error = failure

    # The background thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        except BaseException as error:
            LOG.critical("the client's thread died", exc_info=error)
            with self.lock:
                self.crash = error
                if self.after_crash is not None:
                    self.after_crash()
            if self.after_turn is not None:
                with contextlib.suppress(Exception):  # `crash` is told to every caller by check()
                    self.after_turn()
        finally:
            with self.lock:
                for channel in list(self._channels.values()):
                    self._drop(channel, "the client is closed")
                self._is_closing = True
                self.changed.notify_all()

    def _turn(self) -> None:
        with self.lock:
            if self._is_closing:  # said while this thread counted as awake
                return
            self._advance()
            connects, self._to_open = self._to_open, []
            now = now_ms()
            timeout = max(0.0, min(self.client.deadline() - now, 3_600_000)) / 1000.0
            self._sleeps_until_ms = now + timeout * 1000.0
            self._is_awake = False
            self.changed.notify_all()  # what became overdue is settled, too
        if self.after_turn is not None:
            self.after_turn()
        if connects:
            timeout = 0.0
            for link in connects:
                self._open(link, *_look_up(link))
        events = self._select(timeout)
        with self.lock:
            self._is_awake = True
            for key, mask in events:
                if key.data is None:
                    self._drain_wakes()
                else:
                    self._handle(key.data, mask)
            self.changed.notify_all()

    def _select(self, timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
        """What to handle; while somebody polls, wake-ups alone, and for a short time."""
        left_ms = self._pumped_ms + _LEFT_ALONE_MS - now_ms()
        if left_ms > 0:
            return self._wakes.select(min(timeout, left_ms / 1000.0))
        return self._selector.select(timeout)

    def pump(self) -> None:
        """Receive what has come, in the caller's thread and with the lock held.

        A thread that is busy with records keeps the interpreter from the background thread for
        milliseconds at a time; whoever is about to ask for more fetches it himself.
        """
        self._pumped_ms = now_ms()
        for key, mask in self._selector.select(0):
            if key.data is not None:
                self._handle(key.data, mask)
        self._advance()

    def go_on(self) -> None:
        """Let the cores work on, in the caller's thread and with the lock held.

        The background thread is woken only for what it must do: two threads that wake each other
        for every poll read 1 KiB records at 0.7 of the trio driver's rate, one alone at 1.0.
        """
        self._advance()
        if self._to_open or self.client.deadline() < self._sleeps_until_ms:
            self.wake()

    def _advance(self) -> None:
        """Step the cores until they want nothing more at this moment."""
        client = self.client
        client.step(now_ms())
        self._to_open.extend(client.take_connects())
        now = now_ms()
        for channel in list(self._channels.values()):
            if (errand := channel.connection.take_errand()) is not None:
                threading.Thread(
                    target=self._run_errand,
                    args=(channel.connection, errand),
                    name=f"{self._thread.name}-token",
                    daemon=True,
                ).start()
            if channel.connection.is_closed:
                assert channel.connection.error is not None
                self._drop(channel, str(channel.connection.error))
            elif channel.is_connecting and channel.link.connect_deadline <= now:
                self._drop(channel, "no connection in time")
            elif channel.connection.has_outgoing:
                self._flush(channel)

    def _run_errand(self, connection: ConnectionCore, errand: Errand) -> None:
        """Get what a connection waits for, in a thread of its own."""
        told, failure = None, None
        try:
            told = errand()
        except Exception as error:  # noqa: BLE001 - of the user's function: it goes to the callers
            failure = error
        with self.lock:
            if not self._is_closing:
                connection.brought(told, failure, now_ms())
                self.wake()

    def _drain_wakes(self) -> None:
        try:
            while self._wake_receive.recv(4096):
                pass
        except BlockingIOError:
            return

    def _open(self, link: Link, places: Sequence[Place], reason: str) -> None:
        """Connect to one of the addresses of a link; to the next one after each failure."""
        with self.lock:
            if link.connection is None:
                return  # given up meanwhile
            if not places:
                self.client.failed(link, reason, now_ms())
                return
            family, address = places[link.failures % len(places)]
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:
                self.client.failed(link, _say(error), now_ms())
                return
            self._connect(link, sock, address)

    def _connect(self, link: Link, sock: socket.socket, address: Any) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = _Channel(link, sock)
        self._channels[link.node_id] = channel
        try:
            code = sock.connect_ex(address)
        except (ValueError, OverflowError) as error:
            self._drop(channel, _say(error))
            return
        if code not in (0, errno.EINPROGRESS):
            self._drop(channel, os.strerror(code))
            return
        self._watch(channel, selectors.EVENT_WRITE)

    def _watch(self, channel: _Channel, events: int) -> None:
        if events == channel.events:
            return
        if channel.events == 0:
            self._selector.register(channel.socket, events, channel)
        else:
            self._selector.modify(channel.socket, events, channel)
        channel.events = events

    def _drop(self, channel: _Channel, reason: str) -> None:
        if self._channels.get(channel.link.node_id) is channel:
            del self._channels[channel.link.node_id]
        if channel.events:
            self._selector.unregister(channel.socket)
            channel.events = 0
        channel.socket.close()
        if channel.link.connection is channel.connection:
            self.client.failed(channel.link, reason, now_ms())

    def _handle(self, channel: _Channel, mask: int) -> None:
        if self._channels.get(channel.link.node_id) is not channel:
            return  # dropped earlier in this turn
        if channel.is_connecting:
            code = channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._drop(channel, os.strerror(code))
                return
            channel.is_connecting = False
            self.client.connected(channel.link, now_ms())
            self._watch(channel, selectors.EVENT_READ)
            self._flush(channel)
            return
        if mask & selectors.EVENT_READ and not self._receive(channel):
            return
        if mask & selectors.EVENT_WRITE:
            self._flush(channel)

    def _receive(self, channel: _Channel) -> bool:
        connection = channel.connection
        for _ in range(_RECEIVE_TURNS_MAX):
            buffer = connection.buffer()
            try:
                count = channel.socket.recv_into(buffer)
            except BlockingIOError:
                return True
            except OSError as error:
                self._drop(channel, _say(error))
                return False
            connection.received(count, now_ms())
            if connection.is_closed:
                self._drop(channel, str(connection.error))
                return False
            if count < len(buffer):
                return True
        return True

    def _flush(self, channel: _Channel) -> None:
        if channel.is_connecting:
            return
        out = channel.out
        out.extend(channel.connection.outgoing())
        try:
            while out:
                pieces = [out[i] for i in range(min(len(out), _SEND_PIECES_MAX))]
                _consume(out, channel.socket.sendmsg(pieces))
        except BlockingIOError:
            self._watch(channel, selectors.EVENT_READ | selectors.EVENT_WRITE)
            return
        except OSError as error:
            self._drop(channel, _say(error))
            return
        self._watch(channel, selectors.EVENT_READ)


def _consume(out: deque[Buffer], count: int) -> None:
    """Drop `count` written bytes from the head of the queue."""
    while out:
        size = len(out[0])
        if size > count:
            if count:
                out[0] = memoryview(out[0])[count:]
            return
        out.popleft()  # also a piece of no bytes, such as the body of ApiVersions v0
        count -= size


def _say(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
