"""The fault switch of a node: links cut in one direction or both, fsyncs slowed, by request.

For tests and rehearsals, never for production: without `RAFTMQ_FAULTS=1` in the environment at
start it does not exist, and the admin port refuses faults. Its state is replaced as a whole and
lives in this process alone. It changes only how the links and the flusher threads treat frames and
jobs: a cut link is silence, not a closed connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from raftmq.logs import structlog
from raftmq.runtime.peer_links import PeerLinks
from raftmq.runtime.threads import Flusher
from raftmq.types import NodeId

VARIABLE: Final = "RAFTMQ_FAULTS"
DELAY_MS_MAX: Final = 60_000
PEERS_MAX: Final = 1_000

logger = structlog.get_logger("raftmq.faults")

_Nodes = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]], msgspec.Meta(max_length=PEERS_MAX)
]


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is broken on purpose.

    Attributes:
        block_to: nodes to which this one's frames are dropped, though connections stay open.
        block_from: nodes from which nothing is heard any more, not even that a connection closed.
        fsync_delay_ms: how long a flusher thread sleeps before each fdatasync.
    """

    block_to: _Nodes = []
    block_from: _Nodes = []
    fsync_delay_ms: Annotated[float, msgspec.Meta(ge=0, le=DELAY_MS_MAX)] = 0


NONE: Final = Faults()


def is_armed(environment: Mapping[str, str]) -> bool:
    """True when this process was started with the permission to break it."""
    return environment.get(VARIABLE) == "1"


class FaultSwitch:
    """Applies faults to the links and flusher threads of one node."""

    def __init__(self, links: PeerLinks, flusher: Flusher) -> None:
        self._links = links
        self._flusher = flusher
        self.faults = NONE
        logger.warning("faults can be switched on here: never in production", variable=VARIABLE)

    def show(self) -> dict[str, Any]:
        """The faults as they stand, in the form that `replace` takes."""
        return msgspec.structs.asdict(self.faults)

    def replace(self, body: bytes) -> dict[str, Any]:
        """Put other faults in force, given as JSON; faults that it does not name end.

        Raises:
            msgspec.DecodeError: the JSON is wrong; the message names the key. Nothing changed.
        """
        self._apply(msgspec.json.decode(body, type=Faults))
        return self.show()

    def clear(self) -> dict[str, Any]:
        """End all faults."""
        self._apply(NONE)
        return self.show()

    def _apply(self, faults: Faults) -> None:
        self.faults = faults
        self._flusher.delay_s = faults.fsync_delay_ms / 1e3
        self._links.block(
            to=frozenset(NodeId(node_id) for node_id in faults.block_to),
            from_=frozenset(NodeId(node_id) for node_id in faults.block_from),
        )
        logger.warning("faults changed", **self.show())
