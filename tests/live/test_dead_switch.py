"""A switch dies: packets are lost without a word, and TCP backs off further with every try.

The links are routes between network namespaces, since no proxy and no fault switch can lose a
packet of a connection that the kernel believes in.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from jepsen_like.live.cluster import Cluster, wait_until
from jepsen_like.live.links import BLOCKED
from jepsen_like.live.namespaces import NamespaceLinks
from jepsen_like.live.storage import LackError, PlainDisk
from tests.live.harness import lack

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.root, pytest.mark.soak]

CUT_S = 14.0
"""By then a connection has tried after 12.6 s, and would try again after 25.4 s."""
BACK_S = 8.0


def test_nodes_find_each_other_again_soon_after_a_long_cut(tmp_path: Path) -> None:
    try:
        links = NamespaceLinks()
    except LackError as why:
        lack(str(why))
    try:
        cluster = Cluster(tmp_path, 3, links, PlainDisk, {})
        try:
            cluster.start()
            links.set(dict.fromkeys(itertools.permutations(cluster.nodes, 2), BLOCKED))
            wait_until(lambda: len(cluster.troubles()) >= 3, 20, lambda: "nobody sees a majority")
            time.sleep(CUT_S)
            links.set({})
            wait_until(lambda: not cluster.troubles(), BACK_S, lambda: str(cluster.troubles()))
        finally:
            cluster.stop()
    finally:
        links.close()
