"""Replicas compared: at the end of a round every copy of a partition holds the same bytes.

Segments may have rolled at other places, so a log is compared as one piece. The cluster is healed
and idle; nodes are stopped only after all have caught up.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from jepsen_like.live.cluster import Cluster, wait_until

CAUGHT_UP_S: Final = 30.0


def _ends(cluster: Cluster) -> dict[str, set[int]]:
    """All log ends that nodes tell, by partition."""
    ends: dict[str, set[int]] = {}
    for node in cluster.nodes.values():
        status: dict[str, Any] = node.get("/status") or {"partitions": []}
        for row in status["partitions"]:
            ends.setdefault(f"{row['topic']}-{row['partition']}", set()).add(row["log_end_offset"])
    return ends


def log_hash(folder: Path) -> str:
    """Hash of all record bytes of a replica."""
    digest = sha256()
    for segment in sorted(folder.glob("*.log")):
        digest.update(segment.read_bytes())
    return digest.hexdigest()


def differences(cluster: Cluster) -> list[str]:
    """Stop all nodes, and say which partitions' copies are not the same.

    Raises:
        StuckError: the replicas do not reach the same end.
    """
    cluster.wait_whole(CAUGHT_UP_S)
    wait_until(
        lambda: all(len(ends) == 1 for ends in _ends(cluster).values()),
        CAUGHT_UP_S,
        lambda: f"replicas at the same end: {_ends(cluster)}",
    )
    for node in cluster.nodes.values():
        node.kill()
    hashes: dict[str, dict[str, list[int]]] = {}
    for node in cluster.nodes.values():
        for folder in sorted((node.data / "topics").glob("*/partition-*")):
            name = f"{folder.parent.name}/{folder.name}"
            by_hash = hashes.setdefault(name, {})
            by_hash.setdefault(log_hash(folder), []).append(node.node_id)
    return [
        f"{name}: nodes {' against '.join(map(str, by_hash.values()))}"
        for name, by_hash in hashes.items()
        if len(by_hash) > 1
    ]
