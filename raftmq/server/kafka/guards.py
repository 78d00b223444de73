"""The rights of callers, checked before a handler sees a request: one guard for each API.

A guard takes out of a request what its caller has no right to, lets the handler answer the rest,
and puts refusals into the answer. So handlers know nothing of rights, and where the authorizer is
off there are no guards and no cost.

No answer tells a caller of what it may not Describe: lists leave it out, a name gets a code that
does not depend on whether it exists, and the id of a topic is unknown. Fetches ask again whenever
they look at a partition, parked ones and those of a session too, so rights that were taken away
meanwhile are gone.

Invariants: `NEEDS` names every announced API; what needs anything has a guard in `GUARDS`, and what
a guard asks for stands in `NEEDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar
from uuid import UUID

import structlog
from attrs import frozen

from raftmq.controller.call_rights import BEHIND
from raftmq.controller.topic_validation import BROKER_RESOURCE
from raftmq.errors import ErrorCode
from raftmq.logs import RateLimitedLog
from raftmq.promise import Promise
from raftmq.protocol import ApiKey, Struct
from raftmq.rights import BIT, CLUSTER_NAME, Kind, Operation, Rights
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.handlers import metadata
from raftmq.server.kafka.handlers.groups import GROUP_OPERATIONS, per_partition
from raftmq.server.kafka.handlers.metadata import CLUSTER_OPERATIONS, TOPIC_OPERATIONS, Scope
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import Work, in_turns, value_of
from raftmq.types import TopicId

Handler: TypeAlias = Callable[[Broker, RequestContext, Struct], Any]
Topics: TypeAlias = Sequence[Struct]
T = TypeVar("T")

CHECKS_PER_TURN: Final = 64
"""So many resources are judged in one turn: one that was not judged before costs some ten
microseconds."""
AUDIT_LINES_MAX: Final = 50
NO_CLUSTER: Final = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
NO_TOPIC: Final = ErrorCode.TOPIC_AUTHORIZATION_FAILED
NO_GROUP: Final = ErrorCode.GROUP_AUTHORIZATION_FAILED
NO_ID: Final = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
_CODES: Final = {
    Kind.TOPIC: NO_TOPIC,
    Kind.GROUP: NO_GROUP,
    Kind.CLUSTER: NO_CLUSTER,
    Kind.TRANSACTIONAL_ID: NO_ID,
}
_MESSAGE: Final = "not authorized"

_TOPIC, _GROUP, _CLUSTER, _ID = Kind.TOPIC, Kind.GROUP, Kind.CLUSTER, Kind.TRANSACTIONAL_ID
_Op: TypeAlias = Operation
NEEDS: Final[dict[ApiKey, tuple[tuple[Kind, Operation], ...]]] = {
    ApiKey.PRODUCE: ((_TOPIC, _Op.WRITE), (_ID, _Op.WRITE)),
    ApiKey.FETCH: ((_TOPIC, _Op.READ),),
    ApiKey.LIST_OFFSETS: ((_TOPIC, _Op.DESCRIBE),),
    ApiKey.METADATA: ((_TOPIC, _Op.DESCRIBE), (_TOPIC, _Op.CREATE), (_CLUSTER, _Op.CREATE)),
    ApiKey.OFFSET_COMMIT: ((_GROUP, _Op.READ), (_TOPIC, _Op.READ)),
    ApiKey.OFFSET_FETCH: ((_GROUP, _Op.DESCRIBE), (_TOPIC, _Op.DESCRIBE)),
    ApiKey.FIND_COORDINATOR: ((_GROUP, _Op.DESCRIBE), (_ID, _Op.DESCRIBE)),
    ApiKey.JOIN_GROUP: ((_GROUP, _Op.READ),),
    ApiKey.HEARTBEAT: ((_GROUP, _Op.READ),),
    ApiKey.LEAVE_GROUP: ((_GROUP, _Op.READ),),
    ApiKey.SYNC_GROUP: ((_GROUP, _Op.READ),),
    ApiKey.DESCRIBE_GROUPS: ((_GROUP, _Op.DESCRIBE),),
    ApiKey.LIST_GROUPS: ((_CLUSTER, _Op.DESCRIBE), (_GROUP, _Op.DESCRIBE)),
    ApiKey.SASL_HANDSHAKE: (),
    ApiKey.API_VERSIONS: (),
    ApiKey.CREATE_TOPICS: (
        (_CLUSTER, _Op.CREATE),
        (_TOPIC, _Op.CREATE),
        (_TOPIC, _Op.DESCRIBE_CONFIGS),
        (_TOPIC, _Op.WRITE),
        (_TOPIC, _Op.READ),
    ),
    ApiKey.DELETE_TOPICS: ((_TOPIC, _Op.DELETE), (_TOPIC, _Op.DESCRIBE)),
    ApiKey.DELETE_RECORDS: ((_TOPIC, _Op.DELETE),),
    ApiKey.INIT_PRODUCER_ID: (
        (_ID, _Op.WRITE),
        (_CLUSTER, _Op.IDEMPOTENT_WRITE),
        (_TOPIC, _Op.WRITE),
    ),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: ((_TOPIC, _Op.DESCRIBE),),
    ApiKey.ADD_PARTITIONS_TO_TXN: (
        (_ID, _Op.WRITE),
        (_TOPIC, _Op.WRITE),
        (_CLUSTER, _Op.CLUSTER_ACTION),
    ),
    ApiKey.ADD_OFFSETS_TO_TXN: ((_ID, _Op.WRITE), (_GROUP, _Op.READ)),
    ApiKey.END_TXN: ((_ID, _Op.WRITE),),
    ApiKey.WRITE_TXN_MARKERS: ((_CLUSTER, _Op.ALTER), (_CLUSTER, _Op.CLUSTER_ACTION)),
    ApiKey.TXN_OFFSET_COMMIT: ((_ID, _Op.WRITE), (_GROUP, _Op.READ), (_TOPIC, _Op.READ)),
    ApiKey.DESCRIBE_ACLS: ((_CLUSTER, _Op.DESCRIBE),),
    ApiKey.CREATE_ACLS: ((_CLUSTER, _Op.ALTER),),
    ApiKey.DELETE_ACLS: ((_CLUSTER, _Op.ALTER),),
    ApiKey.DESCRIBE_CONFIGS: ((_CLUSTER, _Op.DESCRIBE_CONFIGS), (_TOPIC, _Op.DESCRIBE_CONFIGS)),
    ApiKey.ALTER_CONFIGS: ((_CLUSTER, _Op.ALTER_CONFIGS), (_TOPIC, _Op.ALTER_CONFIGS)),
    ApiKey.DESCRIBE_LOG_DIRS: ((_CLUSTER, _Op.DESCRIBE),),
    ApiKey.SASL_AUTHENTICATE: (),
    ApiKey.CREATE_PARTITIONS: ((_TOPIC, _Op.ALTER),),
    ApiKey.DELETE_GROUPS: ((_GROUP, _Op.DELETE),),
    ApiKey.ELECT_LEADERS: ((_CLUSTER, _Op.ALTER),),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: ((_CLUSTER, _Op.ALTER_CONFIGS), (_TOPIC, _Op.ALTER_CONFIGS)),
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: ((_CLUSTER, _Op.ALTER),),
    ApiKey.LIST_PARTITION_REASSIGNMENTS: ((_CLUSTER, _Op.DESCRIBE),),
    ApiKey.OFFSET_DELETE: ((_GROUP, _Op.DELETE), (_TOPIC, _Op.READ)),
    ApiKey.DESCRIBE_CLIENT_QUOTAS: ((_CLUSTER, _Op.DESCRIBE_CONFIGS),),
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: ((_CLUSTER, _Op.DESCRIBE),),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: ((_CLUSTER, _Op.ALTER),),
    ApiKey.DESCRIBE_QUORUM: ((_CLUSTER, _Op.DESCRIBE),),
    ApiKey.UPDATE_FEATURES: ((_CLUSTER, _Op.ALTER),),
    ApiKey.DESCRIBE_CLUSTER: ((_CLUSTER, _Op.DESCRIBE),),
    ApiKey.DESCRIBE_PRODUCERS: ((_TOPIC, _Op.READ),),
    ApiKey.DESCRIBE_TRANSACTIONS: ((_ID, _Op.DESCRIBE), (_TOPIC, _Op.DESCRIBE)),
    ApiKey.LIST_TRANSACTIONS: ((_ID, _Op.DESCRIBE),),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: ((_TOPIC, _Op.DESCRIBE),),
}
"""What each API may need, as in "Authorization using ACLs" of Kafka's documentation: for its first
row of a kind a guard asks unless it says otherwise. What raftmq does not serve (fetches of
followers) is left out."""

audit: Final = RateLimitedLog(structlog.get_logger("raftmq.audit"), lines_max=AUDIT_LINES_MAX)


@frozen(slots=True)
class Asked:
    """One request, who asks, and what answers it."""

    broker: Broker
    context: RequestContext
    rights: Rights
    handler: Handler

    def go_on(self, request: Struct) -> Any:
        """The handler's answer, or what promises it."""
        return self.handler(self.broker, self.context, request)

    def answer(self, request: Struct) -> Work[Any]:
        """The handler's answer, waited for."""
        result = self.go_on(request)
        if isinstance(result, Generator):
            result = yield from result
        if isinstance(result, Promise):
            result = yield from value_of(result)
        return result

    def may(self, kind: Kind, name: str = CLUSTER_NAME, operation: Operation | None = None) -> bool:
        """True when the caller may do that; a refusal is counted and told to the audit log.

        Args:
            operation: one that the API needs; None: the first one that it needs on this kind.
        """
        needs = NEEDS[ApiKey(self.context.api_key)]
        wanted = next(need for on, need in needs if on is kind and operation in (None, need))
        if kind is Kind.TOPIC:
            name = self.broker.views.source_of(name)
        if self.rights.may(wanted, kind, name):
            return True
        denied(self.broker, self.context, self.rights, wanted, kind, name)
        return False

    def sees(self, topic: str) -> bool:
        """True when the caller may know that there is that topic."""
        source = self.broker.views.source_of(topic)
        return self.rights.may(Operation.DESCRIBE, Kind.TOPIC, source)


