"""Start time is a budget: what a node must not have imported when it is ready."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live.harness import free_ports

pytestmark = [pytest.mark.live, pytest.mark.slow]

FORBIDDEN = {"typer", "rich", "starlette", "hypercorn", "pyarrow", "pyspark", "pysyncobj"}
NODE = """
import json, os, sys
from raftmq.config import load_config
from raftmq.node import run_node

def ready():
    print(json.dumps(sorted(sys.modules)), flush=True)
    os._exit(0)

sys.exit(run_node(load_config(sys.stdin.read()), on_ready=ready))
"""


def test_a_ready_node_has_not_imported_what_it_does_not_need(tmp_path: Path) -> None:
    client, peer, admin = free_ports(3)
    config = f"""
        node_id = 1
        data = "{tmp_path / "data"}"
        client_listener = "127.0.0.1:{client}"
        peer_listener = "127.0.0.1:{peer}"
        admin_listener = "127.0.0.1:{admin}"
    """
    done = subprocess.run(
        [sys.executable, "-c", NODE],
        input=config,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    modules = {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    assert not modules & FORBIDDEN
