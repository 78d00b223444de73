"""`raftmq recover`: says what may be lost, asks, does it once; refused where it is not due."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from attrs import evolve
from click.testing import Result
from msgspec.structs import replace

from raftmq.log.journal import GroupState, HardStateJournal
from raftmq.metadata.formation import FormationState, formation_id_of
from raftmq.metadata.state_machine import Skip
from raftmq.runtime.data_folder import DataFolder, DataFolderError
from raftmq.runtime.disk import RealDisk
from raftmq.tools.term_reset import TermToken
from raftmq.tools.unsafe_recovery import TERM_STEP
from raftmq.types import NodeId, RaftGroupId, StorageId
from tests.cli.conftest import invoke
from tests.tools.lost_majority import ME, fill_node, folder_of, partition_group, replica

CHOSEN = ((1, 101), (2, 102), (3, 103))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The folder of node 1, stopped; nodes 2 and 3 are gone."""
    return make_data(tmp_path)


def make_data(tmp_path: Path, peer_port: int = 1, more_commands: Sequence[bytes] = ()) -> Path:
    disk = RealDisk()
    folder = DataFolder.open(disk, tmp_path, cluster_id="c", node_id=NodeId(1))
    folder.node = replace(folder.node, storage_id=f"{ME.storage_id:016x}")
    folder.storage_id = StorageId(ME.storage_id)
    journal = HardStateJournal.open(disk, f"{tmp_path}/state.journal")
    folder.take()
    folder.save_formation(FormationState(chosen=CHOSEN))
    fill_node(disk, journal, str(tmp_path), peer_port=peer_port, more_commands=more_commands)
    journal.close()
    folder.close()
    return tmp_path


def recover(data: Path, *words: str, answer: str = "") -> Result:
    return invoke(["recover", "--data", str(data), *words], stdin=answer)


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


POISON = (
    b'{"v":1,"node":2,"incarnation":9,"sequence":1,'
    b'"command":{"type":"RegisterBroker","node_id":"\x7fNo"}}'
)
DIGEST = hashlib.sha256(POISON).hexdigest()
TAIL = f"5:4:{DIGEST[:12]}"


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """As `data`; the last two commands of its metadata, at offsets 5 and 6, cannot be applied."""
    return make_data(tmp_path, more_commands=[POISON, POISON])


def test_a_command_that_cannot_be_applied_is_told_agreed_on_and_recorded(poisoned: Path) -> None:
    told = recover(poisoned, "--skip-command", "5", "--dry-run")
    assert told.exit_code == 0, told.output
    assert "at offset 5, leader epoch 4, cannot be applied" in told.stdout
    assert POISON.decode().replace("\x7f", r"\x7f") in told.stdout
    assert DIGEST in told.stdout
    assert "2 of the metadata voters 1,2,3 must agree." in told.stdout
    assert f"token: 1:{TAIL}\n" in told.stdout
    as_json = json.loads(recover(poisoned, "--skip-command", "5", "--dry-run", "--json").stdout)
    assert (as_json["token"], as_json["voters"]) == (f"1:{TAIL}", [1, 2, 3])
    assert formation(poisoned).skips == ()
    agreed = ["--skip-command", "5", "--agree", f"1:{TAIL}, 3:{TAIL}"]
    declined = recover(poisoned, *agreed, answer="no\n")
    assert "nothing was changed" in declined.stderr
    assert formation(poisoned).skips == ()
    done = recover(poisoned, *agreed, answer="yes\n")
    assert done.exit_code == 0, done.output
    assert formation(poisoned) == FormationState(chosen=CHOSEN, skips=(Skip(5, 4, DIGEST),))
    again = recover(poisoned, *agreed, "--yes")
    assert again.exit_code == 1
    assert "is skipped here already" in again.stderr
    second = recover(poisoned, "--skip-command", "6", "--dry-run")
    assert f"token: 1:6:4:{DIGEST[:12]}" in second.stdout, "the next one that stops it"
    assert recover(poisoned, "--unsafe", "--dry-run").exit_code == 0


