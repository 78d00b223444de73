"""The async engine: tasks that move bytes and time for a `ClientCore`, under trio or asyncio.

One task steps the cores when something is due; one task per connection. All deciding code runs
between two awaits, so there are no locks; a client belongs to the loop that entered it. Waiters
wait for facts: `changed` wakes them after anything happened. A fork is detected and refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from raftmq_client.aio.wires import UNREACHABLE, Backend, Tasks, Wire, current_backend, say
from raftmq_client.core.admin_flow import Flow, Pause
from raftmq_client.core.call import Call, Finish
from raftmq_client.core.client import ClientCore, Link
from raftmq_client.core.connection import ConnectionCore, Errand
from raftmq_client.core.warm_up import is_cold, warm_up
from raftmq_client.errors import ClientError, ForkedError, TimedOutError, UsageError
from raftmq_client.forks import Lineage

_T = TypeVar("_T")
LOG: Final = logging.getLogger("raftmq_client")


class _Channel:
    """A link's connection and its wire; the sink of that wire."""

    def __init__(self, engine: Engine, link: Link) -> None:
        assert link.connection is not None
        self.engine = engine
        self.link = link
        self.connection: ConnectionCore = link.connection
        self.wire: Wire | None = None
        self.is_lost = False
        self.dialing: anyio.CancelScope | None = None

    def buffer(self) -> memoryview:
        """Where the next received bytes go."""
        return self.connection.buffer()

    def received(self, count: int) -> None:
        """Finish what these bytes answer."""
        if self.is_lost:
            return
        answered = self.connection.answered
        try:
            self.connection.received(count, self.engine.now())
        except Exception as error:  # noqa: BLE001 - reported to every caller by check()
            self.engine.die(error)
            return
        if self.connection.is_closed:
            self.lost(str(self.connection.error))
        elif self.connection.answered != answered or self.connection.has_outgoing:
            self.engine.happened()

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self.is_lost = True
        self.engine.drop(self, reason)


