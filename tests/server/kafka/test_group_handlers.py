"""Group handlers in every announced version: real codecs, a real coordinator, a small broker."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from attrs import define, evolve, field
from immutables import Map

from raftmq.config import NodeConfig
from raftmq.errors import ErrorCode
from raftmq.groups.model import JoinRequest
from raftmq.metadata.image import EMPTY_IMAGE, PartitionImage, TopicImage, ViewImage
from raftmq.partition.parked import Deadlines
from raftmq.promise import Promise
from raftmq.protocol import (
    ANNOUNCED,
    ApiKey,
    Struct,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from raftmq.server.kafka.handlers.groups import HANDLERS
from raftmq.server.kafka.views import Views
from raftmq.server.kafka.work import WorkScheduler
from raftmq.types import NodeId, ReplicaId, StorageId, TopicId, TopicPartition
from tests.groups.world import FakeClock, Nodes
from tests.server.kafka.world import context_of

NO_TIME: Any = (Deadlines(FakeClock()), FakeClock())
SUBSCRIPTION = b"\x00\x01\x00\x00\x00\x01\x00\x01t\xff\xff\xff\xff"


@define
class FakeImage:
    partitions: tuple[TopicPartition, ...] = (TopicPartition("t", 0), TopicPartition("t", 1))
    structure_version: int = 7

    def committed_since(self, at: TopicPartition) -> int | None:
        return 0 if at in self.partitions else None


@define
class FakeBroker:
    """What the handlers look at."""

    node_id: NodeId
    nodes: Nodes
    image: FakeImage = field(factory=FakeImage)
    config: NodeConfig = NodeConfig(node_id=1, data=Path("/tmp"))
    transactions: Any = SimpleNamespace(is_offered=False)
    views: Views = field(factory=lambda: Views(lambda: EMPTY_IMAGE, *NO_TIME))

    @property
    def coordinator(self) -> Any:
        return self.nodes.coordinators[self.node_id]

    def endpoints(self, node_ids: list[NodeId], _listener: str) -> list[Struct]:
        return [Struct(node_id=n, host=f"host{n}", port=9000 + n) for n in node_ids]


class Client:
    """Asks one API in one version, through the codecs both ways."""

    def __init__(self, *node_ids: int) -> None:
        self.nodes = Nodes(*(node_ids or (1,)))
        self.broker = FakeBroker(NodeId(1), self.nodes)

    def ask(self, key: ApiKey, version: int, /, **fields: Any) -> Any:
        body = memoryview(bytes(encode_request(key, version, Struct(**fields))))
        context = context_of(key, version)
        answer = HANDLERS[key](self.broker, context, decode_request(key, version, body))  # type: ignore[arg-type]
        if isinstance(answer, Generator):
            answer = WorkScheduler(Deadlines(FakeClock())).run(answer)
        if isinstance(answer, Promise):
            assert answer.is_done
            answer = answer.result()
        return decode_response(key, version, memoryview(encode_response(key, version, answer)))

    def join(self, version: int = 5, member_id: str = "", **fields: Any) -> Any:
        fields = {
            "group_id": "g",
            "session_timeout": 10_000,
            "rebalance_timeout": 60_000,
            "member_id": member_id,
            "group_instance_id": None,
            "protocol_type": "consumer",
            "protocols": [Struct(name="range", metadata=SUBSCRIPTION)],
            **fields,
        }
        return self.ask(ApiKey.JOIN_GROUP, version, **fields)

    def sync(self, version: int, joined: Any, **fields: Any) -> Any:
        assignment = Struct(member_id=joined.member_id, assignment=b"mine")
        fields = {
            "group_id": "g",
            "generation_id": joined.generation_id,
            "member_id": joined.member_id,
            "group_instance_id": None,
            "protocol_type": "consumer",
            "protocol_name": "range",
            "assignments": [assignment],
            **fields,
        }
        return self.ask(ApiKey.SYNC_GROUP, version, **fields)

    def member(self) -> Any:
        given = self.join(5)
        joined = self.join(5, given.member_id)
        assert self.sync(3, joined).assignment == b"mine"
        return joined


def versions(key: ApiKey) -> list[int]:
    low, high = ANNOUNCED[key]
    return list(range(low, high + 1))


@pytest.mark.parametrize("version", versions(ApiKey.FIND_COORDINATOR))
def test_find_coordinator(version: int) -> None:
    client = Client(1, 2, 3)
    expected = client.broker.coordinator.find("g")
    if version < 4:
        found = client.ask(ApiKey.FIND_COORDINATOR, version, key="g", key_type=0)
    else:
        many = client.ask(ApiKey.FIND_COORDINATOR, version, key_type=0, coordinator_keys=["g", "h"])
        assert [c.key for c in many.coordinators] == ["g", "h"]
        found = many.coordinators[0]
    assert (found.error_code, found.node_id) == (0, expected)
    assert (found.host, found.port) == (f"host{expected}", 9000 + expected)


@pytest.mark.parametrize("version", [1, 4])
def test_find_coordinator_of_other_kinds_or_without_brokers(version: int) -> None:
    client = Client()

    def error(key_type: int) -> int:
        answer = client.ask(
            ApiKey.FIND_COORDINATOR, version, key="x", key_type=key_type, coordinator_keys=["x"]
        )
        code: int = answer.error_code if version < 4 else answer.coordinators[0].error_code
        return code

    assert error(1) == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "of transactions"
    assert error(2) == ErrorCode.INVALID_REQUEST
    client.nodes.log.fence(1)
    client.nodes.log.apply_all()
    assert error(0) == ErrorCode.COORDINATOR_NOT_AVAILABLE


@pytest.mark.parametrize("version", versions(ApiKey.JOIN_GROUP))
def test_join_group(version: int) -> None:
    client = Client()
    joined = client.join(version)
    if version >= 4:
        assert joined.error_code == ErrorCode.MEMBER_ID_REQUIRED
        joined = client.join(version, joined.member_id)
    assert joined.error_code == 0
    assert (joined.generation_id, joined.protocol_name) == (1, "range")
    assert joined.leader == joined.member_id
    (member,) = joined.members
    assert member.metadata == SUBSCRIPTION
    if version >= 7:
        assert joined.protocol_type == "consumer"
    wrong = client.join(version, protocol_type="connect")
    assert wrong.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert wrong.protocol_name == (None if version >= 7 else "")
    timeout = client.broker.coordinator._groups["g"].members[joined.member_id].request
    assert timeout.rebalance_timeout_ms == (10_000 if version == 0 else 60_000)
    assert timeout.client_host == "/10.0.0.9"


@pytest.mark.parametrize("version", versions(ApiKey.SYNC_GROUP))
def test_sync_group(version: int) -> None:
    client = Client()
    joined = client.join(5, client.join(5).member_id)
    synced = client.sync(version, joined)
    assert (synced.error_code, synced.assignment) == (0, b"mine")
    if version >= 5:
        assert (synced.protocol_type, synced.protocol_name) == ("consumer", "range")
        unnamed = client.sync(version, joined, protocol_type=None)
        assert unnamed.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert client.sync(version, joined, generation_id=9).error_code == ErrorCode.ILLEGAL_GENERATION


@pytest.mark.parametrize("version", versions(ApiKey.HEARTBEAT))
def test_heartbeat(version: int) -> None:
    client = Client()
    joined = client.member()

    def beat(generation_id: int) -> int:
        code: int = client.ask(
            ApiKey.HEARTBEAT,
            version,
            group_id="g",
            generation_id=generation_id,
            member_id=joined.member_id,
            group_instance_id=None,
        ).error_code
        return code

    assert beat(1) == 0
    assert beat(0) == ErrorCode.ILLEGAL_GENERATION


@pytest.mark.parametrize("version", versions(ApiKey.LEAVE_GROUP))
def test_leave_group(version: int) -> None:
    client = Client()
    joined = client.member()

    def leave(*member_ids: str, group_id: str = "g") -> Any:
        return client.ask(
            ApiKey.LEAVE_GROUP,
            version,
            group_id=group_id,
            member_id=member_ids[0],
            members=[Struct(member_id=m, group_instance_id=None, reason=None) for m in member_ids],
        )

    assert leave("x", group_id="").error_code == ErrorCode.INVALID_GROUP_ID
    if version < 3:
        assert leave("x").error_code == ErrorCode.UNKNOWN_MEMBER_ID
        assert leave(joined.member_id).error_code == 0
    else:
        left = leave("x", joined.member_id)
        assert left.error_code == 0
        codes = [(m.member_id, m.error_code) for m in left.members]
        assert codes == [("x", ErrorCode.UNKNOWN_MEMBER_ID), (joined.member_id, 0)]


def commit(
    client: Client, version: int, joined: Any, *partitions: int, topic: str = "t"
) -> dict[int, int]:
    answer = client.ask(
        ApiKey.OFFSET_COMMIT,
        version,
        group_id="g",
        generation_id_or_member_epoch=joined.generation_id,
        member_id=joined.member_id,
        group_instance_id=None,
        topics=[
            Struct(
                name=topic,
                partitions=[
                    Struct(
                        partition_index=p,
                        committed_offset=10 + p,
                        committed_leader_epoch=2,
                        committed_metadata=None if p else "note",
                    )
                    for p in partitions
                ],
            )
        ],
    )
    (told,) = answer.topics
    return {p.partition_index: p.error_code for p in told.partitions}


@pytest.mark.parametrize("version", versions(ApiKey.OFFSET_COMMIT))
def test_offset_commit(version: int) -> None:
    client = Client()
    joined = client.member()
    codes = commit(client, version, joined, 0, 1, 7)
    assert codes == {0: 0, 1: 0, 7: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    joined.generation_id += 1
    assert set(commit(client, version, joined, 0).values()) == {ErrorCode.ILLEGAL_GENERATION}


@pytest.mark.parametrize("version", versions(ApiKey.OFFSET_FETCH))
def test_offset_fetch(version: int) -> None:
    client = Client()
    commit(client, 8, client.member(), 0, 1)

    def fetch(topics: list[Struct] | None, group: str = "g") -> Any:
        one = Struct(group_id=group, member_id=None, member_epoch=-1, topics=topics)
        fields = {"groups": [one]} if version >= 8 else {"group_id": group, "topics": topics}
        answer = client.ask(ApiKey.OFFSET_FETCH, version, require_stable=False, **fields)
        if version >= 8:
            (got,) = answer.groups
            assert got.group_id == group
            return got
        return answer

    (topic,) = fetch([Struct(name="t", partition_indexes=[0, 1, 5])]).topics
    assert [(p.partition_index, p.committed_offset, p.metadata) for p in topic.partitions] == [
        (0, 10, "note"),
        (1, 11, ""),
        (5, -1, ""),
    ]
    assert not any(p.error_code for p in topic.partitions)
    if version >= 5:
        assert [p.committed_leader_epoch for p in topic.partitions] == [2, 2, -1]
    if version >= 2:
        (every,) = fetch(None).topics
        assert [p.partition_index for p in every.partitions] == [0, 1]
        assert fetch([]).topics == []
    client.nodes.log.engines[NodeId(1)].is_cut_off = True
    refused = fetch([Struct(name="t", partition_indexes=[0])])
    if version >= 2:
        assert (refused.error_code, refused.topics) == (ErrorCode.NOT_COORDINATOR, [])
    else:
        (partition,) = refused.topics[0].partitions
        assert partition.error_code == ErrorCode.NOT_COORDINATOR


def test_offsets_of_a_view_are_those_of_its_topic_where_that_has_retired_something() -> None:
    topic_id = TopicId(UUID(int=4))
    ids = (ReplicaId(NodeId(1), StorageId(1)),)
    listed, retired = (PartitionImage(n, 1, (NodeId(1),), ids, (NodeId(1),)) for n in (0, 1))
    topic = TopicImage("t", topic_id, (listed,), Map(), retired=(retired,))
    image = evolve(
        EMPTY_IMAGE,
        topics=Map(t=topic),
        topic_names=Map({topic_id: "t"}),
        views=Map(v=ViewImage("v", TopicId(UUID(int=5)), topic_id, 2)),
    )
    client = Client()
    client.broker.views = Views(lambda: image, *NO_TIME)
    joined = client.member()
    assert commit(client, 8, joined, 0) == {0: 0}
    codes = commit(client, 8, joined, 0, 1, 7, topic="v")
    assert codes == {0: 0, 1: 0, 7: 0}, "what is said of an empty number is passed over"

    def fetch(name: str) -> dict[int, int]:
        asked = [Struct(name=name, partition_indexes=[0, 1, 7])]
        answer = client.ask(ApiKey.OFFSET_FETCH, 7, group_id="g", topics=asked, require_stable=True)
        (told,) = answer.topics
        assert told.name == name
        return {p.partition_index: p.committed_offset for p in told.partitions}

    assert fetch("t") == fetch("v") == {0: 10, 1: 11, 7: -1}
    told = client.ask(ApiKey.OFFSET_FETCH, 7, group_id="g", topics=None, require_stable=True)
    found = {
        (t.name, p.partition_index): p.committed_offset for t in told.topics for p in t.partitions
    }
    assert found == {("t", 0): 10, ("v", 1): 11}, "each where a tool finds its end"


@pytest.mark.parametrize("version", versions(ApiKey.DESCRIBE_GROUPS))
def test_describe_groups(version: int) -> None:
    client = Client()
    joined = client.member()
    found, missing = client.ask(
        ApiKey.DESCRIBE_GROUPS, version, groups=["g", "no"], include_authorized_operations=True
    ).groups
    assert (found.error_code, found.group_state, found.protocol_data) == (0, "Stable", "range")
    (member,) = found.members
    assert (member.member_id, member.client_id) == (joined.member_id, "client")
    assert (member.member_metadata, member.member_assignment) == (SUBSCRIPTION, b"mine")
    assert missing.group_state == "Dead"
    assert missing.error_code == (ErrorCode.GROUP_ID_NOT_FOUND if version >= 6 else 0)
    if version >= 3:
        assert found.authorized_operations == 0xD48  # Kafka 4.1's AclEntry.supportedOperations


@pytest.mark.parametrize("version", versions(ApiKey.LIST_GROUPS))
def test_list_groups(version: int) -> None:
    client = Client()
    client.member()

    def names(states: list[str] | None = None, types: list[str] | None = None) -> list[str]:
        answer = client.ask(
            ApiKey.LIST_GROUPS, version, states_filter=states or [], types_filter=types or []
        )
        assert answer.error_code == 0
        return [group.group_id for group in answer.groups]

    assert names() == ["g"]
    if version >= 4:
        assert names(["stable"]) == ["g"]
        assert names(["Empty"]) == []
    if version >= 5:
        assert names(types=["Classic"]) == ["g"]
        assert names(types=["consumer"]) == []


@pytest.mark.parametrize("version", versions(ApiKey.DELETE_GROUPS))
def test_delete_groups(version: int) -> None:
    client = Client()
    client.member()
    results = client.ask(ApiKey.DELETE_GROUPS, version, groups_names=["g", "no"]).results
    assert [(r.group_id, r.error_code) for r in results] == [
        ("g", ErrorCode.NON_EMPTY_GROUP),
        ("no", ErrorCode.GROUP_ID_NOT_FOUND),
    ]


@pytest.mark.parametrize("version", versions(ApiKey.OFFSET_DELETE))
def test_offset_delete(version: int) -> None:
    client = Client()

    def delete() -> Any:
        partitions = [Struct(partition_index=p) for p in (0, 9)]
        return client.ask(
            ApiKey.OFFSET_DELETE,
            version,
            group_id="g",
            topics=[Struct(name="t", partitions=partitions)],
        )

    assert delete().error_code == ErrorCode.GROUP_ID_NOT_FOUND
    commit(client, 8, client.member(), 0)
    answer = delete()
    assert answer.error_code == 0
    assert [p.error_code for p in answer.topics[0].partitions] == [
        ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]


def test_a_client_id_is_cut() -> None:
    asked: list[JoinRequest] = []

    def join(_name: str, request: JoinRequest) -> Promise[Any]:
        asked.append(request)
        return Promise()

    broker: Any = SimpleNamespace(
        coordinator=SimpleNamespace(join=join),
        config=NodeConfig(node_id=1, data=Path("/tmp")),
    )
    context = context_of(ApiKey.JOIN_GROUP, 5, "c" * 32_000)
    fields = {"group_id": "g", "session_timeout": 10_000, "rebalance_timeout": 10_000}
    fields |= {"member_id": "", "protocol_type": "consumer", "protocols": []}
    body = encode_request(ApiKey.JOIN_GROUP, 5, fields)
    HANDLERS[ApiKey.JOIN_GROUP](broker, context, decode_request(ApiKey.JOIN_GROUP, 5, body))
    assert [one.client_id for one in asked] == ["c" * broker.config.client_id_length_max]
