"""Produce one batch of hand-made bytes to any broker, and what it says."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from typing import Final

from attrs import frozen

from raftmq.errors import ErrorCode
from raftmq.protocol import (
    Struct,
    decode_response,
    decode_response_header,
    encode_request,
    encode_request_header,
)
from raftmq.protocol.api_versions import ApiKey
from raftmq_client import Admin
from tests.poison.kinds import Kind

VERSION: Final = 9
CLOSED: Final = "closed"


@frozen
class Answer:
    """A code's name, or `CLOSED`; the records that were named; the message."""

    code: str
    records: tuple[int, ...] = ()
    message: str | None = None
    base_offset: int = -1


class Asker:
    """A connection to each leader, opened again when the broker closed it."""

    def __init__(self, bootstrap: str) -> None:
        self._admin = Admin(bootstrap)
        self._sockets: dict[str, socket.socket] = {}
        self._addresses: dict[str, tuple[str, int]] = {}

    def close(self) -> None:
        """Hang up."""
        for sock in self._sockets.values():
            sock.close()
        self._admin.close()

    def create(self, topic: str, configs: Mapping[str, str]) -> None:
        """A topic of one partition, led by somebody."""
        self._admin.create_topic(topic, partitions=1, configs=dict(configs))
        deadline = time.monotonic() + 30
        while True:
            cluster = self._admin.cluster([topic])
            found = [one for one in cluster.topics if one.partitions]
            if found and found[0].partitions[0].leader >= 0:
                break
            assert time.monotonic() < deadline, f"{topic} has no leader"
        leader = found[0].partitions[0].leader
        [broker] = [one for one in cluster.brokers if one.node_id == leader]
        self._addresses[topic] = broker.host, broker.port

    def ask(self, kind: Kind, topic: str, *, acks: int = -1) -> Answer:
        """What the leader of `topic` makes of a batch of that kind, built now."""
        part = Struct(index=0, records=kind.build(int(time.time() * 1000)))
        request = Struct(
            transactional_id=None,
            acks=acks,
            timeout=10_000,
            topic_data=[Struct(name=topic, partition_data=[part])],
        )
        head = encode_request_header(ApiKey.PRODUCE, VERSION, 7, "asker")
        body = encode_request(ApiKey.PRODUCE, VERSION, request)
        sock = self._sockets.get(topic)
        if sock is None:
            sock = socket.create_connection(self._addresses[topic], timeout=60)
            self._sockets[topic] = sock
        try:
            sock.sendall(struct.pack(">i", len(head) + len(body)) + head + body)
            (size,) = struct.unpack(">i", _receive(sock, 4))
            frame = memoryview(_receive(sock, size))
        except ConnectionError:
            self._sockets.pop(topic).close()
            return Answer(CLOSED)
        _, position = decode_response_header(ApiKey.PRODUCE, VERSION, frame)
        response = decode_response(ApiKey.PRODUCE, VERSION, frame[position:])
        (answer,) = response.responses[0].partition_responses
        return Answer(
            ErrorCode(answer.error_code).name,
            tuple(error.batch_index for error in answer.record_errors),
            answer.error_message,
            answer.base_offset,
        )


def _receive(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("closed in the middle of an answer")
        data += piece
    return bytes(data)
