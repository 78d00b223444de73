"""The memory of all requests in hand, charged as their bytes come.

An announcement costs nothing: a frame is charged for what arrived of it. Small frames and answers
are counted whatever is free, so that heartbeats and metadata stay alive while bulk producers queue.
A large frame asks before each piece. Up to half of the budget everybody grows; in the other half
one frame at a time does, the oldest of those whose bytes are there, so that frames get complete one
after the other instead of all of them in part. A frame whose client sends nothing passes that on.

Where nothing is left, frames that are incomplete make room for those that wait: `relieve` closes
the ones that held the most bytes for the longest time, first those whose clients send nothing. A
request that is complete is never dropped; it gives its bytes back when it is answered.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Final

import trio

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
        self._order = count()

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
