"""Commands that read files: configuration and log segments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raftmq.cli.picture import NodeReport, Picture
from raftmq.codec import Codec
from raftmq.log.aborted import BLOCK_ENTRIES, HEADER_SIZE, Aborted, AbortedIndex
from raftmq.log.log_start import LocalStart, LogStart
from raftmq.log.shared import Shared
from raftmq.records import NewRecord, build_batch
from raftmq.runtime.disk import RealDisk
from tests.cli.conftest import Call

NODE = """\
node_id = 3
data = "/tmp/somewhere"
client_listener = "127.0.0.1:19092"
"""


def test_a_configuration_is_explained(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(NODE)
    done = call("config", "check", str(file), "--json")
    assert done.exit_code == 0, done.output
    rows = {row["Key"]: row for row in json.loads(done.stdout)}
    assert rows["node_id"]["Value"] == 3
    assert rows["rack"]["Value"] is None
    assert rows["client_listener"] == {
        "Key": "client_listener",
        "Value": "127.0.0.1:19092",
        "Source": "file",
    }
    assert rows["tick_ms"]["Source"] == "default"
    monkeypatch.setenv("RAFTMQ_TICK_MS", "30")
    rows = {
        row["Key"]: row for row in json.loads(call("config", "check", str(file), "--json").stdout)
    }
    assert rows["tick_ms"] == {"Key": "tick_ms", "Value": 30, "Source": "RAFTMQ_TICK_MS"}


def test_peers_and_listeners_are_told_in_one_line_each(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    listener = "[listeners.inside]\naddress = '127.0.0.1:1'\nprotocol = 'PLAINTEXT'\n"
    file.write_text(NODE + "peers = [{id = 3, host = 'a', port = 2}]\n" + listener)
    done = call("config", "check", str(file), "--json", "--no-environment")
    rows = {row["Key"]: row["Value"] for row in json.loads(done.stdout)}
    assert rows["peers"] == ["3@a:2"]
    assert rows["listeners"] == ["INSIDE=PLAINTEXT://127.0.0.1:1"]


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
        data += build_batch(records, base_offset=base, leader_epoch=0, codec=Codec.LZ4)
        base += size
    return data


def test_a_segment_is_dumped(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "00000000000000000000.log"
    file.write_bytes(segment(2, 3))
    lines = call("log", "dump", str(file)).stdout.splitlines()
    assert lines[0].startswith("baseOffset: 0 lastOffset: 1 count: 2")
    assert "partitionLeaderEpoch: 0" in lines[1]
    assert "compresscodec: lz4" in lines[1]
    shown = call("log", "dump", str(file), "--records").stdout
    assert "| offset: 4 " in shown
    assert "payload: v2" in shown
    first, second = map(
        json.loads, call("log", "dump", str(file), "-r", "--json").stdout.split("\n")[:2]
    )
    assert [record["offset"] for record in second["records"]] == [2, 3, 4]
    assert first["next_offset"] == second["base_offset"]


@pytest.fixture
def partition(tmp_path: Path) -> Path:
    folder = tmp_path / "topics" / "orders-1" / "partition-0"
    folder.mkdir(parents=True)
    (folder / "log-start").write_bytes(LocalStart(LogStart()).encode())
    (folder / "00000000000000000000.log").write_bytes(segment(2, 3))
    (folder / "00000000000000000005.log").write_bytes(segment(1, base=5))
    return folder


def test_sound_partitions_are_verified_from_any_folder_above(
    call: Call, tmp_path: Path, partition: Path
) -> None:
    for folder in (tmp_path, partition):
        done = call("log", "verify", str(folder), "--json")
        assert done.exit_code == 0, done.output
        (row,) = json.loads(done.stdout)
        assert (row["File"], row["State"]) == (str(partition), "sound")


@pytest.mark.parametrize("what", ["flip", "gap", "start"])
def test_damage_is_found(call: Call, partition: Path, what: str) -> None:
    first = partition / "00000000000000000000.log"
    if what == "flip":
        data = bytearray(first.read_bytes())
        data[-5] ^= 1
        first.write_bytes(data)
    elif what == "gap":
        first.write_bytes(segment(2))
    else:
        (partition / "log-start").write_bytes(b"no such thing")
    done = call("log", "verify", str(partition))
    assert done.exit_code == 1
    assert "damaged" in done.stdout


def test_an_unfinished_tail_is_no_damage(call: Call, partition: Path) -> None:
    last = partition / "00000000000000000005.log"
    last.write_bytes(last.read_bytes()[:-7])
    done = call("log", "verify", str(partition))
    assert done.exit_code == 0, done.output
    assert "will be mended" in done.stdout


@pytest.mark.parametrize("damaged", [[], [[4, 9]]], ids=["sound", "damaged"])
def test_running_nodes_tell_what_they_found(
    call: Call, monkeypatch: pytest.MonkeyPatch, damaged: list[list[int]]
) -> None:
    checks = {
        "scrubbed_bytes": 5000,
        "scrubbed_batches": 70,
        "damages_found": 3,
        "damages_repaired": 2,
    }
    partitions = [{"topic": "t", "partition": 6, "damaged": damaged}]
    status = {"node_id": 2, "checks": checks, "partitions": partitions}
    reports = [NodeReport("a:1", 2, status)]
    monkeypatch.setattr("raftmq.cli.picture.take_picture", lambda *_: Picture(list(reports)))
    done = call("log", "verify", "--admin", "a:1", "--json")
    assert done.exit_code == bool(damaged), done.output
    totals, *rows = json.loads(done.stdout)
    assert totals["Node"] == 2
    assert "70 batches, 5000 bytes" in totals["Finding"]
    assert "found 3, repaired 2" in totals["Finding"]
    assert [(r["Topic"], r["Partition"], r["State"], r["Finding"]) for r in rows] == [
        ("t", 6, "damaged", "offsets 4 to 8, not repaired yet") for _ in damaged
    ]
    reports.append(NodeReport("b:1", failure="no route"))
    done = call("log", "verify", "--admin", "a:1,b:1")
    assert done.exit_code == 1, "who does not answer may have found anything"
    assert "no route" in done.stdout


def test_verify_needs_a_folder_or_nodes(call: Call, tmp_path: Path) -> None:
    for words in ((), (str(tmp_path), "--admin", "a:1")):
        done = call("log", "verify", *words)
        assert done.exit_code == 2
        assert "--admin" in done.stderr
    done = call("log", "verify", "--admin", "nonsense")
    assert done.exit_code == 2
    assert "--admin: 'nonsense' is not host:port" in done.stderr


def test_a_folder_without_partitions_is_told(call: Call, tmp_path: Path) -> None:
    done = call("log", "verify", str(tmp_path))
    assert done.exit_code == 1
    assert "no partition" in done.stderr


def test_a_damaged_segment_is_dumped_as_far_as_it_can_be_read(call: Call, partition: Path) -> None:
    path = partition / "00000000000000000000.log"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    done = call("log", "dump", str(path))
    assert done.exit_code == 1
    assert done.stdout.startswith("baseOffset: 0 ")
    assert f"{path}: " in done.stderr


def test_reserved_room_behind_the_last_batch_is_no_problem(call: Call, partition: Path) -> None:
    path = partition / "00000000000000000000.log"
    path.write_bytes(path.read_bytes() + bytes(4096))
    done = call("log", "dump", str(path), "--json")
    assert done.exit_code == 0, done.output
    assert "zeros up to the end" in done.stderr


def test_aborted_transactions_are_dumped_and_verified(call: Call, partition: Path) -> None:
    path = partition / "00000000000000000000.txnindex"
    shared = Shared.make(RealDisk())
    index = AbortedIndex(str(path), 0, shared.files, shared.indexes)
    told = [Aborted(7, 10 * number, 10 * number + 5) for number in range(BLOCK_ENTRIES + 3)]
    for entry in told:
        index.add(entry)
    index.write()
    index.release()
    done = call("log", "dump", str(path), "--json")
    assert [Aborted(*row.values()) for row in json.loads(done.stdout)] == told
    assert f"below offset {told[-1].marker_offset + 1}" in call("log", "dump", str(path)).stderr
    assert call("log", "verify", str(partition)).exit_code == 0
    data = bytearray(path.read_bytes())
    data[HEADER_SIZE + 40] ^= 1
    path.write_bytes(data)
    assert "the node rebuilds it" in call("log", "dump", str(path)).stderr
    assert "txnindex" in call("log", "verify", str(partition)).stdout
    path.write_bytes(bytes(HEADER_SIZE))
    assert "says nothing of this segment" in call("log", "dump", str(path)).stderr


def test_the_other_files_of_a_log_are_dumped_too(call: Call, partition: Path) -> None:
    rows = json.loads(call("log", "dump", str(partition / "log-start"), "--json").stdout)
    assert {"Field": "Offset", "Value": 0} in rows
    odd = partition / "notes.txt"
    odd.write_text("x")
    assert "not a file of a log" in call("log", "dump", str(odd)).stderr
    named_wrong = partition / "x.log"
    named_wrong.write_bytes(b"")
    assert "not a segment" in call("log", "dump", str(named_wrong)).stderr
