"""The layout is the architecture: import contracts, strict types and style, checked as tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_imports_point_down() -> None:
    run(str(BIN / "lint-imports"), "--no-cache")


@pytest.mark.slow
def test_types_are_strict() -> None:
    run(str(BIN / "mypy"))


@pytest.mark.slow
def test_style() -> None:
    run(str(BIN / "ruff"), "check", "--no-cache", ".")
    run(str(BIN / "ruff"), "format", "--no-cache", "--check", ".")
