"""The machine applies each committed entry once, in order, or stops; damage only makes it wait."""

from __future__ import annotations

import pytest
from attrs import evolve
from msgspec.structs import replace

from raftmq.errors import CorruptBatchError
from raftmq.log.log_start import LogStart
from raftmq.log.model import DamagedError, LogEntry
from raftmq.metadata import state_machine
from raftmq.metadata.commands import (
    AllocateProducerIds,
    Envelope,
    NewerCommandError,
    UnknownCommandError,
    encode_envelope,
)
from raftmq.metadata.snapshot import decode_image, encode_image
from raftmq.metadata.state_machine import MetadataMachine, Skip, UnappliableCommandError
from raftmq.metadata.transactions import transactions_of
from raftmq.raft.messages import EntryKind
from raftmq.records import NewRecord, build_batch
from raftmq.types import LeaderEpoch, NodeId, Offset, RaftIndex
from tests.metadata.metadata_commands import register
from tests.metadata.transaction_machine import many_ids


class SkipListener:
    """Collects the commands that were passed over."""

    def __init__(self, skips: list[Skip]) -> None:
        self.command_skipped = skips.append

    def command_applied(self, envelope: object, result: object, offset: Offset) -> None:
        pass

    def state_restored(self, image: object) -> None:
        pass

    def image_changed(self, before: object, after: object) -> None:
        pass

    def advanced(self, applied_end: RaftIndex) -> None:
        pass

    def role_changed(self, soft: object) -> None:
        pass


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
            version=1,
            node_id=NodeId(1),
            incarnation=1,
            sequence=sequence,
            command=AllocateProducerIds(node_id=NodeId(1), count=1),
        )
    )


