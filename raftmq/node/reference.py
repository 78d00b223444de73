"""A node whose metadata runs on pysyncobj, for comparison: where its library listens and writes.

Loaded only when asked for (`metadata_engine = "pysyncobj"`), since the library is an extra. It
listens beside the peer port, on loopback: whoever reaches that port can run code in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from raftmq.config import ConfigError, NodeConfig
from raftmq.logs import structlog
from raftmq.ports import Clock
from raftmq.runtime.reference_engine import (
    WARNING,
    ReferenceMetadataEngine,
    ReferenceOptions,
    check_addresses,
)
from raftmq.types import NodeId

logger = structlog.get_logger("raftmq.node")

PORT_OFFSET: Final = 10_000
PORT_END: Final = 65_536


def open_reference_engine(
    config: NodeConfig, clock: Clock, folder: str, on_failure: Callable[[str], None]
) -> ReferenceMetadataEngine:
    """Start the library; call it in the loop that the engine will report to.

    Raises:
        ConfigError: this node is not among `peers`, or one of them is not on loopback.
    """
    addresses = {NodeId(peer.id): f"{peer.host}:{_port(peer.port)}" for peer in config.peers} or {
        NodeId(config.node_id): f"127.0.0.1:{_port(config.peer_listener.port)}"
    }
    if NodeId(config.node_id) not in addresses:
        raise ConfigError("the pysyncobj engine has no observers: every node must be in 'peers'")
    try:
        check_addresses(addresses)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    logger.warning("reference engine", reason=WARNING)
    token = trio.lowlevel.current_trio_token()

    def post(call: Callable[[], None]) -> None:
        try:
            token.run_sync_soon(call)
        except trio.RunFinishedError:
            return  # the node has ended; nobody waits for this any more

    return ReferenceMetadataEngine(
        self_id=NodeId(config.node_id),
        incarnation=clock.wall_ms(),
        clock=clock,
        post=post,
        options=ReferenceOptions(addresses, folder=folder),
        on_failure=lambda error: on_failure(f"metadata could not be applied: {error!r}"),
    )


def _port(peer_port: int) -> int:
    """A port that a local cluster's other ports are far from."""
    port = peer_port + PORT_OFFSET
    return port if port < PORT_END else peer_port - PORT_OFFSET
