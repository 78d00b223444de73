"""What a node may not have imported when it is ready, and what the client may never import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jepsen_like.live.cluster import free_ports

HEAVY = {"typer", "rich", "click", "starlette", "hypercorn", "prometheus_client"} | {
    "pyarrow",
    "pyspark",
    "hypothesis",
}
BROKER = {
    "cli",
    "controller",
    "groups",
    "log",
    "metadata",
    "node",
    "partition",
    "raft",
    "replication",
    "runtime",
    "server",
    "tools",
}

AT_READY = """
import json, os, sys
from pathlib import Path
from raftmq.cli import main, start
from raftmq.config import load_config

def tell():
    Path(sys.argv[2]).write_text(json.dumps(sorted(sys.modules)))
    os.kill(os.getpid(), 15)

config = load_config(Path(sys.argv[1]).read_text())
sys.exit(start.run(config, on_ready=tell))
"""


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.live
def test_a_node_is_ready_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    client, peer, admin = free_ports(3)
    config = tmp_path / "node.toml"
    config.write_text(
        f'node_id = 1\ndata = "{tmp_path}/data"\nclient_listener = "127.0.0.1:{client}"\n'
        f'peer_listener = "127.0.0.1:{peer}"\nadmin_listener = "127.0.0.1:{admin}"\n'
    )
    modules = tmp_path / "modules.json"
    run(AT_READY, str(config), str(modules))
    loaded = {name.split(".")[0] for name in json.loads(modules.read_text())}
    assert not loaded & HEAVY


def test_dev_imports_nothing_heavy_before_it_forks() -> None:
    code = (
        "import json, sys, raftmq.cli.main, raftmq.cli.dev, raftmq.node\n"
        "from raftmq.server.kafka.dispatch import warm_up\n"
        "warm_up()\n"
    )
    loaded = json.loads(run(code + "print(json.dumps(sorted(sys.modules)))"))
    assert not {name.split(".")[0] for name in loaded} & HEAVY


def test_the_client_imports_nothing_of_the_broker() -> None:
    code = "import json, sys, raftmq_client; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(run(code))
    assert "raftmq.protocol" in loaded
    assert not [
        name
        for name in loaded
        if name.split(".")[:2][-1] in BROKER and "." in name and name.startswith("raftmq.")
    ]
    assert "trio" not in loaded
