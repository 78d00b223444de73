"""What seeds of whole nodes found, told again as one fault at a time on a healthy cluster."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest

from jepsen_like.cluster.options import ClusterOptions
from jepsen_like.cluster.run import quiet_logs
from jepsen_like.cluster.world import ClusterWorld

CALM = ClusterOptions(drop=0.0, duplicate=0.0, straggler=0.0, client_drop=0.0, reorder=False)


@pytest.fixture
def world() -> Iterator[ClusterWorld]:
    with quiet_logs():
        world = ClusterWorld(1, attrs.evolve(CALM))
        world.start()
        world.run_until(2_000.0)
        assert world.watch.is_whole()
        yield world
        world.close()


def test_a_metadata_log_that_fails_while_a_node_comes_up_ends_the_process(
    world: ClusterWorld,
) -> None:
    """Else it would wait for ever, neither serving nor given up by its supervisor (seed 92)."""
    node = world.node(2)
    node.crash()

    def fails(what: str, path: str) -> bool:
        is_met = what == "fdatasync" and path.startswith("data/meta/") and node.core is not None
        if is_met:
            node.disk.fail_when(None)
            failed.append(path)
        return is_met

    failed: list[str] = []
    node.disk.fail_when(fails)
    node.start()
    world.run_until(world.now_ms + 5_000.0)
    assert failed
    assert node.is_serving
