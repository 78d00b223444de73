"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs, for topics and brokers.

What a value means, where it comes from and whether it may be set is decided by
`metadata/configs.py` and the controller; here are only Kafka's shapes and its rules about
resources.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import (
    AlterConfigsCall,
    ConfigOperation,
    ConfigResource,
    Outcome,
)
from raftmq.metadata.configs import ConfigEntry, describe_broker, describe_topic, describe_view
from raftmq.metadata.image import MetadataImage
from raftmq.promise import Promise
from raftmq.protocol import Struct
from raftmq.server.audit import Who
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import TURN_PARTITIONS, Work, all_of, in_turns

Answer: TypeAlias = dict[str, Any]

PER_TURN: Final = 16
"""Resources of one turn: each has some forty configs."""
DESCRIBED_BYTES_MAX: Final = 32 << 20
"""Of one answer; all configs of 20,000 topics, without synonyms and documentation."""
TOPIC: Final = 2
BROKER: Final = 4
SET: Final = 0
DELETE: Final = 1
Outcomes: TypeAlias = tuple[Outcome, ...]
TIMEOUT_MS: Final = 5_000


def describe_configs(broker: Broker, _context: RequestContext, request: Struct) -> Work[Answer]:
    """Answer DescribeConfigs; a resource that is named twice is described once."""
    wanted = {}
    for count, resource in enumerate(request.resources, 1):
        keys = resource.configuration_keys
        key = resource.resource_type, resource.resource_name, None if keys is None else tuple(keys)
        wanted[key] = resource
        if count % TURN_PARTITIONS == 0:
            yield None
    described = _Described(broker, request)
    rows = yield from in_turns(wanted.values(), described.row, PER_TURN)
    return {"throttle_time": 0, "results": rows}


class _Described:
    """The rows of one answer: rows that topics share are made once, and bytes are bounded."""

    def __init__(self, broker: Broker, request: Struct) -> None:
        self._broker = broker
        self._request = request
        self._image = broker.image
        self._rows: dict[ConfigEntry, tuple[dict[str, Any], int]] = {}
        self._lists: dict[tuple[Any, Any], tuple[list[dict[str, Any]], int]] = {}
        self._bytes_left = DESCRIBED_BYTES_MAX

    def row(self, resource: Struct) -> Answer:
        code, message = ErrorCode.NONE, None
        configs: list[dict[str, Any]] = []
        try:
            self._check_room()
            found, size = self._found(resource)
            self._bytes_left -= size
            self._check_room()
            configs = found
        except KafkaError as error:
            code, message = error.code, error.message
        return {
            "error_code": code,
            "error_message": message,
            "resource_type": resource.resource_type,
            "resource_name": resource.resource_name,
            "configs": configs,
        }

    def _check_room(self) -> None:
        if self._bytes_left < 0:
            raise KafkaError(
                f"the answer would be above {DESCRIBED_BYTES_MAX} bytes: ask for fewer at once",
                code=ErrorCode.INVALID_REQUEST,
            )

    def _found(self, resource: Struct) -> tuple[list[dict[str, Any]], int]:
        """What a resource has, and its size."""
        key = None
        topic = self._image.topics.get(resource.resource_name)
        if resource.resource_type == TOPIC and topic is not None:
            names = resource.configuration_keys
            key = topic.configs, tuple(names) if names else None
            if (known := self._lists.get(key)) is not None:
                return known
        rows = [self._row(e) for e in _entries(self._broker, self._image, resource)]
        found = [row for row, _ in rows], sum(size for _, size in rows)
        if key is not None:
            self._lists[key] = found
        return found

    def _row(self, entry: ConfigEntry) -> tuple[dict[str, Any], int]:
        found = self._rows.get(entry)
        if found is None:
            config = _config_row(
                entry,
                with_synonyms=self._request.include_synonyms,
                with_documentation=self._request.include_documentation,
            )
            found = self._rows[entry] = config, _size_of(config)
        return found


def _size_of(config: dict[str, Any]) -> int:
    """About the bytes of a row on the wire; never less."""
    texts = [config["name"], config["value"], config["documentation"]]
    for synonym in config["synonyms"]:
        texts += [synonym["name"], synonym["value"]]
    return 8 + sum(3 + len((text or "").encode()) for text in texts)


def _entries(broker: Broker, image: MetadataImage, resource: Struct) -> list[ConfigEntry]:
    keys = resource.configuration_keys or None
    name = resource.resource_name
    static = broker.config.kafka_settings
    if resource.resource_type == TOPIC:
        if broker.check_topic_name(name) is not None:
            raise KafkaError(code=ErrorCode.INVALID_TOPIC_EXCEPTION)
        view = broker.views.find(name, None)
        if view is not None and view.image.condition:
            return describe_view(image, view.image, broker.node_id, static, keys)
        source = name if view is None else view.topic.name
        return describe_topic(image, source, broker.node_id, static, keys)
    if resource.resource_type == BROKER:
        if not name:
            return describe_broker(image, None, static, keys)
        if name != str(broker.node_id):
            # A broker knows only its own file; clients must ask the broker that they mean.
            raise KafkaError(
                f"Unexpected broker id, expected {broker.node_id} or empty string, "
                f"but received {name}",
                code=ErrorCode.INVALID_REQUEST,
            )
        return describe_broker(image, broker.node_id, static, keys)
    raise KafkaError(
        f"resource type {resource.resource_type} has no configs here",
        code=ErrorCode.INVALID_REQUEST,
    )


