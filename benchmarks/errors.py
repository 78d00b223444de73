"""What can go wrong in a benchmark, as one line for people."""

from __future__ import annotations


class BenchmarkError(Exception):
    """A run that cannot be made or whose figures would mean nothing; the message says why."""


class UnsupportedError(BenchmarkError):
    """This workload asks something of the cluster that it cannot do; the row stays empty."""
