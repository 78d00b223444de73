"""One cluster of three for all tests of what a node tells of itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.harness import Cluster


@pytest.fixture(scope="package")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("three")
    with Cluster(folder, 3, settings={"log_level": "debug", "replica_lag_time_max_ms": 2000}) as c:
        yield c
