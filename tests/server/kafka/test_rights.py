"""Rights at the client port: what is left out, what changes in the middle, who acts as whom."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from immutables import Map

from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import CreateAclsCall, DeleteAclsCall, Outcome
from raftmq.metadata.transactions import Transaction, transactions_of
from raftmq.protocol import ApiKey
from raftmq.protocol.fetch import FetchResponse
from raftmq.records import NewRecord, build_batch
from raftmq.rights import (
    BIT,
    CLUSTER_NAME,
    Kind,
    Operation,
    Pattern,
    Permission,
    Rule,
    RuleFilter,
)
from raftmq.server.kafka.authentication import Caller
from raftmq.server.kafka.handlers.metadata import NO_OPERATIONS, TOPIC_OPERATIONS
from raftmq.types import METADATA_TOPIC, METADATA_TOPIC_ID
from tests.server.kafka.test_guards import (
    BATCH,
    GONE,
    HERE,
    USER,
    Guarded,
    allow,
    codes_of,
    requests,
)
from tests.server.kafka.world import World

READ_HERE = allow(Operation.READ, Kind.TOPIC, HERE)
WRITE_HERE = allow(Operation.WRITE, Kind.TOPIC, HERE)
NO_TOPIC = ErrorCode.TOPIC_AUTHORIZATION_FAILED


def told(answer: Any) -> dict[str | None, int]:
    return {row.name: row.error_code for row in answer.topics}


# ---- Metadata ----


@pytest.mark.parametrize("version", [0, 1, 4, 8, 9, 12, 13])
def test_all_topics_are_those_that_may_be_described(version: int) -> None:
    world = Guarded(READ_HERE)
    world.add_topic("secret")
    topics: Any = None if version else []
    answer = world.ask(ApiKey.METADATA, version, topics=topics)
    assert told(answer) == {HERE: 0}
    world.let()
    answer = world.ask(ApiKey.METADATA, version, topics=topics)
    assert told(answer) == {}
    assert not world.broker.metrics.denials, "to list is no attempt"


def test_answers_are_kept_apart_by_rights() -> None:
    """Bodies are encoded once for all who ask the same, and no further."""
    world = Guarded(READ_HERE, allow(Operation.ALTER_CONFIGS, Kind.TOPIC, HERE, "User:bob"))
    world.let(READ_HERE, allow(Operation.ALL, Kind.TOPIC, HERE, "User:bob"))
    fields = {
        "topics": [{"name": HERE}],
        "include_topic_authorized_operations": True,
        "include_cluster_authorized_operations": True,
    }
    masks = []
    for principal in (USER, "User:bob", "User:root", USER):
        world.connection.caller = Caller(principal, "10.0.0.9")
        (row,) = world.ask(ApiKey.METADATA, 9, **fields).topics
        masks.append(row.topic_authorized_operations)
    alice = BIT[Operation.READ] | BIT[Operation.DESCRIBE]
    assert masks == [alice, TOPIC_OPERATIONS, TOPIC_OPERATIONS, alice]
    world.connection.caller = Caller("User:nobody", "10.0.0.9")
    (row,) = world.ask(ApiKey.METADATA, 9, **fields).topics
    assert (row.error_code, row.topic_authorized_operations) == (NO_TOPIC, NO_OPERATIONS)


def test_cluster_operations_are_for_whoever_may_describe_it() -> None:
    world = Guarded(allow(Operation.CREATE, Kind.CLUSTER, CLUSTER_NAME))
    ask = {"include_cluster_authorized_operations": True}
    assert world.ask(ApiKey.DESCRIBE_CLUSTER, 1, **ask).cluster_authorized_operations == 0
    world.let(allow(Operation.ALTER, Kind.CLUSTER, CLUSTER_NAME))
    mask = world.ask(ApiKey.DESCRIBE_CLUSTER, 1, **ask).cluster_authorized_operations
    assert mask == BIT[Operation.ALTER] | BIT[Operation.DESCRIBE]
    answer = world.ask(ApiKey.METADATA, 9, topics=[], **ask)
    assert answer.cluster_authorized_operations == mask


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ([], NO_TOPIC),
        ([allow(Operation.DESCRIBE, Kind.TOPIC, GONE)], NO_TOPIC),
        ([allow(Operation.CREATE, Kind.TOPIC, GONE)], NO_TOPIC),
        ([allow(Operation.WRITE, Kind.TOPIC, GONE), allow(Operation.CREATE, Kind.TOPIC, GONE)], 0),
        (
            [
                allow(Operation.WRITE, Kind.TOPIC, GONE),
                allow(Operation.CREATE, Kind.CLUSTER, CLUSTER_NAME),
            ],
            0,
        ),
    ],
    ids=["nothing", "describe", "create", "both", "cluster"],
)
def test_a_missing_topic_is_made_by_whoever_may_create_it(rules: list[Rule], code: int) -> None:
    world = Guarded(*rules)
    fields = {"topics": [{"name": GONE}], "allow_auto_topic_creation": True}
    slot = world.send(ApiKey.METADATA, 9, **fields)
    if code:
        assert told(world.read(ApiKey.METADATA, 9, slot)) == {GONE: code}
        assert not world.controller.calls
    else:
        assert [one.name for one in world.controller.calls[0][0].topics] == [GONE]


@pytest.mark.parametrize("key", ["raftmq.delivers.to", "raftmq.dead.to"])
@pytest.mark.parametrize("may_write", [True, False])
def test_a_delay_topic_is_made_by_whoever_may_write_to_its_targets(
    may_write: bool, key: str
) -> None:
    write = [allow(Operation.WRITE, Kind.TOPIC, GONE)] if may_write else []
    world = Guarded(allow(Operation.CREATE, Kind.CLUSTER, CLUSTER_NAME), *write)
    row = {
        "name": "later",
        "num_partitions": 1,
        "replication_factor": 1,
        "assignments": [],
        "configs": [{"name": key, "value": GONE}],
    }
    slot = world.send(ApiKey.CREATE_TOPICS, 5, topics=[row], timeout=10, validate_only=False)
    world.settle()
    if may_write:
        ((call, _),) = world.controller.calls
        assert call.topics[0].configs == {key: GONE}
    else:
        assert not world.controller.calls
        (refused,) = world.read(ApiKey.CREATE_TOPICS, 5, slot).topics
        assert (refused.name, refused.error_code) == ("later", NO_TOPIC)


@pytest.mark.parametrize("key", ["raftmq.delivers.to", "raftmq.dead.to"])
@pytest.mark.parametrize("version", [9, 13])
def test_a_delay_topic_is_written_to_by_whoever_may_write_to_its_targets(
    version: int, key: str
) -> None:
    world = Guarded(WRITE_HERE)

    def code() -> int:
        slot = world.produce(version, [(HERE if version < 13 else world.topic_id, 0, BATCH)])
        world.settle()
        (topic,) = world.produced(version, slot).topics
        return topic.partitions[0].error_code

    assert code() != NO_TOPIC
    topic = world.engine.image.topics[HERE]
    delays = evolve(topic, configs=Map({key: GONE}))
    world.engine.change(topics=world.engine.image.topics.set(HERE, delays))
    assert code() == NO_TOPIC
    world.let(WRITE_HERE, allow(Operation.WRITE, Kind.TOPIC, GONE))
    assert code() != NO_TOPIC


def test_an_id_is_unknown_to_whoever_may_not_describe_its_topic() -> None:
    world = Guarded()
    named = [{"name": None, "topic_id": world.topic_id}]
    (row,) = world.ask(ApiKey.METADATA, 12, topics=named).topics
    assert (row.error_code, row.name) == (ErrorCode.UNKNOWN_TOPIC_ID, None)
    world.let(READ_HERE)
    (row,) = world.ask(ApiKey.METADATA, 12, topics=named).topics
    assert (row.error_code, row.name) == (0, HERE)


# ---- records ----


def fetched(world: Guarded, slot: Any, version: int = 12) -> tuple[int, FetchResponse]:
    answer = world.fetched(version, slot)
    codes = [part.error_code for topic in answer.topics for part in topic.partitions]
    return (codes[0] if codes else 0), answer


def test_rights_are_asked_for_at_every_fetch_of_a_session() -> None:
    world = Guarded(READ_HERE)
    asks = {"max_wait_ms": 0, "min_bytes": 0}
    code, first = fetched(world, world.fetch(12, [(HERE, 0, 0)], session_epoch=0, **asks))
    assert code == 0
    again = {"session_id": first.session_id, **asks}
    assert fetched(world, world.fetch(12, [], session_epoch=1, **again))[0] == 0
    world.let()
    assert fetched(world, world.fetch(12, [], session_epoch=2, **again))[0] == NO_TOPIC
    world.let(READ_HERE)
    assert fetched(world, world.fetch(12, [], session_epoch=3, **again))[0] == 0


def test_a_parked_fetch_gives_nothing_that_came_after_its_right_was_taken() -> None:
    world = Guarded(READ_HERE, WRITE_HERE)
    slot = world.fetch(12, [(HERE, 0, 0)], max_wait_ms=10_000, min_bytes=1)
    assert slot.pieces is None
    world.let(WRITE_HERE)
    world.produce(9, [(HERE, 0, BATCH)])
    world.replica(HERE).commit(1)
    code, answer = fetched(world, slot)
    assert code == NO_TOPIC
    assert not any(part.records for topic in answer.topics for part in topic.partitions)


def test_the_metadata_log_is_for_super_users() -> None:
    world = Guarded(allow(Operation.ALL, Kind.TOPIC, "*"))
    named = [{"name": METADATA_TOPIC}]
    assert told(world.ask(ApiKey.METADATA, 9, topics=named)) == {METADATA_TOPIC: NO_TOPIC}
    asks = {"max_wait_ms": 0, "min_bytes": 0}
    assert fetched(world, world.fetch(12, [(METADATA_TOPIC, 0, 0)], **asks))[0] == NO_TOPIC
    slot = world.fetch(13, [(METADATA_TOPIC_ID, 0, 0)], **asks)
    assert fetched(world, slot, 13)[0] == ErrorCode.UNKNOWN_TOPIC_ID
    world.connection.caller = Caller("User:root", "10.0.0.9")
    assert told(world.ask(ApiKey.METADATA, 9, topics=named)) == {METADATA_TOPIC: 0}


def test_what_may_be_written_is_written_and_the_rest_refused() -> None:
    world = Guarded(WRITE_HERE)
    world.add_topic("secret")
    slot = world.produce(9, [(HERE, 0, BATCH), ("secret", 0, BATCH), (GONE, 0, BATCH)])
    world.replica(HERE).commit(1)
    codes = {topic.name: topic.partitions[0].error_code for topic in world.produced(9, slot).topics}
    assert codes == {HERE: 0, "secret": NO_TOPIC, GONE: NO_TOPIC}
    assert world.replica("secret").log_end_offset == 0
    assert world.broker.metrics.denials == {("topic", "write"): 2}


def test_whoever_may_describe_is_told_that_more_is_denied() -> None:
    world = Guarded(READ_HERE)
    slot = world.produce(13, [(world.topic_id, 0, BATCH)])
    (topic,) = world.produced(13, slot).topics
    assert topic.partitions[0].error_code == NO_TOPIC


@pytest.mark.parametrize("is_transactional", [True, False])
def test_nobody_writes_under_the_producer_id_of_anothers_transactions(
    is_transactional: bool,
) -> None:
    world = Guarded(WRITE_HERE, allow(Operation.WRITE, Kind.TRANSACTIONAL_ID, "mine"))
    owned = Transaction(transactional_id="theirs", producer_id=7, epoch=0, timeout_ms=1_000)
    world.engine.change(transactions=transactions_of([owned], 0))
    batch = build_batch(
        [NewRecord(None, b"v")],
        producer_id=7,
        producer_epoch=0,
        base_sequence=0,
        transactional=is_transactional,
    )
    slot = world.produce(9, [(HERE, 0, batch)])
    ((row,),) = (topic.partitions for topic in world.produced(9, slot).topics)
    assert row.error_code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert world.replica(HERE).log_end_offset == 0


# ---- InitProducerId ----


@pytest.mark.parametrize(
    ("rules", "is_allowed"),
    [
        ([], False),
        ([READ_HERE], False),
        ([WRITE_HERE], True),
        ([allow(Operation.IDEMPOTENT_WRITE, Kind.CLUSTER, CLUSTER_NAME)], True),
        ([allow(Operation.WRITE, Kind.TOPIC, GONE)], True),
    ],
    ids=["nothing", "read", "write", "idempotent", "not there"],
)
def test_a_writer_of_any_topic_gets_a_producer_id(rules: list[Rule], is_allowed: bool) -> None:
    world = Guarded(*rules)
    slot = world.send(ApiKey.INIT_PRODUCER_ID, 4, transactional_id=None, transaction_timeout=0)
    assert bool(world.engine.proposed) is is_allowed
    if not is_allowed:
        answer = world.read(ApiKey.INIT_PRODUCER_ID, 4, slot)
        assert answer.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED


# ---- rules ----


def acl_request(api: ApiKey, **fields: Any) -> dict[str, Any]:
    request = requests(HERE, None)[api]
    if api is ApiKey.CREATE_ACLS:
        return {"creations": [{**request["creations"][0], **fields}]}
    if api is ApiKey.DELETE_ACLS:
        return {"filters": [{**request["filters"][0], **fields}]}
    return {**request, **fields}


@pytest.mark.parametrize(
    "api", [ApiKey.DESCRIBE_ACLS, ApiKey.CREATE_ACLS, ApiKey.DELETE_ACLS], ids=lambda api: api.title
)
@pytest.mark.parametrize("version", [1, 2, 3])
def test_there_are_no_rules_where_the_authorizer_is_off(api: ApiKey, version: int) -> None:
    world = World()
    slot = world.send(api, version, **acl_request(api))
    world.bench.deadlines.expire(0)
    answer = world.read(api, version, slot)
    assert codes_of(answer) - {ErrorCode.NONE} == {ErrorCode.SECURITY_DISABLED}
    assert not world.controller.calls


def asks(world: Guarded, api: ApiKey, version: int = 3, **fields: Any) -> Any:
    world.connection.caller = Caller("User:root", "10.0.0.9")
    slot = world.send(api, version, **acl_request(api, **fields))
    world.settle()
    return slot


@pytest.mark.parametrize("version", [1, 2, 3])
def test_rules_are_described_by_resource(version: int) -> None:
    rule = Rule(
        Kind.TOPIC, Pattern.PREFIXED, "he", USER, "10.0.0.0/8", Operation.READ, Permission.DENY
    )
    world = Guarded(READ_HERE, WRITE_HERE, rule)
    match = {"resource_type_filter": 2, "resource_name_filter": HERE, "pattern_type_filter": 2}
    slot = asks(world, ApiKey.DESCRIBE_ACLS, version, **match)
    answer = world.read(ApiKey.DESCRIBE_ACLS, version, slot)
    found = {(row.resource_name, row.pattern_type): row.acls for row in answer.resources}
    assert {key: len(acls) for key, acls in found.items()} == {("he", 4): 1, (HERE, 3): 2}
    (row,) = found["he", 4]
    assert (row.principal, row.host, row.operation, row.permission_type) == (
        USER,
        "10.0.0.0/8",
        3,
        2,
    )


def test_a_rule_is_created_by_the_controller() -> None:
    world = Guarded()
    slot = asks(world, ApiKey.CREATE_ACLS)
    ((call, promise),) = world.controller.calls
    assert call == CreateAclsCall(rules=(READ_HERE,))
    promise.resolve((Outcome(name="", code=ErrorCode.REQUEST_TIMED_OUT, message="later"),))
    (row,) = world.read(ApiKey.CREATE_ACLS, 3, slot).results
    assert (row.error_code, row.error_message) == (ErrorCode.REQUEST_TIMED_OUT, "later")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("resource_type", 1),
        ("resource_type", 6),
        ("resource_pattern_type", 2),
        ("operation", 1),
        ("permission_type", 0),
        ("principal", "alice"),
        ("host", "nowhere"),
        ("resource_name", ""),
        ("resource_name", "n" * 2_000),
    ],
)
def test_what_is_no_rule_is_refused(field: str, value: Any) -> None:
    world = Guarded()
    answer = world.read(ApiKey.CREATE_ACLS, 3, asks(world, ApiKey.CREATE_ACLS, **{field: value}))
    assert answer.results[0].error_code == ErrorCode.INVALID_REQUEST
    assert not world.controller.calls


def test_deleted_rules_are_told() -> None:
    world = Guarded(READ_HERE)
    slot = asks(world, ApiKey.DELETE_ACLS, principal_filter=USER)
    ((call, promise),) = world.controller.calls
    assert call == DeleteAclsCall(filters=(RuleFilter(principal=USER),))
    promise.resolve((Outcome(name="", rules=(READ_HERE,)),))
    world.settle()
    (result,) = world.read(ApiKey.DELETE_ACLS, 3, slot).filter_results
    (row,) = result.matching_acls
    assert (row.resource_name, row.principal, row.operation) == (HERE, USER, 3)


@pytest.mark.parametrize("field", ["resource_type_filter", "operation", "permission_type"])
def test_what_is_no_filter_is_refused(field: str) -> None:
    world = Guarded(READ_HERE)
    for api in (ApiKey.DESCRIBE_ACLS, ApiKey.DELETE_ACLS):
        answer = world.read(api, 3, asks(world, api, **{field: 99}))
        assert ErrorCode.INVALID_REQUEST in codes_of(answer)
    assert not world.controller.calls