def _poison(sequence: int) -> bytes:
    """As one that slipped past the check at `propose`."""
    command = replace(register(1), storage_id="zz")
    return encode_envelope(
        Envelope(
            version=1,
            node_id=NodeId(1),
            incarnation=1,
            sequence=sequence,
            command=command,
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
    ("value", "cause", "way_out"),
    [
        (b'{"v":99}', NewerCommandError, "start a newer raftmq"),
        (b"not json\x1b", UnknownCommandError, "`raftmq recover --skip-command 1`"),
        (_poison(2), UnknownCommandError, "`raftmq recover --skip-command 1`"),
    ],
)
def test_a_command_that_cannot_be_applied_stops_the_node_with_a_way_out(
    log: FakeLog, machine: MetadataMachine, value: bytes, cause: type[Exception], way_out: str
) -> None:
    machine.appended(log.add_batch(_command(1)))
    machine.appended(log.add_batch(value))
    with pytest.raises(UnappliableCommandError) as caught:
        _commit_all(machine, log)
    error = caught.value
    assert machine.failure is error
    assert isinstance(error.cause, cause)
    assert error.is_newer == (cause is NewerCommandError)
    assert error.skip == Skip.of(1, 0, value)
    assert f"offset 1 (leader epoch 0) cannot be applied: {cause.__name__}" in str(error)
    assert str(error).startswith("this cluster is ahead of this version: ") == error.is_newer
    assert way_out in str(error)
    assert str(error).isprintable()
    assert value.decode()[:8] in str(error)
    machine.appended(log.add_batch(_command(2)))
    _commit_all(machine, log)  # it goes no further
    assert machine.image.version == 0


def test_whatever_apply_raises_names_its_command(
    log: FakeLog, machine: MetadataMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*_args: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(state_machine, "apply", raising)
    log.add_batch(_command(1))
    with pytest.raises(UnappliableCommandError, match="KeyError: 'planted'"):
        _commit_all(machine, log)
    assert machine.image.version == -1


def test_a_skip_passes_over_that_very_command_and_wants_a_snapshot(log: FakeLog) -> None:
    poison = _poison(2)
    log.add_batch(_command(1), poison, _command(3))
    skip = Skip.of(1, 0, poison)
    machine = MetadataMachine([skip])
    machine.attach_log(log)
    told: list[Skip] = []
    machine.add_listener(SkipListener(told))
    _commit_all(machine, log)
    _commit_all(machine, log)
    assert told == [skip]
    assert machine.image.next_producer_id == 2, "those around it are applied"
    assert machine.image.version == 2
    assert machine.has_skipped
    log.add(EntryKind.LOG_START, b"", 1)
    _commit_all(machine, log)
    state = state_at(machine, 3)
    assert not machine.has_skipped
    newcomer = MetadataMachine()
    newcomer.restore(LogStart(Offset(3), RaftIndex(3), LeaderEpoch(1), state=state))
    assert newcomer.image == machine.image


def test_a_skip_at_the_end_of_the_log_counts_as_applied(log: FakeLog) -> None:
    poison = _poison(2)
    log.add_batch(_command(1))
    log.add_batch(poison)
    machine = MetadataMachine([Skip.of(1, 0, poison)])
    machine.attach_log(log)
    _commit_all(machine, log)
    assert machine.applied_offset == 2
    assert machine.is_current


@pytest.mark.parametrize(
    "skip",
    [
        Skip.of(0, 0, _poison(2)),
        Skip.of(1, 5, _poison(2)),
        Skip.of(1, 0, _poison(3)),
    ],
    ids=["another offset", "another epoch", "other bytes"],
)
def test_a_skip_of_something_else_changes_nothing(log: FakeLog, skip: Skip) -> None:
    log.add_batch(_command(1), _poison(2))
    machine = MetadataMachine([skip])
    machine.attach_log(log)
    with pytest.raises(UnappliableCommandError):
        _commit_all(machine, log)
    assert not machine.has_skipped


def test_a_damaged_batch_is_never_applied(log: FakeLog, machine: MetadataMachine) -> None:
    entry = log.add_batch(_command(1))
    damaged = bytearray(entry.payload)
    damaged[-1] ^= 1
    machine.appended(
        LogEntry(entry.start, entry.end, entry.leader_epoch, entry.kind, bytes(damaged))
    )
    with pytest.raises(CorruptBatchError):
        _commit_all(machine, log)


def state_at(machine: MetadataMachine, offset: int) -> bytes:
    """The snapshot of a small state, which takes one call."""
    state = machine.state_at(Offset(offset), RaftIndex(offset))
    assert state is not None
    return state


def test_a_state_that_takes_long_is_encoded_over_several_calls(
    log: FakeLog, machine: MetadataMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raftmq.metadata.snapshot.ROUND_PARTS_MAX", 3)
    machine.image = evolve(machine.image, transactions=transactions_of(many_ids(10), 0))
    log.add_batch(_command(1), _command(2))
    log.add(EntryKind.LOG_START, b"", 1)
    _commit_all(machine, log)
    wanted = encode_image(machine.image)
    assert machine.state_at(Offset(2), RaftIndex(2)) is None
    assert machine.is_encoding
    log.add_batch(_command(3))
    _commit_all(machine, log)
    machine.prepare_snapshot(100)  # of the newer image: it must not take the place of the other
    calls = 0
    while (state := machine.state_at(Offset(2), RaftIndex(2))) is None:
        calls += 1
        assert calls < 20
    assert calls > 3
    assert state == wanted
    assert not machine.is_encoding
    assert machine.log_bytes == 0


def test_the_state_at_a_log_start_is_kept_while_more_is_applied(
    log: FakeLog, machine: MetadataMachine
) -> None:
    log.add_batch(_command(1), _command(2))
    log.add(EntryKind.LOG_START, b"", 1)
    log.add_batch(_command(3))
    _commit_all(machine, log)
    assert machine.image.next_producer_id == 3
    state = decode_image(state_at(machine, 2))
    assert (state.version, state.next_producer_id) == (1, 2)
    assert machine.log_bytes == 0


def test_a_log_start_takes_the_place_of_everything(log: FakeLog, machine: MetadataMachine) -> None:
    log.add_batch(_command(1), _command(2))
    _commit_all(machine, log)

    class Start:
        offset = Offset(2)
        index = RaftIndex(2)
        state = state_at(machine, 2)

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
    state = state_at(other, 4)
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
