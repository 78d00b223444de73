"""Snapshots: the same image gives the same bytes, and damage is never read as state."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from attrs import evolve
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map

from raftmq.errors import AheadError
from raftmq.metadata import snapshot
from raftmq.metadata.commands import (
    ChangeNodes,
    ClaimGroup,
    ConfirmRemoved,
    CreateAcls,
    CreateTopics,
    DeleteAcls,
    DeleteTopics,
    FeatureUpdate,
    FenceBroker,
    NodeChange,
    NodeState,
    Origin,
    PlanMoves,
    PlannedMove,
    ReassignPartition,
    ShrinkTopic,
    UnregisterBroker,
    UpdateFeatures,
)
from raftmq.metadata.features import SUPPORTED, named
from raftmq.metadata.image import (
    EMPTY_IMAGE,
    LEVEL_OF_MOVES,
    LEVEL_OF_SECURITY,
    LEVEL_OF_TRANSACTIONS,
    LEVEL_OF_VIEWS,
    RAFTMQ_LEVEL,
)
from raftmq.metadata.results import Done
from raftmq.metadata.snapshot import (
    NewerSnapshotError,
    SnapshotEncoder,
    SnapshotError,
    decode_image,
    encode_image,
)
from raftmq.metadata.transactions import EPOCH_LAST, Transaction, transactions_of
from raftmq.rights import NO_RULES, Kind, Operation, Pattern, Permission, Rule
from raftmq.types import Offset, TopicPartition
from tests.metadata.metadata_commands import Machine, creation, node, raised, register, topic_id
from tests.metadata.transaction_machine import A, B, Transactions, many_ids


def _bytes() -> bytes:
    machine = Machine()
    machine.register_all(1, 2, 3)
    machine.apply(CreateTopics(topics=(creation("a", 1, (1, 2), (3, 1)),)))
    return encode_image(machine.image)


SNAPSHOT = _bytes()


def test_no_bytes_are_the_empty_image() -> None:
    assert decode_image(b"") == EMPTY_IMAGE
    assert decode_image(encode_image(EMPTY_IMAGE)) == EMPTY_IMAGE


@given(position=st.integers(0, len(SNAPSHOT) - 1), flip=st.integers(1, 255))
def test_a_damaged_byte_is_noticed(position: int, flip: int) -> None:
    damaged = bytearray(SNAPSHOT)
    damaged[position] ^= flip
    with pytest.raises(SnapshotError):
        decode_image(damaged)


@given(size=st.integers(1, len(SNAPSHOT) - 1))
def test_a_cut_snapshot_is_noticed(size: int) -> None:
    with pytest.raises(SnapshotError):
        decode_image(SNAPSHOT[:size])


def sealed(version: int, body: bytes) -> bytes:
    head = b"RQMS" + version.to_bytes(2, "big")
    return head + crc32c(body, crc32c(head)).to_bytes(4, "big") + body


def test_a_newer_format_is_refused_by_name() -> None:
    assert sealed(1, SNAPSHOT[10:]) == SNAPSHOT
    with pytest.raises(NewerSnapshotError, match="format 10, known are 1, 2, 3, 4, 5"):
        decode_image(sealed(10, SNAPSHOT[10:]))
    with pytest.raises(SnapshotError, match="format 0") as caught:
        decode_image(sealed(0, SNAPSHOT[10:]))
    assert not isinstance(caught.value, AheadError)


def test_fields_that_a_format_does_not_have_are_never_dropped() -> None:
    body = msgspec.msgpack.decode(SNAPSHOT[10:])
    with pytest.raises(SnapshotError, match="another shape"):
        decode_image(sealed(1, msgspec.msgpack.encode([*body, [["raftmq.level", 2]], 7])))
    topic = body[9][0]
    body[9][0] = [*topic, "of a later format"]
    with pytest.raises(SnapshotError, match="another shape"):
        decode_image(sealed(1, msgspec.msgpack.encode(body)))


def test_levels_are_written_in_format_2_and_nothing_else_is() -> None:
    image = decode_image(SNAPSHOT)
    assert SNAPSHOT[4:6] == b"\0\1", "nodes from before there were levels read it"
    raised = evolve(image, features=Map({"raftmq.level": 2}), features_epoch=4)
    data = encode_image(raised)
    assert data[4:6] == b"\0\2"
    assert decode_image(data) == raised


def _with_transactions() -> Transactions:
    """One id that is decided and owes a marker, with a new producer id, and one that runs."""
    machine = Transactions()
    machine.init("other")
    machine.init()
    machine.jump_to(EPOCH_LAST)
    machine.add((A, 0), (B, 0), protocol=2, groups=("g",))
    machine.end(True, 2)
    machine.report(B, 0)
    name = "other"
    credentials = {"transactional_id": name, "producer_id": machine.known(name).producer_id}
    machine.add((A, 0), protocol=2, groups=("g",), **credentials, epoch=0, txn_seq=1)
    machine.apply(machine.committing(7, **credentials, epoch=0, txn_seq=1))
    assert machine.is_pending()
    machine.image = evolve(machine.image, features=Map({"raftmq.level": LEVEL_OF_TRANSACTIONS}))
    return machine


def test_transactions_are_written_in_format_3_and_are_all_there() -> None:
    machine = _with_transactions()
    data = encode_image(machine.image)
    assert data[4:6] == b"\0\3"
    read = decode_image(data)
    assert read == machine.image
    assert read.transactions.stakes(A, 0) == machine.image.transactions.stakes(A, 0)
    assert read.transactions.of_producer(machine.known().marker[0]) == machine.known()
    assert [*read.transactions.decided_after(0)] == [machine.known()]
    encoder = SnapshotEncoder()
    while not encoder.warm(machine.image, 1):
        pass
    assert encoder.encode(machine.image) == data


def test_ids_that_all_changed_are_encoded_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call encodes more than its share, and the last one joins what there is."""
    encoded: list[str] = []
    to_row = snapshot._transaction_row

    def counted(one: Transaction) -> Any:
        encoded.append(one.transactional_id)
        return to_row(one)

    monkeypatch.setattr(snapshot, "_transaction_row", counted)
    image = evolve(
        EMPTY_IMAGE,
        features=Map({RAFTMQ_LEVEL: LEVEL_OF_TRANSACTIONS}),
        transactions=transactions_of(many_ids(20_000), 0),
    )
    encoder = SnapshotEncoder()
    encoder.encode(image)
    changed = evolve(image, transactions=transactions_of(many_ids(20_000, epoch=2), 0))
    each: list[int] = []
    is_done = False
    while not is_done:
        encoded.clear()
        is_done = encoder.prepare(changed)
        each.append(len(encoded))
    assert max(each) <= 2_500
    assert sum(each) == 20_000
    encoded.clear()
    data = encoder.encode(changed)
    assert encoded == []
    assert data == encode_image(changed)
    assert decode_image(data) == changed
    encoded.clear()
    encoder.encode(evolve(changed, version=Offset(7)))
    assert encoded == [], "what did not change is kept"


