"""What is left of a failed run: one folder with all that is needed to see it and to run it again.

`run.json` holds the seed and the faults that are enough for the failure, `why.txt` the finding and
the command, `trace.txt` the last events, `history.jsonl.zst` what clients saw. `minimise` leaves
out faults as long as the same finding comes; each try is a whole run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import msgspec

from jepsen_like.cluster.run import ClusterResult, Verdict, run_cluster_seed
from jepsen_like.cluster.world import Fault
from jepsen_like.history_events import write_history

TRIES_MAX = 40


class Strike(msgspec.Struct, frozen=True):
    """A fault, as written down."""

    at_ms: float
    name: str
    draw: int


class RunFile(msgspec.Struct, frozen=True):
    """Contents of `run.json`."""

    seed: int
    finding: str
    trace_hash: str
    faults: tuple[Strike, ...]
    faults_drawn: int


def minimise(
    result: ClusterResult,
    run: Callable[[Sequence[Fault]], ClusterResult],
    tries_max: int = TRIES_MAX,
) -> ClusterResult:
    """The same finding with fewer faults, where that is possible; `run` repeats the seed."""
    best = result
    chunk = max(1, len(best.faults) // 2)
    tries = 0
    while tries < tries_max:
        start = 0
        has_shrunk = False
        while start < len(best.faults) and tries < tries_max:
            kept = [*best.faults[:start], *best.faults[start + chunk :]]
            tries += 1
            shorter = run(kept)
            if shorter.verdict is Verdict.ANOMALY and shorter.name == result.name:
                best, has_shrunk = shorter, True
            else:
                start += chunk
        if chunk == 1 and not has_shrunk:
            break
        chunk = max(1, chunk // 2)
    return best


def write_failure(result: ClusterResult, root: Path, *, tries_max: int = TRIES_MAX) -> Path:
    """Write the folder of a run that is not clean; returns it."""
    folder = root / str(result.seed)
    folder.mkdir(parents=True, exist_ok=True)
    best = result
    if result.verdict is Verdict.ANOMALY and tries_max:
        best = minimise(
            result, lambda faults: run_cluster_seed(result.seed, faults=faults), tries_max
        )
    strikes = tuple(Strike(*attrs.astuple(fault)) for fault in best.faults)
    run = RunFile(best.seed, best.name, best.trace_hash, strikes, len(result.faults))
    (folder / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(run)) + b"\n")
    (folder / "why.txt").write_text(
        f"seed {best.seed}: {best.name}\n\n{best.detail}\n\n"
        f"with these faults alone: python -m jepsen_like replay {folder}\n"
        f"with all of them:        python -m jepsen_like sim --seeds 1 --seed {best.seed}\n"
    )
    (folder / "trace.txt").write_text("\n".join(best.trace) + "\n")
    write_history(folder / "history.jsonl.zst", best.history)
    return folder


def replay(folder: Path) -> tuple[ClusterResult, bool]:
    """Run what a folder describes; the result, and whether it did the very same."""
    run = msgspec.json.decode((folder / "run.json").read_bytes(), type=RunFile)
    faults = [Fault(strike.at_ms, strike.name, strike.draw) for strike in run.faults]
    result = run_cluster_seed(run.seed, faults=faults)
    return result, result.trace_hash == run.trace_hash
