"""Start time is a budget: what a node must not have imported when it is ready."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jepsen_like.live.cluster import free_ports

pytestmark = [pytest.mark.live, pytest.mark.slow]

FORBIDDEN = {"typer", "rich", "starlette", "hypercorn", "pyarrow", "pyspark", "pysyncobj"}
NODE = """
import json, os, sys
from raftmq.config import load_config
from raftmq.node import run_node

def ready():
    print(json.dumps(sorted(sys.modules)), flush=True)
    os._exit(0)

sys.exit(run_node(load_config(sys.stdin.read()), listeners=None, on_ready=ready))
"""


def run_node(code: str, config: str) -> subprocess.CompletedProcess[str]:
    """What a node of this configuration prints until it is ready, or why it cannot start."""
    return subprocess.run(
        [sys.executable, "-c", code],
        input=config,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_ready_node_has_not_imported_what_it_does_not_need(tmp_path: Path) -> None:
    client, peer, admin = free_ports(3)
    config = f"""
        node_id = 1
        data = "{tmp_path / "data"}"
        client_listener = "127.0.0.1:{client}"
        peer_listener = "127.0.0.1:{peer}"
        admin_listener = "127.0.0.1:{admin}"
    """
    done = run_node(NODE, config)
    assert done.returncode == 0, done.stderr
    modules = {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    assert not modules & FORBIDDEN


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            'defaults = {"num.partitions" = "many"}',
            "key 'defaults': Invalid value many for configuration num.partitions",
        ),
        ('defaults = {"bogus" = "1"}', "key 'defaults': Unknown broker config name: bogus"),
        ('metadata_engine = "pysyncobj"', "key 'metadata_engine': pysyncobj is not installed"),
        (
            'metadata_engine = "pysyncobj"\npeers = [{id = 2, host = "127.0.0.1", port = 1}]',
            "every node must be in 'peers'",
        ),
    ],
)
def test_what_a_node_cannot_use_is_told_in_one_line(tmp_path: Path, lines: str, says: str) -> None:
    config = f"""
        node_id = 1
        data = "{tmp_path / "data"}"
        client_listener = "127.0.0.1:0"
        peer_listener = "127.0.0.1:0"
        admin_listener = "127.0.0.1:0"
        {lines}
    """
    without = "import sys; sys.modules['pysyncobj'] = None" if "not installed" in says else ""
    done = run_node(f"{without}\n{NODE}", config)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot start" in done.stderr
    assert says in done.stderr
