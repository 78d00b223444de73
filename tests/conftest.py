"""Fixtures that several folders share, and how the suite treats live tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.harness import Cluster
from tests.second_try import (  # noqa: F401 - hooks
    pytest_report_teststatus,
    pytest_runtest_protocol,
    pytest_terminal_summary,
)

LIVE_TIMEOUT_S = 400


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Live tests have more time, and end by an exception that lets them clean up."""
    limit = pytest.mark.timeout(LIVE_TIMEOUT_S, method="signal")
    for item in items:
        if item.get_closest_marker("live") and not item.get_closest_marker("timeout"):
            item.add_marker(limit)


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes for tests that break nothing; every test makes topics and groups of its own."""
    with Cluster(tmp_path_factory.mktemp("shared-cluster")) as cluster:
        yield cluster


@pytest.fixture
def unique(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses, for topics and groups."""
    return request.node.name.replace("[", "-").replace("]", "").replace("_", "-")[:120]
