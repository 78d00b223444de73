"""What can go wrong with an export, in words an operator can act on.

Every error names the archive, group, topic or file that it is about and, where we know it, what to
do next. None of them means that rows were lost or doubled: whatever the manifests do not list does
not count, and the next run takes up from there.
"""

from __future__ import annotations

from raftmq_spark.errors import SparkSourceError


class ExportError(SparkSourceError):
    """Base of all that an export, a check or a replay raises on purpose."""


class StoreError(ExportError):
    """The archive's file system refused something, or is not one that we know."""


class ArchiveError(ExportError):
    """The archive is not what it should be: damaged, of a newer version, somebody else's."""


class BusyError(ExportError):
    """Another export has the group or the archive, or took it over; this one stopped."""


class LostRecordsError(ExportError):
    """Records are gone from the log that were never exported."""
