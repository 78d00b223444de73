"""`python -m jepsen_like live`: arguments, the run, the report, the exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn, TextIO

from jepsen_like.live.judge import judge
from jepsen_like.live.nemeses import NEMESES
from jepsen_like.live.report import RunReport
from jepsen_like.live.run import Runner, Settings
from jepsen_like.live.storage import LackError, mount_privately
from jepsen_like.live.workloads.base import PLANTS, RESTS_ON, WORKLOADS

ROUND_S: Final = 360.0
RATE: Final = 500.0


def _names(known: list[str], text: str) -> tuple[str, ...]:
    chosen = tuple(known) if text == "all" else tuple(text.split(","))
    for name in chosen:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return chosen


def with_what_they_rest_on(workloads: tuple[str, ...]) -> tuple[str, ...]:
    """These, and those that write what they read."""
    wanted = {*workloads, *(RESTS_ON[name] for name in workloads if name in RESTS_ON)}
    return tuple(name for name in WORKLOADS if name in wanted)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    live = commands.add_parser("live", help="real nodes and clients under faults")
    live.add_argument("--minutes", type=float, default=5.0)
    live.add_argument(
        "--nodes", choices=["3", "5", "mixed"], default="mixed", help="mixed: rounds of 3 and 5"
    )
    live.add_argument(
        "--nemesis",
        type=lambda text: _names(list(NEMESES), text),
        default=tuple(NEMESES),
        help=f"all, or some of {','.join(NEMESES)}",
    )
    live.add_argument(
        "--workload",
        type=lambda text: _names(list(WORKLOADS), text),
        default=tuple(WORKLOADS),
        help=f"all, or some of {','.join(WORKLOADS)}; transactions: producers that write to "
        "several partitions and commit offsets in transactions, commits, aborts, zombies, readers "
        "of committed records and of all; views: readers and a group of views with conditions; "
        "delays: delayed records, cancelled and replaced",
    )
    live.add_argument(
        "--links",
        choices=["proxy", "namespaces", "mixed"],
        default="mixed",
        help="namespaces need root; mixed: where permitted, every other pair of rounds",
    )
    live.add_argument("--rate", type=float, default=RATE, help="records a second")
    live.add_argument("--round-minutes", type=float, default=ROUND_S / 60)
    live.add_argument(
        "--each", type=int, default=0, help="unknown if a nemesis struck less often than this"
    )
    live.add_argument(
        "--plant",
        choices=list(PLANTS),
        default="",
        help="break the clients of transactions on purpose; the run has to find it and exit 1: "
        + "; ".join(f"{name}: {what}" for name, what in PLANTS.items()),
    )
    live.add_argument("--seed", type=int, help="chooses faults; what they meet is not repeatable")
    live.add_argument("--out", type=Path, help="folder for histories, logs and the report")
    live.set_defaults(action=run)


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Run, judge, report; the exit code."""
    seed = arguments.seed if arguments.seed is not None else time.time_ns() % (1 << 32)
    folder = arguments.out or Path("out") / f"live-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("round-*")):
        sys.stderr.write(f"{folder} holds another run\n")
        return 2
    settings = Settings(
        seconds=arguments.minutes * 60,
        nodes={"3": (3,), "5": (5,), "mixed": (3, 5)}[arguments.nodes],
        round_s=min(arguments.round_minutes * 60, arguments.minutes * 60),
        nemeses=tuple(NEMESES[name] for name in arguments.nemesis),
        workloads=with_what_they_rest_on(arguments.workload),
        rate=arguments.rate,
        seed=seed,
        links=arguments.links,
        out=folder,
        each=arguments.each,
        plant=arguments.plant,
        must_not_lack=bool(os.environ.get("CI")),
    )
    if settings.links == "namespaces" and all(n.needs_proxy for n in settings.nemeses):
        sys.stderr.write("these nemeses need --links proxy\n")
        return 2
    signal.signal(signal.SIGTERM, _end)

    def say(line: str) -> None:
        print(line, file=out, flush=True)

    say(f"seed {seed}, artefacts in {folder}")
    with contextlib.suppress(LackError):  # then mounts are undone by us alone
        mount_privately()
    rounds = []
    runner = Runner(settings, say)
    is_whole = True
    try:
        for round_ in runner.rounds():
            judgement = judge(round_)
            if not judgement.findings:
                runner.tidy(round_)
            for finding in judgement.findings:
                say(f"round {round_.number}: {finding.name}: {finding.told}")
            rounds.append((round_, judgement))
            RunReport(settings, rounds).write(folder)  # what there is, whatever ends the run
    except KeyboardInterrupt:
        say("interrupted: the round under way is not judged")
        is_whole = False
    report = RunReport(settings, rounds)
    report.write(folder)
    say(report.to_text().rstrip())
    return report.exit_code if is_whole else report.exit_code or 2
