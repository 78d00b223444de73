"""Metadata, DescribeTopicPartitions, DescribeCluster: which nodes lead, and where brokers listen.

Bodies of Metadata are encoded once per state (image, leader table, in-sync sets) and kept, since
many clients ask for the same topics at the same moment. A leader is named until the next one is
known: -1 makes librdkafka stop asking.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias
from uuid import UUID

from attrs import field, frozen

from raftmq.errors import ErrorCode
from raftmq.metadata.image import PartitionImage, TopicImage, candidate
from raftmq.promise import Promise
from raftmq.protocol import (
    ApiKey,
    Struct,
    encode_response,
    encode_response_slowly,
)
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.counts import EncodedAnswer
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.views import View
from raftmq.server.kafka.work import (
    HANG_UP,
    TURN_PARTITIONS,
    HangUp,
    Work,
    chain,
    in_turns,
    value_of,
)
from raftmq.types import INTERNAL_TOPICS, METADATA_TOPIC, METADATA_TOPIC_ID, NodeId

NO_OPERATIONS: Final = -(1 << 31)
TOPIC_OPERATIONS: Final = 0x0DF8
"""Bits of Kafka's AclOperation that make sense on a topic: all of them, without authorization."""
CLUSTER_OPERATIONS: Final = 0x1FA0
"""Those of a cluster: its AclEntry.supportedOperations, as for topics."""
PARTITIONS_PER_PAGE_MAX: Final = 500
WAIT_PARTITIONS_MAX: Final = 1000

_TOPIC_IDS_FROM: Final = 10
_NO_NAMES_FROM: Final = 12
"""Before that version the answer names every topic, also one that was asked for by id."""
_AUTO_FLAG_FROM: Final = 4
_NULL_IS_ALL_FROM: Final = 1
_LEADERLESS: Final = ErrorCode.LEADER_NOT_AVAILABLE


Refused: TypeAlias = tuple[ErrorCode, str | None, UUID | None]
"""A topic of which nothing is told: why, its name, its id."""


@frozen(slots=True)
class Scope:
    """How much of what there is an answer shows.

    Attributes:
        refused: topics that were named and are left out of the request.
        may_create: False where the topics of the request were not named by its client.
        cluster_operations: the authorized operations, where they are asked for.
        topic_operations: those of a topic by its name; None: all of them.
        viewer: who alone may be shown the answer; None: whoever asks for the same.
    """

    refused: tuple[Refused, ...] = ()
    may_create: bool = True
    cluster_operations: int = CLUSTER_OPERATIONS
    topic_operations: Callable[[str], int] | None = field(default=None, eq=False)
    viewer: object = None

    def operations(self, topic: str) -> int:
        """The authorized operations of a topic."""
        return TOPIC_OPERATIONS if self.topic_operations is None else self.topic_operations(topic)


EVERYTHING: Final = Scope()


def names_all(version: int, request: Struct) -> bool:
    """True when a request is about all topics."""
    return request.topics is None or (not request.topics and version < _NULL_IS_ALL_FROM)


def may_create(broker: Broker, version: int, request: Struct) -> bool:
    """True when topics that a request names and that are missing are made."""
    is_wanted = version < _AUTO_FLAG_FROM or bool(request.allow_auto_topic_creation)
    return is_wanted and broker.may_auto_create


def handle(
    broker: Broker, context: RequestContext, request: Struct, scope: Scope = EVERYTHING
) -> Any:
    """Answer Metadata; create missing topics where the client allows it."""
    version = context.api_version
    wanted = request.topics
    if scope is EVERYTHING and names_all(version, request):
        waits: Any = _next_leaders(broker, context, broker.image.topics_by_id())
        if waits is None:
            return _answer(broker, context, request, None, scope)
        return chain(waits, lambda _: _answer(broker, context, request, None, scope))
    if len(wanted) > TURN_PARTITIONS:
        return _handle_many(broker, context, request, scope)
    missing = [topic.name for topic in wanted if _is_missing(broker, topic)]
    if missing and scope.may_create and may_create(broker, version, request):
        created: Any = broker.auto_create(missing, context.who)

        def when_created(codes: dict[str, ErrorCode]) -> bytes | Promise[bytes]:
            # The controller knows the first leaders; this node may not have heard of them yet, and
            # librdkafka asks again no sooner than in two seconds.
            waits: Any = _next_leaders(broker, context, _known(broker, wanted))
            return chain(waits, lambda _: _encoded(broker, context, request, wanted, codes, scope))

        return chain(created, when_created)
    waits = _next_leaders(broker, context, _known(broker, wanted))
    if waits is None:
        return _answer(broker, context, request, wanted, scope)
    return chain(waits, lambda _: _answer(broker, context, request, wanted, scope))