Guard: TypeAlias = Callable[[Asked, Struct], Any]


def denied(
    broker: Broker,
    context: RequestContext,
    rights: Rights,
    operation: Operation,
    kind: Kind,
    name: str,
) -> None:
    """Count a denial, and tell the audit log."""
    broker.metrics.deny(kind, operation)
    audit.warning(
        "denied",
        principal=rights.principal,
        host=rights.host,
        api=ApiKey(context.api_key).title,
        operation=str(operation),
        resource=f"{kind}:{name}",
        client_id=context.client_id,
    )
    request = ApiKey(context.api_key).title
    broker.audit.denial(context.who, request, str(operation), f"{kind}:{name}")


def guarded(handlers: Mapping[ApiKey, Handler]) -> dict[ApiKey, Handler]:
    """The handlers behind their guards."""
    return {
        api: partial(_guard, GUARDS[api], handler) if api in GUARDS else handler
        for api, handler in handlers.items()
    }


def _guard(
    guard: Guard, handler: Handler, broker: Broker, context: RequestContext, request: Struct
) -> Any:
    return guard(Asked(broker, context, rights_of(broker, context), handler), request)


def rights_of(broker: Broker, context: RequestContext) -> Rights:
    assert broker.authorizer is not None, "there are guards only where rights are asked for"
    return broker.authorizer.rights_of(context.principal, context.host)


