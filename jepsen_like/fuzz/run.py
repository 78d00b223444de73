"""A run of the fuzzer: a real cluster, a canary at work, hostile bytes, and what came of them.

A run finds a fault when a node ends, when it logs a traceback, when it takes too much memory, when
its loop stalls although it had a core, when the canary's records are not as they were acknowledged.
Inputs follow from the seed and their number. An input that made a node answer in a way that no
input before it did is kept as a line of the corpus, and every run begins with the corpus.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import socket
import ssl
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, takewhile
from pathlib import Path
from random import Random
from typing import Any, Final, TextIO, cast

import msgspec
from attrs import define, field

from jepsen_like.fuzz.canary import Canary
from jepsen_like.fuzz.pages import PageMaker
from jepsen_like.fuzz.peers import PeerFrameMaker, Target
from jepsen_like.fuzz.requests import RequestMaker
from jepsen_like.fuzz.secured import (
    Doors,
    HandshakeMaker,
    LoginMaker,
    ProofMaker,
    behind_tls,
    login_pieces,
    open_doors,
    proved_pieces,
)
from jepsen_like.fuzz.spoil import Frame
from jepsen_like.fuzz.stalls import OtherThreads, read_stall
from raftmq.testing import Cluster
from raftmq.types import NodeId, RaftGroupId, TopicId
from raftmq_client import TopicPartition
from raftmq_client.blocking import Admin, Consumer

PORTS: Final = ("client", "peer", "admin", "tls", "sasl", "secret")
"""The last three are protected: clients' by TLS and by SASL, the peers' by a secret."""
AT_ONCE: Final = 16
ANSWER_S: Final = 0.03
LOOK_S: Final = 1.0
RESIDENT_BYTES_MAX: Final = 600 << 20
FINDINGS_MAX: Final = 8
STALL_LINES_MAX: Final = 40
CORPUS_BYTES_MAX: Final = 2 << 10
"""Of an input that is kept for good."""
KEPT_INPUTS: Final = 4000
TOPICS: Final = ("fuzz-a", "fuzz-b")
SETTINGS: Final[dict[str, object]] = {"replicas_max": 60, "recent_bytes_max": 256 << 10}
"""What a stranger may use up is small, so that the fuzzer meets the limits within a minute or two.
With those of every day (300 replicas of 90 KiB, 16 MiB of newest batches) a node grows for a
quarter of an hour before it is as large as it may be."""
GROWTH_S: Final = 300.0
"""A run so long is judged by whether memory levels."""
GROWTH_MIB_PER_MINUTE_MAX: Final = 0.3
_NUMBERS: Final = re.compile(r"\d+")
CORPUS: Final = Path(__file__).parent / "corpus"

Input = list[Frame]
"""What is sent on one connection, piece by piece."""


class NodeEndedError(Exception):
    """The worst that a run can find; nothing else is worth looking at."""


@define(slots=True)
class Outcome:
    """What a run found."""

    inputs: int = 0
    kinds: Counter[str] = field(factory=Counter)
    findings: list[str] = field(factory=list)
    resident_bytes: dict[int, list[int]] = field(factory=dict)
    stalls: int = 0
    """Of loops that had a core, while no other thread of their node waited for one."""
    stalls_excused: int = 0
    """Of loops that waited for the interpreter, while the thread that had it waited for a core."""
    stall_lines: list[str] = field(factory=list)
    """What nodes logged of both."""
    acknowledged: int = 0
    latency_ms_p99: float = 0.0


class Fuzzer:
    """One run against one port of every node."""

    def __init__(
        self, cluster: Cluster, port: str, seed: int, corpora: Sequence[Path], doors: Doors
    ) -> None:
        """`corpora` are read first; what is new is added to the last of them."""
        self._cluster = cluster
        self._port = port
        self._seed = seed
        self._doors = doors
        self._seen: list[bytes] = []
        self._corpora = corpora
        self._known_count = 0
        self._recent: deque[tuple[int, Input]] = deque(maxlen=KEPT_INPUTS)
        self._tracebacks: set[str] = set()
        self._read_up_to: Counter[int] = Counter()
        self._pids = {node: cluster.node(node).pid for node in cluster.node_ids}
        self._statuses = {node: self._status(node) for node in cluster.node_ids}
        self._groups = tuple(_groups_of(cluster.bootstrap, TOPICS))
        self._stalls_before = self._stalls()
        self._others = OtherThreads(self._pids)
        self.outcome = Outcome()

    def run(self, until: Callable[[], bool], progress: Callable[[Outcome], None]) -> None:
        """Send inputs until told to stop, or until something was found."""
        canary = Canary(self._cluster.bootstrap, Random(f"{self._seed}/canary"))
        canary.start()
        began = looked_at = time.monotonic()
        try:
            for batch in _in_batches(self._inputs(), AT_ONCE):
                self._throw(batch)
                if time.monotonic() - looked_at >= LOOK_S:
                    looked_at = time.monotonic()
                    self._look()
                    progress(self.outcome)
                if until() or len(self.outcome.findings) >= FINDINGS_MAX:
                    break
            self._look()
        except NodeEndedError as error:
            self.outcome.findings.append(str(error))
            return
        finally:
            canary.stop()
            self._others.close()
        outcome = self.outcome
        outcome.stalls = self._stalls() - self._stalls_before - outcome.stalls_excused
        outcome.acknowledged = canary.acknowledged
        if canary.latencies_s:
            ordered = sorted(canary.latencies_s)
            outcome.latency_ms_p99 = 1e3 * ordered[int(0.99 * (len(ordered) - 1))]
        outcome.findings += growth(outcome.resident_bytes, time.monotonic() - began)
        outcome.findings += canary.errors[:5]
        outcome.findings += canary.reckon()

    def write_recent(self, folder: Path) -> Path:
        """The last inputs, for a second look at a finding."""
        path = folder / f"fuzz-{self._port}-{self._seed}.jsonl"
        with path.open("w") as file:
            for number, frames in self._recent:
                file.write(json.dumps({"number": number, **_as_line(frames)}) + "\n")
        return path

    # ---- inputs ----

    def _inputs(self) -> Iterator[Input]:
        known = [path.read_text().splitlines() for path in self._corpora if path.exists()]
        self._known_count = sum(map(len, known))
        for line in chain.from_iterable(known):
            told = json.loads(line)
            pieces = [self._with_names(bytes.fromhex(piece)) for piece in told["pieces"]]
            yield [Frame(told["label"], piece) for piece in pieces]
        number = 0
        while True:
            yield self._draw(Random(f"{self._seed}/{number}"), number)
            number += 1

    def _draw(self, random: Random, number: int) -> Input:
        if self._port == "client":
            maker = RequestMaker(TOPICS, random)
            return [maker.draw() for _ in range(random.choice((1, 1, 2, 5)))]
        if self._port == "admin":
            return [PageMaker(random).draw()]
        if self._port == "tls":
            return HandshakeMaker(random).draw()
        if self._port == "sasl":
            return LoginMaker(random).draw()
        peers = PeerFrameMaker(self._target(number % len(self._pids)), random)
        return peers.draw() if self._port == "peer" else ProofMaker(peers, random).draw()

    def _with_names(self, piece: bytes) -> bytes:
        """The corpus outlives clusters: a hello in it is said anew."""
        if piece != b"HELLO":
            return piece
        return PeerFrameMaker(self._target(0), Random(0)).hello().data

    def _target(self, index: int) -> Target:
        ids = self._cluster.node_ids
        to, me = ids[index], ids[(index + 1) % len(ids)]
        status = self._statuses
        return Target(
            cluster_id=status[to]["cluster_id"],
            formation_id=status[to]["formation_id"],
            me=NodeId(me),
            my_storage=status[me]["storage_id"],
            to=NodeId(to),
            to_storage=status[to]["storage_id"],
            groups=self._groups,
        )

    # ---- sending ----

    def _throw(self, batch: list[Input]) -> None:
        outcome = self.outcome
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            for frames in batch:
                index = outcome.inputs % len(self._pids)
                self._recent.append((outcome.inputs, frames))
                outcome.inputs += 1
                sock = stack.enter_context(self._connect(index))
                if self._port == "secret":
                    sock, *seen = behind_tls(sock)
                    stack.enter_context(sock)
                    self._seen = seen
                with contextlib.suppress(OSError):  # closed before we had finished
                    for data in self._pieces(sock, frames):
                        sock.sendall(data)
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ, frames)
            while selector.get_map() and (ready := selector.select(ANSWER_S)):
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    self._heard(key.data, _answer(cast(socket.socket, key.fileobj)))
            for key in list(selector.get_map().values()):
                self._heard(key.data, "silence")

    def _pieces(self, sock: socket.socket, frames: Input) -> Iterator[bytes]:
        if self._port == "sasl":
            yield from login_pieces(sock, frames)
        elif self._port == "secret":
            certificate, number = self._seen
            yield from proved_pieces(certificate, number, self._doors.secret, frames)
        else:
            yield from (frame.data for frame in frames)

    def _connect(self, index: int) -> socket.socket:
        node = self._cluster.node_ids[index]
        view = self._cluster.node(node)
        known = {"client": view.port, "admin": view.admin_port, **self._doors.ports}
        port = known.get(self._port)
        if port is None:
            port = _peer_port(self._statuses[node], node)
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        except OSError as error:
            self._look()  # it may have ended, which says more
            raise NodeEndedError(f"node {node} takes no connection: {error}") from error

    def _heard(self, frames: Input, answer: str) -> None:
        kind = f"{frames[0].label.split(' ')[0]}: {answer}"
        is_new = kind not in self.outcome.kinds and self.outcome.inputs > self._known_count
        if is_new and sum(len(frame.data) for frame in frames) <= CORPUS_BYTES_MAX:
            with self._corpora[-1].open("a") as file:
                file.write(json.dumps(_as_line(frames, answer)) + "\n")
        self.outcome.kinds[kind] += 1

    # ---- looking ----

    def _look(self) -> None:
        self._cluster.refresh()
        for node, pid in self._pids.items():
            view = self._cluster.node(node)
            if not view.is_running:
                raise NodeEndedError(f"node {node} {view.ended}: {self._cluster.log(node)[-3000:]}")
            resident = _resident_bytes(pid)
            self.outcome.resident_bytes.setdefault(node, []).append(resident)
            if resident > RESIDENT_BYTES_MAX:
                self.outcome.findings.append(f"node {node} takes {resident >> 20} MiB")
            said = self._cluster.log(node)
            end = said.rfind("\n") + 1  # the line after it may be under way
            fresh = said[self._read_up_to[node] : end]
            self._read_up_to[node] = end
            self._note_stalls(node, fresh)
            self.outcome.findings += (
                f"node {node} logged: {told}" for told in self._new_tracebacks(fresh)
            )

    def _note_stalls(self, node: int, said: str) -> None:
        """Those whose loop had a core, and which of them others explain."""
        for line in said.split("\n"):
            stall = read_stall(line)
            if stall is not None and stall.had_core:
                self.outcome.stall_lines.append(line)
                self.outcome.stalls_excused += self._others.explain(node, stall)

    def _new_tracebacks(self, said: str) -> Iterator[str]:
        """Each kind of traceback once, with the line of the log that it belongs to."""
        lines = said.split("\n")
        for at, line in enumerate(lines):
            if "Traceback" in line:
                told = list(takewhile(lambda line: line[:4] == "    ", lines[at:])) or lines[at:]
                *frames, error = told
                if (kind := _NUMBERS.sub("N", error)) not in self._tracebacks:
                    self._tracebacks.add(kind)
                    yield "\n".join([*lines[max(0, at - 1) : at], *frames[-12:], error])

    def _stalls(self) -> int:
        """Ticks later than a quarter of the election timeout, although the loop had a core."""
        answers = [self._status(node) for node in self._cluster.node_ids]
        return sum(a["loop_stalls"] - a["loop_stalls_without_core"] for a in answers if a)

    def _status(self, node: int) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self._cluster.node(node).admin_port}/status"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return cast(dict[str, Any], json.loads(answer.read()))
        except OSError:
            return {}  # it has ended, which `_look` tells


def _peer_port(status: dict[str, Any], node: int) -> int:
    (broker,) = (b for b in status["brokers"] if b["node_id"] == node)
    return int(broker["addresses"]["peer"].rpartition(":")[2])


def _groups_of(bootstrap: str, topics: Iterable[str]) -> Iterator[RaftGroupId]:
    """The Raft groups of these topics, as the metadata log names them."""
    key = TopicPartition("__cluster_metadata", 0)
    wanted = set(topics)
    with Consumer(bootstrap) as consumer:
        consumer.assign({key: 0})
        deadline = time.monotonic() + 20
        while wanted and time.monotonic() < deadline:
            for record in consumer.poll(0.5):
                command = json.loads(record.value or b"{}").get("command", {})
                topics = command["topics"] if command.get("type") == "CreateTopics" else ()
                for topic in topics:
                    if topic["name"] in wanted:
                        wanted.remove(topic["name"])
                        topic_id = msgspec.convert(topic["topic_id"], TopicId)
                        yield RaftGroupId(topic_id, 0, record.offset)
    if wanted:
        raise LookupError(f"the metadata log does not tell of {sorted(wanted)}")


def _answer(sock: socket.socket) -> str:
    """What a node made of an input, told roughly."""
    try:
        data = sock.recv(1 << 16)
    except ssl.SSLWantReadError:
        return "silence"  # of what was heard there is no content yet
    except OSError:
        return "reset"
    if not data:
        return "closed"
    if data.startswith(b"HTTP/"):
        return data.split(b"\r\n", 1)[0].decode("ascii", "replace")
    return "answered"


def _resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(resident_bytes: Mapping[int, Sequence[int]], seconds: float) -> Iterator[str]:
    """Tell which nodes still grow: the last quarter of a long run beside the one before."""
    for node, sizes in resident_bytes.items():
        quarter = len(sizes) // 4
        if seconds < GROWTH_S or not quarter:
            continue
        before, last = (
            sum(part) / quarter for part in (sizes[-2 * quarter : -quarter], sizes[-quarter:])
        )
        rate = (last - before) / (1 << 20) / (seconds / 240)
        if rate > GROWTH_MIB_PER_MINUTE_MAX:
            yield f"node {node} grows by {rate:.1f} MiB a minute, to {sizes[-1] >> 20} MiB"


def _as_line(frames: Input, answer: str = "") -> dict[str, Any]:
    pieces = [b"HELLO".hex() if f.label == "hello" else f.data.hex() for f in frames]
    return {"label": frames[-1].label, "answer": answer, "pieces": pieces}


def _in_batches(inputs: Iterator[Input], size: int) -> Iterator[list[Input]]:
    while True:
        yield [next(inputs) for _ in range(size)]


def _cluster(port: str, doors: Doors) -> Cluster:
    """Three nodes; one where a port of its own is for one process alone."""
    return Cluster(1 if doors.ports else 3, settings={**SETTINGS, **doors.settings})


def fuzz(port: str, minutes: float, seed: int, out: TextIO, folder: Path) -> Outcome:
    """Start a cluster, fuzz one of its ports for so long, and tell what came of it.

    New inputs of the corpus, and the last inputs before a finding, are written to `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    corpora = CORPUS / f"{port}.jsonl", folder / f"corpus-{port}.jsonl"
    with open_doors(port) as doors, _cluster(port, doors) as cluster:
        with Admin(cluster.bootstrap) as admin:
            for topic in TOPICS:
                admin.create_topic(topic, 1)
        fuzzer = Fuzzer(cluster, port, seed, corpora, doors)
        end = time.monotonic() + 60 * minutes

        def progress(outcome: Outcome) -> None:
            resident = [sizes[-1] >> 20 for sizes in outcome.resident_bytes.values()]
            print(
                f"{port}: {outcome.inputs} inputs, {len(outcome.kinds)} kinds of answers,"
                f" MiB {resident}, {max(0, end - time.monotonic()):.0f} s left",
                file=out,
                flush=True,
            )

        fuzzer.run(lambda: time.monotonic() >= end, progress)
        if fuzzer.outcome.findings:
            path = fuzzer.write_recent(folder)
            print(f"the last inputs are in {path}", file=out)
    if fuzzer.outcome.stalls > 0:
        for line in fuzzer.outcome.stall_lines[-STALL_LINES_MAX:]:
            print(line, file=out)
    for finding in fuzzer.outcome.findings:
        print(f"FOUND {finding}", file=out)
    return fuzzer.outcome
