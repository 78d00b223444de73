"""Replicas compared: at the end of a round every copy of a partition holds the same bytes.

Segments may have rolled at other places, so a log is compared as one piece. The cluster is healed
and idle; nodes are stopped only after all have caught up. What a nemesis damaged late may not have
been come to by the scrub, which takes minutes: a copy with a batch that fails its checksum is left
out where another is sound.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from jepsen_like.live.cluster import Cluster, wait_until
from raftmq.runtime.disk import RealDisk
from raftmq.tools.inspect import verify_folder

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
        cluster.scarcity,
    )
    for node in cluster.nodes.values():
        node.kill()
    copies: dict[str, dict[int, Path]] = {}
    for node in cluster.nodes.values():
        for folder in sorted((node.data / "topics").glob("*/partition-*")):
            name = f"{folder.parent.name}/{folder.name}"
            copies.setdefault(name, {})[node.node_id] = folder
    told = {name: compare(folders) for name, folders in copies.items()}
    return [f"{name}: {why}" for name, why in told.items() if why]


def compare(folders: Mapping[int, Path]) -> str:
    """Which copies of a partition are not the same, by node; "" when all sound ones are."""
    by_hash: dict[str, list[int]] = {}
    for node_id, folder in folders.items():
        by_hash.setdefault(log_hash(folder), []).append(node_id)
    if len(by_hash) > 1:
        sound = [ids for ids in by_hash.values() if not is_damaged(folders[ids[0]])]
        if len(sound) != 1:
            return f"nodes {' against '.join(map(str, by_hash.values()))}"
    return ""


def is_damaged(folder: Path) -> bool:
    """True when the bytes of a copy's log say themselves that they are not what was written."""
    findings = verify_folder(RealDisk(is_read_only=True), str(folder))
    return any(one.is_damage and one.path.endswith(".log") for one in findings)
