"""`raftmq dev --secure`: what it prints works as it stands, and strangers stay out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raftmq.runtime.throw_away import ADMIN, USER, ThrowAwaySecurity
from raftmq_client import AuthenticationError, ClientError
from raftmq_client.blocking import Admin
from raftmq_client.security_file import read_security_file
from tests.cli.test_live_cli import Dev
from tests.live.harness import RAFTMQ, need, run_command

pytestmark = [pytest.mark.live, pytest.mark.slow]


def printed(dev: Dev) -> str:
    """What stands on standard error until now; the cluster goes on."""
    assert dev.process is not None
    assert dev.process.stderr is not None
    lines = [dev.process.stderr.readline()]
    while "Ctrl-C ends" not in lines[-1]:
        lines.append(dev.process.stderr.readline())
        assert lines[-1], f"it ended: {''.join(lines)}"
    return "".join(lines)


def test_what_it_prints_works_as_it_stands(tmp_path: Path) -> None:
    need("kcat")
    path = f"{Path(RAFTMQ).parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAFTMQ_")}
    with Dev(tmp_path / "a cluster", "--secure", nodes=3) as dev:
        told = printed(dev)
        export, *commands = re.findall(r"^  ((?:export|raftmq|kcat|python3) .*)$", told, re.M)
        assert len(commands) >= 9
        said = {}
        for command in commands:
            done = subprocess.run(
                ["bash", "-c", f"{export}\n{command}"],
                env={**environment, "PATH": path},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            is_refused = "# refused" in command
            assert (done.returncode != 0) == is_refused, f"{command}: {done.stderr}"
            said[command.partition(" -")[0]] = done.stdout + done.stderr
        assert "hello" in said["raftmq consume orders"]
        assert "TOPIC_AUTHORIZATION_FAILED" in said["raftmq topic delete orders"]
        assert '"orders"' in said["kcat"]
        assert "['orders']" in said["python3"]

        security = ThrowAwaySecurity.of(dev.folder / "security")
        assert security is not None
        words = [security.password(ADMIN), security.password(USER), security.admin_token]
        logs = "".join(log.read_text() for log in dev.folder.glob("node-*.log"))
        for word in words:
            assert len(word) > 20
            assert word not in told + logs + (dev.folder / "cluster.json").read_text()
            for process in Path("/proc").glob("[0-9]*/cmdline"):
                assert word.encode() not in _read(process)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it ended


def test_it_stays_secured_and_lets_the_same_users_in(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with Dev(folder, "--secure") as dev:
        printed(dev)
        file = str(folder / "security" / "admin.toml")
        done = run_command(("topic", "create", "kept"), timeout_s=60, RAFTMQ_SECURITY=file)
        assert done.returncode == 0, done.stderr
    with Dev(folder) as dev:  # without --secure
        alice = read_security_file(folder / "security" / f"{USER}.toml")
        with Admin(alice.bootstrap, security=alice.access.security()) as admin:
            assert [topic.name for topic in admin.cluster().topics] == ["kept"]
        with Admin(dev.bootstrap, timeout_ms=2_000) as admin, pytest.raises(ClientError):
            admin.cluster()
        tls = alice.access.tls
        assert tls is not None
        with (
            Admin(dev.bootstrap, security=tls.context(), timeout_ms=2_000) as admin,
            pytest.raises(ClientError) as caught,
        ):
            admin.cluster()
        assert not isinstance(caught.value, AuthenticationError)
        refused = run_command(("node", "cordon", "1"), timeout_s=60, RAFTMQ_SECURITY=str(file))
        assert refused.returncode == 0, refused.stderr  # the admin's file has the token
        mine = str(folder / "security" / f"{USER}.toml")
        refused = run_command(("node", "cordon", "1"), timeout_s=60, RAFTMQ_SECURITY=mine)
        assert refused.returncode == 1
