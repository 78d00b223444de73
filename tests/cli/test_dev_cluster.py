"""The folder of a local cluster: laid out once, found again, refused when it does not fit."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from jepsen_like.live.cluster import free_ports
from raftmq.cli.demo import demo
from raftmq.cli.dev import dev
from raftmq.cli.dev_cluster import (
    DevCluster,
    DevError,
    find_cluster,
    is_dev_node,
    is_healthy,
    read_cluster_file,
    read_node_file,
    record_pid,
)
from raftmq.cli.start import start


def plan(folder: Path, nodes: int = 3, port: int = 19_092) -> DevCluster:
    return DevCluster.plan(folder, nodes=nodes, port=port)


def test_a_new_cluster_is_laid_out(tmp_path: Path) -> None:
    cluster = plan(tmp_path / "c", nodes=5)
    assert cluster.bootstrap == ",".join(f"127.0.0.1:{19_092 + i}" for i in range(5))
    configs = [cluster.config(node) for node in cluster.nodes]
    assert [config.node_id for config in configs] == [1, 2, 3, 4, 5]
    assert [peer.id for peer in configs[4].peers] == [1, 2, 3], "three voters, two observers"
    ports = {p for c in configs for p in (c.peer_listener.port, c.admin_listener.port)}
    assert len(ports) == 10
    assert len({str(config.data) for config in configs}) == 5


def test_a_folder_that_holds_a_cluster_keeps_its_ports_and_data(tmp_path: Path) -> None:
    first = plan(tmp_path)
    first.write_file()
    again = plan(tmp_path, port=29_092)
    for old, new in zip(first.nodes, again.nodes, strict=True):
        assert (old.plan.peer_port, old.plan.data) == (new.plan.peer_port, new.plan.data)
        assert new.plan.port == old.plan.port + 10_000
    with pytest.raises(DevError, match="holds a cluster of 3 nodes, not 1"):
        plan(tmp_path, nodes=1)


def test_a_pid_is_recorded_by_node(tmp_path: Path) -> None:
    with pytest.raises(DevError, match="holds no cluster"):
        record_pid(tmp_path, 1, 1)
    plan(tmp_path).write_file()
    record_pid(tmp_path, 2, 4_321)
    content = read_cluster_file(tmp_path)
    assert content is not None
    assert [node["pid"] for node in content["nodes"]] == [0, 4_321, 0]
    with pytest.raises(DevError, match=r"no node 9 .* it has 1, 2, 3"):
        record_pid(tmp_path, 9, 1)
    with pytest.raises(DevError, match="no node 9"):
        read_node_file(tmp_path, 9)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"nodes": []}', '{"nodes": [{}]}'])
def test_a_strange_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.json").write_text(text)
    with pytest.raises(DevError, match=r"cluster\.json"):
        read_cluster_file(tmp_path)


def test_nodes_take_no_variables_that_would_make_them_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAFTMQ_NODE_ID", "7")
    cluster = plan(tmp_path)
    assert [cluster.config(node).node_id for node in cluster.nodes] == [1, 2, 3]


def test_health_of_nobody_is_bad() -> None:
    (port,) = free_ports(1)
    assert not is_healthy(port)


def test_a_foreign_process_is_no_node() -> None:
    assert not is_dev_node(os.getpid(), 1)
    assert not is_dev_node(2**22 + 1, 1)


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", "2"],
        ["--node", "1"],
        ["--set", "novalue"],
        ["--frobnicate"],
        ["--port", "99999"],
        ["--port", "-1"],
        ["--set", "node_id=7"],
    ],
    ids=" ".join,
)
def test_wrong_words_are_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        dev(words)
    assert caught.value.code == 2
    assert "usage: raftmq dev" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--records", "0"], "--records: '0' is not a number from 1"),
        (["--records", "some"], "--records: 'some' is not a number from 1"),
        (["--port", "70000"], "--port: '70000' is not a number from 1 to 65535"),
    ],
)
def test_a_demo_of_nothing_is_usage(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        demo(words)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_one_is_told(
    tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / folder
    assert dev(["--data", str(path)]) == 1
    assert f"raftmq dev: {path}" in (told := capsys.readouterr().err)
    assert "Not a directory" in told


def test_an_unknown_key_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    code = dev(["--data", str(tmp_path), "--set", "log_levl=debug", "--port", "19092"])
    assert code == 2
    assert "did you mean 'log_level'" in capsys.readouterr().err
    assert read_cluster_file(tmp_path) is None
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node_id = 1\n", "'data' is missing"),
        ("x = 1\n", "unknown key 'x'"),
        (None, "No such file"),
    ],
)
def test_start_refuses_a_bad_configuration_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, says: str
) -> None:
    file = tmp_path / "node.toml"
    if text is not None:
        file.write_text(text)
    assert start(["--config", str(file)]) == 2
    assert says in capsys.readouterr().err


HALF_FILES = ["", "\0" * 700, '{"bootstrap": "127.0.0.1:19', "[]"]


def serve_once(folder: Path, nodes: int = 3) -> DevCluster:
    """A cluster whose nodes have taken their folders."""
    cluster = plan(folder, nodes)
    cluster.write_file()
    for node in cluster.nodes:
        Path(node.plan.data).mkdir()
        (Path(node.plan.data) / "node.json").write_text("{}")
    return cluster


@pytest.mark.parametrize("text", HALF_FILES)
def test_a_damaged_cluster_file_is_written_anew(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What power loss makes of a file that was not synced."""
    before = serve_once(tmp_path, nodes=5)
    content = read_cluster_file(tmp_path)
    (tmp_path / "cluster.json").write_text(text)
    assert find_cluster(tmp_path) == content == read_cluster_file(tmp_path)
    assert "was damaged; written anew for the 5 nodes" in capsys.readouterr().err
    assert [n.plan for n in plan(tmp_path, nodes=5).nodes] == [n.plan for n in before.nodes]


