"""Command line of the simulator.

    python -m jepsen_like sim --seeds N [--seed FIRST] [--jobs J]     any number of seeds
    python -m jepsen_like planted [--seeds N] [--bug NAME] [--jobs J] the planted bugs
    python -m jepsen_like live --minutes M [--nodes 3|5|mixed]        real nodes under faults

`sim` exits 0 when all runs are clean, 1 on an anomaly, 2 when a verdict is unknown; its last line
is a summary. `planted` exits 1 when a bug escapes; its last line is `caught X of Y`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TextIO

from jepsen_like.live import command as live_command
from jepsen_like.planted import BUGS
from jepsen_like.pool import hunt_bugs, run_seeds
from jepsen_like.sim import Result, Verdict

TRACE_LINES_SHOWN = 60


def summary_line(results: Sequence[Result]) -> str:
    """What the runs went through together, and their verdicts."""
    summaries = [result.summary for result in results]

    def middle(name: str) -> str:
        return f"{median(getattr(summary, name) for summary in summaries):g}"

    counts = ", ".join(
        f"{sum(1 for r in results if r.verdict is verdict)} {verdict.name.lower()}"
        for verdict in Verdict
    )
    return (
        f"{len(results)} runs: {counts}; median per run: elections {middle('leader_changes')}, "
        f"crashes {middle('crashes')}, truncations {middle('truncations')}, "
        f"acknowledged records {middle('acked_records')}"
    )


def describe(result: Result) -> str:
    """One line of one run."""
    summary = result.summary
    return (
        f"seed {result.seed}: {result.verdict.name.lower()} elections={summary.leader_changes} "
        f"crashes={summary.crashes} truncations={summary.truncations} wipes={summary.wipes} "
        f"log_starts={summary.log_starts} acknowledged={summary.acked_records} "
        f"events={summary.events} trace={result.trace_hash}"
    )


def explain(result: Result, out: TextIO) -> None:
    """Why a run is not clean, and how to run it again."""
    print(f"seed {result.seed}: {result.name}: {result.detail}", file=out)
    for line in result.trace[-TRACE_LINES_SHOWN:]:
        print(f"    {line}", file=out)
    print(f"again: python -m jepsen_like sim --seeds 1 --seed {result.seed}", file=out)


def _sim(arguments: argparse.Namespace, out: TextIO) -> int:
    results = []
    with _quiet_pipe():
        for result in run_seeds(arguments.seed, arguments.seeds, arguments.jobs):
            results.append(result)
            print(describe(result), file=out, flush=True)
            if result.verdict is not Verdict.CLEAN:
                explain(result, out)
        print(summary_line(results), file=out)
    verdicts = [result.verdict for result in results]
    if Verdict.ANOMALY in verdicts:
        return int(Verdict.ANOMALY)
    return int(Verdict.UNKNOWN if Verdict.UNKNOWN in verdicts else Verdict.CLEAN)


def _planted(arguments: argparse.Namespace, out: TextIO) -> int:
    names = [arguments.bug] if arguments.bug else list(BUGS)
    caught = 0
    for catch in hunt_bugs(names, arguments.seed, arguments.seeds, arguments.jobs):
        caught += catch.is_caught
        print(catch, file=out, flush=True)
    print(f"caught {caught} of {len(names)}", file=out)
    return 0 if caught == len(names) else 1


@contextmanager
def _quiet_pipe() -> Iterator[None]:
    """A reader that went away (`| head`) is no error of ours."""
    try:
        yield
    except BrokenPipeError:
        sys.stderr.close()


def main(argv: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jepsen_like", description=__doc__)
    commands = parser.add_subparsers(required=True)
    sim = commands.add_parser("sim", help="run seeds")
    sim.add_argument("--seeds", type=int, default=20)
    sim.add_argument("--seed", type=int, default=1, help="the first seed")
    sim.add_argument("--jobs", type=int, default=2)
    sim.set_defaults(action=_sim)
    planted = commands.add_parser("planted", help="see that planted bugs are caught")
    planted.add_argument("--seeds", type=int, default=200, help="at most so many per bug")
    planted.add_argument("--seed", type=int, default=1, help="the first seed")
    planted.add_argument("--bug", choices=list(BUGS))
    planted.add_argument("--jobs", type=int, default=2)
    planted.set_defaults(action=_planted)
    live_command.add_parser(commands)
    arguments = parser.parse_args(argv)
    return int(arguments.action(arguments, out))


if __name__ == "__main__":
    sys.exit(main())
