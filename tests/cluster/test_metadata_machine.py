"""The machine applies each committed entry once, in order, or stops; damage only makes it wait."""

from __future__ import annotations

from typing import Any

import pytest

from raftmq.cluster.commands import (
    COMMAND_VERSION,
    AllocateProducerIds,
    Envelope,
    UnknownCommandError,
    encode_envelope,
)
from raftmq.cluster.metadata_machine import MetadataMachine
from raftmq.cluster.metadata_snapshot import decode_image
from raftmq.errors import CorruptBatchError
from raftmq.log.log_start import LogStart
from raftmq.log.model import DamagedError, LogEntry
from raftmq.raft.messages import EntryKind
from raftmq.records import NewRecord, build_batch
from raftmq.types import LeaderEpoch, NodeId, Offset, RaftIndex


class FakeLog:
    """Entries of one log; some may be damaged."""

    def __init__(self) -> None:
        self.all: list[LogEntry] = []
        self.damaged = False
        self.reads = 0
        self.offset = 0
        self.log_start = LogStart()

    @property
    def end(self) -> int:
        return self.all[-1].end if self.all else 0

    def entries(self, start: RaftIndex, bytes_max: int) -> tuple[LogEntry, ...]:
        self.reads += 1
        assert start >= self.log_start.index, "dropped"
        if self.damaged:
            raise DamagedError(Offset(0), Offset(self.offset))
        found = []
        for entry in self.all:
            if entry.start >= start and (not found or bytes_max > 0):
                found.append(entry)
                bytes_max -= len(entry.payload)
        return tuple(found)

    def add(self, kind: EntryKind, payload: bytes, width: int) -> LogEntry:
        end = RaftIndex(self.end + width)
        entry = LogEntry(RaftIndex(self.end), end, LeaderEpoch(1), int(kind), payload)
        self.all.append(entry)
        return entry

    def add_batch(self, *values: bytes) -> LogEntry:
        batch = build_batch([NewRecord(None, v) for v in values], base_offset=self.offset)
        self.offset += len(values)
        return self.add(EntryKind.BATCH, bytes(batch), len(values))


def _command(sequence: int) -> bytes:
    return encode_envelope(
        Envelope(
            version=COMMAND_VERSION,
            node_id=NodeId(1),
            incarnation=1,
            sequence=sequence,
            command=AllocateProducerIds(node_id=NodeId(1), count=1),
        )
    )


@pytest.fixture
def log() -> FakeLog:
    return FakeLog()


@pytest.fixture
def machine(log: FakeLog) -> MetadataMachine:
    machine = MetadataMachine()
    machine.attach_log(log)
    return machine


def _commit_all(machine: MetadataMachine, log: FakeLog) -> None:
    machine.committed(Offset(log.offset), RaftIndex(log.end))


def test_what_was_appended_is_not_read_back(log: FakeLog, machine: MetadataMachine) -> None:
    machine.appended(log.add(EntryKind.ELECTION, b"", 1))
    for sequence in range(1, 6):
        machine.appended(log.add_batch(_command(sequence)))
    _commit_all(machine, log)
    assert log.reads == 0
    assert machine.image.next_producer_id == 5
    assert machine.applied_end == 6
    assert machine.applied_offset == 5
    _commit_all(machine, log)  # told twice
    assert machine.image.next_producer_id == 5


def test_after_a_restart_the_log_is_read(log: FakeLog, machine: MetadataMachine) -> None:
    log.add(EntryKind.ELECTION, b"", 1)
    log.add_batch(_command(1), _command(2))
    log.add_batch(_command(3))
    machine.committed(Offset(2), RaftIndex(3))
    assert machine.image.next_producer_id == 2
    _commit_all(machine, log)
    assert machine.image.next_producer_id == 3