def _is_missing(broker: Broker, wanted: Struct) -> bool:
    """True for a topic that is named, is not there, and may be made."""
    return (
        wanted.topic_id is None
        and wanted.name is not None
        and wanted.name not in broker.image.topics
        and wanted.name not in INTERNAL_TOPICS
        and not broker.views.is_reserved(wanted.name)
    )


def _handle_many(
    broker: Broker, context: RequestContext, request: Struct, scope: Scope
) -> Work[bytes | HangUp]:
    """As `handle`, in short turns; the body is not kept, and leaders are waited for only where
    topics were created."""
    version = context.api_version
    wanted: dict[tuple[str | None, UUID | None], Struct] = {}
    missing: list[str] = []
    known: list[TopicImage] = []
    for count, one in enumerate(request.topics, 1):
        if count % TURN_PARTITIONS == 0:
            yield None
        key = one.name, one.topic_id
        if key in wanted:
            continue
        wanted[key] = one
        topic = broker.find_base(*key)
        if topic is not None:
            known.append(topic)
        elif _is_missing(broker, one):
            missing.append(one.name)
    codes: dict[str, ErrorCode] = {}
    if missing and scope.may_create and may_create(broker, version, request):
        codes = yield from value_of(broker.auto_create(missing, context.who))
        waits = _next_leaders(broker, context, known)
        if waits is not None and not waits.is_done:
            yield waits
    elif broker.is_cut_off() and broker.misses_leaders(known):
        return HANG_UP
    flags = _flags(context, request)
    return (yield from _encode(broker, context, list(wanted.values()), flags, codes, scope))


def _known(broker: Broker, wanted: Sequence[Struct]) -> list[TopicImage]:
    """Those of the topics asked for that exist; of a view the topic that it looks at."""
    found = (broker.find_base(topic.name, topic.topic_id) for topic in wanted)
    return [topic for topic in found if topic is not None]


def _next_leaders(
    broker: Broker, context: RequestContext, topics: Sequence[TopicImage]
) -> Promise[None] | None:
    """What an answer about these topics should wait for; None where they have so many partitions
    that looking would take long: such a client asks for an overview."""
    if sum(len(topic.partitions) for topic in topics) > WAIT_PARTITIONS_MAX:
        return None
    return broker.leader_waits.next_leaders(topics, context.hold)


def _answer(
    broker: Broker,
    context: RequestContext,
    request: Struct,
    wanted: list[Struct] | None,
    scope: Scope,
) -> bytes | HangUp | Promise[bytes]:
    """The answer, or HANG_UP where another node should be asked: else a client with one connection
    would be told the same old leader for as long as this node is cut off."""
    if broker.is_cut_off():
        asked = broker.image.topics_by_id()
        if wanted is not None:
            asked = _known(broker, wanted)
        if broker.misses_leaders(asked):
            return HANG_UP
    return _encoded(broker, context, request, wanted, {}, scope)


def _flags(context: RequestContext, request: Struct) -> tuple[bool, bool, bool]:
    """Whether an answer has the authorized operations of the cluster, those of topics, and aliases
    instead of ids.

    A producer of librdkafka is told the newest alias: it lists fewer partitions only under another
    topic id, and asks again and again for those that it goes on writing to. Others take one of
    another id for another topic. A consumer of librdkafka would read on no more what it is assigned
    by number; only the questions of producers let topics be created, unless it is told to.
    """
    return (
        request.include_cluster_authorized_operations,
        request.include_topic_authorized_operations,
        context.is_of_rdkafka and bool(request.allow_auto_topic_creation),
    )


def _encoded(
    broker: Broker,
    context: RequestContext,
    request: Struct,
    wanted: list[Struct] | None,
    codes: dict[str, ErrorCode],
    scope: Scope,
) -> bytes | Promise[bytes]:
    names = None if wanted is None else tuple((topic.name, topic.topic_id) for topic in wanted)
    flags = _flags(context, request)
    key = (
        context.api_version,
        context.listener_name,
        names,
        flags,
        tuple(sorted(codes.items())),
        scope,
    )
    cache = broker.metadata_answers
    state = broker.metadata_state
    body = cache.get(state, key)
    if body is not None:
        return body
    under_way = cache.under_way(key)
    if under_way is not None:
        return under_way
    result = broker.scheduler.run(_encode(broker, context, wanted, flags, codes, scope))
    if isinstance(result, Promise):
        cache.begin(state, key, result)
    else:
        cache.put(state, key, result)
    return result


