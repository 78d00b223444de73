"""Clients that do anything in any order, on one port: answers in order, nothing lost or kept."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from pathlib import Path
from random import Random
from time import sleep

import pytest
import trio
import trio.testing
from attrs import define, field

from raftmq.log.model import FileSpan
from raftmq.log.prefetch import warm
from raftmq.ports import File
from raftmq.runtime.disk import RealDisk
from raftmq.server.kafka.connection import TURN_FRAMES_MAX, Connection
from raftmq.server.kafka.counts import ServerCounts
from raftmq.server.kafka.limits import Limits
from raftmq.server.kafka.listener import ClientPort
from raftmq.server.kafka.replies import Pieces, Slot
from tests.server.kafka.ports import client_port
from tests.server.kafka.test_readiness import request

LIMITS = Limits(
    pipeline_depth_max=6, pipeline_bytes_max=400_000, request_memory_bytes_max=1_400_000
)
SIZES = (8, 8, 32, 32, 500, 500, 3_000, 32_763, 32_764, 32_765, 70_000, 300_000)
CLIENTS = 16
STEPS = 40
LATE_REQUESTS = 100
"""Of a client that comes after all others: so many answers at least, however the others fared."""


@define
class Server:
    """Answers at once, later, in parts of a file, with nothing, or by hanging up."""

    random: Random
    file: File
    fails: float = 0.01
    parked: list[tuple[Slot, int]] = field(factory=list)
    begun: dict[int, list[int]] = field(factory=dict)

    def begin(self, frame: memoryview, slot: Slot, connection: Connection) -> None:
        (number,) = struct.unpack_from(">i", frame, 4)
        self.begun.setdefault(id(connection), []).append(number)
        assert not connection.is_closed
        if self.random.random() < 0.4:
            self.parked.append((slot, number))
        else:
            self.settle(slot, number)

    def settle(self, slot: Slot, number: int) -> None:
        if self.random.random() < self.fails:
            slot.fail()
        else:
            slot.answer(self.answer(number))

    def settle_some(self) -> None:
        self.random.shuffle(self.parked)
        for _ in range(self.random.randrange(len(self.parked) + 1)):
            self.settle(*self.parked.pop())

    def answer(self, number: int) -> Pieces:
        size = self.random.choice((0, 10, 20_000, 200_000))
        head = struct.pack(">ii", 4 + size, number)
        if size and self.random.random() < 0.5:
            return (head, FileSpan(self.file, 0, size))
        return (head + bytes(size),)


@define
class Client:
    sock: socket.socket
    random: Random
    sent: int = 0
    answered: int = 0
    unsent: bytearray = field(factory=bytearray)
    received: bytearray = field(factory=bytearray)
    is_gone: bool = False

    def act(self) -> None:
        """One thing that clients do."""
        what = self.random.random()
        if what < 0.005:
            self.sock.shutdown(socket.SHUT_WR)
            self.is_gone = True
        elif what < 0.015:
            self.sock.close()
            self.is_gone = True
        elif what < 0.6:
            for _ in range(self.random.choice((1, 1, 2, 9))):
                size = self.random.choice(SIZES)
                self.unsent += request(self.sent, size, 0)
                self.sent += 1
            self.send(self.random.choice((5, 40_000, 1 << 20)))
        else:
            self.send(1 << 20)
            self.receive(self.random.choice((100, 50_000, 1 << 20)))

    def send(self, size: int) -> None:
        try:
            if self.unsent:
                del self.unsent[: self.sock.send(self.unsent[:size])]
        except BlockingIOError:
            return
        except OSError:
            self.is_gone = True

    def receive(self, size: int) -> None:
        try:
            data = self.sock.recv(size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.is_gone |= not data
        self.received += data
        while len(self.received) >= 8:
            length, number = struct.unpack_from(">ii", self.received)
            if len(self.received) < 4 + length:
                return
            del self.received[: 4 + length]
            assert number == self.answered, "answers come in order, each once"
            self.answered += 1


def warm_late(file: File, position: int, size: int) -> None:
    """A worker that takes its time."""
    sleep(0.02)
    warm(file, position, size)


@pytest.mark.parametrize("is_cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("seed", range(4))
async def test_clients_that_do_anything(
    seed: int, is_cold: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    if is_cold:
        monkeypatch.setattr(
            "raftmq.server.kafka.replies.is_warm", lambda *_span: random.random() < 0.7
        )
        monkeypatch.setattr("raftmq.server.kafka.replies.warm", warm_late)
    (tmp_path / "segment").write_bytes(bytes(200_000))
    file = RealDisk().open(str(tmp_path / "segment"))
    server = Server(random, file)
    port = client_port(server.begin, LIMITS, ServerCounts())
    clients: list[Client] = []
    async with port.served() as nursery:
        for _ in range(CLIENTS):
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            port.adopt(ours, "test:1")
            clients.append(Client(theirs, random))
            theirs.send(request(0, 8, 0))
            clients[-1].sent = 1
        await trio.testing.wait_all_tasks_blocked()
        assert len(server.begun) == CLIENTS, "how far each comes after that is left to chance"
        for _ in range(STEPS):
            for client in clients:
                if not client.is_gone:
                    client.act()
            server.settle_some()
            now = trio.current_time() + random.choice((0, 0, 5))
            for connection in list(port.connections.values()):
                if not connection.hang_up_if_stalled(now):
                    connection.rest_if_quiet(now)
            for _ in range(random.randrange(4)):
                await trio.lowlevel.checkpoint()
        for client in clients:
            if client.is_gone:
                client.sock.close()  # who does not read holds memory until the sweep ends that
        await finish(port, server, [client for client in clients if not client.is_gone])
        server.fails = 0.0
        await call_late(port, server)
        for client in clients:
            client.sock.close()
        with trio.fail_after(30):
            # Some wait for a worker that reads ahead, which no task's being blocked tells.
            while port.connections or server.parked or len(nursery.child_tasks) > 2:
                server.settle_some()
                await trio.lowlevel.checkpoint()
        # While the server runs: at its end it lets go of whoever waits.
        assert port.shared.budget.waiting_count == 0
        assert port.connections == {}
        assert len(nursery.child_tasks) == 2
    assert port.shared.memory.bytes_used == 0


async def test_requests_are_begun_though_an_answer_took_their_room_meanwhile() -> None:
    """A turn was over; while the reader waited for the next one, a large answer behind one that
    was owed took the room. What had been received waited for more bytes to come, not for room."""
    count = TURN_FRAMES_MAX + 3
    limits = Limits(pipeline_depth_max=2 * count, pipeline_bytes_max=100_000)
    slots: list[Slot] = []

    async def settle_late() -> None:
        await trio.lowlevel.checkpoint()
        slots[1].answer((bytes(200_000),))

    def begin(frame: memoryview, slot: Slot, connection: Connection) -> None:
        slots.append(slot)
        if len(slots) == TURN_FRAMES_MAX:
            nursery.start_soon(settle_late)

    port = client_port(begin, limits, ServerCounts())
    async with port.served() as nursery:
        for _ in range(30):  # which task is first in a pass is left to chance
            slots.clear()
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            port.adopt(ours, "test:1")
            theirs.send(b"".join(request(number, 8, 0) for number in range(count)))
            with trio.fail_after(30):
                while len(slots) < count:
                    await trio.testing.wait_all_tasks_blocked()
                    for slot in slots:
                        if slot.pieces is None:
                            slot.answer((b"",))
                    with suppress(BlockingIOError):
                        theirs.recv(1 << 20)
            theirs.close()
            await trio.testing.wait_all_tasks_blocked()


async def call_late(port: ClientPort, server: Server) -> None:
    """What others did costs a client nothing that comes after them."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    port.adopt(ours, "test:1")
    late = Client(theirs, server.random)
    for number in range(LATE_REQUESTS):
        late.unsent += request(number, 500, 0)
    late.sent = LATE_REQUESTS
    await finish(port, server, [late])
    assert late.answered == LATE_REQUESTS
    theirs.close()


async def finish(port: ClientPort, server: Server, left: list[Client]) -> None:
    """Whoever still is there gets every answer that is owed."""
    with trio.fail_after(30):
        while any(client.answered < client.sent for client in left):
            server.settle_some()
            port.shared.memory.relieve(trio.current_time())
            await trio.lowlevel.checkpoint()
            for client in left:
                client.send(1 << 20)
                client.receive(1 << 20)
            left = [client for client in left if not client.is_gone]