@pytest.mark.parametrize(
    ("agree", "says"),
    [
        ("", "0 of the metadata voters 1,2,3 agree, 2 must"),
        (f"1:{TAIL}", "1 of the metadata voters 1,2,3 agree, 2 must"),
        (f"1:{TAIL},1:{TAIL}", "1 of the metadata voters 1,2,3 agree, 2 must"),
        (f"1:{TAIL},4:{TAIL}", "node 4 is no voter of the metadata group"),
        (f"1:{TAIL},2:5:3:{DIGEST[:12]}", "node 2 has another command"),
        (f"1:{TAIL},2:5:4:{'0' * 12}", "node 2 has another command"),
        (f"1:{TAIL},2:5:4:{DIGEST}", "is no token that --dry-run printed"),
    ],
)
def test_no_command_is_skipped_without_a_majority(poisoned: Path, agree: str, says: str) -> None:
    refused = recover(poisoned, "--skip-command", "5", "--agree", agree, "--yes")
    assert refused.exit_code == 1
    assert says in refused.stderr
    assert formation(poisoned).skips == ()


def test_only_the_command_that_stops_the_node_can_be_skipped(poisoned: Path) -> None:
    for offset in ("4", "6", "99"):
        refused = recover(poisoned, "--skip-command", offset, "--dry-run")
        assert refused.exit_code == 1
        assert "the first command that cannot be applied here is at 5" in refused.stderr


def test_where_all_commands_can_be_applied_none_is_skipped(data: Path) -> None:
    refused = recover(data, "--skip-command", "4", "--dry-run")
    assert refused.exit_code == 1
    assert "every metadata command in [0, 5) can be applied here" in refused.stderr


def test_a_command_of_a_newer_version_is_not_skipped(tmp_path: Path) -> None:
    data = make_data(tmp_path, more_commands=[b'{"v":99}'])
    refused = recover(data, "--skip-command", "5", "--dry-run")
    assert refused.exit_code == 1
    assert "is one of a newer raftmq" in refused.stderr


ABSURD = (1 << 31) - 1


def plant_term(data: Path, group: RaftGroupId, term: int = ABSURD) -> GroupState:
    """As a VoteRequest did before there were bounds."""
    journal = HardStateJournal.open(RealDisk(), f"{data}/state.journal", is_expected=True)
    state = journal.get(group)
    assert state is not None
    planted = evolve(state, term=term, vote=replica(3))
    journal.put(group, planted)
    journal.close()
    return planted


def state_of(data: Path, group: RaftGroupId) -> GroupState | None:
    journal = HardStateJournal.open(RealDisk(), f"{data}/state.journal", is_expected=True)
    try:
        return journal.get(group)
    finally:
        journal.close()


def token_of(data: Path, partition: str = "0") -> TermToken:
    told = recover(data, "--reset-term", "t", partition, "--dry-run", "--json")
    assert told.exit_code == 0, told.output
    return TermToken.parse(json.loads(told.stdout)["token"])


