"""Processes of a peer: who they share the cores with, and whose signals they get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.peers import _end, _spawn


def test_peers_share_the_session_and_not_the_process_group(tmp_path: Path) -> None:
    """A session is a share of the cores (autogroup); a group is who Ctrl-C is for."""
    process = _spawn(["sleep", "60"], tmp_path / "out")
    try:
        assert os.getsid(process.pid) == os.getsid(0)
        assert os.getpgid(process.pid) == process.pid
    finally:
        _end([process])


@pytest.mark.parametrize("variable", ["one", ""])
def test_the_environment_of_a_peer(tmp_path: Path, variable: str) -> None:
    output = tmp_path / "out"
    process = _spawn(["printenv", "RAFTMQ_PEER"], output, {"RAFTMQ_PEER": variable})
    assert process.wait(10) == 0
    assert output.read_text() == f"{variable}\n"
