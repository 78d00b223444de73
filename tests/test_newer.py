"""What a newer version wrote is named as such, wherever its version stands."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from crc32c import crc32c

from raftmq.errors import AheadError, RaftmqError
from raftmq.partition.producer_state import ProducerStateTable, check_encoded
from raftmq.raft.membership import Configuration
from raftmq.replication.log_start import decode_proposal, encode_proposal
from raftmq.types import NodeId, Offset, ReplicaId, StorageId


def _configuration(version: int) -> bytes:
    encoded = Configuration((ReplicaId(NodeId(1), StorageId(2)),)).encode()
    assert encoded[0] == 1
    return bytes([version]) + encoded[1:]


def _producers(version: int) -> bytes:
    body = ProducerStateTable().encode()[:-4]
    assert body[4:6] == b"\0\2"
    body = body[:4] + struct.pack(">H", version) + body[6:]
    return body + struct.pack(">I", crc32c(body))


def _proposal(version: int) -> bytes:
    return bytes([version]) + encode_proposal(Offset(7))[1:]


@pytest.mark.parametrize(
    ("make", "read", "newest"),
    [
        (_configuration, Configuration.decode, 1),
        (_producers, ProducerStateTable.decode, 2),
        (_producers, check_encoded, 2),
        (_proposal, decode_proposal, 1),
    ],
    ids=["configuration", "producers", "producers, checked", "log-start entry"],
)
def test_a_newer_version_is_named(
    make: Callable[[int], bytes], read: Callable[[bytes], object], newest: int
) -> None:
    read(make(newest))
    with pytest.raises(AheadError, match=f"{newest + 1}, known is"):
        read(make(newest + 1))


@pytest.mark.parametrize("make", [_configuration, _producers])
def test_version_0_is_damage(make: Callable[[int], bytes]) -> None:
    read = Configuration.decode if make is _configuration else ProducerStateTable.decode
    with pytest.raises(RaftmqError) as caught:
        read(make(0))  # type: ignore[operator]
    assert not isinstance(caught.value, AheadError)
