"""Whatever goes wrong while another node's bytes are decoded is one error."""

from __future__ import annotations

import struct
from functools import partial

import pytest

from raftmq.controller.control_plane import decode_quorum
from raftmq.controller.leaders import decode_rows
from raftmq.errors import RemoteProtocolError
from raftmq.foreign import check_bounds, decode_foreign
from raftmq.metadata.broker_messages import decode_admin, decode_outcomes, decode_reply
from raftmq.metadata.broker_messages import decode_request as decode_control
from raftmq.replication.messages import decode
from raftmq.types import NodeId

NESTED = b"\x91" * 5_000
ERRORS = [
    RecursionError("deep"),
    MemoryError(),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    struct.error("short"),
    KeyError("x"),
    ValueError("zz"),
    AssertionError("of decoding"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_failure_is_a_protocol_error(error: Exception) -> None:
    def fail(_data: object) -> None:
        raise error

    with pytest.raises(RemoteProtocolError, match=f"bad thing: {type(error).__name__}") as caught:
        decode_foreign("thing", fail, b"")
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "read",
    [
        decode_control,
        decode_reply,
        decode_admin,
        decode_outcomes,
        partial(decode_rows, sender=NodeId(2)),
        decode_quorum,
    ],
    ids=["control", "reply", "admin", "outcomes", "rows", "quorum"],
)
@pytest.mark.parametrize(
    "data", [NESTED, b"\x92\x05" + NESTED, b"\x92\x05\xa1\xff", b"\xa1\xff", b"\xc1", b""]
)
def test_no_bytes_leave_a_decoder_another_way(read: object, data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read(data)  # type: ignore[operator]


@pytest.mark.parametrize(
    "data", [b"", b"\x01", b"\x01\x01\xff\xff\xff\xff", b"\x01\x09" + bytes(4)]
)
def test_no_frame_leaves_the_codec_another_way(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(data)


def test_bounds() -> None:
    check_bounds("term", 7, 7)
    for value in (-1, 8):
        with pytest.raises(RemoteProtocolError, match=f"term {value} is outside"):
            check_bounds("term", value, 7)
