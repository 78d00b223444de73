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
from raftmq.logs import RateLimitedLog
from raftmq.promise import Promise
from raftmq.protocol import (
    ANNOUNCED,
    ApiKey,
    Struct,
    decode_request,
    decode_request_header,
    decode_request_slowly,
    encode_response,
    encode_response_header,
    encode_response_slowly,
    encode_unsupported_api_versions,
    warm,
)
from raftmq.protocol.fetch import FetchResponse, decode_fetch_request, encode_fetch_frame
from raftmq.protocol.produce import (
    ProduceResponse,
    decode_produce_request,
    encode_produce_response,
)
from raftmq.server.kafka.audited import audited
from raftmq.server.kafka.authentication import Authentication
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.connection import Connection
from raftmq.server.kafka.counts import ApiCounts, EncodedAnswer
from raftmq.server.kafka.guards import guarded
from raftmq.server.kafka.handlers import (
    acls,
    cluster,
    configs,
    fetch,
    groups,
    metadata,
    offsets,
    produce,
    reassignments,
    topics,
    transactions,
    users,
)
from raftmq.server.kafka.limits import FRAME_BYTES_MIN
from raftmq.server.kafka.record_guards import handle_fetch, handle_produce
from raftmq.server.kafka.replies import Pieces, Slot
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import HANG_UP, TURN_PARTITIONS, Abandonable, HangUp, Work, value_of

Answer: TypeAlias = Struct | Mapping[str, Any] | bytes
"""A response body: fields for the schema's encoder, or already encoded."""
Encode: TypeAlias = Callable[[RequestContext, Any], Pieces]
"""encode(context, response): the answer as it is sent."""
Handler: TypeAlias = Callable[
    [Broker, RequestContext, Struct], "Answer | Promise[Any] | Work[Answer]"
]

HANDLERS: Final[dict[ApiKey, Handler]] = {
    ApiKey.API_VERSIONS: cluster.api_versions,
    ApiKey.METADATA: metadata.handle,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: metadata.describe_topic_partitions,
    ApiKey.DESCRIBE_CLUSTER: metadata.describe_cluster,
    ApiKey.LIST_OFFSETS: offsets.list_offsets,
    ApiKey.OFFSET_FOR_LEADER_EPOCH: offsets.offset_for_leader_epoch,
    ApiKey.DELETE_RECORDS: offsets.delete_records,
    ApiKey.CREATE_TOPICS: topics.create_topics,
    ApiKey.DELETE_TOPICS: topics.delete_topics,
    ApiKey.CREATE_PARTITIONS: topics.create_partitions,
    ApiKey.DESCRIBE_CONFIGS: configs.describe_configs,
    ApiKey.ALTER_CONFIGS: configs.alter_configs,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: configs.incremental_alter_configs,
    ApiKey.UPDATE_FEATURES: cluster.update_features,
    ApiKey.DESCRIBE_QUORUM: cluster.describe_quorum,
    ApiKey.DESCRIBE_LOG_DIRS: cluster.describe_log_dirs,
    ApiKey.ELECT_LEADERS: cluster.elect_leaders,
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: reassignments.alter,
    ApiKey.LIST_PARTITION_REASSIGNMENTS: reassignments.list_,
    ApiKey.DESCRIBE_ACLS: acls.describe,
    ApiKey.CREATE_ACLS: acls.create,
    ApiKey.DELETE_ACLS: acls.delete,
    **groups.HANDLERS,
    **transactions.HANDLERS,
    **users.HANDLERS,
}
"""Which handler answers which API. Produce and Fetch have their own way through the dispatcher."""
SLOW_BYTES: Final = 2 << 10
"""A larger request is decoded and answered in short turns."""
PROMPT: Final = frozenset(
    {
        ApiKey.API_VERSIONS,
        ApiKey.SASL_HANDSHAKE,
        ApiKey.SASL_AUTHENTICATE,
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
        ApiKey.ADD_PARTITIONS_TO_TXN,
        ApiKey.ADD_OFFSETS_TO_TXN,
        ApiKey.END_TXN,
        ApiKey.TXN_OFFSET_COMMIT,
    }
)
"""What working clients ask. A small request of these has a small answer, made in one go."""
COMMON: Final[dict[ApiKey, tuple[int, ...]]] = {
    ApiKey.API_VERSIONS: (0, 1, 2, 3, 4),
    ApiKey.SASL_HANDSHAKE: (0, 1),
    ApiKey.SASL_AUTHENTICATE: (0, 1, 2),
    ApiKey.METADATA: (1, 4, 5, 8, 9, 10, 12, 13),
    ApiKey.LIST_OFFSETS: (2, 3, 7, 9, 10),
    ApiKey.INIT_PRODUCER_ID: (0, 4, 5),
    ApiKey.FIND_COORDINATOR: (1, 2, 6),
    ApiKey.JOIN_GROUP: (5, 7, 9),
    ApiKey.SYNC_GROUP: (3, 5),
    ApiKey.HEARTBEAT: (1, 3, 4),
    ApiKey.LEAVE_GROUP: (1, 5),
    ApiKey.OFFSET_COMMIT: (3, 7, 8, 9),
    ApiKey.OFFSET_FETCH: (3, 7, 8, 9),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: (4,),
    ApiKey.CREATE_TOPICS: (3, 4, 7),
    ApiKey.DELETE_TOPICS: (3, 4, 6),
    ApiKey.CREATE_PARTITIONS: (2, 3),
    ApiKey.DESCRIBE_CONFIGS: (1, 4),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: (1,),
    ApiKey.DELETE_RECORDS: (2,),
    ApiKey.DESCRIBE_GROUPS: (5, 6),
    ApiKey.LIST_GROUPS: (4, 5),
    ApiKey.DESCRIBE_CLUSTER: (1, 2),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: (0,),
}
"""What Java, librdkafka, kafka-python, aiokafka and franz-go sent to a Kafka 4.1 broker; and all
that is answered before a client has authenticated."""

