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

from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio
from attrs import define, field, frozen

from raftmq.metadata.commands import UNDATED
from raftmq.metadata.image import RAFTMQ_LEVEL
from raftmq.node.metrics.families import TURN_S
from raftmq.node.metrics.partitions import first_kept_offset
from raftmq.node.metrics.transactions import OLDEST_MAX, Census
from raftmq.node.partitions import LedPartition
from raftmq.runtime.faults import FaultSwitch
from raftmq.runtime.peer_links import PeerLinks
from raftmq.runtime.peer_secret import SecretTls
from raftmq.types import NodeId

if TYPE_CHECKING:
    from raftmq.metadata.image import MetadataImage, TopicImage
    from raftmq.node.composition import NodeCore
    from raftmq.partition.partition import Partition
    from raftmq.replication.replica import Replica
    from raftmq.types import ReplicaId


ROWS_PER_LOOK: Final = 8
REMOVALS_MAX: Final = 100
"""Orders to delete that are shown."""


@frozen(slots=True)
class Process:
    """What only a node of a process has, beside the composition that the simulation runs as well.

    Attributes:
        faults: None where none can be switched on.
    """

    links: PeerLinks
    faults: FaultSwitch | None


def health(node: NodeCore, links: PeerLinks) -> tuple[bool, dict[str, Any]]:
    """Whether clients can rely on this node, and if not, why."""
    lifecycle = node.control.lifecycle
    reason = ""
    if node.plane.failure is not None:
        reason = node.plane.failure
    elif not node.is_serving:
        reason = links.taken_reason or lifecycle.refusal or "starting"
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


