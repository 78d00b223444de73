"""The notebook-style example runs as it stands: records, Parquet, a query, a picture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raftmq_spark.errors import MissingPrerequisiteError
from raftmq_spark.session import check_prerequisites
from tests.live.harness import Cluster, lack
from tests.tree import PYTHONPATH, ROOT

pytestmark = [pytest.mark.spark, pytest.mark.live, pytest.mark.slow]
EXAMPLE = str(ROOT / "examples" / "export_and_plot.py")
PNG = b"\x89PNG\r\n\x1a\n"


def test_from_records_to_a_picture(shared_cluster: Cluster, tmp_path: Path) -> None:
    try:
        check_prerequisites()
    except MissingPrerequisiteError as missing:
        lack(str(missing))
    pytest.importorskip("matplotlib")
    done = subprocess.run(
        [sys.executable, EXAMPLE, shared_cluster.bootstrap, str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": PYTHONPATH,
            "MPLCONFIGDIR": str(tmp_path / "mpl"),
            "MPLBACKEND": "Agg",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "new rows: 20000" in done.stdout
    assert "days: 2026-03-02, 2026-03-03," in done.stdout
    assert "orders: 20000" in done.stdout
    picture = (tmp_path / "orders.png").read_bytes()
    assert picture.startswith(PNG)
    assert len(picture) > 10_000
