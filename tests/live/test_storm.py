"""Storms of kills under a producer that gives nothing up: it has no cause to raise its epoch.

What an idempotent producer sends under a raised epoch no broker can tell from new records
(docs/idempotence.md), so brokers must not make it raise one. Here it may wait as long as it takes,
which leaves only what it was answered: a second copy, or a raised epoch, is ours.
"""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.live.harness import Cluster
from tests.live.load import Load, create_topic, leaders

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.soak]

PARTITIONS = 100
EPOCHS = re.compile(r'^raftmq_topic_producer_epochs_total\{topic="t"\} (\d+)', re.MULTILINE)


def epochs_raised(cluster: Cluster) -> int:
    """As the nodes have counted since their last start."""
    found = [EPOCHS.search(node.text("/metrics")) for node in cluster.live]
    return sum(int(match.group(1)) for match in found if match is not None)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_storm_of_kills_copies_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with Cluster(tmp_path) as cluster:
        create_topic(cluster.bootstrap, "t", PARTITIONS, min_insync_replicas="2")
        patient = {"message.timeout.ms": 0}
        with Load(cluster.bootstrap, "t", PARTITIONS, rate=1_000, **patient) as load:
            load.wait_for(PARTITIONS, 60)
            for _ in range(8):
                node = cluster[rng.choice(list(cluster.nodes))]
                before = epochs_raised(cluster)
                node.kill()
                time.sleep(rng.choice([0, 0.1, 0.5]))
                node.start()
                node.wait_ready(90)
                if rng.random() < 0.5:
                    load.wait_for(300, 120)
                assert before == 0
            victim = cluster[leaders(cluster.bootstrap, "t")[0]]
            victim.signal(signal.SIGSTOP)
            time.sleep(5)
            victim.signal(signal.SIGCONT)
            load.wait_for(10 * PARTITIONS, 120)
        assert epochs_raised(cluster) == 0
        reckoning = load.reckon()
        assert load.errors == []
        reckoning.check()
