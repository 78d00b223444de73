"""All bugs planted above the Raft groups, and the hunt for them.

What each is caught by is told by `python -m jepsen_like planted`.
"""

from __future__ import annotations

from typing import Final

from jepsen_like.bug import Bug
from jepsen_like.cluster.options import ClusterOptions
from jepsen_like.cluster.planted_clients import CLIENT_BUGS
from jepsen_like.cluster.planted_nodes import NODE_BUGS
from jepsen_like.cluster.run import run_cluster_seed
from jepsen_like.planted import Catch, hunt_with

CLUSTER_BUGS: Final[dict[str, Bug[ClusterOptions]]] = {**CLIENT_BUGS, **NODE_BUGS}
"""By name. Each must be caught within 200 seeds."""


def hunt_in_cluster(name: str, first: int = 1, seeds: int = 200) -> Catch:
    """Look for one of these bugs."""
    bug = CLUSTER_BUGS[name]
    return hunt_with(
        name,
        bug.plant,
        bug.caught_by,
        lambda seed: run_cluster_seed(seed, bug.options(seed)),
        range(first, first + seeds),
    )