class Engine:
    """Runs one client's I/O. Made by `Producer`, `Consumer` and `Admin`."""

    def __init__(self, client: ClientCore) -> None:
        self.client = client
        self.crash: Exception | None = None
        self.after_turn: Callable[[], None] | None = None
        """Called after the cores have worked; an exception in it ends the engine."""
        self.after_crash: Callable[[], None] | None = None
        self._forks = Lineage.number
        self._backend: Backend | None = None
        self._tasks: Tasks | None = None
        self._is_stopped = False
        self._channels: dict[int, _Channel] = {}
        self._wires: list[Wire] = []
        self._wake = anyio.Event()
        self._changed: anyio.Event | None = None
        self._is_closed = False

    async def start(self, *, in_block: bool = False) -> None:
        """Begin to run, in the current task's loop.

        Raises:
            UsageError: it was entered before; or trio runs, and this is no `async with` block.
        """
        if is_cold(self.client.apis):
            await anyio.to_thread.run_sync(warm_up, self.client.apis)
        if self._tasks is not None or self._is_closed:
            raise UsageError("a client is entered once; make a new one")
        backend = current_backend()
        tasks = backend.tasks()
        if not (tasks.is_free or in_block):
            raise UsageError("trio keeps tasks in nurseries: enter the client by `async with`")
        await tasks.begin()
        self._backend, self._tasks = backend, tasks
        tasks.start_soon(self._run)

    async def stop(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> bool | None:
        """End all tasks and close every socket; unfinished calls fail.

        An error of the caller's own block is left to him as it is, in no group.
        """
        tasks = self._tasks
        if tasks is None or self._is_stopped:
            self._is_closed = True
            return None
        self._is_stopped = True
        if self.is_foreign and tasks.is_free:
            self._is_closed = True  # the sockets and the loop are the parent's
            return None
        self.shut()
        try:
            if not tasks.is_free:
                return await tasks.end(kind, error, trace)
            with anyio.CancelScope(shield=True):
                await tasks.end(None, None, None)
        finally:
            with anyio.CancelScope(shield=True):
                for wire in self._wires:
                    await wire.closed()
        return None

    async def close(self) -> None:
        """End before its block does, or without one; from any task of its loop.

        Under trio the nursery stays until its block ends.

        Raises:
            UsageError: the client belongs to another event loop.
        """
        if self._tasks is None or self._tasks.is_free:
            self.check_loop()
            await self.stop()
        else:
            self.shut()
        await anyio.lowlevel.checkpoint()

    def shut(self) -> None:
        """Refuse use from now on and close every socket; the tasks end by themselves."""
        self._is_closed = self.client.is_closing = True
        if self._backend is None:
            return
        for channel in list(self._channels.values()):
            self.drop(channel, "the client is closed")
        self.happened()

    def send_last(self, *calls: Call) -> None:
        """Send calls before the end without waiting for their answers, if connections stand.

        Whatever is to be sent at the end goes in one piece: the answer to the first of two comes to
        a socket that is closed, and then what the broker has not read yet is lost (RFC 1122,
        4.2.2.13).
        """
        for call in calls:
            self.client.submit(call, self.now())
        for channel in self._channels.values():
            if channel.wire is not None and channel.connection.has_outgoing:
                channel.wire.write(channel.connection.outgoing())

    @property
    def is_closed(self) -> bool:
        """True once `shut` or `stop` was called."""
        return self._is_closed

    @property
    def is_open(self) -> bool:
        """True between start and end, in the process that started it."""
        return self._tasks is not None and not self._is_closed and not self.is_foreign

    @property
    def is_foreign(self) -> bool:
        """True in a fork of the process that made the client."""
        return self._forks != Lineage.number

    def check_loop(self) -> None:
        """Refuse to wait in another event loop, where nothing would wake the waiter.

        Raises:
            UsageError: another loop runs, or none.
        """
        if self._backend is not None and not self._backend.is_current():
            raise UsageError("the client was started in another event loop; it cannot leave it")

    def now(self) -> float:
        """The loop's monotonic milliseconds, the clock of all cores."""
        assert self._backend is not None
        return self._backend.now() * 1000.0

    def check(self) -> None:
        """Refuse use before entry, after close, after a fork, or when the engine died.

        Raises:
            ForkedError: this process is a fork of the one that made the client.
            UsageError: the client is not open.
        """
        if self._forks != Lineage.number:
            raise ForkedError("a client cannot be used after fork(); make a new one in the child")
        if self.crash is not None:
            raise UsageError(f"the client's task died: {self.crash!r}") from self.crash
        if self._is_closed:
            raise UsageError("the client is closed")
        if self._tasks is None:
            raise UsageError("enter the client first: `async with ...`")

    def wake(self) -> None:
        """Have the cores looked at soon."""
        self._wake.set()

    def happened(self) -> None:
        """Bytes or time moved the cores: look at them, and tell who waits."""
        self._wake.set()
        self._notify()

    async def wait_for(self, predicate: Callable[[], bool], deadline_ms: float) -> bool:
        """Wait until `predicate` or the deadline; whether it came true."""
        self.check_loop()
        if predicate():
            await anyio.lowlevel.checkpoint()
            return True
        assert self._backend is not None
        left = deadline_ms - self.now()
        with anyio.move_on_after(max(0.0, left) / 1000.0):
            while not predicate():
                self.check()
                if self._changed is None:
                    self._changed = anyio.Event()
                await self._changed.wait()
        return predicate()

    async def sleep(self, duration_ms: float) -> None:
        """Let time pass."""
        await anyio.sleep(duration_ms / 1000.0)

    async def call(self, make: Callable[[Finish], Call]) -> Any:
        """Send one call and wait for its answer.

        Raises:
            ClientError: no answer.
        """
        self.check()
        self.check_loop()
        result: list[tuple[Any, ClientError | None]] = []

        def finish(response: Any, error: ClientError | None, _now: float) -> None:
            result.append((response, error))

        call = make(finish)
        self.client.submit(call, self.now())
        self.wake()
        if not await self.wait_for(lambda: bool(result), call.deadline + 1_000):
            raise TimedOutError("no answer in time", sent=call.sent)
        response, error = result[0]
        if error is not None:
            raise error.fresh()
        return response

    async def run(self, flow: Flow[_T]) -> _T:
        """Run a flow to its end.

        Raises:
            ClientError: what the flow ends with.
        """
        self.check()
        answer: Any = None
        error: ClientError | None = None
        while True:
            try:
                step = flow.send(answer) if error is None else flow.throw(error)
            except StopIteration as end:
                result: _T = end.value
                return result
            answer = error = None
            if isinstance(step, Pause):
                await self.sleep(step.duration_ms)
                continue
            try:
                answer = await self.call(step.make)
            except ClientError as failure:
                error = failure

    async def partitions(self, topic: str, timeout: float) -> int:
        """How many partitions a topic has.

        Raises:
            BrokerError: the cluster knew no such topic until the time was over.
            TimedOutError: nobody could tell in time.
            AuthenticationError: no broker lets this client in.
        """
        self.check()
        metadata = self.client.metadata
        metadata.want((topic,))
        self.wake()
        await self.wait_for(lambda: metadata.is_settled(topic), self.now() + timeout * 1000)
        count = metadata.partition_count(topic)
        if count is None:
            raise metadata.not_found(topic)
        return count

    def drop(self, channel: _Channel, reason: str) -> None:
        """Give a connection up."""
        if self._channels.get(channel.link.node_id) is channel:
            del self._channels[channel.link.node_id]
            if channel.wire is None and channel.dialing is not None:
                channel.dialing.cancel()
        if channel.wire is not None:
            wire, channel.wire = channel.wire, None
            wire.close()
        if channel.link.connection is channel.connection:
            self.client.failed(channel.link, reason, self.now())
        self.happened()

    # The tasks.

    async def _run(self) -> None:
        try:
            while not self._is_closed and self.crash is None:
                self._wake = anyio.Event()
                self._advance()
                left = (self.client.deadline() - self.now()) / 1000.0
                if left <= 0:
                    await anyio.lowlevel.checkpoint()
                    continue
                with anyio.move_on_after(left):
                    await self._wake.wait()
        except Exception as error:  # noqa: BLE001 - reported to every caller by check()
            self.die(error)
        except BaseException:
            # The loop ends, or somebody cancelled all of its tasks: nothing will move any more.
            if self._tasks is not None and self._tasks.is_free and not self._is_closed:
                self._is_closed = True
                if self.after_crash is not None:
                    self.after_crash()
                self._notify()
            raise

    def die(self, error: Exception) -> None:
        """A fault of our own: close every socket, and tell every caller from now on."""
        if self.crash is not None:
            return
        self.crash = error
        LOG.critical("the client's task died", exc_info=error)
        for channel in list(self._channels.values()):
            self.drop(channel, "the client's task died")
        if self.after_crash is not None:
            self.after_crash()
        self.happened()

    def _advance(self) -> None:
        """Step the cores until they want nothing more at this moment."""
        client = self.client
        client.step(self.now())
        for link in client.take_connects():
            channel = _Channel(self, link)
            self._channels[link.node_id] = channel
            assert self._tasks is not None
            self._tasks.start_soon(self._serve, channel)
        for channel in list(self._channels.values()):
            if (errand := channel.connection.take_errand()) is not None:
                assert self._tasks is not None
                self._tasks.start_soon(self._run_errand, channel, errand)
            if channel.connection.is_closed:
                self.drop(channel, str(channel.connection.error))
            elif channel.wire is not None and channel.connection.has_outgoing:
                channel.wire.write(channel.connection.outgoing())
        if self.after_turn is not None:
            self.after_turn()
        self._notify()

    async def _run_errand(self, channel: _Channel, errand: Errand) -> None:
        """Get what a connection waits for, in a thread that a cancellation leaves alone."""
        try:
            told = await anyio.to_thread.run_sync(errand, abandon_on_cancel=True)
        except Exception as error:  # noqa: BLE001 - of the user's function: it goes to the callers
            channel.connection.brought(None, error, self.now())
        else:
            channel.connection.brought(told, None, self.now())
        self.happened()

    async def _serve(self, channel: _Channel) -> None:
        """Connect, and move bytes until the end."""
        assert self._backend is not None
        link = channel.link
        timeout = max(0.0, link.connect_deadline - self.now()) / 1000.0
        wire: Wire | None = None
        reason = "no connection in time"
        try:
            with anyio.move_on_after(timeout) as channel.dialing:
                wire = await self._backend.dial(link.host, link.port, channel)
        except UNREACHABLE as error:
            reason = say(error)
        if wire is None:
            self.drop(channel, reason)
            return
        self._wires.append(wire)
        if self._channels.get(link.node_id) is channel:
            channel.wire = wire
            self.client.connected(link, self.now())
            self.happened()
        else:
            wire.close()  # given up meanwhile
        try:
            await wire.run()
        except Exception as error:  # noqa: BLE001 - reported to every caller by check()
            self.die(error)
        self._wires.remove(wire)

    def _notify(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()