def _config_row(
    entry: ConfigEntry, *, with_synonyms: bool, with_documentation: bool
) -> dict[str, Any]:
    synonyms = []
    if with_synonyms:
        synonyms = [
            {
                "name": synonym.name,
                "value": None if entry.is_sensitive else synonym.value,
                "source": int(synonym.source),
            }
            for synonym in entry.synonyms
        ]
    return {
        "name": entry.name,
        "value": None if entry.is_sensitive else entry.value,
        "read_only": entry.is_read_only,
        "config_source": int(entry.source),
        "is_sensitive": entry.is_sensitive,
        "synonyms": synonyms,
        "config_type": int(entry.type),
        "documentation": (entry.documentation or None) if with_documentation else None,
    }


def alter_configs(broker: Broker, context: RequestContext, request: Struct) -> Work[Answer]:
    """Answer AlterConfigs: what is not named is reset."""
    return _alter(broker, context.who, request, replaces_all=True)


def incremental_alter_configs(
    broker: Broker, context: RequestContext, request: Struct
) -> Work[Answer]:
    """Answer IncrementalAlterConfigs (KIP-339)."""
    return _alter(broker, context.who, request, replaces_all=False)


def _alter(broker: Broker, who: Who, request: Struct, *, replaces_all: bool) -> Work[Answer]:
    refused: dict[tuple[int, str], Outcome] = {}
    resources: dict[tuple[int, str], ConfigResource] = {}
    for count, resource in enumerate(request.resources, 1):
        if count % PER_TURN == 0:
            yield None
        key = (resource.resource_type, resource.resource_name)
        code, message = _refusal(broker, resource)
        if key in resources or key in refused:
            resources.pop(key, None)
            code, message = ErrorCode.INVALID_REQUEST, "named twice in one request"
        if code is not ErrorCode.NONE:
            refused[key] = Outcome(name=key[1], resource_type=key[0], code=code, message=message)
            continue
        resources[key] = ConfigResource(
            resource_type=key[0],
            resource_name=key[1],
            operations=tuple(
                ConfigOperation(one.name, SET if replaces_all else one.config_operation, one.value)
                for one in resource.configs
            ),
            replaces_all=replaces_all,
        )
    told: dict[tuple[int, str], Outcome] = {}
    promises: list[Outcomes | Promise[Outcomes]] = []
    every = list(resources.values())
    for start in range(0, len(every), PER_TURN):
        if start:
            yield None
        some = every[start : start + PER_TURN]
        promises.append(_call(broker, who, some, validate_only=bool(request.validate_only)))
    for count, outcomes in enumerate((yield from all_of(promises)), 1):
        told.update({(one.resource_type, one.name): one for one in outcomes})
        if count % PER_TURN == 0:
            yield None
    told.update(refused)

    def row(key: tuple[int, str]) -> Answer:
        one = told.get(key)
        return {
            "error_code": ErrorCode.UNKNOWN_SERVER_ERROR if one is None else one.code,
            "error_message": None if one is None else one.message,
            "resource_type": key[0],
            "resource_name": key[1],
        }

    rows = yield from in_turns((*resources, *refused), row)
    return {"throttle_time": 0, "responses": rows}


def _call(
    broker: Broker, who: Who, resources: list[ConfigResource], *, validate_only: bool
) -> Promise[tuple[Outcome, ...]]:
    """The controller's outcomes; when it cannot be reached each resource gets that error."""
    call = AlterConfigsCall(
        resources=tuple(resources), timeout_ms=TIMEOUT_MS, validate_only=validate_only
    )
    return broker.outcomes(
        call,
        who,
        lambda code, message: tuple(
            Outcome(
                name=one.resource_name,
                resource_type=one.resource_type,
                code=code,
                message=message,
            )
            for one in resources
        ),
    )


def _refusal(broker: Broker, resource: Struct) -> tuple[ErrorCode, str | None]:
    kind, name = resource.resource_type, resource.resource_name
    if kind == TOPIC:
        return broker.check_topic_name(name) or ErrorCode.NONE, None
    if kind == BROKER:
        if name and not name.isdigit():
            return ErrorCode.INVALID_REQUEST, f"{name!r} is not a broker id"
        return ErrorCode.NONE, None
    return ErrorCode.INVALID_REQUEST, f"resource type {kind} has no configs here"
