"""Moving a leader by hand: to whom it may go, in which order, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from attrs import evolve
from immutables import Map

from raftmq.controller.leaders import LeaderTable, plan_preference
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import Asker, PreferLeaderCall, Way
from raftmq.metadata.commands import ReassignPartition
from raftmq.metadata.image import EMPTY_IMAGE, PartitionImage, TopicImage
from raftmq.metadata.results import Done
from raftmq.promise import Promise
from raftmq.server.admin.pages import LeadersPage, TransferRequest
from raftmq.types import LeaderEpoch, NodeId, Offset, TopicId

TOPIC = TopicId(UUID(int=7))
OPERATOR = Asker(Way.OPERATOR)
ONE, TWO, THREE = NodeId(1), NodeId(2), NodeId(3)


class World:
    """A control plane that obeys at once; the controller may be of an older version (`is_old`),
    which takes the command from this node."""

    def __init__(self, *, is_old: bool = False) -> None:
        self.is_old = is_old
        self.calls: list[PreferLeaderCall] = []
        self.leaders = LeaderTable()
        self.image = EMPTY_IMAGE
        self.place((ONE, TWO, THREE))
        self.isr = (ONE, TWO)
        self.epoch = 0
        self.lead(ONE)
        self.asked: list[NodeId] = []
        self.commands: list[tuple[Any, int]] = []
        self.refusals: list[ErrorCode] = []
        self.is_obeyed = True
        self.page = LeadersPage(self)  # type: ignore[arg-type]

    @property
    def engine(self) -> World:
        return self

    def place(self, replicas: tuple[NodeId, ...]) -> None:
        partition = PartitionImage(0, 1, replicas, (), replicas)
        topic = TopicImage("t", TOPIC, (partition,), Map())
        self.image = evolve(
            EMPTY_IMAGE,
            version=Offset(self.image.version + 1),
            topics=Map({"t": topic}),
            topic_names=Map({TOPIC: "t"}),
        )

    def lead(self, node_id: NodeId) -> None:
        self.epoch += 1
        self.leaders.led(
            TOPIC,
            0,
            leader=node_id,
            leader_epoch=LeaderEpoch(self.epoch),
            isr=self.isr,
            voters=(ONE, TWO, THREE),
        )

    def propose(self, command: ReassignPartition, *, expected_version: int) -> Promise[Any]:
        self.commands.append((command, expected_version))
        if self.refusals:
            return Promise.failed(KafkaError(code=self.refusals.pop()))
        self.place(command.replicas)
        return Promise.resolved(Done(Offset(1)))

    def call(self, request: PreferLeaderCall, asker: Asker) -> Promise[Any]:
        assert asker is OPERATOR
        if self.is_old:
            return Promise.failed(KafkaError(code=ErrorCode.UNSUPPORTED_VERSION))
        self.calls.append(request)
        if self.refusals:
            return Promise.failed(KafkaError(code=self.refusals.pop()))
        command, outcomes = plan_preference(self.image, self.leaders, request)
        if command is not None:
            self.place(command.replicas)
        return Promise.resolved(outcomes)

    def move_leadership(self, _topic_id: TopicId, _partition: int, to: NodeId) -> None:
        self.asked.append(to)
        if self.is_obeyed:
            self.lead(to)

    async def transfer(self, to: int, **fields: Any) -> dict[str, Any]:
        wish = {"topic": "t", "partition": 0, "to": to, **fields}
        return await self.page.transfer(TransferRequest(**wish), OPERATOR)


async def test_the_wish_is_stored_before_the_leader_is_asked() -> None:
    world = World()
    told = await world.transfer(2)
    assert told == {"code": "NONE", "message": "node 2 leads t-0"}
    [call] = world.calls
    assert (call.topic, call.partition, call.to) == ("t", 0, 2)
    assert world.image.topics["t"].partitions[0].replicas == (TWO, ONE, THREE)
    assert world.asked == [TWO]
    row = world.page.show()["partitions"][0]
    assert (row["leader"], row["preferred"], row["isr"]) == (2, 2, [1, 2])
    assert await world.transfer(2) == told
    assert len(world.calls) == 1, "nothing was left to do"
    assert world.commands == []


async def test_an_older_controller_takes_the_command() -> None:
    world = World(is_old=True)
    assert (await world.transfer(2))["code"] == "NONE"
    [(command, version)] = world.commands
    assert (command.replicas, version) == ((TWO, ONE, THREE), 0)
    assert world.asked == [TWO]


async def test_who_leads_already_is_only_preferred_from_now_on() -> None:
    world = World()
    world.lead(TWO)
    assert (await world.transfer(2))["code"] == "NONE"
    assert world.asked == []
    assert world.image.topics["t"].partitions[0].preferred_leader == TWO


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"to": 3}, "INELIGIBLE_REPLICA"),
        ({"to": 4}, "INVALID_REPLICA_ASSIGNMENT"),
        ({"to": 2, "partition": 1}, "UNKNOWN_TOPIC_OR_PARTITION"),
        ({"to": 2, "topic": "u"}, "UNKNOWN_TOPIC_OR_PARTITION"),
    ],
)
async def test_what_cannot_be_is_refused_and_changes_nothing(
    fields: dict[str, Any], code: str
) -> None:
    world = World()
    assert (await world.transfer(**fields))["code"] == code
    assert world.commands == world.calls == []
    assert world.asked == []


async def test_a_state_that_moved_on_is_judged_anew() -> None:
    world = World(is_old=True)
    world.refusals = [ErrorCode.INVALID_UPDATE_VERSION]
    assert (await world.transfer(2))["code"] == "NONE"
    assert len(world.commands) == 2
    world.refusals = [ErrorCode.NOT_CONTROLLER]
    assert (await world.transfer(1))["code"] == "NOT_CONTROLLER"


async def test_a_leader_that_does_not_obey_is_asked_again_and_given_up(
    autojump_clock: Callable[[], None],
) -> None:
    world = World()
    world.is_obeyed = False
    told = await world.transfer(2, timeout_ms=1_700)
    assert told["code"] == "REQUEST_TIMED_OUT"
    assert world.asked == [TWO] * 4
