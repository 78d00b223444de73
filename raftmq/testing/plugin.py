"""The pytest plugin: the fixture `raftmq_cluster`, a real cluster that tests may break.

pytest loads this module in every run of every project that has raftmq installed, so it imports
pytest alone. Nodes start only where a test asks for them, once per process (with xdist: per
worker), and are shared: each test gets names of its own and finds every node well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from raftmq.testing.cluster import Cluster, KeeperLink

_FIXTURE = "raftmq_cluster"
_NAME_LENGTH_MAX = 60
_LINK: pytest.StashKey[KeeperLink] = pytest.StashKey()
_COUNT = pytest.StashKey[int]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin importing what nodes need, in another process, when some test will want them."""
    config = session.config
    wanted = any(_FIXTURE in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not config.option.collectonly and _LINK not in config.stash:
        from raftmq.testing.cluster import KeeperLink

        config.stash[_LINK] = KeeperLink()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what no test came to use."""
    link = config.stash.get(_LINK, None)
    if link is not None:
        del config.stash[_LINK]
        link.close()


@pytest.fixture(scope="session")
def raftmq_options() -> dict[str, Any]:
    """Arguments of `raftmq.testing.Cluster`; override it in your conftest.py."""
    return {}


@pytest.fixture(scope="session")
def _raftmq_nodes(
    request: pytest.FixtureRequest, raftmq_options: dict[str, Any]
) -> Iterator[Cluster]:
    from raftmq.testing.cluster import Cluster

    link = request.config.stash.get(_LINK, None)
    nodes = Cluster(**raftmq_options, link=link)
    if link is not None:
        del request.config.stash[_LINK]  # it is the cluster's to close
    with nodes as cluster:
        yield cluster


@pytest.fixture
def raftmq_cluster(request: pytest.FixtureRequest, _raftmq_nodes: Cluster) -> Iterator[Cluster]:
    """Real nodes on 127.0.0.1 for this test: `bootstrap`, `topic(name)`, `kill(1)`, and so on."""
    config = request.config
    config.stash[_COUNT] = count = config.stash.get(_COUNT, 0) + 1
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", request.node.name)[:_NAME_LENGTH_MAX].strip("-")
    _raftmq_nodes.begin_test(f"{name}-{count}-")
    yield _raftmq_nodes
    _raftmq_nodes.end_test()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """A test that wants a fault which this machine does not have is skipped, and says why."""
    if _FIXTURE not in pyfuncitem.fixturenames:
        return (yield)
    from raftmq.testing.cluster import LackError

    try:
        return (yield)
    except LackError as error:
        pytest.skip(str(error))