def _encode(
    broker: Broker,
    context: RequestContext,
    wanted: list[Struct] | None,
    flags: tuple[bool, bool, bool],
    codes: dict[str, ErrorCode],
    scope: Scope,
) -> Work[bytes]:
    """Gather and encode; in short turns where there are many partitions."""
    version, listener = context.api_version, context.listener_name
    out_of_reach = broker.out_of_reach(listener)
    with_cluster_operations, with_topic_operations, takes_alias = flags

    def operations(name: str) -> int:
        return scope.operations(name) if with_topic_operations else NO_OPERATIONS

    found: list[tuple[dict[str, Any], TopicImage | View | None]] = []
    if wanted is None:
        shown = broker.image.topics_by_id()
        found += [(_topic(one, operations(one.name), takes_alias), one) for one in shown]
        found += [(_view(view, operations), view) for view in broker.views.listed()]
    else:
        found += yield from in_turns(
            wanted, lambda one: _wanted_topic(broker, version, one, operations, codes, takes_alias)
        )
    count = 0
    for row, topic in found:
        count += 1
        if count % TURN_PARTITIONS == 0:
            yield None
        if topic is None:
            continue
        for name, rows in _told_of(broker, topic, out_of_reach, listener).items():
            partitions = row[name] = []
            for partition in rows:
                partitions.append(partition)
                count += 1
                if count % TURN_PARTITIONS == 0:
                    yield None
        if isinstance(topic, TopicImage) and topic.retired:
            retired_view = broker.image.view_of(topic.topic_id)
            if retired_view is not None:
                row["retired_view"] = retired_view.name
    topics = [row for row, _ in found]
    topics += [_no_topic(*one) for one in scope.refused]
    message = {
        "throttle_time": 0,
        "brokers": [_broker_row(endpoint) for endpoint in broker.live_endpoints(listener)],
        "cluster_id": broker.cluster_id,
        "controller_id": broker.controller_id,
        "topics": topics,
        "cluster_authorized_operations": (
            scope.cluster_operations if with_cluster_operations else NO_OPERATIONS
        ),
        "error_code": 0,
    }
    if count < TURN_PARTITIONS:
        answer = EncodedAnswer(encode_response(ApiKey.METADATA, version, message))
    else:
        body = yield from encode_response_slowly(ApiKey.METADATA, version, message)
        answer = EncodedAnswer(body)
    errors: list[int] = []
    for number, topic_row in enumerate(topics, 1):
        if number % TURN_PARTITIONS == 0 and count >= TURN_PARTITIONS:
            yield None
        errors += [int(part["error_code"]) for part in topic_row["partitions"]]
        errors.append(int(topic_row["error_code"]))
    answer.errors = tuple(filter(None, errors))
    return answer


def _broker_row(endpoint: Any) -> dict[str, Any]:
    return {
        "node_id": endpoint.node_id,
        "host": endpoint.host,
        "port": endpoint.port,
        "rack": endpoint.rack,
    }


def _wanted_topic(
    broker: Broker,
    version: int,
    one: Struct,
    operations: Callable[[str], int],
    codes: dict[str, ErrorCode],
    takes_alias: bool,
) -> tuple[dict[str, Any], TopicImage | View | None]:
    """A topic's row, and the topic, or the view, whose partitions it still lacks."""
    name, topic_id = one.name, one.topic_id
    if name is None or topic_id is not None:
        if version < _TOPIC_IDS_FROM or topic_id is None:
            return _no_topic(ErrorCode.INVALID_REQUEST, name or "", topic_id), None
        topic = broker.find_topic(None, topic_id)
        if topic is None:
            if (view := broker.views.find(None, topic_id)) is not None:
                return _view(view, operations), view
            no_name = None if version >= _NO_NAMES_FROM else ""
            return _no_topic(ErrorCode.UNKNOWN_TOPIC_ID, no_name, topic_id), None
        row = _topic(topic, operations(topic.name))
        row["topic_id"] = topic_id  # by whichever of its ids it was asked for
        return row, topic
    topic = broker.image.topics.get(name)
    if topic is not None:
        return _topic(topic, operations(name), takes_alias), topic
    if name == METADATA_TOPIC:
        return _metadata_topic(broker, operations(name)), None
    if (view := broker.views.find(name, None)) is not None:
        return _view(view, operations), view
    code = codes.get(name)
    if code is None:
        code = broker.check_topic_name(name) or ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return _no_topic(code, name, None), None