# ---- the cluster as a whole ----


def _of_cluster(refusal: Callable[[Asked, Struct], Any]) -> Guard:
    """Of an API that needs a right on the cluster, and nothing else."""

    def guard(asked: Asked, request: Struct) -> Any:
        return asked.go_on(request) if asked.may(_CLUSTER) else refusal(asked, request)

    return guard


def _coded(code: ErrorCode) -> Callable[[Asked, Struct], Any]:
    """A refusal that is one code."""
    return lambda _asked, _request: Struct(error_code=code)


def _explained(_asked: Asked, _request: Struct) -> Struct:
    return Struct(error_code=NO_CLUSTER, error_message=_MESSAGE)


def _no_quotas(asked: Asked, request: Struct) -> Struct:
    return Struct(**_explained(asked, request).__dict__, entries=None)


def _explained_from(first: int) -> Callable[[Asked, Struct], Struct]:
    """A refusal with a message, in the versions from `first` on."""

    def refusal(asked: Asked, request: Struct) -> Struct:
        if asked.context.api_version >= first:
            return _explained(asked, request)
        return Struct(error_code=NO_CLUSTER)

    return refusal


def _no_log_dirs(asked: Asked, _request: Struct) -> Struct:
    has_code = asked.context.api_version >= 3
    return Struct(error_code=NO_CLUSTER) if has_code else Struct(results=[])


def _no_election(asked: Asked, request: Struct) -> Struct:
    if asked.context.api_version >= 1:
        return Struct(error_code=NO_CLUSTER, replica_election_results=[])
    rows = []
    for topic in request.topic_partitions or ():
        parts = [Struct(partition_id=n, error_code=NO_CLUSTER) for n in topic.partitions]
        rows.append(Struct(topic=topic.topic, partition_result=parts))
    return Struct(replica_election_results=rows)


def _markers(asked: Asked, request: Struct) -> Any:
    action = Operation.CLUSTER_ACTION
    if asked.rights.may(action, _CLUSTER, CLUSTER_NAME) or asked.may(_CLUSTER):
        return asked.go_on(request)
    markers = []
    for marker in request.markers:
        topics = [
            Struct(
                name=topic.name,
                partitions=[
                    Struct(partition_index=index, error_code=NO_CLUSTER)
                    for index in topic.partition_indexes
                ],
            )
            for topic in marker.topics
        ]
        markers.append(Struct(producer_id=marker.producer_id, topics=topics))
    return Struct(markers=markers)


def _created_acls(_asked: Asked, request: Struct) -> Struct:
    row = Struct(error_code=NO_CLUSTER, error_message=_MESSAGE)
    return Struct(results=[row] * len(request.creations))


def _deleted_acls(_asked: Asked, request: Struct) -> Struct:
    row = Struct(error_code=NO_CLUSTER, error_message=_MESSAGE, matching_acls=[])
    return Struct(filter_results=[row] * len(request.filters))


