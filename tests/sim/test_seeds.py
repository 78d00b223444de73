"""Whole nodes in simulation: three hundred seeds are clean and busy.

In parts, so that they spread over the processes of a run of all tests. What holds of all of them
together is judged where the last part ends, from what each has left in a folder that is common.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jepsen_like.__main__ import UNKNOWN_SHARE_MAX
from jepsen_like.cluster.faults import EFFECTS
from jepsen_like.cluster.options import DEFAULT_WEIGHTS
from jepsen_like.cluster.run import ClusterResult, Verdict
from jepsen_like.pool import run_chosen

SEEDS = 300
"""Three minutes of two cores where one does 25,000 events a second."""
PART = 15
JOBS = 2
"""Live tests wait most of the time: their core is used, too. These come behind all others."""
ONLY = os.environ.get("RAFTMQ_SEED")
PARTS = (
    [range(int(ONLY), int(ONLY) + 1)]
    if ONLY
    else [range(first, first + PART) for first in range(1, SEEDS + 1, PART)]
)
WANTED = {
    "wipes": 20,
    "rots": 20,
    "stale_sectors": 3,
    "journals": 8,
    "replacements": 8,
    "log_starts": 20,
    "truncations": 20,
    "malformed": 20,
}
"""So often at least, in all seeds together."""
EFFECTS_MIN = 2
"""So often each fault strikes at least, and each effect of faults is there."""


def common_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run of pytest have."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "seeds"
    folder.mkdir(exist_ok=True)
    return folder


def leave(folder: Path, seeds: range, results: list[ClusterResult]) -> None:
    """Write what came of a part, at once or not at all."""
    told = {name: sum(getattr(r.counts, name) for r in results) for name in WANTED}
    told["unknown"] = sum(r.verdict is Verdict.UNKNOWN for r in results)
    for name in (*DEFAULT_WEIGHTS, "rot-journal", "crash-voter"):
        told[f"fault {name}"] = sum(r.counts.faults.get(name, 0) for r in results)
    for name in EFFECTS:
        told[f"effect {name}"] = sum(r.counts.effects.get(name, 0) for r in results)
    unfinished = folder / f"{seeds.start}.unfinished"
    unfinished.write_text(json.dumps(told))
    unfinished.rename(folder / f"{seeds.start}.json")


def judge_all(folder: Path) -> None:
    """What holds of all seeds together, once there are all."""
    files = sorted(folder.glob("*.json"))
    if len(files) < len(PARTS):
        return
    parts = [json.loads(file.read_text()) for file in files]
    whole = {name: sum(part[name] for part in parts) for name in parts[0]}
    assert whole["unknown"] <= UNKNOWN_SHARE_MAX * SEEDS, f"too idle: {whole}"
    assert all(whole[name] >= least for name, least in WANTED.items()), whole
    strikes = {name: count for name, count in whole.items() if name.startswith(("fault", "effect"))}
    rare = {name: count for name, count in strikes.items() if count < EFFECTS_MIN}
    assert not rare, f"too rare in {SEEDS} seeds: {rare}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", PARTS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_seeds_are_clean_and_busy(seeds: range, tmp_path_factory: pytest.TempPathFactory) -> None:
    results = list(run_chosen(seeds, JOBS))
    for result in results:
        assert result.verdict is not Verdict.ANOMALY, (
            f"seed {result.seed}: {result.name}: {result.detail}\n"
            f"again: python -m jepsen_like sim --seeds 1 --seed {result.seed}"
        )
    if not ONLY:
        folder = common_folder(tmp_path_factory)
        leave(folder, seeds, results)
        judge_all(folder)
