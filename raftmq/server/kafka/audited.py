"""What requests change the cluster, and the line of the audit file that each of them leaves.

An audited request is read before its handler (and its guard, which takes out what is not allowed)
sees it, and told once it is answered: each thing that it is about, with what it says of it and the
code that the answer gives. So a line tells of what was refused, too. Where no audit file is kept
none of this is there, and nothing costs anything.

Invariants: every announced API stands in `CHANGES`, `SOMETIMES` or `NO_CHANGES`; a value of a
setting is written only where the setting is known and its value harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from attrs import frozen

from raftmq.errors import ErrorCode
from raftmq.metadata.config_keys import BROKER_KEYS, TOPIC_KEYS
from raftmq.metadata.image import MetadataImage
from raftmq.promise import Promise
from raftmq.protocol import ApiKey, Struct
from raftmq.rights import (
    CODE_ANY,
    CODE_MATCH,
    KIND_CODES,
    OPERATION_CODES,
    PATTERN_CODES,
    PERMISSION_CODES,
)
from raftmq.sasl.scram import SCRAM_BY_NUMBER
from raftmq.server.audit import (
    ROWS_PER_LINE,
    UNKNOWN_CODE,
    Audit,
    AuditOutcome,
    AuditRow,
    outcome_of,
)
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import TURN_PARTITIONS, Work, value_of
from raftmq.types import TopicId

Handler: TypeAlias = Callable[[Broker, RequestContext, Struct], Any]
Key: TypeAlias = object
"""By which a part of a request is found in its answer."""
Part: TypeAlias = tuple[Key, str, str]
"""Key, resource, and what is said of it."""

IsChange: TypeAlias = Callable[[MetadataImage, Struct], bool]
"""Whether a request is an operator's, of an API that clients use all day."""

PARTS_MAX: Final = 10_000
"""Of one request; what is beyond is counted."""
_SETS: Final = ("set", "delete", "append", "subtract")
_CLUSTER: Final = "cluster"
_MASKED: Final = "***"


@frozen(slots=True)
class Change:
    """How one API is read.

    Attributes:
        parts: what a request is about.
        codes: what its answer says of each part.
        flag: the field of a request which says that nothing is to be changed; "": there is none.
    """

    parts: Callable[[MetadataImage, Struct], Iterator[Part]]
    codes: Callable[[Any], Iterator[tuple[Key, int]]]
    flag: str = ""


def audited(audit: Audit, handlers: Mapping[ApiKey, Handler]) -> dict[ApiKey, Handler]:
    """The handlers, with a line for each request that changes something; where none is kept, as
    they are."""
    if not audit.is_kept:
        return dict(handlers)
    return {api: _watched(audit, api, handler) for api, handler in handlers.items()}


def _watched(audit: Audit, api: ApiKey, handler: Handler) -> Handler:
    if api in CHANGES:
        return partial(_audited, audit, CHANGES[api], handler)
    if api in SOMETIMES:
        is_change, change = SOMETIMES[api]
        told = partial(_audited, audit, change, handler)
        return partial(_audited_if, is_change, told, handler)
    return handler


def _audited_if(
    is_change: IsChange,
    told: Handler,
    handler: Handler,
    broker: Broker,
    context: RequestContext,
    request: Struct,
) -> Any:
    chosen = told if is_change(broker.image, request) else handler
    return chosen(broker, context, request)