def _altered_no_users(_asked: Asked, request: Struct) -> Work[Struct]:
    names = dict.fromkeys(one.name for one in (*request.deletions, *request.upsertions))
    code = NO_CLUSTER
    rows = yield from in_turns(
        names, lambda name: Struct(user=name, error_code=code, error_message=_MESSAGE)
    )
    return Struct(results=rows)


# ---- topics and their partitions ----


def _parted(rows: Iterable[T], is_allowed: Callable[[T], bool]) -> Work[tuple[list[T], list[T]]]:
    """The rows that are allowed, and the others; in turns."""
    allowed: list[T] = []
    refused: list[T] = []
    for count, row in enumerate(rows, 1):
        (allowed if is_allowed(row) else refused).append(row)
        if count % CHECKS_PER_TURN == 0:
            yield None
    return allowed, refused


def _split(
    asked: Asked, rows: Sequence[Any], name: str = "name"
) -> Work[tuple[list[Any], list[Any]]]:
    """The rows whose topic the caller may use, and the others."""
    return (yield from _parted(rows, lambda row: asked.may(_TOPIC, getattr(row, name))))


def _of_partitions(
    partitions: str, refused_row: Callable[[Any], dict[str, Any]], name: str = "name"
) -> Guard:
    """Of an API that names topics with partitions, and answers in the same shape.

    Args:
        partitions: the field of a topic with its partitions, in requests.
        refused_row: the answer about one of them.
        name: the field with the topic's name.
    """

    def guard(asked: Asked, request: Struct) -> Work[Any]:
        request.topics, refused = yield from _split(asked, request.topics, name)
        answer = yield from asked.answer(request)
        for count, topic in enumerate(refused, 1):
            rows = [
                {"error_code": NO_TOPIC, **refused_row(row)} for row in getattr(topic, partitions)
            ]
            answer["topics"].append({name: getattr(topic, name), "partitions": rows})
            if count % CHECKS_PER_TURN == 0:
                yield None
        return answer

    return guard


def _may_use_others(asked: Asked, topic: Struct) -> bool:
    """True when the caller may do to other topics what a new one is to do."""
    return all(
        asked.may(_TOPIC, one.value.strip(), BEHIND[one.name])
        for one in topic.configs or ()
        if one.name in BEHIND and one.value
    )


def _create_topics(asked: Asked, request: Struct) -> Work[Any]:
    may_create = asked.rights.may(Operation.CREATE, _CLUSTER, CLUSTER_NAME)
    request.topics, refused = yield from _parted(
        request.topics,
        lambda topic: (
            (may_create or asked.may(_TOPIC, topic.name, Operation.CREATE))
            and _may_use_others(asked, topic)
        ),
    )
    answer = yield from asked.answer(request)
    for count, row in enumerate(answer["topics"], 1):
        if row["configs"] and not asked.may(_TOPIC, row["name"], Operation.DESCRIBE_CONFIGS):
            unknown = {"configs": None, "num_partitions": -1, "replication_factor": -1}
            row.update(unknown, topic_config_error_code=int(NO_TOPIC))
        if count % CHECKS_PER_TURN == 0:
            yield None
    named: dict[str, None] = dict.fromkeys(topic.name for topic in refused)
    answer["topics"] += [
        {"name": name, "error_code": NO_TOPIC, "error_message": _MESSAGE} for name in named
    ]
    return answer


def _delete_topics(asked: Asked, request: Struct) -> Work[Any]:
    is_structured = asked.context.api_version >= 6
    refused: dict[object, dict[str, Any]] = {}
    allowed: list[Any] = []
    wanted: Sequence[Any] = request.topics if is_structured else request.topic_names
    for count, one in enumerate(wanted, 1):
        if count % CHECKS_PER_TURN == 0:
            yield None
        name, topic_id = (one.name, one.topic_id) if is_structured else (one, None)
        if name is None:
            # One that only the controller knows so far is unknown: nobody can say whose it is.
            known = None if topic_id is None else _name_of(asked.broker, topic_id)
            if known is not None and asked.may(_TOPIC, known):
                allowed.append(one)
                continue
            row: dict[str, Any] = {"name": None, "error_code": ErrorCode.UNKNOWN_TOPIC_ID}
            if known is not None and asked.sees(known):
                row = {"name": known, "error_code": NO_TOPIC, "error_message": _MESSAGE}
            refused[topic_id] = {**row, "topic_id": topic_id}
        elif asked.may(_TOPIC, name):
            allowed.append(one)
        else:
            refused[name] = {"name": name, "error_code": NO_TOPIC, "error_message": _MESSAGE}
    if is_structured:
        request.topics = allowed
    else:
        request.topic_names = allowed
    answer = yield from asked.answer(request)
    answer["responses"] += refused.values()
    return answer


