"""What a node tells of itself: `/health` in a word, `/status` as one JSON object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raftmq.node.node import Node


def health(node: Node) -> tuple[bool, dict[str, Any]]:
    """Whether clients can rely on this node, and if not, why."""
    lifecycle = node.control.lifecycle
    reason = ""
    if node.plane.failure is not None:
        reason = node.plane.failure
    elif not node.is_serving:
        reason = "starting" if lifecycle.refusal is None else lifecycle.refusal
    elif lifecycle.is_draining:
        reason = "stopping"
    elif lifecycle.is_isolated:
        reason = "no majority of the metadata group is seen"
    elif not lifecycle.is_ready:
        reason = "not in Metadata: fenced by the controller"
    if reason:
        return False, {"status": "unavailable", "reason": reason, "node_id": node.node_id}
    return True, {"status": "ok", "node_id": node.node_id}


def _metadata(node: Node) -> dict[str, Any]:
    engine, replica = node.control.engine, node.metadata_replica
    if replica is None:
        return {"engine": node.config.metadata_engine, "version": engine.image.version}
    return {
        "engine": node.config.metadata_engine,
        "version": engine.image.version,
        "voters": [voter.node_id for voter in replica.voters],
        "learners": [learner.node_id for learner in replica.configuration.learners],
        "leader": None if replica.leader is None else replica.leader.node_id,
        "leader_epoch": replica.leader_epoch,
        "failure": replica.failure,
    }


def describe(node: Node) -> dict[str, Any]:
    """Everything an operator may ask of one node."""
    control, plane = node.control, node.plane
    controller = control.engine.controller_id
    return {
        "node_id": node.node_id,
        "cluster_id": node.config.cluster_id,
        "storage_id": f"{plane.self_id.storage_id:016x}",
        "formation_id": node.formation.formation_id,
        "rack": node.config.rack,
        "broker_epoch": control.lifecycle.broker_epoch,
        "is_ready": control.lifecycle.is_ready,
        "isolated_ms": round(control.lifecycle.isolated_ms()),
        "controller_id": -1 if controller is None else controller,
        "controller_epoch": control.engine.controller_epoch,
        "metadata": _metadata(node),
        "brokers": [
            {
                "node_id": broker.node_id,
                "is_fenced": broker.is_fenced,
                "epoch": broker.epoch,
                "rack": broker.rack,
            }
            for broker in (
                control.engine.image.brokers[n] for n in sorted(control.engine.image.brokers)
            )
        ],
        "partitions": _partitions(node),
        "groups": _groups(node),
        "peers": {
            str(node_id): {
                "queued_bytes": queued,
                "is_connected": plane.links.is_connected(node_id),
            }
            for node_id, queued in plane.links.queued_bytes().items()
        },
        "quarantined": list(node.partitions.quarantined),
        "journal_is_damaged": plane.journal.damaged,
        "loop_lag_ms_max": round(plane.loop_lag.seconds_max * 1e3, 1),
        "loop_stalls": plane.loop_stalls_count,
        "flushes": plane.flusher.latency.count,
    }


def _partitions(node: Node) -> list[dict[str, Any]]:
    rows = []
    for partition, replica in node.partitions.rows():
        rows.append(
            {
                "topic": partition.name.topic,
                "partition": partition.index,
                "leader": None if replica.leader is None else replica.leader.node_id,
                "is_leader": replica.is_leader,
                "leader_epoch": replica.leader_epoch,
                "voters": [voter.node_id for voter in replica.voters],
                "is_voter": replica.self_id in replica.voters,
                "isr": sorted(r.node_id for r in replica.in_sync_replicas()),
                "log_start_offset": replica.log_start_offset,
                "high_watermark": replica.high_watermark,
                "log_end_offset": replica.log_end_offset,
                "size_bytes": replica.log.size_bytes,
                "damaged": [list(span) for span in replica.damaged()],
                "failure": replica.failure,
            }
        )
    return rows


def _groups(node: Node) -> dict[str, Any]:
    image = node.control.engine.image.groups
    rows = {}
    for name in image.names():
        group = image.groups[name]
        rows[name] = {
            "coordinator": group.coordinator,
            "coordinator_epoch": group.coordinator_epoch,
            "generation": group.generation,
            "members": len(group.members),
        }
    return rows
