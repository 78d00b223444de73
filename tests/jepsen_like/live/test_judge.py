"""What a round's artefacts are judged to say; each kind of finding is made on purpose."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from jepsen_like.history_events import HistoryFile, Recorder
from jepsen_like.live import clocks
from jepsen_like.live.clocks import SIZES_S, Jump, offsets
from jepsen_like.live.command import with_what_they_rest_on
from jepsen_like.live.damage import spoil_bytes
from jepsen_like.live.judge import Judgement, judge
from jepsen_like.live.nemeses import NEMESES
from jepsen_like.live.replicas import log_hash
from jepsen_like.live.report import RunReport
from jepsen_like.live.run import Deck, Fault, Round, Settings
from jepsen_like.live.scarcity import Scarcity
from jepsen_like.live.stage import Stage, Standing
from jepsen_like.live.workloads.base import WORKLOADS

NODES = frozenset({1, 2, 3})


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> int:
        return int(self.seconds * 1e9)


def write_history(folder: Path, *, lost: bool = False, pause_s: float = 0.1) -> None:
    """Ten appends, a pause after the fifth, and a poll of all or all but one."""
    clock = Clock()
    with HistoryFile(folder / "history.jsonl.zst") as file:
        recorder = Recorder(file, clock)
        for value in range(10):
            clock.seconds += pause_s if value == 5 else 0.1
            invoked = recorder.invoke(1, "append", records={"t-0": [(-1, value)]})
            clock.seconds += 0.01
            recorder.ok(invoked, records={"t-0": [(value, value)]})
        invoked = recorder.invoke(2, "poll")
        seen = [(value, value) for value in range(10) if not (lost and value == 4)]
        recorder.ok(invoked, records={"t-0": seen})


class FakeStage:
    """Only what is judged of a stage."""

    def __init__(self) -> None:
        self.timeline = [Standing(100.0, NODES, frozenset(), {"": NODES, "t-0": NODES})]
        self.scarcity = Scarcity()


@pytest.fixture
def round_(tmp_path: Path) -> Round:
    round_ = Round(1, 3, tmp_path, began=100.0, ended=112.0)
    round_.told = {"has_read": True, "unfinished": [], "fatal": []}
    round_.load_exit = 0
    stage: Any = FakeStage()
    round_.stage = stage
    return round_


def names(judgement: Judgement) -> set[str]:
    return {finding.name for finding in judgement.findings}


def test_a_clean_round(round_: Round) -> None:
    write_history(round_.folder)
    found = judge(evolve(round_, ended=102.0))
    assert found.findings == []
    assert found.exit_code == 0
    assert found.acked_records == sum(found.acked) == 10
    assert found.polled_records == 10
    assert found.latency_ms == (pytest.approx(10), pytest.approx(10))


def test_a_lost_write_is_an_anomaly(round_: Round) -> None:
    write_history(round_.folder, lost=True)
    found = judge(evolve(round_, ended=102.0))
    assert "lost-write" in names(found)
    assert found.exit_code == 1


def test_records_for_later_are_acknowledged_ones(round_: Round) -> None:
    clock = Clock()
    with HistoryFile(round_.folder / "history.jsonl.zst") as file:
        recorder = Recorder(file, clock)
        records: Any = {"later0-0": [(-1, 1), (-1, 2)]}
        invoked = recorder.invoke(1, "delay", records=records, due=[0, 0])
        clock.seconds += 1.5
        recorder.ok(invoked)
        records = {"later0-0": [(-1, 3)]}
        recorder.info(recorder.invoke(1, "delay", records=records, due=[0]))
        seen: Any = {"due-0": [(0, 1), (1, 2)]}
        stamps = {"due-0": [clock(), clock()]}
        recorder.ok(recorder.invoke(2, "poll_due"), records=seen, stamps=stamps)
    found = judge(evolve(round_, ended=102.0))
    assert found.findings == []
    assert (found.acked, found.acked_records, found.polled_records) == ([0, 2], 2, 2)


def write_transactions(
    folder: Path, *, is_aborted_read: bool = False, hanging: tuple[str, ...] = ()
) -> None:
    """One that is committed and one that is aborted by wish, each over two partitions, and what
    those read who are to be given committed records alone."""
    clock = Clock()
    with HistoryFile(folder / "history.jsonl.zst") as file:
        recorder = Recorder(file, clock)
        for number, is_commit in enumerate((True, False)):
            clock.seconds += 0.5
            transaction = recorder.invoke(
                1,
                "transaction",
                transactional_id="id",
                producer=[7, number],
                protocol=2,
                records={"x-0": [(-1, 2 * number)], "x-1": [(-1, 2 * number + 1)]},
            )
            invoked = recorder.invoke(1, "end", transaction=transaction.op, is_commit=is_commit)
            clock.seconds += 0.2
            recorder.ok(invoked)
            records: Any = {"x-0": [(2 * number, 2 * number)], "x-1": [(number, 2 * number + 1)]}
            if is_commit:
                recorder.ok(transaction, records=records)
            else:
                recorder.fail(transaction, records=records)
            if is_commit or is_aborted_read:
                recorder.ok(recorder.invoke(2, "poll_committed"), records=records)
        recorder.ok(recorder.invoke(3, "settle"), partitions=[*hanging], offsets={})


def test_transactions_that_are_as_they_should_be(round_: Round) -> None:
    write_transactions(round_.folder)
    round_.faults = [Fault("kill-one", 0.6), Fault("pause", 1.0)]
    found = judge(evolve(round_, ended=102.0))
    assert found.findings == []
    assert found.transactions == {"ok": 1, "fail": 1}
    assert found.acked_records == found.polled_records == 2
    assert found.struck_commits == 1, "the other fault came between two"
    report = RunReport(Settings(60, (3,), 60, (), (), 1.0, 7, round_.folder), [(round_, found)])
    assert "1 committed, 1 aborted, 0 unknown; 1 of 2 faults began while" in report.to_text()


@pytest.mark.parametrize(
    ("planted", "name"),
    [
        ({"is_aborted_read": True}, "committed-aborted-read"),
        ({"hanging": ("x-1",)}, "hanging-transaction"),
    ],
    ids=["an aborted record was read", "one hangs"],
)
def test_transactions_that_are_not(round_: Round, planted: dict[str, Any], name: str) -> None:
    write_transactions(round_.folder, **planted)
    found = judge(evolve(round_, ended=102.0))
    assert name in names(found)
    assert found.exit_code == 1


def test_a_stall_of_transactions_is_an_anomaly(round_: Round) -> None:
    write_transactions(round_.folder)
    ended = evolve(round_, ended=140.0)
    assert ended.stage is not None
    (well,) = ended.stage.timeline
    assert judge(ended).findings == [], "no partition of theirs had to make progress"
    ended.stage.timeline[:] = [evolve(well, members={**well.members, "transactional-0": NODES})]
    assert names(judge(ended)) == {"no-progress"}


def test_a_stall_is_an_anomaly_unless_the_majority_was_gone(round_: Round) -> None:
    write_history(round_.folder, pause_s=6.0)
    ended = evolve(round_, ended=107.2)
    assert names(judge(ended)) == {"no-progress"}
    assert ended.stage is not None
    (well,) = ended.stage.timeline
    ended.stage.timeline.append(evolve(well, at=101.0, well=frozenset({1})))
    ended.stage.timeline.append(evolve(well, at=105.0))
    assert judge(ended).findings == []


def test_a_stall_counts_without_the_wait_for_cores(round_: Round) -> None:
    write_history(round_.folder, pause_s=6.0)
    ended = evolve(round_, ended=107.2)
    assert ended.stage is not None
    ended.stage.scarcity.note(100.0, {(1, 1): 0.0})
    ended.stage.scarcity.note(108.0, {(1, 1): 0.5})
    assert names(judge(ended)) == {"no-progress"}
    ended.stage.scarcity = Scarcity()
    ended.stage.scarcity.note(100.0, {(1, 1): 0.0})
    ended.stage.scarcity.note(108.0, {(1, 1): 1.5})
    assert judge(ended).findings == []


def test_a_report_tells_who_took_the_cores(round_: Round) -> None:
    write_history(round_.folder)
    ended = evolve(round_, ended=110.0)
    assert ended.stage is not None
    ended.stage.scarcity.note(100.0, {}, {"clients": 7.0})
    ended.stage.scarcity.note(110.0, {}, {"clients": 9.5, "nodes": 12.0})
    found = judge(ended)
    assert found.cores == {"clients": 0.25, "nodes": 1.2}
    report = RunReport(Settings(60, (3,), 60, (), (), 1.0, 7, round_.folder), [(ended, found)])
    assert "  cores: clients 0.25, nodes 1.20\n" in report.to_text()
    assert report.to_json()["rounds"][0]["cores"] == {"clients": 0.25, "nodes": 1.2}


@pytest.mark.parametrize(
    ("change", "name", "exit_code"),
    [
        ({"stuck": "never whole"}, "no-recovery", 1),
        ({"differences": ["t-0: nodes [1] against [2]"]}, "replicas-differ", 1),
        ({"told": {"has_read": False}, "load_exit": 2}, "unread", 1),
        ({"told": {"has_read": True, "unfinished": ["append"]}, "load_exit": 2}, "unfinished", 1),
        ({"told": {"has_read": True, "unanswered": ["it: silence"]}}, "unanswered", 1),
        ({"told": {"has_read": True, "fatal": ["producer 1"]}}, "fatal-client", 1),
        ({"told": {"has_read": True, "refused": ["log-0: invalid"]}}, "refused-append", 1),
        ({"load_exit": 3}, "load", 2),
        ({"lacks": {"clock-skew": "no libfaketime"}, "must_not_lack": True}, "lack", 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_findings(round_: Round, change: dict[str, Any], name: str, exit_code: int) -> None:
    write_history(round_.folder)
    (round_.folder / "load.log").write_text("Traceback")
    found = judge(evolve(round_, ended=102.0, **change))
    assert name in names(found)
    assert found.exit_code == exit_code


def test_errors_of_nodes(round_: Round) -> None:
    write_history(round_.folder)
    ended = evolve(round_, ended=102.0)
    log = round_.folder / "node-1.log"
    stopped = json.dumps({"event": "replica stopped", "level": "error"})
    log.write_text(json.dumps({"event": "loop stalled"}) + "\n[1, 2]\n" + stopped + "\n")
    assert names(judge(ended)) == {"node-error"}
    ended.faults.append(Fault("power-loss", 1.0))
    assert judge(ended).findings == [], "a disk that lost its power stops replicas"
    log.write_text("Traceback (most recent call last):\n")
    assert names(judge(ended)) == {"node-error"}


def test_a_report_of_two_rounds(round_: Round, tmp_path: Path) -> None:
    write_history(round_.folder)
    clean = evolve(round_, ended=102.0)
    clean.faults.append(Fault("pause", 0.2, "SIGSTOP of <2>", [], 0.6, 0.9))
    stuck = evolve(clean, number=2, stuck="never whole")
    settings = Settings(60, (3,), 60, (NEMESES["pause"],), ("append",), 100.0, seed=7, out=tmp_path)
    report = RunReport(settings, [(clean, judge(clean)), (stuck, judge(stuck))])
    assert report.exit_code == 1
    assert report.faults == {"pause": 2}
    assert report.acked_records == 20
    report.write(tmp_path)
    told = json.loads((tmp_path / "report.json").read_text())
    assert [row["verdict"] for row in told["rounds"]] == ["clean", "anomaly"]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "SIGSTOP of &lt;2&gt;" in page
    assert "no-recovery: never whole" in (tmp_path / "report.txt").read_text()
    assert report.summary().startswith("anomaly: 2 rounds, 20 records")


def test_a_report_tells_of_rare_nemeses_and_of_clocks(round_: Round, tmp_path: Path) -> None:
    write_history(round_.folder)
    clean = evolve(round_, ended=102.0)
    jumps = [Jump(1, 1_728_000.0, 0.0), Jump(2, 0.01, 0.0)]
    clean.faults.append(Fault("clock-skew", 0.2, "two clocks", jumps, 0.6, 0.9))
    chosen = (NEMESES["clock-skew"], NEMESES["wipe"])
    settings = Settings(60, (3,), 60, chosen, ("append",), 100.0, seed=7, out=tmp_path, each=1)
    report = RunReport(settings, [(clean, judge(clean))])
    assert report.too_rare == {"wipe": 0}
    assert report.exit_code == 2, "a run that did not see what it was to see"
    text = report.to_text()
    assert "clock-skew               1          0.4 s" in text
    assert "wipe: struck 0 times, wanted are 1" in text
    assert "of 2 nodes moved 1 times, from +0.0 s to +1728000.0 s" in text
    assert RunReport(evolve(settings, each=0), report.rounds).exit_code == 0


def test_a_round_that_a_tool_ended_is_unknown(round_: Round) -> None:
    found = judge(evolve(round_, broken="LackError: umount: busy", load_exit=-9))
    assert names(found) == {"broken"}
    assert found.exit_code == 2


def test_the_command_line_needs_no_kafka_client() -> None:
    """Only the load does, in its own process: simulations run where none is installed."""
    code = "import sys, jepsen_like.__main__; sys.exit('confluent_kafka' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_who_reads_has_somebody_who_writes() -> None:
    assert with_what_they_rest_on(("views", "delays")) == ("append", "views", "delays")
    assert with_what_they_rest_on(("group", "append")) == ("append", "group")
    assert with_what_they_rest_on(("topics",)) == ("append", "topics")
    assert with_what_they_rest_on(WORKLOADS) == WORKLOADS
    assert with_what_they_rest_on(("transactions", "delays")) == ("transactions", "delays")


def test_a_deck_gives_each_its_turn() -> None:
    chosen = tuple(NEMESES.values())
    deck = Deck(chosen, Random(3))
    nemeses = [deck.draw() for _ in range(3 * len(chosen))]
    drawn = [nemesis.name for nemesis in nemeses if nemesis is not None]
    assert all(drawn.count(name) == 3 for name in NEMESES)
    assert drawn[: len(chosen)] != list(NEMESES)


def test_what_a_workload_is_about_comes_first_and_no_more_often() -> None:
    chosen = tuple(NEMESES.values())
    for seed in range(20):
        deck = Deck(chosen, Random(seed), ("views", "delays"))
        drawn = [deck.draw() for _ in range(2 * len(chosen))]
        names = [nemesis.name for nemesis in drawn if nemesis is not None]
        assert names[0] == names[len(chosen)] == "clock-skew"
        assert all(names.count(name) == 2 for name in NEMESES)
    firsts = [Deck(chosen, Random(seed), ("append", "views")).draw() for seed in range(20)]
    assert {nemesis.name for nemesis in firsts if nemesis} != {"clock-skew"}


def test_clocks_are_off_by_every_size_before_one_comes_again() -> None:
    for seed in range(20):
        drawn = sorted(abs(size) for size in islice(offsets(Random(seed)), len(SIZES_S)))
        assert all(off <= size for off, size in zip(drawn, SIZES_S, strict=True))
        assert drawn[-1] > 5


def test_what_a_round_cannot_do_has_its_turns_in_others() -> None:
    chosen = tuple(NEMESES.values())
    deck = Deck(chosen, Random(3))
    for _ in range(30):
        drawn = deck.draw(lambda nemesis: not nemesis.needs_proxy)
        assert drawn is not None
        assert not drawn.needs_proxy
    rare = [deck.draw() for _ in range(2)]
    assert {nemesis.name for nemesis in rare if nemesis} == {"slow-links", "reset-connections"}
    assert deck.draw(lambda _nemesis: False) is None


def test_damage_changes_one_folder_and_says_where(tmp_path: Path) -> None:
    folder = tmp_path / "topics" / "t-1" / "partition-0"
    folder.mkdir(parents=True)
    (tmp_path / "state.journal").write_bytes(bytes(100))
    (folder / "0.index").write_bytes(b"")
    for seed in range(30):
        (folder / "0.log").write_bytes(bytes(range(256)) * 8)
        (tmp_path / "state.journal").write_bytes(bytes(range(100)))
        before = log_hash(folder), (tmp_path / "state.journal").read_bytes()
        told = spoil_bytes(tmp_path, Random(seed))
        after = log_hash(folder), (tmp_path / "state.journal").read_bytes()
        assert bool(told) == (before != after) or len(told) > 1, told


def test_a_stage_counts_on_nobody_who_is_broken() -> None:
    class NoLinks:
        def set(self, _weather: Any) -> None:
            pass

    class NoCluster:
        nodes = dict.fromkeys((1, 2, 3))
        links = NoLinks()

    cluster: Any = NoCluster()
    stage = Stage(cluster, Random(1), members={"": NODES, "t-0": NODES})
    stage.mark(down=[1])
    assert stage.timeline[-1].must_progress("t-0")
    stage.partition({2}, {0, 3})
    assert stage.timeline[-1].well == {3}
    assert not stage.timeline[-1].must_progress("t-0")
    stage.mark(up=[1])
    stage.damaged.add(3)
    stage.mark()
    assert stage.timeline[-1].well == {1}
    assert stage.timeline[-1].at <= time.monotonic()


class ClockStage:
    """Notes which nodes run under moved clocks, and how many at once are down."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.ids = [1, 2, 3]
        self.nodes = {i: SimpleNamespace(node_id=i, environment={}) for i in self.ids}
        self.jumps: list[Jump] = []
        self.down: set[int] = set()

    def choose(self, count: int) -> list[Any]:
        return [self.nodes[i] for i in self.rng.sample(self.ids, count)]

    def kill(self, nodes: list[Any]) -> None:
        self.down |= {node.node_id for node in nodes}
        assert len(self.down) == 1, "one at a time"

    def start(self, nodes: list[Any]) -> None:
        self.down -= {node.node_id for node in nodes}

    def wait_up(self) -> None:
        assert not self.down

    def hold(self, _low_s: float, _high_s: float) -> None:
        assert not self.down

    def tell(self, _detail: str) -> None:
        pass


def test_clocks_are_moved_of_one_node_alone_about_every_other_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    off: dict[int, float] = {}
    monkeypatch.setattr(clocks, "prepare", lambda node: node.environment.update(moved="1"))
    monkeypatch.setattr(clocks, "move", lambda node, by_s: off.update({node.node_id: by_s}))
    monkeypatch.setattr(clocks, "measure", lambda n: Jump(n.node_id, off[n.node_id], 0.0))
    struck = []
    for seed in range(60):
        stage: Any = ClockStage(seed)
        NEMESES["clock-skew"].strike(stage)
        moved = {jump.node_id for jump in stage.jumps}
        assert len(stage.jumps) >= 2 * len(moved)
        assert len({jump.wall_s for jump in stage.jumps}) == len(stage.jumps)
        assert not any(node.environment for node in stage.nodes.values())
        struck.append(len(moved))
    assert set(struck) == {1, 2, 3}
    assert 20 < struck.count(1) < 40
