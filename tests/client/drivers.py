"""The three drivers behind one plain interface, so that one test holds for all of them.

`Driver("blocking")` gives the blocking classes as they are; `Driver("trio")` and
`Driver("asyncio")` run the async ones in an event loop of their own thread and wait for what they
would await.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from anyio.from_thread import BlockingPortal, start_blocking_portal

from raftmq_client import aio, blocking

NAMES = ("blocking", "trio", "asyncio")
Run = Callable[[Callable[[], Awaitable[None]]], None]
"""Runs an async function to its end."""


class Waiting:
    """An async client's methods, waited for in the caller's thread."""

    def __init__(self, portal: BlockingPortal, make: Callable[[], Any]) -> None:
        self._portal = portal
        self._client = portal.call(make)
        self._entered: Any = None

    def __enter__(self) -> Self:
        # One task enters and leaves, as task groups want it.
        self._entered = self._portal.wrap_async_context_manager(self._client)
        self._entered.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._entered.__exit__(kind, error, trace)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._portal.call(self._client.__anext__)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if not callable(found):
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            answer = found(*args, **kwargs)
            return await answer if inspect.isawaitable(answer) else answer

        def wait(*args: Any, **kwargs: Any) -> Any:
            answer = self._portal.call(functools.partial(call, *args, **kwargs))
            return WaitingReceipt(self._portal, answer) if name == "send" else answer

        return wait


class WaitingReceipt:
    """An async receipt, waited for."""

    def __init__(self, portal: BlockingPortal, receipt: aio.Receipt) -> None:
        self._portal = portal
        self._receipt = receipt

    def result(self, timeout: float | None = None) -> Any:
        return self._portal.call(self._receipt.result, timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receipt, name)


class WaitingTransaction:
    """An async transaction's methods, waited for."""

    def __init__(self, portal: BlockingPortal, transaction: aio.Transaction) -> None:
        self._portal = portal
        self._transaction = transaction

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transaction, name)

        def wait(*args: Any, **kwargs: Any) -> Any:
            answer = self._portal.call(functools.partial(found, *args, **kwargs))
            return WaitingReceipt(self._portal, answer) if name == "send" else answer

        return wait


class Driver:
    """Makes clients of one driver."""

    def __init__(self, name: str, portal: BlockingPortal | None) -> None:
        self.name = name
        self._portal = portal

    def _make(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._portal is None:
            return getattr(blocking, name)(*args, **kwargs)
        return Waiting(self._portal, functools.partial(getattr(aio, name), *args, **kwargs))

    def begin(self, producer: Any, consumer: Any = None) -> Any:
        """Begin a transaction of a producer."""
        found = producer.begin(self.unwrap(consumer))
        return found if self._portal is None else WaitingTransaction(self._portal, found)

    @staticmethod
    def unwrap(client: Any) -> Any:
        """A client as the library knows it."""
        return client._client if isinstance(client, Waiting) else client

    def producer(self, *args: Any, **kwargs: Any) -> Any:
        return self._make("Producer", *args, **kwargs)

    def consumer(self, *args: Any, **kwargs: Any) -> Any:
        return self._make("Consumer", *args, **kwargs)

    def admin(self, *args: Any, **kwargs: Any) -> Any:
        return self._make("Admin", *args, **kwargs)


@contextmanager
def open_driver(name: str) -> Iterator[Driver]:
    """A driver, with its event loop where it has one."""
    if name == "blocking":
        yield Driver(name, None)
        return
    with start_blocking_portal(name) as portal:
        yield Driver(name, portal)
