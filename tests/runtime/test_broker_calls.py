"""Requests between brokers: numbered replies, lost connections, refused sends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from raftmq.errors import KafkaError, RemoteProtocolError
from raftmq.promise import Promise
from raftmq.runtime import broker_calls
from raftmq.runtime.broker_calls import BrokerCalls
from raftmq.runtime.peer_links import KIND_BROKER, KIND_BROKER_BEAT
from raftmq.types import Buffer, NodeId

ONE, TWO = NodeId(1), NodeId(2)


class Pair:
    """Two ends joined back to back."""

    def __init__(self) -> None:
        self.is_up = True
        self.pending: list[Promise[bytes]] = []
        self.kinds: list[int] = []
        self.one = BrokerCalls(
            self.from_one, lambda sender, payload: Promise.resolved(b""), lambda node_id: 6
        )
        self.two = BrokerCalls(self.from_two, self.serve, lambda node_id: 6)

    def serve(self, sender: NodeId, payload: bytes) -> Promise[bytes]:
        if payload == b"later":
            self.pending.append(Promise())
            return self.pending[-1]
        return Promise.resolved(payload.upper())

    def from_one(self, to: NodeId, kind: int, pieces: Sequence[Buffer]) -> bool:
        if self.is_up:
            self.kinds.append(kind)
            self.two.receive(ONE, kind, memoryview(b"".join(pieces)))
        return self.is_up

    def from_two(self, to: NodeId, kind: int, pieces: Sequence[Buffer]) -> bool:
        self.kinds.append(kind)
        self.one.receive(TWO, kind, memoryview(b"".join(pieces)))
        return True


def test_replies_find_their_requests() -> None:
    pair = Pair()
    late = pair.one.send(TWO, b"later")
    early = pair.one.send(TWO, b"hello")
    assert not late.is_done
    pair.pending[0].resolve(b"done")
    assert late.result() == b"done"
    assert early.result() == b"HELLO", "answered while its own send was still under way"


@pytest.mark.parametrize("is_beat", [False, True])
def test_a_reply_takes_the_stream_of_its_request(is_beat: bool) -> None:
    pair = Pair()
    pair.one.send(TWO, b"hello", is_beat=is_beat)
    assert pair.kinds == [KIND_BROKER_BEAT if is_beat else KIND_BROKER] * 2


def test_a_refused_send_fails_at_once() -> None:
    pair = Pair()
    pair.is_up = False
    promise = pair.one.send(TWO, b"x")
    with pytest.raises(KafkaError, match="not reached"):
        promise.result()


def test_a_lost_connection_fails_what_was_outstanding() -> None:
    pair = Pair()
    promise = pair.one.send(TWO, b"later")
    pair.one.peer_lost(TWO)
    with pytest.raises(KafkaError, match="lost"):
        promise.result()
    pair.pending[0].resolve(b"too late")


@pytest.mark.parametrize("frame", [b"", b"\x00\x01", b"\x07" + bytes(8)])
def test_nonsense_is_the_senders_fault(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Pair().one.receive(TWO, KIND_BROKER, memoryview(frame))


def test_replies_that_never_come_do_not_close_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_calls, "OUTSTANDING_MAX", 3)
    pair = Pair()
    lost = [pair.one.send(TWO, b"later") for _ in range(5)]
    assert [promise.is_done for promise in lost] == [True, True, False, False, False]
    with pytest.raises(KafkaError, match="did not answer"):
        lost[0].result()
    assert pair.one.send(TWO, b"hello").result() == b"HELLO"
