"""What one client, and all clients together, may cost this node.

Every limit is judged before the memory it protects is taken: a frame by its size and its API key
(the first eight bytes), a connection by what it has not been answered yet, the node by the bytes of
all requests in hand. Small frames never wait for node memory, so that groups, heartbeats and
metadata stay alive while bulk producers queue for it; they are bounded per connection instead.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Final

import trio
from attrs import frozen

from raftmq.errors import RemoteProtocolError

FRAME_HEAD: Final = struct.Struct(">iHh")
"""Frame size, API key, API version: the first eight bytes of every request."""

API_KEY_PRODUCE: Final = 0
FRAME_BYTES_MIN: Final = 8
"""API key, version and correlation id: no request is shorter."""


@frozen(slots=True, kw_only=True)
class Limits:
    """Bounds of the client port; the node's configuration keys of the same names."""

    request_bytes_max: int = 100 << 20
    request_control_bytes_max: int = 1 << 20
    request_elements_max: int = 100_000
    request_memory_bytes_max: int = 256 << 20
    connections_max: int = 10_000
    pipeline_depth_max: int = 64
    pipeline_bytes_max: int = 16 << 20
    connection_idle_ms: int = 600_000
    receive_stall_ms: int = 30_000
    """A frame of which no byte arrives for so long costs its connection: it holds node memory."""
    socket_send_bytes: int = 0
    """The kernel's send buffer of a connection; 0: `LOCAL_SEND_BYTES` for clients of this machine,
    the kernel's own choice for others."""
    send_stall_ms: int = 60_000
    """An answer of which the client takes no byte for so long costs its connection."""


def check_frame(size: int, api_key: int, limits: Limits) -> None:
    """Refuse a frame by its head alone, before anything is allocated for it.

    Raises:
        RemoteProtocolError: too short, or larger than its API may be.
    """
    if size < FRAME_BYTES_MIN:
        raise RemoteProtocolError(f"a frame of {size} bytes is no request")
    if size > limits.request_bytes_max:
        raise RemoteProtocolError(
            f"a frame of {size} bytes is above request_bytes_max {limits.request_bytes_max}"
        )
    if api_key != API_KEY_PRODUCE and size > limits.request_control_bytes_max:
        raise RemoteProtocolError(
            f"a frame of {size} bytes for API {api_key} is above request_control_bytes_max "
            f"{limits.request_control_bytes_max}"
        )


class RequestMemory:
    """Bytes of all requests in hand on this node; readers queue for them in order of arrival."""

    __slots__ = ("_waiting", "bytes_max", "bytes_used")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_used = 0
        self._waiting: deque[tuple[int, trio.lowlevel.Task]] = deque()

    @property
    def waiting_count(self) -> int:
        """Readers that wait for memory."""
        return len(self._waiting)

    def charge(self, size: int) -> None:
        """Count a small frame at once, whatever is free."""
        self.bytes_used += size

    async def charge_when_free(self, size: int) -> None:
        """Count a large frame; wait until it fits. One alone always fits."""
        if not self._waiting and self._fits(size):
            self.bytes_used += size
            return
        task = trio.lowlevel.current_task()
        entry = (size, task)
        self._waiting.append(entry)

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._waiting.remove(entry)
            # Whoever stood behind may fit where this one did not.
            self._admit()
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def release(self, size: int) -> None:
        """Give bytes back and admit whoever now fits."""
        self.bytes_used -= size
        assert self.bytes_used >= 0, "request memory was released twice"
        if self._waiting:
            self._admit()

    def _fits(self, size: int) -> bool:
        return self.bytes_used == 0 or self.bytes_used + size <= self.bytes_max

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, task = self._waiting.popleft()
            self.bytes_used += size
            trio.lowlevel.reschedule(task)
