"""Compiled decoders and encoders agree with kio's, for every API, version and direction."""

from __future__ import annotations

import io
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kio.serial import entity_reader, entity_writer

from raftmq.errors import RemoteProtocolError
from raftmq.protocol import (
    ANNOUNCED,
    ApiKey,
    Struct,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
    warm,
)
from raftmq.protocol import compile as compile_module
from raftmq.protocol.compile import schema_of, struct_class_of
from raftmq.protocol.wire import long_varint
from tests.protocol.messages import (
    HypothesisChooser,
    every_message,
    kio_class,
    message,
    random_message,
)
from tests.protocol.walk import Walk

ROOT = Path(__file__).parent.parent.parent
EVERY = [
    pytest.param(*each, id=f"{each[0].title}-v{each[1]}-{each[2]}") for each in every_message()
]
ENCODE: dict[str, Any] = {"request": encode_request, "response": encode_response}
DECODE: dict[str, Any] = {"request": decode_request, "response": decode_response}


def check_against_kio(api: ApiKey, version: int, direction: str, ours: Struct, theirs: Any) -> None:
    """Both write the same bytes, and each reads them back."""
    out = io.BytesIO()
    entity_writer(type(theirs))(out, theirs)
    body = ENCODE[direction](api, version, ours)
    assert body == out.getvalue()
    for buffer in (memoryview(body), memoryview(bytearray(body)), body, bytearray(body)):
        assert DECODE[direction](api, version, buffer) == ours
    assert entity_reader(type(theirs))(body, 0) == (theirs, len(body))
    walk = Walk(schema_of(api, version, direction), body)  # type: ignore[arg-type]
    assert walk.position == len(body)


@pytest.mark.parametrize(("api", "version", "direction"), EVERY)
def test_agrees_with_kio_on_random_messages(api: ApiKey, version: int, direction: str) -> None:
    for seed in range(4):
        ours, theirs = random_message(api, version, direction, seed)
        check_against_kio(api, version, direction, ours, theirs)


@pytest.mark.parametrize("direction", ["request", "response"])
@pytest.mark.parametrize("api", list(ANNOUNCED), ids=lambda api: api.title)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_agrees_with_kio_on_drawn_messages(
    api: ApiKey, direction: str, data: st.DataObject
) -> None:
    low, high = ANNOUNCED[api]
    version = data.draw(st.integers(max(low, 3 if api is ApiKey.PRODUCE else low), high))
    ours, theirs = message(api, version, direction, HypothesisChooser(data.draw), items_max=2)
    check_against_kio(api, version, direction, ours, theirs)


@pytest.mark.parametrize(("api", "version", "direction"), EVERY)
def test_absent_attributes_take_the_schemas_defaults(
    api: ApiKey, version: int, direction: str
) -> None:
    """An empty message says what an explicitly default one says; kio, too, reads it."""
    body = ENCODE[direction](api, version, {})
    blank = DECODE[direction](api, version, body)
    assert ENCODE[direction](api, version, blank) == body
    assert entity_reader(kio_class(api, version, direction))(body, 0)[1] == len(body)


def test_defaults_are_the_schemas() -> None:
    metadata = decode_request(ApiKey.METADATA, 4, encode_request(ApiKey.METADATA, 4, {}))
    assert metadata.topics == []
    assert metadata.allow_auto_topic_creation is True
    join = decode_request(ApiKey.JOIN_GROUP, 9, encode_request(ApiKey.JOIN_GROUP, 9, {}))
    assert join.rebalance_timeout == -1
    assert join.group_instance_id is None
    create = decode_request(ApiKey.CREATE_TOPICS, 7, encode_request(ApiKey.CREATE_TOPICS, 7, {}))
    assert create.timeout == 60_000
    found = encode_response(ApiKey.FIND_COORDINATOR, 2, {})
    assert decode_response(ApiKey.FIND_COORDINATOR, 2, found).error_message is None


def test_fields_of_other_versions_read_as_their_defaults() -> None:
    old = decode_request(ApiKey.METADATA, 1, encode_request(ApiKey.METADATA, 1, {"topics": None}))
    assert old.topics is None
    assert old.allow_auto_topic_creation is True
    assert old.include_cluster_authorized_operations is False
    assert old.__dict__ == {"topics": None}
    answer = decode_response(ApiKey.FETCH, 4, encode_response(ApiKey.FETCH, 4, {}))
    assert answer.session_id == 0
    assert answer.node_endpoints == []
    topic = struct_class_of(ApiKey.FETCH, "response", "responses.partitions")()
    assert topic.current_leader.leader_id == -1
    with pytest.raises(AttributeError, match="no field 'session'"):
        _ = answer.session


