"""Each of the smallest inputs that once ended or stalled a node, with a canary at work beside it.

Bad input costs its own connection and nothing else: every node lives, nothing acknowledged is lost,
an application beside is as quick as before, and the log says it once. What a busy machine does to
latency and to the loop does not come five times in a row at the same input, what an input does
comes each time: only that is held against the product.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from uuid import UUID

import pytest
from attrs import define, field

from jepsen_like.fuzz.canary import Canary
from raftmq.logs import PERIOD_S
from raftmq.types import TopicId
from raftmq_client import Producer
from tests.live.harness import Cluster, Node, wait_until
from tests.live.hostile import (
    LIAR,
    Hostile,
    admin_inputs,
    client_inputs,
    peer_inputs,
)
from tests.live.load import create_topic, leaders
from tests.second_try import PromiseBrokenError

pytestmark = [pytest.mark.live, pytest.mark.slow]

TRIES = 5
RECORDS_BEFORE = 150
RECORDS_BESIDE = 25
"""Acknowledged during and after each input; so few that the second slowest is their p99."""
LATENCY_FLOOR_S = 0.25
"""Where twice the p99 of before is less. The inputs held nodes up for seconds and an election takes
0.15 to 0.3 s, while an fsync beside others', or a turn of another process, is 0.1 s at times."""
MEMORY_BYTES_MAX = 96 << 20
"""More of it than before any input would be what one of them announced, or never gave back."""
LINES_MAX = 20
"""Of an event in ten seconds, at the port that may say most."""


@define
class Watch:
    """Sends inputs, and looks at what each of them costs others."""

    cluster: Cluster
    canary: Canary
    latency_s_max: float
    sent: Counter[tuple[int, str]] = field(factory=Counter)
    """Lines that a node owes its log, by event."""
    pids: dict[int, int] = field(init=False)
    resident: dict[int, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pids = {n: node.pid for n, node in self.cluster.nodes.items()}
        self.resident = {pid: resident_bytes(pid) for pid in self.pids.values()}

    def send(self, hostile: Hostile, nodes: Sequence[Node]) -> None:
        """Send an input, again where it seems to cost others something."""
        for _ in range(TRIES):
            for node in nodes:
                self.sent[node.node_id, hostile.event] += hostile.lines
            complaints = self._complaints(hostile, nodes)
            if not complaints:
                return
        pytest.fail(f"{hostile.name}, each of {TRIES} times: {complaints}")

    def _complaints(self, hostile: Hostile, nodes: Sequence[Node]) -> list[str]:
        canary, stalls, began = self.canary, self._stalls(), time.monotonic()
        goal = canary.acknowledged + RECORDS_BESIDE
        with ExitStack() as stack:
            for node in nodes:
                hostile.send(node, stack)
            goal = max(goal, canary.acknowledged + RECORDS_BESIDE // 2)
            wait_until(lambda: canary.acknowledged >= goal, 60, f"records beside {hostile.name}")
        live = {n: node.pid for n, node in self.cluster.nodes.items() if node.is_running}
        assert live == self.pids, f"a node ended: {hostile.name}"
        complaints = []
        beside = [took for sent, took in canary.acknowledgements if sent + took >= began]
        if (p99 := percentile(beside)) > self.latency_s_max:
            complaints.append(f"p99 {p99 * 1e3:.0f} ms, bound {self.latency_s_max * 1e3:.0f} ms")
        if more := self._stalls() - stalls:
            complaints.append(f"{more} stalls of loops that had a core")
        for pid, before in self.resident.items():
            if (more := resident_bytes(pid) - before) > MEMORY_BYTES_MAX:
                complaints.append(f"a node takes {more >> 20} MiB more")
        return complaints

    def _stalls(self) -> int:
        """Ticks later than a quarter of the election timeout, although the loop had a core."""
        told = [node.get("/status") for node in self.cluster.nodes.values()]
        return sum(one["loop_stalls"] - one["loop_stalls_without_core"] for one in told)


def percentile(latencies_s: Sequence[float]) -> float:
    return sorted(latencies_s)[int(0.99 * (len(latencies_s) - 1))]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def said(node: Node, event: str) -> tuple[int, int]:
    """Lines of that event in a node's log, and how often it came, with what was left out."""
    text = node.log_path.read_text()
    lines = [one for one in map(json.loads, text.splitlines()) if one["event"] == event]
    alone = [one for one in lines if "left_out" not in one or "reason" in one]
    return len(lines), len(alone) + sum(one.get("left_out", 0) for one in lines)


def check_log(node: Node, event: str, count: int, lines_max: int) -> None:
    """The event came so often, and the lines of it are within the limit."""
    what = f"node {node.node_id}: {count} x {event!r}"
    wait_until(lambda: said(node, event)[1] >= count, 3 * PERIOD_S, what)
    lines, times = said(node, event)
    assert times == count, what
    assert lines <= lines_max, what


def abuse(cluster: Cluster, canary: Canary, clients: Sequence[Hostile]) -> Counter[tuple[int, str]]:
    """Send every input; the lines that the logs owe."""
    create_topic(cluster.bootstrap, "t", 1)
    wait_until(lambda: min(canary.acknowledged, canary.heard) >= RECORDS_BEFORE, 90)
    before = percentile(canary.latencies_s[RECORDS_BEFORE // 3 :])
    watch = Watch(cluster, canary, max(2 * before, LATENCY_FLOOR_S))
    nodes = list(cluster.nodes.values())
    topic_id = TopicId(UUID(nodes[0].partition_folder("t").parent.name[-36:]))
    for hostile in (*peer_inputs(nodes, topic_id), *admin_inputs()):
        watch.send(hostile, nodes)
    leader = cluster[leaders(cluster.bootstrap, canary.topic)[0]]
    for hostile in clients:
        watch.send(hostile, [leader])
    goal = canary.heard + RECORDS_BESIDE
    wait_until(lambda: canary.heard >= goal, 60, "the group reads on")
    return watch.sent


def test_hostile_inputs_cost_nobody_else(tmp_path: Path) -> None:
    clients = list(client_inputs("t"))
    with Cluster(tmp_path) as cluster:
        canary = Canary(cluster.bootstrap, Random(1))
        canary.start()
        began = time.monotonic()
        try:
            sent = abuse(cluster, canary, clients)
        finally:
            canary.stop()
        lines_max = LINES_MAX * int(2 + (time.monotonic() - began) // PERIOD_S)
        for (node_id, event), count in sent.items():
            if event:
                check_log(cluster[node_id], event, count, lines_max)
        for node in cluster.nodes.values():
            text = node.text("/metrics")
            assert 'raftmq_peer_streams_refused_total{reason="bug"} 0' in text
            assert f'raftmq_peer_connected{{peer="{LIAR}"}}' not in text, "nobody dials it"
            assert "Traceback" not in node.log_path.read_text(), "no bug of ours was logged"
            node.kill()
        cluster.bring_back()  # whatever was kept does not keep them from it
        if wrong := [*canary.errors, *canary.reckon()]:
            raise PromiseBrokenError(f"the canary: {wrong}")
        with Producer(cluster.bootstrap) as producer:
            assert producer.send("t", b"goes on").result(60).offset >= 0