_KEY_VERSION_CORRELATION: Final = struct.Struct(">hhi")
_SIZE: Final = struct.Struct(">i")

_log = RateLimitedLog(structlog.get_logger("raftmq.server"))


def warm_up() -> None:
    """Compile the codecs of `COMMON`, in a thread and before the node registers.

    A codec's first use costs milliseconds of the loop, and the very first one the import of the
    schemas: time in which heartbeats wait. Later it would slow down a loop that serves.
    """
    warm((api, version) for api, versions in COMMON.items() for version in versions)


class Dispatcher:
    """Begins requests: the `Begin` of every connection."""

    def __init__(self, broker: Broker, handlers: Mapping[ApiKey, Handler]) -> None:
        self._broker = broker
        self.now_ms = broker.clock.monotonic_ms
        self._is_guarded = broker.authorizer is not None
        allowed = guarded(handlers) if self._is_guarded else handlers
        self._handlers = audited(broker.audit, allowed)
        self._elements_max = broker.config.request_elements_max
        self._produce_elements_max = min(self._elements_max, broker.config.produce_elements_max)
        names = {key: key.name.lower() for key in ANNOUNCED}
        self._metrics: dict[int, ApiCounts] = {
            key: broker.metrics.api(name) for key, name in names.items()
        }

    def begin(self, frame: memoryview, slot: Slot, connection: Connection) -> None:
        """Begin one request; its answer settles `slot`, now or later.

        Raises:
            RemoteProtocolError: the connection is to be closed.
        """
        started_ms = self.now_ms()
        authentication = connection.authentication
        if authentication is not None and authentication.is_bare:
            self._begin_bare(frame, slot, authentication)
            return
        api_key, version, correlation_id = _KEY_VERSION_CORRELATION.unpack_from(frame)
        span = ANNOUNCED.get(api_key)
        if span is None:
            raise RemoteProtocolError(f"API {api_key} is not offered")
        if authentication is not None:
            authentication.check(api_key)
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
        context = RequestContext(
            connection,
            api_key,
            version,
            correlation_id,
            header.client_id,
            connection.caller,
            started_ms,
        )
        try:
            if api_key == ApiKey.PRODUCE:
                self._begin_produce(context, body_view, slot, connection)
            elif api_key == ApiKey.FETCH:
                self._begin_fetch(context, body_view, slot, connection)
            else:
                self._begin_other(context, body_view, slot, connection, metrics)
        except RemoteProtocolError:
            metrics.failures += 1
            raise
        except Exception as error:  # noqa: BLE001 - one request's bug must not end the node
            self.failed(context, error)
            raise RemoteProtocolError("the request could not be served") from None

    def _begin_bare(self, frame: memoryview, slot: Slot, authentication: Authentication) -> None:
        """A token of SASL in a frame without a header, as after SaslHandshake v0."""

        def answer(token: bytes | None) -> None:
            if token is None:
                slot.fail()
            else:
                slot.answer((_SIZE.pack(len(token)) + token,))

        def settled(done: Promise[bytes | None]) -> None:
            if done.error is None:
                answer(done.result())
                return
            self._broker.metrics.bug(done.error)
            _log.error("authentication met a bug", why=repr(done.error), exc_info=done.error)
            slot.fail()

        said = authentication.bare_token(bytes(frame))
        if isinstance(said, Promise):
            said.when_done(settled)
        else:
            answer(said)

    def _begin_produce(
        self,
        context: RequestContext,
        body: memoryview,
        slot: Slot,
        connection: Connection,
    ) -> None:
        version = context.api_version
        request = decode_produce_request(version, body, elements_max=self._produce_elements_max)
        handle = handle_produce if self._is_guarded else produce.handle
        result: Any = handle(self._broker, context, request)
        if isinstance(result, Generator):
            result = self._broker.scheduler.run(result, connection.replies)
        encode = _encode_produce if request.acks else _encode_unanswered
        _PendingRequest(self, context, encode, slot).settle(result)

    def _begin_fetch(
        self,
        context: RequestContext,
        body: memoryview,
        slot: Slot,
        connection: Connection,
    ) -> None:
        version = context.api_version
        request = decode_fetch_request(version, body, elements_max=self._elements_max)
        handle: Any = handle_fetch if self._is_guarded else fetch.handle
        result = handle(self._broker, context, request)
        pending = _PendingRequest(self, context, _encode_fetch, slot)
        pending.settle(result, connection)

    def _begin_other(
        self,
        context: RequestContext,
        body: memoryview,
        slot: Slot,
        connection: Connection,
        metrics: ApiCounts,
    ) -> None:
        api_key, version = context.api_key, context.api_version
        handler = self._handlers.get(api_key)  # type: ignore[call-overload]  # an int is its ApiKey
        if handler is None:
            raise RemoteProtocolError(f"{ApiKey(api_key).title} is not served here")
        result: Any
        if len(body) > SLOW_BYTES or api_key not in PROMPT:
            work = self._answer_slowly(context, body, handler, metrics)
            result = self._broker.scheduler.run(work, connection.replies)
        else:
            request = decode_request(api_key, version, body, elements_max=self._elements_max)
            result = handler(self._broker, context, request)
            if isinstance(result, Generator):
                result = self._broker.scheduler.run(result, connection.replies)
        pending = _PendingRequest(self, context, self._encode_other, slot)
        pending.settle(result, connection)

    def _encode_other(self, context: RequestContext, response: Answer) -> Pieces:
        api_key, version = context.api_key, context.api_version
        metrics = self._metrics[api_key]
        head = encode_response_header(api_key, version, context.correlation_id)
        if not isinstance(response, bytes):
            metrics.count_errors(response)
            response = encode_response(api_key, version, response)
        elif isinstance(response, EncodedAnswer):
            for code in response.errors:
                metrics.error(code)
        return (_SIZE.pack(len(head) + len(response)) + head, response)

    def _answer_slowly(
        self,
        context: RequestContext,
        body: memoryview,
        handler: Handler,
        metrics: ApiCounts,
    ) -> Work[bytes | HangUp]:
        """Decode, answer and encode a request that may be about much, in short turns."""
        api_key, version = context.api_key, context.api_version
        elements_max = self._elements_max
        request = yield from decode_request_slowly(
            api_key, version, body, elements_max=elements_max
        )
        response: Any = handler(self._broker, context, request)
        if isinstance(response, Generator):
            response = yield from response
        if isinstance(response, Promise):
            response = yield from value_of(response)
        if response is HANG_UP or isinstance(response, bytes):
            return response
        yield from _count_errors(metrics, response)
        return (yield from encode_response_slowly(api_key, version, response))

    def observe(self, metrics: ApiCounts, started_ms: float) -> None:
        """Count a request that began at that time and is answered now."""
        metrics.observe((self.now_ms() - started_ms) / 1e3)

    def metrics_of(self, api_key: int) -> ApiCounts:
        """The counts of an API that is announced."""
        return self._metrics[api_key]

    def failed(self, context: RequestContext, error: Exception) -> None:
        """Log and count a bug of ours that one request met."""
        self._metrics[context.api_key].failures += 1
        if isinstance(error, MemoryError):
            self._broker.metrics.refuse("memory")
        else:
            self._broker.metrics.bug(error)
        _log.error(
            "request failed",
            api=ApiKey(context.api_key).title,
            version=context.api_version,
            client_id=context.client_id,
            why=repr(error),
            exc_info=error,
        )


