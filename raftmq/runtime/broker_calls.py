"""Requests between brokers and their replies, over the control stream; brokers' heartbeats go over
the stream of heartbeats.

This is the `Forwarder` of the metadata engine. A request carries a number that its reply repeats.
Nothing is sent twice: a lost connection fails all requests outstanding on it with
NETWORK_EXCEPTION, outcome unknown, and the caller decides.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final

from raftmq.errors import ErrorCode, KafkaError, RemoteProtocolError
from raftmq.promise import Promise
from raftmq.runtime.peer_links import KIND_BROKER, KIND_BROKER_BEAT
from raftmq.types import Buffer, NodeId

_HEAD: Final = struct.Struct(">BQ")  # 0 request, 1 reply; number
OUTSTANDING_MAX: Final = 10_000
_UNREACHED: Final = ErrorCode.NETWORK_EXCEPTION

Send = Callable[[NodeId, int, Sequence[Buffer]], bool]
Serve = Callable[[NodeId, bytes], Promise[bytes]]


class BrokerCalls:
    """Outstanding requests of this node and the service for those of others."""

    def __init__(self, send: Send, serve: Serve, version: Callable[[NodeId], int]) -> None:
        self.version = version
        self._send = send
        self._serve = serve
        self._number = 0
        self._outstanding: dict[NodeId, dict[int, Promise[bytes]]] = {}

    def send(self, node_id: NodeId, payload: bytes, *, is_beat: bool = False) -> Promise[bytes]:
        """Ask a peer; the promise gives the reply's payload, or fails with NETWORK_EXCEPTION."""
        promise: Promise[bytes] = Promise()
        waiting = self._outstanding.setdefault(node_id, {})
        if len(waiting) >= OUTSTANDING_MAX:
            # A reply that a full queue dropped never comes: the oldest request makes room.
            waiting.pop(next(iter(waiting))).fail(
                KafkaError(f"node {node_id} did not answer", code=_UNREACHED)
            )
        self._number += 1
        number = self._number
        waiting[number] = promise  # before it leaves: the reply may come that soon
        kind = KIND_BROKER_BEAT if is_beat else KIND_BROKER
        if not self._send(node_id, kind, [_HEAD.pack(0, number), payload]):
            del waiting[number]
            promise.fail(KafkaError(f"node {node_id} is not reached", code=_UNREACHED))
        return promise

    def receive(self, sender: NodeId, kind: int, frame: memoryview) -> None:
        """Take in a frame of one of the two kinds: a reply settles its promise, a request is
        served, and answered the way it came.

        Raises:
            RemoteProtocolError: neither of the two.
        """
        if len(frame) < _HEAD.size:
            raise RemoteProtocolError("a broker frame without its head")
        role, number = _HEAD.unpack_from(frame)
        payload = bytes(frame[_HEAD.size :])
        if role == 1:
            promise = self._outstanding.get(sender, {}).pop(number, None)
            if promise is not None:
                promise.resolve(payload)
            return
        if role != 0:
            raise RemoteProtocolError(f"a broker frame that is neither of the two: {role}")

        def answer(done: Promise[bytes]) -> None:
            if done.error is None:
                self._send(sender, kind, [_HEAD.pack(1, number), done.result()])

        self._serve(sender, payload).when_done(answer)

    def peer_lost(self, node_id: NodeId) -> None:
        """The connection to a peer ended: requests to it have no known outcome."""
        for promise in list(self._outstanding.pop(node_id, {}).values()):
            promise.fail(KafkaError(f"connection to node {node_id} lost", code=_UNREACHED))