def test_an_absurd_term_is_told_agreed_on_recorded_and_set_back(data: Path) -> None:
    planted = plant_term(data, partition_group(0))
    told = recover(data, "--reset-term", "t", "0", "--dry-run")
    assert told.exit_code == 0, told.output
    assert f"t-0: term {ABSURD}, last leader epoch in the log 4: no election can" in told.stdout
    assert "In that term this node voted for node 3." in told.stdout
    assert "All voters 1,2,3 must be stopped" in told.stdout
    own = token_of(data)
    assert f"token: {own}\n" in told.stdout
    others = [evolve(own, node_id=NodeId(n), last_epoch=n + 4, state="0" * 8) for n in (2, 3)]
    agreed = ["--reset-term", "t", "0", "--agree", ",".join(str(t) for t in (own, *others))]
    declined = recover(data, *agreed, answer="no\n")
    assert "nothing was changed" in declined.stderr
    assert state_of(data, partition_group(0)) == planted
    assert formation(data).term_resets == ()
    done = recover(data, *agreed, answer="yes\n")
    assert done.exit_code == 0, done.output
    new_term = 7 + TERM_STEP  # above the newest log of all, not only this one
    assert state_of(data, partition_group(0)) == evolve(planted, term=new_term, vote=None)
    (reset,) = formation(data).term_resets
    assert (reset.term, reset.new_term, reset.vote) == (ABSURD, new_term, f"3:{103:016x}")
    assert reset.tokens == tuple(str(token) for token in (own, *others))
    again = recover(data, *agreed, "--yes")
    assert again.exit_code == 1
    assert "this node's own token is" in again.stderr, "it has another state now"
    untouched = state_of(data, partition_group(1))
    assert untouched is not None
    assert untouched.term == 4, "no other partition was touched"


def test_a_term_is_not_set_back_while_a_voter_runs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        data = make_data(tmp_path, listener.getsockname()[1])
        planted = plant_term(data, partition_group(0))
        own = token_of(data)
        tokens = [evolve(own, node_id=NodeId(n)) for n in (1, 2, 3)]
        agreed = ["--reset-term", "t", "0", "--yes", "--agree", ",".join(map(str, tokens))]
        refused = recover(data, *agreed)
        assert refused.exit_code == 1
        assert "where node 2 was: stop it, and take new tokens of all voters" in refused.stderr
        assert state_of(data, partition_group(0)) == planted
        assert recover(data, *agreed, "--even-if-alive").exit_code == 0


def test_alone_in_its_group_a_node_needs_no_token(data: Path) -> None:
    plant_term(data, partition_group(1), 1 << 60)
    done = recover(data, "--reset-term", "t", "1", "--yes")
    assert done.exit_code == 0, done.output
    state = state_of(data, partition_group(1))
    assert state is not None
    assert (state.term, state.vote) == (4 + TERM_STEP, None)


def test_voters_that_are_lost_for_good_are_named(data: Path) -> None:
    plant_term(data, partition_group(0))
    own = token_of(data)
    agreed = [
        "--reset-term",
        "t",
        "0",
        "--yes",
        "--agree",
        f"{own},{evolve(own, node_id=NodeId(2))}",
    ]
    refused = recover(data, *agreed)
    assert refused.exit_code == 1
    assert "nodes 3 vote on t-0, and their tokens are missing" in refused.stderr
    done = recover(data, *agreed, "--survivors", "1,2")
    assert done.exit_code == 0, done.output
    assert "Nodes 3 must never come back with their old data" in done.stdout


def test_a_sensible_term_stays(data: Path) -> None:
    own = token_of(data)
    tokens = ",".join(str(evolve(own, node_id=NodeId(n))) for n in (1, 2, 3))
    refused = recover(data, "--reset-term", "t", "0", "--yes", "--agree", tokens)
    assert refused.exit_code == 1
    assert "it stays" in refused.stderr
    missing = recover(data, "--reset-term", "t", "2", "--dry-run")
    assert "this node holds no t-2" in missing.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "say --unsafe, --accept-loss, --skip-command or --reset-term"),
        (["--unsafe", "--skip-command", "3"], "say --unsafe, --accept-loss, --skip-command or"),
        (["--reset-term", "--unsafe"], "say --unsafe, --accept-loss, --skip-command or"),
        (["--reset-term", "t"], "--accept-loss and --reset-term take TOPIC and PARTITION"),
        (["--skip-command", "3", "t"], "about metadata, no topic"),
        (["--unsafe", "--accept-loss", "t", "0"], "say --unsafe, --accept-loss, --skip-command"),
        (["--accept-loss", "t"], "--accept-loss and --reset-term take TOPIC and PARTITION"),
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
