"""Kafka requests over a raw socket, for what stock clients do not show: bytes, one node alone."""

from __future__ import annotations

import socket
import struct

from raftmq.protocol import (
    Struct,
    decode_response,
    decode_response_header,
    encode_request,
    encode_request_header,
)
from raftmq.protocol.api_versions import ApiKey
from tests.live.harness import Node


def ask(node: Node, api: ApiKey, version: int, request: Struct) -> Struct:
    """One request on a connection of its own."""
    (answer,) = ask_at_once(node, api, version, [request])
    return answer


def ask_at_once(node: Node, api: ApiKey, version: int, requests: list[Struct]) -> list[Struct]:
    """Requests on one connection, all sent before the first answer is read."""
    return ask_each(node, [(api, version, request) for request in requests])


def ask_each(node: Node, requests: list[tuple[ApiKey, int, Struct]]) -> list[Struct]:
    """As `ask_at_once`, of several APIs."""
    answers = []
    with socket.create_connection((node.host, node.client_port), timeout=20) as sock:
        for api, version, request in requests:
            head = encode_request_header(api, version, 7, "raw")
            body = encode_request(api, version, request)
            sock.sendall(struct.pack(">i", len(head) + len(body)) + head + body)
        for api, version, _ in requests:
            (size,) = struct.unpack(">i", receive(sock, 4))
            frame = memoryview(receive(sock, size))
            _, position = decode_response_header(api, version, frame)
            answers.append(decode_response(api, version, frame[position:]))
    return answers


def fetch(node: Node, topic: str, offset: int = 0, partition: int = 0) -> tuple[int, bytes]:
    """What this node, leader or follower, gives a consumer: error code and batches."""
    wanted = Struct(
        partition=partition,
        fetch_offset=offset,
        last_fetched_epoch=-1,
        current_leader_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=1 << 20,
    )
    fetched = ask(
        node,
        ApiKey.FETCH,
        12,
        Struct(
            max_wait=100,
            min_bytes=1,
            max_bytes=1 << 20,
            isolation_level=0,
            session_id=0,
            session_epoch=-1,
            topics=[Struct(topic=topic, partitions=[wanted])],
            forgotten_topics_data=[],
            rack_id="",
        ),
    )
    (answer,) = fetched.responses[0].partitions
    return answer.error_code, bytes(answer.records or b"")


def produce(
    node: Node,
    topic: str,
    batch: bytes,
    *,
    acks: int = -1,
    timeout_ms: int = 10_000,
    partition: int = 0,
) -> tuple[int, int]:
    """What this node makes of one batch: error code and base offset."""
    part = Struct(index=partition, records=batch)
    topics = [Struct(name=topic, partition_data=[part])]
    request = Struct(transactional_id=None, acks=acks, timeout=timeout_ms, topic_data=topics)
    produced = ask(node, ApiKey.PRODUCE, 9, request)
    (answer,) = produced.responses[0].partition_responses
    return answer.error_code, answer.base_offset


def receive(sock: socket.socket, size: int) -> bytes:
    """So many bytes."""
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        assert piece, "closed in the middle of an answer"
        data += piece
    return bytes(data)