def test_what_some_versions_lack_has_one_default_in_all_others() -> None:
    """So it does not matter which version a default is taken from."""
    found: dict[tuple[ApiKey, str, str, str], set[tuple[bool, bool, Any]]] = {}
    having: Counter[tuple[ApiKey, str, str, str]] = Counter()
    parts: Counter[tuple[ApiKey, str]] = Counter()
    for api, version, direction in every_message():
        parts[api, direction] += 1
        for path, part in compile_module._parts(schema_of(api, version, direction)):
            for field in part.all_fields:
                key = api, direction, path, field.name
                having[key] += 1
                default = None if field.array else field.default
                is_none = field.array and field.default is None
                found.setdefault(key, set()).add((is_none, field.struct is not None, default))
    assert found
    for key, defaults in found.items():
        api, direction, *_ = key
        if having[key] < parts[api, direction]:
            assert len(defaults) == 1, key


def test_a_default_loads_no_version_that_it_can_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """To load one holds up the loop of a node: the request may be the first of its version."""
    monkeypatch.setattr(compile_module, "_families", {})
    monkeypatch.setattr(compile_module, "_request_decoders", {})
    monkeypatch.setattr(compile_module, "_response_encoders", {})
    warm([(ApiKey.METADATA, version) for version in (1, 10, 13)])
    old = decode_request(ApiKey.METADATA, 1, b"\x00\x00\x00\x00")
    monkeypatch.setattr(compile_module, "_load", None)
    assert old.include_cluster_authorized_operations is False
    assert old.include_topic_authorized_operations is False


def test_attributes_of_other_versions_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler fills in all it knows; an old version carries less."""
    monkeypatch.setattr(compile_module, "_families", {})
    monkeypatch.setattr(compile_module, "_response_encoders", {})
    body = encode_response(ApiKey.METADATA, 0, Struct(brokers=[], cluster_id="x", throttle_time=5))
    assert body == bytes(8)


def test_attributes_are_looked_up_from_the_newest_version_on() -> None:
    """No more versions are loaded than it takes; a name that only old ones have is found, too."""
    body = encode_request(ApiKey.FETCH, 18, {"replica_id": 5, "session_id": 3})
    assert body == encode_request(ApiKey.FETCH, 18, {"session_id": 3})
    assert decode_request(ApiKey.FETCH, 18, body).replica_id == -1


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"topics": [{"name": 3}]}, r"Metadata v12 response: topics\[0\]\.name: expected str"),
        ({"topics": [{"nme": "a"}]}, r"response\.topics has no field 'nme'; it has .*name"),
        ({"topics": 5}, "topics: expected a list or tuple, got int"),
        ({"topics": None}, "topics: is None, and not nullable"),
        ({"throttle_time": 1 << 31}, "throttle_time: 2147483648 is outside int32"),
        ({"throttle_time": None}, "throttle_time: is None"),
        ({"topics": [{"is_internal": "no"}]}, "is_internal: expected int"),
        ({"topics": [{"topic_id": "zero"}]}, "topic_id: expected UUID"),
        ({"topics": [7]}, r"topics\[0\]: expected a Struct or a mapping, got int"),
        ({"cluster_id": "x" * 32_768}, "cluster_id: longer than 32767 bytes"),
        ({"cluster_id": "\ud800"}, "cluster_id: has a lone surrogate"),
        (7, "message: expected a Struct or a mapping"),
        ({"topics": "abc"}, "topics: expected a list or tuple, got str"),
        ({"topics": [{"topic_id": UUID(int=1), "name": 3}]}, "name: expected str, got 3"),
        ({"topics": [{"topic_id": None, "name": None, "partitions": 3}]}, "partitions: expected"),
        ({"cluster_id": "x", "controller_id": "x"}, "controller_id: expected int"),
        ({"topics": [{"partitions": [{"isr_nodes": [1, "2"]}]}]}, r"isr_nodes\[1\]: expected int"),
        (Struct(brokers=[Struct(rack="a"), Struct(port=None)]), r"brokers\[1\]\.port: is None"),
    ],
)
def test_what_cannot_be_encoded_is_named(message: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        encode_response(ApiKey.METADATA, 12, message)


def test_old_strings_have_the_same_limit() -> None:
    with pytest.raises(TypeError, match="longer than 32767"):
        encode_request(ApiKey.FIND_COORDINATOR, 0, {"key": "x" * 32_768})
    body = encode_request(ApiKey.FIND_COORDINATOR, 0, {"key": "x" * 32_767})
    assert len(decode_request(ApiKey.FIND_COORDINATOR, 0, body).key) == 32_767
    body = encode_request(ApiKey.FIND_COORDINATOR, 3, {"key": "x" * 32_767})
    assert len(decode_request(ApiKey.FIND_COORDINATOR, 3, body).key) == 32_767
    body = long_varint(32_769) + b"x" * 32_768 + b"\x00\x00"
    with pytest.raises(RemoteProtocolError, match="key has the impossible length 32768"):
        decode_request(ApiKey.FIND_COORDINATOR, 3, body)


def test_unknown_error_codes_survive() -> None:
    body = encode_response(ApiKey.HEARTBEAT, 4, {"error_code": 12_345})
    assert decode_response(ApiKey.HEARTBEAT, 4, body).error_code == 12_345


def test_times_are_plain_milliseconds() -> None:
    body = encode_response(ApiKey.PRODUCE, 3, {"responses": [], "throttle_time": 7})
    assert decode_response(ApiKey.PRODUCE, 3, body).throttle_time == 7
    commit = {"retention_time": 86_400_001}
    body = encode_request(ApiKey.OFFSET_COMMIT, 2, commit)
    assert decode_request(ApiKey.OFFSET_COMMIT, 2, body).retention_time == 86_400_001
    part = {"index": 1, "log_append_time": 1_700_000_000_123}
    body = encode_response(ApiKey.PRODUCE, 8, {"responses": [{"partition_responses": [part]}]})
    answer = decode_response(ApiKey.PRODUCE, 8, body).responses[0].partition_responses[0]
    assert answer.log_append_time == 1_700_000_000_123


def test_bytes_are_copied_and_records_are_not() -> None:
    """A group's metadata outlives its frame; a batch is too big to copy."""
    join = {"protocols": [{"name": "range", "metadata": b"abc"}]}
    body = bytearray(encode_request(ApiKey.JOIN_GROUP, 5, join))
    metadata = decode_request(ApiKey.JOIN_GROUP, 5, memoryview(body)).protocols[0].metadata
    assert type(metadata) is bytes
    part = {"index": 0, "records": b"batch"}
    produce = {"topic_data": [{"name": "a", "partition_data": [part]}]}
    body = bytearray(encode_request(ApiKey.PRODUCE, 9, produce))
    decoded = decode_request(ApiKey.PRODUCE, 9, memoryview(body))
    records = decoded.topic_data[0].partition_data[0].records
    assert type(records) is memoryview
    assert records.obj is body