def test_a_snapshot_of_format_3_without_transactions_is_refused() -> None:
    machine = _with_transactions()
    body = msgspec.msgpack.decode(encode_image(machine.image)[10:])
    for size in (-1, -2):
        with pytest.raises(SnapshotError, match="without transactions"):
            decode_image(sealed(3, msgspec.msgpack.encode(body[:size])))
    older = evolve(decode_image(SNAPSHOT), features=Map({"raftmq.level": 2}), features_epoch=4)
    data = encode_image(older)
    assert decode_image(data) == older, "one of an older format has none"
    with pytest.raises(SnapshotError, match="without transactions"):
        decode_image(sealed(3, data[10:]))


def test_what_a_newer_version_adds_to_a_part_of_a_snapshot_is_never_dropped() -> None:
    machine = _with_transactions()
    data = encode_image(machine.image)
    assert decode_image(sealed(3, data[10:])) == machine.image
    body = msgspec.msgpack.decode(data[10:])
    later = [*body, "later"], [*body], [*body]
    later[1][-2] = [[*row, "later"] for row in body[-2]]
    later[2][10] = [{**group, "later": 1} for group in body[10]]
    for changed in later:
        with pytest.raises(SnapshotError, match="another shape"):
            decode_image(sealed(3, msgspec.msgpack.encode(changed)))


def _with_moves() -> Machine:
    """At the level of moves: one under way and one planned, one node that is new, one removed, two
    orders to delete."""
    machine = Machine()
    machine.register_all(1, 2, 3, 4, 5)
    machine.apply(CreateTopics(topics=(creation("b", 2, (1, 2)), creation("a", 1, (1, 2), (3, 1)))))
    machine.image = raised(machine.image, LEVEL_OF_MOVES)
    broker = machine.image.brokers[node(5)]
    machine.apply(FenceBroker(node_id=node(5), broker_epoch=broker.epoch))
    machine.apply(UnregisterBroker(node_id=node(5)))
    machine.apply(DeleteTopics(topic_ids=(topic_id(2),)))
    where = {"topic_id": topic_id(1), "partition": 0}
    to = node(3), node(4)
    machine.apply(ReassignPartition(**where, replicas=to, origin=Origin.DRAIN))
    machine.apply(ReassignPartition(**where, replicas=(node(3), node(2)), origin=Origin.DRAIN))
    epoch = machine.image.topics["a"].partitions[1].creation_epoch
    move = PlannedMove(topic_id=topic_id(1), partition=1, creation_epoch=epoch, replicas=to)
    machine.apply(PlanMoves(moves=(move,)))
    change = NodeChange(node(4), NodeState.CORDONED)
    machine.apply(ChangeNodes(changes=(change,), voters=5))
    return machine


