"""What an answer says of leaders (KIP-951): who leads now, and where that node listens.

Owns the two tagged parts that Produce (v10+) and Fetch (v12+, endpoints v16+) share. They let a
client whose leader moved go on without a Metadata round trip.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

from attrs import frozen

from raftmq.protocol.wire import compact_string, varint

_LEADER: Final = struct.Struct(">iiB")
_NODE: Final = struct.Struct(">i")
_PORT: Final = struct.Struct(">i")


@frozen
class CurrentLeader:
    """Who leads a partition, as far as the answering node knows; -1 where it does not."""

    leader_id: int = -1
    leader_epoch: int = -1


@frozen
class NodeEndpoint:
    """Where a node named by a CurrentLeader listens for clients."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


NOBODY: Final = CurrentLeader()


def current_leader_bytes(leader: CurrentLeader) -> bytes:
    """The content of the tagged field."""
    return _LEADER.pack(leader.leader_id, leader.leader_epoch, 0)


def node_endpoints_bytes(endpoints: Sequence[NodeEndpoint]) -> bytes:
    """The content of the tagged field."""
    out = bytearray(varint(len(endpoints) + 1))
    for endpoint in endpoints:
        out += _NODE.pack(endpoint.node_id)
        out += compact_string(endpoint.host)
        out += _PORT.pack(endpoint.port)
        out += compact_string(endpoint.rack)
        out += b"\x00"
    return bytes(out)


def tagged(*fields: tuple[int, bytes]) -> bytes:
    """A tagged part of these fields, which ascend by tag."""
    out = bytearray(varint(len(fields)))
    for tag, content in fields:
        out += varint(tag)
        out += varint(len(content))
        out += content
    return bytes(out)


def current_leader_of(part: Any) -> CurrentLeader | None:
    """From a decoded Struct; None where the answer says nothing."""
    leader = getattr(part, "current_leader", None)
    if leader is None or (leader.leader_id == -1 and leader.leader_epoch == -1):
        return None
    return CurrentLeader(leader.leader_id, leader.leader_epoch)


def node_endpoints_of(message: Any) -> list[NodeEndpoint]:
    """From a decoded Struct."""
    return [
        NodeEndpoint(node.node_id, node.host, node.port, node.rack)
        for node in getattr(message, "node_endpoints", ())
    ]
