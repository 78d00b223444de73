"""What the simulation executes of the deciding code: branch coverage by seeds alone.

    python -m jepsen_like coverage [--seeds N] [--seed FIRST] [--jobs J] [--missing]

Processes of their own run the seeds, since coverage must begin before the product is imported; this
module imports nothing of it. Prints a line per folder; the exit code is 1 where something is below
FLOOR.
"""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TextIO

FOLDERS: Final = ("raft", "log", "replication", "partition", "metadata", "controller", "groups")
FLOOR: Final = 85.0
"""Of the Raft core, the log and the groups each, and of the four rooms in between together."""
ROOMS: Final = ("replication", "partition", "metadata", "controller")


def measure(first: int, count: int, jobs: int, out: TextIO, *, is_missing_told: bool) -> int:
    """Run the seeds, tell the coverage of each folder."""
    from coverage import Coverage

    with TemporaryDirectory() as folder:
        seeds = [str(seed) for seed in range(first, first + count)]
        parts = [(f"{folder}/data.{n}", seeds[n::jobs]) for n in range(jobs)]
        running = [
            subprocess.Popen([sys.executable, "-m", __name__, path, *chosen])
            for path, chosen in parts
        ]
        codes = [process.wait() for process in running]
        if any(codes):
            print("a process that ran seeds failed", file=out)
            return 1
        whole = Coverage(data_file=f"{folder}/whole", branch=True)
        whole.combine([path for path, _ in parts])
        for name in FOLDERS:
            _told(whole, name, out, is_missing_told=is_missing_told)
        parts_of = [(name,) for name in FOLDERS if name not in ROOMS] + [ROOMS]
        shares = [_share(whole, names, io.StringIO()) for names in parts_of]
    print(f"the least of what is judged: {min(shares):.1f} %, wanted {FLOOR:.0f} %", file=out)
    return int(round(min(shares), 1) < FLOOR)  # as it is told


def _told(whole: object, name: str, out: TextIO, *, is_missing_told: bool) -> None:
    report = io.StringIO()
    share = _share(whole, (name,), report)
    if is_missing_told:
        print(report.getvalue(), file=out)
    print(f"raftmq/{name}: {share:.1f} % of lines and branches", file=out, flush=True)


def _share(whole: object, names: Sequence[str], report: TextIO) -> float:
    """Percent of the lines and branches of these folders together."""
    from coverage import Coverage

    assert isinstance(whole, Coverage)
    roots = [Path(__file__).parents[1] / "raftmq" / name for name in names]
    return whole.report(
        file=report,
        include=[f"{root}/*" for root in roots],
        show_missing=True,
        skip_covered=True,
    )


def main(arguments: Sequence[str]) -> None:
    """Run seeds under coverage: DATA_FILE SEED..."""
    from coverage import Coverage

    watch = Coverage(
        data_file=arguments[0], branch=True, source_pkgs=[f"raftmq.{name}" for name in FOLDERS]
    )
    watch.start()
    from jepsen_like.cluster.run import run_cluster_seed

    for seed in arguments[1:]:
        result = run_cluster_seed(int(seed))
        sys.stdout.write(f"seed {seed}: {result.verdict.name.lower()} {result.name}\n")
        sys.stdout.flush()
    watch.stop()
    watch.save()


if __name__ == "__main__":
    main(sys.argv[1:])
