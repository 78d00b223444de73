"""The client port of a simulated node: connections in memory in place of sockets.

Stands where `server/kafka/connection.py` and `server/kafka/replies.py` stand in a process: requests
begin as they arrive, those that arrive together as one piece of work; answers leave in the order of
their requests; a span of the log is read when its answer leaves, some time after it was promised.
The dispatcher and the handlers behind it are the product's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jepsen_like.invariants import InvariantViolation
from raftmq.errors import RemoteProtocolError
from raftmq.server.kafka.authentication import Caller
from raftmq.server.kafka.leader_waits import Hold
from raftmq.server.kafka.limits import FRAME_HEAD, Limits, check_frame

if TYPE_CHECKING:
    from jepsen_like.cluster.kafka import ClientEnd
    from jepsen_like.cluster.node import ClusterNode, SimCore
    from jepsen_like.cluster.world import ClusterWorld

LIMITS = Limits(request_bytes_max=1 << 20, request_control_bytes_max=256 << 10)
UNNOTICED_MS = 1_000.0


class SimSlot:
    """The place of one answer in the order."""

    __slots__ = ("_connection", "pieces")

    def __init__(self, connection: SimConnection) -> None:
        self._connection = connection
        self.pieces: Any = None

    def answer(self, pieces: Any) -> None:
        """Settle."""
        assert self.pieces is None, "an answer is settled once"
        self.pieces = pieces
        self._connection.settled()

    def fail(self) -> None:
        """End the connection: there is no answer to this request."""
        if self.pieces is None:
            self.pieces = ()
        self._connection.close()


class SimConnection:
    """One client's connection, as the node has it."""

    def __init__(self, port: SimPort, client: ClientEnd, number: int) -> None:
        self._port = port
        self.client = client
        self._slots: deque[SimSlot] = deque()
        self._is_flushing = False
        self.is_open = True
        self.number = number
        self.peer = f"client{number}:1"
        self.software = "librdkafka 2.16.0" if number % 2 else ""
        self.caller = Caller(host=f"client{number}")
        self.authentication = None
        self._unheard = bytearray()
        self._bars = 0  # requests at work behind which none may begin
        self.replies = self
        """What bars the requests behind one that is answered in turns."""
        self.hold = Hold()
        self.on_close: dict[int, Callable[[], None]] = {}

    def bar(self) -> None:
        """Begin no request behind this one."""
        self._bars += 1

    def unbar(self) -> None:
        """Go on with the next ones."""
        self._bars -= 1
        if not self._bars and self._unheard:
            self._port.node.later(0.0, self._hear)

    def _hear(self) -> None:
        if self._bars:
            return  # heard when the bar is lifted
        data, self._unheard = bytes(self._unheard), bytearray()
        if data:
            self._take(data)

    def receive(self, data: bytes) -> None:
        """Begin the requests in `data`, which holds whole frames, or rubbish."""
        if self._unheard or self._bars:
            self._unheard += data
        else:
            self._take(data)

    def _take(self, data: bytes) -> None:
        if not self.is_open:
            return
        core = self._port.core
        try:
            with core.plane.multiraft.batch():
                self._begin_each(data)
        except RemoteProtocolError as error:
            self._port.world.note("protocol error", self._port.node.node_id, error)
            self.close()
        except Exception as error:
            if isinstance(error, InvariantViolation):
                raise
            # In a process it would end the task of the port, and the node with it.
            raise InvariantViolation("BadInputIsContained", repr(error)) from error

    def _begin_each(self, data: bytes) -> None:
        position = 0
        while len(data) - position >= FRAME_HEAD.size and self.is_open:
            size, api_key, _ = FRAME_HEAD.unpack_from(data, position)
            check_frame(size, api_key, LIMITS)
            end = position + 4 + size
            if end > len(data):
                break  # the rest never comes: the client hangs up
            if self._bars:
                self._unheard[:0] = data[position:]
                break
            slot = SimSlot(self)
            self._slots.append(slot)
            frame = memoryview(bytearray(data[position + 4 : end]))
            try:
                self._port.core.dispatcher.begin(frame, slot, self)  # type: ignore[arg-type]
            except RemoteProtocolError:
                slot.fail()
                raise
            position = end

    def settled(self) -> None:
        """An answer is ready: those whose turn it is leave when this turn of the loop is over."""
        if self.is_open and not self._is_flushing and self._slots[0].pieces is not None:
            self._is_flushing = True
            self._port.node.later(self._port.turn_ms(), self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        out: list[bytes] = []
        while self._slots and self._slots[0].pieces is not None:
            pieces = self._slots.popleft().pieces
            data = b"".join(map(_bytes_of, pieces))
            if data:
                out.append(data)
        if self.is_open and out:
            self.client.arrives(b"".join(out))

    def close(self, *, is_told: bool = True) -> None:
        """Hang up."""
        if not self.is_open:
            return
        self.is_open = False
        self._slots.clear()
        self._port.connections.pop(self.number, None)
        while self.on_close:
            _, callback = self.on_close.popitem()
            callback()
        self.client.ends(0.0 if is_told else UNNOTICED_MS)


class SimPort:
    """All connections to one process."""

    def __init__(self, world: ClusterWorld, node: ClusterNode, core: SimCore) -> None:
        self.world = world
        self.node = node
        self.core = core
        self.connections: dict[int, SimConnection] = {}
        self._accepted = 0

    def accept(self, client: ClientEnd) -> SimConnection:
        """A client connected."""
        self._accepted += 1
        connection = SimConnection(self, client, self._accepted)
        self.connections[self._accepted] = connection
        return connection

    def hang_up_at_clients(self) -> None:
        """Clients learn that their connections ended; this end does not."""
        for connection in list(self.connections.values()):
            connection.client.ends(0.0)

    def turn_ms(self) -> float:
        """When the present turn of the loop is over; now and then the socket was full."""
        random = self.world.random
        return random.uniform(1.0, 30.0) if random.random() < 0.01 else 0.0

    def die(self, *, is_told: bool) -> None:
        """The process ended: nobody runs what was to be done for connections that close."""
        connections, self.connections = list(self.connections.values()), {}
        for connection in connections:
            connection.on_close.clear()
            connection.close(is_told=is_told)


def _bytes_of(piece: Any) -> bytes:
    if isinstance(piece, bytes | bytearray | memoryview):
        return bytes(piece)
    data: bytes = piece.file.pread(piece.size, piece.position)
    assert len(data) == piece.size, f"{piece.file.path} ends before what was promised of it"
    return data
