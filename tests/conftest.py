"""Fixtures that several folders share, and how the suite treats live tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis
import pytest

from jepsen_like.live import cluster
from tests.live.harness import Cluster
from tests.second_try import (  # noqa: F401 - hooks
    pytest_report_teststatus,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    pytest_terminal_summary,
)
from tests.spark.connector import connector_jars
from tests.spread import (  # noqa: F401 - hooks
    LONG_S,
    file_of,
    pytest_collection_finish,
    pytest_configure_node,
    pytest_xdist_make_scheduler,
)

PROCESSES = 4
LIVE_TIMEOUT_S = 400
SIM_TIMEOUT_S = 900
# On a busy machine an example takes what it takes; everything else stays as it is, in CI too.
hypothesis.settings.register_profile("patient", parent=hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("patient")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Four processes for the whole suite, on two cores: three with live tests, which wait most of
    the time, and one that computes.

    A chosen part of it, and whatever prints while it runs, stays in this process.
    """
    is_whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    is_default = "not soak" in config.getoption("markexpr")
    return PROCESSES if is_whole and is_default and config.getoption("capture") != "no" else 0


def pytest_configure(config: pytest.Config) -> None:
    """Give each process ports of its own, Ctrl-C its meaning, and all of them compiled modules."""
    _share_bytecode(config)
    given = getattr(config, "workerinput", None)
    if given is not None:
        first, end = cluster.PORTS
        size = (end - first) // given["workercount"]
        first += size * int(given["workerid"].removeprefix("gw"))
        cluster.PORTS = first, first + size
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell hands that down to what it starts in the background, and we to what we start.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _share_bytecode(config: pytest.Config) -> None:
    """Where no bytecode may be written beside the sources, have it in a folder of this run: else
    each of the many processes that tests start compiles all it imports, as long again as it then
    takes to import. One that ends a moment later may still write there."""
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        folder = TemporaryDirectory(prefix="raftmq-bytecode-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = folder.name
        sys.dont_write_bytecode = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: no garbage collection looks at it meanwhile, nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Live tests have more time and end by an exception that lets them clean up. They begin first
    and wait most of the time; simulations, which take all the cores that are left and give way to
    them, run beside them (`spread.py`)."""
    limit = pytest.mark.timeout(LIVE_TIMEOUT_S, method="signal")
    for item in items:
        if item.get_closest_marker("live") and not item.get_closest_marker("timeout"):
            item.add_marker(limit)
        if item.path.parent.name == "sim" and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SIM_TIMEOUT_S))  # a limit ends the whole process
    sharing = {item.path for item in items if _SHARES & set(getattr(item, "fixturenames", ()))}
    shared = config.stash[_SHARED] = _Shared(frozenset(sharing))
    config.add_cleanup(shared.stop)
    items.sort(key=lambda item: _turn(item, item.path in sharing))


def _turn(item: pytest.Item, shares: bool) -> tuple[int, float]:
    """Files of live tests first, those that share a cluster one after the other, then simulations;
    of each kind the longest first: a long one at the end is waited for by all."""
    kind = 1 + shares if item.get_closest_marker("live") else 3 + (item.path.parent.name != "sim")
    return kind, -LONG_S.get(file_of(item.nodeid), 0)


_SHARES = frozenset({"shared_cluster", "bootstrap"})
"""Fixtures of tests that use the shared cluster; the second asks for it by its name."""


class _Shared:
    """The shared cluster of this process, from the first file that asks for it to the last one in
    a row: three nodes with nothing to do take a twelfth of a core."""

    def __init__(self, files: frozenset[Path]) -> None:
        self.files = files
        self._cluster: Cluster | None = None

    def cluster(self, folders: pytest.TempPathFactory) -> Cluster:
        if self._cluster is None:
            self._cluster = Cluster(folders.mktemp("shared-cluster")).__enter__()
        return self._cluster

    def stop(self) -> None:
        if self._cluster is not None:
            cluster, self._cluster = self._cluster, None
            cluster.stop()


_SHARED = pytest.StashKey[_Shared]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """End the shared cluster where the next file does not use it, and before a second try."""
    try:
        yield
    finally:
        shared = item.config.stash[_SHARED]
        if nextitem is None or nextitem.path not in shared.files:
            shared.stop()


@pytest.fixture(scope="module")
def shared_cluster(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Cluster:
    """Three nodes for tests that break nothing; every test makes topics and groups of its own."""
    return pytestconfig.stash[_SHARED].cluster(tmp_path_factory)


@pytest.fixture(scope="session", autouse=True)
def connector(request: pytest.FixtureRequest) -> Iterator[None]:
    """The first Spark session of a process decides for all later ones which JARs there are."""
    with pytest.MonkeyPatch.context() as environment:
        is_asked = any(item.get_closest_marker("spark") for item in request.session.items)
        if is_asked and importlib.util.find_spec("pyspark") and (jars := connector_jars()):
            arguments = f"--jars {','.join(jars)} pyspark-shell"
            environment.setenv("PYSPARK_SUBMIT_ARGS", arguments)
        yield


@pytest.fixture
def unique(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses, for topics and groups."""
    return request.node.name.replace("[", "-").replace("]", "").replace("_", "-")[:120]
