"""What the client believes of the cluster never goes back, and is asked for no more than needed."""

from __future__ import annotations

from itertools import pairwise
from uuid import UUID

import pytest

from raftmq.protocol import ApiKey, Struct, decode_request
from raftmq_client.core.metadata import (
    DOUBT_MS,
    Broker,
    ClusterInfo,
    MetadataCore,
    MetadataOptions,
    PartitionInfo,
    TopicInfo,
)
from raftmq_client.errors import ConnectionFailedError

BROKERS = (Broker(1, "h", 1), Broker(2, "h", 2))


def topic(name: str, leader: int, epoch: int, *, topic_id: int = 7, error: int = 0) -> TopicInfo:
    partitions = () if error else (PartitionInfo(name, 0, leader, epoch),)
    return TopicInfo(name, UUID(int=topic_id), False, partitions, error)


def info(*topics: TopicInfo) -> ClusterInfo:
    return ClusterInfo("c", 1, BROKERS, topics)


def test_an_older_epoch_does_not_undo_a_newer_leader() -> None:
    core = MetadataCore()
    core.apply(info(topic("t", 2, 5)), 0)
    core.apply(info(topic("t", 1, 4)), 1)
    assert core.leader("t", 0) == (2, 5)
    core.apply(info(topic("t", 1, 6)), 2)
    assert core.leader("t", 0) == (1, 6)


def test_an_older_epoch_is_believed_once_all_answers_keep_saying_it() -> None:
    core = MetadataCore()
    core.apply(info(topic("t", 2, 32_767)), 0)
    for now in range(1_000, 11_000, 1_000):
        core.apply(info(topic("t", 1, 4)), now)
        assert core.leader("t", 0) == (2, 32_767)
    core.apply(info(topic("t", 2, 32_767)), 11_000)
    core.apply(info(topic("t", 1, 4)), 12_000)
    assert core.leader("t", 0) == (2, 32_767), "one answer in between agreed"
    core.apply(info(topic("t", 1, 4)), 12_000 + DOUBT_MS)
    assert core.leader("t", 0) == (1, 4)


def test_a_hint_counts_only_when_it_is_newer() -> None:
    core = MetadataCore()
    core.apply(info(topic("t", 1, 5)), 0)
    assert not core.learn_leader("t", 0, 2, 5)
    assert core.learn_leader("t", 0, 3, 6, [Broker(3, "new", 3)])
    assert core.leader("t", 0) == (3, 6)
    assert core.brokers[3].host == "new"


def test_a_topic_created_anew_starts_over_with_its_epochs() -> None:
    core = MetadataCore()
    core.apply(info(topic("t", 2, 50)), 0)
    core.apply(info(topic("t", 1, 0, topic_id=8)), 1)
    assert core.leader("t", 0) == (1, 0)


def test_a_leader_on_a_dead_broker_is_no_leader() -> None:
    core = MetadataCore()
    core.apply(info(topic("t", 9, 5)), 0)
    assert core.leader("t", 0) is None


def test_one_request_at_a_time_and_none_while_fresh() -> None:
    core = MetadataCore()
    core.want(["t"])
    (call,) = core.calls(0)
    assert core.calls(1) == []
    answer = Struct(
        brokers=[Struct(node_id=1, host="h", port=1, rack=None)],
        cluster_id="c",
        controller_id=1,
        topics=[
            Struct(
                error_code=0,
                name="t",
                topic_id=UUID(int=1),
                is_internal=False,
                partitions=[
                    Struct(
                        error_code=0,
                        partition_index=0,
                        leader_id=1,
                        leader_epoch=0,
                        replica_nodes=[1],
                        isr_nodes=[1],
                        offline_replicas=[],
                    )
                ],
                retired_partitions=[],
                retired_view="",
            )
        ],
    )
    call.complete(answer, None, 10)
    assert core.partition_count("t") == 1
    assert core.calls(1_000) == []
    assert core.deadline() == pytest.approx(10 + core.options.max_age_ms)
    core.invalidate()
    assert len(core.calls(1_001)) == 1


def test_failures_back_off_and_never_spin() -> None:
    core = MetadataCore()
    core.want(["t"])
    now, asked = 0.0, []
    for _ in range(12):
        (call,) = core.calls(now)
        asked.append(now)
        call.complete(None, ConnectionFailedError("no"), now)
        assert core.calls(now) == []
        assert core.deadline() > now
        now = core.deadline()
    waits = [b - a for a, b in pairwise(asked)]
    assert waits == sorted(waits)
    assert waits[-1] == core.options.backoff_max_ms


def test_an_unknown_topic_is_asked_for_again_but_ever_more_slowly() -> None:
    core = MetadataCore()
    core.want(["t"])
    core.apply(info(topic("t", -1, 0, error=3)), 0)
    assert core.errors == {"t": 3}
    assert core.partition_count("t") is None
    assert len(core.calls(1_000)) == 1


def asked(core: MetadataCore, now: float) -> tuple[list[str], bool] | None:
    """The topics of the request that is due, and whether it may create them; no answer comes."""
    calls = core.calls(now)
    if not calls:
        return None
    (body,) = calls[0].body(12)
    request = decode_request(ApiKey.METADATA, 12, memoryview(bytes(body)))
    core._is_asking = False
    return [item.name for item in request.topics], request.allow_auto_topic_creation


def test_topics_are_created_for_who_uses_them_and_by_no_refresh() -> None:
    core = MetadataCore(MetadataOptions(idle_ms=5_000, max_age_ms=1_000))
    core.want(["t"])
    assert asked(core, 0) == (["t"], True)
    core.apply(info(topic("t", 1, 0)), 10)
    core.used("t", 20)
    core.invalidate()
    assert asked(core, 1_100) == (["t"], False), "what is known is not to be created"
    core.apply(info(topic("t", -1, 0, error=3)), 1_110)
    core.used("t", 1_120)
    assert asked(core, 2_000) == (["t"], True), "somebody still sends to it"
    core.apply(info(topic("t", -1, 0, error=3)), 2_010)
    core.invalidate()
    assert asked(core, 3_000) == ([], False), "deleted, and nobody missed it"
    assert core.partition_count("t") is None
    core.want(["t"])
    assert asked(core, 4_000) == (["t"], True), "until it is wanted again"


def test_topics_that_nobody_uses_are_forgotten() -> None:
    core = MetadataCore(MetadataOptions(idle_ms=5_000))
    core.want(["idle", "busy"])
    assert asked(core, 0) == (["idle", "busy"], True)
    core.apply(info(topic("idle", 1, 0), topic("busy", 1, 0)), 0)
    core.used("busy", 4_000)
    core.invalidate()
    assert asked(core, 5_000) == (["busy"], False)
    assert core.leader("idle", 0) is None
    core.used("idle", 5_001)
    assert asked(core, 6_000) == (["busy", "idle"], True), "wanted again"
    patient = MetadataCore()
    patient.want(["t"])
    patient.apply(info(topic("t", 1, 0)), 0)
    patient.invalidate()
    assert asked(patient, 1e9) == (["t"], False), "a consumer's topics are never idle"