def test_moves_and_states_are_written_in_format_4_and_are_all_there() -> None:
    image = _with_moves().image
    first, second = image.topics["a"].partitions
    assert (first.moving_from, first.dismissed, first.origin) == ((1, 2), (4,), "drain")
    assert (second.planned, second.origin) == ((3, 4), "operator")
    assert image.brokers[node(4)].state is NodeState.CORDONED
    assert (image.voters_wanted, list(image.removed)) == (5, [5])
    assert len(image.removals) == 1
    data = encode_image(image)
    assert data[4:6] == b"\0\4"
    assert decode_image(data) == image
    encoder = SnapshotEncoder()
    while not encoder.warm(image, 1):
        pass
    assert encoder.encode(image) == data


def test_a_snapshot_of_format_4_without_moves_is_refused() -> None:
    body = msgspec.msgpack.decode(encode_image(_with_moves().image)[10:])
    for size in (-1, -2, -3, -4):
        with pytest.raises(SnapshotError, match="without moves"):
            decode_image(sealed(4, msgspec.msgpack.encode(body[:size])))
    with pytest.raises(SnapshotError, match="another shape"):
        decode_image(sealed(4, msgspec.msgpack.encode([*body, "later"])))


RULES = tuple(
    Rule(kind, pattern, name, principal, "*", Operation.READ, permission)
    for kind in (Kind.TOPIC, Kind.GROUP)
    for pattern in Pattern
    for name in ("b", "a")
    for principal in ("User:b", "User:a")
    for permission in Permission
)


def test_rules_are_written_in_format_5_and_are_all_there() -> None:
    machine = Machine()
    machine.image = raised(machine.image, LEVEL_OF_SECURITY)
    machine.apply(CreateAcls(rules=RULES[::-1]))
    image = machine.image
    assert image.rules.count == len(RULES)
    data = encode_image(image)
    assert data[4:6] == b"\0\5"
    assert decode_image(data) == image
    encoder = SnapshotEncoder()
    while not encoder.warm(image, 1):
        pass
    assert encoder.encode(image) == data
    other = Machine()
    other.image = raised(other.image, LEVEL_OF_SECURITY)
    for rule in RULES:
        other.apply(CreateAcls(rules=(rule,)), submitter=2)
    assert list(other.image.rules) == list(image.rules), "in whichever order they came"
    machine.apply(DeleteAcls(rules=RULES))
    assert machine.image.rules == NO_RULES
    assert decode_image(encoder.encode(machine.image)) == machine.image


def test_a_snapshot_of_format_5_without_rules_or_users_is_refused() -> None:
    machine = Machine()
    machine.image = raised(machine.image, LEVEL_OF_SECURITY)
    body = msgspec.msgpack.decode(encode_image(machine.image)[10:])
    for left_out, what in ((1, "users"), (2, "users"), (3, "rules")):
        with pytest.raises(SnapshotError, match=f"without {what}"):
            decode_image(sealed(5, msgspec.msgpack.encode(body[:-left_out])))
    with pytest.raises(SnapshotError, match="another shape"):
        decode_image(sealed(5, msgspec.msgpack.encode([*body, "later"])))


def test_a_snapshot_of_format_6_without_retired_partitions_is_refused() -> None:
    machine = Machine()
    machine.register_all(1)
    machine.image = raised(machine.image, LEVEL_OF_VIEWS)
    machine.apply(CreateTopics(topics=(creation("a", 1, (1,), (1,)),)))
    shrink = ShrinkTopic(
        topic_id=topic_id(1), partitions=1, listed=2, view="v", view_id=topic_id(2)
    )
    machine.apply(shrink)
    data = encode_image(machine.image)
    assert data[4:6] == b"\0\6"
    body = msgspec.msgpack.decode(data[10:])
    for size in (-1, -2):
        with pytest.raises(SnapshotError, match="without retired partitions"):
            decode_image(sealed(6, msgspec.msgpack.encode(body[:size])))
    with pytest.raises(SnapshotError, match="another shape"):
        decode_image(sealed(6, msgspec.msgpack.encode([*body, "later"])))
    body[-2][0][2] = []  # the retired one, of which there is a state
    with pytest.raises(SnapshotError, match="without partition 1 of a"):
        decode_image(sealed(6, msgspec.msgpack.encode(body)))


