"""What a round's artefacts say: the checkers' verdicts, stalls, ends of clients and of nodes.

Reads files and what the round noted; starts and stops nothing. A finding is an anomaly (exit 1) or
something that keeps the run from being called clean (exit 2).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from attrs import define, field, frozen

from jepsen_like.checkers import Options, Report, check_events
from jepsen_like.checkers.linear.checks import Bounds
from jepsen_like.checkers.verdict import Validity
from jepsen_like.history_events import Event, read_history
from jepsen_like.live.progress import CLUSTER, Stall, stalls, transactions_stall
from jepsen_like.live.run import Round
from jepsen_like.live.workloads.base import TRANSACTIONS, UNFINISHED

SEARCH_S: Final = 60.0
STALL_LIMIT_S: Final = 5.0
PARTITION_STALL_LIMIT_S: Final = 10.0
"""A single partition may wait longer: for its turn among elections, or for its one client."""
NODE_ERRORS: Final = frozenset({"request failed", "replica stopped", "node must stop"})
TRANSACTIONS_STALL_LIMIT_S: Final = 30.0
"""None of several producers committed anything, though all that transactions write to was whole:
librdkafka waits for seconds between two tries."""
CLOCKS_REMEMBERED_S: Final = 20.0
_POLLS: Final = frozenset({"poll", "poll_committed", "poll_uncommitted", "poll_view", "poll_due"})
_DISK_FAULTS: Final = frozenset({"full-disk", "power-loss"})


@frozen
class Finding:
    """Something that is not as it should be."""

    name: str
    told: str
    is_anomaly: bool = True


@define
class Judgement:
    """What came of one round."""

    report: Report | None
    stalls: list[Stall] = field(factory=list)
    findings: list[Finding] = field(factory=list)
    acked: list[int] = field(factory=list)
    """Acknowledged records by second of the round."""
    polled: list[int] = field(factory=list)
    acked_records: int = 0
    polled_records: int = 0
    latency_ms: tuple[float, float] = (0.0, 0.0)
    """Of appends: median and 99th percentile."""
    transactions: Counter[str] = field(factory=Counter)
    """By what became of them: `ok`, `fail`, `info`."""
    struck_commits: int = 0
    """Faults that began while a commit was under way."""
    cores: dict[str, float] = field(factory=dict)
    """How many of this machine's cores each kind of process took."""

    @property
    def exit_code(self) -> int:
        """0 clean, 1 anomaly, 2 unknown."""
        if any(finding.is_anomaly for finding in self.findings):
            return 1
        return 2 if self.findings else 0


@define
class _Series:
    """Gathers what the report shows while the checkers read the history."""

    began: float
    acked: Counter[int] = field(factory=Counter)
    polled: Counter[int] = field(factory=Counter)
    acked_at: dict[str, list[float]] = field(factory=dict)
    latencies: list[float] = field(factory=list)
    transactions: Counter[str] = field(factory=Counter)
    committed_at: list[float] = field(factory=list)
    commits: list[tuple[float, float]] = field(factory=list)
    """From when to when a commit was under way."""
    _invoked: dict[int, float] = field(factory=dict)
    _delayed: dict[int, int] = field(factory=dict)
    """By operation, how many records are for later."""

    def follow(self, events: Iterator[Event]) -> Iterator[Event]:
        """Pass events on."""
        for event in events:
            at = event.time / 1e9
            count = sum(map(len, event.records.values()))
            if event.f == "append" and event.type == "invoke":
                self._invoked[event.op] = at
                for key in event.records:
                    self.acked_at.setdefault(key, [])
            elif event.f == "append":
                self.latencies.append((at - self._invoked.pop(event.op)) * 1e3)
                if event.type == "ok":
                    self.acked[int(at - self.began)] += count
                    for key in event.records:
                        self.acked_at[key].append(at)
            elif event.f in ("transaction", "end"):
                self._transaction(event, at)
            elif event.f == "delay" and event.type == "invoke":
                self._delayed[event.op] = count
            elif event.f == "delay":
                delayed = self._delayed.pop(event.op)
                self.acked[int(at - self.began)] += delayed if event.type == "ok" else 0
            elif event.f in _POLLS and count:
                self.polled[int(at - self.began)] += count
            yield event

    def _transaction(self, event: Event, at: float) -> None:
        if event.f == "end":
            if event.type == "invoke" and event.is_commit:
                self._invoked[event.op] = at
            elif event.op in self._invoked:
                self.commits.append((self._invoked.pop(event.op), at))
        elif event.type != "invoke":
            self.transactions[event.type] += 1
            if event.type == "ok":
                self.committed_at.append(at)
                self.acked[int(at - self.began)] += sum(map(len, event.records.values()))


def _rows(counts: Counter[int], seconds: int) -> list[int]:
    return [counts[second] for second in range(seconds)]


