"""`node add`, `drain`, `remove`, `cordon`, `maintenance`: what they ask for, show, and end with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raftmq.cli import common
from raftmq.cli.admin_port import AdminPort
from raftmq.cli.common import CommandError, Pace
from raftmq.cli.console import EXIT_UNKNOWN
from tests.cli.conftest import Call

OK = {"code": "NONE", "message": "begun", "steps": ["__cluster_metadata: now: voters 1,2,3"]}


class FakePort:
    """Answers one page after the other; the last one again and again."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] = dict(OK)
        self.asked: list[dict[str, Any]] = []
        self.pages: list[dict[str, Any] | None] = []
        self.moves: list[dict[str, Any]] = []

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == "/nodes/change"
        self.asked.append(body)
        return self.answer

    def get(self, path: str) -> dict[str, Any]:
        if path == "/moves":
            return {"moves": self.moves}
        page = self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]
        if page is None:
            raise CommandError("no admin port answers", EXIT_UNKNOWN)
        return page


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> FakePort:
    port = FakePort()
    monkeypatch.setattr(AdminPort, "find", lambda _admin, _timeout: port)
    monkeypatch.setattr(common, "POLL_S", 0.0)
    return port


def _page(
    state: str = "draining", *, settled: bool = True, known: bool = True, **row: Any
) -> dict[str, Any]:
    """Of four voters and node 4."""
    nodes = [{"node_id": n, "role": "voter", "node_state": "active"} for n in (1, 2, 3)]
    if known:
        nodes.append({"node_id": 4, "role": "learner", "node_state": state})
    change = {
        "node_id": 4,
        "state": state,
        "partitions": 0,
        "leaders": 0,
        "kept_leaders": 0,
        "groups": 0,
        "is_voter": False,
        "is_controller": False,
        "is_empty": False,
        "is_idle": False,
        "stuck": [],
        **row,
    }
    changes = [change] if known and state != "active" else []
    return {"nodes": nodes, "changes": changes, "is_voting_settled": settled}


def test_a_drain_shows_how_far_it_is(call: Call, port: FakePort) -> None:
    stuck = {"topic": "t", "partition": 3, "reason": "it has no leader"}
    port.pages = [
        _page(partitions=7, leaders=2, groups=1, is_voter=True, is_controller=True),
        _page(partitions=1, stuck=[stuck] * 7),
        _page(is_empty=True),
    ]
    done = call("node", "drain", "4")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "__cluster_metadata: now: voters 1,2,3",
        "begun",
        "node 4 still has 2 leaderships, 1 group, 7 partitions, a vote on metadata, the "
        "controller's part",
        "node 4 still has 1 partition",
        *["  t-3 waits: it has no leader"] * 5,
        "  and 2 more wait",
        "done: node 4 is empty; stop it, then `raftmq node remove 4`",
    ]
    (asked,) = port.asked
    assert (asked["ids"], asked["change"], asked["dry_run"]) == ([4], "drain", False)


def test_a_drain_that_somebody_cancels_is_no_success(call: Call, port: FakePort) -> None:
    port.pages = [_page(partitions=7), _page("active")]
    done = call("node", "drain", "4")
    assert done.exit_code == 1
    assert "it was cancelled" in done.stderr


def test_a_cancelled_drain_waits_for_what_comes_back(call: Call, port: FakePort) -> None:
    port.pages = [_page("active")]
    port.moves = [{"origin": "drain", "before": [1, 4], "after": [1, 2]}]
    done = call("node", "drain", "4", "--cancel", "--wait", "0")
    assert done.exit_code == EXIT_UNKNOWN
    assert "partitions on their way back: 1" in done.stderr
    port.moves = []
    done = call("node", "drain", "4", "--cancel")
    assert done.exit_code == 0
    assert "done: node 4 is active again" in done.stdout
    assert port.asked[-1]["change"] == "cancel-drain"


def test_an_added_node_is_waited_for_with_its_share_and_the_votes(
    call: Call, port: FakePort
) -> None:
    port.pages = [_page("new"), _page("active", settled=False), _page("active")]
    done = call("node", "add", "4", "--voters", "3")
    assert done.exit_code == 0, done.output
    assert "metadata voters: 1, 2, 3 (more to come); partitions still to come: 0" in done.stdout
    assert "done: node 4 is part of the cluster" in done.stdout
    assert port.asked[0]["voters"] == 3
    port.moves = [{"origin": "balance", "before": [1, 2], "after": [1, 4]}]
    done = call("node", "add", "4", "--wait", "0")
    assert done.exit_code == EXIT_UNKNOWN
    assert "partitions still to come: 1" in done.stderr


