"""A live run: rounds of cluster, load and nemeses, and the judgement of each round's history.

A round has a cluster of its own, of three or five nodes, and ends healed, with all records read
back and replicas compared. Its folder keeps the history, the nodes' logs and, when something was
wrong, their disks. The run owns every process that it started and leaves none behind.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

from attrs import asdict, define, field, frozen

from jepsen_like.live.clocks import Jump
from jepsen_like.live.cluster import Cluster, StuckError
from jepsen_like.live.links import Links, ProxyLinks
from jepsen_like.live.namespaces import NamespaceLinks
from jepsen_like.live.nemeses import OWN_DISKS, Nemesis
from jepsen_like.live.replicas import differences
from jepsen_like.live.scarcity import Patience
from jepsen_like.live.stage import Stage
from jepsen_like.live.storage import Disk, LackError, PlainDisk, best_disk
from jepsen_like.live.workloads.base import DELAYS, READ_BACK_S, TRANSACTIONAL, TRANSACTIONS, Plan

DEFAULTS: Final = {
    "group.initial.rebalance.delay.ms": "0",
    "log.segment.bytes": str(1 << 20),
    "auto.create.topics.enable": "false",
    # Above what `clock-skew` does: where most clocks are behind, right records would be refused,
    # and librdkafka begins a new producer epoch at each refusal, which may write others twice.
    "log.message.timestamp.after.max.ms": str(60 * 86_400_000),
}
TOPICS_3: Final = {"log": (6, 3)}
TOPICS_5: Final = {"wide": (4, 5), "narrow": (4, 3)}
"""Partitions and replicas by topic; those of five replicas survive the loss of two nodes."""
TRANSACTIONAL_PARTITIONS: Final = 4
DUE: Final = "due"
DUE_PARTITIONS: Final = 3
KEPT: Final = {"retention.ms": "-1"}
"""Records are stamped as they are delivered: by clocks that are weeks behind, they are old."""
FIRST_ACK_S: Final = 30.0
ENDS_S: Final = 4 * READ_BACK_S + 180
"""Clients that take longer to get their last answers and to read everything back are stuck."""
QUIET_S: Final = (0.5, 1.5)
"""Between a cluster made whole and the next fault."""


@frozen
class Settings:
    """What a run is to do."""

    seconds: float
    nodes: tuple[int, ...]
    """Nodes of the rounds, in turn."""
    round_s: float
    nemeses: tuple[Nemesis, ...]
    workloads: tuple[str, ...]
    rate: float
    seed: int
    out: Path
    links: str = "mixed"
    must_not_lack: bool = False
    """A nemesis that this machine cannot do is a failure, not a skip."""
    each: int = 0
    """A run in which some nemesis struck less often says too little."""
    plant: str = ""
    """A fault of the clients, planted to see that it is found."""


@define
class Fault:
    """One fault that was done; times since the round began."""

    nemesis: str
    began: float
    detail: str = ""
    clocks: list[Jump] = field(factory=list)
    """What clocks did, as measured."""
    healed: float = 0.0
    """When all nodes were up and connected again."""
    whole: float = 0.0
    """When every partition was fully replicated."""


@define
class Round:
    """What came of one round."""

    number: int
    nodes: int
    folder: Path
    must_not_lack: bool = False
    links_name: str = ""
    disk_name: str = ""
    began: float = field(factory=time.monotonic)
    faults: list[Fault] = field(factory=list)
    lacks: dict[str, str] = field(factory=dict)
    """Nemeses that this machine cannot do, and why."""
    stuck: str = ""
    broken: str = ""
    """Why the round ended early by no fault of the cluster."""
    differences: list[str] = field(factory=list)
    """Replicas whose bytes are not the same at the end."""
    told: dict[str, Any] = field(factory=dict)
    """The last line of the load."""
    load_exit: int = -1
    stage: Stage | None = None
    ended: float = 0.0
    """When the load was told to stop."""


class LoadProcess:
    """The clients' process, and what it told last."""

    def __init__(self, plan: Plan, folder: Path, prefix: tuple[str, ...]) -> None:
        path = folder / "plan.json"
        path.write_text(json.dumps(asdict(plan)))
        self._errors = (folder / "load.log").open("wb")
        self._process = subprocess.Popen(
            [
                *prefix,
                *(sys.executable, "-m", "jepsen_like.live.load"),
                *(str(path), str(folder / "history.jsonl.zst")),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self.told: dict[str, Any] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.told = json.loads(line)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """False when it has ended, of itself or told so."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Tell it that no new operation may begin."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self, timeout_s: float) -> int:
        """Wait for its end; the exit code."""
        try:
            return self._process.wait(timeout_s)
        finally:
            self.close()

    def close(self) -> None:
        """End it, whatever it does."""
        if self.is_running:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()


class Deck:
    """Nemeses in random order, each as often as the others over the whole run; before the others of
    its turn comes one that the run's workloads are about, so that a short run meets it."""

    def __init__(
        self, nemeses: tuple[Nemesis, ...], rng: Random, workloads: tuple[str, ...] = ()
    ) -> None:
        self._rng = rng
        self._drawn = dict.fromkeys(nemeses, 0)
        self._is_first = {n: not n.is_about.isdisjoint(workloads) for n in nemeses}

    def draw(self, is_fit: Callable[[Nemesis], bool] = lambda _nemesis: True) -> Nemesis | None:
        """One of those that struck least so far and are fit; None when none is.

        What a round cannot do (its links, this machine) has its turns in other rounds.
        """
        fit = [nemesis for nemesis in self._drawn if is_fit(nemesis)]
        if not fit:
            return None
        least = min(self._drawn[nemesis] for nemesis in fit)
        rare = [nemesis for nemesis in fit if self._drawn[nemesis] == least]
        first = [nemesis for nemesis in rare if self._is_first[nemesis]]
        chosen = self._rng.choice(first or rare)
        self._drawn[chosen] += 1
        return chosen


class Runner:
    """Runs the rounds of a run."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._rng = Random(settings.seed)
        self._deck = Deck(settings.nemeses, self._rng, settings.workloads)
        self._ends_at = 0.0
        self._spent_s: dict[int, float] = {}
        """Time under faults, by the number of nodes."""

    def rounds(self) -> Iterator[Round]:
        """Run round after round until the time is over; each has ended when it is given out."""
        self._ends_at = time.monotonic() + self._settings.seconds
        number = 0
        while number == 0 or self._ends_at - time.monotonic() > self._settings.round_s / 3:
            # Whichever kind of cluster had less of the time so far.
            nodes = min(self._settings.nodes, key=lambda count: self._spent_s.get(count, 0.0))
            number += 1
            folder = self._settings.out / f"round-{number:02}-{nodes}-nodes"
            folder.mkdir(parents=True)
            round_ = Round(number, nodes, folder, self._settings.must_not_lack)
            links = self._links(number)
            round_.links_name = links.name
            try:
                self._round(round_, links)
            finally:
                links.close()
            yield round_

    def _links(self, number: int) -> Links:
        """Those of the settings; mixed: two rounds of one kind, two of the other."""
        kind = self._settings.links
        if kind == "namespaces" or (kind == "mixed" and (number - 1) // 2 % 2):
            try:
                return NamespaceLinks()
            except LackError as error:
                if kind == "namespaces":
                    raise
                self._say(f"no network namespaces, all rounds by proxy: {error}")
        return ProxyLinks()

    def tidy(self, round_: Round) -> None:
        """Throw away the disks of a round in which nothing was wrong."""
        for path in round_.folder.glob("disk-*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _round(self, round_: Round, links: Links) -> None:
        cluster = Cluster(round_.folder, round_.nodes, links, self._make_disk, DEFAULTS)
        round_.disk_name = cluster.nodes[1].disk.name
        load: LoadProcess | None = None
        try:
            cluster.start()
            topics = TOPICS_3 if round_.nodes == 3 else TOPICS_5
            own: dict[str, tuple[int, int]] = {}
            due: dict[str, tuple[int, int]] = {}
            if TRANSACTIONS in self._settings.workloads:
                own = {TRANSACTIONAL: (TRANSACTIONAL_PARTITIONS, round_.nodes)}
            if DELAYS in self._settings.workloads:
                due = {DUE: (DUE_PARTITIONS, round_.nodes)}
            for topic, (partitions, replicas) in {**topics, **own, **due}.items():
                words = ["-p", str(partitions), "-r", str(replicas)]
                if topic in due:
                    words += [f"--config={key}={value}" for key, value in KEPT.items()]
                done = cluster.command("topic", "create", topic, *words)
                if done.returncode:
                    raise StuckError(f"cannot create {topic}: {done.stderr}")
            plan = Plan(
                bootstrap=cluster.bootstrap,
                topics={topic: partitions for topic, (partitions, _) in topics.items()},
                workloads=self._settings.workloads,
                rate=self._settings.rate,
                seed=self._rng.getrandbits(32),
                transactional={topic: partitions for topic, (partitions, _) in own.items()},
                due={topic: partitions for topic, (partitions, _) in due.items()},
                replicas=round_.nodes,
                plant=self._settings.plant,
            )
            cluster.wait_whole(60)
            load = LoadProcess(plan, round_.folder, links.client_prefix)
            cluster.client_pids.append(load.pid)
            self._strike(round_, Stage(cluster, self._rng), load)
            load.stop()
            round_.ended = time.monotonic()
            round_.load_exit = load.wait(ENDS_S)
            round_.told = load.told
            round_.differences = differences(cluster)
        except (StuckError, subprocess.TimeoutExpired) as error:
            round_.stuck = str(error)
            self._say(f"stuck: {error}")
        except (LackError, OSError, subprocess.SubprocessError) as error:
            # A tool or this machine failed us, not the cluster; the next round has its own.
            round_.broken = f"{type(error).__name__}: {error}"
            self._say(f"round {round_.number} ends early: {round_.broken}")
        finally:
            if load is not None:
                load.close()
            cluster.stop()

    def _make_disk(self, folder: Path) -> Disk:
        if not any(nemesis.name in OWN_DISKS for nemesis in self._settings.nemeses):
            return PlainDisk(folder)
        return best_disk(folder)

    def _strike(self, round_: Round, stage: Stage, load: LoadProcess) -> None:
        """Fault after fault until the round's time is over, and one however long forming took."""
        patience = Patience(FIRST_ACK_S, stage.scarcity)
        while not load.told.get("acked"):
            if patience.is_over or not load.is_running:
                raise StuckError("nothing is acknowledged on a healthy cluster")
            time.sleep(0.05)
        round_.stage = stage
        round_.began = time.monotonic()
        stage.learn_members()
        until = min(round_.began + self._settings.round_s, self._ends_at)
        while (time.monotonic() < until or not round_.faults) and load.is_running:
            nemesis = self._deck.draw(partial(self._is_fit, round_, stage))
            if nemesis is None:
                raise StuckError("this machine can do none of these faults")
            stage.hold(*QUIET_S)
            fault = Fault(nemesis.name, time.monotonic() - round_.began)
            round_.faults.append(fault)
            stage.details.clear()
            stage.jumps.clear()
            try:
                nemesis.strike(stage)
            finally:
                fault.detail = "; ".join(stage.details)
                fault.clocks = list(stage.jumps)
            stage.restore()
            fault.healed = time.monotonic() - round_.began
            stage.wait_whole()
            fault.whole = time.monotonic() - round_.began
            self._say(self._line(round_, fault, load))
        stage.hold(*QUIET_S)
        nodes, seconds = round_.nodes, time.monotonic() - round_.began
        self._spent_s[nodes] = self._spent_s.get(nodes, 0.0) + seconds

    def _is_fit(self, round_: Round, stage: Stage, nemesis: Nemesis) -> bool:
        """True when a nemesis can strike here; what it lacks is told once a round."""
        if nemesis.needs_proxy and not stage.links.can_spoil:
            return False
        if nemesis.name in round_.lacks:
            return False
        lack = nemesis.lack(stage)
        if lack:
            self._say(f"{nemesis.name} is left out: {lack}")
            round_.lacks[nemesis.name] = lack
        return not lack

    def _line(self, round_: Round, fault: Fault, load: LoadProcess) -> str:
        left = max(0.0, self._ends_at - time.monotonic())
        return (
            f"{fault.began:6.1f} s round {round_.number} ({round_.nodes} nodes): {fault.nemesis}: "
            f"{fault.detail}; healed after {fault.healed - fault.began:.1f} s, whole after "
            f"{fault.whole - fault.began:.1f} s; {load.told.get('acked', 0)} acknowledged, "
            f"{left:.0f} s left"
        )
