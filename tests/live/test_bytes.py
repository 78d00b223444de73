"""One batch, the same bytes on the socket, in every segment and in a fetch answer.

Only base offset and leader epoch (and, with LogAppendTime, the timestamp and so the CRC) are the
broker's to stamp. The bytes of a catch-up consumer leave by sendfile.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from uuid import UUID

import pytest

from raftmq.codec import Codec
from raftmq.protocol import Struct
from raftmq.protocol.api_versions import ApiKey
from raftmq.records import NewRecord, build_batch, check_batch
from tests.live.harness import Cluster, Node, need, wait_until
from tests.live.load import Load, create_topic, leaders, read_numbers
from tests.live.raw import ask, fetch

pytestmark = [pytest.mark.live, pytest.mark.slow]

STAMPED = slice(0, 8), slice(12, 16)  # base offset; leader epoch


def masked(batch: bytes) -> bytes:
    """The batch without what the broker stamps."""
    copy = bytearray(batch)
    for span in STAMPED:
        copy[span] = bytes(span.stop - span.start)
    return bytes(copy)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_one_batch_is_the_same_everywhere(
    shared_cluster: Cluster, unique: str, codec: Codec
) -> None:
    create_topic(shared_cluster.bootstrap, unique, 1)
    leader = shared_cluster[leaders(shared_cluster.bootstrap, unique)[0]]
    sent = bytes(build_batch([NewRecord(b"k%d" % i, b"v" * 100) for i in range(20)], codec=codec))
    produced = ask(
        leader,
        ApiKey.PRODUCE,
        9,
        Struct(
            transactional_id=None,
            acks=-1,
            timeout=10_000,
            topic_data=[
                Struct(name=unique, partition_data=[Struct(index=0, records=sent)]),
            ],
        ),
    )
    (row,) = produced.responses[0].partition_responses
    assert (row.error_code, row.base_offset) == (0, 0)

    def stored(node: Node) -> bytes:
        for segment in node.data.glob(f"topics/{unique}-*/partition-0/*.log"):
            return segment.read_bytes()[: len(sent)]
        return b""

    for node in shared_cluster.nodes.values():
        wait_until(lambda node=node: len(stored(node)) == len(sent), 60)  # type: ignore[misc]
        check_batch(stored(node))
        assert masked(stored(node)) == masked(sent)
    assert len({stored(node) for node in shared_cluster.nodes.values()}) == 1

    assert fetch(leader, unique) == (0, stored(leader))


def test_catch_up_consumers_are_served_by_sendfile(
    shared_cluster: Cluster, unique: str, tmp_path: Path
) -> None:
    create_topic(shared_cluster.bootstrap, unique, 1)
    with Load(shared_cluster.bootstrap, unique, 1, rate=30_000, size=1000) as load:
        load.wait_for(20_000, timeout_s=90)
    # All nodes are traced, since leadership may move meanwhile.
    pids = [word for node in shared_cluster.nodes.values() for word in ("-p", str(node.pid))]
    trace = tmp_path / "trace.txt"
    strace = subprocess.Popen(
        [need("strace"), "-f", "-e", "trace=sendfile", "-o", str(trace), *pids],
        stderr=subprocess.PIPE,
    )
    try:
        assert strace.stderr is not None
        assert b"attached" in strace.stderr.readline()
        assert len(read_numbers(shared_cluster.bootstrap, unique, 0)) >= 20_000
    finally:
        strace.terminate()
        strace.communicate(timeout=10)
    sent = sum(int(n) for n in re.findall(r"sendfile\(.*= (\d+)$", trace.read_text(), re.M))
    assert sent >= 18_000 * 1000, "the records left by sendfile"


def test_topic_ids_are_random_and_shown(shared_cluster: Cluster, unique: str) -> None:
    create_topic(shared_cluster.bootstrap, unique, 1)
    told = ask(
        shared_cluster[1],
        ApiKey.METADATA,
        12,
        Struct(
            topics=[Struct(topic_id=None, name=unique)],
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=False,
        ),
    )
    (topic,) = told.topics
    assert isinstance(topic.topic_id, UUID)
    assert topic.topic_id.version == 4
    assert told.cluster_id == shared_cluster.cluster_id


def test_dead_broker_leaves_metadata_and_returns(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:

        def brokers() -> set[int]:
            told = ask(
                cluster[1],
                ApiKey.METADATA,
                9,
                Struct(
                    topics=[],
                    allow_auto_topic_creation=False,
                    include_cluster_authorized_operations=False,
                    include_topic_authorized_operations=False,
                ),
            )
            return {broker.node_id for broker in told.brokers}

        assert brokers() == {1, 2, 3}
        cluster[3].kill()
        wait_until(lambda: brokers() == {1, 2}, 60, "the dead broker left")
        cluster[3].start()
        cluster[3].wait_ready()
        wait_until(lambda: brokers() == {1, 2, 3}, 60, "the returned broker is in")