def test_a_truncated_suffix_is_forgotten(log: FakeLog, machine: MetadataMachine) -> None:
    machine.appended(log.add_batch(_command(1)))
    machine.appended(log.add_batch(_command(2)))
    log.all.pop()
    log.offset -= 1
    machine.truncated(RaftIndex(1))
    machine.appended(log.add_batch(_command(7)))
    _commit_all(machine, log)
    assert machine.image.submitters[NodeId(1)] == (1, 7)
    assert log.reads == 0


def test_damage_waits_for_its_repair(log: FakeLog, machine: MetadataMachine) -> None:
    log.add_batch(_command(1))
    log.damaged = True
    _commit_all(machine, log)
    assert not machine.is_current
    assert machine.failure is None
    with pytest.raises(DamagedError):
        machine.state_at(Offset(1), RaftIndex(1))
    log.damaged = False
    machine.catch_up()
    assert machine.is_current
    assert machine.image.next_producer_id == 1


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (b'{"v":99}', UnknownCommandError),
        (b"not json", UnknownCommandError),
    ],
)
def test_a_command_that_cannot_be_read_stops_the_node(
    log: FakeLog, machine: MetadataMachine, value: bytes, error: Any
) -> None:
    machine.appended(log.add_batch(_command(1)))
    machine.appended(log.add_batch(value))
    with pytest.raises(error):
        _commit_all(machine, log)
    assert isinstance(machine.failure, error)
    machine.appended(log.add_batch(_command(2)))
    _commit_all(machine, log)  # it goes no further
    assert machine.image.version == 0


def test_a_damaged_batch_is_never_applied(log: FakeLog, machine: MetadataMachine) -> None:
    entry = log.add_batch(_command(1))
    damaged = bytearray(entry.payload)
    damaged[-1] ^= 1
    machine.appended(
        LogEntry(entry.start, entry.end, entry.leader_epoch, entry.kind, bytes(damaged))
    )
    with pytest.raises(CorruptBatchError):
        _commit_all(machine, log)


def test_the_state_at_a_log_start_is_kept_while_more_is_applied(
    log: FakeLog, machine: MetadataMachine
) -> None:
    log.add_batch(_command(1), _command(2))
    log.add(EntryKind.LOG_START, b"", 1)
    log.add_batch(_command(3))
    _commit_all(machine, log)
    assert machine.image.next_producer_id == 3
    state = decode_image(machine.state_at(Offset(2), RaftIndex(2)))
    assert (state.version, state.next_producer_id) == (1, 2)
    assert machine.log_bytes == 0


def test_a_log_start_takes_the_place_of_everything(log: FakeLog, machine: MetadataMachine) -> None:
    log.add_batch(_command(1), _command(2))
    _commit_all(machine, log)

    class Start:
        offset = Offset(2)
        index = RaftIndex(2)
        state = machine.state_at(Offset(2), RaftIndex(2))

    other = MetadataMachine()
    other.attach_log(log)
    other.restore(Start())
    assert other.image == machine.image
    assert other.applied_end == 2
    log.add_batch(_command(3))
    _commit_all(other, log)
    assert other.image.next_producer_id == 3


def test_a_log_that_lost_its_damaged_beginning_gives_the_state_with_it(
    log: FakeLog, machine: MetadataMachine
) -> None:
    """A peer had dropped the damaged range and gave its log start in place of it."""
    for sequence in range(1, 5):
        log.add_batch(_command(sequence))
    other = MetadataMachine()
    other.attach_log(log)
    _commit_all(other, log)
    state = other.state_at(Offset(4), RaftIndex(4))
    log.damaged = True
    _commit_all(machine, log)
    assert machine.applied_end == 0
    log.add_batch(_command(5))
    log.damaged = False
    log.log_start = LogStart(Offset(4), RaftIndex(4), LeaderEpoch(1), state=state)
    _commit_all(machine, log)
    assert machine.applied_end == 5
    assert machine.image.next_producer_id == 5
    assert machine.is_current
