"""Rewrite who belongs to a group in a log at rest: for a lost majority that an operator gives up.

A log says it in its log start and in its membership entries; both get the same new configuration,
so that every later reading of this log agrees. Only for logs that nobody has open, and whose other
copies are gone for good or rewritten likewise: Raft itself never changes an entry.

Invariants: the log start first, then the entries, each replaced atomically; a crash in between
leaves a log that says the old configuration last, so that doing it again does the rest.
"""

from __future__ import annotations

from attrs import evolve

from raftmq.log.bare_entries import BareEntries, Slot
from raftmq.log.log_start import LocalStart, LogStartFile, Pending
from raftmq.log.model import LogConfig, UnusableLogError
from raftmq.ports import Disk


def replace_configuration(disk: Disk, folder: str, kind: int, configuration: bytes) -> None:
    """Put `configuration` into the log start and every entry of `kind`; durable on return.

    Raises:
        UnusableLogError: the log was not recovered before.
        DiskError: the device failed; do it again.
    """
    start_file = LogStartFile(disk, folder)
    local = start_file.read()
    if local is None or local.pending is not Pending.NOTHING:
        raise UnusableLogError(f"{folder}: open the log first, so that it is recovered")
    log_start = evolve(local.log_start, configuration=configuration)
    start_file.replace(LocalStart(log_start, local.truncated_end))
    bare = BareEntries(disk, folder, LogConfig().bare_reserve_bytes)
    try:
        found = bare.read()
        bare.load([_with(slot, kind, configuration) for slot in found.slots], log_start)
        bare.compact(now=True)
    finally:
        bare.close()


def _with(slot: Slot, kind: int, payload: bytes) -> Slot:
    if slot.entry.kind != kind:
        return slot
    return Slot(evolve(slot.entry, payload=payload), slot.position, slot.size, slot.is_whole)
