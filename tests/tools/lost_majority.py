"""What the disk of a node holds whose cluster lost its majority."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from raftmq.log.journal import GroupState, HardStateJournal
from raftmq.log.log_start import LogStart
from raftmq.log.model import LogConfig
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.metadata.commands import (
    CreateTopics,
    Endpoint,
    Envelope,
    encode_envelope,
)
from raftmq.ports import Disk
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import EntryKind
from raftmq.records import NewRecord, build_batch
from raftmq.types import (
    METADATA_GROUP,
    LeaderEpoch,
    NodeId,
    RaftGroupId,
    ReplicaId,
    StorageId,
)
from tests.log.helpers import FakeClock
from tests.metadata.metadata_commands import creation, register, topic_id

ME = ReplicaId(NodeId(1), StorageId(101))
TOPIC = topic_id(7)
CREATED_AT = 4


def replica(number: int) -> ReplicaId:
    return ReplicaId(NodeId(number), StorageId(100 + number))


def group(voters: str, learners: str = "") -> Configuration:
    return Configuration(
        tuple(replica(int(n)) for n in voters), tuple(replica(int(n)) for n in learners)
    )


def partition_group(index: int) -> RaftGroupId:
    return RaftGroupId(TOPIC, index, CREATED_AT)


def folder_of(index: int, root: str = "data") -> str:
    return f"{root}/topics/t-{TOPIC}/partition-{index}"


def _batch(base: int, epoch: int, *values: bytes) -> bytes:
    records = [NewRecord(None, value) for value in values]
    return bytes(build_batch(records, base_offset=base, leader_epoch=epoch, timestamp=1000))


def _write(
    disk: Disk,
    journal: HardStateJournal,
    raft_group: RaftGroupId,
    folder: str,
    configurations: list[Configuration],
    batches: list[list[bytes]],
    *,
    segment_bytes: int = 1 << 20,
) -> None:
    """A flushed log: an election, each configuration but the first as an entry, then batches."""
    first = LogStart(configuration=configurations[0].encode())
    config = LogConfig(segment_bytes=segment_bytes)
    log = ReplicatedLog.open(disk, folder, config, initial=first, clock=FakeClock())
    log.append_bare(log.end_index, LeaderEpoch(4), int(EntryKind.ELECTION), b"")
    for configuration in configurations[1:]:
        payload = configuration.encode()
        log.append_bare(log.end_index, LeaderEpoch(4), int(EntryKind.MEMBERSHIP), payload)
    for values in batches:
        _flush(log)
        log.append_batch(_batch(log.log_end_offset, 4, *values))
    _flush(log)
    state = GroupState(
        term=4,
        vote=replica(2),
        bootstrapped=ME.storage_id,
        flushed_end=log.flushed_end,
        commit_end=log.flushed_end - 1,
    )
    journal.put(raft_group, state)
    journal.flush_now()  # and the process ends: no index vouches for the log at the next start


def _flush(log: ReplicatedLog) -> None:
    while (job := log.flush_job()) is not None:
        job.run()
        log.complete(job)


def _commands(peer_port: int) -> list[list[bytes]]:
    made = creation("t", 1, (1, 2, 3), (1,), (2,), (1, 2, 4))
    created = CreateTopics(topics=(replace(made, topic_id=TOPIC),))
    peer = (Endpoint("peer", "127.0.0.1", peer_port),)
    registrations = [replace(register(n), endpoints=peer) for n in (1, 2, 3, 4)]
    rows = []
    for sequence, command in enumerate([*registrations, created]):
        envelope = Envelope(
            version=1,
            node_id=NodeId(1),
            incarnation=1,
            sequence=sequence,
            command=command,
        )
        rows.append([encode_envelope(envelope)])
    return rows


def fill_node(
    disk: Disk,
    journal: HardStateJournal,
    root: str = "data",
    *,
    peer_port: int = 1,
    more_commands: Sequence[bytes] = (),
) -> None:
    """Node 1 of a cluster of 1, 2, 3 and the observer 4; partition 2 is not on it.

    All nodes had their peer port there; nobody listens at port 1.
    """
    observed = [group("123"), group("123", "4")]
    commands = [*_commands(peer_port), *([command] for command in more_commands)]
    _write(disk, journal, METADATA_GROUP, f"{root}/meta", observed, commands)
    values = [[b"a", b"b"], [b"c"], [b"d", b"e", b"f"]]
    changed = [group("12"), group("12", "3"), group("123")]
    _write(disk, journal, partition_group(0), folder_of(0, root), changed, values)
    _write(disk, journal, partition_group(1), folder_of(1, root), [group("1")], values)
    _write(disk, journal, partition_group(3), folder_of(3, root), [group("124")], values)
