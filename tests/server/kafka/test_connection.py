"""A connection over a socketpair with a fake dispatcher: order, limits, slow and rude clients."""

from __future__ import annotations

import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
import trio
import trio.testing
from attrs import define, field

from jepsen_like.disk import SimDisk
from raftmq.errors import RemoteProtocolError
from raftmq.log.model import FileSpan
from raftmq.ports import DiskError, File
from raftmq.runtime.disk import RealDisk
from raftmq.server.kafka.authentication import Caller
from raftmq.server.kafka.connection import SCRATCH_BYTES, Connection, Shared
from raftmq.server.kafka.counts import ServerCounts
from raftmq.server.kafka.limits import Limits
from raftmq.server.kafka.replies import Pieces, ReplyQueue, Slot
from tests.server.kafka.ports import client_port

PRODUCE, METADATA, OFFSET_COMMIT = 0, 3, 8


def request(correlation_id: int, size: int = 32, api_key: int = METADATA) -> bytes:
    body = struct.pack(">hhi", api_key, 9, correlation_id)
    return struct.pack(">i", size) + body + bytes(size - len(body))


def reply(correlation_id: int, payload: bytes = b"") -> bytes:
    return struct.pack(">ii", 4 + len(payload), correlation_id) + payload


@define
class FakeBroker:
    """Keeps what was begun; answers at once unless told to park."""

    slots: dict[int, Slot] = field(factory=dict)
    sizes: list[int] = field(factory=list)
    last: bytes = b""
    parks: Callable[[int], bool] = lambda _id: False
    answer: Callable[[int], Pieces] = lambda correlation_id: (reply(correlation_id),)

    def begin(self, frame: memoryview, slot: Slot, _connection: Connection) -> None:
        api_key, _, correlation_id = struct.unpack_from(">hhi", frame)
        if api_key == 99:
            raise RemoteProtocolError("API 99 is not offered")
        assert not frame.readonly, "records are stamped in place"
        self.sizes.append(len(frame))
        self.last = bytes(frame)
        if self.parks(correlation_id):
            self.slots[correlation_id] = slot
        else:
            slot.answer(self.answer(correlation_id))

    def settle(self, correlation_id: int) -> None:
        self.slots.pop(correlation_id).answer(self.answer(correlation_id))


@define
class Client:
    sock: trio.socket.SocketType
    connection: Connection
    shared: Shared
    is_served: trio.Event

    async def send(self, data: bytes) -> None:
        stream = trio.SocketStream(self.sock)
        await stream.send_all(data)

    async def receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = await self.sock.recv(size - len(data))
            assert piece, f"closed after {len(data)} of {size} bytes"
            data += piece
        return data

    async def receive_ids(self, count: int) -> list[int]:
        ids = []
        for _ in range(count):
            size, correlation_id = struct.unpack(">ii", await self.receive(8))
            await self.receive(size - 4)
            ids.append(correlation_id)
        return ids


@asynccontextmanager
async def connected(broker: FakeBroker, limits: Limits | None = None) -> AsyncIterator[Client]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    port = client_port(broker.begin, limits or Limits(), ServerCounts())
    shared = port.shared
    served = trio.Event()
    sock = trio.socket.from_stdlib_socket(theirs)
    async with port.served() as nursery:
        connection = Connection(ours, "test:1", shared, served.set, Caller(host="test"))
        connection.open()
        try:
            yield Client(sock, connection, shared, served)
        finally:
            sock.close()
            with trio.fail_after(30):
                await served.wait()
            assert not connection.on_close
            for slot in list(broker.slots.values()):
                slot.answer(())
            assert shared.memory.bytes_used == 0, "every byte charged is given back"
            await trio.testing.wait_all_tasks_blocked()
            assert len(nursery.child_tasks) == 2, "no task of a connection outlives it"


async def test_answers_a_request() -> None:
    async with connected(FakeBroker()) as client:
        await client.send(request(7))
        assert await client.receive(8) == reply(7)
        assert client.shared.metrics.direct_sends == 1
        assert client.shared.metrics.writer_wakes == 0


async def test_pipelined_answers_keep_the_order_of_requests() -> None:
    broker = FakeBroker(parks=lambda correlation_id: correlation_id % 2 == 0)
    async with connected(broker) as client:
        await client.send(b"".join(request(i) for i in range(6)))
        while len(broker.sizes) < 6:
            await trio.lowlevel.checkpoint()
        for correlation_id in (4, 2, 0):
            broker.settle(correlation_id)
        assert await client.receive_ids(6) == list(range(6))


