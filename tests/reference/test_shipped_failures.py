"""What pysyncobj 0.3.17 does as shipped: each test documents a reason why it holds no users' data.

A test here fails when the library no longer misbehaves: then look whether it can be promoted (see
docs/decisions/0001-metadata-on-our-raft.md). Everything runs on the unmodified library.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pysyncobj.journal
import pysyncobj.syncobj
import pytest
from pysyncobj import FAIL_REASON

from tests.reference.memory_network import MemoryNetwork

pytestmark = pytest.mark.filterwarnings(
    # The library leaves files for the garbage collector to close.
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryNetwork]:
    network = MemoryNetwork(monkeypatch)
    yield network
    network.close()


def test_success_is_reported_for_commands_that_were_never_committed(
    network: MemoryNetwork,
) -> None:
    """A snapshot chunk moves the commit index over entries that the leader never compared."""
    network.start_all("a", "b", "c", logCompactionBatchSize=64)
    network.elect("a")
    network.put_acknowledged("a", "before")
    # The old leader is cut off with five commands that nobody else has.
    network.dead_links = [("a", "b"), ("a", "c"), ("b", "a"), ("c", "a")]
    told = [network.put("a", f"lost {i}") for i in range(5)]
    network.run(0.1)
    network.elect("b")
    network.put_acknowledged("b", *(f"kept {i}" for i in range(20)))
    network.nodes["b"].forceLogCompaction()
    network.run(0.2)
    network.dead_links = []
    network.deliver_max = 2
    network.run(1.0)
    assert all(t and t[0][1] == FAIL_REASON.SUCCESS for t in told), "reported as committed"
    for name in ("b", "c"):
        assert not any("lost" in item for item in network.consumers[name].items)


def test_acknowledged_commands_are_forgotten_when_a_dump_is_newer_than_the_journal(
    network: MemoryNetwork, tmp_path: Path
) -> None:
    """At start the journal is wiped unless it begins exactly with the dump's two entries."""
    files = {"journalFile": f"{tmp_path}/journal", "fullDumpFile": f"{tmp_path}/dump"}
    network.start("a", [], **files)
    network.elect("a")
    network.put_acknowledged("a", *range(10))
    # The dump is written in one tick, the journal's prefix goes in the next; what is acknowledged
    # in between is in the journal alone. A crash there is a copy of the files.
    crashed = tmp_path / "crashed"

    def crash(result: Any, reason: int) -> None:
        assert reason == FAIL_REASON.SUCCESS
        acknowledged.append(result)
        if len(acknowledged) == 10:
            crashed.mkdir()
            for path in tmp_path.glob("*"):
                if path.is_file():
                    shutil.copy(path, crashed)

    acknowledged: list[int] = []
    network.nodes["a"].forceLogCompaction()
    for item in range(10, 20):
        network.consumers["a"].put(item, callback=crash)
    network.run_until(lambda: len(acknowledged) == 10)
    assert network.consumers["a"].items == list(range(20))
    network.stop("a")
    files = {"journalFile": f"{crashed}/journal", "fullDumpFile": f"{crashed}/dump"}
    network.start("a", [], **files)
    network.elect("a")
    network.run(1.0)
    assert network.consumers["a"].items == list(range(10)), "ten acknowledged commands are gone"


def test_an_agreeing_acknowledged_suffix_is_cleared_by_a_snapshot(network: MemoryNetwork) -> None:
    """Installing a snapshot clears the whole log, also what follows it and was acknowledged.

    The stale reply that makes the leader send it carries no term, so it is believed.
    """
    network.start_all("a", "b", "c")
    network.elect("a")
    network.put_acknowledged("a", *range(10))
    network.run(0.5)
    network.nodes["a"].forceLogCompaction()
    network.tick()
    network.dead_links = [
        ("a", "b"),
        ("b", "a"),
        ("b", "c"),
        ("c", "b"),
    ]  # c alone acknowledges what follows
    network.put_acknowledged("a", *range(10, 20))
    network.run(0.2)
    assert len(network.log("c")) > 10
    end_acknowledged = network.log("c")[-1][1]
    stale = {"type": "next_node_idx", "next_node_idx": 1, "reset": True, "success": False}
    network.inject("c", "a", stale)
    network.deliver_max = 1
    ends = []
    for _ in range(40):
        network.tick()
        ends.append(network.log("c")[-1][1])
    assert min(ends) < end_acknowledged, "c held the only other copy of acknowledged commands"


