"""The port between the async engine and sockets: one `Wire` per connection, one `Sink` behind it.

A wire moves bytes and decides nothing. Received bytes go straight into the buffer that the sink
names; what is written leaves at once where the socket takes it and is kept where it does not. trio
and asyncio each implement this in a module of their own, imported only where it runs.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Final, Protocol, cast

import sniffio

from raftmq.types import Buffer


class Sink(Protocol):
    """What a wire reports to."""

    def buffer(self) -> memoryview:
        """Where the next received bytes go; never empty."""
        ...

    def received(self, count: int) -> None:
        """So many bytes were put into `buffer()`; 0 is the end of the stream."""
        ...

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        ...


class Wire(Protocol):
    """A connected socket."""

    def write(self, pieces: Sequence[Buffer]) -> None:
        """Send these in order, or keep them until there is room; never waits."""
        ...

    def close(self) -> None:
        """Close the socket; `run` ends."""
        ...

    async def run(self) -> None:
        """Move bytes until the connection ends or is closed; the end is told to the sink."""
        ...

    async def closed(self) -> None:
        """Wait, after `close`, until the loop has let go of the socket."""
        ...


class Tasks(Protocol):
    """The tasks of one client."""

    is_free: bool
    """Any task may end them, in any order; otherwise the one that began them, as its block ends."""

    async def begin(self) -> None:
        """Be ready to start some."""
        ...

    def start_soon(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Start one more."""
        ...

    async def end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        """Cancel all of them and wait for their ends; of a block that ends by `error`, perhaps."""
        ...


class Backend(Protocol):
    """What an event loop gives."""

    def is_current(self) -> bool:
        """True in the event loop that this was made in."""
        ...

    def tasks(self) -> Tasks:
        """Tasks for one client."""
        ...

    def now(self) -> float:
        """The loop's monotonic seconds."""
        ...

    async def dial(self, host: str, port: int, sink: Sink) -> Wire:
        """Connect.

        Raises:
            OSError: nobody is there.
            ValueError: no host can be called that; OverflowError: no port has that number.
        """
        ...


def current_backend() -> Backend:
    """The backend of the event loop that runs."""
    name = sniffio.current_async_library()
    module = importlib.import_module(f"raftmq_client.aio.{name}_wires")
    return cast(Backend, module.make_backend())


UNREACHABLE: Final = (OSError, ValueError, OverflowError)
"""What `dial` raises where nobody is: brokers may name hosts and ports that no socket takes."""


def say(error: Exception) -> str:
    """Why nobody was reached, for people."""
    if isinstance(error, OSError) and error.errno and "Connect call failed" in str(error):
        return os.strerror(error.errno)  # asyncio names the address there, and not the reason
    return getattr(error, "strerror", None) or str(error)
