"""Raw Kafka frames, for loads where a client library would be what is measured.

Blocking questions (`Wire`), frames made once and sent many times, and `Loop`: many connections on
one epoll, each with one small request in flight. Codecs are raftmq's own; the versions are ones
that both raftmq and Apache Kafka 4.1 speak.
"""

from __future__ import annotations

import heapq
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final

from attrs import define, field

from benchmarks.errors import BenchmarkError
from raftmq.protocol import (
    ApiKey,
    Struct,
    decode_response,
    decode_response_header,
    encode_request,
    encode_request_header,
)
from raftmq.protocol.fetch import FetchPartition, FetchRequest, FetchTopic, encode_fetch_request
from raftmq.protocol.produce import (
    ProducePartition,
    ProduceRequest,
    ProduceTopic,
    encode_produce_request,
)
from raftmq.records import NewRecord, build_batch
from raftmq.types import Buffer

PRODUCE_VERSION: Final = 9
FETCH_VERSION: Final = 12
METADATA_VERSION: Final = 9
CREATE_VERSION: Final = 5
_SIZE: Final = struct.Struct(">i")
_CLIENT: Final = "bench"
_READ: Final = 1 << 16
_SETTLE_S: Final = 20.0


class AnswerError(BenchmarkError):
    """The cluster answered with an error code."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what}: error {code}")
        self.code = code


def address_of(text: str) -> tuple[str, int]:
    """`host:port` as a pair."""
    host, _, port = text.rpartition(":")
    return host, int(port)


class Wire:
    """One blocking connection, one question at a time."""

    def __init__(self, address: tuple[str, int], timeout_s: float = 30.0) -> None:
        self._sock = socket.create_connection(address, timeout=timeout_s)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def exchange(self, frame: Buffer) -> memoryview:
        """Send a whole frame and receive the answer, without its size.

        Raises:
            OSError: the connection broke.
        """
        self._sock.sendall(frame)
        (size,) = _SIZE.unpack(self._receive(4))
        return memoryview(self._receive(size))

    def ask(self, api: ApiKey, version: int, request: Struct) -> Struct:
        """One request of a compiled API."""
        answer = self.exchange(_framed(api, version, [encode_request(api, version, request)]))
        _, position = decode_response_header(api, version, answer)
        return decode_response(api, version, answer[position:])

    def _receive(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        got = 0
        while got < size:
            count = self._sock.recv_into(view[got:])
            if not count:
                raise ConnectionResetError("closed in the middle of an answer")
            got += count
        return data


def _framed(api: ApiKey, version: int, body: Sequence[Buffer]) -> bytes:
    head = encode_request_header(api, version, 1, _CLIENT)
    size = len(head) + sum(len(piece) for piece in body)
    return b"".join([_SIZE.pack(size), head, *body])


def create_frame(topic: str, partitions: int, replicas: int, config: dict[str, str]) -> Struct:
    """The body of a CreateTopics request."""
    return Struct(
        topics=[
            Struct(
                name=topic,
                num_partitions=partitions,
                replication_factor=replicas,
                assignments=[],
                configs=[Struct(name=name, value=value) for name, value in config.items()],
            )
        ],
        timeout=5_000,
        validate_only=False,
    )


def produce_frame(topic: str, partition: int, batch: Buffer, acks: int = -1) -> bytes:
    """A whole Produce request; the same bytes may be sent again and again."""
    part = ProducePartition(partition, memoryview(batch))
    request = ProduceRequest(None, acks, 30_000, [ProduceTopic(topic, None, [part])])
    body = encode_produce_request(PRODUCE_VERSION, request)
    return _framed(ApiKey.PRODUCE, PRODUCE_VERSION, body)


def fetch_frame(topic: str, partition: int, offset: int, wait_ms: int) -> bytes:
    """A whole Fetch request of one partition, without a session."""
    part = FetchPartition(partition, fetch_offset=offset)
    request = FetchRequest(max_wait_ms=wait_ms, topics=[FetchTopic(topic, None, [part])])
    body = encode_fetch_request(FETCH_VERSION, request)
    return _framed(ApiKey.FETCH, FETCH_VERSION, [body])


def batch_of(count: int, size: int, payload: bytes) -> bytes:
    """One batch of so many records, their values cut from the payload in turn."""
    steps = len(payload) - size
    records = [
        NewRecord(None, payload[(i * 37) % steps : (i * 37) % steps + size]) for i in range(count)
    ]
    return bytes(build_batch(records, timestamp=int(time.time() * 1000)))


def check_produced(answer: Buffer) -> int:
    """The base offset of a Produce's only partition.

    Raises:
        AnswerError: it was refused.
    """
    _, position = decode_response_header(ApiKey.PRODUCE, PRODUCE_VERSION, answer)
    body = decode_response(ApiKey.PRODUCE, PRODUCE_VERSION, memoryview(answer)[position:])
    (part,) = body.responses[0].partition_responses
    if part.error_code:
        raise AnswerError("Produce", part.error_code)
    return int(part.base_offset)


def check_fetched(answer: Buffer) -> int:
    """How many bytes of records a Fetch's only partition gave.

    Raises:
        AnswerError: it was refused.
    """
    _, position = decode_response_header(ApiKey.FETCH, FETCH_VERSION, answer)
    body = decode_response(ApiKey.FETCH, FETCH_VERSION, memoryview(answer)[position:])
    (part,) = body.responses[0].partitions
    if part.error_code:
        raise AnswerError("Fetch", part.error_code)
    return len(part.records or b"")


def leader_addresses(
    bootstrap: str, topic: str, *, preferred: bool = False
) -> dict[int, tuple[str, int]]:
    """The address of each partition's leader.

    Raises:
        AnswerError: the topic is not known, or a partition has no leader, or (where that is asked
            for) not its preferred one.
    """
    with Wire(address_of(bootstrap.split(",")[0])) as wire:
        request = Struct(
            topics=[Struct(name=topic)],
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        )
        told = wire.ask(ApiKey.METADATA, METADATA_VERSION, request)
    brokers = {broker.node_id: (broker.host, broker.port) for broker in told.brokers}
    found: dict[int, tuple[str, int]] = {}
    for part in told.topics[0].partitions:
        if part.leader_id not in brokers:
            raise AnswerError(f"{topic}-{part.partition_index} has no leader", part.error_code)
        if preferred and part.leader_id != part.replica_nodes[0]:
            raise AnswerError(f"{topic}-{part.partition_index} is led by a stand-in", 0)
        found[part.partition_index] = brokers[part.leader_id]
    if not found:
        raise AnswerError(f"topic {topic}", told.topics[0].error_code)
    return found


def settled_leaders(bootstrap: str, topic: str) -> dict[int, tuple[str, int]]:
    """The address of each partition's leader, once each is the preferred one and knows it.

    A cluster moves leaderships to the preferred leaders a while after a topic was made; a client
    library follows, raw frames do not.

    Raises:
        BenchmarkError: it does not come to that in time.
    """
    deadline = time.monotonic() + _SETTLE_S
    while True:
        try:
            leaders = leader_addresses(bootstrap, topic, preferred=True)
            for part, address in leaders.items():
                with Wire(address) as wire:
                    check_fetched(wire.exchange(fetch_frame(topic, part, 0, 0)))
            return leaders
        except AnswerError as error:
            if time.monotonic() > deadline:
                raise BenchmarkError(f"leaders of {topic} do not settle: {error}") from error
            time.sleep(0.1)


@define(eq=False)
class Line:
    """One connection of a `Loop`: at most one request in flight."""

    sock: socket.socket
    on_answer: Callable[[Line, bytes], None]
    sent_at: float = 0.0
    pending: bytearray = field(factory=bytearray)

    def send(self, frame: bytes) -> None:
        """Send a small request; the socket's buffer is empty, so it takes it whole."""
        self.sent_at = time.perf_counter()
        sent = self.sock.send(frame)
        if sent != len(frame):
            raise BenchmarkError(f"a socket took {sent} of {len(frame)} bytes")


