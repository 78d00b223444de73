"""A node: everything below composed into one process.

`run_node` is the only way in. `raftmq.logs` comes first, see there.
"""

from raftmq.logs import configure_logs  # isort: skip
from raftmq.node.process import Listeners, open_listeners, run_node

__all__ = ["Listeners", "configure_logs", "open_listeners", "run_node"]
