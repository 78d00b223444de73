"""Commands travel as JSON that people can read, and newer formats are refused by name."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given

from raftmq.metadata.commands import (
    ALL_COMMANDS,
    LATER_FIELDS,
    Envelope,
    NewerCommandError,
    RegisterBroker,
    UnknownCommandError,
    decode_envelope,
    encode_envelope,
    newest_version,
    version_of,
)
from raftmq.types import NodeId
from tests.metadata.metadata_commands import ENVELOPES


def _raw(version: int, kind: str, **fields: object) -> bytes:
    command = {"type": kind, **fields}
    envelope = {"v": version, "node": 1, "incarnation": 1, "sequence": 1, "command": command}
    return json.dumps(envelope).encode()


@given(envelope=ENVELOPES)
def test_round_trip(envelope: Envelope) -> None:
    data = encode_envelope(envelope)
    assert decode_envelope(data) == envelope
    assert decode_envelope(memoryview(data)) == envelope
    parsed = json.loads(data)
    assert parsed["v"] == version_of(envelope.command)
    assert parsed["command"]["type"] == type(envelope.command).__name__


def test_command_names_differ() -> None:
    names = [command.__name__ for command in ALL_COMMANDS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_raw(0, "NoOperation"), "NoOperation of version 0"),
        (_raw(1, "RegisterBroker"), "missing required field `node_id`"),
        (b"\xff\x00", "not a metadata command"),
        (b'{"v":1,"node":1}', "not a metadata command"),
        (b"", "not a metadata command"),
    ],
)
def test_what_is_no_command_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(UnknownCommandError, match=message) as caught:
        decode_envelope(data)
    assert not isinstance(caught.value, NewerCommandError)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"v":99,"new":"shape"}', "a command of version 99, this version knows"),
        (_raw(9, "NoOperation"), "NoOperation of version 9, this version knows 1"),
        (_raw(1, "X"), "a command of the kind 'X', which this version does not know"),
        (_raw(1, "NoOperation", extra=1), "NoOperation with what .* unknown field `extra`"),
        (_raw(2, "NoOperation", extra=1), "NoOperation of version 2, this version knows 1"),
        (b'{"v":99,"command":3}', "a command of version 99"),
    ],
)
def test_what_a_newer_version_wrote_is_never_read_in_part(data: bytes, message: str) -> None:
    """Also where everything that this version knows of it could be read."""
    with pytest.raises(NewerCommandError, match=message):
        decode_envelope(data)


def test_a_later_field_raises_the_version_of_a_command_that_sets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LATER_FIELDS, RegisterBroker, {"recoveries": 2})
    plain = RegisterBroker(node_id=NodeId(1), storage_id="1", cluster_id="c")
    recovered = msgspec.structs.replace(plain, recoveries=1)
    assert (version_of(plain), version_of(recovered), newest_version(RegisterBroker)) == (1, 2, 2)
    understated = Envelope(version=1, node_id=NodeId(1), incarnation=1, sequence=1, command=plain)
    assert decode_envelope(encode_envelope(understated)) == understated
    understated = msgspec.structs.replace(understated, command=recovered)
    with pytest.raises(UnknownCommandError, match="RegisterBroker of version 1"):
        decode_envelope(encode_envelope(understated))
