"""A cluster of an older version becomes one of this version node by node, under load: back again
while the level is not raised, and no further back once it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rolling import TOPIC, Application
from raftmq.metadata.features import SUPPORTED
from tests.live.harness import Cluster, Node, lack, wait_until
from tests.live.load import create_topic, in_sync

pytestmark = [pytest.mark.live, pytest.mark.slow]

OLDER = "bd280f3"
"""The commit that nodes are upgraded from: the last one before there were levels."""
HERE = Path(__file__).parents[2]
PARTITIONS = 4
RATE = 40
"""Records a second: enough that each handover meets some under way."""
LEVEL = "raftmq.level"
NEWEST = SUPPORTED[LEVEL][1]
PATIENT = {"shutdown_timeout_ms": 60_000}


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the older commit."""
    asked = ["git", "-C", str(HERE), "cat-file", "-e", f"{OLDER}^{{commit}}"]
    if subprocess.run(asked, check=False, capture_output=True).returncode:
        lack(f"needs commit {OLDER}, in a clone with all history")
    tree = tmp_path_factory.mktemp("older")
    archive = tree / "older.tar"
    words = ["archive", "-o", str(archive), OLDER, "raftmq", "client"]
    subprocess.run(["git", "-C", str(HERE), *words], check=True)
    subprocess.run(["tar", "-xf", str(archive), "-C", str(tree)], check=True)
    return tree


class OldChild:
    """A process of the older tree, as the harness handles those that it forks."""

    def __init__(self, tree: Path, config: Path, log: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'client'}"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the tree is this test's own
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "raftmq.cli.main", "start", "--config", str(config)],
                cwd=tree,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)


def start(node: Node, tree: Path | None) -> None:
    """Start a node of the older tree, or of this one; return once it serves."""
    start_only(node, tree)
    node.wait_ready()


def start_only(node: Node, tree: Path | None) -> None:
    if tree is None:
        node.start()
        return
    config = node.cluster.folder / f"node-{node.node_id}.toml"
    # The older version does not know the keys.
    node.takes_data_at_once, node.formation_wait_ms = False, None
    config.write_text(node.config_text())
    node.process = OldChild(tree, config, node.log_path)  # type: ignore[assignment]


def is_whole(cluster: Cluster) -> bool:
    told = in_sync(cluster.bootstrap, TOPIC)
    return len(told) == PARTITIONS and all(nodes == {1, 2, 3} for nodes in told.values())


def roll(cluster: Cluster, application: Application, tree: Path | None, *nodes: int) -> None:
    """Let nodes end and come back as that version, one after the other."""
    for node in map(cluster.nodes.__getitem__, nodes):
        assert node.terminate(90) == 0
        start(node, tree)
        acked, committed = len(application.acked_at), application.committed
        wait_until(lambda n=acked: len(application.acked_at) > n + 20, 60, "more records")
        wait_until(lambda n=committed: application.committed > n + 1, 60, "more commits")
        wait_until(lambda: is_whole(cluster), 60, "the returned node is caught up")


def features(cluster: Cluster, *words: str) -> tuple[int, str]:
    """`raftmq cluster features`: exit code, and what it said."""
    done = cluster.run("cluster", "features", "--json", *words)
    return done.returncode, done.stdout + done.stderr


def test_an_upgrade_node_by_node_and_back_and_forward_again(older: Path, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, settings=PATIENT)
    try:
        for node in cluster.nodes.values():
            start_only(node, older)
        for node in cluster.nodes.values():
            node.wait_ready()
        create_topic(cluster.bootstrap, TOPIC, PARTITIONS, min_insync_replicas="2")
        application = Application(cluster.bootstrap, PARTITIONS, rate=RATE)
        application.begin()
        try:
            wait_until(lambda: application.committed > 2, 60, "the group commits")
            upgrade(cluster, application, older)
            told_off(cluster[3], older)
            turned_away(cluster, older)
        finally:
            application.end()
        assert application.errors == []
        assert application.lost == 0
    finally:
        cluster.stop()


def upgrade(cluster: Cluster, application: Application, older: Path) -> None:
    """Forward, where the level cannot be raised too early; back; forward, and raise it."""
    assert cluster[1].terminate(90) == 0
    start(cluster[1], None)
    code, told = features(cluster, "--raise", f"{LEVEL}=2")
    assert code == 1, told
    assert "upgrade all nodes first" in told or "supports 1 to 1" in told
    roll(cluster, application, None, 2, 3)
    roll(cluster, application, older, 1, 2, 3)
    roll(cluster, application, None, 1, 2, 3)
    for level in range(2, NEWEST + 1):
        code, told = features(cluster, "--raise", f"{LEVEL}={level}")
        assert code == 0, told
        levels = {row["Feature"]: row["Level"] for row in json.loads(told)["Features"]}
        assert levels == {LEVEL: level, "transaction.version": 0}
    assert json.loads(told)["Epoch"] > 0


def told_off(node: Node, older: Path) -> None:
    """An older node does not go on in this cluster, and says why."""
    assert node.terminate(90) == 0
    tries(node, older, "the journal has format 2, known is 1")
    start(node, None)


def turned_away(cluster: Cluster, older: Path) -> None:
    """One that never was of this cluster is turned away at the door."""
    node = Node(cluster, 4, "127.0.0.1", cluster.folder / "data-4", None)
    said = tries(node, older, "start a newer raftmq")
    assert f"({LEVEL} is {NEWEST})" in said
    assert "format 5 at node 4" in said
    told = "".join(cluster[n].log_path.read_text() for n in (1, 2, 3))
    assert "refused a peer" in told
    assert "start a newer raftmq on node 4" in told


def tries(node: Node, older: Path, word: str) -> str:
    """What an older node says until it knows that its version is too old."""
    size = node.log_path.stat().st_size if node.log_path.exists() else 0
    start_only(node, older)
    try:
        wait_until(lambda: word in node.log_path.read_text()[size:], 60, "a word")
    finally:
        node.kill()
    said = node.log_path.read_text()[size:]
    assert '"event": "ready"' not in said
    return said