@pytest.mark.parametrize("text", HALF_FILES)
def test_the_nodes_data_tells_what_no_other_file_does(tmp_path: Path, text: str) -> None:
    before = serve_once(tmp_path)
    for path in [tmp_path / "cluster.json", *tmp_path.glob("node-*.toml")]:
        path.write_text(text)
    again = plan(tmp_path, port=before.nodes[0].plan.port)
    assert [n.plan.data for n in again.nodes] == [n.plan.data for n in before.nodes]
    assert [again.config(n).node_id for n in again.nodes] == [1, 2, 3]


def test_one_lost_node_file_costs_one_node_its_ports(tmp_path: Path) -> None:
    before = serve_once(tmp_path)
    (tmp_path / "cluster.json").write_text("")
    (tmp_path / "node-2.toml").write_text("")
    again = plan(tmp_path)
    kept = [n.plan for n in before.nodes if n.plan.id != 2]
    assert [n.plan for n in again.nodes if n.plan.id != 2] == kept
    assert again.nodes[1].plan.data == before.nodes[1].plan.data


def test_a_node_alone_says_how_its_empty_file_comes_back(tmp_path: Path) -> None:
    serve_once(tmp_path)
    (tmp_path / "node-2.toml").write_text("")
    with pytest.raises(DevError, match=r"node-2\.toml is empty.*raftmq dev --data"):
        read_node_file(tmp_path, 2)


def test_an_attempt_that_never_served_leaves_no_nodes_behind(tmp_path: Path) -> None:
    plan(tmp_path, nodes=5)
    serve_once(tmp_path)
    (tmp_path / "cluster.json").write_text("")
    found = find_cluster(tmp_path)
    assert found is not None
    assert [node["id"] for node in found["nodes"]] == [1, 2, 3]


@pytest.mark.parametrize(
    ("code", "is_hopeless"), [(0, False), (1, False), (2, True), (4, True)], ids=str
)
def test_a_node_that_would_end_in_the_same_way_is_hopeless(
    tmp_path: Path, code: int, is_hopeless: bool
) -> None:
    """It is not started again: `--restart` would do so for ever."""
    cluster = plan(tmp_path, nodes=1)
    [node] = cluster.nodes
    words = [sys.executable, "-S", "-c", f"raise SystemExit({code})"]
    node.pid = os.posix_spawn(sys.executable, words, os.environ)
    while not cluster.reap():
        os.sched_yield()
    assert node.ended == f"ended with status {code}"
    assert node.is_hopeless is is_hopeless
