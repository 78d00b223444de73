"""Command line of the simulator.

    python -m jepsen_like sim --seeds N [--seed FIRST] [--jobs J]     whole nodes and clients
    python -m jepsen_like replay DIR                                  a failure, once more
    python -m jepsen_like soak --minutes M [--seed FIRST] [--jobs J]  fresh seeds for so long
    python -m jepsen_like live --minutes M                            real nodes and clients
    python -m jepsen_like pipeline --minutes M [--records N]          exactly once, under kills
    python -m jepsen_like fuzz --port P [--minutes M] [--seed S]      hostile bytes, real nodes
    python -m jepsen_like planted [--seeds N] [--bug NAME] [--jobs J] the planted bugs
    python -m jepsen_like table [--write FILE]                        promises, rules and bugs
    python -m jepsen_like coverage [--seeds N] [--missing]            what seeds execute

`sim` and `soak` exit 0 when all runs are clean, 1 on an anomaly, 2 when too many verdicts are
unknown; their last line is a summary, and each run that failed leaves a folder `out/SEED`.
`sim --resume` goes on where the same command was interrupted, as long as the code is the same.
`planted` exits 1 when a bug escapes; its last line is `caught X of Y`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TextIO

from jepsen_like.cluster.out import TRIES_MAX, replay, write_failure
from jepsen_like.cluster.run import ClusterResult, Verdict
from jepsen_like.executed import measure
from jepsen_like.ledger import Ledger, code_digest
from jepsen_like.planted import BUGS
from jepsen_like.pool import hunt_bugs, run_chosen, run_cluster_seeds
from jepsen_like.table import table, write_table

TRACE_LINES_SHOWN = 60
UNKNOWN_SHARE_MAX = 0.01
"""So many of the runs may have been too idle to say much."""
SOAK_BATCH = 16


def describe_run(result: ClusterResult) -> str:
    """One line of one run."""
    counts = result.counts
    return (
        f"seed {result.seed}: {result.verdict.name.lower()} acknowledged={counts.acked} "
        f"leaders={counts.leader_changes} crashes={counts.crashes} rebalances={counts.rebalances} "
        f"wipes={counts.wipes} rots={counts.rots} log_starts={counts.log_starts} "
        f"events={counts.events} trace={result.trace_hash}"
    )


def summarise_runs(results: Sequence[ClusterResult]) -> str:
    """What the runs went through together, and their verdicts."""

    def middle(name: str) -> str:
        return f"{median(getattr(result.counts, name) for result in results):g}"

    counts = ", ".join(
        f"{sum(1 for r in results if r.verdict is verdict)} {verdict.name.lower()}"
        for verdict in Verdict
    )
    return (
        f"{len(results)} runs: {counts}; median per run: acknowledged {middle('acked')}, "
        f"leader changes {middle('leader_changes')}, crashes {middle('crashes')}, "
        f"rebalances {middle('rebalances')}{_speed(results)}"
    )


def _speed(results: Sequence[ClusterResult]) -> str:
    """Events of virtual time by the time of a core that the runs took, all that they did in it."""
    seconds = sum(result.seconds for result in results)
    events = sum(result.counts.events for result in results)
    return f"; {events / seconds:,.0f} events a second of a core" if seconds else ""


def exit_code(results: Sequence[ClusterResult]) -> int:
    """0 clean, 1 an anomaly, 2 too many unknown."""
    verdicts = [result.verdict for result in results]
    if Verdict.ANOMALY in verdicts:
        return int(Verdict.ANOMALY)
    unknown = verdicts.count(Verdict.UNKNOWN)
    return int(Verdict.UNKNOWN if unknown > UNKNOWN_SHARE_MAX * len(verdicts) else Verdict.CLEAN)


def explain_run(result: ClusterResult, arguments: argparse.Namespace, out: TextIO) -> None:
    """Why a run is not clean, and where the rest stands."""
    print(f"seed {result.seed}: {result.name}: {result.detail}", file=out)
    if result.verdict is Verdict.ANOMALY:
        folder = write_failure(result, Path(arguments.out), tries_max=arguments.tries)
        print(f"all of it in {folder}; again: python -m jepsen_like replay {folder}", file=out)


def _sim(arguments: argparse.Namespace, out: TextIO) -> int:
    wanted = range(arguments.seed, arguments.seed + arguments.seeds)
    results: list[ClusterResult] = []
    ledger = None
    if arguments.resume:
        ledger = Ledger(Path(arguments.out) / f"sim-{arguments.seed}-{code_digest()}.jsonl")
        results = [result for result in ledger.read() if result.seed in wanted]
        print(f"{len(results)} of {len(wanted)} runs are done", file=out)
    done = {result.seed for result in results}
    with _quiet_pipe():
        left = [seed for seed in wanted if seed not in done]
        for result in run_chosen(left, arguments.jobs):
            results.append(result)
            print(f"{len(results)}/{len(wanted)} {describe_run(result)}", file=out, flush=True)
            if result.verdict is not Verdict.CLEAN:
                explain_run(result, arguments, out)
                result.history, result.trace = [], ()  # it is in its folder
            if ledger is not None:
                ledger.add(result)
        print(summarise_runs(results), file=out)
    return exit_code(results)


def _soak(arguments: argparse.Namespace, out: TextIO) -> int:
    began = time.monotonic()
    end = began + 60 * arguments.minutes if arguments.minutes else None
    results: list[ClusterResult] = []
    first = seed = arguments.seed if arguments.seed is not None else int(time.time())
    with _quiet_pipe():
        ended_before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while end is None or time.monotonic() < end:
                for result in run_cluster_seeds(seed, SOAK_BATCH, arguments.jobs):
                    if result.verdict is not Verdict.CLEAN:
                        print(f"\n{describe_run(result)}", file=out)
                        explain_run(result, arguments, out)
                        result.history, result.trace = [], ()  # it is in its folder
                    results.append(result)
                    _show_progress(began, end, results, out)
                seed += SOAK_BATCH
        except KeyboardInterrupt:
            print("\nended by hand", end="", file=out)
        finally:
            signal.signal(signal.SIGTERM, ended_before)
        took_s = time.monotonic() - began
        print(f"\nseeds from {first} on, {took_s / 60:.1f} minutes", file=out)
        if not results:
            print("no run came to its end", file=out)
            return int(Verdict.UNKNOWN)
        print(summarise_runs(results), file=out)
    return exit_code(results)


def _show_progress(
    began: float, end: float | None, results: Sequence[ClusterResult], out: TextIO
) -> None:
    spent_s = time.monotonic() - began
    bad = sum(result.verdict is Verdict.ANOMALY for result in results)
    idle = sum(result.verdict is Verdict.UNKNOWN for result in results)
    told = f"{len(results)} runs, {bad} anomalies, {idle} unknown, {spent_s / 60:.1f} min"
    if end is not None:
        share = min(1.0, spent_s / max(1e-9, end - began))
        told = f"[{'#' * int(40 * share):<40}] {share:4.0%} {told}"
    print(f"\r{told}", end="", file=out, flush=True)


def _replay(arguments: argparse.Namespace, out: TextIO) -> int:
    result, is_same = replay(Path(arguments.folder))
    for line in result.trace[-TRACE_LINES_SHOWN:]:
        print(f"    {line}", file=out)
    if result.verdict is not Verdict.CLEAN:
        print(f"seed {result.seed}: {result.name}: {result.detail}", file=out)
    print(describe_run(result), file=out)
    if not is_same:
        print("this is not the run that was written down: the code has changed", file=out)
    return int(result.verdict)


def _planted(arguments: argparse.Namespace, out: TextIO) -> int:
    names = arguments.bug or [*BUGS]
    caught = 0
    with _quiet_pipe():
        catches = hunt_bugs(names, arguments.seed, arguments.seeds, arguments.jobs)
        for number, catch in enumerate(catches, 1):
            caught += catch.is_caught
            print(f"[{number:{len(str(len(names)))}}/{len(names)}] {catch}", file=out, flush=True)
        print(f"caught {caught} of {len(names)}", file=out)
    return 0 if caught == len(names) else 1


def _fuzz(arguments: argparse.Namespace, out: TextIO) -> int:
    from jepsen_like.fuzz.run import fuzz  # it takes real nodes, which the simulation does without

    with _quiet_pipe():
        outcome = fuzz(arguments.port, arguments.minutes, arguments.seed, out, arguments.out)
        is_bad = bool(outcome.findings) or outcome.stalls > arguments.stalls_max
        print(
            f"{'FOUND' if is_bad else 'clean'}: {outcome.inputs} inputs, {len(outcome.kinds)} kinds"
            f" of answers, {outcome.stalls} stalls ({outcome.stalls_excused} more while another"
            f" thread waited for a core), canary acknowledged {outcome.acknowledged},"
            f" p99 {outcome.latency_ms_p99:.0f} ms, {len(outcome.findings)} findings",
            file=out,
        )
    return 1 if is_bad else 0


def _table(arguments: argparse.Namespace, out: TextIO) -> int:
    if arguments.write is None:
        print(table(), file=out)
    else:
        is_changed = write_table(arguments.write)
        print(f"{arguments.write} {'written' if is_changed else 'is up to date'}", file=out)
    return 0


def _coverage(arguments: argparse.Namespace, out: TextIO) -> int:
    return measure(
        arguments.seed,
        arguments.seeds,
        arguments.jobs,
        out,
        is_missing_told=arguments.missing,
    )


@contextmanager
def _quiet_pipe() -> Iterator[None]:
    """A reader that went away (`| head`) is no error of ours."""
    try:
        yield
    except BrokenPipeError:
        sys.stderr.close()


def _seeds(parser: argparse.ArgumentParser, count: int, first: int | None = 1) -> None:
    if count:
        parser.add_argument("--seeds", type=int, default=count)
    parser.add_argument("--seed", type=int, default=first, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2)


def _folders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="out", help="where folders of failures go")
    parser.add_argument(
        "--tries", type=int, default=TRIES_MAX, help="runs that may be spent to leave out faults"
    )


def main(argv: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jepsen_like",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    sim = commands.add_parser("sim", help="run seeds of whole nodes")
    _seeds(sim, 20)
    _folders(sim)
    sim.add_argument("--resume", action="store_true", help="go on where the same code stopped")
    sim.set_defaults(action=_sim)
    executed = commands.add_parser("coverage", help="what seeds execute of the deciding code")
    _seeds(executed, 60)
    executed.add_argument("--missing", action="store_true", help="tell which lines are not")
    executed.set_defaults(action=_coverage)
    again = commands.add_parser("replay", help="run a failure again")
    again.add_argument("folder")
    again.set_defaults(action=_replay)
    soak = commands.add_parser("soak", help="run fresh seeds for so long")
    soak.add_argument(
        "--minutes", type=float, default=10.0, help="0: until it is interrupted (Ctrl-C)"
    )
    _seeds(soak, 0, None)
    _folders(soak)
    soak.set_defaults(action=_soak)
    planted = commands.add_parser("planted", help="see that planted bugs are caught")
    _seeds(planted, 200)
    planted.add_argument("--bug", choices=[*BUGS], action="append")
    planted.set_defaults(action=_planted)
    fuzzing = commands.add_parser("fuzz", help="throw hostile bytes at the nodes of a cluster")
    ports = ["client", "peer", "admin", "tls", "sasl", "secret"]  # jepsen_like.fuzz.run.PORTS
    fuzzing.add_argument("--port", choices=ports, required=True)
    fuzzing.add_argument("--minutes", type=float, default=1.0)
    fuzzing.add_argument("--seed", type=int, default=1)
    fuzzing.add_argument(
        "--stalls-max", type=int, default=0, help="so many late ticks of all nodes are no finding"
    )
    fuzzing.add_argument("--out", type=Path, default=Path("out"), help="corpus and findings")
    fuzzing.set_defaults(action=_fuzz)
    promises = commands.add_parser("table", help="promises and rules, and what watches over them")
    promises.add_argument("--write", type=Path, help="the document to bring up to date")
    promises.set_defaults(action=_table)
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] in (["live"], ["pipeline"]) or "--help" in given[:1] or "-h" in given[:1]:
        # It takes clients and tools that the simulation does without.
        from jepsen_like.live.command import add_parser

        add_parser(commands)
        from jepsen_like.live.pipeline import add_parser as add_pipeline

        add_pipeline(commands)
    arguments = parser.parse_args(given)
    return int(arguments.action(arguments, out))


if __name__ == "__main__":
    sys.exit(main())