def _no_topic(code: ErrorCode, name: str | None, topic_id: UUID | None) -> dict[str, Any]:
    return {
        "error_code": code,
        "name": name,
        "topic_id": topic_id,
        "is_internal": False,
        "partitions": [],
        "topic_authorized_operations": NO_OPERATIONS,
    }


def _topic(topic: TopicImage, operations: int, takes_alias: bool = False) -> dict[str, Any]:
    """A topic's row without its partitions."""
    return {
        "error_code": ErrorCode.NONE,
        "name": topic.name,
        "topic_id": topic.aliases[-1] if takes_alias and topic.aliases else topic.topic_id,
        "is_internal": topic.name in INTERNAL_TOPICS,
        "partitions": [],
        "topic_authorized_operations": operations,
    }


def _told_of(
    broker: Broker, topic: TopicImage | View, out_of_reach: Container[int], listener: str
) -> dict[str, Iterator[dict[str, Any]]]:
    """The fields of a topic's row that have partitions. Those that are not listed any more stand in
    a field that only our own client reads: it reads them on under the topic's name."""
    if isinstance(topic, View):
        return {"partitions": _numbers(broker, topic, topic.numbers(), out_of_reach, listener)}

    def rows(partitions: tuple[PartitionImage, ...]) -> Iterator[dict[str, Any]]:
        return (_partition(broker, topic, partition, out_of_reach) for partition in partitions)

    told = {"partitions": rows(topic.partitions)}
    if topic.retired:
        told["retired_partitions"] = rows(topic.retired)
    return told


def _partition(
    broker: Broker, topic: TopicImage, partition: PartitionImage, out_of_reach: Container[int]
) -> dict[str, Any]:
    leader = broker.leader_of(topic, partition.index)
    replicas = broker.shown_replicas(topic.topic_id, partition)
    code = _LEADERLESS if leader.leader_id < 0 else ErrorCode.NONE
    if leader.leader_id in out_of_reach:
        code = ErrorCode.LISTENER_NOT_FOUND
    return {
        "error_code": code,
        "partition_index": partition.index,
        "leader_id": leader.leader_id,
        "leader_epoch": leader.leader_epoch,
        "replica_nodes": list(replicas),
        "isr_nodes": broker.in_sync_nodes(topic.topic_id, partition),
        "offline_replicas": broker.offline_nodes(replicas),
    }


def _view(view: View, operations: Callable[[str], int]) -> dict[str, Any]:
    """A view's row without its partitions."""
    return {
        "error_code": ErrorCode.NONE,
        "name": view.image.name,
        "topic_id": view.image.topic_id,
        "is_internal": False,
        "partitions": [],
        "topic_authorized_operations": operations(view.source_name),
    }


def _numbers(
    broker: Broker,
    view: View,
    numbers: Iterable[int],
    out_of_reach: Container[int],
    listener: str,
) -> Iterator[dict[str, Any]]:
    """The partitions of a view: all its numbers, since clients take a topic with a hole for a
    broken one. Any live node answers for what is empty."""
    live = [NodeId(endpoint.node_id) for endpoint in broker.live_endpoints(listener)]
    for index in numbers:
        partition = view.topic.partition(index)
        if partition is not None:
            yield _partition(broker, view.topic, partition, out_of_reach)
            continue
        leader = candidate(f"{view.image.name}/{index}", live)
        known = view.topic.numbers.get(index)
        replicas = [] if leader is None else [leader]
        yield {
            "error_code": _LEADERLESS if leader is None else ErrorCode.NONE,
            "partition_index": index,
            "leader_id": -1 if leader is None else leader,
            "leader_epoch": 0 if known is None else known.leader_epoch,
            "replica_nodes": replicas,
            "isr_nodes": replicas,
            "offline_replicas": [],
        }


