"""The producer's promise: what a receipt says agrees with the log, whatever brokers answer.

Acknowledged: once. Failed: not there. Unknown: at most once. Brokers lose, refuse, repeat, garble
answers and leave partitions out of them; the three kinds of producers are asked alike. A planted
fault, an unreadable answer taken for a refusal, must be seen.
"""

from __future__ import annotations

import random
import traceback
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.protocol.produce import ProduceResponse
from raftmq.records import read_records
from raftmq_client import ClientError, CorruptAnswerError, Outcome, Receipt, TimedOutError
from raftmq_client.core.call import Call
from raftmq_client.core.produce_requests import STALL_MS
from tests.client.drivers import Driver
from tests.client.fake_broker import FakeBroker
from tests.client.test_producer_core import Chaos, World

KINDS: dict[str, dict[str, Any]] = {
    "idempotent": {},
    "at most once": {"sends_once": True, "idempotent": False},
    "plain": {"idempotent": False},
}


class Garbling(Chaos):
    """Some answers cannot be read, some leave the partition out; the work is done or not."""

    def meet(self, call: Call) -> None:
        draw, world = self.draw, self.world
        if draw.random() < 0.7:
            super().meet(call)
            return
        if draw.random() < 0.7:
            world.append_silently(call)
        if draw.random() < 0.5:
            call.complete(None, CorruptAnswerError("garbage"), world.now)
        else:
            call.complete(ProduceResponse([]), None, world.now)


def play(kind: str, seed: int) -> None:
    """Send, answer by chance, and hold every receipt against the log."""
    draw = random.Random(seed)
    world = World(
        partitions=2,
        batch_bytes=draw.choice([90, 150, 400]),
        delivery_timeout_ms=draw.choice([60, 400, 3_000, 120_000]),
        **KINDS[kind],
    )
    chaos = Garbling(world, draw)
    receipts: dict[bytes, tuple[int, Receipt]] = {}
    for number in range(60):
        value = b"%04d" % number
        receipts[value] = (number % 2, world.send(value, number % 2))
        if draw.random() < 0.3:
            world.later(draw.choice([0, 1, 20, 300]))
        while world.calls and draw.random() < 0.5:
            chaos.meet(world.calls.popleft())
    for _ in range(4_000):
        if world.core.pending == 0:
            break
        world.later(50)
        while world.calls:
            chaos.meet(world.calls.popleft())
    assert world.core.pending == 0
    for value, (partition, receipt) in receipts.items():
        agree(kind, receipt, world.logs[partition].values.count(value))


def agree(kind: str, receipt: Receipt, copies: int) -> None:
    if receipt.outcome is Outcome.OK:
        assert copies >= 1, "acknowledged, and not there"
    if receipt.outcome is Outcome.FAILED:
        assert copies == 0, "told as failed, and there"
    if kind != "plain":
        assert copies <= 1, "doubled"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_receipts_say_agrees_with_the_log(kind: str, seed: int) -> None:
    play(kind, seed)


@pytest.mark.parametrize(
    ("kind", "seen"), [("at most once", "doubled"), ("idempotent", "told as failed")]
)
def test_a_garbled_answer_taken_for_a_refusal_is_seen(
    monkeypatch: pytest.MonkeyPatch, kind: str, seen: str
) -> None:
    monkeypatch.setattr(CorruptAnswerError, "outcome", Outcome.FAILED)
    with pytest.raises(AssertionError, match=seen):
        play_all(kind, range(60))


def play_all(kind: str, seeds: range) -> None:
    for seed in seeds:
        play(kind, seed)


@pytest.mark.parametrize("body", [b"", b"\xff" * 9, b"\x01\x00\x00\x00\x00\x00"])
@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once", None])
def test_an_answer_that_says_nothing_of_a_record_is_no_refusal(
    broker: FakeBroker, driver: Driver, delivery: str | None, body: bytes
) -> None:
    """The third body is a sound answer of version 9 and later, without any topic."""
    broker.garble(ApiKey.PRODUCE, body)
    with driver.producer(
        broker.address, delivery=delivery, idempotent=None if delivery else False
    ) as producer:
        receipt = producer.send("t", b"x", partition=0)
        if delivery == "at_most_once":
            with pytest.raises(CorruptAnswerError):
                receipt.result(10)
            assert receipt.outcome is Outcome.UNKNOWN
        else:
            assert receipt.result(10).partition == 0
    copies = [r for batch in broker.logs["t", 0].batches for r in read_records(memoryview(batch))]
    assert len(copies) == (2 if delivery is None else 1), "without sequences, and sent again: two"


def test_what_was_garbled_until_its_time_is_unknown() -> None:
    world = World(idempotent=False, delivery_timeout_ms=1_000)
    receipt = world.send(b"x")
    for _ in range(40):
        world.later(50)
        while world.calls:
            world.calls.popleft().complete(ProduceResponse([]), None, world.now)
    assert receipt.outcome is Outcome.UNKNOWN
    assert isinstance(receipt.error, TimedOutError)


def test_the_doubt_about_one_batch_is_not_that_of_its_neighbor() -> None:
    """Two batches of one request end by one error; one of them may stand in the log."""
    world = World(partitions=2, sends_once=False, idempotent=False)
    first, second = world.send(b"a", 0), world.send(b"b", 1)
    world.step()
    (call,) = world.calls
    world.calls.clear()
    assert first.batch is not None
    first.batch.may_exist = True
    call.complete(None, ClientError("final, and nothing had left"), world.now)
    assert (first.outcome, second.outcome) == (Outcome.UNKNOWN, Outcome.FAILED)


def test_every_receipt_raises_an_error_of_its_own() -> None:
    world = World(batch_bytes=1_000)
    receipts = [world.send(b"x"), world.send(b"y")]
    world.step()
    world.refuse(world.calls.popleft(), ErrorCode.INVALID_RECORD)
    raised = [raise_it(receipt) for receipt in receipts for _ in range(3)]
    assert len({id(error) for error in raised}) == 6
    assert len({len(traceback.extract_tb(error.__traceback__)) for error in raised}) == 1
    assert receipts[0].error is receipts[0].error
    assert receipts[0].error is not receipts[1].error
    assert len({(type(error), str(error), error.outcome) for error in raised}) == 1


def raise_it(receipt: Receipt) -> ClientError:
    with pytest.raises(ClientError) as raised:
        receipt.result()
    return raised.value


def test_the_stall_timer_is_armed_as_a_batch_leaves() -> None:
    """No answer, no other traffic: nothing but this timer finds out that a leader froze."""
    world = World(is_known=True)
    world.send(b"x")
    world.step()
    assert len(world.calls) == 1
    assert world.core.deadline() <= world.now + STALL_MS


def test_what_leaves_wakes_the_core_before_it_is_overdue() -> None:
    world = World(is_known=True, idempotent=False, delivery_timeout_ms=700.0)
    world.send(b"x")
    world.step()
    assert world.core.deadline() <= world.now + 700.0
