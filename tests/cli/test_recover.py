"""`raftmq recover`: says what may be lost, asks, does it once; refused where it is not due."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from click.testing import Result
from msgspec.structs import replace
from typer.testing import CliRunner

from raftmq.adapters.data_folder import DataFolder, DataFolderError
from raftmq.adapters.disk import RealDisk
from raftmq.cli.app import app
from raftmq.cluster.formation import FormationState, formation_id_of
from raftmq.log.hard_state import HardStateJournal
from raftmq.types import NodeId, StorageId
from tests.cluster.given_up_node import ME, fill_node, folder_of

CHOSEN = ((1, 101), (2, 102), (3, 103))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The folder of node 1, stopped; nodes 2 and 3 are gone."""
    return make_data(tmp_path)


def make_data(tmp_path: Path, peer_port: int = 1) -> Path:
    disk = RealDisk()
    folder = DataFolder.open(disk, tmp_path, cluster_id="c", node_id=NodeId(1))
    folder.node = replace(folder.node, storage_id=f"{ME.storage_id:016x}")
    folder.storage_id = StorageId(ME.storage_id)
    journal = HardStateJournal.open(disk, f"{tmp_path}/state.journal")
    folder.take()
    folder.save_formation(FormationState(chosen=CHOSEN))
    fill_node(disk, journal, str(tmp_path), peer_port=peer_port)
    journal.close()
    folder.close()
    return tmp_path


def recover(data: Path, *words: str, answer: str = "") -> Result:
    return CliRunner().invoke(app, ["recover", "--data", str(data), *words], input=answer)


def formation(data: Path) -> FormationState:
    folder = DataFolder.open_known(RealDisk(), data)
    try:
        return folder.load_formation()
    finally:
        folder.close()


def test_a_lost_majority_is_told_asked_for_and_given_up(data: Path) -> None:
    told = recover(data, "--unsafe", "--dry-run")
    assert told.exit_code == 0, told.output
    assert "Survivors: 1. Given up: 2, 3, 4." in told.stdout
    assert "__cluster_metadata: voters 1,2,3 (learners 4) -> 1" in told.stdout
    assert "t-0: voters 1,2,3 -> 1" in told.stdout
    assert "has offsets [0, 6), flushed to 6, last known commit 5, leader epoch 4" in told.stdout
    gone = "1 partitions had no replica on a survivor: all of their records are lost: t-2"
    assert gone in told.stdout
    declined = recover(data, "--unsafe", answer="no\n")
    assert declined.exit_code == 1
    assert "nothing was changed" in declined.stderr
    assert formation(data) == FormationState(chosen=CHOSEN)
    done = recover(data, "--unsafe", answer="yes\n")
    assert done.exit_code == 0, done.output
    assert "Start node 1." in done.stdout
    state = formation(data)
    assert (state.recoveries, state.recovering) == (("1",), "")
    assert formation_id_of(CHOSEN, state.recoveries) != formation_id_of(CHOSEN)
    again = recover(data, "--unsafe", "--yes")
    assert again.exit_code == 1
    assert "start them instead" in again.stderr


def test_the_only_node_goes_on_without_its_journal(data: Path) -> None:
    (data / "state.journal").unlink()
    told = recover(data, "--unsafe", "--even-if-alive", "--dry-run")
    assert told.exit_code == 0, told.output
    assert "state.journal is lost" in told.stdout
    assert "t-1: voters 1 -> 1" in told.stdout
    done = recover(data, "--unsafe", "--even-if-alive", "--yes")
    assert done.exit_code == 0, done.output
    again = recover(data, "--unsafe", "--even-if-alive", "--yes")
    assert again.exit_code == 1
    assert "has its majority: start them instead" in again.output


def test_a_survivor_of_whom_nothing_is_known_is_pointed_out(data: Path) -> None:
    words = ["--unsafe", "--dry-run", "--survivors"]
    told = recover(data, *words, "1,9")
    assert told.exit_code == 0, told.output
    assert "Nothing here mentions node 9." in told.stdout
    assert json.loads(recover(data, *words, "1,9", "--json").stdout)["unknown"] == [9]
    assert "Nothing here mentions" not in recover(data, *words, "1,4").stdout, "it is a learner"
    assert json.loads(recover(data, *words, "1,4", "--json").stdout)["unknown"] == []


def test_as_json(data: Path) -> None:
    told = json.loads(recover(data, "--unsafe", "--dry-run", "--json").stdout)
    assert told["given_up"] == [2, 3, 4]
    assert told["gone"] == ["t-2"]
    verdicts = {group["name"]: group["verdict"] for group in told["groups"]}
    assert verdicts == {
        "__cluster_metadata": "recovered",
        "t-0": "recovered",
        "t-1": "stays",
        "t-3": "recovered",
    }


def test_one_that_was_begun_is_finished_and_keeps_the_node_from_starting(data: Path) -> None:
    folder = DataFolder.open_known(RealDisk(), data)
    begun = replace(folder.load_formation(), recoveries=("1",), recovering="1")
    folder.save_formation(begun)
    with pytest.raises(DataFolderError, match="begun and not finished"):
        folder.check_recovered()
    folder.close()
    other = recover(data, "--unsafe", "--survivors", "1,4", "--yes")
    assert other.exit_code == 1
    assert "a recovery with --survivors 1 was begun here" in other.stderr
    assert recover(data, "--unsafe", "--yes").exit_code == 0
    assert formation(data).recoveries == ("1",), "fenced once"


def test_a_running_node_is_left_alone(data: Path) -> None:
    folder = DataFolder.open_known(RealDisk(), data)
    assert "in use by another process" in recover(data, "--unsafe", "--yes").stderr
    folder.close()


def test_a_node_that_answers_is_not_lost(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        data = make_data(tmp_path, port)
        refused = recover(data, "--unsafe", "--yes")
        assert refused.exit_code == 1
        assert f"something answers at 127.0.0.1:{port}, where node 2 was" in refused.stderr
        assert formation(data).recoveries == ()
        assert recover(data, "--unsafe", "--yes", "--even-if-alive").exit_code == 0


def test_damage_is_told_and_accepted(data: Path) -> None:
    path = Path(folder_of(1, str(data))) / f"{0:020d}.log"
    content = bytearray(path.read_bytes())
    content[100 + 61] ^= 1
    path.write_bytes(content)
    told = recover(data, "--accept-loss", "t", "1", "--dry-run")
    assert told.exit_code == 0, told.output
    assert "t-1: offsets [0, 6) on this node" in told.stdout
    assert "these " in told.stdout
    assert recover(data, "--accept-loss", "t", "1", "--yes").exit_code == 0
    whole = recover(data, "--accept-loss", "t", "1", "--yes")
    assert whole.exit_code == 1
    assert "there is no loss to accept" in whole.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "say --unsafe or --accept-loss"),
        (["--unsafe", "--accept-loss", "t", "0"], "say --unsafe or --accept-loss"),
        (["--accept-loss", "t"], "--accept-loss takes TOPIC and PARTITION"),
        (["--unsafe", "t"], "about all groups"),
        (["--unsafe", "--survivors", "1,x"], "node ids, such as 1,4"),
    ],
)
def test_usage(data: Path, words: list[str], says: str) -> None:
    done = recover(data, *words)
    assert done.exit_code == 2
    assert says in done.stderr


def test_a_folder_of_nobody(tmp_path: Path) -> None:
    done = recover(tmp_path / "nowhere", "--unsafe")
    assert done.exit_code == 1
    assert "is no node's data folder" in done.stderr
