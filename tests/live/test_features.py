"""Levels of features by our command line and by Kafka's `kafka-features.sh`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from raftmq.metadata.features import SUPPORTED
from tests.clients.programs import kafka_command
from tests.live.harness import Cluster

pytestmark = [pytest.mark.live, pytest.mark.slow]

LEVEL, VERSION = "raftmq.level", "transaction.version"
NEWEST = SUPPORTED[LEVEL][1]


def kafka_features(cluster: Cluster, *words: str) -> tuple[int, str]:
    """Exit code and output of Kafka's tool."""
    tool = ["org.apache.kafka.tools.FeatureCommand", "--bootstrap-server", cluster.bootstrap]
    done = subprocess.run(
        [*kafka_command(), *tool, *words], capture_output=True, text=True, timeout=240, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_new_cluster_has_the_newest_levels_which_are_shown_and_changed(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=1) as cluster:
        shown = cluster.run("cluster", "features")
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.split()[:4] == ["Feature", "Level", "RaisableTo", "SupportedByNode"]
        code, told = kafka_features(cluster, "describe")
        assert code == 0, told
        assert f"Feature: {LEVEL}\tSupportedMinVersion: 1\tSupportedMaxVersion: {NEWEST}" in told
        assert f"FinalizedVersionLevel: {NEWEST}\tEpoch: " in told
        assert f"Feature: {VERSION}\tSupportedMinVersion: 0\tSupportedMaxVersion: 2" in told
        assert "FinalizedVersionLevel: 2\tEpoch: " in told

        refused = cluster.run("cluster", "features", "--raise", f"{LEVEL}={NEWEST + 1}")
        assert refused.returncode == 1
        told = f"raftmq.level cannot be {NEWEST + 1}: broker 1 supports 1 to {NEWEST}"
        assert told in refused.stderr
        usage = cluster.run("cluster", "features", "--raise", LEVEL)
        assert usage.returncode == 2
        assert "NAME=LEVEL is wanted" in usage.stderr
        code, told = kafka_features(cluster, "downgrade", "--feature", f"{LEVEL}=2")
        assert code == 1
        assert "never lowered" in told

        code, told = kafka_features(cluster, "downgrade", "--feature", f"{VERSION}=1")
        assert (code, "was downgraded to 1" in told) == (0, True), told
        rehearsed = cluster.run("cluster", "features", "--raise", f"{VERSION}=2", "--dry-run")
        assert rehearsed.returncode == 0, rehearsed.stderr
        assert "it can be done" in rehearsed.stdout
        code, told = kafka_features(cluster, "upgrade", "--feature", f"{VERSION}=2")
        assert (code, "was upgraded to 2" in told) == (0, True), told
        shown = cluster.run("cluster", "features", "--json")
        answer = json.loads(shown.stdout)
        assert answer["Features"] == [
            {
                "Feature": LEVEL,
                "Level": NEWEST,
                "RaisableTo": NEWEST,
                "SupportedByNode": {"1": f"1-{NEWEST}"},
            },
            {
                "Feature": VERSION,
                "Level": 2,
                "RaisableTo": 2,
                "SupportedByNode": {"1": "0-2"},
            },
        ]

        cluster[1].kill()
        cluster.bring_back()
        code, told = kafka_features(cluster, "describe")
        assert f"FinalizedVersionLevel: 2\tEpoch: {answer['Epoch']}" in told, "it outlives a crash"