async def test_one_byte_at_a_time() -> None:
    async with connected(FakeBroker()) as client:
        for byte in request(1) + request(2):
            await client.send(bytes((byte,)))
            await trio.testing.wait_all_tasks_blocked()
        assert await client.receive_ids(2) == [1, 2]


@pytest.mark.parametrize(
    "size",
    [SCRATCH_BYTES - 5, SCRATCH_BYTES - 4, SCRATCH_BYTES - 3, SCRATCH_BYTES, 3 * SCRATCH_BYTES + 1],
)
async def test_frames_around_the_scratch_buffer(size: int) -> None:
    broker = FakeBroker()
    async with connected(broker) as client:
        await client.send(request(1, 40) + request(2, size, PRODUCE) + request(3, 40))
        assert await client.receive_ids(3) == [1, 2, 3]
    assert broker.sizes == [40, size, 40]


async def test_large_frame_content_arrives_whole() -> None:
    broker = FakeBroker()
    body = struct.pack(">hhi", PRODUCE, 9, 1) + bytes(range(256)) * 1000
    async with connected(broker) as client:
        await client.send(struct.pack(">i", len(body)) + body)
        assert await client.receive_ids(1) == [1]
    assert broker.last == body


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">ihhi", -1, METADATA, 9, 1),
        struct.pack(">ihhi", 7, METADATA, 9, 1),
        struct.pack(">ihhi", (1 << 20) + 1, METADATA, 9, 1),
        struct.pack(">ihhi", (100 << 20) + 1, PRODUCE, 9, 1),
        struct.pack(">ihhi", 0x7FFFFFFF, PRODUCE, 9, 1),
        request(1, 8, 99),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["negative", "short", "control", "produce", "huge", "unknown API", "another protocol"],
)
async def test_bad_frames_cost_their_connection(data: bytes) -> None:
    async with connected(FakeBroker()) as client:
        await client.send(data)
        with trio.fail_after(30):
            await client.is_served.wait()
        assert client.shared.metrics.protocol_errors == 1
        assert await client.sock.recv(100) == b""


async def test_frames_at_their_limits_are_taken() -> None:
    broker = FakeBroker()
    limits = Limits(request_bytes_max=200_000, request_control_bytes_max=100_000)
    async with connected(broker, limits) as client:
        await client.send(request(1, 100_000) + request(2, 200_000, PRODUCE))
        assert await client.receive_ids(2) == [1, 2]
        await client.send(request(3, 100_001))
        with trio.fail_after(30):
            await client.is_served.wait()
    assert broker.sizes == [100_000, 200_000]


async def test_a_large_commit_reaches_who_can_name_its_error() -> None:
    broker = FakeBroker()
    limits = Limits(request_bytes_max=200_000, request_control_bytes_max=100_000)
    async with connected(broker, limits) as client:
        await client.send(request(1, 200_000, OFFSET_COMMIT))
        assert await client.receive_ids(1) == [1]
        await client.send(request(2, 200_001, OFFSET_COMMIT))
        with trio.fail_after(30):
            await client.is_served.wait()
    assert broker.sizes == [200_000]


async def test_no_more_than_the_pipeline_depth_is_begun() -> None:
    broker = FakeBroker(parks=lambda _id: True)
    async with connected(broker, Limits(pipeline_depth_max=3)) as client:
        await client.send(b"".join(request(i) for i in range(5)))
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(broker.slots) == [0, 1, 2]
        broker.settle(1)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(broker.slots) == [0, 2], "its answer still waits for that of 0"
        broker.settle(0)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(broker.slots) == [2, 3, 4]
        for correlation_id in (2, 3, 4):
            broker.settle(correlation_id)
        assert await client.receive_ids(5) == list(range(5))


async def test_no_more_than_the_pipeline_bytes_are_begun() -> None:
    broker = FakeBroker(parks=lambda _id: True)
    async with connected(broker, Limits(pipeline_bytes_max=1000)) as client:
        await client.send(b"".join(request(i, 500) for i in range(4)))
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(broker.slots) == [0, 1]
        assert client.connection.replies.unanswered_bytes == 1000
        for correlation_id in range(4):
            await trio.testing.wait_all_tasks_blocked()
            broker.settle(correlation_id)
        assert await client.receive_ids(4) == list(range(4))
        assert client.connection.replies.unanswered_bytes == 0