def judge(round_: Round) -> Judgement:
    """Judge a round that has ended."""
    history = round_.folder / "history.jsonl.zst"
    found = Judgement(None)
    if round_.stuck:
        found.findings.append(Finding("no-recovery", round_.stuck))
    if round_.broken:
        found.findings.append(Finding("broken", round_.broken, is_anomaly=False))
    if history.exists():
        _judge_history(round_, history, found)
    _judge_load(round_, found)
    found.findings += _node_errors(round_)
    for lack, why in round_.lacks.items():
        if round_.must_not_lack:
            found.findings.append(Finding("lack", f"{lack}: {why}"))
    found.findings += [Finding("replicas-differ", told) for told in round_.differences]
    return found


def _judge_history(round_: Round, history: Path, found: Judgement) -> None:
    deadline = time.monotonic() + SEARCH_S
    bounds = Bounds.until(lambda: time.monotonic() > deadline)
    series = _Series(round_.began)
    has_read = bool(round_.told.get("has_read"))
    options = Options(
        must_see_all=has_read, bounds=bounds, clocks_wrong=list(_clocks_wrong(round_))
    )
    found.report = report = check_events(series.follow(read_history(history)), options)
    for verdict in report.verdicts:
        if verdict.validity is not Validity.VALID:
            is_anomaly = verdict.validity is Validity.INVALID
            found.findings.append(Finding(verdict.name, str(verdict), is_anomaly))
    end = round_.ended or max((t[-1] for t in series.acked_at.values() if t), default=0.0)
    seconds = max(0, int(end - round_.began))
    found.acked, found.polled = _rows(series.acked, seconds), _rows(series.polled, seconds)
    found.acked_records = sum(series.acked.values())
    found.polled_records = sum(series.polled.values())
    found.transactions = series.transactions
    found.struck_commits = sum(
        any(began <= round_.began + fault.began < ended for began, ended in series.commits)
        for fault in round_.faults
    )
    latencies = sorted(series.latencies)
    if latencies:
        found.latency_ms = (latencies[len(latencies) // 2], latencies[len(latencies) * 99 // 100])
    if round_.stage is not None:
        timeline, scarcity = round_.stage.timeline, round_.stage.scarcity
        found.cores = scarcity.cores(round_.began, end)
        found.stalls = stalls(timeline, series.acked_at, end, scarcity)
        if series.transactions:
            found.stalls.insert(1, transactions_stall(timeline, series.committed_at, end, scarcity))
        found.findings += _judge_stalls(found.stalls, round_)


def _clocks_wrong(round_: Round) -> Iterator[tuple[int, int]]:
    """When more than one node had a wrong clock: a leader that hears two others, or one, cannot
    know. What was heard is remembered for some seconds."""
    for fault in round_.faults:
        if len({jump.node_id for jump in fault.clocks}) > 1:
            began = round_.began + fault.began
            healed = max(fault.healed, fault.began) + round_.began + CLOCKS_REMEMBERED_S
            yield int(began * 1e9), int(healed * 1e9)


_LIMITS_S: Final = {CLUSTER: STALL_LIMIT_S, TRANSACTIONS: TRANSACTIONS_STALL_LIMIT_S}


def _judge_stalls(found: Sequence[Stall], round_: Round) -> Iterator[Finding]:
    for stall in found:
        limit = _LIMITS_S.get(stall.where, PARTITION_STALL_LIMIT_S)
        if stall.counted_s > limit:
            at = stall.began - round_.began
            told = (
                f"{stall.where} acknowledged nothing for {stall.seconds:.1f} s from {at:.1f} s on"
                f" ({stall.counted_s:.1f} s without waits for cores)"
            )
            yield Finding("no-progress", told)


def _judge_load(round_: Round, found: Judgement) -> None:
    told = round_.told
    if round_.stuck or round_.broken:
        return
    if round_.load_exit not in (0, UNFINISHED):
        log = (round_.folder / "load.log").read_text(errors="replace")[-2000:]
        found.findings.append(
            Finding("load", f"the clients ended with {round_.load_exit}: {log}", is_anomaly=False)
        )
        return
    for name in told.get("unfinished", ()):
        found.findings.append(Finding("unfinished", f"{name} got no answer on a healed cluster"))
    for asked in told.get("unanswered", ()):
        found.findings.append(Finding("unanswered", asked))
    if not told.get("has_read"):
        found.findings.append(Finding("unread", "a healed cluster was not read to its end"))
    for error in told.get("fatal", ()):
        found.findings.append(Finding("fatal-client", error))
    for error in told.get("refused", ()):
        found.findings.append(Finding("refused-append", error))


def _node_errors(round_: Round) -> Iterator[Finding]:
    """Errors of nodes that nothing done to them explains."""
    is_excused = any(fault.nemesis in _DISK_FAULTS for fault in round_.faults)
    for path in sorted(round_.folder.glob("node-*.log")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                if "Traceback" in line:
                    yield Finding("node-error", f"{path.name}: a traceback")
                continue
            if not isinstance(event, dict) or event.get("event") not in NODE_ERRORS:
                continue
            if event["event"] == "request failed" or not is_excused:
                yield Finding("node-error", f"{path.name}: {line[:400]}")