def _create_partitions(asked: Asked, request: Struct) -> Work[Any]:
    request.topics, refused = yield from _split(asked, request.topics)
    answer = yield from asked.answer(request)
    row = {"error_code": NO_TOPIC, "error_message": _MESSAGE}
    answer["results"] += [{"name": topic.name, **row} for topic in refused]
    return answer


def _of_configs(results: str) -> Guard:
    """Of an API about the configs of topics and brokers."""

    def guard(asked: Asked, request: Struct) -> Work[Any]:
        allowed: list[Any] = []
        refused: dict[tuple[int, str], dict[str, Any]] = {}
        for count, one in enumerate(request.resources, 1):
            if count % CHECKS_PER_TURN == 0:
                yield None
            is_topic = one.resource_type != BROKER_RESOURCE
            kind, name = (_TOPIC, one.resource_name) if is_topic else (_CLUSTER, CLUSTER_NAME)
            if asked.may(kind, name):
                allowed.append(one)
                continue
            refused[one.resource_type, one.resource_name] = {
                "error_code": _CODES[kind],
                "error_message": _MESSAGE,
                "resource_type": one.resource_type,
                "resource_name": one.resource_name,
            }
        request.resources = allowed
        answer = yield from asked.answer(request)
        answer[results] += refused.values()
        return answer

    return guard


# ---- what clients ask first ----


def _metadata(asked: Asked, request: Struct) -> Any:
    version = asked.context.api_version
    broker, rights = asked.broker, asked.rights
    is_all = metadata.names_all(version, request)
    refused: list[metadata.Refused] = []
    if is_all:
        seen = [name for name in _all_names(broker) if asked.sees(name)]
        request.topics = [Struct(name=name, topic_id=None) for name in seen]
    else:
        wanted, request.topics = request.topics, []
        may_create = metadata.may_create(broker, version, request)
        for one in wanted:
            code = _metadata_refusal(asked, one.name, one.topic_id, may_create=may_create)
            if code is ErrorCode.NONE:
                request.topics.append(one)
            else:
                name = one.name
                if one.topic_id is not None:
                    name = None if version >= 12 else ""
                refused.append((code, name, one.topic_id))
    with_operations = (
        request.include_cluster_authorized_operations,
        request.include_topic_authorized_operations,
    )
    scope = Scope(
        refused=tuple(refused),
        may_create=not is_all,
        cluster_operations=_cluster_operations(rights) if with_operations[0] else 0,
        topic_operations=topic_operations(rights) if with_operations[1] else None,
        viewer=(rights.principal, rights.host) if any(with_operations) else None,
    )
    return metadata.handle(broker, asked.context, request, scope)


def _all_names(broker: Broker) -> list[str]:
    """What a list of all topics has."""
    names = [topic.name for topic in broker.image.topics_by_id()]
    return sorted([*names, *(view.image.name for view in broker.views.listed())])


def _name_of(broker: Broker, topic_id: UUID) -> str | None:
    """The name of the topic, or of the view, of an id."""
    topic = broker.image.topic_by_id(TopicId(topic_id))
    if topic is not None:
        return topic.name
    view = broker.views.find(None, topic_id)
    return None if view is None else view.image.name


def _metadata_refusal(
    asked: Asked, name: str | None, topic_id: UUID | None, *, may_create: bool
) -> ErrorCode:
    """Why a caller is told nothing of a topic that it names; NONE where it is told."""
    if topic_id is not None:
        known = _name_of(asked.broker, topic_id)
        if known is not None and not asked.may(_TOPIC, known):
            return ErrorCode.UNKNOWN_TOPIC_ID
        return ErrorCode.NONE
    if name is None:
        return ErrorCode.NONE  # which the handler refuses
    if not asked.may(_TOPIC, name):
        return NO_TOPIC
    views = asked.broker.views
    is_missing = may_create and name not in asked.broker.image.topics
    is_missing = is_missing and not views.is_reserved(name)
    if is_missing and not asked.rights.may(Operation.CREATE, _CLUSTER, CLUSTER_NAME):
        return ErrorCode.NONE if asked.may(_TOPIC, name, Operation.CREATE) else NO_TOPIC
    return ErrorCode.NONE


def topic_operations(rights: Rights) -> Callable[[str], int]:
    """What a caller may do with each topic, by its name."""
    return lambda name: rights.mask(_TOPIC, name) & TOPIC_OPERATIONS


def _cluster_operations(rights: Rights) -> int:
    """What a caller may do with the cluster; nothing is told to whoever may not Describe it."""
    mask = rights.mask(_CLUSTER, CLUSTER_NAME)
    return mask & CLUSTER_OPERATIONS if mask & BIT[Operation.DESCRIBE] else 0