async def test_slow_client_stops_its_own_reader() -> None:
    payload = bytes(100_000)
    broker = FakeBroker(answer=lambda i: (reply(i, payload),))
    async with connected(broker, Limits(pipeline_bytes_max=300_000)) as client:
        await client.send(b"".join(request(i) for i in range(60)))
        await trio.testing.wait_all_tasks_blocked()
        begun = len(broker.sizes)
        assert begun < 20, "answers that nobody takes hold the reader back"
        assert client.connection.replies.stalled_since is not None
        assert client.shared.memory.bytes_used <= 500_000
        assert await client.receive_ids(60) == list(range(60))
        assert client.connection.replies.stalled_since is None
    assert len(broker.sizes) == 60


async def test_answers_that_nobody_wants_send_nothing() -> None:
    broker = FakeBroker(answer=lambda i: () if i == 1 else (reply(i),))
    async with connected(broker) as client:
        await client.send(request(0) + request(1) + request(2))
        assert await client.receive_ids(2) == [0, 2]


async def test_hang_up_in_the_middle_of_a_frame_gives_memory_back() -> None:
    async with connected(FakeBroker()) as client:
        await client.send(request(1, 500_000, PRODUCE)[:100_000])
        await trio.testing.wait_all_tasks_blocked()
        assert client.shared.memory.bytes_used == 100_000 - 4, "what came is charged"


@pytest.mark.parametrize("sent", [4, 12, 40])
async def test_an_announcement_costs_nothing(sent: int) -> None:
    frame = struct.pack(">ihhi", 100 << 20, PRODUCE, 7, 1) + bytes(100)
    tracemalloc.start()
    try:
        async with connected(FakeBroker()) as client:
            await client.send(frame[:sent])
            await trio.testing.wait_all_tasks_blocked()
            assert client.shared.memory.bytes_used <= sent
            assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


async def test_hang_up_abandons_what_is_parked() -> None:
    broker = FakeBroker(parks=lambda _id: True)
    dropped: list[bool] = []
    async with connected(broker) as client:
        await client.send(request(1))
        await trio.testing.wait_all_tasks_blocked()
        client.connection.on_close[1] = lambda: dropped.append(True)
    assert dropped == [True]


async def test_late_answer_to_a_gone_client_harms_nobody() -> None:
    broker = FakeBroker(parks=lambda _id: True)
    async with connected(broker) as client:
        await client.send(request(1) + request(2))
        await trio.testing.wait_all_tasks_blocked()
        client.sock.close()
        with trio.fail_after(30):
            await client.is_served.wait()
        assert client.shared.memory.bytes_used == 64, "parked requests still hold their bytes"
        broker.settle(2)
        broker.settle(1)
        assert client.shared.memory.bytes_used == 0


async def test_stalled_connections_are_hung_up_on(autojump_clock: trio.testing.MockClock) -> None:
    limits = Limits(
        connection_idle_ms=10_000, request_receive_timeout_ms=2_000, send_stall_ms=3_000
    )
    broker = FakeBroker(parks=lambda i: i == 1)
    async with connected(broker, limits) as client:
        connection = client.connection
        start = trio.current_time()
        assert not connection.hang_up_if_stalled(start + 9)
        await client.send(request(1))
        await trio.testing.wait_all_tasks_blocked()
        assert not connection.hang_up_if_stalled(start + 100), "an answer is owed"
        broker.settle(1)
        await client.receive_ids(1)
        await client.send(request(2, 500_000, PRODUCE)[:100])
        await trio.testing.wait_all_tasks_blocked()
        assert not connection.hang_up_if_stalled(trio.current_time() + 1.9)
        assert connection.hang_up_if_stalled(trio.current_time() + 2.1)
        with trio.fail_after(30):
            await client.is_served.wait()


@pytest.mark.parametrize("size", [10_000, 500_000])
async def test_a_frame_has_a_deadline(autojump_clock: trio.testing.MockClock, size: int) -> None:
    limits = Limits(request_receive_timeout_ms=2_000, request_receive_bytes_per_s_min=100_000)
    async with connected(FakeBroker(), limits) as client:
        slow = client.connection
        frame = request(1, size, PRODUCE)
        await client.send(frame[:100])
        await trio.testing.wait_all_tasks_blocked()
        seconds_max = 2 + size / 100_000
        for second in range(int(seconds_max)):
            await trio.sleep(1)
            await client.send(frame[100 + second : 101 + second])
            await trio.testing.wait_all_tasks_blocked()
            assert not slow.hang_up_if_stalled(trio.current_time()), "it is slow, and in time"
        await trio.sleep(1)
        await client.send(frame[200:201])
        await trio.testing.wait_all_tasks_blocked()
        assert slow.hang_up_if_stalled(trio.current_time())
        assert client.shared.metrics.refusals == {"request_receive_timeout_ms": 1}


