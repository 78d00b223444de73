"""Each story runs once per client."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.clients.adapters import AioKafka, ClientAdapter, Confluent, KafkaPython, Loop
from tests.live.harness import Cluster


@pytest.fixture(scope="session")
def asyncio_loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(params=["confluent-kafka", "kafka-python", "aiokafka"])
def client(
    request: pytest.FixtureRequest, shared_cluster: Cluster, asyncio_loop: Loop
) -> ClientAdapter:
    bootstrap = shared_cluster.bootstrap
    if request.param == "confluent-kafka":
        return Confluent(bootstrap)
    if request.param == "kafka-python":
        return KafkaPython(bootstrap)
    return AioKafka(bootstrap, asyncio_loop)


@pytest.fixture(autouse=True)
def collect_here() -> Iterator[None]:
    """What a client left lying about is found in its own test, not in a later one."""
    yield
    gc.collect()