async def describe(node: NodeCore, process: Process) -> dict[str, Any]:
    """Everything that an operator may want to know about one node."""
    control, plane = node.control, node.plane
    controller = control.engine.controller_id
    lifecycle = control.lifecycle
    size_bytes, free_bytes = node.events.disk_space()
    look = await _look_at_topics(node)
    return {
        "node_id": node.node_id,
        "cluster_id": node.config.cluster_id,
        "storage_id": f"{plane.self_id.storage_id:016x}",
        "formation_id": node.formation.formation_id,
        "rack": node.config.rack,
        "health": health(node, process.links)[1],
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
        "features": _features(node),
        "brokers": _brokers(node, look.held),
        "topics": look.topics,
        "removals": _removals(node),
        "turned_away": {str(n): control.turned_away[n] for n in sorted(control.turned_away)},
        "rivals": [
            {"node_id": hello.node_id, "storage_id": hello.storage_id, "address": hello.address}
            for hello in process.links.rivals()
        ],
        "partitions": await _partitions(node),
        "not_running": await _not_running(node),
        "unheld": look.unheld,
        "groups": await _groups(node),
        "transactions": await _transactions(node),
        "peers": {
            str(node_id): {
                "queued_bytes": queued,
                "is_connected": plane.links.is_connected(node_id),
            }
            for node_id, queued in plane.links.queued_bytes().items()
        },
        "delays": node.partitions.delays.rows(),
        "views": await _views(node),
        "peer_tls": _peer_tls(node, process.links),
        "faults": None if process.faults is None else process.faults.show(),
        "catch_up": _catch_up(node),
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


def _features(node: NodeCore) -> dict[str, Any]:
    return {
        "level": node.control.engine.image.level,
        "supported_level": node.supported[RAFTMQ_LEVEL][1],
    }


def _peer_tls(node: NodeCore, links: PeerLinks) -> dict[str, Any]:
    config = node.config
    return {
        "mode": config.peer_tls,
        "is_open": config.has_open_peer_port and not config.insecure,
        "by": None if node.peer_tls is None else node.peer_tls.refusal,
        "plain_peers": links.plain_peers(),
        "expires_s": None if node.peer_tls is None else node.peer_tls.expires_s,
        "secrets": node.peer_tls.secrets_count if isinstance(node.peer_tls, SecretTls) else 0,
    }


def _catch_up(node: NodeCore) -> dict[str, Any]:
    """What this node sends to replicas that catch up, and how much it may."""
    rate = node.plane.catch_up.rate
    return {
        "limit_bytes_per_s": rate.bytes_per_s,
        "bytes_per_s": rate.speed,
        "held": rate.waiting_count,
    }


def _metadata(node: NodeCore) -> dict[str, Any]:
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


def _brokers(node: NodeCore, held: Mapping[NodeId, int]) -> list[dict[str, Any]]:
    brokers = node.control.engine.image.brokers
    return [
        {
            "node_id": broker.node_id,
            "is_fenced": broker.is_fenced,
            "fenced_ms": node.events.fenced_ms(broker.node_id),
            "state": broker.state.value,
            "replicas": held.get(broker.node_id, 0),
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


async def _partitions(node: NodeCore) -> list[dict[str, Any]]:
    rows = []
    turns = _Turns()
    for number, (partition, replica) in enumerate(node.partitions.rows()):
        rows.append(_partition(node, partition, replica))
        if number % ROWS_PER_LOOK == ROWS_PER_LOOK - 1:
            await turns.pause()
    return rows


async def _views(node: NodeCore) -> list[dict[str, Any]]:
    """How far the index of each view is, of each replica here."""
    rows = []
    turns = _Turns()
    for number, row in enumerate(node.partitions.views.rows()):
        rows.append(row)
        if number % ROWS_PER_LOOK == ROWS_PER_LOOK - 1:
            await turns.pause()
    return rows


async def _not_running(node: NodeCore) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    turns = _Turns()
    for topic in node.control.engine.image.topics_by_id():
        rows += not_running(node, topic)
        await turns.pause()
    return rows


@define(slots=True)
class _Look:
    """What one pass over all topics of the image finds."""

    unheld: list[dict[str, object]] = field(factory=list)
    topics: dict[str, int] = field(factory=dict)
    held: dict[NodeId, int] = field(factory=dict)


async def _look_at_topics(node: NodeCore) -> _Look:
    look = _Look()
    turns = _Turns()
    image = node.control.engine.image
    for topic in image.topics_by_id():
        look.topics[topic.name] = len(topic.partitions)
        look.unheld += unheld(image, topic)
        for partition in topic.held:
            for node_id in {*partition.replicas, *partition.voters}:
                look.held[node_id] = look.held.get(node_id, 0) + 1
        await turns.pause()
    return look


def _removals(node: NodeCore) -> list[dict[str, Any]]:
    """Orders to delete that were not confirmed yet."""
    removals = node.control.engine.image.removals
    rows = [
        {"topic": one.topic, "partition": one.group.partition, "nodes": list(one.nodes)}
        for one in removals.values()
    ]
    return sorted(rows, key=lambda row: (row["topic"], row["partition"]))[:REMOVALS_MAX]


def _partition(node: NodeCore, partition: Partition, replica: Replica) -> dict[str, Any]:
    troubles = _troubles(node, partition, replica)
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
        "leaderless_ms": _leaderless_ms(node, partition),
        "lagging": _lagging(replica),
        "min_insync_replicas": partition.settings.min_insync_replicas,
        "open_transaction": _open_transaction(node, partition, replica),
        **_wish(node, partition),
        "damaged": [list(span) for span in replica.damaged()],
        "failure": replica.failure,
        "troubles": [trouble.text for trouble in troubles],
        "kinds": [trouble.kind for trouble in troubles],
    }


def _leaderless_ms(node: NodeCore, partition: Partition) -> int | None:
    """For how long this replica has known of no leader; None while it knows one."""
    assert isinstance(partition, LedPartition)
    since_ms = partition.role_watch.leaderless_since_ms
    return None if since_ms is None else round(node.plane.clock.monotonic_ms() - since_ms)


def _lagging(replica: Replica) -> list[dict[str, Any]]:
    """Voters that this leader does not count as in sync, and for how long that was so."""
    in_sync = replica.in_sync_replicas()
    rows = []
    for voter in replica.voters if replica.is_leader else ():
        if voter not in in_sync:
            lag_ms = replica.lag_ms_of(voter)
            rows.append(
                {"node_id": voter.node_id, "lag_ms": None if lag_ms is None else round(lag_ms)}
            )
    return rows


def _open_transaction(
    node: NodeCore, partition: Partition, replica: Replica
) -> dict[str, Any] | None:
    """What holds readers of committed records back, where anything does; only a leader tells."""
    held = partition.producers.oldest_open if replica.is_leader else None
    if held is None:
        return None
    producer_id, producer = held
    one = node.engine.image.transactions.of_producer(producer_id)
    row = {
        "first_offset": producer.open_since,
        "producer_id": producer_id,
        "epoch": producer.epoch,
        "transactional_id": None,
    }
    if one is None or one.records_producer_id != producer_id or one.state.may_begin:
        return row
    open_ms = max(0, round(node.plane.clock.wall_ms()) - one.started_at_ms)
    return {
        **row,
        "transactional_id": one.transactional_id,
        "state": one.state.label,
        "open_ms": None if one.started_at_ms == UNDATED else open_ms,
        "timeout_ms": one.timeout_ms,
    }


def _wish(node: NodeCore, partition: Partition) -> dict[str, Any]:
    """Which nodes should hold it, as metadata says, and what is to change."""
    known = node.engine.image.partition(partition.name)
    if known is None:
        return {"replicas": [], "move": None}
    move = None
    if known.moving_from or known.planned or known.dismissed:
        move = {
            "origin": known.origin.value,
            "from": list(known.moving_from),
            "planned": list(known.planned),
            "dismissed": list(known.dismissed),
        }
    return {"replicas": list(known.replicas), "move": move}


async def _groups(node: NodeCore) -> dict[str, Any]:
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


async def _transactions(node: NodeCore) -> dict[str, Any]:
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


class Trouble(NamedTuple):
    """One thing that keeps a partition from being led, written or fully replicated."""

    kind: str
    text: str


def diagnose(node: NodeCore, partition: Partition, replica: Replica) -> list[str]:
    """What keeps this partition from being led, written or fully replicated."""
    return [trouble.text for trouble in _troubles(node, partition, replica)]


def _troubles(node: NodeCore, partition: Partition, replica: Replica) -> list[Trouble]:
    if replica.failure is not None:
        text = f"replica on node {node.node_id} stopped: {replica.failure}"
        return [Trouble("stopped", text)]
    is_coming = node.node_id in _coming(node, partition)
    found = [*_of_replica(node, replica, is_coming=is_coming)]
    if replica.is_leader:
        found += _of_leader(node, partition, replica)
    elif replica.leader is None and not (is_coming and not _is_member(replica)):
        found.append(_no_leader(node, replica))
    return found


def _coming(node: NodeCore, partition: Partition) -> frozenset[NodeId]:
    """Nodes that a move adds to those that hold it: that they do not yet is no trouble."""
    known = node.engine.image.partition(partition.name)
    if known is None or not known.moving_from:
        return frozenset()
    return frozenset(known.replicas).difference(known.moving_from)


def _is_member(replica: Replica) -> bool:
    return replica.self_id in replica.configuration.members


def _of_replica(node: NodeCore, replica: Replica, *, is_coming: bool) -> Iterator[Trouble]:
    """What a replica says of itself; where it comes by a move it may well be no voter yet."""
    own, core = node.node_id, replica.core
    for start, end in replica.damaged():
        text = f"offsets [{start}, {end}) are damaged on node {own}: waits for repair from peers"
        yield Trouble("damaged", text)
    if not is_coming and not _is_member(replica):
        text = f"node {own} is no member under its present storage: waits to be admitted"
        yield Trouble("no member", text)
    elif not is_coming and replica.self_id not in replica.voters:
        yield Trouble("learner", f"node {own} is a learner: it votes once it has caught up")
    if core.claimed_end_floor:
        text = (
            f"node {own} lost or damaged bytes that it had promised: it votes for longer logs only"
        )
        yield Trouble("lost bytes", text)
    if core.is_term_absurd:
        text = (
            f"node {own} is at leader epoch {core.term}, its log at {core.epochs.last_term}: no "
            "election can have led there, and peers do not believe it; see `raftmq recover "
            "--reset-term`"
        )
        yield Trouble("absurd epoch", text)
    if node.events.is_disk_full:
        yield Trouble("disk full", f"the disk of node {own} is full: produces are refused")
    if node.events.is_disk_stuck:
        text = f"the disk of node {own} does not answer: a flush has not come back"
        yield Trouble("disk stuck", text)


def _of_leader(node: NodeCore, partition: Partition, replica: Replica) -> Iterator[Trouble]:
    if not replica.is_writable:
        text = f"leader {node.node_id} waits for a majority to flush the entry of its election"
        yield Trouble("new leader", text)
    in_sync = sorted(r.node_id for r in replica.in_sync_replicas())
    wanted = partition.settings.min_insync_replicas
    if len(in_sync) < wanted:
        text = f"acks=all is refused: in sync are {in_sync}, min.insync.replicas is {wanted}"
        yield Trouble("too few in sync", text)
    assigned = node.engine.image.partition(partition.name)
    members = [member.node_id for member in replica.configuration.members]
    wished = () if assigned is None else assigned.replicas
    coming = _coming(node, partition)
    waiting = sorted(n for n in wished if n not in members)
    waiting = [n for n in waiting if n not in coming or missing(node, [n])]
    if waiting:
        text = f"nodes {waiting} should hold it and were not admitted yet"
        yield Trouble("not admitted", text)
    short = sorted(v.node_id for v in replica.voters if v not in replica.in_sync_replicas())
    if short and replica.is_writable:
        gone = missing(node, [NodeId(n) for n in short])
        if gone:
            yield Trouble("out of sync", f"out of sync: nodes {gone} do not answer")


def _no_leader(node: NodeCore, replica: Replica) -> Trouble:
    voters = [voter.node_id for voter in replica.voters]
    gone = missing(node, voters)
    reached = len(voters) - len(gone)
    if reached <= len(voters) // 2:
        text = (
            f"no quorum: {reached} of voters {voters} are there, node {node.node_id} misses {gone}"
        )
        return Trouble("no quorum", text)
    text = f"no leader: an election is under way among voters {voters}"
    return Trouble("election", text)


def missing(node: NodeCore, node_ids: list[NodeId]) -> list[int]:
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
    by_group = node.partitions.registry.by_group
    return [
        {"topic": topic.name, "partition": partition.index}
        for partition in topic.held
        if node.node_id in partition.replicas and by_group(topic.group_id(partition.index)) is None
    ]


def unheld(image: MetadataImage, topic: TopicImage) -> list[dict[str, object]]:
    """Partitions of a topic that no live broker holds, so that no replica can say why."""
    rows: list[dict[str, object]] = []
    for partition in topic.held:
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
