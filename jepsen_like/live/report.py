"""A run's report: text for the terminal, JSON for programs, one HTML page with pictures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, Final

from attrs import asdict, define

from jepsen_like.live.clocks import Jump
from jepsen_like.live.judge import Judgement
from jepsen_like.live.picture import picture
from jepsen_like.live.progress import CLUSTER
from jepsen_like.live.run import Fault, Round, Settings

STALLS_SHOWN: Final = 6
STILL_S: Final = 0.1
"""A clock that is off by less may only have been read a little later."""
_WORDS: Final = {0: "clean", 1: "anomaly", 2: "unknown"}


@define
class RunReport:
    """All rounds of a run, judged."""

    settings: Settings
    rounds: Sequence[tuple[Round, Judgement]]

    @property
    def exit_code(self) -> int:
        """1 if any round has an anomaly, else 2 if any is unknown or too little was seen."""
        codes = {judgement.exit_code for _, judgement in self.rounds}
        if self.too_rare or not self.rounds:
            codes.add(2)
        return next((code for code in (1, 2) if code in codes), 0)

    @property
    def faults(self) -> Counter[str]:
        """How often each nemesis struck."""
        return Counter(fault.nemesis for round_, _ in self.rounds for fault in round_.faults)

    @property
    def acked_records(self) -> int:
        """Acknowledged records of all rounds."""
        return sum(judgement.acked_records for _, judgement in self.rounds)

    @property
    def longest_stall_s(self) -> float:
        """The longest time without an acknowledgement while a majority was connected, without
        waits for cores."""
        stalls = [s for _, judgement in self.rounds for s in judgement.stalls if s.where == CLUSTER]
        return max((stall.counted_s for stall in stalls), default=0.0)

    @property
    def jumps(self) -> list[Jump]:
        """What clocks did."""
        return [jump for round_, _ in self.rounds for f in round_.faults for jump in f.clocks]

    @property
    def too_rare(self) -> dict[str, int]:
        """Nemeses that struck less often than the run was to see them."""
        wanted, faults = self.settings.each, self.faults
        return {n.name: faults[n.name] for n in self.settings.nemeses if faults[n.name] < wanted}

    def minutes(self, nodes: int) -> float:
        """How long clusters of so many nodes were under faults."""
        rounds = [round_ for round_, _ in self.rounds if round_.nodes == nodes]
        return sum(max(0.0, round_.ended - round_.began) for round_ in rounds) / 60

    def summary(self) -> str:
        """One line."""
        return (
            f"{_WORDS[self.exit_code]}: {len(self.rounds)} rounds, {self.acked_records} records "
            f"acknowledged, {self.faults.total()} faults of {len(self.faults)} kinds, longest time "
            f"without progress {self.longest_stall_s:.1f} s, "
            f"{sum(len(j.findings) for _, j in self.rounds)} findings"
        )

    def write(self, folder: Path) -> None:
        """Write report.txt, report.json and report.html."""
        (folder / "report.txt").write_text(self.to_text())
        (folder / "report.json").write_text(json.dumps(self.to_json(), indent=1))
        (folder / "report.html").write_text(self.to_html())

    # ---- text ----

    def to_text(self) -> str:
        """For people."""
        lines = [f"seed {self.settings.seed}, {self.settings.seconds:.0f} s"]
        for round_, judgement in self.rounds:
            lines += ["", *self._round_lines(round_, judgement)]
        lines += ["", *self._totals(), self.summary(), ""]
        return "\n".join(lines)

    def _totals(self) -> list[str]:
        """How often each nemesis struck and for how long, what clocks did, where time went."""
        lines = ["nemesis             struck   broken, median and longest   until whole, the same"]
        for name, count in sorted(self.faults.items()):
            rows = [f for round_, _ in self.rounds for f in round_.faults if f.nemesis == name]
            broken = sorted(max(0.0, f.healed - f.began) for f in rows)
            mended = sorted(max(0.0, f.whole - f.began) for f in rows)
            lines.append(
                f"{name:<20}{count:6}   {median(broken):10.1f} s {broken[-1]:10.1f} s "
                f"{median(mended):12.1f} s {mended[-1]:8.1f} s"
            )
        lines += [
            f"{name}: struck {count} times, wanted are {self.settings.each}"
            for name, count in self.too_rare.items()
        ]
        jumps = self.jumps
        if jumps:
            walls = [jump.wall_s for jump in jumps]
            moved = sum(abs(wall) > STILL_S for wall in walls)
            still = max(abs(jump.monotonic_s) for jump in jumps)
            lines.append(
                f"clocks: wall clocks of {len({jump.node_id for jump in jumps})} nodes moved "
                f"{moved} times, from {min(walls):+.1f} s to {max(walls):+.1f} s; "
                f"monotonic clocks at most {still:.1f} s"
            )
        spent = [f"{self.minutes(n):.1f} min with {n} nodes" for n in self.settings.nodes]
        lines.append(f"under faults: {', '.join(spent)}")
        return lines

    def _round_lines(self, round_: Round, judgement: Judgement) -> list[str]:
        lines = [
            f"round {round_.number}: {round_.nodes} nodes, links by {round_.links_name}, disks: "
            f"{round_.disk_name}; {_WORDS[judgement.exit_code]}",
            f"  {judgement.acked_records} records acknowledged, {judgement.polled_records} polled; "
            f"appends p50 {judgement.latency_ms[0]:.0f} ms, p99 {judgement.latency_ms[1]:.0f} ms",
        ]
        if judgement.transactions:
            lines.append(f"  {_transactions_line(round_, judgement)}")
        if judgement.cores:
            taken = ", ".join(f"{kind} {cores:.2f}" for kind, cores in judgement.cores.items())
            lines.append(f"  cores: {taken}")
        lines += [f"  left out: {name}: {why}" for name, why in round_.lacks.items()]
        lines += [f"  {told}" for told in round_.told.get("hung", ())]
        lines += [f"  {told}" for told in map(_fault_line, round_.faults)]
        for stall in judgement.stalls[:STALLS_SHOWN]:
            at = stall.began - round_.began
            lines.append(
                f"  {stall.where}: no progress for {stall.seconds:.2f} s at {at:.1f} s"
                f" ({stall.counted_s:.2f} s without waits for cores)"
            )
        if judgement.report is not None:
            lines += [f"  {line}" for line in judgement.report.to_text().splitlines()]
        lines += [f"  {f.name}: {f.told}" for f in judgement.findings]
        return lines

    # ---- JSON ----

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "verdict": _WORDS[self.exit_code],
            "seed": self.settings.seed,
            "acked_records": self.acked_records,
            "longest_stall_s": round(self.longest_stall_s, 3),
            "faults": dict(sorted(self.faults.items())),
            "too_rare": self.too_rare,
            "minutes_by_nodes": {n: round(self.minutes(n), 2) for n in self.settings.nodes},
            "rounds": [_round_json(*row) for row in self.rounds],
        }

    # ---- HTML ----

    def to_html(self) -> str:
        """One page, with a picture of each round."""
        parts = [
            "<!doctype html><meta charset=utf-8><title>jepsen_like live</title>",
            "<style>body{font-family:sans-serif;margin:2em auto;max-width:1240px}"
            "pre{background:#f4f6f6;padding:1em;overflow-x:auto}</style>",
            f"<h1>jepsen_like live</h1><p>{escape(self.summary())}</p>",
        ]
        for round_, judgement in self.rounds:
            lines = "\n".join(self._round_lines(round_, judgement))
            seconds = max(round_.ended - round_.began, len(judgement.acked))
            parts += [
                f"<h2>Round {round_.number}: {round_.nodes} nodes</h2>",
                picture(judgement.acked, judgement.polled, round_.faults, seconds),
                f"<details><summary>all of it</summary><pre>{escape(lines)}</pre></details>",
            ]
        return "\n".join(parts)


def _transactions_line(round_: Round, judgement: Judgement) -> str:
    counts = judgement.transactions
    return (
        f"transactions: {counts['ok']} committed, {counts['fail']} aborted, {counts['info']} "
        f"unknown; {judgement.struck_commits} of {len(round_.faults)} faults began while a commit "
        f"was under way"
    )


def _fault_line(fault: Fault) -> str:
    return (
        f"{fault.began:7.1f} s {fault.nemesis}: {fault.detail}; healed after "
        f"{max(0.0, fault.healed - fault.began):.1f} s, "
        f"whole after {max(0.0, fault.whole - fault.began):.1f} s"
    )


def _round_json(round_: Round, judgement: Judgement) -> dict[str, Any]:
    report = judgement.report
    return {
        "number": round_.number,
        "nodes": round_.nodes,
        "links": round_.links_name,
        "disks": round_.disk_name,
        "verdict": _WORDS[judgement.exit_code],
        "acked_records": judgement.acked_records,
        "polled_records": judgement.polled_records,
        "transactions": dict(judgement.transactions),
        "struck_commits": judgement.struck_commits,
        "append_p50_ms": round(judgement.latency_ms[0], 1),
        "append_p99_ms": round(judgement.latency_ms[1], 1),
        "cores": {kind: round(cores, 3) for kind, cores in judgement.cores.items()},
        "lacks": round_.lacks,
        "hung": list(round_.told.get("hung", ())),
        "faults": [asdict(fault) for fault in round_.faults],
        "stalls": [
            {
                "where": s.where,
                "seconds": round(s.seconds, 3),
                "counted_s": round(s.counted_s, 3),
                "at": round(s.began - round_.began, 3),
            }
            for s in judgement.stalls
        ],
        "findings": [asdict(finding) for finding in judgement.findings],
        "checks": None if report is None else json.loads(report.to_json()),
        "acked_by_second": judgement.acked,
        "polled_by_second": judgement.polled,
    }
