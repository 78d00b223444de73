"""A cluster and a Spark session for all Spark tests, and a topic's worth of records.

`pyspark` is imported where a session is asked for: most tests here need none. Without Java or the
extra the tests of the marker `spark` are skipped, and in CI they fail.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from raftmq_client.blocking import Admin, Producer
from raftmq_spark.errors import MissingPrerequisiteError
from raftmq_spark.session import check_prerequisites, spark_session
from tests.live.harness import Cluster, lack
from tests.tree import PYTHONPATH

TOKEN_FILE: Final = "TESTS_TOKEN_FILE"
Produced = dict[int, list[tuple[bytes | None, bytes | None]]]


def extra(module: str) -> Any:
    """A module of the extra `spark`; without it the tests are skipped, unless it must be there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if os.environ.get("SPARK_REQUIRED"):
            raise
        pytest.skip(f"needs the extra spark: {error}", allow_module_level=True)


def told_token() -> str:
    """A function for tokens, as the source imports it by name in this process and in workers."""
    return Path(os.environ[TOKEN_FILE]).read_text()


@pytest.fixture(scope="session")
def told_token_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where `told_token` looks, in each process that is started from now on, too."""
    with pytest.MonkeyPatch.context() as environment:
        path = tmp_path_factory.mktemp("tokens") / "token"
        environment.setenv(TOKEN_FILE, str(path))
        yield path


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, told_token_file: Path) -> Iterator[Any]:
    """A local session that fails a job only when a task failed twice."""
    try:
        check_prerequisites()
    except MissingPrerequisiteError as missing:
        lack(str(missing))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", PYTHONPATH)
        session = spark_session(
            "raftmq-tests",
            master="local[2,2]",
            spark__driver__memory="1g",
            spark__driver__host="127.0.0.1",
            spark__driver__bindAddress="127.0.0.1",
            spark__ui__enabled="false",
            spark__ui__showConsoleProgress="false",
            spark__sql__session__timeZone="UTC",
            spark__sql__shuffle__partitions="2",
            spark__sql__warehouse__dir=str(tmp_path_factory.mktemp("warehouse")),
        )
        session.sparkContext.setLogLevel("ERROR")
        yield session
        session.stop()


@pytest.fixture
def make_topic(shared_cluster: Cluster, unique: str) -> Callable[..., str]:
    """Makes topics of this test's own."""

    def make(partitions: int = 1, suffix: str = "", **configs: str) -> str:
        name = f"{unique}{suffix}"
        with Admin(shared_cluster.bootstrap, timeout_ms=60_000) as admin:
            named = {key.replace("_", "."): value for key, value in configs.items()}
            # Some records are as old as their timestamps say, and would be gone within minutes.
            admin.create_topic(name, partitions, 3, {"retention.ms": "-1", **named})
        return name

    return make


def produce(
    bootstrap: str,
    topic: str,
    count: int,
    *,
    partitions: Sequence[int] = (0,),
    size: int = 100,
    first: int = 0,
    headers: Sequence[tuple[str, bytes | None]] = (),
    compression: str = "none",
) -> Produced:
    """Write numbered records, in turns over partitions; what each partition got, in order."""
    written: Produced = {partition: [] for partition in partitions}
    with Producer(bootstrap, compression=compression, linger_ms=20) as producer:
        for number in range(first, first + count):
            partition = partitions[number % len(partitions)]
            key = None if number % 3 == 0 else b"k%d" % number
            value = (b"%012d" % number).ljust(size, b"." if number % 2 else b"-")
            written[partition].append((key, value))
            producer.send(topic, value, key, headers, partition)
        producer.flush()
    return written