def _audited(
    audit: Audit,
    change: Change,
    handler: Handler,
    broker: Broker,
    context: RequestContext,
    request: Struct,
) -> Work[Any]:
    parts: list[Part] = []
    left = 0
    for count, part in enumerate(change.parts(broker.image, request), 1):
        if count > PARTS_MAX:
            left += 1
        else:
            parts.append(part)
        if count % TURN_PARTITIONS == 0:
            yield None
    is_dry_run = bool(change.flag and getattr(request, change.flag, False))
    tell = partial(_tell, audit, context, is_dry_run=is_dry_run, left=left)
    try:
        answer = handler(broker, context, request)
        if isinstance(answer, Generator):
            answer = yield from answer
        if isinstance(answer, Promise):
            answer = yield from value_of(answer)
    except Exception as error:
        rows = [AuditRow(what, said, UNKNOWN_CODE) for _, what, said in parts[:ROWS_PER_LINE]]
        tell(rows, 1, 1, AuditOutcome.UNKNOWN, why=type(error).__name__)
        raise
    found: dict[Key, int] = {}
    for count, (key, code) in enumerate(change.codes(answer), 1):
        found.setdefault(key, code)
        if count % TURN_PARTITIONS == 0:
            yield None
    whole = _get(answer, "error_code", None)
    outcome = outcome_of({_name(found.get(key, whole)) for key, _, _ in parts} or {_name(whole)})
    lines = max(1, -(-len(parts) // ROWS_PER_LINE))
    for number in range(lines):
        some = parts[number * ROWS_PER_LINE : (number + 1) * ROWS_PER_LINE]
        rows = [AuditRow(what, said, _name(found.get(key, whole))) for key, what, said in some]
        tell(rows, number + 1, lines, outcome)
        if number + 1 < lines:
            yield None
    return answer


def _tell(
    audit: Audit,
    context: RequestContext,
    rows: Sequence[AuditRow],
    number: int,
    lines: int,
    outcome: AuditOutcome,
    *,
    is_dry_run: bool,
    left: int,
    why: str | None = None,
) -> None:
    if left and number == lines:
        why = f"{left} more are left out"
    audit.administration(
        context.who,
        ApiKey(context.api_key).title,
        outcome,
        rows,
        part=(number, lines),
        is_dry_run=is_dry_run,
        why=why,
    )


def _name(code: int | None) -> str:
    if code is None:
        return UNKNOWN_CODE
    try:
        return ErrorCode(code).name
    except ValueError:
        return UNKNOWN_CODE


def _get(row: Any, field: str, otherwise: Any = ()) -> Any:
    """A field of an answer, or of a part of it, in whichever of the two shapes it is."""
    if isinstance(row, Mapping):
        return row.get(field, otherwise)
    return getattr(row, field, otherwise)


# ---- what requests say ----


def _settings(configs: Iterable[tuple[str, str | None, str]]) -> str:
    words = []
    for name, value, how in configs:
        key = TOPIC_KEYS.get(name) or BROKER_KEYS.get(name)
        shown = value if key is not None and not key.is_sensitive else _MASKED
        words.append(f"{how} {name}" if value is None else f"{how} {name}={shown}")
    return ", ".join(words)


def _created(_image: MetadataImage, request: Struct) -> Iterator[Part]:
    for topic in request.topics:
        said = f"partitions={topic.num_partitions} replicas={topic.replication_factor}"
        settings = _settings((one.name, one.value, "set") for one in topic.configs or ())
        yield topic.name, f"topic:{topic.name}", f"{said} {settings}".strip()


def _deleted(image: MetadataImage, request: Struct) -> Iterator[Part]:
    for name in getattr(request, "topic_names", None) or ():
        yield name, f"topic:{name}", ""
    for one in getattr(request, "topics", None) or ():
        if one.name is not None:
            yield one.name, f"topic:{one.name}", ""
            continue
        topic = None if one.topic_id is None else image.topic_by_id(TopicId(one.topic_id))
        named = f"topic-id:{one.topic_id}" if topic is None else f"topic:{topic.name}"
        yield one.topic_id, named, f"id {one.topic_id}"


def _deletion_codes(answer: Any) -> Iterator[tuple[Key, int]]:
    for row in _get(answer, "responses"):
        for field in ("name", "topic_id"):
            if (key := _get(row, field, None)) is not None:
                yield key, _get(row, "error_code")


def _records(_image: MetadataImage, request: Struct) -> Iterator[Part]:
    for topic in request.topics:
        for row in topic.partitions:
            key = topic.name, row.partition_index
            yield key, f"partition:{topic.name}-{key[1]}", f"before offset {row.offset}"


def _counts(_image: MetadataImage, request: Struct) -> Iterator[Part]:
    for topic in request.topics:
        yield topic.name, f"topic:{topic.name}", f"partitions={topic.count}"


def _resources(_image: MetadataImage, request: Struct) -> Iterator[Part]:
    kinds = {2: "topic", 4: "broker"}
    for one in request.resources:
        kind = kinds.get(one.resource_type, f"resource-type-{one.resource_type}")
        named = f"{kind}:{one.resource_name}" if one.resource_name else _CLUSTER
        said = _settings(
            (row.name, row.value, _how(getattr(row, "config_operation", 0))) for row in one.configs
        )
        yield (one.resource_type, one.resource_name), named, said


def _how(number: int) -> str:
    return _SETS[number] if 0 <= number < len(_SETS) else f"operation {number}"


def _resource_codes(answer: Any) -> Iterator[tuple[Key, int]]:
    for row in _get(answer, "responses"):
        key = _get(row, "resource_type"), _get(row, "resource_name")
        yield key, _get(row, "error_code")


_WORDS: Final = {
    "kind": {code: str(word) for word, code in KIND_CODES.items()},
    "pattern": {code: str(word) for word, code in PATTERN_CODES.items()},
    "operation": {code: str(word) for word, code in OPERATION_CODES.items()},
    "permission": {code: str(word) for word, code in PERMISSION_CODES.items()},
}


def _word(what: str, code: int) -> str:
    if code == CODE_ANY:
        return "any"
    if what == "pattern" and code == CODE_MATCH:
        return "match"
    return _WORDS[what].get(code, f"{what} {code}")


def _rules(_image: MetadataImage, request: Struct) -> Iterator[Part]:
    for place, one in enumerate(request.creations):
        named = f"{_word('kind', one.resource_type)}:{one.resource_name}"
        pattern = _word("pattern", one.resource_pattern_type)
        what = f"{_word('permission', one.permission_type)} {_word('operation', one.operation)}"
        yield place, named, f"{pattern} {what} to {one.principal} from {one.host}"


def _filters(_image: MetadataImage, request: Struct) -> Iterator[Part]:
    for place, one in enumerate(request.filters):
        named = f"{_word('kind', one.resource_type_filter)}:{one.resource_name_filter}"
        pattern = _word("pattern", one.pattern_type_filter)
        what = f"{_word('permission', one.permission_type)} {_word('operation', one.operation)}"
        whom = f"of {one.principal_filter} from {one.host_filter}"
        yield place, named, f"{pattern} {what} {whom}"


def _codes_in_order(field: str) -> Callable[[Any], Iterator[tuple[Key, int]]]:
    def codes(answer: Any) -> Iterator[tuple[Key, int]]:
        for place, row in enumerate(_get(answer, field)):
            yield place, _get(row, "error_code")

    return codes


def _users(_image: MetadataImage, request: Struct) -> Iterator[Part]:
    for one in request.deletions:
        yield one.name, f"user:{one.name}", f"delete {_mechanism(one.mechanism)}"
    for one in request.upsertions:
        said = f"set {_mechanism(one.mechanism)} iterations={one.iterations}"
        yield one.name, f"user:{one.name}", said


def _mechanism(number: int) -> str:
    known = SCRAM_BY_NUMBER.get(number)
    return f"mechanism {number}" if known is None else known.name


def _groups(_image: MetadataImage, request: Struct) -> Iterator[Part]:
    for name in request.groups_names:
        yield name, f"group:{name}", ""


def _offsets(_image: MetadataImage, request: Struct) -> Iterator[Part]:
    for topic in request.topics:
        for row in topic.partitions:
            key = topic.name, row.partition_index
            yield key, f"group:{request.group_id}", f"offset of {topic.name}-{row.partition_index}"


def _moves_offsets(image: MetadataImage, request: Struct) -> bool:
    """True of a commit for a group of members by somebody who is none: that moves what they have
    read. Who assigns partitions to itself commits so, too, but to groups without members."""
    if request.member_id or request.generation_id_or_member_epoch >= 0:
        return False
    group = image.groups.get(request.group_id)
    return group is not None and bool(group.protocol_type)


def _moved_offsets(_image: MetadataImage, request: Struct) -> Iterator[Part]:
    for topic in request.topics:
        for row in topic.partitions:
            key = topic.name, row.partition_index
            said = f"offset of {topic.name}-{row.partition_index} to {row.committed_offset}"
            yield key, f"group:{request.group_id}", said


def _elections(_image: MetadataImage, request: Struct) -> Iterator[Part]:
    if request.topic_partitions is None:
        yield None, _CLUSTER, "leaders of all partitions"
        return
    for topic in request.topic_partitions:
        for index in topic.partitions:
            yield (topic.topic, index), f"partition:{topic.topic}-{index}", ""


def _election_codes(answer: Any) -> Iterator[tuple[Key, int]]:
    yield from _by_partition("replica_election_results", "topic", "partition_result")(answer)
    yield None, _get(answer, "error_code", ErrorCode.NONE)


def _replicas(_image: MetadataImage, request: Struct) -> Iterator[Part]:
    for topic in request.topics:
        for row in topic.partitions:
            key = topic.name, row.partition_index
            said = "cancel" if row.replicas is None else f"replicas={list(row.replicas)}"
            yield key, f"partition:{topic.name}-{row.partition_index}", said


def _by_partition(
    topics: str, name: str = "name", partitions: str = "partitions"
) -> Callable[[Any], Iterator[tuple[Key, int]]]:
    """Of an answer with topics that have partitions, by the names of its fields."""

    def codes(answer: Any) -> Iterator[tuple[Key, int]]:
        for topic in _get(answer, topics):
            for row in _get(topic, partitions):
                index = _get(row, "partition_index", None)
                index = _get(row, "partition_id") if index is None else index
                yield (_get(topic, name), index), _get(row, "error_code")

    return codes


def _by_name(rows: str, field: str) -> Callable[[Any], Iterator[tuple[Key, int]]]:
    """Of an answer with one row for each name."""

    def codes(answer: Any) -> Iterator[tuple[Key, int]]:
        for row in _get(answer, rows):
            yield _get(row, field), _get(row, "error_code")

    return codes


def _levels(_image: MetadataImage, request: Struct) -> Iterator[Part]:
    for one in request.feature_updates:
        yield one.feature, f"feature:{one.feature}", f"level={one.max_version_level}"


def _markers(_image: MetadataImage, request: Struct) -> Iterator[Part]:
    for marker in request.markers:
        end = "commit" if marker.transaction_result else "abort"
        said = f"{end} of producer id {marker.producer_id} epoch {marker.producer_epoch}"
        for topic in marker.topics:
            for index in topic.partition_indexes:
                key = marker.producer_id, (topic.name, index)
                yield key, f"partition:{topic.name}-{index}", said


def _marker_codes(answer: Any) -> Iterator[tuple[Key, int]]:
    for marker in _get(answer, "markers"):
        producer_id = _get(marker, "producer_id")
        for at, code in _by_partition("topics")(marker):
            yield (producer_id, at), code


CHANGES: Final[dict[ApiKey, Change]] = {
    ApiKey.CREATE_TOPICS: Change(_created, _by_name("topics", "name"), "validate_only"),
    ApiKey.DELETE_TOPICS: Change(_deleted, _deletion_codes),
    ApiKey.DELETE_RECORDS: Change(_records, _by_partition("topics")),
    ApiKey.CREATE_PARTITIONS: Change(_counts, _by_name("results", "name"), "validate_only"),
    ApiKey.ALTER_CONFIGS: Change(_resources, _resource_codes, "validate_only"),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: Change(_resources, _resource_codes, "validate_only"),
    ApiKey.CREATE_ACLS: Change(_rules, _codes_in_order("results")),
    ApiKey.DELETE_ACLS: Change(_filters, _codes_in_order("filter_results")),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: Change(_users, _by_name("results", "user")),
    ApiKey.DELETE_GROUPS: Change(_groups, _by_name("results", "group_id")),
    ApiKey.OFFSET_DELETE: Change(_offsets, _by_partition("topics")),
    ApiKey.ELECT_LEADERS: Change(_elections, _election_codes),
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: Change(_replicas, _by_partition("responses")),
    ApiKey.UPDATE_FEATURES: Change(_levels, _by_name("results", "feature"), "validate_only"),
    ApiKey.WRITE_TXN_MARKERS: Change(_markers, _marker_codes),
}
"""What operators ask for. Topics that are made since a client named them leave a line by
`Broker.auto_create`."""
SOMETIMES: Final[dict[ApiKey, tuple[IsChange, Change]]] = {
    ApiKey.OFFSET_COMMIT: (_moves_offsets, Change(_moved_offsets, _by_partition("topics"))),
}
"""What operators ask for by an API that clients use all day, and how that is told from theirs."""
NO_CHANGES: Final = frozenset(
    {
        ApiKey.PRODUCE,
        ApiKey.FETCH,
        ApiKey.LIST_OFFSETS,
        ApiKey.METADATA,
        ApiKey.OFFSET_FETCH,
        ApiKey.FIND_COORDINATOR,
        ApiKey.JOIN_GROUP,
        ApiKey.HEARTBEAT,
        ApiKey.LEAVE_GROUP,
        ApiKey.SYNC_GROUP,
        ApiKey.DESCRIBE_GROUPS,
        ApiKey.LIST_GROUPS,
        ApiKey.SASL_HANDSHAKE,
        ApiKey.API_VERSIONS,
        ApiKey.INIT_PRODUCER_ID,
        ApiKey.OFFSET_FOR_LEADER_EPOCH,
        ApiKey.ADD_PARTITIONS_TO_TXN,
        ApiKey.ADD_OFFSETS_TO_TXN,
        ApiKey.END_TXN,
        ApiKey.TXN_OFFSET_COMMIT,
        ApiKey.DESCRIBE_ACLS,
        ApiKey.DESCRIBE_CONFIGS,
        ApiKey.DESCRIBE_LOG_DIRS,
        ApiKey.SASL_AUTHENTICATE,
        ApiKey.LIST_PARTITION_REASSIGNMENTS,
        ApiKey.DESCRIBE_CLIENT_QUOTAS,
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
        ApiKey.DESCRIBE_QUORUM,
        ApiKey.DESCRIBE_CLUSTER,
        ApiKey.DESCRIBE_PRODUCERS,
        ApiKey.DESCRIBE_TRANSACTIONS,
        ApiKey.LIST_TRANSACTIONS,
        ApiKey.DESCRIBE_TOPIC_PARTITIONS,
    }
)
"""What clients do all day, and questions."""