async def test_a_frame_on_a_thin_line_is_received(autojump_clock: trio.testing.MockClock) -> None:
    """At just above the slowest rate, for longer than the timeout alone."""
    limits = Limits(request_receive_timeout_ms=2_000, request_receive_bytes_per_s_min=10_000)
    broker = FakeBroker()
    async with connected(broker, limits) as client:
        frame = request(1, 150_000, PRODUCE)
        for start in range(0, len(frame), 10_000):
            await client.send(frame[start : start + 10_000])
            await trio.testing.wait_all_tasks_blocked()
            assert not client.connection.hang_up_if_stalled(trio.current_time())
            await trio.sleep(1)
        assert await client.receive_ids(1) == [1]
        assert broker.sizes == [150_000]


async def test_who_holds_memory_and_sends_nothing_makes_room(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limits = Limits(request_memory_bytes_max=600_000)
    async with connected(FakeBroker(), limits) as client:
        memory = client.shared.memory
        await client.send(request(1, 50 << 20, PRODUCE)[:550_000])
        await trio.testing.wait_all_tasks_blocked()
        assert 500_000 < memory.bytes_used < 600_000
        other = memory.open(100_000, trio.current_time(), lambda: None)

        async def receive() -> None:
            while other.held < 100_000:
                await memory.grow(other, 100_000 - other.held)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            assert memory.waiting_count == 1, "the frame may be on its way still"
            await trio.sleep(1.1)
            memory.relieve(trio.current_time())
        assert memory.waiting_count == 0, "who waited has the memory"
        with trio.fail_after(30):
            await client.is_served.wait()
        assert client.shared.metrics.refusals == {"request_memory_bytes_max": 1}
        memory.drop(other)


async def test_memory_that_is_not_there_costs_one_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*_args: object) -> None:
        raise MemoryError

    async with connected(FakeBroker()) as client:
        monkeypatch.setattr(Connection, "_receive_piece", none_left)
        await client.send(request(1, 500_000, PRODUCE)[:1000])
        with trio.fail_after(30):
            await client.is_served.wait()
        assert client.shared.metrics.refusals == {"memory": 1}
        assert not client.shared.metrics.bugs


BORDERS = [
    "_receive_now",
    "_begin_each",
    "_note_pending",
    "_read_while_busy",
    "_receive_piece",
    "_drain",
    "is_idle",
    "_send_alone",
    "_send_ready",
    "drain",
    "on_close",
]


@pytest.mark.parametrize("place", BORDERS)
async def test_a_bug_costs_its_connection_alone(
    place: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """Planted wherever a connection is called from the loop; told once, with its kind."""

    class Planted(Exception):
        pass

    def raises(*_args: object, **_kwargs: object) -> None:
        raise Planted("a bug")

    broker = FakeBroker(parks=lambda i: i == 9)
    async with connected(broker) as client:
        connection, metrics = client.connection, client.shared.metrics
        if place == "on_close":
            connection.on_close[1] = raises
            connection.close()
        elif place == "is_idle":
            monkeypatch.setattr(ReplyQueue, place, property(raises))
            with pytest.raises(Planted):
                connection.hang_up_if_stalled(trio.current_time())
            connection.failed(Planted())
        elif place == "drain":
            monkeypatch.setattr(ReplyQueue, place, raises)
            connection.stalled()
        else:
            owner = ReplyQueue if place.startswith("_send") else Connection
            monkeypatch.setattr(owner, place, raises)
            if place == "_send_ready":
                await client.send(request(9) + request(1))
                await trio.testing.wait_all_tasks_blocked()
                broker.settle(9)
            elif place == "_drain":
                connection.finish()
            elif place.startswith("_re") and place != "_receive_now":
                await client.send(request(1, 500_000, PRODUCE)[:1000])
            else:
                await client.send(request(1) + request(2)[:3])
        with trio.fail_after(30):
            await client.is_served.wait()
        assert metrics.bugs == {"Planted": 1}


async def test_spans_leave_in_order_between_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 20_000  # 5 MB
    path = tmp_path / "segment"
    path.write_bytes(content)
    file = RealDisk().open(str(path))
    pieces: list[object] = []
    expected = bytearray()
    for position, size in ((0, 100), (77, 3 << 20), (1000, 16 << 10), (5, 17 << 10), (9, 1)):
        head = b"<%d:" % size
        pieces += [head, FileSpan(file, position, size)]
        expected += head + content[position : position + size]
    pieces.append(b">")
    expected += b">"
    broker = FakeBroker(answer=lambda i: (reply(i), *pieces))  # type: ignore[arg-type,return-value]
    async with connected(broker) as client:
        await client.send(request(1) + request(2))
        for correlation_id in (1, 2):
            assert await client.receive(8) == reply(correlation_id)
            assert await client.receive(len(expected)) == expected
        assert client.shared.metrics.bytes_sendfile >= 6 << 20
    file.close()


async def test_short_file_ends_the_connection(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(100))
    file = RealDisk().open(str(path))
    span = FileSpan(file, 50, 30_000)
    broker = FakeBroker(answer=lambda i: (reply(i), span))
    async with connected(broker) as client:
        await client.send(request(1))
        with trio.fail_after(30):
            await client.is_served.wait()
    file.close()


async def test_a_sector_that_cannot_be_read_ends_the_connection_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(100_000))
    file = RealDisk().open(str(path))

    def fails(file: File, _position: int, _size: int) -> None:
        raise DiskError(f"{file.path}: Input/output error")

    monkeypatch.setattr("raftmq.server.kafka.replies.is_warm", lambda *_: False)
    monkeypatch.setattr("raftmq.server.kafka.replies.warm", fails)
    broker = FakeBroker(answer=lambda i: (reply(i), FileSpan(file, 0, 50_000)))
    async with connected(broker) as client:
        await client.send(request(1))
        with trio.fail_after(30):
            await client.is_served.wait()
    file.close()


