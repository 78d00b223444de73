"""What users install: the wheel's top-level names, and a smoke test from it alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMOKE = (
    "import raftmq, raftmq_client, sys;"
    "from raftmq.records import NewRecord, build_batch, check_batch;"
    "check_batch(build_batch([NewRecord(None, b'v')]));"
    "assert 'site-packages' in raftmq.__file__, raftmq.__file__"
)


def find_uv() -> str:
    """uv runs the tests; its own command line names itself in UV."""
    found = os.environ.get("UV") or shutil.which("uv")
    if not found:
        if os.environ.get("CI"):
            pytest.fail("uv is missing, so the wheel cannot be built")
        pytest.skip("needs uv")
    return found


@pytest.mark.slow
def test_wheel(tmp_path: Path) -> None:
    uv = find_uv()
    subprocess.run([uv, "build", "--wheel", "--out-dir", str(tmp_path), "-q"], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    packages = {name for name in names if not name.endswith(".dist-info")}
    assert packages == {
        "raftmq",
        "raftmq_client",
        "raftmq_spark",
        "pyspark_raftmq",
        "jepsen_like",
    }
    assert "raftmq/py.typed" in zipfile.ZipFile(wheel).namelist()

    environment = tmp_path / "env"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(environment)], check=True)
    python = str(environment / "bin" / "python")
    subprocess.run([uv, "pip", "install", "-q", "--python", python, str(wheel)], check=True)
    subprocess.run([python, "-c", SMOKE], cwd=tmp_path, check=True)
    told = subprocess.run(
        [str(environment / "bin" / "raftmq"), "--help"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "produce" in told.stdout