class _PendingRequest:
    """One request until it is answered; called when the promise that it waits for is settled."""

    __slots__ = (
        "_connection",
        "_context",
        "_dispatcher",
        "_encode",
        "_slot",
    )

    def __init__(
        self,
        dispatcher: Dispatcher,
        context: RequestContext,
        encode: Encode,
        slot: Slot,
    ) -> None:
        self._dispatcher = dispatcher
        self._context = context
        self._encode = encode
        self._slot = slot
        self._connection: Connection | None = None

    def settle(self, result: Any, connection: Connection | None = None) -> None:
        """Answer now or later. If `connection` closes first, what is parked is dropped at once."""
        if result is HANG_UP:
            self._hang_up()
        elif not isinstance(result, Promise):
            self._slot.answer(self._encode(self._context, result))
            self._observe()
        else:
            if connection is not None and isinstance(result, Abandonable) and not result.is_done:
                self._connection = connection
                connection.on_close[id(result)] = result.abandon
            result.when_done(self)

    def __call__(self, promise: Promise[Any]) -> None:
        """The promise is settled: answer."""
        if self._connection is not None:
            self._connection.on_close.pop(id(promise), None)
        try:
            value = promise.result()
            if value is HANG_UP:
                self._hang_up()
                return
            pieces = self._encode(self._context, value)
        except RemoteProtocolError as error:
            self._metrics.failures += 1
            _log.warning("connection closed: bad request", why=str(error))
            self._slot.fail()
            return
        except Exception as error:  # noqa: BLE001 - as in begin(): it costs its connection
            self._dispatcher.failed(self._context, error)
            self._slot.fail()
            return
        try:
            self._slot.answer(pieces)
        except Exception as error:  # noqa: BLE001 - what settled the promise must go on
            self._dispatcher.failed(self._context, error)
            self._slot.fail()
            return
        self._observe()

    @property
    def _metrics(self) -> ApiCounts:
        return self._dispatcher.metrics_of(self._context.api_key)

    def _observe(self) -> None:
        self._dispatcher.observe(self._metrics, self._context.received_ms)

    def _hang_up(self) -> None:
        self._metrics.error(ErrorCode.LEADER_NOT_AVAILABLE)
        _log.info("clients are sent to other nodes", why="no metadata majority is seen")
        self._slot.fail()


def _count_errors(metrics: ApiCounts, answer: Struct | Mapping[str, Any]) -> Work[None]:
    """As `ApiCounts.count_errors`, in short turns."""
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


def _encode_produce(context: RequestContext, response: ProduceResponse) -> Pieces:
    head = encode_response_header(ApiKey.PRODUCE, context.api_version, context.correlation_id)
    body = encode_produce_response(context.api_version, response)
    return (_SIZE.pack(len(head) + len(body)) + head + body,)


def _encode_unanswered(_context: RequestContext, response: ProduceResponse) -> Pieces:
    if any(part.error_code for topic in response.topics for part in topic.partitions):
        # Without an answer, closing the connection is the only way to tell the client.
        raise RemoteProtocolError("a produce with acks=0 failed")
    return ()


def _encode_fetch(context: RequestContext, response: FetchResponse) -> Pieces:
    pieces: Any = encode_fetch_frame(context.api_version, context.correlation_id, response)
    return cast(Pieces, pieces)


assert _KEY_VERSION_CORRELATION.size <= FRAME_BYTES_MIN, "the shortest frame holds these fields"