def test_a_late_append_deletes_an_acknowledged_suffix(network: MemoryNetwork) -> None:
    """Everything after prevLogIdx goes, whether it disagrees or not."""
    network.start_all("a", "b", "c")
    network.elect("a")
    network.put_acknowledged("a", *range(3))
    network.run(0.5)
    late = next(
        message
        for sender, to, message in reversed(network.delivered)
        if (sender, to) == ("a", "b") and message["type"] == "append_entries"
    )
    network.put_acknowledged("a", *range(3, 8))
    network.run(0.5)
    end = network.log("b")[-1][1]
    network.inject("a", "b", late)  # the network delivers it a second time
    assert network.log("b")[-1][1] < end


def test_ready_is_reported_on_an_empty_state_after_a_restart(
    network: MemoryNetwork, tmp_path: Path
) -> None:
    """`onReady` compares with a commit index that nobody has established yet."""
    names = ("a", "b", "c")
    files = {name: {"journalFile": f"{tmp_path}/{name}"} for name in names}
    for name in names:
        network.start(name, [n for n in names if n != name], **files[name])
    network.connect_all()
    network.elect("a")
    for item in range(500):
        network.put("a", item)
    network.run_until(lambda: len(network.consumers["a"].items) == 500)
    for name in names:
        network.stop(name)
        meta = tmp_path / f"{name}.meta"  # saved once a second only: a crash before that
        state = pysyncobj.journal.loads(meta.read_bytes())
        state.pop("raftCommitIndex", None)
        meta.write_bytes(pysyncobj.journal.dumps(state))
    served: dict[str, int] = {}
    for name in names:
        network.start(
            name,
            [n for n in names if n != name],
            **files[name],
            onReady=lambda name=name: served.setdefault(name, len(network.consumers[name].items)),
        )
    network.connect_all()
    network.run_until(lambda: len(served) >= 1)
    assert 0 in served.values(), "ready, and none of 500 acknowledged items is served"


def test_terms_climb_without_a_pre_vote(network: MemoryNetwork) -> None:
    """A node that hears nothing campaigns again and again, and then deposes a healthy leader."""
    network.start_all("a", "b", "c")
    network.elect("a")
    network.run(1.0)
    before = network.nodes["c"].raftCurrentTerm
    network.deaf = ["c"]
    network.dead_links = [("c", "a"), ("c", "b")]
    network.run(30.0)
    assert network.nodes["c"].raftCurrentTerm - before >= 30
    assert network.nodes["a"].raftCurrentTerm == before
    network.deaf, network.dead_links = [], []
    network.run(2.0)
    assert network.nodes["a"].raftCurrentTerm > before + 30, "a healthy leader was deposed"


def test_a_vote_counts_as_often_as_it_arrives(network: MemoryNetwork) -> None:
    """Nobody looks whose vote it is: one voter of five makes a leader."""
    names = ["a", "b", "c", "d", "e"]
    network.start_all(*names)
    network.deaf = ["a", "b", "c", "d", "e"]
    node = network.nodes["a"]
    node._SyncObj__raftElectionDeadline = 0
    network.tick()
    assert not node._isLeader()
    vote = {"type": "response_vote", "term": node.raftCurrentTerm}
    network.inject("b", "a", vote)
    network.inject("b", "a", vote)
    assert node._isLeader()


