"""Commands that read files: configuration and log segments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raftmq.codec import Codec
from raftmq.records import NewRecord, build_batch
from tests.cli.conftest import Call

NODE = """\
node_id = 3
data = "/tmp/somewhere"
client_listener = "127.0.0.1:19092"
"""


def test_a_configuration_is_explained(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(NODE)
    done = call("config", "check", str(file), "--json")
    assert done.exit_code == 0, done.output
    rows = {row["Key"]: row for row in json.loads(done.stdout)}
    assert rows["node_id"]["Value"] == "3"
    assert rows["client_listener"] == {
        "Key": "client_listener",
        "Value": "127.0.0.1:19092",
        "Source": "set",
    }
    assert rows["tick_ms"]["Source"] == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodeid = 3\n", "did you mean 'node_id'"),
        ("node_id = 3\n", "'data' is missing"),
        ("node_id = ", "not TOML"),
    ],
)
def test_a_bad_configuration_is_refused_by_name(
    call: Call, tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text)
    done = call("config", "check", str(file), "--no-environment")
    assert done.exit_code == 1
    assert says in done.stderr
    assert str(file) in done.stderr


def test_every_key_is_listed(call: Call) -> None:
    assert "peer_listener" in call("config", "keys").stdout


def segment(*sizes: int, base: int = 0) -> bytes:
    data = b""
    for size in sizes:
        records = [NewRecord(b"k", b"v%d" % i, 1_000) for i in range(size)]
        data += build_batch(records, base_offset=base, leader_epoch=2, codec=Codec.LZ4)
        base += size
    return data


def test_a_segment_is_dumped(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "00000000000000000000.log"
    file.write_bytes(segment(2, 3))
    lines = call("log", "dump", str(file)).stdout.splitlines()
    assert lines[0].startswith("baseOffset: 0 lastOffset: 1 count: 2")
    assert "partitionLeaderEpoch: 2" in lines[1]
    assert "compresscodec: lz4" in lines[1]
    shown = call("log", "dump", str(file), "--records").stdout
    assert "| offset: 4 " in shown
    assert "payload: v2" in shown
    first, second = map(
        json.loads, call("log", "dump", str(file), "-r", "--json").stdout.split("\n")[:2]
    )
    assert [record["offset"] for record in second["records"]] == [2, 3, 4]
    assert first["next_offset"] == second["base_offset"]


def test_sound_segments_are_verified(call: Call, tmp_path: Path) -> None:
    (tmp_path / "00000000000000000000.log").write_bytes(segment(2, 3))
    (tmp_path / "00000000000000000005.log").write_bytes(segment(1, base=5))
    done = call("log", "verify", str(tmp_path), "--json")
    assert done.exit_code == 0
    assert [row["State"] for row in json.loads(done.stdout)] == ["sound", "sound"]


@pytest.mark.parametrize("what", ["flip", "gap", "cut"])
def test_damage_is_found(call: Call, tmp_path: Path, what: str) -> None:
    first = bytearray(segment(2, 3))
    second = segment(1, base=6 if what == "gap" else 5)
    if what == "flip":
        first[len(first) - 5] ^= 1
    elif what == "cut":
        del first[-5:]
    (tmp_path / "00000000000000000000.log").write_bytes(first)
    name = "00000000000000000006.log" if what == "gap" else "00000000000000000005.log"
    (tmp_path / name).write_bytes(second)
    done = call("log", "verify", str(tmp_path))
    assert done.exit_code == 1
    assert {"flip": "damaged", "gap": "begins at 6", "cut": "cut off"}[what] in done.stdout


def test_an_unfinished_tail_is_no_damage(call: Call, tmp_path: Path) -> None:
    (tmp_path / "00000000000000000000.log").write_bytes(segment(2, 3)[:-7])
    done = call("log", "verify", str(tmp_path))
    assert done.exit_code == 0
    assert "unfinished tail" in done.stdout


def test_a_folder_without_segments_is_told(call: Call, tmp_path: Path) -> None:
    done = call("log", "verify", str(tmp_path))
    assert done.exit_code == 1
    assert "no segments" in done.stderr
