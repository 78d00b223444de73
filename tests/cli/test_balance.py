"""`raftmq cluster balance` over pages of an admin port: what it shows, and says in the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from raftmq.cli import admin_port, cluster, common
from tests.cli.conftest import invoke


def _move(partition: int, after: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "topic": "t",
        "partition": partition,
        "before": [1, 2, 3],
        "after": after,
        "why": "replicas: node 1 has 9, node 4 has 0",
        "copied_bytes": 3 << 20,
        "steps": [],
        "code": "NONE",
        "message": "",
        **fields,
    }


class Port:
    """Pages of a cluster in which one move is done at each look."""

    def __init__(self, moves: list[dict[str, Any]], **answer: Any) -> None:
        self.moves = moves
        self.answer = {"code": "NONE", "message": "planned", "moves": moves, **answer}
        self.left = [{**m, "origin": "balance", "is_running": True, "reason": ""} for m in moves]
        self.replicas = {m["partition"]: m["after"] for m in moves}
        self.asked: list[dict[str, Any]] = []

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == "/balance"
        self.asked.append(body)
        return self.answer

    def get(self, path: str) -> dict[str, Any]:
        if path == "/leaders":
            rows = [{"topic": "t", "partition": n, "replicas": r} for n, r in self.replicas.items()]
            return {"partitions": rows}
        left, self.left = self.left, self.left[1:]
        return {"moves": [*left, {"origin": "drain", "topic": "u", "partition": 0}]}


Ask = Callable[..., Any]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    @contextmanager
    def no_admin(*_args: object) -> Iterator[None]:
        yield None

    monkeypatch.setattr(admin_port, "open_admin", no_admin)
    monkeypatch.setattr(common, "POLL_S", 0.0)

    def run(port: Port, *words: str) -> Any:
        monkeypatch.setattr(admin_port.AdminPort, "find", lambda *_args: port)
        return invoke(["cluster", "balance", *words])

    return run


def test_a_plan_is_shown_and_watched_until_nothing_of_it_is_left(ask: Ask) -> None:
    why = "replicas: node 1 has 9, node 4 has 0; preferred leaders: node 2 has 5, node 3 has 1"
    port = Port([_move(0, [4, 2, 3]), _move(1, [3, 2, 4], why=why, copied_bytes=-1)])
    done = ask(port)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "Partition  From   To     Bytes    Why",
        "t-0        1,2,3  4,2,3  3.0 MiB  replicas: node 1 has 9, node 4 has 0",
        "t-1        1,2,3  3,2,4  unknown  replicas: node 1 has 9, node 4 has 0",
        "                                  preferred leaders: node 2 has 5, node 3 has 1",
        "planned: 2 partitions, 2 replicas to copy, 3.0 MiB and more",
        "left: 2 partitions, 2 of them on their way",
        "left: 1 partitions, 1 of them on their way",
        "done: 2 partitions moved, as planned",
    ]
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_what_became_of_it_otherwise_is_named(ask: Ask) -> None:
    port = Port([_move(0, [4, 2, 3]), _move(1, [1, 2, 4]), _move(2, [2, 1, 3], copied_bytes=0)])
    port.replicas = {0: [1, 2, 3], 2: [2, 1, 3]}
    done = ask(port)
    assert "t-0 is on 1,2,3 and not on 4,2,3: changed meanwhile" in done.stdout
    assert "t-1 was deleted meanwhile" in done.stdout
    assert done.stdout.splitlines()[-1] == "done: 1 partitions moved, the others not as planned"


def test_a_move_that_was_not_planned_is_named(ask: Ask) -> None:
    port = Port([_move(0, [4, 2, 3], code="INVALID_UPDATE_VERSION", message="others by now")])
    port.left = []
    done = ask(port, "--no-wait")
    assert "not t-0: others by now" in done.stdout


def test_a_dry_run_shows_steps_and_does_not_wait(ask: Ask) -> None:
    port = Port([_move(0, [4, 2, 3], steps=["t-0: add 4 as a learner"])], message="would move")
    done = ask(port, "--dry-run")
    assert done.stdout.splitlines()[2:] == [
        "t-0: add 4 as a learner",
        "would move: 1 partitions, 1 replicas to copy, 3.0 MiB",
    ]
    assert port.asked == [{"dry_run": True, "timeout_ms": 60000}]
    assert json.loads(ask(port, "--dry-run", "--json").stdout) == port.answer


def test_of_many_moves_the_first_are_shown(ask: Ask) -> None:
    moves = [
        _move(n, [4, 2, 3], steps=[f"step of {n}"], code="NONE" if n < 50 else "INVALID_UPDATE")
        for n in range(100)
    ]
    port = Port(moves)
    port.left = [{**row, "reason": "it has no leader"} for row in port.left[:30]]
    port.replicas = {}
    done = ask(port)
    lines = done.stdout.splitlines()
    assert lines[20].startswith("t-19 ")
    assert lines[21] == "... and 80 more (--json shows all)"
    assert [line for line in lines if line.startswith("step of")][-1] == "step of 19"
    assert [line for line in lines if line.startswith("not t-")][-1] == "not t-69: INVALID_UPDATE"
    assert lines.count("... and 30 more (--json shows all)") == 2, "refused, deleted meanwhile"
    at = lines.index("left: 30 partitions, 30 of them on their way")
    waiting = [f"  t-{n} waits: it has no leader" for n in range(20)]
    assert lines[at + 1 : at + 22] == [*waiting, "  and 10 more wait"]
    assert lines[-1] == "done: 0 partitions moved, the others not as planned"
    assert len(json.loads(ask(Port(moves), "--json").stdout)["moves"]) == 100


def test_json_comes_once_at_the_end(ask: Ask) -> None:
    port = Port([_move(0, [4, 2, 3])])
    told = json.loads(ask(port, "--json").stdout)
    assert (told["is_done"], told["changed"]) == (True, [])


def test_a_refusal_is_an_error_with_its_code(ask: Ask) -> None:
    port = Port([], code="REASSIGNMENT_IN_PROGRESS", message="2 moves of an operator")
    done = ask(port)
    assert done.exit_code == 1
    assert "2 moves of an operator (REASSIGNMENT_IN_PROGRESS)" in done.stderr


def test_when_the_time_is_up_it_is_not_known(ask: Ask) -> None:
    port = Port([_move(0, [4, 2, 3]), _move(1, [4, 2, 3])])
    done = ask(port, "--wait", "0")
    assert done.exit_code == 3
    assert "it is not even yet: left: 2 partitions" in done.stderr


def test_nodes_that_support_the_same_are_told_in_one_word() -> None:
    row = ("raftmq.level", 3, 3, {"1": "1-4", "2": "1-4", "3": "1-3"})
    assert cluster._for_people(row)[-1] == "1,2: 1-4; 3: 1-3"