def _metadata_topic(broker: Broker, operations: int) -> dict[str, Any]:
    """The metadata log itself, where an operator names it; any live node serves it."""
    voters = broker.metadata_voters()
    return {
        "error_code": ErrorCode.NONE,
        "name": METADATA_TOPIC,
        "topic_id": METADATA_TOPIC_ID,
        "is_internal": True,
        "partitions": [
            {
                "error_code": ErrorCode.NONE if broker.controller_id >= 0 else _LEADERLESS,
                "partition_index": 0,
                "leader_id": broker.controller_id,
                "leader_epoch": broker.engine.controller_epoch,
                "replica_nodes": voters,
                "isr_nodes": voters,
                "offline_replicas": broker.offline_nodes(voters),
            }
        ],
        "topic_authorized_operations": operations,
    }


def describe_topic_partitions(
    broker: Broker, context: RequestContext, request: Struct
) -> Work[dict[str, Any]]:
    """Answer DescribeTopicPartitions (KIP-966), page by page."""
    image = broker.image
    out_of_reach = broker.out_of_reach(context.listener_name)
    limit = max(1, min(request.response_partition_limit, PARTITIONS_PER_PAGE_MAX))
    cursor = request.cursor
    asked: set[str] = set()
    for count, one in enumerate(request.topics, 1):
        asked.add(one.name)
        if count % TURN_PARTITIONS == 0:
            yield None
    views = [] if asked else [view.image.name for view in broker.views.listed()]
    names = sorted(asked or [*image.topics, *views])
    topics: list[dict[str, Any]] = []
    next_cursor = None
    for count, name in enumerate(names, 1):
        if count % TURN_PARTITIONS == 0:
            yield None
        start = 0
        if cursor is not None:
            if name < cursor.topic_name:
                continue
            start = cursor.partition_index if name == cursor.topic_name else 0
        if limit <= 0:
            next_cursor = {"topic_name": name, "partition_index": start}
            break
        topic = image.topics.get(name)
        if topic is None and (view := broker.views.find(name, None)) is not None:
            row, count_all = _view(view, lambda _: TOPIC_OPERATIONS), view.width
            wanted = range(max(start, 0), min(max(start, 0) + limit, count_all))
            page = [*_numbers(broker, view, wanted, out_of_reach, context.listener_name)]
        elif topic is None:
            code = broker.check_topic_name(name) or ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            topics.append(_no_topic(code, name, None))
            continue
        else:
            row, count_all = _topic(topic, TOPIC_OPERATIONS), len(topic.partitions)
            page = [
                _partition(broker, topic, partition, out_of_reach)
                for partition in topic.partitions[max(start, 0) : max(start, 0) + limit]
            ]
        limit -= len(page)
        row["partitions"] = [
            {**one, "eligible_leader_replicas": [], "last_known_elr": []} for one in page
        ]
        topics.append(row)
        reached = max(start, 0) + len(page)
        if reached < count_all:
            next_cursor = {"topic_name": name, "partition_index": reached}
            break
    return {"throttle_time": 0, "topics": topics, "next_cursor": next_cursor}


def describe_cluster(broker: Broker, context: RequestContext, request: Struct) -> Any:
    """Answer DescribeCluster (KIP-700)."""
    code, message = ErrorCode.NONE, None
    endpoint_type = request.endpoint_type if context.api_version >= 1 else 1
    if endpoint_type != 1:
        code = ErrorCode.UNSUPPORTED_ENDPOINT_TYPE
        if endpoint_type == 2:
            code = ErrorCode.MISMATCHED_ENDPOINT_TYPE
        message = "this is a broker's endpoint"
    fenced = context.api_version >= 2 and request.include_fenced_brokers
    rows = []
    for node_id in sorted(broker.image.brokers):
        image = broker.image.brokers[node_id]
        endpoint = broker.endpoint(image, context.listener_name)
        if endpoint is None or (image.is_fenced and not fenced):
            continue
        row = _broker_row(endpoint)
        row["broker_id"] = row.pop("node_id")
        rows.append({**row, "is_fenced": image.is_fenced})
    return {
        "throttle_time": 0,
        "error_code": code,
        "error_message": message,
        "endpoint_type": endpoint_type,
        "cluster_id": broker.cluster_id,
        "controller_id": broker.controller_id,
        "brokers": rows if code is ErrorCode.NONE else [],
        "cluster_authorized_operations": (
            CLUSTER_OPERATIONS if request.include_cluster_authorized_operations else NO_OPERATIONS
        ),
    }
