"""Fixtures that several folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.harness import Cluster


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes for tests that break nothing; every test makes topics and groups of its own."""
    with Cluster(tmp_path_factory.mktemp("shared-cluster")) as cluster:
        yield cluster


@pytest.fixture
def unique(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses, for topics and groups."""
    return request.node.name.replace("[", "-").replace("]", "").replace("_", "-")[:120]
