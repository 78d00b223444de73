"""For the tests of exports: topics of a test's own, and a local S3 server with buckets."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator

import pytest

from raftmq_client.blocking import Admin
from raftmq_spark.errors import MissingPrerequisiteError
from raftmq_spark.session import check_prerequisites
from tests.live.harness import Cluster, lack

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("pyarrow") is None:  # no extra `spark`: what needs no pyarrow is left
    collect_ignore_glob = ["test_[!mp]*.py"]

_buckets = itertools.count()
MakeTopic = Callable[..., str]
KEPT = {"retention.ms": "-1"}
"""Test records are as old as their timestamps say: by default they would be gone within minutes."""


@pytest.fixture
def prerequisites() -> None:
    """Spark and Java, for tests that start a driver of their own."""
    try:
        check_prerequisites()
    except MissingPrerequisiteError as missing:
        lack(str(missing))


@pytest.fixture
def make_topic(shared_cluster: Cluster, unique: str) -> MakeTopic:
    """Creates a topic with so many partitions, named after the test and a suffix."""

    def make(partitions: int = 1, suffix: str = "") -> str:
        with Admin(shared_cluster.bootstrap, timeout_ms=60_000) as admin:
            admin.create_topic(f"{unique}{suffix}", partitions, 3, KEPT)
        return f"{unique}{suffix}"

    return make


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """moto's server, on a port of its own."""
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"{host}:{port}"
    server.stop()


@pytest.fixture
def s3_bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """`s3://...` of a new, empty bucket; keys and endpoint are in the environment."""
    boto3 = pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{s3_server}")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    name = f"bucket-{next(_buckets)}"
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=name)
    return f"s3://{name}"
