"""What can go wrong with a test cluster; every message says what to do."""

from __future__ import annotations

from raftmq.errors import RaftmqError


class ClusterError(RaftmqError):
    """The test cluster cannot do that; the message says why."""


class LackError(ClusterError):
    """This machine cannot do that; the message says what is missing."""
