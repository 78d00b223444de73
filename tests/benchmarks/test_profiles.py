"""The configuration files of docs/tuning.md are ones that a node starts with."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

import attrs
import pytest

from jepsen_like.live.cluster import free_ports
from raftmq.config import NodeConfig, load_config
from raftmq.metadata.configs import check_static_configs
from tests.live.harness import wait_until

ROOT = Path(__file__).parents[2]
PROFILES = sorted((ROOT / "docs" / "profiles").glob("*.toml"))
IDENTITY = {"node_id", "cluster_id", "data", "client_listener", "peer_listener", "admin_listener"}
profile = pytest.mark.parametrize("file", PROFILES, ids=lambda path: path.stem)


def test_there_is_one_for_latency_and_one_for_throughput() -> None:
    assert [path.stem for path in PROFILES] == ["low-latency", "throughput"]


@profile
def test_a_profile_changes_something_and_the_guide_explains_each_key(file: Path) -> None:
    config = load_config(file.read_text())
    check_static_configs(config.defaults)
    plain = NodeConfig(node_id=config.node_id, data=config.data)
    changed = {
        attribute.name
        for attribute in attrs.fields(NodeConfig)
        if getattr(config, attribute.name) != getattr(plain, attribute.name)
    } - IDENTITY
    assert changed
    guide = (ROOT / "docs" / "tuning.md").read_text()
    for key in (changed - {"defaults"}) | set(config.defaults):
        assert f"`{key}`" in guide, f"docs/tuning.md does not say what {key} does"


@pytest.mark.live
@pytest.mark.slow
@profile
def test_a_node_starts_with_a_profile(file: Path, tmp_path: Path) -> None:
    client, peer, admin = free_ports(3)
    command = [str(Path(sys.executable).parent / "raftmq"), "start", "--config", str(file)]
    command += ["--data", str(tmp_path / "data"), "--formation-wait-ms", "0"]
    for name, port in (("client", client), ("peer", peer), ("admin", admin)):
        command += [f"--{name}-listener", f"127.0.0.1:{port}"]
    with (tmp_path / "log").open("wb") as log:
        node = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:

        def is_healthy() -> bool:
            assert node.poll() is None, (tmp_path / "log").read_text()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{admin}/health", timeout=2) as told:
                    return bool(told.status == 200)
            except OSError:
                return False

        wait_until(is_healthy, 60, "health")
    finally:
        node.terminate()
        assert node.wait(20) == 0
