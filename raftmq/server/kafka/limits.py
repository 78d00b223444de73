"""What clients may cost this node: one by what it announces, all together by memory.

Every limit is judged before the memory it protects is taken: a frame by its size and its API key
(the first eight bytes), a connection by what it has not been answered yet. An announcement itself
costs nothing: a frame is charged to the `RequestMemory` of all for what arrived of it.
"""

from __future__ import annotations

import heapq
import itertools
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import trio
from attrs import field, frozen

from raftmq.config import ConfigError, connections_per_ip
from raftmq.errors import RemoteProtocolError
from raftmq.rights import address_of

T = TypeVar("T")

FRAME_HEAD: Final = struct.Struct(">iHh")
"""Frame size, API key, API version: the first eight bytes of every request."""

API_KEY_PRODUCE: Final = 0
API_KEY_OFFSET_COMMIT: Final = 8
_LARGE: Final = (API_KEY_PRODUCE, API_KEY_OFFSET_COMMIT)
"""Produce carries records; a commit that is too large is refused by its group's coordinator, with
a code that the client understands."""
FRAME_BYTES_MIN: Final = 8
"""API key, version and correlation id: no request is shorter."""


@frozen(slots=True, kw_only=True)
class Limits:
    """Bounds of the client port; each is the configuration key of the same name."""

    request_bytes_max: int = 100 << 20
    request_control_bytes_max: int = 1 << 20
    request_elements_max: int = 100_000
    request_memory_bytes_max: int = 256 << 20
    connections_max: int = 10_000
    connections_per_ip_max: int = 0
    connections_per_ip_overrides: Mapping[str, int] = field(factory=dict)
    """Of single addresses, in their canonical form (`canonical_host`)."""
    descriptors_reserved: int = 64
    """File descriptors that clients do not get: for peers, the admin port, files and clean-up."""
    connection_creation_rate_max: int = 0
    pipeline_depth_max: int = 64
    pipeline_bytes_max: int = 16 << 20
    connection_idle_ms: int = 600_000
    request_receive_timeout_ms: int = 30_000
    """A frame of which no byte arrives for so long ends its connection: it holds memory."""
    request_receive_bytes_per_s_min: int = 8 << 10
    """So does a frame that takes longer than that timeout plus its size divided by this rate."""
    socket_send_bytes: int = 0
    """The kernel's send buffer of a connection; 0: `LOCAL_SEND_BYTES` for clients of this machine,
    the kernel's own choice for others."""
    send_stall_ms: int = 60_000
    """An answer of which the client takes no byte for so long ends its connection."""


def canonical_host(host: str) -> str:
    """An address in the form in which it is compared; a text that is no address stays as it is.

    A client of IPv4 looks like ::ffff:10.0.0.7 to a socket for both.
    """
    address = address_of(host)
    return host if address is None else str(address)


def resolve_overrides(text: str) -> dict[str, int]:
    """`connections_per_ip_overrides` by canonical address. Names are resolved, which may take long:
    not to be called on a loop that serves.

    Raises:
        ConfigError: it cannot be parsed, or a name has no address.
    """
    found = {}
    for host, count in connections_per_ip(text).items():
        try:
            rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"key 'connections_per_ip_overrides': {host!r} has no address: {error}"
            ) from error
        for *_, address in rows:
            found[canonical_host(str(address[0]))] = count
    return found


def check_frame(size: int, api_key: int, limits: Limits) -> None:
    """Refuse a frame by its head alone, before anything is allocated for it.

    Raises:
        RemoteProtocolError: too short, or larger than its API may be.
    """
    if size < FRAME_BYTES_MIN:
        raise RemoteProtocolError(f"a frame of {size} bytes is too short for a request")
    if size > limits.request_bytes_max:
        raise RemoteProtocolError(
            f"a frame of {size} bytes is above request_bytes_max {limits.request_bytes_max}"
        )
    if api_key not in _LARGE and size > limits.request_control_bytes_max:
        raise RemoteProtocolError(
            f"a frame of {size} bytes for API {api_key} is above request_control_bytes_max "
            f"{limits.request_control_bytes_max}"
        )


def receive_s_max(size: int, limits: Limits) -> float:
    """How long the client may take for a frame of so many bytes, once it began to send it."""
    return limits.request_receive_timeout_ms / 1e3 + size / limits.request_receive_bytes_per_s_min