def test_bytes_after_the_last_field_are_ignored() -> None:
    """Kafka's parser does not look at them either."""
    body = encode_request(ApiKey.HEARTBEAT, 4, {"group_id": "g"})
    assert decode_request(ApiKey.HEARTBEAT, 4, body + b"more").group_id == "g"


def test_views_of_other_formats_are_read_as_bytes() -> None:
    body = encode_request(ApiKey.HEARTBEAT, 0, {"group_id": "g"})
    assert decode_request(ApiKey.HEARTBEAT, 0, memoryview(body).cast("b")).group_id == "g"


@pytest.mark.parametrize("version", [3, 4])
def test_unknown_tags_are_skipped(version: int) -> None:
    """KIP-482: a newer client may say more than we understand, at every level."""
    known = Struct(client_software_name="c", client_software_version="1")
    body = encode_request(ApiKey.API_VERSIONS, version, known)
    tags = b"\x02" + b"\x05\x03abc" + long_varint(100_000) + long_varint(200) + bytes(200)
    assert decode_request(ApiKey.API_VERSIONS, version, body[:-1] + tags) == known
    # beside known ones: the features of an ApiVersions answer have tags 0 to 3
    answer = encode_response(ApiKey.API_VERSIONS, version, {"finalized_features_epoch": 9})
    assert answer.endswith(b"\x01\x01\x08" + (9).to_bytes(8, "big"))
    spoken = answer[:-11] + b"\x02" + answer[-10:] + b"\x4d\x01x"
    assert decode_response(ApiKey.API_VERSIONS, version, spoken).finalized_features_epoch == 9


def test_tagged_defaults_are_not_written() -> None:
    answer = {"finalized_features_epoch": -1, "supported_features": [], "zk_migration_ready": False}
    body = encode_response(ApiKey.API_VERSIONS, 3, answer)
    assert body == encode_response(ApiKey.API_VERSIONS, 3, {})
    part = {"partition_index": 0, "current_leader": {"leader_id": -1}}
    fetch = {"responses": [{"topic": "a", "partitions": [part]}]}
    plain = {"responses": [{"topic": "a", "partitions": [{"partition_index": 0}]}]}
    one, other = (encode_response(ApiKey.FETCH, 12, each) for each in (fetch, plain))
    assert one == other


def test_a_known_tag_must_have_its_size() -> None:
    answer = encode_response(ApiKey.API_VERSIONS, 3, {"finalized_features_epoch": 9})
    wrong = answer[:-9] + b"\x09" + answer[-8:] + b"\x00"
    with pytest.raises(RemoteProtocolError, match="tagged field 1 differs"):
        decode_response(ApiKey.API_VERSIONS, 3, wrong)


