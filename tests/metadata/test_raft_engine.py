"""The engine: results come from the log, whoever submitted; failures are certain or unknown."""

from __future__ import annotations

from typing import Any

import pytest

from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.commands import AllocateProducerIds, NoOperation
from raftmq.metadata.engine import CommandNotAppliedError, EngineConfig
from raftmq.metadata.results import ProducerIds
from raftmq.metadata.snapshot import decode_image, encode_image
from raftmq.metadata.state_machine import Skip
from raftmq.promise import Promise
from raftmq.raft.messages import EntryKind
from raftmq.records import NewRecord, build_batch, parse_header
from tests.controller.metadata_cluster import MetadataCluster


def _images(cluster: MetadataCluster) -> list[bytes]:
    return [encode_image(cluster.nodes[n].engine.image) for n in cluster.up]


def _same_everywhere(cluster: MetadataCluster) -> bool:
    images = _images(cluster)
    return all(image == images[0] for image in images)


def test_every_node_proposes_and_learns_the_result() -> None:
    cluster = MetadataCluster.formed()
    promises = [
        cluster.nodes[n].engine.propose(AllocateProducerIds(node_id=n, count=10))
        for n in cluster.voters
    ]
    cluster.turn()
    blocks = sorted((p.result().start, p.result().end) for p in promises)
    assert blocks == [(0, 10), (10, 20), (20, 30)]
    assert _same_everywhere(cluster)


def test_a_kept_promise_means_the_local_image_shows_it() -> None:
    cluster = MetadataCluster.formed()
    engine = cluster.nodes[2].engine
    promise = engine.propose(AllocateProducerIds(node_id=2, count=7))  # type: ignore[arg-type]
    seen: list[int] = []
    promise.when_done(lambda _p: seen.append(engine.image.next_producer_id))
    cluster.turn()
    assert seen == [7]


def test_commands_that_arrive_together_share_a_batch() -> None:
    cluster = MetadataCluster.formed()
    leader = cluster.nodes[1]
    before = len(leader.replica.log)
    promises: list[Promise[Any]] = [leader.engine.propose(NoOperation()) for _ in range(50)]
    promises += [cluster.nodes[2].engine.propose(NoOperation()) for _ in range(50)]
    cluster.turn()
    assert all(p.is_done and p.error is None for p in promises)
    batches = [e for e in leader.replica.log[before:] if e.kind == EntryKind.BATCH]
    assert len(batches) <= 5
    assert sum(parse_header(e.payload).record_count for e in batches) == 100


@pytest.mark.parametrize("reaches_others", [False, True], ids=["lost", "kept"])
def test_a_command_survives_its_controller_exactly_once(reaches_others: bool) -> None:
    cluster = MetadataCluster.formed()
    promise = cluster.nodes[2].engine.propose(AllocateProducerIds(node_id=2, count=5))  # type: ignore[arg-type]
    cluster.deliver()  # the controller has appended it ...
    if reaches_others:
        leader = cluster.nodes[1].replica
        cluster.nodes[3].replica.follow(leader)  # ... and it reached the next leader
    assert not promise.is_done
    cluster.kill(1)
    cluster.elect(3)
    cluster.run(100)
    assert promise.result() == ProducerIds(0, 5)
    assert cluster.nodes[2].engine.image.next_producer_id == 5
    assert _same_everywhere(cluster)


def test_a_lost_reply_is_sent_again_and_applied_once() -> None:
    cluster = MetadataCluster.formed()
    cluster.lost_replies_from = [1]
    promise = cluster.nodes[2].engine.propose(AllocateProducerIds(node_id=2, count=5))  # type: ignore[arg-type]
    cluster.run(200)
    assert promise.result() == ProducerIds(0, 5)
    assert cluster.nodes[1].engine.image.next_producer_id == 5


def test_without_a_majority_the_outcome_is_unknown() -> None:
    cluster = MetadataCluster.formed()
    cluster.kill(2)
    cluster.kill(3)
    promise = cluster.nodes[1].engine.propose(NoOperation(), timeout_ms=500)
    barrier = cluster.nodes[1].engine.read_barrier(timeout_ms=500)
    cluster.run(600)
    for failed in (promise, barrier):
        assert isinstance(failed.error, KafkaError)
        assert failed.error.code is ErrorCode.REQUEST_TIMED_OUT
        assert not failed.error.definite


def test_what_only_the_former_controller_may_propose_is_not_sent_to_the_next() -> None:
    cluster = MetadataCluster.formed()
    promise = cluster.nodes[1].engine.propose(
        AllocateProducerIds(node_id=1, count=5),  # type: ignore[arg-type]
        may_resend=False,
    )
    cluster.epoch += 1
    cluster.elect(2)  # node 1 lives on, as a follower; its append is truncated
    cluster.run(100)
    assert isinstance(promise.error, KafkaError)
    assert promise.error.code is ErrorCode.NOT_CONTROLLER, "certainly not done"
    assert cluster.nodes[1].engine.image.next_producer_id == 0
    assert _same_everywhere(cluster)


def test_an_incarnation_that_is_not_above_the_last_is_raised() -> None:
    cluster = MetadataCluster.formed()
    cluster.kill(3)
    cluster._incarnation = -10
    node = cluster.start(3)
    assert node.engine.incarnation < 0
    cluster.run(1_000)
    assert node.control.lifecycle.is_ready
    promise = node.engine.propose(NoOperation())
    cluster.turn()
    assert promise.error is None


