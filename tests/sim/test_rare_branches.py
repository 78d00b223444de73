"""Branches that are rarely taken: made frequent in simulation, and nowhere else."""

from __future__ import annotations

import re

import attrs
import pytest

from jepsen_like.cluster.run import run_cluster_seed
from jepsen_like.cluster.world import ClusterWorld
from raftmq.node.environment import Environment
from raftmq.ports import never
from tests.tree import ROOT

SITE = re.compile(r'buggify\("([a-z_.]+)"\)')


def sites() -> set[str]:
    files = (ROOT / "raftmq").rglob("*.py")
    return {site for file in files for site in SITE.findall(file.read_text())}


def test_a_run_comes_by_every_site(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, bool] = {}

    def buggify(_world: ClusterWorld, site: str) -> bool:
        asked[site] = True
        return False

    monkeypatch.setattr(ClusterWorld, "buggify", buggify)
    run_cluster_seed(1)
    assert asked.keys() == sites()
    assert len(asked) >= 6


def test_a_real_node_takes_none_more_often() -> None:
    assert attrs.fields(Environment).buggify.default is never
    assert not never("raft.short_append")
    makers = ("node/node.py", "node/process.py", "cli/start.py")
    assert not any("buggify" in (ROOT / "raftmq" / path).read_text() for path in makers)
