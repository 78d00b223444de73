"""From a frame to the handler of its API and version, and from the handler's answer to bytes.

Versions are judged before bodies: ApiVersions above the known maximum is answered in version 0 so
that the client can ask again (KIP-511), any other version or API that was not announced ends the
connection, as in Kafka. Produce and Fetch go through their hand-written codecs, all others through
the schema's. What a handler raises never reaches the client: a KafkaError that has no place in the
answer and our own bugs both end the connection, and are logged.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Final, TypeAlias, cast

import structlog

from raftmq.errors import ErrorCode, RemoteProtocolError
from raftmq.promise import Promise
from raftmq.protocol import (
    ANNOUNCED,
    ApiKey,
    RequestHeader,
    Struct,
    decode_request,
    decode_request_header,
    decode_request_slowly,
    encode_response,
    encode_response_header,
    encode_response_slowly,
    encode_unsupported_api_versions,
)
from raftmq.protocol.fetch import FetchResponse, decode_fetch_request, encode_fetch_frame
from raftmq.protocol.produce import (
    ProduceResponse,
    decode_produce_request,
    encode_produce_response,
)
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.connection import Connection
from raftmq.server.kafka.handlers import fetch, produce
from raftmq.server.kafka.limits import FRAME_BYTES_MIN
from raftmq.server.kafka.log_rate import RateLimitedLog
from raftmq.server.kafka.metrics import ApiMetrics, EncodedAnswer
from raftmq.server.kafka.parked import HANG_UP, Abandonable, HangUp
from raftmq.server.kafka.replies import Pieces, Slot
from raftmq.server.kafka.slices import TURN_PARTITIONS, Work, value_of

Answer: TypeAlias = Struct | Mapping[str, Any] | bytes
"""A response body: fields for the schema's encoder, or already encoded."""
Encode: TypeAlias = Callable[[RequestHeader, Any], Pieces]
"""encode(header, response): the answer as it is sent."""
Handler: TypeAlias = Callable[
    [Broker, RequestHeader, Struct], "Answer | Promise[Any] | Work[Answer]"
]

SLOW_BYTES: Final = 2 << 10
"""A larger request is read and answered in short turns."""
PROMPT: Final = frozenset(
    {
        ApiKey.API_VERSIONS,
        ApiKey.FIND_COORDINATOR,
        ApiKey.HEARTBEAT,
        ApiKey.INIT_PRODUCER_ID,
        ApiKey.JOIN_GROUP,
        ApiKey.LEAVE_GROUP,
        ApiKey.LIST_OFFSETS,
        ApiKey.METADATA,
        ApiKey.OFFSET_COMMIT,
        ApiKey.OFFSET_FETCH,
        ApiKey.OFFSET_FOR_LEADER_EPOCH,
        ApiKey.SYNC_GROUP,
    }
)
"""What clients at work ask: a small one of these has a small answer, which is made in one go."""

_KEY_VERSION_CORRELATION: Final = struct.Struct(">hhi")
_SIZE: Final = struct.Struct(">i")

_log = RateLimitedLog(structlog.get_logger("raftmq.server"))


