"""Taking a leader's log start whose state is large: read off the loop, then installed.

A snapshot of the metadata group may take seconds to decode. Meanwhile this node's other groups have
leaders to hear and followers to answer, so a worker decodes it first, and the core is told of the
log start only then; the leader may have sent it again by that time, which changes nothing.

Invariants: one is under way at a time, the newest; it is stepped as it came, so that the core alone
judges whether it still means anything.
"""

from __future__ import annotations

from collections.abc import Callable

from raftmq.log.log_start import LogStart
from raftmq.ports import DiskError
from raftmq.raft.messages import InstallLogStart
from raftmq.replication.catch_up import CatchUp
from raftmq.replication.replica_ports import SlowRestorer
from raftmq.types import RaftIndex, Term


class Installing:
    """One replica's log start that is being read."""

    __slots__ = ("_machine", "_on_read", "_pending", "_port")

    def __init__(
        self,
        machine: object,
        port: CatchUp,
        on_read: Callable[[InstallLogStart, LogStart], None],
    ) -> None:
        """`on_read` gets a log start once `machine` can begin with it at once."""
        self._machine = machine if isinstance(machine, SlowRestorer) else None
        self._port = port
        self._on_read = on_read
        self._pending: InstallLogStart | None = None

    def may_step(self, install: InstallLogStart, term: Term, commit_end: RaftIndex) -> bool:
        """True when a core in `term` that knows of `commit_end` may have it now; else `on_read`
        gets it as soon as it is read."""
        if self._machine is None or install.term < term or install.log_start <= commit_end:
            return True
        pending = self._pending
        if pending is not None and (pending.term, pending.log_start) == (
            install.term,
            install.log_start,
        ):
            return False
        log_start = LogStart.decode(install.payload)
        job = self._machine.restoring(log_start.state)
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
        self._on_read(install, log_start)
