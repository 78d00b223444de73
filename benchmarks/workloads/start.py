"""From nothing to the first acknowledgement: three processes on empty folders."""

from __future__ import annotations

import time
from typing import Final

from benchmarks.clients import new_name
from benchmarks.errors import BenchmarkError
from benchmarks.peers import KafkaCluster, LocalCluster, RaftmqCluster
from benchmarks.plan import Metrics, Plan
from benchmarks.wire import (
    CREATE_VERSION,
    AnswerError,
    Wire,
    address_of,
    batch_of,
    check_produced,
    create_frame,
    leader_addresses,
    produce_frame,
)
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey

_LIMIT_S: Final = 60.0
_PAUSE_S: Final = 0.01


def first_ack(cluster: LocalCluster, _plan: Plan) -> Metrics:
    """Start three nodes, create a topic with three replicas, and produce one record, acks=all.

    Kafka's folders are formatted before the clock starts.
    """
    assert isinstance(cluster, RaftmqCluster | KafkaCluster)
    cluster.launch_only()
    topic = new_name("first")
    config = {**cluster.target.topic_config, "min.insync.replicas": "2"}
    frame = produce_frame(topic, 0, batch_of(1, 100, bytes(4096)))
    bootstrap = cluster.target.bootstrap.split(",")[0]
    created_s = 0.0
    while True:
        elapsed = time.perf_counter() - cluster.launched_at
        if elapsed > _LIMIT_S:
            raise BenchmarkError(f"no acknowledgement within {_LIMIT_S:.0f} s")
        try:
            if not created_s:
                _create(bootstrap, topic, config)
                created_s = time.perf_counter() - cluster.launched_at
            with Wire(leader_addresses(bootstrap, topic)[0], _LIMIT_S) as wire:
                check_produced(wire.exchange(frame))
            break
        except (OSError, AnswerError):
            time.sleep(_PAUSE_S)  # not serving yet, or not all of it: ask again
    return {
        "first_ack_s": time.perf_counter() - cluster.launched_at,
        "topic_created_s": created_s,
    }


def _create(bootstrap: str, topic: str, config: dict[str, str]) -> None:
    with Wire(address_of(bootstrap), _LIMIT_S) as wire:
        answer = wire.ask(ApiKey.CREATE_TOPICS, CREATE_VERSION, create_frame(topic, 1, 3, config))
    code = answer.topics[0].error_code
    if code not in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS):
        raise AnswerError("CreateTopics", code)