def _describe_topic_partitions(asked: Asked, request: Struct) -> Work[Any]:
    broker = asked.broker
    refused: list[str] = []
    if request.topics:
        request.topics, unseen = yield from _split(asked, request.topics)
        refused = [topic.name for topic in unseen] if request.cursor is None else []
    else:
        names = _all_names(broker)
        request.topics = [Struct(name=name) for name in names if asked.sees(name)]
    answer: Any = {"topics": [], "next_cursor": None}
    if request.topics:  # none would mean all
        answer = yield from asked.answer(request)
    operations = topic_operations(asked.rights)
    for row in answer["topics"]:
        if row["error_code"] == ErrorCode.NONE:
            judged_as = broker.views.source_of(row["name"])
            row["topic_authorized_operations"] = operations(judged_as)
    answer["topics"] += [
        {"error_code": NO_TOPIC, "name": name, "partitions": []} for name in dict.fromkeys(refused)
    ]
    return answer


def _describe_cluster(asked: Asked, request: Struct) -> Any:
    answer = asked.go_on(request)
    if request.include_cluster_authorized_operations:
        answer["cluster_authorized_operations"] = _cluster_operations(asked.rights)
    return answer


# ---- groups ----


def _of_group(asked: Asked, request: Struct) -> Any:
    """Of a member's requests."""
    if asked.may(_GROUP, request.group_id):
        return asked.go_on(request)
    return Struct(error_code=NO_GROUP, **_NO_MEMBER.get(ApiKey(asked.context.api_key), {}))


_NO_MEMBER: Final[dict[ApiKey, dict[str, Any]]] = {
    ApiKey.JOIN_GROUP: {
        "generation_id": -1,
        "protocol_name": "",
        "leader": "",
        "member_id": "",
        "members": [],
    },
    ApiKey.SYNC_GROUP: {"protocol_name": "", "assignment": b""},
}


def _find_coordinator(asked: Asked, request: Struct) -> Work[Any]:
    kind = {0: _GROUP, 1: _ID}.get(request.key_type)
    if kind is None:
        return (yield from asked.answer(request))
    code = _CODES[kind]
    if asked.context.api_version < 4:
        if asked.may(kind, request.key):
            return (yield from asked.answer(request))
        return Struct(error_code=code, error_message=_MESSAGE, node_id=-1, host="", port=-1)
    request.coordinator_keys, refused = yield from _parted(
        request.coordinator_keys, lambda key: asked.may(kind, key)
    )
    answer = yield from asked.answer(request)
    answer.coordinators += [
        Struct(key=key, error_code=code, error_message=_MESSAGE, node_id=-1, host="", port=-1)
        for key in dict.fromkeys(refused)
    ]
    return answer


def _offset_commit(asked: Asked, request: Struct) -> Work[Any]:
    code = ErrorCode.NONE
    if asked.context.api_key == ApiKey.TXN_OFFSET_COMMIT and not asked.may(
        _ID, request.transactional_id
    ):
        code = NO_ID
    elif not asked.may(_GROUP, request.group_id):
        code = NO_GROUP
    if code is not ErrorCode.NONE:
        return Struct(topics=(yield from _same_code(request.topics, code)))
    request.topics, refused = yield from _split(asked, request.topics)
    if refused and not request.topics:
        return Struct(topics=(yield from _same_code(refused, NO_TOPIC)))
    answer = yield from asked.answer(request)
    answer.topics += yield from _same_code(refused, NO_TOPIC)
    return answer


def _same_code(topics: Topics, code: ErrorCode) -> Work[list[Struct]]:
    codes = {
        (topic.name, row.partition_index): code for topic in topics for row in topic.partitions
    }
    return (yield from per_partition(topics, codes))


def _offset_fetch(asked: Asked, request: Struct) -> Work[Any]:
    version = asked.context.api_version
    if version < 8:
        if not asked.may(_GROUP, request.group_id):
            return _no_offsets(version, request)
        refused = yield from _without_unseen(asked, request)
        answer = yield from asked.answer(request)
        answer.topics = _seen_offsets(asked, answer.topics) + refused
        return answer
    allowed, groups = [], []
    held: dict[str, list[Struct]] = {}
    for count, group in enumerate(request.groups, 1):
        if count % CHECKS_PER_TURN == 0:
            yield None
        if asked.may(_GROUP, group.group_id):
            held[group.group_id] = yield from _without_unseen(asked, group)
            allowed.append(group)
        else:
            groups.append(Struct(group_id=group.group_id, topics=[], error_code=NO_GROUP))
    request.groups = allowed
    answer = yield from asked.answer(request)
    for group in answer.groups:
        group.topics = _seen_offsets(asked, group.topics) + held[group.group_id]
    answer.groups += groups
    return answer


def _no_offsets(version: int, request: Struct) -> Struct:
    topics = []
    if version < 2:  # which has no place for one code of all
        topics = [_refused_offsets(topic, NO_GROUP) for topic in request.topics]
    return Struct(topics=topics, error_code=NO_GROUP)


