"""A real cluster for the tests of services that use Kafka: nodes, sockets, faults.

`Cluster` is the context manager, `plugin` gives pytest the fixture `raftmq_cluster`. Nothing is
imported before it is used: pytest loads the plugin in every run, also where no test wants a node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raftmq.testing.cluster import Cluster, ClusterError, LackError
    from raftmq.testing.login import Login

__all__ = ["Cluster", "ClusterError", "LackError", "Login"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'raftmq.testing' has no attribute {name!r}")
    from raftmq.testing import cluster, login

    return getattr(login if name == "Login" else cluster, name)
