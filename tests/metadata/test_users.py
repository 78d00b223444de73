"""Users in the metadata: what commands do to them, what is kept, and what nobody is shown."""

from __future__ import annotations

import json

import msgspec
import pytest
from attrs import evolve
from immutables import Map

from raftmq.errors import ErrorCode
from raftmq.metadata.commands import AlterUsers, Envelope, encode_envelope, version_of
from raftmq.metadata.credentials import ScramDeletion, ScramUpsertion, masked
from raftmq.metadata.image import LEVEL_OF_MOVES, LEVEL_OF_SECURITY, RAFTMQ_LEVEL, UsersImage
from raftmq.metadata.results import Rejection
from raftmq.metadata.snapshot import SnapshotEncoder, SnapshotError, decode_image, encode_image
from raftmq.metadata.state_machine import shown
from raftmq.sasl.scram import ScramCredential
from tests.metadata.metadata_commands import Machine, node

SALT, STORED, SERVER, SECRET = b"salt-of-it", b"stored-key", b"server-key", b"the-secret"


def upsertion(user: str, mechanism: int = 1, iterations: int = 4096) -> ScramUpsertion:
    return ScramUpsertion(
        user=user,
        mechanism=mechanism,
        iterations=iterations,
        scram_salt=SALT,
        scram_stored_key=STORED,
        scram_server_key=SERVER,
    )


def machine_at(level: int) -> Machine:
    machine = Machine()
    features = Map({RAFTMQ_LEVEL: level})
    machine.image = evolve(machine.image, features=features, features_epoch=0)
    return machine


def test_users_come_change_and_go() -> None:
    machine = machine_at(LEVEL_OF_SECURITY)
    both = AlterUsers(upsertions=(upsertion("b", 2), upsertion("a")), scram_secret=SECRET)
    machine.apply(both)
    users = machine.image.users
    assert users.names() == ["a", "b"]
    assert users.get("a", 1) == ScramCredential(SALT, STORED, SERVER, 4096)
    assert users.get("a", 2) is None
    assert users.get("c", 1) is None
    assert users.secret == SECRET
    before = machine.image.structure_version
    machine.apply(AlterUsers(upsertions=(upsertion("a", 2),), scram_secret=b"another"))
    assert machine.image.users.secret == SECRET, "the first one stays"
    assert machine.image.structure_version > before, "plans are made anew"
    machine.apply(AlterUsers(deletions=(ScramDeletion(user="a", mechanism=1),)))
    assert sorted(machine.image.users.credentials["a"]) == [2]
    machine.apply(AlterUsers(deletions=(ScramDeletion(user="a", mechanism=2),)))
    assert machine.image.users.names() == ["b"]
    unchanged = machine.image.users
    machine.apply(AlterUsers(deletions=(ScramDeletion(user="a", mechanism=2),)))
    assert machine.image.users is unchanged


def test_below_their_level_there_are_none() -> None:
    machine = machine_at(LEVEL_OF_MOVES)
    command = AlterUsers(upsertions=(upsertion("a"),), scram_secret=SECRET)
    assert version_of(command) == LEVEL_OF_SECURITY
    result = machine.apply(command)
    assert isinstance(result, Rejection)
    assert result.code is ErrorCode.UNSUPPORTED_VERSION
    assert machine.image.users == UsersImage()


def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftmq.metadata.apply.USERS_IN_ALL_MAX", 2)
    machine = machine_at(LEVEL_OF_SECURITY)
    machine.apply(AlterUsers(upsertions=(upsertion("a"), upsertion("b"))))
    result = machine.apply(AlterUsers(upsertions=(upsertion("c"),)))
    assert isinstance(result, Rejection)
    assert result.code is ErrorCode.POLICY_VIOLATION
    machine.apply(AlterUsers(upsertions=(upsertion("b", 2),)))
    assert sorted(machine.image.users.credentials["b"]) == [1, 2]


def test_a_snapshot_has_all_of_them() -> None:
    machine = machine_at(LEVEL_OF_SECURITY)
    machine.apply(AlterUsers(upsertions=(upsertion("b", 2), upsertion("a")), scram_secret=SECRET))
    machine.apply(AlterUsers(upsertions=(upsertion("b", 1),)))
    data = encode_image(machine.image)
    assert data[4:6] == b"\0\5"
    assert decode_image(data) == machine.image
    encoder = SnapshotEncoder()
    assert encoder.encode(machine.image) == data
    machine.apply(AlterUsers(deletions=(ScramDeletion(user="a", mechanism=1),)))
    assert decode_image(encoder.encode(machine.image)) == machine.image


def test_a_snapshot_of_format_5_without_users_is_refused() -> None:
    from tests.metadata.test_image import sealed

    body = msgspec.msgpack.decode(encode_image(machine_at(LEVEL_OF_SECURITY).image)[10:])
    with pytest.raises(SnapshotError, match="without users"):
        decode_image(sealed(5, msgspec.msgpack.encode(body[:-1])))


def test_nothing_that_is_shown_has_a_secret() -> None:
    command = AlterUsers(upsertions=(upsertion("a"),), scram_secret=SECRET)
    envelope = Envelope(
        version=version_of(command), node_id=node(1), incarnation=1, sequence=1, command=command
    )
    machine = machine_at(LEVEL_OF_SECURITY)
    machine.apply(command)
    value = encode_envelope(envelope)
    told = json.loads(value)["command"]
    hidden = [told["upsertions"][0][f"scram_{name}"] for name in ("salt", "stored_key")]
    hidden += [told["upsertions"][0]["scram_server_key"], told["scram_secret"]]
    assert all(text in value.decode() for text in hidden)
    raw = (SALT, STORED, SERVER, SECRET)
    shows = (masked(value).decode(), shown(value), repr(envelope), repr(machine.image))
    for show in (*shows, repr(command.upsertions)):
        assert not any(text in show for text in hidden)
        assert not any(text.decode() in show for text in raw)
    assert len(masked(value)) == len(value), "so that a batch of it keeps its lengths"
    assert json.loads(masked(value))["command"]["upsertions"][0]["user"] == "a"


def test_what_only_looks_like_a_secret_stays() -> None:
    quoted = json.dumps({"value": json.dumps({"scram_salt": "x"})}).encode()
    assert masked(quoted) == quoted
    assert masked(b'{"salt":"x"}') == b'{"salt":"x"}'
