"""Levels of features: raised when every registered broker supports them, never lowered while they
are needed, and written about by nobody before."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from attrs import evolve
from immutables import Map

from raftmq.errors import ErrorCode
from raftmq.log.log_start import LogStart
from raftmq.metadata import features
from raftmq.metadata.broker_messages import (
    FORMAT_MAX,
    AdminRequest,
    AlterUsersCall,
    BalanceCall,
    ChangeNodesCall,
    CreateAclsCall,
    FeatureRequest,
    ForwardCommands,
    Outcome,
    PlanMovesCall,
    ShrinkTopicCall,
    UpdateFeaturesCall,
    format_of,
)
from raftmq.metadata.commands import (
    LATER_FIELDS,
    AllocateProducerIds,
    Envelope,
    FeatureUpdate,
    UpdateFeatures,
    encode_envelope,
)
from raftmq.metadata.features import (
    FORMATS,
    SUPPORTED,
    first_levels,
    named,
    plan_features,
    ranges_of,
)
from raftmq.metadata.image import (
    LEVEL_OF_MOVES,
    LEVEL_OF_SECURITY,
    LEVEL_OF_VIEWS,
    MetadataImage,
)
from raftmq.metadata.results import Done, Registered, Rejection
from raftmq.metadata.state_machine import MetadataMachine, UnappliableCommandError
from raftmq.types import LeaderEpoch
from tests.controller.metadata_cluster import CLIENT, MetadataCluster
from tests.metadata.metadata_commands import Machine, node, register

LEVEL, VERSION = "raftmq.level", "transaction.version"


def _raise(*updates: tuple[str, int]) -> UpdateFeatures:
    return UpdateFeatures(updates=tuple(FeatureUpdate(*update) for update in updates))


def _machine(*ranges: str) -> Machine:
    """With a broker of each of these versions."""
    machine = Machine()
    for number, text in enumerate(ranges, 1):
        named_ranges = tuple(text.split()) if text else ()
        command = msgspec.structs.replace(register(number), features=named_ranges)
        machine.apply(command)
    return machine


def _call(
    *updates: tuple[str, int], upgrade_type: int = 1, validate_only: bool = False
) -> UpdateFeaturesCall:
    return UpdateFeaturesCall(
        updates=tuple(FeatureRequest(*update, upgrade_type) for update in updates),
        validate_only=validate_only,
    )


def test_ranges_are_registered_and_read_as_they_were() -> None:
    ranges = {"raftmq.level": (1, 7), "some.other": (0, 3)}
    assert ranges_of(named(ranges)) == ranges
    assert ranges_of(()) == {LEVEL: (1, 1)}, "nodes from before there were levels"
    assert ranges_of(("nonsense", "a:1-x", "raftmq.level:1-2\n")) == {LEVEL: (1, 1)}


def test_each_level_has_a_format_of_its_own_that_this_version_speaks() -> None:
    """So a node that does not support a level is turned away before it is sent any of it."""
    low, high = SUPPORTED[LEVEL]
    assert list(FORMATS) == list(range(low, high + 1))
    assert sorted(set(FORMATS.values())) == list(FORMATS.values())
    assert max(FORMATS.values()) <= FORMAT_MAX


@pytest.mark.parametrize(
    ("call", "level"),
    [
        (UpdateFeaturesCall(updates=()), 2),
        (ChangeNodesCall(), LEVEL_OF_MOVES),
        (PlanMovesCall(moves=()), LEVEL_OF_MOVES),
        (BalanceCall(), LEVEL_OF_MOVES),
        (CreateAclsCall(rules=()), LEVEL_OF_SECURITY),
        (AlterUsersCall(users=()), LEVEL_OF_SECURITY),
        (ShrinkTopicCall(name="t", partitions=1), LEVEL_OF_VIEWS),
    ],
)
def test_a_call_goes_to_whoever_may_have_its_level(call: AdminRequest, level: int) -> None:
    assert format_of(call) == FORMATS[level]


# ---- what is applied ----


def test_a_level_that_all_support_is_finalized_at_its_offset() -> None:
    machine = _machine("raftmq.level:1-2", "raftmq.level:1-3")
    assert machine.image.level == 1
    assert isinstance(machine.apply(_raise((LEVEL, 2))), Done)
    image = machine.image
    assert (image.level, image.features_epoch) == (2, 2)
    assert image.structure_version == 2, "brokers say that they have applied it"
    assert isinstance(machine.apply(_raise((LEVEL, 2))), Done)
    assert machine.image.features_epoch == 2, "nothing was raised"


@pytest.mark.parametrize(
    ("brokers", "updates", "reason"),
    [
        (["raftmq.level:1-2", ""], [(LEVEL, 2)], "broker 2 supports 1 to 1"),
        (["raftmq.level:1-2"], [(LEVEL, 3)], "broker 1 supports 1 to 2"),
        (["raftmq.level:1-2"], [(LEVEL, 2), ("x.y", 1)], "broker 1 does not know it"),
        (["raftmq.level:1-2 x.y:1-2"], [("x.y", 1)], "it has to be 2 before"),
        (["raftmq.level:1-2"], [(LEVEL, 0)], "never lowered"),
    ],
)
def test_a_level_that_not_all_support_is_rejected(
    brokers: list[str], updates: list[tuple[str, int]], reason: str
) -> None:
    machine = _machine(*brokers)
    result = machine.apply(_raise(*updates))
    assert isinstance(result, Rejection)
    assert result.code is ErrorCode.FEATURE_UPDATE_FAILED
    assert reason in result.message
    assert not machine.image.features


def test_the_level_is_never_lowered() -> None:
    machine = _machine("raftmq.level:1-3 x.y:1-2")
    machine.apply(_raise((LEVEL, 3), ("x.y", 2)))
    result = machine.apply(_raise((LEVEL, 2)))
    assert isinstance(result, Rejection)
    assert "never lowered" in result.message
    machine.apply(_raise(("x.y", 1)))
    machine.apply(_raise(("x.y", 0)))
    assert dict(machine.image.features) == {LEVEL: 3}


def test_a_broker_that_does_not_support_a_level_is_refused_at_registration() -> None:
    machine = _machine("raftmq.level:1-2")
    before = machine.apply(register(2))
    assert isinstance(before, Registered), "as it always was, while nobody raised anything"
    assert isinstance(machine.apply(_raise((LEVEL, 2))), Rejection)
    machine = _machine("raftmq.level:1-2")
    machine.apply(_raise((LEVEL, 2)))
    refused = machine.apply(register(2))
    assert isinstance(refused, Rejection)
    assert refused.code is ErrorCode.UNSUPPORTED_VERSION
    assert "raftmq.level is 2, supported: 1 to 1" in refused.message
    fits = msgspec.structs.replace(register(3), features=("raftmq.level:2-9",))
    assert isinstance(machine.apply(fits), Registered)


# ---- what a client may ask for ----


def _raised(brokers: int = 1, **levels: int) -> MetadataImage:
    names = {name.replace("_", "."): level for name, level in levels.items()}
    image = _machine(*(["raftmq.level:1-3 x.y:1-3"] * brokers)).image
    return evolve(image, features=Map(names), features_epoch=1) if names else image


KNOWN = {LEVEL: (1, 3), "x.y": (1, 3)}


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (_call(("no.such", 1)), "no feature of this version"),
        (_call(("x.y", 1)), "lowering it to 1 wants a downgrade"),
        (_call(("x.y", 3), upgrade_type=2), "is no downgrade"),
        (_call(("x.y", 1), upgrade_type=2), "what is stored needs 2"),
        (_call(("x.y", 1), upgrade_type=3), "what is stored needs 2"),
        (_call((LEVEL, 1), upgrade_type=3), "never lowered"),
        (_call((LEVEL, 9)), "broker 1 supports 1 to 3"),
        (_call(("x.y", 3), ("x.y", 3)), "more than once"),
        (_call(("x.y", 3), upgrade_type=4), "no upgrade type 4"),
        (_call(("x.y", -1), upgrade_type=2), "needs 2"),
    ],
)
def test_what_a_client_may_not_ask_for(
    monkeypatch: pytest.MonkeyPatch, call: UpdateFeaturesCall, reason: str
) -> None:
    monkeypatch.setitem(features.STORED_NEEDS, "x.y", lambda _image: 2)
    command, outcomes = plan_features(_raised(raftmq_level=2, x_y=2), KNOWN, call)
    assert command is None
    assert [row.code for row in outcomes] == [ErrorCode.INVALID_UPDATE_VERSION]
    assert reason in (outcomes[0].message or "")


def test_one_refused_level_keeps_the_others() -> None:
    command, outcomes = plan_features(_raised(), KNOWN, _call((LEVEL, 2), ("no.such", 1)))
    assert command is None
    assert "nothing was changed" in (outcomes[0].message or "")
    assert "no feature" in (outcomes[1].message or "")


def test_a_request_is_planned_validated_or_has_nothing_to_do() -> None:
    image = _raised(raftmq_level=2, x_y=2)
    assert plan_features(image, KNOWN, _call(("x.y", 3))) == (
        _raise(("x.y", 3)),
        (Outcome(name="x.y"),),
    )
    nothing = None, (Outcome(name="x.y"),)
    assert plan_features(image, KNOWN, _call(("x.y", 3), validate_only=True)) == nothing
    assert plan_features(image, KNOWN, _call(("x.y", 2))) == nothing
    lower = _call(("x.y", 1), upgrade_type=2)
    assert plan_features(image, KNOWN, lower)[0] == _raise(("x.y", 1)), "nothing stored needs it"
    assert plan_features(_raised(), KNOWN, _call((LEVEL, 1))) == (None, (Outcome(name=LEVEL),))


# ---- the whole of it ----


def _update(cluster: MetadataCluster, asker: int, *updates: tuple[str, int]) -> Any:
    promise = cluster.nodes[asker].control.call(_call(*updates), CLIENT)
    cluster.run(1_500)
    if promise.error is not None:
        return promise.error
    return [(row.code, row.message) for row in promise.result()]


@pytest.mark.parametrize("asker", [1, 2], ids=["controller", "another"])
def test_a_level_is_raised_everywhere(asker: int) -> None:
    cluster = MetadataCluster.formed()
    assert _update(cluster, asker, (LEVEL, 2)) == [(ErrorCode.NONE, None)]
    assert [cluster.nodes[n].engine.image.level for n in (1, 2, 3)] == [2, 2, 2]


def test_a_node_that_is_registered_and_down_keeps_the_level_down() -> None:
    cluster = MetadataCluster.formed(supported={3: {LEVEL: (1, 1)}})
    cluster.kill(3)
    cluster.run(3_000)
    [(code, message)] = _update(cluster, 1, (LEVEL, 2))
    assert code is ErrorCode.INVALID_UPDATE_VERSION
    assert "broker 3 supports 1 to 1" in message


def test_a_controller_of_an_older_version_is_not_asked_what_it_cannot_read() -> None:
    cluster = MetadataCluster.formed(formats={1: 5})
    error = _update(cluster, 2, (LEVEL, 2))
    assert error.code is ErrorCode.UNSUPPORTED_VERSION
    assert "node 1, the controller, runs a version of raftmq" in str(error)
    assert "upgrade all nodes first" in str(error)


# ---- what a new cluster begins with ----


@pytest.mark.parametrize(
    ("formats", "levels"),
    [
        ([], {LEVEL: 3, VERSION: 2, "x.y": 4}),
        ([7, 7], {LEVEL: 3, VERSION: 2, "x.y": 4}),
        ([7, 6], {LEVEL: 2, "x.y": 4}),
        ([5, 7], {}),
    ],
    ids=["alone", "new", "one of level 2", "one without levels"],
)
def test_the_newest_levels_are_those_that_all_who_are_reached_can_follow(
    formats: list[int], levels: dict[str, int]
) -> None:
    known = {LEVEL: (1, 3), VERSION: (0, 2), "x.y": (1, 4)}
    found = first_levels(known, formats)
    assert {update.name: update.level for update in found} == levels
    if found:
        machine = _machine(" ".join(named(known)))
        assert isinstance(machine.apply(UpdateFeatures(updates=found)), Done)


def test_a_new_cluster_begins_at_the_newest_levels() -> None:
    cluster = MetadataCluster.formed(first_levels=first_levels(SUPPORTED, ()))
    for number in (1, 2, 3):
        image = cluster.nodes[number].engine.image
        assert dict(image.features) == {LEVEL: SUPPORTED[LEVEL][1], VERSION: 2}
        assert sorted(image.brokers) == [1, 2, 3]
    before = cluster.nodes[1].engine.image.features_epoch
    cluster.kill(1)
    cluster.elect(2)
    cluster.run(1_000)
    assert cluster.nodes[2].engine.image.features_epoch == before, "only the first one does it"


def test_a_first_controller_that_is_lost_leaves_no_cluster_without_levels() -> None:
    cluster = MetadataCluster(first_levels=first_levels(SUPPORTED, ()))
    cluster.cut = [1]
    cluster.elect(1)
    cluster.run(500)
    assert cluster.nodes[1].replica.log_end_offset > 0, "they are in its log, not committed"
    cluster.kill(1)
    cluster.cut = []
    cluster.elect(2)
    cluster.run(1_000)
    first = cluster.nodes[2].engine.image
    assert first.level == SUPPORTED[LEVEL][1]
    assert first.features_epoch <= 1, "nobody's command was committed without them"


def test_a_cluster_that_an_older_version_formed_stays_where_it_is() -> None:
    cluster = MetadataCluster.formed()
    cluster.first_levels = first_levels(SUPPORTED, ())
    cluster.kill(1)
    cluster.elect(2)
    cluster.run(1_000)
    assert cluster.nodes[2].engine.image.level == 1


def test_the_version_of_transactions_needs_the_level_that_holds_them() -> None:
    machine = _machine("raftmq.level:1-3 transaction.version:0-2")
    early = machine.apply(_raise((LEVEL, 2), (VERSION, 2)))
    assert isinstance(early, Rejection)
    assert "transaction.version needs raftmq.level 3" in early.message
    assert isinstance(machine.apply(_raise((LEVEL, 3), (VERSION, 2))), Done)
    assert isinstance(machine.apply(_raise((VERSION, 1))), Done)
    assert isinstance(machine.apply(_raise((VERSION, 0))), Done)
    assert dict(machine.image.features) == {LEVEL: 3}


def _allocate(count: int) -> AllocateProducerIds:
    return AllocateProducerIds(node_id=node(1), count=count)


def test_a_field_is_proposed_only_once_the_level_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = MetadataCluster.formed()
    monkeypatch.setitem(LATER_FIELDS, AllocateProducerIds, {"count": 2})
    engine = cluster.nodes[1].engine
    early = engine.propose(_allocate(7))
    assert early.error is not None
    assert "AllocateProducerIds needs raftmq.level 2, this cluster is at 1" in str(early.error)
    assert "raftmq cluster features --raise raftmq.level=2" in str(early.error)
    plain = engine.propose(AllocateProducerIds(node_id=node(1)))
    _update(cluster, 1, (LEVEL, 2))
    assert plain.error is None
    late = engine.propose(_allocate(7))
    cluster.run(100)
    assert late.error is None


@pytest.mark.parametrize(
    ("sender", "command"),
    [(7, AllocateProducerIds(node_id=node(7), count=7)), (1, _raise((LEVEL, 99)))],
    ids=["another node", "itself"],
)
def test_the_leader_takes_nothing_of_a_level_to_come(
    monkeypatch: pytest.MonkeyPatch, sender: int, command: msgspec.Struct
) -> None:
    """Whoever sends it: it would end the nodes that cannot read it."""
    cluster = MetadataCluster.formed()
    monkeypatch.setitem(LATER_FIELDS, AllocateProducerIds, {"count": 2})
    envelope = Envelope(
        version=2, node_id=node(sender), incarnation=9_000_000_000_000, sequence=1, command=command
    )
    forwarded = ForwardCommands((encode_envelope(envelope),))
    before = cluster.nodes[1].replica.log_end_offset
    reply = cluster.nodes[1].engine.receive_commands(node(sender), forwarded)
    assert reply.code is ErrorCode.INVALID_REQUEST
    assert LEVEL in reply.message
    cluster.run(100)
    assert cluster.nodes[1].replica.log_end_offset == before


def test_the_leader_takes_no_level_that_its_own_version_does_not_support() -> None:
    cluster = MetadataCluster.formed()
    machine = cluster.nodes[1].machine
    machine.supported = {LEVEL: (1, 1)}  # registered by a newer version, started by an older one
    promise = cluster.nodes[1].engine.propose(_raise((LEVEL, 2)))
    cluster.run(300)
    assert "raftmq.level is 2, supported: 1 to 1 by this version" in str(promise.error)
    assert machine.failure is None


def test_a_node_stops_where_a_level_is_raised_that_it_does_not_support() -> None:
    cluster = MetadataCluster.formed()
    machine = cluster.nodes[3].machine
    machine.supported = {LEVEL: (1, 1)}
    promise = cluster.nodes[1].engine.propose(_raise((LEVEL, 2)))
    with pytest.raises(UnappliableCommandError) as caught:
        cluster.run(300)
    assert caught.value.is_newer
    assert str(caught.value).startswith("this cluster is ahead of this version: ")
    assert "raftmq.level is 2, supported: 1 to 1 by this version" in str(caught.value)
    assert "start a newer raftmq on this node" in str(caught.value)
    assert machine.image.level == 1, "nothing of it was applied"
    assert promise.error is None


def test_a_state_with_a_level_that_is_not_supported_is_not_begun_with() -> None:
    cluster = MetadataCluster.formed()
    _update(cluster, 1, (LEVEL, 2))
    leader = cluster.nodes[1].machine
    state = leader._encoder.encode(leader.image)
    start = LogStart(leader.applied_offset, leader.applied_end, LeaderEpoch(1), state=state)
    newcomer = MetadataMachine(supported={LEVEL: (1, 1)})
    with pytest.raises(features.UnsupportedLevelError, match="supported: 1 to 1 by this version"):
        newcomer.restore(start)
    assert newcomer.image.level == 1
    fits = MetadataMachine()
    fits.restore(start)
    assert fits.image == leader.image
