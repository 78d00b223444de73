"""Commands travel as JSON that people can read, and newer formats are refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from raftmq.cluster.commands import (
    CONTROL_COMMANDS,
    Envelope,
    UnknownCommandError,
    decode_envelope,
    encode_envelope,
)
from raftmq.cluster.group_commands import GROUP_COMMANDS
from tests.cluster.metadata_commands import ENVELOPES


@given(envelope=ENVELOPES)
def test_round_trip(envelope: Envelope) -> None:
    data = encode_envelope(envelope)
    assert decode_envelope(data) == envelope
    assert decode_envelope(memoryview(data)) == envelope
    parsed = json.loads(data)
    assert parsed["v"] == 1
    assert parsed["command"]["type"] == type(envelope.command).__name__


def test_command_names_differ() -> None:
    names = [command.__name__ for command in CONTROL_COMMANDS + GROUP_COMMANDS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"v":9,"new":"shape"}', "format 9, this node knows 1"),
        (b'{"v":1,"node":1,"incarnation":1,"sequence":1,"command":{"type":"X"}}', "not a metadata"),
        (b"\xff\x00", "not a metadata command"),
        (b"", "not a metadata command"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(UnknownCommandError, match=message):
        decode_envelope(data)
