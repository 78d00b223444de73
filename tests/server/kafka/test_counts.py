"""What the client port counts: requests, error codes wherever they stand, messages and bytes."""

from __future__ import annotations

from typing import Any

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct
from raftmq.records import NewRecord, build_batch
from raftmq.server.kafka.counts import ApiCounts
from tests.server.kafka.world import World


def batch(count: int = 1) -> bytearray:
    return build_batch([NewRecord(None, b"value")] * count, timestamp=1_000_000)


@pytest.mark.parametrize(
    ("answer", "errors"),
    [
        ({"error_code": 0, "topics": []}, {}),
        ({"error_code": 3}, {"UNKNOWN_TOPIC_OR_PARTITION": 1}),
        ({"error_code": 31_999}, {"UNKNOWN": 1}),
        (
            {
                "error_code": ErrorCode.NONE,
                "topics": [
                    {"error_code": 0, "partitions": [{"error_code": 6}, {"error_code": 6}]},
                    Struct(error_code=29, names=["a", "b"], ids=(1, 2)),
                ],
            },
            {"NOT_LEADER_OR_FOLLOWER": 2, "TOPIC_AUTHORIZATION_FAILED": 1},
        ),
    ],
)
def test_error_codes_are_found_wherever_they_stand(answer: Any, errors: dict[str, int]) -> None:
    counts = ApiCounts()
    counts.count_errors(answer)
    assert counts.errors == errors


def test_messages_and_bytes_of_a_topic() -> None:
    world = World()
    world.add_topic("t")
    counts = world.partition("t").counts
    for number, (count, acks) in enumerate(((1, -1), (3, 1), (5, 0))):
        world.produce(9, [("t", 0, batch(count))], acks=acks)
        assert world.broker.metrics.api("produce").errors == {}, number
    assert counts.messages_in == 9
    assert counts.bytes_in == len(batch(1)) + len(batch(3)) + len(batch(5))
    world.replica("t").high_watermark = world.replica("t").log_end_offset
    world.fetch(11, [("t", 0, 2)], max_wait_ms=0)
    assert counts.messages_out == 7, "from the wanted offset on, though its batch began before"
    assert counts.bytes_out == len(batch(3)) + len(batch(5))


def test_what_was_refused_is_an_error_and_no_message() -> None:
    world = World()
    world.add_topic("t")
    world.produce(9, [("nobody", 0, batch())])
    assert world.broker.metrics.api("produce").errors == {"UNKNOWN_TOPIC_OR_PARTITION": 1}
    assert world.partition("t").counts.messages_in == 0
    world.fetch(11, [("t", 0, 99), ("t", 7, 0)], max_wait_ms=0)
    assert world.broker.metrics.api("fetch").errors == {
        "OFFSET_OUT_OF_RANGE": 1,
        "UNKNOWN_TOPIC_OR_PARTITION": 1,
    }
    world.replica("t").is_writable = False
    world.fetch(11, [("t", 0, 99)], max_wait_ms=0)
    assert world.broker.metrics.api("fetch").errors["OFFSET_NOT_AVAILABLE"] == 1
    world.fetch(11, [("t", 0, 0)], session_id=77, session_epoch=3)
    assert world.broker.metrics.api("fetch").errors["FETCH_SESSION_ID_NOT_FOUND"] == 1
    assert world.partition("t").counts.messages_out == 0


def test_errors_of_kept_metadata_answers_count_each_time() -> None:
    world = World()
    topics = [{"name": "nobody", "topic_id": None}]
    for _ in range(3):
        world.ask(ApiKey.METADATA, 9, topics=topics, allow_auto_topic_creation=False)
    assert world.broker.metadata_answers.hits == 2
    counts = world.broker.metrics.api("metadata")
    assert counts.errors == {"UNKNOWN_TOPIC_OR_PARTITION": 3}
    assert (counts.requests, counts.latency.count) == (3, 3)


def test_a_bad_api_versions_request_is_counted() -> None:
    world = World()
    world.ask(ApiKey.API_VERSIONS, 3, client_software_name="-", client_software_version="1")
    assert world.broker.metrics.api("api_versions").errors == {"INVALID_REQUEST": 1}
