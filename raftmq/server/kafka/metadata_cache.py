"""Encoded Metadata bodies of the present state.

Many clients ask for the same topics at the same moment (after an election, all of them), and a
body of a thousand partitions takes milliseconds to encode. Bounded by bytes; emptied when the state
moves.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from raftmq.promise import Promise

CACHE_BYTES_MAX: Final = 32 << 20


class MetadataCache:
    """Encoded bodies, newest use last, bounded by bytes; emptied whenever the state moves."""

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self.hits = 0
        self._bytes_max = bytes_max
        self._bytes = 0
        self._state: object = None
        self._bodies: OrderedDict[object, bytes] = OrderedDict()
        self._under_way: dict[object, Promise[bytes]] = {}

    def get(self, state: object, key: object) -> bytes | None:
        """A body encoded at exactly this state."""
        if state != self._state:
            self._bodies.clear()
            self._under_way = {}
            self._bytes = 0
            self._state = state
            return None
        body = self._bodies.get(key)
        if body is not None:
            self.hits += 1
            self._bodies.move_to_end(key)
        return body

    def under_way(self, key: object) -> Promise[bytes] | None:
        """A body of the state last asked for that is being encoded."""
        return self._under_way.get(key)

    def begin(self, state: object, key: object, promise: Promise[bytes]) -> None:
        """A body of `state` will come: whoever asks meanwhile shares it."""
        self._under_way[key] = promise

        def settled(done: Promise[bytes]) -> None:
            if self._state == state:
                self._under_way.pop(key, None)
                if done.error is None:
                    self.put(state, key, done.result())

        promise.when_done(settled)

    def put(self, state: object, key: object, body: bytes) -> None:
        """Keep a body of `state`, if that is the one last asked for."""
        if state != self._state:
            return
        self._bodies[key] = body
        self._bytes += len(body)
        while self._bytes > self._bytes_max:
            _, dropped = self._bodies.popitem(last=False)
            self._bytes -= len(dropped)
