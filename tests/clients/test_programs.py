"""Clients of other languages send and read; what else they are asked stands with its subject."""

from __future__ import annotations

import pytest

from tests.clients.programs import NAMES, Program
from tests.live.harness import Cluster
from tests.live.load import create_topic

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.polyglot]


@pytest.mark.parametrize("name", NAMES)
def test_produces_and_consumes(shared_cluster: Cluster, unique: str, name: str) -> None:
    program, bootstrap = Program(name), shared_cluster.bootstrap
    create_topic(bootstrap, unique)
    with program.produce(bootstrap, unique, 0) as producing:
        assert [producing.send("v", f"k{i}") for i in range(3)] == [{"offset": i} for i in range(3)]
        assert producing.send("no key") == {"offset": 3}
    found = program.consume(bootstrap, unique, 0, 1, 4)
    assert [(r["offset"], r["key"], r["value"]) for r in found] == [
        (1, "k1", "v"),
        (2, "k2", "v"),
        (3, None, "no key"),
    ]