def test_an_overtaken_command_failed_for_certain() -> None:
    cluster = MetadataCluster.formed()
    engine = cluster.nodes[2].engine
    first = engine.propose(AllocateProducerIds(node_id=2, count=5))  # type: ignore[arg-type]
    cluster._mail.popleft()  # the forward vanished without a trace
    submissions = engine._submissions
    submissions.send_all_again()
    submissions.next_unsent(1)  # as if it had been taken
    second = engine.propose(AllocateProducerIds(node_id=2, count=5))  # type: ignore[arg-type]
    cluster.turn()
    assert isinstance(first.error, CommandNotAppliedError)
    assert first.error.definite
    assert second.result() == ProducerIds(0, 5)


def test_barriers_are_coalesced_and_see_what_came_before() -> None:
    cluster = MetadataCluster.formed()
    follower = cluster.nodes[2].engine
    cluster.cut = [2]
    command = cluster.nodes[1].engine.propose(AllocateProducerIds(node_id=1, count=5))  # type: ignore[arg-type]
    cluster.turn()
    assert command.is_done
    assert follower.image.next_producer_id == 0
    cluster.cut = []
    barriers = [follower.read_barrier() for _ in range(20)]
    seen: list[int] = []
    barriers[-1].when_done(lambda _p: seen.append(follower.image.next_producer_id))
    asked = len(cluster._mail)
    assert asked <= 1
    cluster.run(1_200)
    assert all(barrier.is_done and barrier.error is None for barrier in barriers)
    assert seen == [5]


def test_work_that_comes_in_a_report_begins_after_it() -> None:
    """A replica that is called from a report drains, and so the engine is drained within it."""
    cluster = MetadataCluster.formed()
    follower = cluster.nodes[2].engine
    wakes: list[None] = []

    def wake() -> None:
        wakes.append(None)
        assert len(wakes) < 20, "it wakes itself for ever"
        follower.drain()

    follower.wake = wake
    proposed: list[Promise[Any]] = []

    def report(_barrier: Promise[None]) -> None:
        proposed.append(follower.propose(NoOperation()))
        follower.drain()

    follower.read_barrier().when_done(report)
    cluster.run(1_200)
    assert proposed[0].is_done
    assert proposed[0].error is None


def test_a_barrier_never_joins_a_round_that_began_before_it() -> None:
    cluster = MetadataCluster.formed()
    engine = cluster.nodes[1].engine
    early = engine.read_barrier()
    late = engine.read_barrier()
    assert len(cluster.nodes[1].replica.barriers) == 1
    cluster.replicate()
    assert early.is_done
    assert not late.is_done
    cluster.turn()
    assert late.is_done


def test_snapshots_hold_the_same_state_on_every_node() -> None:
    config = EngineConfig(snapshot_bytes_min=4_000)
    cluster = MetadataCluster.formed(engine_config=config)
    for number in range(120):
        cluster.nodes[1 + number % 3].engine.propose(AllocateProducerIds(node_id=1, count=1))  # type: ignore[arg-type]
        cluster.turn()
    cluster.run(100)
    taken = [cluster.nodes[n].replica.snapshots for n in cluster.voters]
    assert len(taken[0]) >= 2
    assert taken[0] == taken[1] == taken[2]
    for target, state in taken[0]:
        assert decode_image(state).version + 1 == target


def test_while_there_is_work_a_drain_is_asked_for() -> None:
    """The node drains the engine after a round only where it was asked to."""
    cluster = MetadataCluster.formed(engine_config=EngineConfig(snapshot_bytes_min=4_000))
    node = cluster.nodes[2]
    node.wants_drain = False
    node.engine.drain()
    node.engine.advanced(node.machine.applied_end)
    assert not node.wants_drain
    node.machine.log_bytes = 4_000
    node.engine.advanced(node.machine.applied_end)
    assert node.wants_drain, "a snapshot is due"
    node.machine.log_bytes = 0
    node.engine.propose(NoOperation())
    node.wants_drain = False
    node.engine.drain()
    assert node.wants_drain, "a command has no answer yet"


def test_a_skipped_command_is_soon_behind_a_snapshot() -> None:
    cluster = MetadataCluster.formed()
    leader = cluster.nodes[cluster.leader or 0].replica
    offset = leader.log_end_offset
    skip = Skip.of(offset, cluster.epoch, b"no command")
    for node in cluster.nodes.values():
        node.machine._skips[offset] = skip
    batch = build_batch([NewRecord(None, b"no command")])
    leader.append(bytearray(batch), parse_header(batch))
    cluster.run(5_000)
    assert _same_everywhere(cluster)
    for node in cluster.nodes.values():
        ((target, state),) = node.replica.snapshots
        assert target > offset, "and no other follows"
        assert decode_image(state).version + 1 == target
        assert not node.machine.has_skipped


def test_a_queue_that_is_full_refuses_and_the_sender_tries_again() -> None:
    cluster = MetadataCluster.formed(engine_config=EngineConfig(queue_bytes_max=300))
    promises = [cluster.nodes[2].engine.propose(NoOperation()) for _ in range(20)]
    cluster.run(2_000)
    assert all(p.is_done and p.error is None for p in promises)