def _without_unseen(asked: Asked, request: Struct) -> Work[list[Struct]]:
    """Take topics out of what is asked of one group; gives the rows about them."""
    if request.topics is None:
        return []
    request.topics, refused = yield from _split(asked, request.topics)
    return [_refused_offsets(topic, NO_TOPIC) for topic in refused]


def _refused_offsets(topic: Struct, code: ErrorCode) -> Struct:
    rows = [
        Struct(
            partition_index=index,
            committed_offset=-1,
            committed_leader_epoch=-1,
            metadata="",
            error_code=code,
        )
        for index in topic.partition_indexes
    ]
    return Struct(name=topic.name, partitions=rows)


def _seen_offsets(asked: Asked, topics: Iterable[Struct]) -> list[Struct]:
    """Of all offsets of a group those whose topics the caller may know."""
    return [topic for topic in topics if asked.sees(topic.name)]


def _offset_delete(asked: Asked, request: Struct) -> Work[Any]:
    if not asked.may(_GROUP, request.group_id):
        return Struct(error_code=NO_GROUP, topics=[])
    request.topics, refused = yield from _split(asked, request.topics)
    answer = yield from asked.answer(request)
    if answer.error_code == ErrorCode.NONE:
        answer.topics += yield from _same_code(refused, NO_TOPIC)
    return answer


def _describe_groups(asked: Asked, request: Struct) -> Work[Any]:
    request.groups, refused = yield from _split_groups(asked, request.groups)
    answer = yield from asked.answer(request)
    if request.include_authorized_operations:
        for row in answer.groups:
            mask = asked.rights.mask(_GROUP, row.group_id)
            row.authorized_operations = mask & GROUP_OPERATIONS
    answer.groups += [
        Struct(
            error_code=NO_GROUP,
            error_message=_MESSAGE,
            group_id=name,
            group_state="",
            protocol_type="",
            protocol_data="",
            members=[],
        )
        for name in refused
    ]
    return answer


def _split_groups(asked: Asked, names: Sequence[str]) -> Work[tuple[list[str], list[str]]]:
    return (yield from _parted(dict.fromkeys(names), lambda name: asked.may(_GROUP, name)))


def _list_groups(asked: Asked, request: Struct) -> Work[Any]:
    answer = yield from asked.answer(request)
    rights = asked.rights
    if not rights.may(Operation.DESCRIBE, _CLUSTER, CLUSTER_NAME):
        answer.groups, _ = yield from _parted(
            answer.groups, lambda row: rights.may(Operation.DESCRIBE, _GROUP, row.group_id)
        )
    return answer


def _delete_groups(asked: Asked, request: Struct) -> Work[Any]:
    request.groups_names, refused = yield from _split_groups(asked, request.groups_names)
    answer = yield from asked.answer(request)
    answer.results += [Struct(group_id=name, error_code=NO_GROUP) for name in refused]
    return answer


# ---- producers and transactions ----


def _init_producer_id(asked: Asked, request: Struct) -> Any:
    rights, code = asked.rights, NO_CLUSTER
    if request.transactional_id is not None:
        code = ErrorCode.NONE if asked.may(_ID, request.transactional_id) else NO_ID
    elif rights.may_somewhere(Operation.WRITE, _TOPIC) or asked.may(_CLUSTER):
        code = ErrorCode.NONE
    if code is ErrorCode.NONE:
        return asked.go_on(request)
    return Struct(error_code=code, producer_id=-1, producer_epoch=-1)


def _add_partitions(asked: Asked, request: Struct) -> Work[Any]:
    if asked.context.api_version >= 4:
        if asked.may(_CLUSTER):
            return (yield from asked.answer(request))
        return Struct(error_code=NO_CLUSTER, results_by_transaction=[])
    topics = request.v3_and_below_topics
    allowed, refused = topics, []
    codes = {False: NO_TOPIC, True: ErrorCode.OPERATION_NOT_ATTEMPTED}
    if not asked.may(_ID, request.v3_and_below_transactional_id):
        codes = {True: NO_ID}
        refused = topics
    else:
        allowed, refused = yield from _split(asked, topics)
    if not refused:
        return (yield from asked.answer(request))
    is_allowed = {topic.name: True for topic in allowed}
    rows = []
    for count, topic in enumerate(topics, 1):
        code = codes[is_allowed.get(topic.name, False)]
        parts = [Struct(partition_index=n, partition_error_code=code) for n in topic.partitions]
        rows.append(Struct(name=topic.name, results_by_partition=parts))
        if count % CHECKS_PER_TURN == 0:
            yield None
    return Struct(results_by_topic_v3_and_below=rows)


def _add_offsets(asked: Asked, request: Struct) -> Any:
    if not asked.may(_ID, request.transactional_id):
        return Struct(error_code=NO_ID)
    if not asked.may(_GROUP, request.group_id):
        return Struct(error_code=NO_GROUP)
    return asked.go_on(request)


