"""What the live tests of the client share: three drivers, raftmq and Apache Kafka.

The marker `kafka` repeats every one of them on a real Apache Kafka (`tests/live/peer-kafka.sh`):
`pytest tests/client -m kafka`. What holds on one must hold on the other.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import anyio
import pytest
from attrs import frozen

from tests.client.drivers import NAMES, Driver, Run, open_driver
from tests.client.fake_broker import FakeBroker
from tests.live.harness import Cluster
from tests.live.kafka import KafkaCluster

IN_TURN = ("test_live_client.py", "test_live_promises.py", "test_live_transactions.py")
BROKERS = ("raftmq", pytest.param("kafka", marks=pytest.mark.kafka))


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaCluster]:
    """Apache Kafka; a test that breaks a node heals it."""
    with KafkaCluster() as cluster:
        yield cluster


@pytest.fixture(params=NAMES)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    with open_driver(request.param) as opened:
        yield opened


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a test's body in an event loop, with a limit for what never comes."""

    def runner(body: Callable[[], Awaitable[None]]) -> None:
        async def limited() -> None:
            with anyio.fail_after(30):
                await body()

        anyio.run(limited, backend=request.param)

    return runner


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    """A broker of two partitions that misbehaves on demand."""
    with FakeBroker({"t": 2}) as fake:
        yield fake


@pytest.fixture(params=BROKERS)
def bootstrap(request: pytest.FixtureRequest) -> str:
    """Brokers that no test breaks."""
    name = "kafka" if request.param == "kafka" else "shared_cluster"
    found: str = request.getfixturevalue(name).bootstrap
    return found


@frozen
class Fragile:
    """Brokers whose nodes may be killed or stopped."""

    bootstrap: str
    signal: Callable[[int, signal.Signals], None]


@pytest.fixture(params=BROKERS)
def fragile(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fragile]:
    """A cluster of its own, or Kafka, which is healed afterwards."""
    if request.param == "raftmq":
        with Cluster(tmp_path) as cluster:
            yield Fragile(cluster.bootstrap, lambda node, how: cluster.nodes[node].signal(how))
        return
    kafka: KafkaCluster = request.getfixturevalue("kafka")
    hurt: list[int] = []

    def strike(node: int, how: signal.Signals) -> None:
        hurt.append(node)
        kafka.signal(node, how)

    yield Fragile(kafka.bootstrap, strike)
    for node in hurt:
        kafka.heal(node)


@pytest.fixture
def topic(driver: Driver, bootstrap: str) -> Iterator[str]:
    """A topic of four partitions."""
    name = f"client-{time.time_ns()}"
    with driver.admin(bootstrap) as admin:
        admin.create_topic(name, 4)
        yield name
        admin.delete_topic(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On raftmq the promises are tried by one driver each in the default suite, in turn.

    `pytest tests/client -m 'live and not kafka'` runs all of them, `-m kafka` all of them on Kafka.
    """
    functions: dict[str, int] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or item.path.name not in IN_TURN:
            continue
        turn = functions.setdefault(item.originalname, len(functions))
        call = getattr(item, "callspec", None)  # none without parameters
        chosen = None if call is None else call.params.get("driver")
        if item.get_closest_marker("kafka") is None and chosen is not None:
            alone = any("driver" in mark.args[0] for mark in item.iter_markers("parametrize"))
            if not alone and chosen != NAMES[turn % len(NAMES)]:
                item.add_marker(pytest.mark.soak)