@pytest.mark.parametrize("count", [20, 21, 500])
def test_of_many_steps_the_first_are_shown(call: Call, port: FakePort, count: int) -> None:
    steps = [f"t-{n}: from 1,2 to 1,4" for n in range(count)]
    port.answer["steps"] = steps
    done = call("node", "add", "4", "--no-wait")
    left = [f"... and {count - 20} more (--json shows all)"] if count > 20 else []
    assert done.stdout.splitlines() == [*steps[:20], *left, "begun"]
    assert json.loads(call("node", "add", "4", "--no-wait", "--json").stdout)["steps"] == steps


def test_a_node_is_gone_once_nobody_knows_it(call: Call, port: FakePort) -> None:
    port.pages = [_page("draining"), _page(known=False)]
    done = call("node", "remove", "4")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-2:] == [
        "it leaves the metadata group",
        "done: node 4 is gone",
    ]


def test_cordoned_and_back(call: Call, port: FakePort) -> None:
    port.pages = [_page("cordoned")]
    assert "done: node 4 is cordoned" in call("node", "cordon", "4").stdout
    port.pages = [_page("cordoned"), _page("active")]
    assert "done: node 4 is active" in call("node", "uncordon", "4").stdout
    assert [asked["change"] for asked in port.asked] == ["cordon", "uncordon"]


def test_maintenance_ends_its_wait_when_nothing_more_can_go(call: Call, port: FakePort) -> None:
    port.pages = [
        _page("maintenance", leaders=3),
        _page("maintenance", leaders=1, kept_leaders=1, is_idle=True),
    ]
    done = call("node", "maintenance", "4")
    assert done.exit_code == 0, done.output
    assert "done: node 4 leads only 1 partitions that no other could lead" in done.stdout
    port.pages = [_page("active")]
    done = call("node", "maintenance", "4", "--end")
    assert "done: node 4 is active again" in done.stdout
    assert port.asked[-1]["change"] == "end-maintenance"


def test_voters_alone(call: Call, port: FakePort) -> None:
    port.pages = [_page(settled=False), _page()]
    done = call("cluster", "quorum", "--voters", "3")
    assert done.exit_code == 0, done.output
    assert "done: metadata voters: 1, 2, 3" in done.stdout
    assert (port.asked[0]["ids"], port.asked[0]["voters"]) == ([], 3)
    assert call("node", "add", "4", "--voters", "0").exit_code == 2


@pytest.mark.parametrize("word", ["--dry-run", "--no-wait"])
def test_without_a_wait_nothing_is_watched(call: Call, port: FakePort, word: str) -> None:
    done = call("node", "drain", "4", word)
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [OK["steps"][0], "begun"]
    told = json.loads(call("node", "drain", "4", word, "--json").stdout)
    assert told == OK
    assert port.asked[0]["dry_run"] is (word == "--dry-run")


@pytest.mark.parametrize(
    ("code", "exit_code"), [("POLICY_VIOLATION", 1), ("REQUEST_TIMED_OUT", EXIT_UNKNOWN)]
)
def test_refusals_and_what_is_not_known(
    call: Call, port: FakePort, code: str, exit_code: int
) -> None:
    port.answer = {"code": code, "message": "node 4 cannot be removed: it lives", "steps": []}
    done = call("node", "remove", "4")
    assert done.exit_code == exit_code
    assert f"it lives ({code})" in done.stderr


def test_json_has_the_end(call: Call, port: FakePort) -> None:
    port.pages = [_page(partitions=1), _page(is_empty=True)]
    told = json.loads(call("node", "drain", "4", "--json").stdout)
    assert told["is_done"]
    assert told["message"].startswith("done: node 4 is empty")


def test_silence_ends_the_wait(call: Call, port: FakePort, monkeypatch: pytest.MonkeyPatch) -> None:
    port.pages = [_page(partitions=1), None, _page(is_empty=True)]
    assert call("node", "drain", "4").exit_code == 0, "another page came in time"
    monkeypatch.setattr(common, "LOST_S", -1.0)
    port.pages = [None]
    done = call("node", "drain", "4")
    assert done.exit_code == EXIT_UNKNOWN
    assert "no admin port answers" in done.stderr


@pytest.mark.parametrize(
    ("left", "passed", "text"),
    [
        (100, 60.0, ""),
        (50, 1.0, ""),
        (50, 60.0, " (about 60 s to go)"),
        (90, 60.0, " (about 9 min to go)"),
        (99, 120.0, " (about 3.3 h to go)"),
        (0, 60.0, ""),
    ],
    ids=["nothing went yet", "too early", "half", "a tenth", "hours", "done"],
)
def test_how_long_it_may_take(left: int, passed: float, text: str) -> None:
    pace = Pace()
    assert pace.left_text(100, 5.0) == ""
    assert pace.left_text(left, 5.0 + passed) == text