def test_a_snapshot_of_the_level_before_is_read_and_its_orders_are_found_after_a_raise() -> None:
    machine = Machine()
    machine.register_all(1, 2)
    machine.apply(CreateTopics(topics=(creation("a", 1, (1, 2)), creation("b", 2, (1,), (2,)))))
    group = machine.image.topics["a"].group_id(0)
    machine.apply(DeleteTopics(topic_ids=(topic_id(1),)))
    machine.apply(ReassignPartition(topic_id=topic_id(2), partition=0, replicas=(node(2),)))
    older = evolve(machine.image, features=Map({"raftmq.level": 3}), features_epoch=0)
    data = encode_image(older)
    assert data[4:6] == b"\0\3"
    machine.image = decode_image(data)
    assert machine.image == older
    before = machine.image.removal(group)
    for number in (1, 2):  # as brokers of a version that supports the next level
        broker = machine.image.brokers[node(number)]
        brokers = machine.image.brokers.set(node(number), evolve(broker, features=NEWEST))
        machine.image = evolve(machine.image, brokers=brokers)
    update = UpdateFeatures(updates=(FeatureUpdate("raftmq.level", 4),))
    assert isinstance(machine.apply(update), Done)
    assert machine.image.removal(group) == before is not None
    versions = [p.target_version for p in machine.image.topics["b"].partitions]
    assert versions == [machine.image.version, -1], "a move that is under way is to be seen anew"
    assert decode_image(encode_image(machine.image)) == machine.image
    groups = ((*group,),)
    machine.apply(ConfirmRemoved(node_id=node(1), replicas=(), groups=groups))
    late = ((group.topic_id, group.partition),)  # on its way when the level was raised
    machine.apply(ConfirmRemoved(node_id=node(2), replicas=late))
    assert not machine.image.removals


NEWEST = named(SUPPORTED)
BD280F3 = bytes.fromhex(
    "52514d530001e6fbe2449d0606a474657374939801a236350001c09193a6636c69656e74a93132372e302e30"
    "2e31cd232990c29802a236360201c09193a6636c69656e74a93132372e302e302e31cd232a90c29803a23637"
    "0401c09193a6636c69656e74a93132372e302e302e31cd232b90c29090009193010107009194a161d9243030"
    "3030303030302d303030302d343030302d383030302d30303030303030303030303192960006920102929201"
    "a236359202a23636920102ff960106920301929201a236359203a23637920103ff80909000"
)
"""`SNAPSHOT` as commit bd280f3 encoded it."""


def test_a_snapshot_of_an_older_version_stays_readable() -> None:
    assert decode_image(BD280F3) == decode_image(SNAPSHOT)


def test_order_of_creation_does_not_show() -> None:
    one, other = Machine(), Machine()
    for number in (1, 2, 3):
        one.apply(register(number), submitter=number, sequence=1)
    for number in (1, 2, 3):
        other.apply(register(number), submitter=number, sequence=1)
    names = [f"t{i}" for i in range(30)]
    for machine, order in ((one, names), (other, names)):
        machine.apply(
            CreateTopics(topics=tuple(creation(n, 1 + names.index(n), (1, 2)) for n in order)),
            submitter=9,
            sequence=1,
        )
    assert encode_image(one.image) == encode_image(other.image)


def test_lookups() -> None:
    image = decode_image(SNAPSHOT)
    topic = image.topics["a"]
    assert image.topic_by_id(topic.topic_id) is topic
    assert image.partition(TopicPartition("a", 1)) is topic.partitions[1]
    assert image.partition(TopicPartition("a", 2)) is None
    assert image.partition(TopicPartition("b", 0)) is None
    assert topic.replication_factor == 2
    assert topic.partitions[1].preferred_leader == 3
    assert [b.node_id for b in image.live_brokers()] == [1, 2, 3]
    client = image.brokers[node(2)].endpoint("client")
    assert client is not None
    assert client.port == 9002
    assert image.brokers[node(2)].endpoint("nope") is None


def test_an_encoder_that_is_used_again_gives_the_same_bytes() -> None:
    encoder = SnapshotEncoder()
    machine = Machine()
    machine.register_all(1, 2, 3)
    epoch = machine.image.brokers[node(1)].epoch
    for number in range(1, 30):
        machine.apply(CreateTopics(topics=(creation(f"t{number}", number, (1, 2)),)))
        if number % 4 == 0:
            machine.apply(DeleteTopics(topic_ids=(topic_id(number - 1),)))
        machine.apply(ClaimGroup(group=f"g{number % 5}", node_id=node(1), broker_epoch=epoch))
        if number % 3 == 0:
            encoder.warm(machine.image, 7)
        if number % 7 == 0:
            assert encoder.encode(machine.image) == encode_image(machine.image)
    while not encoder.warm(machine.image, 7):
        pass
    data = encoder.encode(machine.image)
    assert data == encode_image(machine.image)
    assert decode_image(data) == machine.image