def test_nullable_structs() -> None:
    """KIP-893: a byte says whether a nullable struct is there."""
    for cursor in (None, Struct(topic_name="a", partition_index=3)):
        request = Struct(topics=[], response_partition_limit=5, cursor=cursor)
        body = encode_request(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, request)
        assert decode_request(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, body) == request


@pytest.mark.parametrize("decode", [decode_request, decode_response])
@pytest.mark.parametrize(("api", "version"), [(99, 0), (ApiKey.FETCH, 3), (ApiKey.PRODUCE, 14)])
def test_what_is_not_announced_is_not_decoded(decode: Any, api: int, version: int) -> None:
    with pytest.raises(RemoteProtocolError, match=r"announced|spoken"):
        decode(api, version, b"")


def test_warming_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "_request_decoders", {})
    monkeypatch.setattr(compile_module, "_response_encoders", {})
    warm([(ApiKey.HEARTBEAT, 3), (ApiKey.HEARTBEAT, 3)])
    assert list(compile_module._request_decoders) == [(ApiKey.HEARTBEAT, 3)]
    assert list(compile_module._response_encoders) == [(ApiKey.HEARTBEAT, 3)]


LAZY = """
import sys
import raftmq.protocol
assert not [name for name in sys.modules if name.split(".")[0] == "kio"]
raftmq.protocol.encode_request(12, 4, {})
loaded = {name.split(".")[3] for name in sys.modules if name.startswith("kio.schema.heartbeat.")}
assert loaded == {"v4"}, loaded
assert "hypothesis" not in sys.modules
"""


def test_schemas_are_loaded_one_by_one_and_hypothesis_never() -> None:
    """A broker starts without 304 schemas; kio would import hypothesis where it is installed."""
    subprocess.run([sys.executable, "-c", LAZY], check=True, cwd=ROOT)


def test_hypothesis_can_be_imported_after_kio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kio.static._phantom")
    for name in [name for name in sys.modules if name.split(".")[0] == "hypothesis"]:
        monkeypatch.delitem(sys.modules, name)
    compile_module._import_kio_without_hypothesis()
    assert "kio.static._phantom" in sys.modules
    assert "hypothesis" not in sys.modules


def test_letters_do_not_pass_for_strings() -> None:
    with pytest.raises(TypeError, match="groups_names: expected a list or tuple, got str"):
        encode_request(ApiKey.DELETE_GROUPS, 2, {"groups_names": "abc"})


def test_blobs_of_the_wrong_type_are_named() -> None:
    sync = {"member_id": "m", "assignments": [{"assignment": b"good"}, {"assignment": [1]}]}
    with pytest.raises(TypeError, match=r"assignments\[1\]\.assignment: expected"):
        encode_request(ApiKey.SYNC_GROUP, 3, sync)


def test_a_struct_is_a_bag_of_attributes() -> None:
    bag = Struct(a=1, b=[Struct(c=2)])
    assert repr(bag) == "Struct(a=1, b=[Struct(c=2)])"
    bag.a = 5
    assert bag == Struct(a=5, b=[Struct(c=2)])
    assert bag != 5
    with pytest.raises(AttributeError, match="Struct has no field 'z'"):
        _ = bag.z
    with pytest.raises(TypeError):
        hash(bag)


def test_a_schema_is_found_only_when_its_names_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that need the first message of an API at once: the second found no names."""
    family = compile_module._Family(ApiKey.PRODUCE, "response")
    parts, found = compile_module._parts, []

    def watched(schema: Any) -> Any:
        found.append(dict(family.schemas))
        return parts(schema)

    monkeypatch.setattr(compile_module, "_parts", watched)
    schema = family.schema(9)
    assert found[0] == {}
    assert family.schemas == {9: schema}


def test_what_a_topic_lists_no_more_stands_in_fields_of_our_own() -> None:
    """Whoever does not know them skips them; older versions, and other topics, do without."""
    rows = [{"partition_index": 4, "leader_id": 2, "leader_epoch": 7}]
    topic = {"name": "t", "partitions": [], "retired_partitions": rows, "retired_view": "t.retired"}
    plain = {"name": "t", "partitions": []}
    for version in range(14):
        body = encode_response(ApiKey.METADATA, version, {"topics": [topic]})
        without = encode_response(ApiKey.METADATA, version, {"topics": [plain]})
        (read,) = decode_response(ApiKey.METADATA, version, body).topics
        if version < 9:
            assert body == without
            assert (read.retired_partitions, read.retired_view) == ([], "")
            continue
        (number,) = read.retired_partitions
        assert (number.partition_index, number.leader_id, number.leader_epoch) == (4, 2, 7)
        assert read.retired_view == "t.retired"
        (read,) = decode_response(ApiKey.METADATA, version, without).topics
        assert (read.retired_partitions, read.retired_view) == ([], "")
