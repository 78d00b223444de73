"""One connection to a broker: frames, version handshake, correlation, order, timeouts. No socket.

Kafka answers a connection's requests in order, so waiting calls are a queue. The first exchange is
ApiVersions; calls submitted meanwhile wait unsent. A connection that fails completes every call:
those whose bytes may have left with `ConnectionLostError` (unknown), the others with
`ConnectionFailedError`.

Where the broker says that a session ends (KIP-368), the connection authenticates again in time:
calls wait then until what is in flight is answered and the broker knows it again. What that needs
and takes long, a token, is an errand: the driver takes it, runs it in a thread and brings what it
gave.

`FrameReader` cuts the byte stream into length-prefixed frames without copying large ones twice. The
driver asks for `buffer()`, receives into it and calls `received(n)`. A frame of known size gets a
buffer of its own, so that a 1 MiB fetch answer is received in place; sizes are checked before
anything is allocated. A few of these buffers are used again once nothing refers to them: new memory
costs a page fault for every 4 KiB, several times what the copy itself does.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from attrs import define

from raftmq.errors import ErrorCode, RaftmqError, RemoteProtocolError
from raftmq.protocol import (
    SPOKEN,
    ApiKey,
    Struct,
    decode_response,
    decode_response_header,
    encode_request,
    encode_request_header,
)
from raftmq.tls import TlsLayer, TlsTrustError
from raftmq.types import Buffer
from raftmq_client.core.call import Call, Finish
from raftmq_client.core.security import (
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    SASL_VERSION,
    OAuthBearer,
    Sasl,
    Security,
    decode_mechanisms,
    decode_token,
    encode_mechanism,
    encode_token,
)
from raftmq_client.errors import (
    AuthenticationError,
    ClientError,
    ConnectionFailedError,
    ConnectionLostError,
    CorruptAnswerError,
    TimedOutError,
    UnsupportedError,
    UsageError,
)

_SIZE: Final = struct.Struct(">i")
_STAGE_BYTES: Final = 64 * 1024
FRAME_BYTES_MAX: Final = 256 << 20
_KEPT_MIN: Final = 64 * 1024
"""Smaller buffers are not worth keeping."""
_KEPT_MAX: Final = 4 << 20
"""Larger ones are not kept: an idle connection shall not hold much."""
_KEPT_COUNT: Final = 4
_KEPT_STEP: Final = 128 * 1024


class FrameReader:
    """Receive-side framing of one connection."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._stage = bytearray(_STAGE_BYTES)
        self._stage_end = 0
        self._frame: memoryview | None = None  # a large frame, received in place
        self._frame_end = 0
        self._kept: deque[bytearray] = deque()  # of earlier frames, perhaps looked into still

    def buffer(self) -> memoryview:
        """Where the next received bytes go; never empty."""
        if self._frame is not None:
            return self._frame[self._frame_end :]
        return memoryview(self._stage)[self._stage_end :]

    def received(self, count: int) -> list[memoryview]:
        """Account for `count` bytes put into `buffer()`; frames completed by them, in order.

        Raises:
            RemoteProtocolError: a size is negative or above the limit.
        """
        if self._frame is not None:
            self._frame_end += count
            if self._frame_end < len(self._frame):
                return []
            frame, self._frame = self._frame, None
            return [frame.toreadonly()]
        self._stage_end += count
        return self._cut()

    def _cut(self) -> list[memoryview]:
        frames: list[memoryview] = []
        position = 0
        while self._stage_end - position >= 4:
            (size,) = _SIZE.unpack_from(self._stage, position)
            if size < 0 or size > self._frame_bytes_max:
                raise RemoteProtocolError(f"a frame of {size} bytes")
            if self._stage_end - position - 4 < size:
                if size + 4 > len(self._stage) // 2:
                    self._go_direct(position + 4, size)
                    position = self._stage_end
                break
            start = position + 4
            # Copied, since the stage is reused; only frames that fit the stage come here.
            frames.append(memoryview(bytes(memoryview(self._stage)[start : start + size])))
            position = start + size
        rest = self._stage_end - position
        if position and rest:
            self._stage[:rest] = self._stage[position : self._stage_end]
        self._stage_end = rest
        return frames

    def _go_direct(self, start: int, size: int) -> None:
        have = self._stage_end - start
        self._frame = self._memory(size)
        self._frame[:have] = memoryview(self._stage)[start : self._stage_end]
        self._frame_end = have

    def _memory(self, size: int) -> memoryview:
        """So many bytes that nobody else looks into."""
        if not _KEPT_MIN <= size <= _KEPT_MAX:
            return memoryview(bytearray(size))
        for kept in self._kept:
            if len(kept) >= size and _is_free(kept):
                return memoryview(kept)[:size]
        made = bytearray(-(-size // _KEPT_STEP) * _KEPT_STEP)
        if len(self._kept) >= _KEPT_COUNT:
            self._kept.popleft()
        self._kept.append(made)
        return memoryview(made)[:size]


def _is_free(memory: bytearray) -> bool:
    """True when no view of it is held."""
    try:
        memory.append(memory.pop())  # refused while there is one
    except BufferError:
        return False
    return True


SOFTWARE = Struct(client_software_name="raftmq", client_software_version="0.1")
"""What an ApiVersions request says."""
HANDSHAKE_VERSION = 3
_FORGIVEN_MS = 10_000.0
RENEW_SHARE: Final = 0.8
"""Of its session a connection authenticates again after so much."""
HOLD_SHARE: Final = 0.95
"""After so much nothing more is sent before that: the broker would hang up."""
RENEW_MS_MIN: Final = 1_000.0
"""Brokers refuse to be asked more often."""
ERRAND_MS_MAX: Final = 30_000.0
_NEVER: Final = float("inf")
Errand: TypeAlias = Callable[[], str]
"""What takes long: to be run in a thread. Its result, or error, goes to `brought`."""


@define(eq=False)
class _Waiting:
    correlation_id: int
    version: int
    call: Call


class ConnectionCore:
    """The protocol side of one connection. The driver moves `outgoing()` and received bytes."""

    def __init__(
        self,
        client_id: str,
        *,
        handshake_timeout_ms: float = 5_000,
        security: Security | None = None,
        host: str = "",
    ) -> None:
        self._client_id = client_id
        self._handshake_timeout_ms = handshake_timeout_ms
        self._reader = FrameReader()
        self._sasl = security.sasl if security is not None else None
        self._tls: TlsLayer | None = None
        if security is not None and security.tls is not None:
            self._tls = TlsLayer(security.tls, host)
        self._out: list[Buffer] = []
        self._queue: deque[Call] = deque()  # submitted before the handshake is over
        self._waiting: deque[_Waiting] = deque()
        self._next_correlation_id = 1
        self.versions: dict[int, tuple[int, int]] | None = None
        self.features: dict[str, int] = {}
        """Levels of the cluster's features, as the broker knew them at the handshake (KIP-584)."""
        self.features_epoch = -1
        self.answered = 0
        """Counts answers; lets drivers notice progress."""
        self.is_closed = False
        self.error: ClientError | None = None
        self._renew_at = self._hold_at = _NEVER
        self._is_held = False  # calls wait until the broker knows the client again
        self._token: str | None = None  # fetched, to be shown once nothing is in flight
        self._errand: Errand | None = None  # for the driver to take
        self._errand_deadline = _NEVER  # while one is under way
        self._versions_to_open: dict[int, tuple[int, int]] = {}

    @property
    def is_ready(self) -> bool:
        """True once the broker's version ranges are known."""
        return self.versions is not None and not self.is_closed

    @property
    def in_flight(self) -> int:
        """Calls that wait here for anything."""
        return len(self._waiting) + len(self._queue)

    def start(self, now: float) -> None:
        """Begin the handshake on a fresh connection."""
        if self._tls is not None:
            self._tls.shake()
        self._handshake(HANDSHAKE_VERSION, now)

    def submit(self, call: Call, now: float) -> None:
        """Send a call, or keep it until the handshake is over."""
        if call.is_done:
            return
        if self.is_closed:
            call.complete(None, ConnectionFailedError(str(self.error)), now)
        elif self.versions is None or self._must_wait(now):
            self._queue.append(call)
        else:
            self._send(call, now)

    def outgoing(self) -> list[Buffer]:
        """Take the pieces to write, in order."""
        tls = self._tls
        if tls is None:
            out, self._out = self._out, []
            return out
        if tls.is_ready:
            tls.write(self._out)
            self._out = []
        return tls.outgoing()

    @property
    def has_outgoing(self) -> bool:
        """True when `outgoing()` would give something."""
        tls = self._tls
        return bool(self._out) if tls is None else self._tls_has_outgoing(tls)

    def _tls_has_outgoing(self, tls: TlsLayer) -> bool:
        return tls.has_outgoing or (tls.is_ready and bool(self._out))

    def buffer(self) -> memoryview:
        """Where the next received bytes go."""
        return self._reader.buffer() if self._tls is None else self._tls.buffer()

    def received(self, count: int, now: float) -> None:
        """Account for received bytes: finish the calls they answer; 0 is the end of the stream."""
        if count == 0:
            self.fail(f"the broker closed the connection{self._hint()}", now)
            return
        try:
            if self._tls is not None:
                self._received_tls(self._tls, count, now)
                return
            for frame in self._reader.received(count):
                self._answer(frame, now)
        except TlsTrustError as error:
            self.fail(str(error), now, AuthenticationError(str(error)))
        except RemoteProtocolError as error:
            self.fail(f"the broker broke the protocol: {error}{self._hint()}", now)

    def _hint(self) -> str:
        """What most often ends a connection so early: another kind of port than is spoken to."""
        if self.answered == 0 and self._tls is not None and not self._tls.is_ready:
            return " (no TLS there? the port may be plain)"
        if self.answered == 0 and self._tls is None:
            return " (before it said anything: the port may want TLS)"
        if self.answered == 1 and self._sasl is None and self._waiting:
            return " (at the first request: the port may want SASL)"
        return ""

    def _received_tls(self, tls: TlsLayer, count: int, now: float) -> None:
        tls.received(count)
        while not self.is_closed:
            plain = tls.read_into(self._reader.buffer())
            if plain == 0:
                return
            for frame in self._reader.received(plain):
                self._answer(frame, now)

    def fail(self, reason: str, now: float, error: ClientError | None = None) -> None:
        """End the connection and finish every call."""
        if self.is_closed:
            return
        self.is_closed = True
        self.error = error or ConnectionFailedError(reason)
        self._errand, self._errand_deadline = None, _NEVER
        self._out.clear()
        waiting, self._waiting = self._waiting, deque()
        queue, self._queue = self._queue, deque()
        for item in waiting:
            item.call.complete(None, ConnectionLostError(reason), now)
        for call in queue:
            call.complete(None, error or ConnectionFailedError(reason), now)

    @property
    def is_suspect(self) -> bool:
        """True while the broker owes an answer that came due: better ask another one."""
        return any(item.call.is_done for item in self._waiting)

    def deadline(self) -> float:
        """When `expire` should next be called."""
        times = [self._errand_deadline, *(self._due(item.call) for item in self._waiting)]
        times.extend(call.deadline for call in self._queue)
        return min(times)

    def expire(self, now: float) -> None:
        """Finish overdue calls; an unanswered one costs the connection, since order is lost.

        Only an expendable one is forgiven for a while.
        """
        if self._errand_deadline <= now:
            self.fail("no token in time", now, AuthenticationError("no token in time"))
            return
        for call in [call for call in self._queue if call.deadline <= now]:
            self._queue.remove(call)
            call.complete(None, TimedOutError("no connection in time", sent=False), now)
        for item in [item for item in self._waiting if self._due(item.call) <= now]:
            must_fail = item.call.is_done or not item.call.is_expendable
            item.call.complete(None, TimedOutError("no answer in time", sent=True), now)
            if must_fail:
                self.fail("a request timed out", now)
                return

    @staticmethod
    def _due(call: Call) -> float:
        return call.deadline + (_FORGIVEN_MS if call.is_done else 0.0)

    def _handshake(self, version: int, now: float) -> None:
        def finish(response: Any, error: ClientError | None, at: float) -> None:
            self._shake(version, response, error, at)

        call = Call(
            api=ApiKey.API_VERSIONS,
            body=lambda v: (encode_request(ApiKey.API_VERSIONS, v, SOFTWARE),),
            read=_read_api_versions,
            finish=finish,
            deadline=now + self._handshake_timeout_ms,
        )
        self._write(call, version)

    def _shake(self, version: int, response: Any, error: ClientError | None, now: float) -> None:
        if error is not None:
            self.fail(f"no handshake: {error}", now)
            return
        if response.error_code == ErrorCode.UNSUPPORTED_VERSION and version > 0:
            self._handshake(0, now)  # KIP-511: ask again in the oldest form
            return
        if response.error_code != ErrorCode.NONE:
            self.fail(f"no handshake: error {response.error_code}", now)
            return
        versions = {
            item.api_key: (item.min_version, item.max_version) for item in response.api_keys
        }
        self.features = {i.name: i.max_version_level for i in response.finalized_features}
        self.features_epoch = response.finalized_features_epoch
        if self._sasl is None:
            self._open(versions, now)
        else:
            self._authenticate(self._sasl, versions, now)

    def _open(self, versions: dict[int, tuple[int, int]], now: float) -> None:
        """The broker is ready for requests."""
        self.versions = versions
        queue, self._queue = self._queue, deque()
        for call in queue:
            self._send(call, now)

    # Authentication, the first and all later ones (KIP-43, KIP-152, KIP-368).

    def _authenticate(self, sasl: Sasl, versions: dict[int, tuple[int, int]], now: float) -> None:
        """Get what has to be said; then choose the mechanism, say it and hear what comes of it."""
        if SASL_HANDSHAKE not in versions:
            reason = "the port is plain: it asks for no authentication"
            self.fail(reason, now, AuthenticationError(f"{sasl.mechanism}: {reason}"))
            return
        if isinstance(sasl, OAuthBearer) and self._token is None:
            self._errand = sasl.prepare
            self._errand_deadline = now + ERRAND_MS_MAX
            self._versions_to_open = versions
            return
        token, self._token = self._token, None
        exchange = sasl.exchange(token or "") if isinstance(sasl, OAuthBearer) else sasl.exchange()

        def refuse(reason: str, at: float) -> None:
            if isinstance(sasl, OAuthBearer):
                sasl.forget()
            self.fail(reason, at, AuthenticationError(f"{sasl.mechanism}: {reason}"))

        def chosen(response: Any, error: ClientError | None, at: float) -> None:
            if error is not None:
                self.fail(f"no authentication: {error}", at)
                return
            code, offered = response
            if code == ErrorCode.ILLEGAL_SASL_STATE:
                plain = "the port is plain: it asks for no authentication"
                refuse("it was too soon to authenticate again" if self.versions else plain, at)
                return
            if code:
                refuse(f"not offered; the broker offers {', '.join(offered) or 'nothing'}", at)
                return
            say(next(exchange), at)

        def say(token: bytes, at: float) -> None:
            self._ask(SASL_AUTHENTICATE, encode_token(token), decode_token, heard, at)

        def heard(response: Any, error: ClientError | None, at: float) -> None:
            if error is not None:
                self.fail(f"no authentication: {error}", at)
                return
            code, message, token, lifetime_ms = response
            if code:
                refuse(message or f"error {code}", at)
                return
            try:
                say(exchange.send(token), at)
            except StopIteration:
                self._session_begins(lifetime_ms, at)
                self._open(versions, at)
            except AuthenticationError as failure:
                refuse(str(failure), at)

        self._ask(SASL_HANDSHAKE, encode_mechanism(sasl.mechanism), decode_mechanisms, chosen, now)

    def take_errand(self) -> Errand | None:
        """What the driver is to run in a thread, once; it ends with `brought`."""
        errand, self._errand = self._errand, None
        return errand

    def brought(self, token: str | None, error: Exception | None, now: float) -> None:
        """The end of an errand: what it gave, or None and why it gave nothing."""
        if self.is_closed or self._errand_deadline == _NEVER:
            return  # too late
        self._errand_deadline = _NEVER
        sasl = self._sasl
        assert sasl is not None
        if token is None and self.versions is not None and now < self._hold_at:
            self._renew_at = now + RENEW_MS_MIN  # tried again, as long as the session lasts
            return
        if token is None:
            reason = f"{sasl.mechanism}: no token: {error}"
            failure = AuthenticationError(reason)
            failure.__cause__ = error
            self.fail(reason, now, failure)
            return
        self._token = token
        if self.versions is None:
            self._authenticate(sasl, self._versions_to_open, now)
        else:
            self._is_held = True
            self._go_on_renewing(now)

    def _session_begins(self, lifetime_ms: int, now: float) -> None:
        self._is_held = False
        self._renew_at = self._hold_at = _NEVER
        if lifetime_ms > 0:
            self._renew_at = now + max(RENEW_MS_MIN, RENEW_SHARE * lifetime_ms)
            self._hold_at = now + max(RENEW_MS_MIN, HOLD_SHARE * lifetime_ms)

    def _must_wait(self, now: float) -> bool:
        """True when a call is to wait for the next authentication, which begins here when it is
        due: a connection that nobody uses does not need one."""
        if now >= self._renew_at and not (self._is_held or self._errand_deadline < _NEVER):
            if isinstance(self._sasl, OAuthBearer):
                self._errand = self._sasl.prepare
                self._errand_deadline = now + ERRAND_MS_MAX
            else:
                self._is_held = True
                self._go_on_renewing(now)
        return self._is_held or now >= self._hold_at

    def _go_on_renewing(self, now: float) -> None:
        """Authenticate again once nothing is in flight: the broker takes no other request then."""
        if self._is_held and not self._waiting and not self.is_closed:
            assert self._sasl is not None
            assert self.versions is not None
            self._authenticate(self._sasl, self.versions, now)

    def _ask(
        self, api: int, body: bytes, read: Callable[[Buffer], Any], finish: Finish, now: float
    ) -> None:
        """One exchange before the connection is open."""
        call = Call(
            api=api,
            body=lambda _version: (body,),
            read=lambda _version, data: read(data),
            finish=finish,
            deadline=now + self._handshake_timeout_ms,
        )
        self._write(call, SASL_VERSION)

    def _send(self, call: Call, now: float) -> None:
        if call.is_done:
            return
        version = self._version_for(call)
        if version is None:
            name = ApiKey(call.api).name
            call.complete(None, UnsupportedError(f"the broker offers no fitting {name}"), now)
            return
        try:
            self._write(call, version)
        except Exception as error:  # noqa: BLE001 - what one call cannot say ends no other
            name = ApiKey(call.api).name
            failure = UsageError(f"a request {name} cannot be written: {error}")
            failure.__cause__ = error
            call.complete(None, failure, now)
            return
        if not call.expects_answer:
            call.complete(None, None, now)

    def _version_for(self, call: Call) -> int | None:
        assert self.versions is not None
        theirs = self.versions.get(call.api)
        ours = SPOKEN.get(ApiKey(call.api))
        if theirs is None or ours is None:
            return None
        version = min(theirs[1], ours[1], call.max_version)
        return version if version >= max(theirs[0], ours[0], call.min_version) else None

    def _write(self, call: Call, version: int) -> None:
        correlation_id = self._next_correlation_id
        header = encode_request_header(call.api, version, correlation_id, self._client_id)
        pieces = call.body(version)
        size = len(header) + sum(len(piece) for piece in pieces)
        head = struct.pack(">i", size) + header
        # From here on nothing fails: a request is written whole or not at all.
        self._next_correlation_id = (correlation_id + 1) & 0x7FFFFFFF
        self._out.append(head)
        self._out.extend(pieces)
        call.sent = True
        if call.expects_answer:
            self._waiting.append(_Waiting(correlation_id, version, call))

    def _answer(self, frame: memoryview, now: float) -> None:
        if not self._waiting:
            raise RemoteProtocolError("an answer that nobody asked for")
        item = self._waiting[0]
        call = item.call
        correlation_id, position = decode_response_header(call.api, item.version, frame)
        if correlation_id != item.correlation_id:
            raise RemoteProtocolError(f"answer {correlation_id} to request {item.correlation_id}")
        self._waiting.popleft()
        self.answered += 1
        try:
            response = call.read(item.version, frame[position:])
        except Exception as error:
            # Whatever the bytes break, it ends here. The frame's bounds are known, but a broker
            # that garbles one answer is not trusted on.
            reason = str(error) if isinstance(error, RaftmqError) else repr(error)
            about = f"an answer to API {call.api}"
            call.complete(None, CorruptAnswerError(f"{about}: {reason}"), now)
            raise RemoteProtocolError(reason) from error
        call.complete(response, None, now)
        self._go_on_renewing(now)


def _read_api_versions(version: int, body: memoryview) -> Struct:
    # An UNSUPPORTED_VERSION answer comes in the form of version 0 whatever was asked (KIP-511).
    if int.from_bytes(body[:2], "big") == ErrorCode.UNSUPPORTED_VERSION:
        version = 0
    return decode_response(ApiKey.API_VERSIONS, version, body)
