"""What a node reports of itself: `/health` in short, `/status` as one JSON object; and why a
partition is stuck, in words for an operator.

`describe` reads a thousand partitions in short turns of the loop, like a scrape. /health has two
answers for orchestrators: *live* (the process does its work; restarting it would not help) and
*ready* (clients may be sent here). A node that waits for its peers, or sees no metadata majority,
is live and not ready.

`diagnose` reads one replica of this node and what the node sees of the others. What only the leader
can know comes from the leader's node; in a partition without a leader each replica reports what it
sees, and `raftmq cluster status` puts these reports together. Nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import trio

from raftmq.node.metrics.families import TURN_S
from raftmq.node.metrics.partitions import first_kept_offset
from raftmq.node.metrics.transactions import OLDEST_MAX, Census
from raftmq.types import NodeId

if TYPE_CHECKING:
    from raftmq.metadata.image import MetadataImage, TopicImage
    from raftmq.node.composition import NodeCore
    from raftmq.node.node import Node
    from raftmq.partition.partition import Partition
    from raftmq.replication.replica import Replica
    from raftmq.types import ReplicaId


ROWS_PER_LOOK: Final = 8


def health(node: Node) -> tuple[bool, dict[str, Any]]:
    """Whether clients can rely on this node, and if not, why."""
    lifecycle = node.control.lifecycle
    reason = ""
    if node.plane.failure is not None:
        reason = node.plane.failure
    elif not node.is_serving:
        reason = node.taken or lifecycle.refusal or "starting"
    elif lifecycle.is_draining:
        reason = "stopping"
    elif lifecycle.is_isolated:
        reason = "no majority of the metadata group is seen"
    elif not lifecycle.is_ready:
        reason = "not in Metadata: fenced by the controller"
    answer = {"node_id": node.node_id, "is_live": node.plane.failure is None}
    if reason:
        return False, {"status": "unavailable", "reason": reason, "is_ready": False, **answer}
    return True, {"status": "ok", "is_ready": True, **answer}


async def describe(node: Node) -> dict[str, Any]:
    """Everything that an operator may want to know about one node."""
    control, plane = node.control, node.plane
    controller = control.engine.controller_id
    lifecycle = control.lifecycle
    size_bytes, free_bytes = node.events.disk_space()
    return {
        "node_id": node.node_id,
        "cluster_id": node.config.cluster_id,
        "storage_id": f"{plane.self_id.storage_id:016x}",
        "formation_id": node.formation.formation_id,
        "rack": node.config.rack,
        "health": health(node)[1],
        "broker_epoch": lifecycle.broker_epoch,
        "is_ready": lifecycle.is_ready,
        "isolation": {
            "is_isolated": lifecycle.is_isolated,
            "isolated_ms": round(lifecycle.isolated_ms()),
            "handed_over": node.partitions.isolation.handed_over_count,
        },
        "controller_id": -1 if controller is None else controller,
        "controller_epoch": control.engine.controller_epoch,
        "metadata": _metadata(node),
        "brokers": _brokers(node),
        "turned_away": {str(n): control.turned_away[n] for n in sorted(control.turned_away)},
        "rivals": [
            {"node_id": hello.node_id, "storage_id": hello.storage_id, "address": hello.address}
            for hello in node.links.rivals()
        ],
        "partitions": await _partitions(node),
        "not_running": await _not_running(node),
        "unheld": await _unheld(node),
        "groups": await _groups(node),
        "transactions": await _transactions(node),
        "peers": {
            str(node_id): {
                "queued_bytes": queued,
                "is_connected": plane.links.is_connected(node_id),
            }
            for node_id, queued in plane.links.queued_bytes().items()
        },
        "faults": None if node.faults is None else node.faults.show(),
        "catch_up": {
            "limit_bytes_per_s": plane.catch_up.rate.bytes_per_s,
            "bytes_per_s": plane.catch_up.rate.speed,
            "held": plane.catch_up.rate.waiting_count,
        },
        "quarantined": list(node.partitions.quarantined),
        "journal_is_damaged": plane.journal.damaged,
        "checks": {
            "scrubbed_bytes": node.partitions.counts.scrub_read_bytes,
            "scrubbed_batches": node.partitions.counts.scrub_batches,
            "damages_found": plane.shared.watch.damages_found,
            "damages_repaired": plane.shared.watch.damages_repaired,
        },
        "disk": {
            "size_bytes": size_bytes,
            "free_bytes": free_bytes,
            "is_full": node.events.is_disk_full,
            "is_stuck": node.events.is_disk_stuck,
        },
        "loop_lag_ms_max": round(plane.loop_watch.lag.seconds_max * 1e3, 1),
        "loop_stalls": plane.loop_watch.stalls_count,
        "loop_stalls_without_core": plane.loop_watch.without_core_count,
        "flushes": plane.flusher.latency.count,
    }


def _metadata(node: Node) -> dict[str, Any]:
    engine, replica = node.control.engine, node.metadata_replica
    told: dict[str, Any] = {
        "engine": node.config.metadata_engine,
        "version": engine.image.version,
        "applied_index": node.machine.applied_end,
    }
    if replica is None:
        return told

    def row(member: ReplicaId) -> dict[str, Any]:
        """How far a member is; a follower knows that only of itself."""
        is_known = member == replica.self_id or replica.is_leader
        end = int(replica.flushed_end_of(member)) if is_known else None
        lag = None if end is None else max(0, replica.commit_end - end)
        return {"node_id": member.node_id, "flushed_index": end, "lag_entries": lag}

    return {
        **told,
        "commit_index": replica.commit_end,
        "voters": [voter.node_id for voter in replica.voters],
        "learners": [learner.node_id for learner in replica.learners],
        "members": [row(member) for member in replica.configuration.members],
        "leader": None if replica.leader is None else replica.leader.node_id,
        "leader_epoch": replica.leader_epoch,
        "failure": replica.failure,
    }


def _brokers(node: Node) -> list[dict[str, Any]]:
    brokers = node.control.engine.image.brokers
    return [
        {
            "node_id": broker.node_id,
            "is_fenced": broker.is_fenced,
            "epoch": broker.epoch,
            "rack": broker.rack,
            "addresses": {e.name: f"{e.host}:{e.port}" for e in broker.endpoints},
        }
        for broker in (brokers[node_id] for node_id in sorted(brokers))
    ]


class _Turns:
    """Lets the loop go on when a turn of reading was long."""

    def __init__(self) -> None:
        self._began = perf_counter()

    async def pause(self) -> None:
        if perf_counter() - self._began > TURN_S:
            await trio.lowlevel.checkpoint()
            self._began = perf_counter()


async def _partitions(node: Node) -> list[dict[str, Any]]:
    rows = []
    turns = _Turns()
    for number, (partition, replica) in enumerate(node.partitions.rows()):
        rows.append(_partition(node, partition, replica))
        if number % ROWS_PER_LOOK == ROWS_PER_LOOK - 1:
            await turns.pause()
    return rows


async def _not_running(node: Node) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    turns = _Turns()
    for topic in node.control.engine.image.topics_by_id():
        rows += not_running(node, topic)
        await turns.pause()
    return rows


async def _unheld(node: Node) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    turns = _Turns()
    image = node.control.engine.image
    for topic in image.topics_by_id():
        rows += unheld(image, topic)
        await turns.pause()
    return rows


def _partition(node: Node, partition: Partition, replica: Replica) -> dict[str, Any]:
    return {
        "topic": partition.name.topic,
        "partition": partition.index,
        "leader": None if replica.leader is None else replica.leader.node_id,
        "is_leader": replica.is_leader,
        "leader_epoch": replica.leader_epoch,
        "voters": [voter.node_id for voter in replica.voters],
        "learners": [learner.node_id for learner in replica.learners],
        "is_voter": replica.self_id in replica.voters,
        "isr": sorted(r.node_id for r in replica.in_sync_replicas()),
        "log_start_offset": first_kept_offset(replica),
        "high_watermark": replica.high_watermark,
        "log_end_offset": replica.log_end_offset,
        "size_bytes": replica.log.size_bytes,
        "catching_up": [
            {
                "node_id": follower.node_id,
                "end_offset": replica.follower_end_offset(follower),
                "bytes_left": replica.bytes_behind(follower),
            }
            for follower in replica.catching_up()
        ],
        "damaged": [list(span) for span in replica.damaged()],
        "failure": replica.failure,
        "troubles": diagnose(node, partition, replica),
    }


async def _groups(node: Node) -> dict[str, Any]:
    image = node.control.engine.image.groups
    rows = {}
    turns = _Turns()
    for name in image.names():
        group = image.groups[name]
        rows[name] = {
            "coordinator": group.coordinator,
            "coordinator_epoch": group.coordinator_epoch,
            "generation": group.generation,
            "members": len(group.members),
        }
        await turns.pause()
    return rows


async def _transactions(node: Node) -> dict[str, Any]:
    """What this node owes, and has parked; and the oldest open ones of the cluster."""
    known = node.control.engine.image.transactions
    census = Census(node.plane.clock.wall_ms())
    turns = _Turns()
    for _ in census.take(known):
        await turns.pause()
    owed = []
    owed_count = 0
    for one in known.decided_after(0):
        for topic_id, index in sorted(one.partitions):
            partition = node.partitions.registry.by_id(topic_id, index)
            if partition is None or not partition.is_leader:
                continue
            owed_count += 1
            if owed_count <= OLDEST_MAX:
                owed.append(
                    {
                        "topic": partition.name.topic,
                        "partition": index,
                        "transactional_id": one.transactional_id,
                        "is_commit": one.state.is_commit,
                    }
                )
        await turns.pause()
    return {
        "is_offered": node.transactions.is_offered,
        "ids": len(known.ids),
        "decided": len(known.decided),
        "parked_requests": node.transactions.parked_count,
        "rows_waiting": len(node.transaction_rows),
        "markers_under_way": node.led_transactions.ends_under_way,
        "owed_markers": owed_count,
        "first_owed_markers": owed,
        "oldest_open": [
            {
                "transactional_id": one.transactional_id,
                "state": one.state.label,
                "producer_id": one.records_producer_id,
                "epoch": one.epoch,
                "timeout_ms": one.timeout_ms,
                "open_ms": max(0, census.now_ms - one.started_at_ms),
                "partitions": len(one.partitions),
                "groups": list(one.groups[:OLDEST_MAX]),
            }
            for one in census.oldest
        ],
    }


def diagnose(node: Node, partition: Partition, replica: Replica) -> list[str]:
    """What keeps this partition from being led, written or fully replicated."""
    if replica.failure is not None:
        return [f"replica on node {node.node_id} stopped: {replica.failure}"]
    found = [*_of_replica(node, replica)]
    if replica.is_leader:
        found += _of_leader(node, partition, replica)
    elif replica.leader is None:
        found.append(_no_leader(node, replica))
    return found


def _of_replica(node: Node, replica: Replica) -> Iterator[str]:
    own, core = node.node_id, replica.core
    for start, end in replica.damaged():
        yield f"offsets [{start}, {end}) are damaged on node {own}: waits for repair from peers"
    if replica.self_id not in replica.configuration.members:
        yield f"node {own} is no member under its present storage: waits to be admitted"
    elif replica.self_id not in replica.voters:
        yield f"node {own} is a learner: it votes once it has caught up"
    if core.claimed_end_floor:
        yield (
            f"node {own} lost or damaged bytes that it had promised: it votes for longer logs only"
        )
    if core.is_term_absurd:
        yield (
            f"node {own} is at leader epoch {core.term}, its log at {core.epochs.last_term}: no "
            "election can have led there, and peers do not believe it; see `raftmq recover "
            "--reset-term`"
        )
    if node.events.is_disk_full:
        yield f"the disk of node {own} is full: produces are refused"
    if node.events.is_disk_stuck:
        yield f"the disk of node {own} does not answer: a flush has not come back"


def _of_leader(node: Node, partition: Partition, replica: Replica) -> Iterator[str]:
    if not replica.is_writable:
        yield f"leader {node.node_id} waits for a majority to flush the entry of its election"
    in_sync = sorted(r.node_id for r in replica.in_sync_replicas())
    wanted = partition.settings.min_insync_replicas
    if len(in_sync) < wanted:
        yield f"acks=all is refused: in sync are {in_sync}, min.insync.replicas is {wanted}"
    assigned = node.engine.image.partition(partition.name)
    members = [member.node_id for member in replica.configuration.members]
    wished = () if assigned is None else assigned.replicas
    waiting = sorted(n for n in wished if n not in members)
    if waiting:
        yield f"nodes {waiting} should hold it and were not admitted yet"
    short = sorted(v.node_id for v in replica.voters if v not in replica.in_sync_replicas())
    if short and replica.is_writable:
        gone = missing(node, [NodeId(n) for n in short])
        if gone:
            yield f"out of sync: nodes {gone} do not answer"


def _no_leader(node: Node, replica: Replica) -> str:
    voters = [voter.node_id for voter in replica.voters]
    gone = missing(node, voters)
    reached = len(voters) - len(gone)
    if reached <= len(voters) // 2:
        return (
            f"no quorum: {reached} of voters {voters} are there, node {node.node_id} misses {gone}"
        )
    return f"no leader: an election is under way among voters {voters}"


def missing(node: Node, node_ids: list[NodeId]) -> list[int]:
    """Those of these nodes that this one does not reach, or to which the fault switch cuts it."""
    links = node.plane.links
    return [
        int(node_id)
        for node_id in node_ids
        if node_id != node.node_id
        and (
            not links.is_connected(node_id)
            or node_id in links.block_to
            or node_id in links.block_from
        )
    ]


def not_running(node: NodeCore, topic: TopicImage) -> list[dict[str, object]]:
    """Partitions of a topic that this node should hold and does not run (yet)."""
    by_id = node.partitions.registry.by_id
    return [
        {"topic": topic.name, "partition": partition.index}
        for partition in topic.partitions
        if node.node_id in partition.replicas and by_id(topic.topic_id, partition.index) is None
    ]


def unheld(image: MetadataImage, topic: TopicImage) -> list[dict[str, object]]:
    """Partitions of a topic that no live broker holds, so that no replica can say why."""
    rows: list[dict[str, object]] = []
    for partition in topic.partitions:
        holders = sorted({*partition.replicas, *partition.voters})
        if any(image.live_epoch(node_id) is not None for node_id in holders):
            continue
        why = (
            f"no leader: all its replicas are on nodes {holders}, none of which is up; bring one "
            "back with its data. Where all of them are lost for good its records are, too: then "
            f"`raftmq topic delete {topic.name}` ends it"
        )
        rows.append({"topic": topic.name, "partition": partition.index, "why": why})
    return rows
