"""The token of an admin port, and the command line that knows it or does not."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.live.harness import Cluster, run_command

pytestmark = [pytest.mark.live, pytest.mark.slow]

TOKEN = "a-token-of-the-operators"


def test_what_changes_something_wants_the_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    words = ("node", "cordon", "2", "--bootstrap")
    with Cluster(tmp_path, 2, voters=2, settings={"admin_token_file": str(path)}) as cluster:
        place = cluster.bootstrap
        refused = run_command((*words, place), timeout_s=60)
        assert refused.returncode == 1
        assert "this port wants the token" in refused.stderr
        assert "RAFTMQ_ADMIN_TOKEN_FILE, names a file" in refused.stderr
        wrong = run_command((*words, place), timeout_s=60, RAFTMQ_ADMIN_TOKEN="x" * 20)
        assert "no token of this port" in wrong.stderr
        states = {row["node_id"]: row["state"] for row in cluster[1].get("/status")["brokers"]}
        assert states[2] == "active"
        done = run_command((*words, place), timeout_s=60, RAFTMQ_ADMIN_TOKEN_FILE=str(path))
        assert done.returncode == 0, done.stderr
        states = {row["node_id"]: row["state"] for row in cluster[1].get("/status")["brokers"]}
        assert states[2] == "cordoned"
        url = f"http://{cluster[1].host}:{cluster[1].admin_port}/status"
        foreign = urllib.request.Request(url, headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(foreign, timeout=10)
        with caught.value as error:
            assert "Host is no number" in json.loads(error.read())["error"]
        assert TOKEN not in "".join(node.log_path.read_text() for node in cluster.nodes.values())
