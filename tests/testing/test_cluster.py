"""The rules of a test cluster, with a keeper that only takes notes: no node runs here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raftmq.testing import Cluster, ClusterError, LackError
from raftmq.testing.keeper import PORTS, PowerDisk, claim_ports

AT_IMPORT = """
import json, sys, pytest, time
before = set(sys.modules)
begun = time.process_time()
import raftmq.testing.plugin
took = time.process_time() - begun
print(json.dumps([sorted(set(sys.modules) - before), took]))
"""


class Notes:
    """A keeper's link that starts nodes on paper; one serves as soon as it has a majority."""

    def __init__(self, nodes: int = 3) -> None:
        self.orders: list[dict[str, Any]] = []
        self.alive = dict.fromkeys(range(1, nodes + 1), True)
        self.ready = dict(self.alive)
        self.paused: set[int] = set()

    def ask(self, do: str, timeout_s: float, **order: Any) -> dict[str, Any]:
        if do != "show":
            self.orders.append({"do": do, **order})
        for node_id in order.get("chosen", ()):
            if do in ("kill", "stop"):
                self.alive[node_id] = self.ready[node_id] = False
        for node_id in order.get("start", ()):
            self.alive[node_id] = True
        for node_id in order.get("wait", ()):
            self.ready[node_id] = True
        return {"nodes": [self.show(node_id) for node_id in self.alive]}

    def show(self, node_id: int) -> dict[str, Any]:
        return {
            "id": node_id,
            "port": 9_000 + node_id,
            "admin_port": 0,
            "pid": node_id,
            "ended": "" if self.alive[node_id] else "killed by SIGKILL",
            "is_ready": self.ready[node_id],
            "is_paused": node_id in self.paused,
        }

    def close(self) -> None:
        self.orders.append({"do": "close"})


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def cluster(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """On paper; what nodes are told over HTTP is noted as well."""

    def admin(view: Any, method: str, path: str, _deadline: float, body: str = "") -> Any:
        notes.orders.append({"do": path, "node": view.id, **json.loads(body)})

    made = Cluster(link=notes)  # type: ignore[arg-type]  # a fake
    monkeypatch.setattr(made, "_admin", admin)
    made.start()
    notes.orders.clear()
    return made


def test_the_plugin_imports_pytest_alone() -> None:
    best_s = 1.0
    for _ in range(5):  # processor time also grows where a core is shared
        done = subprocess.run(
            [sys.executable, "-c", AT_IMPORT],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        modules, took_s = json.loads(done.stdout)
        assert modules == ["raftmq", "raftmq.testing", "raftmq.testing.plugin"]
        best_s = min(best_s, took_s)
        if best_s <= 0.005:
            return
    pytest.fail(f"{1_000 * best_s:.1f} ms, where every run of pytest has to pay it")


def test_addresses_and_names(cluster: Cluster) -> None:
    assert cluster.bootstrap == "127.0.0.1:9001,127.0.0.1:9002,127.0.0.1:9003"
    assert cluster.address(2) == "127.0.0.1:9002"
    assert cluster.topic("orders") == "orders", "nobody shares a cluster of one's own"
    cluster.begin_test("a-test-1-")
    assert cluster.topic("orders") == "a-test-1-orders"


@pytest.mark.parametrize("nodes", [0, 2, 4, 7])
def test_sizes(nodes: int) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        Cluster(nodes)


def test_what_does_not_run_says_so(cluster: Cluster, notes: Notes) -> None:
    with pytest.raises(ClusterError, match=r"no node 4; this cluster has 1, 2, 3"):
        cluster.kill(4)
    cluster.kill(2)
    with pytest.raises(ClusterError, match="cannot pause node 2: it does not run"):
        cluster.pause(2)
    with pytest.raises(ClusterError, match="runs already"):
        cluster.start()
    cluster.close()
    assert notes.orders[-1] == {"do": "close"}
    with pytest.raises(ClusterError, match="closed, or never started"):
        cluster.kill(1)
    with pytest.raises(ClusterError, match="closed, or never started"):
        _ = cluster.bootstrap


def test_a_start_that_fails_leaves_nothing() -> None:
    class Failing(Notes):
        def ask(self, do: str, timeout_s: float, **order: Any) -> dict[str, Any]:
            raise ClusterError("no")

    notes = Failing()
    with pytest.raises(ClusterError, match="no"):
        Cluster(link=notes).start()  # type: ignore[arg-type]  # a fake
    assert notes.orders == [{"do": "close"}]


def test_a_partition_is_told_to_both_ends(cluster: Cluster, notes: Notes) -> None:
    cluster.partition({1}, {2, 3})
    told = {order["node"]: (order["block_to"], order["block_from"]) for order in notes.orders}
    assert told == {1: ([2, 3], [2, 3]), 2: ([1], [1]), 3: ([1], [1])}
    notes.orders.clear()
    cluster.heal()
    assert [(o["block_to"], o["block_from"]) for o in notes.orders] == [([], [])] * 3


@pytest.mark.parametrize("sides", [(), ({1},), ({1, 2}, {2, 3})])
def test_a_partition_has_sides(cluster: Cluster, sides: Any) -> None:
    with pytest.raises(ValueError, match="two or more sides"):
        cluster.partition(*sides)


def test_a_partition_of_somebody_else(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="no node 9"):
        cluster.partition({1}, {9})


def test_who_sees_no_majority_is_not_waited_for(cluster: Cluster, notes: Notes) -> None:
    cluster.kill(1, 2, 3)
    cluster.restart(1)
    assert notes.orders[-1] == {"do": "start", "start": [1], "wait": []}
    cluster.restart(2)
    starts = [order for order in notes.orders if order["do"] == "start"]
    assert starts[-2:] == [
        {"do": "start", "start": [2], "wait": [2]},
        {"do": "start", "start": [], "wait": [1]},
    ], "with the second, the first one has its majority"


def test_a_restart_keeps_a_partition(cluster: Cluster, notes: Notes) -> None:
    cluster.partition({1}, {2, 3})
    cluster.kill(1, 2, 3)
    notes.orders.clear()
    cluster.restart()
    starts = [order for order in notes.orders if order["do"] == "start"]
    assert starts == [
        {"do": "start", "start": [2, 3], "wait": [2, 3]},
        {"do": "start", "start": [1], "wait": []},
    ]
    told = [order["node"] for order in notes.orders if order["do"] == "/faults"]
    assert told == [2, 3], "before node 1, which knows of no cut, is there"


def test_a_cut_that_nobody_could_keep_up_is_refused(cluster: Cluster) -> None:
    cluster.partition({1}, {2}, {3})
    cluster.kill(1, 2, 3)
    with pytest.raises(ClusterError, match="neither serves"):
        cluster.restart()
    cluster.restart(1)
    with pytest.raises(ClusterError, match="node 1 does not serve yet"):
        cluster.restart(2)
    cluster.heal()
    cluster.restart()


def test_restore_mends_everything(cluster: Cluster, notes: Notes) -> None:
    cluster.partition({1}, {2, 3})
    cluster.kill(2)
    notes.paused.add(3)
    notes.orders.clear()
    cluster.restore()
    did = [(order["do"], order.get("start") or order.get("chosen")) for order in notes.orders]
    assert ("resume", [3]) in did
    assert ("start", [2]) in did
    assert ("/faults", None) in did


def test_a_node_that_fell_by_itself_is_reported(
    cluster: Cluster, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "log", lambda _node: "assertion failed")
    notes.alive[3] = notes.ready[3] = False
    with pytest.raises(ClusterError, match=r"node 3 killed by SIGKILL, and nobody(.|\n)*assertion"):
        cluster.restore()
    assert notes.alive[3], "the next test finds it well"
    cluster.restore()


def test_who_is_not_root_cannot_lose_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1_000)
    with pytest.raises(LackError, match="needs root"):
        PowerDisk(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_machine_without_xfs_cannot_lose_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    with pytest.raises(LackError, match=r"mkfs\.xfs \(Debian: xfsprogs"):
        PowerDisk(tmp_path)


def test_clusters_at_the_same_time_have_ports_of_their_own() -> None:
    claims = [claim_ports() for _ in range(20)]
    assert len({first for first, _ in claims}) == 20
    assert all(first in PORTS for first, _ in claims)
    for _, claim in claims:
        claim.close()