class Dispatcher:
    """Begins requests: the `Begin` of every connection."""

    def __init__(self, broker: Broker, handlers: Mapping[ApiKey, Handler]) -> None:
        self._broker = broker
        self.now_ms = broker.clock.monotonic_ms
        self._handlers = dict(handlers)
        self._elements_max = broker.config.request_elements_max
        self._produce_elements_max = min(self._elements_max, broker.config.produce_elements_max)
        names = {key: key.name.lower() for key in ANNOUNCED}
        self._metrics: dict[int, ApiMetrics] = {
            key: broker.metrics.api(name) for key, name in names.items()
        }

    def begin(self, frame: memoryview, slot: Slot, connection: Connection) -> None:
        """Begin one request; its answer settles `slot`, now or later.

        Raises:
            RemoteProtocolError: the connection is to be closed.
        """
        started_ms = self.now_ms()
        api_key, version, correlation_id = _KEY_VERSION_CORRELATION.unpack_from(frame)
        span = ANNOUNCED.get(api_key)
        if span is None:
            raise RemoteProtocolError(f"API {api_key} is not offered")
        metrics = self._metrics[api_key]
        if not span[0] <= version <= span[1]:
            if api_key == ApiKey.API_VERSIONS:
                metrics.error(ErrorCode.UNSUPPORTED_VERSION)
                body = encode_unsupported_api_versions(correlation_id)
                slot.answer((_SIZE.pack(len(body)) + body,))
                return
            raise RemoteProtocolError(f"{ApiKey(api_key).title} v{version} is not offered")
        header, position = decode_request_header(frame)
        body_view = frame[position:]
        self._broker.elections.asker = connection.hold
        try:
            if api_key == ApiKey.PRODUCE:
                self._begin_produce(header, body_view, slot, connection, started_ms)
            elif api_key == ApiKey.FETCH:
                self._begin_fetch(header, body_view, slot, connection, started_ms)
            else:
                self._begin_other(header, body_view, slot, connection, started_ms, metrics)
        except RemoteProtocolError:
            metrics.failures += 1
            raise
        except Exception as error:  # noqa: BLE001 - one request's bug must not end the node
            self.failed(header, error)
            raise RemoteProtocolError("the request could not be served") from None

    def _begin_produce(
        self,
        header: RequestHeader,
        body: memoryview,
        slot: Slot,
        connection: Connection,
        started_ms: float,
    ) -> None:
        version = header.api_version
        request = decode_produce_request(version, body, elements_max=self._produce_elements_max)
        result: Any = produce.handle(self._broker, header, request)
        if isinstance(result, Generator):
            result = self._broker.slices.run(result, connection.replies)
        encode = _encode_produce if request.acks else _encode_unanswered
        _InHand(self, header, encode, slot, started_ms).settle(result)

    def _begin_fetch(
        self,
        header: RequestHeader,
        body: memoryview,
        slot: Slot,
        connection: Connection,
        started_ms: float,
    ) -> None:
        version = header.api_version
        request = decode_fetch_request(version, body, elements_max=self._elements_max)
        result = fetch.handle(self._broker, header, request)
        in_hand = _InHand(self, header, _encode_fetch, slot, started_ms)
        in_hand.settle(result, connection)

    def _begin_other(
        self,
        header: RequestHeader,
        body: memoryview,
        slot: Slot,
        connection: Connection,
        started_ms: float,
        metrics: ApiMetrics,
    ) -> None:
        api_key, version = header.api_key, header.api_version
        handler = self._handlers.get(api_key)  # type: ignore[call-overload]  # an int is its ApiKey
        if handler is None:
            raise RemoteProtocolError(f"{ApiKey(api_key).title} is not served here")
        result: Any
        if len(body) > SLOW_BYTES or api_key not in PROMPT:
            work = self._answer_slowly(header, body, handler, connection, metrics)
            result = self._broker.slices.run(work, connection.replies)
        else:
            request = decode_request(api_key, version, body, elements_max=self._elements_max)
            self._broker.client_host = connection.peer.rpartition(":")[0]
            result = handler(self._broker, header, request)
            if isinstance(result, Generator):
                result = self._broker.slices.run(result, connection.replies)
        in_hand = _InHand(self, header, self._encode_other, slot, started_ms)
        in_hand.settle(result, connection)

    def _encode_other(self, header: RequestHeader, response: Answer) -> Pieces:
        api_key, version = header.api_key, header.api_version
        metrics = self._metrics[api_key]
        head = encode_response_header(api_key, version, header.correlation_id)
        if not isinstance(response, bytes):
            metrics.count_errors(response)
            response = encode_response(api_key, version, response)
        elif isinstance(response, EncodedAnswer):
            for code in response.errors:
                metrics.error(code)
        return (_SIZE.pack(len(head) + len(response)) + head, response)

    def _answer_slowly(
        self,
        header: RequestHeader,
        body: memoryview,
        handler: Handler,
        connection: Connection,
        metrics: ApiMetrics,
    ) -> Work[bytes | HangUp]:
        """Decode, answer and encode a request that may be about much, in short turns."""
        api_key, version = header.api_key, header.api_version
        elements_max = self._elements_max
        request = yield from decode_request_slowly(
            api_key, version, body, elements_max=elements_max
        )
        self._broker.client_host = connection.peer.rpartition(":")[0]
        self._broker.elections.asker = connection.hold
        response: Any = handler(self._broker, header, request)
        if isinstance(response, Generator):
            response = yield from response
        if isinstance(response, Promise):
            response = yield from value_of(response)
        if response is HANG_UP or isinstance(response, bytes):
            return response
        yield from _count_errors(metrics, response)
        return (yield from encode_response_slowly(api_key, version, response))

    def observe(self, metrics: ApiMetrics, started_ms: float) -> None:
        """Count a request of that API that began then and was answered now."""
        metrics.observe((self.now_ms() - started_ms) / 1e3)

    def metrics_of(self, api_key: int) -> ApiMetrics:
        """The counts of an API that is announced."""
        return self._metrics[api_key]

    def failed(self, header: RequestHeader, error: Exception) -> None:
        """A request met a bug of ours."""
        self._metrics[header.api_key].failures += 1
        if isinstance(error, MemoryError):
            self._broker.metrics.refuse("memory")
        else:
            self._broker.metrics.bug(error)
        _log.error(
            "request failed",
            api=ApiKey(header.api_key).title,
            version=header.api_version,
            client_id=header.client_id,
            why=repr(error),
            exc_info=error,
        )


