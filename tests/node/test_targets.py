"""A leader acts on no target older than its election, and says what it has seen when it is sure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, field

from raftmq.errors import ErrorCode, KafkaError
from raftmq.node.targets import UNSEEN, TargetMemberships
from raftmq.promise import Promise
from raftmq.raft.membership import Configuration
from raftmq.types import RaftGroupId, RaftIndex, ReplicaId, StorageId
from tests.metadata.metadata_commands import node
from tests.metadata.test_apply_moves import Moving

NO_LEADER = KafkaError(code=ErrorCode.NOT_LEADER_OR_FOLLOWER)


@define
class World:
    """A node that leads partition 0 of topic `a`; barriers wait until they are kept."""

    machine: Moving = field(factory=Moving)
    barriers: list[Promise[None]] = field(factory=list)
    rounds: list[Promise[RaftIndex]] = field(factory=list)
    restated: list[RaftGroupId] = field(factory=list)
    core: Any = field(init=False)
    targets: TargetMemberships = field(init=False)

    def __attrs_post_init__(self) -> None:
        voters = tuple(ReplicaId(node(n), StorageId(100 + n)) for n in (1, 2, 3))
        self.core = SimpleNamespace(term=5, configuration=Configuration(voters=voters))
        self.targets = TargetMemberships(self, self.restated.append)  # type: ignore[arg-type]  # as engine

    @property
    def image(self) -> Any:
        return self.machine.image

    def read_barrier(self) -> Promise[Any]:
        """Of the metadata group."""
        self.barriers.append(Promise())
        return self.barriers[-1]

    def ask_followers(self) -> Promise[RaftIndex]:
        self.rounds.append(Promise())
        return self.rounds[-1]

    def may_step(self) -> bool:
        target = self.targets.of(self.machine.group, self.core)
        assert target is not None
        return target.is_current

    def seen(self) -> int:
        replica: Any = SimpleNamespace(
            group=self.machine.group, core=self.core, read_barrier=self.ask_followers
        )
        return self.targets.seen(replica)


@pytest.fixture
def world() -> World:
    return World()


def test_who_has_its_members_asks_nobody(world: World) -> None:
    assert world.may_step()
    assert not world.barriers
    other = world.machine.group._replace(creation_epoch=0)
    assert world.targets.of(other, world.core) is None


def test_no_step_is_taken_before_the_metadata_group_was_asked_in_this_term(world: World) -> None:
    world.machine.reassign(4, 2, 3)
    assert not world.may_step()
    assert not world.may_step()
    assert len(world.barriers) == 1
    world.barriers[0].fail(NO_LEADER)
    assert not world.may_step(), "an answer that failed says nothing"
    world.barriers[1].resolve(None)
    assert world.may_step()
    world.core.term = 6
    assert not world.may_step(), "another leader may have led meanwhile"
    world.core.term = 7
    assert not world.may_step()
    world.barriers[2].resolve(None)
    assert not world.may_step(), "that was asked before this election"
    world.barriers[3].resolve(None)
    assert world.may_step()
    world.targets.forget(world.machine.group)
    assert not world.may_step()


def test_what_is_wanted_is_seen_once_followers_confirmed_the_leader(world: World) -> None:
    assert world.seen() == UNSEEN
    assert not world.rounds, "nobody ever changed it"
    world.machine.reassign(4, 2, 3)
    first = world.machine.partition.target_version
    assert world.seen() == UNSEEN
    assert world.seen() == UNSEEN
    assert len(world.rounds) == 1
    world.rounds[0].resolve(RaftIndex(9))
    assert world.restated == [world.machine.group]
    assert world.seen() == first
    world.machine.report(1, 2, 3, 4)
    world.machine.report(2, 3, 4)
    world.core.term = 6
    assert world.seen() == UNSEEN
    assert len(world.rounds) == 1, "nobody is to go, so nobody asks"
    world.core.term = 5
    world.machine.reassign(5, 2, 3)
    assert world.seen() == first, "of the next one nothing is known yet"
    world.rounds[1].fail(NO_LEADER)
    assert world.seen() == first
    world.rounds[2].resolve(RaftIndex(9))
    assert world.seen() == world.machine.partition.target_version > first
    assert len(world.restated) == 2


def test_what_was_seen_in_another_term_counts_for_nothing(world: World) -> None:
    world.machine.reassign(4, 2, 3)
    world.seen()
    world.core.term = 6
    world.rounds[0].resolve(RaftIndex(9))
    assert world.restated == []
    assert world.seen() == UNSEEN
    world.rounds[1].resolve(RaftIndex(9))
    assert world.seen() == world.machine.partition.target_version
    world.core.term = 7
    assert world.seen() == UNSEEN


def test_of_a_partition_that_is_gone_nothing_is_seen(world: World) -> None:
    world.machine.reassign(4, 2, 3)
    group = world.machine.group
    replica: Any = SimpleNamespace(
        group=group._replace(creation_epoch=0), core=world.core, read_barrier=world.ask_followers
    )
    assert world.targets.seen(replica) == UNSEEN
    assert not world.rounds
