"""Decoders and encoders that pause: they say the same as the others, in turns."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from raftmq.errors import RemoteProtocolError
from raftmq.protocol import (
    ApiKey,
    decode_request,
    decode_request_slowly,
    encode_request,
    encode_response,
    encode_response_slowly,
)
from raftmq.protocol.wire import TURN_ELEMENTS
from tests.protocol.messages import random_message


def finish(work: Generator[None, None, Any]) -> tuple[Any, int]:
    """What slow work returns, and in how many turns."""
    turns = 1
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value, turns
        turns += 1


@pytest.mark.parametrize(
    ("api", "version"),
    [(ApiKey.METADATA, v) for v in (0, 5, 9, 13)]
    + [(ApiKey.LIST_OFFSETS, v) for v in (1, 7, 10)]
    + [(ApiKey.OFFSET_FOR_LEADER_EPOCH, v) for v in (2, 4)],
)
def test_slow_coding_says_the_same(api: ApiKey, version: int) -> None:
    for seed in range(20):
        request, _ = random_message(api, version, "request", seed)
        body = encode_request(api, version, request)
        assert finish(decode_request_slowly(api, version, body))[0] == decode_request(
            api, version, body
        )
        response, _ = random_message(api, version, "response", seed)
        slow, _ = finish(encode_response_slowly(api, version, response))
        assert slow == encode_response(api, version, response)


def test_slow_coding_pauses() -> None:
    partition = {"partition": 1, "current_leader_epoch": 2, "leader_epoch": 3}
    topics = [{"topic": "t", "partitions": [partition] * 500}] * 3
    body = encode_request(ApiKey.OFFSET_FOR_LEADER_EPOCH, 4, {"replica_id": -1, "topics": topics})
    request, turns = finish(decode_request_slowly(ApiKey.OFFSET_FOR_LEADER_EPOCH, 4, body))
    assert [len(topic.partitions) for topic in request.topics] == [500] * 3
    assert turns == 1 + 1503 // TURN_ELEMENTS
    answer = {"topics": [{"topic": "t", "partitions": [{"partition": 1}] * 500}] * 3}
    _, turns = finish(encode_response_slowly(ApiKey.OFFSET_FOR_LEADER_EPOCH, 4, answer))
    assert turns == 1 + 1503 // TURN_ELEMENTS


def test_slow_coding_refuses_the_same() -> None:
    api = ApiKey.OFFSET_FOR_LEADER_EPOCH
    for body, elements_max in ((b"", 10), (bytes(4) + b"\xff\xff\xff\xff\x0f", 10)):
        with pytest.raises(RemoteProtocolError, match="OffsetForLeaderEpoch v4 request"):
            finish(decode_request_slowly(api, 4, body, elements_max=elements_max))
    many = encode_request(api, 4, {"replica_id": -1, "topics": [{"topic": "t"}] * 20})
    with pytest.raises(RemoteProtocolError, match="elements"):
        finish(decode_request_slowly(api, 4, many, elements_max=10))
    with pytest.raises(TypeError, match="topics"):
        finish(encode_response_slowly(api, 4, {"topics": 7}))