class _InHand:
    """One request until it is answered; called when what it waits for is settled."""

    __slots__ = (
        "_connection",
        "_dispatcher",
        "_encode",
        "_header",
        "_slot",
        "_started_ms",
    )

    def __init__(
        self,
        dispatcher: Dispatcher,
        header: RequestHeader,
        encode: Encode,
        slot: Slot,
        started_ms: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._header = header
        self._encode = encode
        self._slot = slot
        self._started_ms = started_ms
        self._connection: Connection | None = None

    def settle(self, result: Any, connection: Connection | None = None) -> None:
        """Answer now or later. When `connection` ends first, what is parked is dropped at once."""
        if result is HANG_UP:
            self._hang_up()
        elif not isinstance(result, Promise):
            self._slot.answer(self._encode(self._header, result))
            self._observe()
        else:
            if connection is not None and isinstance(result, Abandonable) and not result.is_done:
                self._connection = connection
                connection.on_close[id(result)] = result.abandon
            result.when_done(self)

    def __call__(self, promise: Promise[Any]) -> None:
        """It is settled."""
        if self._connection is not None:
            self._connection.on_close.pop(id(promise), None)
        try:
            value = promise.result()
            if value is HANG_UP:
                self._hang_up()
                return
            pieces = self._encode(self._header, value)
        except RemoteProtocolError as error:
            self._metrics.failures += 1
            _log.warning("connection closed: bad request", why=str(error))
            self._slot.fail()
            return
        except Exception as error:  # noqa: BLE001 - as in begin(): it costs its connection
            self._dispatcher.failed(self._header, error)
            self._slot.fail()
            return
        try:
            self._slot.answer(pieces)
        except Exception as error:  # noqa: BLE001 - whoever settled this has no part in it
            self._dispatcher.failed(self._header, error)
            self._slot.fail()
            return
        self._observe()

    @property
    def _metrics(self) -> ApiMetrics:
        return self._dispatcher.metrics_of(self._header.api_key)

    def _observe(self) -> None:
        self._dispatcher.observe(self._metrics, self._started_ms)

    def _hang_up(self) -> None:
        self._metrics.error(ErrorCode.LEADER_NOT_AVAILABLE)
        _log.info("clients are sent to other nodes", why="no metadata majority is seen")
        self._slot.fail()


def _count_errors(metrics: ApiMetrics, answer: Struct | Mapping[str, Any]) -> Work[None]:
    """As `ApiMetrics.count_errors`, in short turns."""
    waiting: list[Iterator[Any]] = [iter((answer,))]
    count = 0
    while waiting:
        for one in waiting[-1]:
            count += 1
            if count % TURN_PARTITIONS == 0:
                yield None
            lists = metrics.count_own_errors(one)
            if lists:
                waiting += [iter(items) for items in lists]
                break
        else:
            waiting.pop()


def _encode_produce(header: RequestHeader, response: ProduceResponse) -> Pieces:
    head = encode_response_header(ApiKey.PRODUCE, header.api_version, header.correlation_id)
    body = encode_produce_response(header.api_version, response)
    return (_SIZE.pack(len(head) + len(body)) + head + body,)


def _encode_unanswered(_header: RequestHeader, response: ProduceResponse) -> Pieces:
    if any(part.error_code for topic in response.topics for part in topic.partitions):
        # Without an answer the closed connection is the only way to say so.
        raise RemoteProtocolError("a produce with acks=0 failed")
    return ()


def _encode_fetch(header: RequestHeader, response: FetchResponse) -> Pieces:
    pieces: Any = encode_fetch_frame(header.api_version, header.correlation_id, response)
    return cast(Pieces, pieces)


assert _KEY_VERSION_CORRELATION.size <= FRAME_BYTES_MIN, "the shortest frame has these fields"
