"""kcat (librdkafka 2.0): the oldest stock client that people still have."""

from __future__ import annotations

import subprocess

import pytest

from tests.live.harness import Cluster, need

pytestmark = [pytest.mark.live, pytest.mark.slow]


def kcat(cluster: Cluster, *arguments: str, data: bytes = b"") -> bytes:
    done = subprocess.run(
        [need("kcat"), "-b", cluster.bootstrap, *arguments],
        input=data,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_lists_brokers_and_topics(shared_cluster: Cluster) -> None:
    told = kcat(shared_cluster, "-L").decode()
    assert "3 brokers" in told
    assert told.count(" broker ") >= 3


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_produces_and_consumes(shared_cluster: Cluster, unique: str, codec: str) -> None:
    lines = b"".join(b"line %d of many that look alike\n" % i for i in range(1000))
    kcat(shared_cluster, "-P", "-t", unique, "-z", codec, data=lines)
    assert kcat(shared_cluster, "-C", "-t", unique, "-o", "beginning", "-e", "-q") == lines


def test_keys_headers_and_partitions(shared_cluster: Cluster, unique: str) -> None:
    kcat(shared_cluster, "-P", "-t", unique, "-p", "0", "-K:", "-H", "tag=x", data=b"k:v\n")
    told = kcat(shared_cluster, "-C", "-t", unique, "-e", "-q", "-f", "%p %o %k %s %h\n")
    assert told == b"0 0 k v tag=x\n"


def test_group_balanced_consumer(shared_cluster: Cluster, unique: str) -> None:
    kcat(shared_cluster, "-P", "-t", unique, data=b"a\nb\nc\n")
    group = ["-G", f"{unique}-g", "-X", "auto.offset.reset=earliest", "-e", "-q", unique]
    assert sorted(kcat(shared_cluster, *group).split()) == [b"a", b"b", b"c"]
    assert kcat(shared_cluster, *group) == b"", "the group goes on where it committed"


def test_offset_of_a_timestamp(shared_cluster: Cluster, unique: str) -> None:
    kcat(shared_cluster, "-P", "-t", unique, data=b"a\nb\n")
    told = kcat(shared_cluster, "-Q", "-t", f"{unique}:0:-1").decode()
    assert "offset 2" in told
