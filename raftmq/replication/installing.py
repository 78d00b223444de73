"""Taking a leader's log start whose state is large: read off the loop, then installed.

A snapshot of the metadata group may take seconds to decode. Meanwhile this node's other groups have
leaders to hear and followers to answer, so a worker decodes it first, and the core is told of the
log start only then; the leader may have sent it again by that time, which changes nothing.

Invariants: one is under way at a time, the newest; it is stepped as it came, so that the core alone
judges whether it still means anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftmq.errors import RemoteProtocolError, StateError
from raftmq.log.log_start import LogStart
from raftmq.ports import DiskError
from raftmq.raft.messages import InstallLogStart
from raftmq.replication.catch_up import CatchUp
from raftmq.replication.replica_ports import SlowRestorer, StateChecker

if TYPE_CHECKING:
    from raftmq.replication.replica import Replica


class Installing:
    """One replica's log start that is being read."""

    __slots__ = ("_pending", "_port", "_replica")

    def __init__(self, replica: Replica, port: CatchUp) -> None:
        self._replica = replica
        self._port = port
        self._pending: InstallLogStart | None = None

    def may_step(self, install: InstallLogStart) -> bool:
        """True when the core may have it now; else it gets it as soon as it is read."""
        replica = self._replica
        machine = replica.machine
        if (
            not isinstance(machine, SlowRestorer)
            or install.term < replica.core.term
            or install.log_start <= replica.commit_end
        ):
            return True
        pending = self._pending
        if pending is not None and (pending.term, pending.log_start) == (
            install.term,
            install.log_start,
        ):
            return False
        log_start = LogStart.decode(install.payload)
        job = machine.restoring(log_start.state)
        if job is None:
            return True
        self._pending = install
        self._port.run_long(job, lambda error: self._read(install, log_start, error))
        return False

    def _read(
        self, install: InstallLogStart, log_start: LogStart, _error: DiskError | None
    ) -> None:
        if self._pending is not install:
            return
        self._pending = None
        replica = self._replica
        if replica.failure is not None:
            return
        try:
            if isinstance(replica.machine, StateChecker):
                replica.machine.check_state(log_start)
            replica.core.step(install)
        except (RemoteProtocolError, StateError):
            return  # no state that this replica could begin with: its log stays
        replica.on_touched(replica)