async def test_large_frames_queue_for_node_memory() -> None:
    broker = FakeBroker(parks=lambda _id: True)
    limits = Limits(request_memory_bytes_max=250_000)
    async with connected(broker, limits) as client:
        await client.send(request(1, 200_000, PRODUCE) + request(2, 100_000, PRODUCE))
        await trio.testing.wait_all_tasks_blocked()
        assert broker.sizes == [200_000]
        assert client.shared.memory.waiting_count == 1
        broker.settle(1)
        await client.receive_ids(1)
        await trio.testing.wait_all_tasks_blocked()
        assert broker.sizes == [200_000, 100_000]
        broker.settle(2)
        assert await client.receive_ids(1) == [2]


async def test_cold_bytes_are_read_ahead_by_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(range(256)) * 10_000
    path = tmp_path / "segment"
    path.write_bytes(content)
    file = RealDisk().open(str(path))
    asked: set[tuple[int, int]] = set()

    def is_warm(_file: object, position: int, size: int) -> bool:
        was_asked = (position, size) in asked
        asked.add((position, size))
        return was_asked

    monkeypatch.setattr("raftmq.server.kafka.replies.is_warm", is_warm)
    pieces = (b"(", FileSpan(file, 0, 2_000_000), b")", FileSpan(file, 100, 50), b"!")
    expected = b"(" + content[:2_000_000] + b")" + content[100:150] + b"!"
    broker = FakeBroker(answer=lambda i: (reply(i), *pieces))
    async with connected(broker) as client:
        await client.send(request(1))
        assert await client.receive(8) == reply(1)
        assert await client.receive(len(expected)) == expected
        assert client.shared.metrics.read_aheads >= 3
    file.close()


async def test_files_without_a_descriptor_are_read() -> None:
    disk = SimDisk(Random(1))
    disk.make_directories("d")
    file = disk.open("d/f", create=True)
    content = bytes(range(256)) * 1000
    file.pwrite(content, 0)
    span = FileSpan(file, 10, 200_000)
    broker = FakeBroker(answer=lambda i: (reply(i), span))
    async with connected(broker) as client:
        await client.send(request(1))
        assert await client.receive(8) == reply(1)
        assert await client.receive(span.size) == content[10:200_010]


async def test_a_failed_answer_ends_the_connection() -> None:
    broker = FakeBroker(parks=lambda _id: True)
    async with connected(broker) as client:
        await client.send(request(1) + request(2))
        await trio.testing.wait_all_tasks_blocked()
        broker.slots.pop(2).fail()
        with trio.fail_after(30):
            await client.is_served.wait()


async def test_nothing_is_begun_behind_a_request_that_bars_its_line() -> None:
    """A large request asks for what it wants in turns; the next one waits until it has."""
    broker = FakeBroker()
    async with connected(broker) as client:
        replies = client.connection.replies
        begin = client.shared.begin

        def bars(frame: memoryview, slot: Slot, connection: Connection) -> None:
            begin(frame, slot, connection)
            if len(broker.sizes) == 1:
                replies.bar()

        client.shared.begin = bars
        await client.send(request(1) + request(2) + request(3, 100_000, PRODUCE))
        await trio.testing.wait_all_tasks_blocked()
        assert len(broker.sizes) == 1
        replies.unbar()
        assert await client.receive_ids(3) == [1, 2, 3]