def test_a_wiped_voter_votes_a_second_time_in_the_same_term(
    network: MemoryNetwork, tmp_path: Path
) -> None:
    """Its identity is its address, so nobody can tell that it lost its promises."""
    network.start("c", ["a", "b"], journalFile=f"{tmp_path}/c")
    network.start("a", ["b", "c"])
    network.start("b", ["a", "c"])
    votes: list[str] = []
    request = {"type": "request_vote", "term": 7, "last_log_index": 1, "last_log_term": 0}

    def answers() -> list[str]:
        found = [to for sender, to, _ in network.mail if sender == "c"]
        network.mail.clear()
        return found

    network.inject("a", "c", request)
    votes += answers()
    network.inject("b", "c", request)
    assert answers() == []  # it keeps its word, as long as it remembers
    network.stop("c")
    for path in tmp_path.glob("c*"):
        path.unlink()
    network.start("c", ["a", "b"], journalFile=f"{tmp_path}/c")
    network.inject("b", "c", request)
    votes += answers()
    assert votes == ["a", "b"], "two leaders of one term are possible"


def test_success_is_reported_before_anything_is_synced(
    network: MemoryNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is a memory map that nobody flushes: power loss takes what was acknowledged."""
    calls: list[str] = []
    for name in ("fsync", "fdatasync", "sync"):
        monkeypatch.setattr(os, name, lambda *_args, name=name: calls.append(name))
    journal = pysyncobj.journal.ResizableFile
    monkeypatch.setattr(journal, "flush", lambda _self: calls.append("flush"))
    names = ["a", "b", "c"]
    for name in names:
        network.start(name, [n for n in names if n != name], journalFile=f"{tmp_path}/{name}")
    network.connect_all()
    network.elect("a")
    network.put_acknowledged("a", *range(5))
    assert calls == []


def test_a_flipped_bit_in_the_dump_is_believed_or_empties_the_state(
    network: MemoryNetwork, tmp_path: Path
) -> None:
    """The dump's checksum is never verified, and a dump that cannot be read is ignored."""
    dump = tmp_path / "dump"
    network.start("a", [], fullDumpFile=str(dump))
    network.elect("a")
    items = [f"acknowledged {i} {i * 7919 % 1000}" for i in range(50)]
    network.put_acknowledged("a", *items)
    network.nodes["a"].forceLogCompaction()
    network.run(0.2)
    network.stop("a")
    good = dump.read_bytes()
    random = Random(5)
    empty = wrong = 0
    for _ in range(60):
        damaged = bytearray(good)
        damaged[random.randrange(10, len(good))] ^= 1 << random.randrange(8)
        dump.write_bytes(damaged)
        network.start("a", [], fullDumpFile=str(dump))
        network.run(0.1)
        found = network.consumers["a"].items
        empty += found == []
        wrong += found not in ([], items)
        network.stop("a")
    assert empty >= 20, "ran on without its state"
    assert wrong >= 1, "took a wrong state for its own"


def test_each_acknowledgement_rewinds_what_is_sent_next(network: MemoryNetwork) -> None:
    """With acknowledgements a few commands late every entry is sent many times."""
    network.start_all("a", "b", "c")
    network.elect("a")
    network.run(0.5)
    network.delivered.clear()
    network.delay_ticks = 5
    for item in range(100):
        network.put("a", item)
        network.tick()
    network.run(1.0)
    sent = sum(
        len(message.get("entries", []))
        for sender, to, message in network.delivered
        if (sender, to) == ("a", "b") and message["type"] == "append_entries"
    )
    assert sent / 100 > 4, "copies of every entry"


class _Bomb:
    """Unpickling it runs code of the sender's choice."""

    ran: list[str] = []  # noqa: RUF012 - shared on purpose

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _explode, ("in your process",)


def _explode(where: str) -> str:
    _Bomb.ran.append(where)
    return where


def test_a_command_from_the_network_runs_code(network: MemoryNetwork) -> None:
    """Commands (and snapshots) are unpickled by every node that applies them."""
    network.start_all("a", "b", "c")
    network.elect("a")
    _Bomb.ran.clear()
    command = b"\x00" + pysyncobj.syncobj.pickle.dumps((0, (_Bomb(),)))
    network.inject("b", "a", {"type": "apply_command", "command": command})
    network.run(1.0)
    assert len(_Bomb.ran) == 3, "once on every node"