class TokenBucket:
    """A bound of a rate: holds at most `most` tokens, and gains `per_s` a second."""

    __slots__ = ("_left", "_looked_ms", "_most", "_now_ms", "_per_s")

    def __init__(self, now_ms: Callable[[], float], most: int, per_s: float) -> None:
        self._now_ms = now_ms
        self._most = most
        self._per_s = per_s
        self._left = float(most)
        self._looked_ms = now_ms()

    def take(self, wanted: list[T]) -> list[T]:
        """Take a token for each, from the front; gives those for which there was none."""
        self._fill()
        count = min(len(wanted), int(self._left))
        self._left -= count
        return wanted[count:]

    def wait_ms(self) -> float:
        """Take one token; gives how long to wait until it is there, 0 when it is."""
        self._fill()
        self._left -= 1
        return 0.0 if self._left >= 0 else -self._left * 1e3 / self._per_s

    def _fill(self) -> None:
        now_ms = self._now_ms()
        self._left += max(0.0, now_ms - self._looked_ms) * self._per_s / 1e3
        self._left = min(self._left, float(self._most))
        self._looked_ms = now_ms


SLOW_S: Final = 1.0
"""A frame that is older may be closed where another one waits for memory. A frame that waits itself
is closed for another one only after that one has waited this long."""

SMALL_BYTES_MAX: Final = 32 << 10
"""So many bytes are counted whatever is free: those of a small frame, and the last ones of a large
frame, which then is complete and gives all of its bytes back soon."""


class PartialFrame:
    """A frame of which some bytes came.

    Attributes:
        size: of the whole frame, in bytes; 0 while not even that is known.
        held: bytes of it that are charged.
        since: when its first bytes came, in seconds of trio's clock.
        is_open: False once it is complete, dropped or closed; then it holds nothing.
    """

    __slots__ = ("_paused_s", "_waits_since", "close", "held", "is_open", "since", "size")

    def __init__(self, size: int, since: float, close: Callable[[], None]) -> None:
        """`close` hangs up on the client of this frame, soon."""
        self.size = size
        self.held = 0
        self.since = since
        self.close = close
        self.is_open = True
        self._waits_since: float | None = None
        self._paused_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """True while it waits for memory of this node: its client is not at fault."""
        return self._waits_since is not None

    def age_s(self, now: float) -> float:
        """How long its client has taken so far, without the time that it waited for memory."""
        paused_s = self._paused_s
        if self._waits_since is not None:
            paused_s += now - self._waits_since
        return now - self.since - paused_s

    def waits(self, now: float) -> None:
        """It waits for memory from now on."""
        self._waits_since = now

    def goes_on(self, now: float) -> None:
        """It waits no longer."""
        if self._waits_since is not None:
            self._paused_s += now - self._waits_since
            self._waits_since = None

    def waited_s(self, now: float) -> float:
        """How long it has been waiting for memory."""
        return 0.0 if self._waits_since is None else now - self._waits_since


class _Waiting:
    __slots__ = ("frame", "granted", "is_over", "size", "task")

    def __init__(self, frame: PartialFrame, size: int) -> None:
        self.frame = frame
        self.size = size
        self.task: trio.lowlevel.Task | None = None  # set as soon as it sleeps
        self.granted = 0
        self.is_over = False


