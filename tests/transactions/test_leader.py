"""What leaders let in, write and report."""

from __future__ import annotations

from raftmq.errors import ErrorCode
from raftmq.metadata.transactions import TransactionState
from raftmq.partition.transactions import Added, Asked, Ending, Fenced, NotAdded, Unknown, Verdict
from raftmq.transactions.leader import RETRY_MS
from raftmq.types import LeaderEpoch, ProducerId
from tests.metadata.transaction_machine import A, B
from tests.transactions.world import FakePartition, World

ID = "tx"


class Led(World):
    """A world in which this node leads A-0, A-1 and B-0, and a producer has begun."""

    def __init__(self) -> None:
        super().__init__()
        for key in ((A, 0), (A, 1), (B, 0)):
            self.partitions[key] = FakePartition()
        result = self.got(self.coordinator.init_producer(ID, 60_000))
        self.who = result.producer_id, result.epoch

    def add(self, *indexes: int) -> None:
        code = self.got(
            self.coordinator.add_partitions(ID, *self.who, protocol=1, partitions={A: indexes})
        )
        assert code is ErrorCode.NONE

    def end(self, *, is_commit: bool = True) -> None:
        end = self.coordinator.end(ID, *self.who, is_commit=is_commit, protocol=1)
        assert self.got(end).code is ErrorCode.NONE

    def state(self) -> TransactionState:
        known = self.engine.image.transactions.get(ID)
        assert known is not None
        return known.state

    def ask(self, *, adds: bool = False, epoch: int | None = None, is_again: bool = False) -> Asked:
        return Asked(
            topic_id=A,
            partition=0,
            leader_epoch=self.partitions[A, 0].leader_epoch,
            producer_id=ProducerId(self.who[0]),
            producer_epoch=self.who[1] if epoch is None else epoch,
            adds=adds,
            is_again=is_again,
        )

    def verify(self, *, adds: bool = False, epoch: int | None = None) -> Verdict:
        """As a partition does: ask, wait, ask again."""
        verdict = self.leader.verify(self.ask(adds=adds, epoch=epoch))
        if isinstance(verdict, Unknown):
            self.run()
            assert verdict.settled.is_done
            verdict = self.leader.verify(self.ask(adds=adds, epoch=epoch, is_again=True))
        return verdict


def test_nothing_is_let_in_before_the_barrier_of_the_term() -> None:
    world = Led()
    world.add(0)
    world.engine.is_prompt = False
    verdict = world.leader.verify(world.ask())
    assert isinstance(verdict, Unknown)
    world.run()
    assert not verdict.settled.is_done
    world.engine.keep_barriers()
    assert not verdict.settled.is_done, "nothing is done within the engine's own work"
    world.run()
    assert verdict.settled.is_done
    assert world.leader.verify(world.ask(is_again=True)) == Added(1)
    assert world.leader.verify(world.ask()) == Added(1), "one barrier serves a term"
    world.partitions[A, 0].leader_epoch = LeaderEpoch(2)
    assert isinstance(world.leader.verify(world.ask()), Unknown), "and no other"


def test_a_barrier_that_fails_lets_nothing_in() -> None:
    world = Led()
    world.add(0)
    world.engine.is_prompt = False
    verdict = world.leader.verify(world.ask())
    assert isinstance(verdict, Unknown)
    world.engine.fail_barriers()
    world.run()
    assert verdict.settled.error is not None
    again = world.leader.verify(world.ask(is_again=True))
    assert isinstance(again, Unknown)
    assert again.settled.error is not None


def test_what_is_let_in() -> None:
    world = Led()
    assert world.verify() == NotAdded()
    world.add(0)
    assert world.verify() == Added(1)
    assert world.verify(epoch=world.who[1] + 1) == NotAdded(), "nobody has that epoch"
    world.end()
    assert world.verify() == Ending()


def test_a_late_producer_is_fenced() -> None:
    world = Led()
    world.add(0)
    late = world.who
    world.coordinator.init_producer(ID, 60_000)
    world.run()
    world.partitions[A, 0].commit_all()
    world.run()
    assert world.verify(epoch=late[1]) == Fenced()


def test_by_protocol_2_a_batch_adds_its_partition() -> None:
    world = Led()
    assert world.verify(adds=True) == Added(1)
    assert (A, 0) in world.engine.image.transactions.ids[ID].partitions


