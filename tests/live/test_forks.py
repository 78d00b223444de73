"""What is forked for live tests behaves as a process that was started, and is never left over."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import forks
from tests.live.forks import Parent, run_command
from tests.live.harness import wait_until

pytestmark = [pytest.mark.live, pytest.mark.slow]

NOBODY = ["-b", "127.0.0.1:1"]
ENDLESS = ["topic", "list", *NOBODY, "--timeout", "600"]


@pytest.fixture
def parent() -> Iterator[Parent]:
    made = Parent("commands")
    yield made
    made.close()


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_words_output_and_exit_codes() -> None:
    done = run_command(["--version"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("raftmq ")
    assert run_command(["no-such-command"]).returncode == 2
    failed = run_command(["topic", "list", "--timeout", "0.1"], RAFTMQ_BOOTSTRAP="127.0.0.1:1")
    assert failed.returncode == 1
    assert "127.0.0.1:1" in failed.stderr


def test_one_that_runs_on_can_be_killed(parent: Parent, tmp_path: Path) -> None:
    output = tmp_path / "output"
    child = parent.start(ENDLESS, [Path(os.devnull), output, output], os.environ)
    assert child.poll() is None
    with pytest.raises(TimeoutError):
        child.wait(0.05)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(60) == -signal.SIGKILL
    assert child.poll() == -signal.SIGKILL


def test_an_answer_that_nobody_took_ends_everything(
    parent: Parent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "output"
    child = parent.start(ENDLESS, [Path(os.devnull), output, output], os.environ)

    def late(_text: bytes) -> None:
        raise TimeoutError("the test's time is up")

    with monkeypatch.context() as patch:
        patch.setattr(forks.json, "loads", late)
        with pytest.raises(TimeoutError):
            child.poll()
    assert child.poll() == -signal.SIGKILL
    wait_until(lambda: not is_there(child.pid), what="it died with its parent")
