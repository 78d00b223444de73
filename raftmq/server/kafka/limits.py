"""What one client may cost this node, judged by what it announces.

Every limit is judged before the memory it protects is taken: a frame by its size and its API key
(the first eight bytes), a connection by what it has not been answered yet. What all clients cost
together is `request_memory.py`'s.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

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