class Loop:
    """Many lines and timers on one epoll."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            key.data.sock.close()
        self._selector.close()

    def connect(self, address: tuple[str, int], on_answer: Callable[[Line, bytes], None]) -> Line:
        """Open a line."""
        sock = socket.create_connection(address, timeout=30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        line = Line(sock, on_answer)
        self._selector.register(sock, selectors.EVENT_READ, line)
        return line

    def disconnect(self, line: Line) -> None:
        """Close a line."""
        self._selector.unregister(line.sock)
        line.sock.close()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call at a time of the performance counter."""
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, call))

    def run_until(self, end: float) -> None:
        """Serve lines and timers.

        Raises:
            BenchmarkError: the other side closed a line.
        """
        timers = self._timers
        while (now := time.perf_counter()) < end:
            while timers and timers[0][0] <= now:
                heapq.heappop(timers)[2]()
            next_at = min(end, timers[0][0]) if timers else end
            for key, _ in self._selector.select(max(0.0, next_at - time.perf_counter())):
                if key.data.sock.fileno() >= 0:  # else another's answer had it closed
                    self._read(key.data)

    def _read(self, line: Line) -> None:
        data = line.sock.recv(_READ)
        if not data:
            raise BenchmarkError("the server closed a connection")
        pending = line.pending
        pending += data
        while len(pending) >= 4:
            end = 4 + _SIZE.unpack_from(pending)[0]
            if len(pending) < end:
                return
            answer = bytes(pending[4:end])
            del pending[:end]
            line.on_answer(line, answer)
