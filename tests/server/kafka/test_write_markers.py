"""WriteTxnMarkers of an operator: it ends what nobody will end any more, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from immutables import Map

from raftmq.errors import ErrorCode as E
from raftmq.errors import KafkaError
from raftmq.metadata.image import LEVEL_OF_TRANSACTIONS, RAFTMQ_LEVEL
from raftmq.metadata.transactions import Transaction, TransactionState, transactions_of
from raftmq.promise import Promise
from raftmq.protocol import ApiKey, Struct
from raftmq.records import Marker, NewRecord, build_batch, parse_header, parse_marker
from tests.server.kafka.world import World

PID = 7


class Orphan(World):
    """Producer 7, epoch 3, has something open in t-0."""

    def __init__(self) -> None:
        super().__init__()
        self.topic_id = self.add_topic("t", 2)
        batch = build_batch(
            [NewRecord(None, b"v")],
            producer_id=PID,
            producer_epoch=3,
            base_sequence=0,
            transactional=True,
        )
        self.replica("t").append(batch, parse_header(batch))
        self.replica("t").commit(1)

    def send_marker(self, topic: str = "t", *, index: int = 0, **changes: Any) -> Any:
        marker = {
            "producer_id": PID,
            "producer_epoch": 3,
            "transaction_result": False,
            "coordinator_epoch": 0,
            "topics": [Struct(name=topic, partition_indexes=[index])],
        }
        slot = self.send(ApiKey.WRITE_TXN_MARKERS, 1, markers=[Struct(**marker | changes)])
        self.bench.deadlines.expire(self.bench.clock.monotonic_ms())
        return slot

    def code(self, slot: Any) -> E:
        self.bench.deadlines.expire(self.bench.clock.monotonic_ms())
        (marker,) = self.read(ApiKey.WRITE_TXN_MARKERS, 1, slot).markers
        assert marker.producer_id == PID
        (topic,) = marker.topics
        return E(topic.partitions[0].error_code)

    def know(self, state: TransactionState, producer_id: int = PID, index: int = 0) -> None:
        """The metadata group has a transaction there."""
        known = Transaction(
            transactional_id="x",
            producer_id=producer_id,
            epoch=3,
            timeout_ms=1,
            txn_seq=1,
            state=state,
            marker=(producer_id, 3) if state.is_prepared else (-1, -1),
            decision=int(state.is_prepared),
        )
        partitions = known.partitions.set((self.topic_id, index), 1)
        image = transactions_of([Transaction(**_fields(known) | {"partitions": partitions})], 1)
        self.engine.change(transactions=image)


def _fields(known: Transaction) -> dict[str, Any]:
    return {name: getattr(known, name) for name in known.__struct_fields__}


def test_an_orphan_is_aborted_and_answered_once_that_is_committed() -> None:
    world = Orphan()
    assert world.partition("t").stable_end == 0
    slot = world.send_marker()
    header, data = world.replica("t").log.batches[-1]
    assert (header.is_control, header.producer_id, header.producer_epoch) == (True, PID, 3)
    assert parse_marker(data) == Marker(is_commit=False)
    assert slot.pieces is None
    world.replica("t").commit(2)
    assert world.code(slot) is E.NONE
    assert world.partition("t").stable_end == 2
    again = world.send_marker()
    assert world.code(again) is E.NONE, "nothing is open, so nothing is written"
    assert len(world.replica("t").log.batches) == 2


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (TransactionState.ONGOING, E.INVALID_TXN_STATE),
        (TransactionState.PREPARE_COMMIT, E.INVALID_TXN_STATE),
        (TransactionState.PREPARE_ABORT, E.INVALID_TXN_STATE),
    ],
)
def test_what_the_metadata_group_knows_is_its_own(state: TransactionState, expected: E) -> None:
    world = Orphan()
    world.know(state)
    assert world.code(world.send_marker()) is expected
    assert len(world.replica("t").log.batches) == 1


def test_other_producers_and_partitions_are_not_asked_about() -> None:
    for elsewhere in ({"producer_id": PID + 1}, {"index": 1}):
        world = Orphan()
        world.know(TransactionState.ONGOING, **elsewhere)
        slot = world.send_marker()
        world.replica("t").commit(2)
        assert world.code(slot) is E.NONE


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"transaction_result": True}, E.INVALID_TXN_STATE),
        ({"producer_epoch": 2}, E.INVALID_PRODUCER_EPOCH),
        ({"index": 2}, E.UNKNOWN_TOPIC_OR_PARTITION),
        ({"topic": "u"}, E.UNKNOWN_TOPIC_OR_PARTITION),
    ],
)
def test_what_is_refused(changes: dict[str, Any], expected: E) -> None:
    world = Orphan()
    assert world.code(world.send_marker(**changes)) is expected
    assert len(world.replica("t").log.batches) == 1


def test_a_follower_sends_elsewhere() -> None:
    world = Orphan()
    world.replica("t").is_leader = world.replica("t").is_writable = False
    assert world.code(world.send_marker()) is E.NOT_LEADER_OR_FOLLOWER


@pytest.mark.parametrize("is_current", [True, False])
def test_partitions_are_verified_by_no_image_that_is_behind(
    monkeypatch: pytest.MonkeyPatch, is_current: bool
) -> None:
    """AddPartitionsToTxn of a broker that only asks (KIP-890)."""
    world = Orphan()
    world.engine.change(features=Map({RAFTMQ_LEVEL: LEVEL_OF_TRANSACTIONS}))
    if not is_current:
        failed: Promise[None] = Promise.failed(KafkaError(code=E.REQUEST_TIMED_OUT))
        monkeypatch.setattr(world.engine, "read_barrier", lambda **_: failed)
    asked = Struct(
        transactional_id="x",
        producer_id=PID,
        producer_epoch=3,
        verify_only=True,
        topics=[Struct(name="t", partitions=[0])],
    )
    slot = world.send(ApiKey.ADD_PARTITIONS_TO_TXN, 5, transactions=[asked])
    world.bench.deadlines.expire(world.bench.clock.monotonic_ms())
    (told,) = world.read(ApiKey.ADD_PARTITIONS_TO_TXN, 5, slot).results_by_transaction
    (row,) = told.topic_results[0].results_by_partition
    unknown = E.INVALID_PRODUCER_ID_MAPPING
    assert row.partition_error_code == (unknown if is_current else E.COORDINATOR_NOT_AVAILABLE)