def _end_txn(asked: Asked, request: Struct) -> Any:
    is_allowed = asked.may(_ID, request.transactional_id)
    return asked.go_on(request) if is_allowed else Struct(error_code=NO_ID)


def _describe_transactions(asked: Asked, request: Struct) -> Work[Any]:
    request.transactional_ids, refused = yield from _parted(
        dict.fromkeys(request.transactional_ids), lambda name: asked.may(_ID, name)
    )
    answer = yield from asked.answer(request)
    for state in answer.transaction_states:
        state.topics = [topic for topic in state.topics if asked.sees(topic.topic)]
    answer.transaction_states += [
        Struct(error_code=NO_ID, transactional_id=name, transaction_state="") for name in refused
    ]
    return answer


def _list_transactions(asked: Asked, request: Struct) -> Work[Any]:
    answer = yield from asked.answer(request)
    may = asked.rights.may
    answer.transaction_states, _ = yield from _parted(
        answer.transaction_states, lambda row: may(Operation.DESCRIBE, _ID, row.transactional_id)
    )
    return answer


GUARDS: Final[dict[ApiKey, Guard]] = {
    ApiKey.LIST_OFFSETS: _of_partitions(
        "partitions",
        lambda row: {
            "partition_index": row.partition_index,
            "timestamp": -1,
            "offset": -1,
            "leader_epoch": -1,
        },
    ),
    ApiKey.METADATA: _metadata,
    ApiKey.OFFSET_COMMIT: _offset_commit,
    ApiKey.OFFSET_FETCH: _offset_fetch,
    ApiKey.FIND_COORDINATOR: _find_coordinator,
    ApiKey.JOIN_GROUP: _of_group,
    ApiKey.HEARTBEAT: _of_group,
    ApiKey.LEAVE_GROUP: _of_group,
    ApiKey.SYNC_GROUP: _of_group,
    ApiKey.DESCRIBE_GROUPS: _describe_groups,
    ApiKey.LIST_GROUPS: _list_groups,
    ApiKey.CREATE_TOPICS: _create_topics,
    ApiKey.DELETE_TOPICS: _delete_topics,
    ApiKey.DELETE_RECORDS: _of_partitions(
        "partitions", lambda row: {"partition_index": row.partition_index, "low_watermark": -1}
    ),
    ApiKey.INIT_PRODUCER_ID: _init_producer_id,
    ApiKey.OFFSET_FOR_LEADER_EPOCH: _of_partitions(
        "partitions",
        lambda row: {"partition": row.partition, "leader_epoch": -1, "end_offset": -1},
        name="topic",
    ),
    ApiKey.ADD_PARTITIONS_TO_TXN: _add_partitions,
    ApiKey.ADD_OFFSETS_TO_TXN: _add_offsets,
    ApiKey.END_TXN: _end_txn,
    ApiKey.WRITE_TXN_MARKERS: _markers,
    ApiKey.TXN_OFFSET_COMMIT: _offset_commit,
    ApiKey.DESCRIBE_ACLS: _of_cluster(_explained),
    ApiKey.CREATE_ACLS: _of_cluster(_created_acls),
    ApiKey.DELETE_ACLS: _of_cluster(_deleted_acls),
    ApiKey.DESCRIBE_CONFIGS: _of_configs("results"),
    ApiKey.ALTER_CONFIGS: _of_configs("responses"),
    ApiKey.DESCRIBE_LOG_DIRS: _of_cluster(_no_log_dirs),
    ApiKey.CREATE_PARTITIONS: _create_partitions,
    ApiKey.DELETE_GROUPS: _delete_groups,
    ApiKey.ELECT_LEADERS: _of_cluster(_no_election),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: _of_configs("responses"),
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: _of_cluster(_explained),
    ApiKey.LIST_PARTITION_REASSIGNMENTS: _of_cluster(_explained),
    ApiKey.OFFSET_DELETE: _offset_delete,
    ApiKey.DESCRIBE_CLIENT_QUOTAS: _of_cluster(_no_quotas),
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: _of_cluster(_explained),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: _of_cluster(_altered_no_users),
    ApiKey.DESCRIBE_QUORUM: _of_cluster(_explained_from(2)),
    ApiKey.UPDATE_FEATURES: _of_cluster(_explained),
    ApiKey.DESCRIBE_CLUSTER: _describe_cluster,
    ApiKey.DESCRIBE_PRODUCERS: _of_partitions(
        "partition_indexes",
        lambda index: {"partition_index": index, "error_message": _MESSAGE, "active_producers": []},
    ),
    ApiKey.DESCRIBE_TRANSACTIONS: _describe_transactions,
    ApiKey.LIST_TRANSACTIONS: _list_transactions,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: _describe_topic_partitions,
}
"""Produce and Fetch have theirs in `record_guards.py`; ApiVersions and those of SASL need none."""