class RequestMemory:
    """Bytes of all requests in hand on this node, and of the frames that are on their way.

    Small frames and answers are counted whatever is free, so that heartbeats and metadata stay
    alive while bulk producers queue. A large frame asks before each piece. Up to half of the budget
    everybody grows; in the other half one frame at a time does, the oldest of those whose bytes are
    there, so that frames get complete one after the other instead of all of them in part. A frame
    whose client sends nothing passes that on.

    Where nothing is left, frames that are incomplete make room for those that wait: `relieve`
    closes the ones that held the most bytes for the longest time, first those whose clients send
    nothing. A request that is complete is never dropped; it gives its bytes back when it is
    answered.

    Attributes:
        bytes_max: the budget. Small frames and answers may exceed it, large frames may not, except
            one alone.
        bytes_used: what is charged.
        partial_bytes: of these, bytes of frames that are incomplete.
    """

    __slots__ = (
        "_grower",
        "_order",
        "_partial",
        "_waiting",
        "_waiting_count",
        "bytes_max",
        "bytes_used",
        "partial_bytes",
    )

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_used = 0
        self.partial_bytes = 0
        self._partial: dict[PartialFrame, None] = {}
        self._grower: PartialFrame | None = None  # the one that grows in the upper half
        self._waiting: list[tuple[float, int, _Waiting]] = []  # a heap, oldest frame first
        self._waiting_count = 0
        self._order = itertools.count()

    @property
    def waiting_count(self) -> int:
        """Frames that wait for memory."""
        return self._waiting_count

    # ---- complete requests and answers ----

    def charge(self, size: int) -> None:
        """Count a small request or an answer at once, whatever is free."""
        self.bytes_used += size

    def release(self, size: int) -> None:
        """Give bytes back, and let frames grow for which there is room now."""
        self.bytes_used -= size
        assert self.bytes_used >= 0, "request memory was released twice"
        if self._waiting_count:
            self._admit()

    # ---- frames on their way ----

    def open(self, size: int, since: float, close: Callable[[], None]) -> PartialFrame:
        """A frame begins to come."""
        frame = PartialFrame(size, since, close)
        self._partial[frame] = None
        return frame

    def hold(self, frame: PartialFrame, size: int) -> None:
        """Count a small frame's bytes, `size` in all, whatever is free."""
        self._grow(frame, size - frame.held)

    def try_grow(self, frame: PartialFrame, size: int) -> int:
        """Charge up to `size` more bytes of a large frame; how many, 0 when it must wait."""
        if self._waiting_count and frame is not self._grower and size > SMALL_BYTES_MAX:
            return 0
        return self._try_grow(frame, size)

    async def grow(self, frame: PartialFrame, size: int) -> int:
        """As `try_grow`, but wait; 0 when the frame was closed meanwhile."""
        now = trio.current_time()
        entry = _Waiting(frame, size)
        heapq.heappush(self._waiting, (frame.since, next(self._order), entry))
        self._waiting_count += 1
        frame.waits(now)
        if self._grower is frame:
            self._grower = None  # an older frame may come before it
        self.relieve(now)
        if entry.is_over:
            await trio.lowlevel.checkpoint()
            return entry.granted
        entry.task = trio.lowlevel.current_task()

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._is_over(entry)
            self._admit()  # a frame behind it may fit where this one did not
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        return entry.granted

    def shrink(self, frame: PartialFrame, size: int) -> None:
        """Give back what was charged and did not come."""
        if size and frame.is_open:
            self._grow(frame, -size)

    def pauses(self, frame: PartialFrame) -> None:
        """The client sends nothing for the moment: another frame may grow."""
        if self._grower is frame:
            self._grower = None
            if self._waiting_count:
                self._admit()

    def complete(self, frame: PartialFrame) -> int:
        """The frame is a request now; gives the bytes that stay charged for it."""
        held = frame.held
        self._forget(frame)
        if self._waiting_count:
            self._admit()
        return held

    def drop(self, frame: PartialFrame) -> None:
        """The frame will not be complete, or is charged anew. Harmless when it is over."""
        if frame.is_open:
            held = frame.held
            self._forget(frame)
            self.release(held)

    def relieve(self, now: float) -> None:
        """Where frames wait for memory, make room."""
        self._admit()
        if not self._waiting_count:
            return
        oldest = self._waiting[0][2].frame
        if self.bytes_used < self.bytes_max:
            return  # it waits for its turn, not for room
        # Complete requests give their bytes back soon. Where incomplete frames hold most of the
        # budget, those that want more of it may wait for each other.
        is_stuck = self.partial_bytes * 2 > self.bytes_max and oldest.waited_s(now) >= SLOW_S
        costs = [
            (frame.is_waiting, -frame.held * frame.age_s(now), number, frame)
            for number, frame in enumerate(self._partial)
            if frame.held and frame is not oldest and self._may_be_closed(frame, now, is_stuck)
        ]
        heapq.heapify(costs)
        while costs and self._waiting_count:
            frame = heapq.heappop(costs)[3]
            frame.close()
            self.drop(frame)
            self._admit()

    def _may_be_closed(self, frame: PartialFrame, now: float, is_stuck: bool) -> bool:
        return is_stuck if frame.is_waiting else frame.age_s(now) >= SLOW_S

    def _grow(self, frame: PartialFrame, size: int) -> None:
        assert frame.is_open, "a frame that is over holds nothing"
        frame.held += size
        self.bytes_used += size
        self.partial_bytes += size

    def _forget(self, frame: PartialFrame) -> None:
        assert frame.is_open, "a frame ends once"
        frame.is_open = False
        del self._partial[frame]
        self.partial_bytes -= frame.held
        frame.held = 0
        if self._grower is frame:
            self._grower = None

    def _try_grow(self, frame: PartialFrame, size: int) -> int:
        used = self.bytes_used
        if size <= SMALL_BYTES_MAX:
            pass
        elif (used + size) * 2 > self.bytes_max and used != frame.held:  # one alone always fits
            if used >= self.bytes_max or self._grower not in (None, frame):
                return 0
            self._grower = frame
            size = min(size, self.bytes_max - used)
        self._grow(frame, size)
        return size

    def _is_over(self, entry: _Waiting) -> None:
        entry.is_over = True
        entry.frame.goes_on(trio.current_time())
        self._waiting_count -= 1

    def _admit(self) -> None:
        """Let waiting frames grow, the oldest first, while there is room."""
        waiting = self._waiting
        while waiting:
            entry = waiting[0][2]
            if not entry.is_over:
                if entry.frame.is_open:
                    entry.granted = self._try_grow(entry.frame, entry.size)
                    if not entry.granted:
                        return
                self._is_over(entry)
                if entry.task is not None:
                    trio.lowlevel.reschedule(entry.task)
            heapq.heappop(waiting)