def test_a_barrier_that_began_before_the_question_does_not_answer_it() -> None:
    """The producer has its epoch since the last end, which this node has not seen."""
    world = Led()
    world.engine.is_prompt = False
    world.leader.led(A, 0)
    [early] = world.engine.barriers
    world.engine.barriers = []
    world.machine.row(world.machine.adding((B, 0), protocol=2))
    world.machine.row(world.machine.ending(is_commit=False, protocol=2))
    world.who = world.who[0], world.who[1] + 1
    verdict = world.leader.verify(world.ask(adds=True))
    assert isinstance(verdict, Unknown)
    early.resolve(None)
    world.run()
    assert not verdict.settled.is_done
    world.engine.is_prompt = True
    world.engine.keep_barriers()
    world.run()
    world.partitions[B, 0].commit_all()
    world.run()
    assert verdict.settled.is_done
    assert world.leader.verify(world.ask(adds=True, is_again=True)) == Added(2)


def test_what_cannot_be_added_for_a_moment_comes_again() -> None:
    world = Led()
    world.verify()  # the barrier of the term
    world.engine.is_prompt = False
    verdict = world.leader.verify(world.ask(adds=True))
    assert isinstance(verdict, Unknown)
    world.run()
    world.engine.lose_all()
    world.run()
    assert verdict.settled.is_done
    again = world.leader.verify(world.ask(adds=True, is_again=True))
    assert isinstance(again, Unknown)
    assert again.settled.error is not None


def test_by_protocol_2_it_waits_for_the_end_of_the_one_before() -> None:
    world = Led()
    assert world.verify(adds=True) == Added(1)
    end = world.coordinator.end(ID, *world.who, is_commit=True, protocol=2)
    world.who = world.who[0], world.got(end).epoch
    verdict = world.leader.verify(world.ask(adds=True))
    assert isinstance(verdict, Unknown)
    world.run()
    assert not verdict.settled.is_done
    world.partitions[A, 0].commit_all()
    world.run()
    assert verdict.settled.is_done
    assert world.leader.verify(world.ask(adds=True, is_again=True)) == Added(2)


def test_a_decision_is_written_by_every_leader_and_reported_once_it_is_committed() -> None:
    world = Led()
    world.add(0, 1)
    world.end()
    assert world.state() is TransactionState.PREPARE_COMMIT
    first, second = world.partitions[A, 0], world.partitions[A, 1]
    [(decided, _)] = first.ends
    assert (decided.producer_id, decided.producer_epoch, decided.is_commit) == (*world.who, True)
    assert decided.txn_seq == 1
    first.commit_all()
    world.run()
    assert world.state() is TransactionState.PREPARE_COMMIT, "one of them has not reported"
    second.commit_all()
    world.run()
    assert world.state() is TransactionState.COMPLETE_COMMIT
    assert world.leader.markers_count == 2


def test_an_end_is_written_once_while_the_image_moves_on() -> None:
    world = Led()
    world.add(0)
    world.end()
    world.got(world.coordinator.init_producer("other", 1_000))
    world.leader.led(A, 0)
    world.run()
    assert len(world.partitions[A, 0].ends) == 1


def test_a_new_leader_finds_what_is_owed() -> None:
    world = Led()
    world.partitions[A, 0].is_leader = False
    world.add(0)
    world.end()
    assert world.partitions[A, 0].ends == []
    world.partitions[A, 0].is_leader = True
    world.partitions[A, 0].leader_epoch = LeaderEpoch(5)
    world.engine.is_prompt = False
    world.leader.led(A, 0)
    world.run()
    assert world.partitions[A, 0].ends == [], "its image may be older than its term"
    world.engine.keep_barriers()
    world.run()
    assert len(world.partitions[A, 0].ends) == 1


def test_what_could_not_be_written_is_tried_again() -> None:
    world = Led()
    world.add(0)
    world.end()
    world.partitions[A, 0].fail_all(ErrorCode.KAFKA_STORAGE_ERROR)
    world.run()
    assert world.partitions[A, 0].ends == []
    world.run(RETRY_MS + 1)
    world.partitions[A, 0].commit_all()
    world.run()
    assert world.state() is TransactionState.COMPLETE_COMMIT


def test_what_a_deposed_leader_began_is_left_to_the_next_one() -> None:
    world = Led()
    world.add(0)
    world.end()
    world.partitions[A, 0].is_leader = False
    world.partitions[A, 0].fail_all(ErrorCode.NOT_LEADER_OR_FOLLOWER)
    world.run(RETRY_MS + 1)
    assert world.partitions[A, 0].ends == []
    assert world.state() is TransactionState.PREPARE_COMMIT


def test_a_report_that_is_lost_is_made_again() -> None:
    world = Led()
    world.add(0)
    world.end()
    world.engine.is_prompt = False
    world.partitions[A, 0].commit_all()
    world.run()
    world.engine.lose_all()
    world.engine.is_prompt = True
    world.run(RETRY_MS + 1)
    world.partitions[A, 0].commit_all()
    world.run()
    assert world.state() is TransactionState.COMPLETE_COMMIT
    assert world.leader.reports_failed_count == 1
