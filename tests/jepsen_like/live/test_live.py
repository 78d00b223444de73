"""The live command on a real cluster: a short run by default, everything when asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jepsen_like.live.clocks import library
from jepsen_like.live.nemeses import NEMESES, OWN_DISKS
from jepsen_like.live.storage import LackError, PlainDisk, best_disk

pytestmark = [pytest.mark.live, pytest.mark.slow]


def run_live(out: Path, *words: str, timeout_s: float) -> dict[str, Any]:
    """A run that must be clean; its report."""
    done = subprocess.run(
        [sys.executable, "-m", "jepsen_like", "live", "--out", str(out), *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "CI": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "records acknowledged" in done.stdout.strip().splitlines()[-1]
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    assert report["verdict"] == "clean"
    assert "<svg" in (out / "report.html").read_text()
    return report


def test_kills_and_pauses_behind_the_proxy(tmp_path: Path) -> None:
    report = run_live(
        tmp_path / "out",
        *("--minutes", "0.3", "--nodes", "3", "--links", "proxy", "--seed", "1"),
        *("--nemesis", "kill-one,pause", "--workload", "append,poll,group"),
        timeout_s=170,
    )
    (round_,) = report["rounds"]
    assert report["acked_records"] > 500
    assert set(report["faults"]) <= {"kill-one", "pause"}
    assert round_["faults"]
    assert 500 < sum(round_["acked_by_second"]) <= report["acked_records"]
    history = tmp_path / "out" / "round-01-3-nodes" / "history.jsonl.zst"
    assert history.stat().st_size > 0
    assert not list(history.parent.glob("disk-*")), "a clean round leaves no data"


@pytest.mark.soak
@pytest.mark.root
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("nodes", ["3", "5"])
@pytest.mark.parametrize("links", ["proxy", "namespaces"])
def test_every_nemesis(tmp_path: Path, nodes: str, links: str) -> None:
    report = run_live(
        tmp_path / "out",
        *("--minutes", "6", "--nodes", nodes, "--links", links),
        timeout_s=1100,
    )
    possible = {n.name for n in NEMESES.values() if links == "proxy" or not n.needs_proxy}
    assert set(report["faults"]) == possible - set(report["rounds"][0]["lacks"])


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("plant", "found_by"),
    [
        ("reads-uncommitted", {"committed-aborted-read", "early-read"}),
        ("left-open", {"hanging-transaction"}),
    ],
)
def test_what_is_planted_in_transactions_is_found(
    tmp_path: Path, plant: str, found_by: set[str]
) -> None:
    out = tmp_path / "out"
    words = [
        "--minutes",
        "0.7",
        "--nodes",
        "3",
        "--links",
        "proxy",
        "--seed",
        "1",
        "--plant",
        plant,
    ]
    words += ["--nemesis", "kill-one", "--workload", "transactions", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "jepsen_like", "live", *words],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "CI": ""},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (round_,) = json.loads((out / "report.json").read_text())["rounds"]
    assert {finding["name"] for finding in round_["findings"]} & found_by, done.stdout
    assert round_["transactions"]["ok"] > 10


def test_ci_has_what_the_nemeses_need(tmp_path: Path) -> None:
    """What is missing is skipped elsewhere; here it fails, so that nothing is left out silently."""
    if not os.environ.get("CI"):
        pytest.skip("only CI must have everything")
    assert library() is not None, "needs the package faketime"
    if os.geteuid() == 0:
        disk = best_disk(tmp_path / "disk")
        try:
            assert not isinstance(disk, PlainDisk), f"no disk for {sorted(OWN_DISKS)}"
        finally:
            disk.close()


def test_a_plain_folder_is_no_disk_of_ones_own(tmp_path: Path) -> None:
    with pytest.raises(LackError, match="shared with others"):
        PlainDisk(tmp_path / "disk").fill()
