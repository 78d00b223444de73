"""One epoll under all connections: what costs a task switch, whose turn it is, who may rest."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import pytest
import trio
import trio.testing
from attrs import define, field

from raftmq.runtime.loop import PASS_COST_MAX, RECEIVE_COST, LoopBudget
from raftmq.server.kafka.connection import Connection, Readiness
from raftmq.server.kafka.counts import ServerCounts
from raftmq.server.kafka.limits import Limits
from raftmq.server.kafka.listener import ClientPort
from raftmq.server.kafka.replies import Slot
from tests.server.kafka.ports import client_port

PASS_RECEIVES = PASS_COST_MAX // RECEIVE_COST


def request(correlation_id: int, size: int = 32, api_key: int = 3) -> bytes:
    body = struct.pack(">hhi", api_key, 9, correlation_id)
    return struct.pack(">i", size) + body + bytes(size - len(body))


@define
class Handler:
    """Keeps slots; answers when told."""

    begun: list[int] = field(factory=list)
    slots: dict[int, Slot] = field(factory=dict)

    def begin(self, frame: memoryview, slot: Slot, _connection: Connection) -> None:
        (correlation_id,) = struct.unpack_from(">i", frame, 4)
        self.begun.append(correlation_id)
        self.slots[correlation_id] = slot

    def answer(self, correlation_id: int, data: bytes = b"done") -> None:
        self.slots.pop(correlation_id).answer((data,))


@define(slots=False, eq=False)
class Steps(trio.abc.Instrument):
    """Counts steps of tasks, beside those of the test itself."""

    test: object
    count: int = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task is not self.test


@define(slots=False, eq=False)
class Passes(trio.abc.Instrument):
    """Counts passes of the loop."""

    count: int = 0

    def after_io_wait(self, timeout: float) -> None:
        self.count += 1


@define
class Callers:
    port: ClientPort
    handler: Handler
    nursery: trio.Nursery
    socks: list[socket.socket] = field(factory=list)
    connections: list[Connection] = field(factory=list)

    def call(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.connections.append(self.port.adopt(ours, "test:1"))
        self.socks.append(theirs)
        return theirs

    @property
    def tasks(self) -> int:
        """Tasks of connections; two more serve all of them."""
        return len(self.nursery.child_tasks) - 2


@asynccontextmanager
async def callers(count: int, limits: Limits | None = None) -> AsyncIterator[Callers]:
    handler = Handler()
    port = client_port(handler.begin, limits or Limits(), ServerCounts())
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(port.served())
        found = Callers(port, handler, nursery)
        for _ in range(count):
            found.call()
        await trio.testing.wait_all_tasks_blocked()
        yield found
        for sock in found.socks:
            sock.close()
        await trio.testing.wait_all_tasks_blocked()
        assert port.connections == {}
        assert found.tasks == 0
        for slot in handler.slots.values():
            slot.answer(())
        assert port.shared.memory.bytes_used == 0


async def test_a_poll_costs_no_task_switch() -> None:
    """A request, its wait and its answer: the same few steps for one client and for eight."""
    async with callers(8) as found:
        steps: list[int] = []
        for count in (1, 8):
            counter = Steps(trio.lowlevel.current_task())
            trio.lowlevel.add_instrument(counter)
            for number in range(count):
                found.socks[number].send(request(number))
            await trio.testing.wait_all_tasks_blocked()
            for number in range(count):
                found.handler.answer(number)
                assert found.socks[number].recv(100) == b"done", "sent by whoever settled it"
            await trio.testing.wait_all_tasks_blocked()
            trio.lowlevel.remove_instrument(counter)
            steps.append(counter.count)
        assert found.tasks == 0
        assert steps[0] == 1, "the one task under all connections"
        assert steps[1] == 1


@define
class Reader:
    """Takes in what came, and keeps it."""

    sock: socket.socket
    log: list[str]

    def receive(self) -> None:
        self.log.append(self.sock.recv(100).decode())

    def listen(self) -> None:
        self.log.append("silent")


async def test_those_who_are_ready_together_are_one_piece_of_work() -> None:
    """So that a thousand producers do not cost a message to every peer each."""
    log: list[str] = []

    @contextmanager
    def together() -> Iterator[None]:
        log.append("begin")
        yield
        log.append("end")

    readiness = Readiness(LoopBudget(), together)
    pairs = [socket.socketpair() for _ in range(3)]
    for _, theirs in pairs:
        readiness.watch(theirs.fileno(), Reader(theirs, log))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(readiness.run)
        for ours, _ in pairs:
            ours.send(b"word")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert log == ["begin", "word", "word", "word", "end"]
        log.clear()
        pairs[0][0].send(b"alone")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert log == ["alone"], "nothing to gather"
        nursery.cancel_scope.cancel()
    for ours, theirs in pairs:
        readiness.unwatch(theirs.fileno())
        ours.close()
        theirs.close()
    readiness.close()


async def test_work_beyond_the_budget_of_a_pass_waits_for_others() -> None:
    count = 3 * PASS_RECEIVES
    async with callers(count) as found:
        passes = Passes()
        trio.lowlevel.add_instrument(passes)
        begun_in: dict[int, int] = {}

        def begin(frame: memoryview, slot: Slot, connection: Connection) -> None:
            begun_in[passes.count] = begun_in.get(passes.count, 0) + 1
            found.handler.begin(frame, slot, connection)

        found.port.shared.begin = begin
        for number, sock in enumerate(found.socks):
            sock.send(request(number, 2_000))
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.remove_instrument(passes)
        assert len(begun_in) >= 3, "other tasks had their turns in between"
        # Two budgets meet in a pass where the next one begins before or after who spends the last.
        assert max(begun_in.values()) <= 2 * PASS_RECEIVES
        assert sorted(found.handler.begun) == list(range(count)), "each once"
        assert found.tasks == 0


async def test_who_hangs_up_in_line_is_forgotten() -> None:
    count = 2 * PASS_RECEIVES
    async with callers(count) as found:
        for number, sock in enumerate(found.socks):
            sock.send(request(number, 2_000))
        with trio.fail_after(30):
            while not found.port.shared.budget.waiting_count:
                await trio.lowlevel.checkpoint()
        late = set(range(count)) - set(found.handler.begun)
        assert late
        for number in late:
            found.connections[number].close()
        await trio.testing.wait_all_tasks_blocked()
        assert not late & set(found.handler.begun)
        found.socks[found.handler.begun[0]].send(request(1000))
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun[-1] == 1000, "and the others are served on"


async def test_one_request_may_end_another_connection_of_the_same_pass() -> None:
    async with callers(2) as found:
        handler = found.handler

        def begin(frame: memoryview, slot: Slot, connection: Connection) -> None:
            handler.begin(frame, slot, connection)
            for other in found.connections:
                if other is not connection:
                    other.close()

        found.port.shared.begin = begin
        for number, sock in enumerate(found.socks):
            sock.send(request(number))
        await trio.testing.wait_all_tasks_blocked()
        assert len(handler.begun) == 1
        assert len(found.port.connections) == 1


async def test_a_busy_connection_has_a_task_until_it_is_quiet() -> None:
    async with callers(1) as found:
        sock, connection = found.socks[0], found.connections[0]
        sock.send(request(1, 100_000, 0))
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun == [1]
        assert found.tasks == 1, "more of its kind is likely"
        sock.send(request(2))
        await trio.testing.wait_all_tasks_blocked()
        connection.rest_if_quiet(connection.last_active + 0.5)
        await trio.testing.wait_all_tasks_blocked()
        assert found.tasks == 1
        sock.send(request(3)[:10])
        await trio.testing.wait_all_tasks_blocked()
        connection.rest_if_quiet(connection.last_active + 1.5)
        await trio.testing.wait_all_tasks_blocked()
        assert found.tasks == 0
        sock.send(request(3)[10:] + request(4))
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun == [1, 2, 3, 4], "half a frame was kept"
        for number in (1, 2, 3, 4):
            found.handler.answer(number)
        assert sock.recv(100) == b"done" * 4


async def test_what_comes_while_it_goes_to_rest_is_not_lost() -> None:
    async with callers(1) as found:
        sock, connection = found.socks[0], found.connections[0]
        for number in range(0, 20, 2):
            sock.send(request(number, 100_000, 0))
            await trio.testing.wait_all_tasks_blocked()
            sock.send(request(number + 1, 200_000, 0)[:70_000])
            connection.rest_if_quiet(connection.last_active + 1.5)
            await trio.testing.wait_all_tasks_blocked()
            sock.send(request(number + 1, 200_000, 0)[70_000:])
            await trio.testing.wait_all_tasks_blocked()
            found.handler.answer(number)
            found.handler.answer(number + 1)
        assert found.handler.begun == list(range(20))


async def test_a_slow_reader_has_a_writer_task_until_it_is_quiet() -> None:
    async with callers(1) as found:
        sock, connection = found.socks[0], found.connections[0]
        answer = bytes(2_000_000)
        for number in range(3):
            sock.send(request(number))
            await trio.testing.wait_all_tasks_blocked()
            assert found.tasks == (1 if number else 0)
            found.handler.answer(number, answer)
            await trio.testing.wait_all_tasks_blocked()
            assert found.tasks == 1
            left = len(answer)
            while left:
                left -= len(sock.recv(left))
                await trio.testing.wait_all_tasks_blocked()
            connection.rest_if_quiet(connection.last_active + 0.5)
            await trio.testing.wait_all_tasks_blocked()
        connection.rest_if_quiet(connection.last_active + 1.5)
        await trio.testing.wait_all_tasks_blocked()
        assert found.tasks == 0


async def test_whoever_settles_an_answer_closes_nothing() -> None:
    """It may be the Raft engine, in the middle of telling others."""
    async with callers(1) as found:
        found.socks[0].send(request(1) + request(2))
        await trio.testing.wait_all_tasks_blocked()
        connection = found.connections[0]
        dropped: list[int] = []
        connection.on_close[2] = lambda: dropped.append(2)
        found.handler.slots.pop(1).fail()
        assert not connection.is_closed
        assert dropped == []
        found.socks[0].send(request(3))
        await trio.testing.wait_all_tasks_blocked()
        assert connection.is_closed
        assert dropped == [2]
        assert found.handler.begun == [1, 2], "no request is begun any more"


async def test_a_full_pipeline_is_read_on_when_there_is_room() -> None:
    async with callers(1, Limits(pipeline_depth_max=2)) as found:
        sock = found.socks[0]
        sock.send(request(1) + request(2))
        await trio.testing.wait_all_tasks_blocked()
        sock.send(request(3))
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun == [1, 2]
        found.handler.answer(1)
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun == [1, 2, 3]
        found.handler.answer(2)
        found.handler.answer(3)


async def test_who_cannot_be_watched_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with callers(1) as found:
        readiness = found.port.shared.readiness

        def full(_self: Readiness, _descriptor: int, _receiver: object) -> None:
            raise OSError(errno.ENOSPC, "no space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Readiness, "watch", full)
            late = found.call()
            assert late.recv(1) == b"", "a clear end"
        assert len(readiness) == len(found.port.connections) == 1
        found.socks[0].send(request(1))
        await trio.testing.wait_all_tasks_blocked()
        assert found.handler.begun == [1], "the others are served on"


async def test_the_port_ends_with_everything_it_has() -> None:
    handler = Handler()
    port = client_port(handler.begin, Limits(), ServerCounts())
    clients = []
    async with port.served() as nursery:
        for number in range(3):
            ours, theirs = socket.socketpair()
            port.adopt(ours, "test:1")
            theirs.setblocking(False)
            theirs.send(request(number) if number else request(0, 100_000, 0)[:50_000])
            clients.append(theirs)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert port.connections == {}
    assert len(port.shared.readiness) == 0
    for slot in handler.slots.values():
        slot.answer((b"late",))
    assert port.shared.memory.bytes_used == 0
    for client in clients:
        client.close()
