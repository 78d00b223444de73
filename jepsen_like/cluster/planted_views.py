"""Bugs planted in views with conditions: what is judged, what is kept, and where a view ends."""

from __future__ import annotations

from typing import Any, Final

from jepsen_like.bug import Bug, patching
from jepsen_like.cluster import stress
from raftmq.errors import ErrorCode
from raftmq.node.views import Fill, NodeViews
from raftmq.partition.filtered import FilteredPartition
from raftmq.partition.partition import Partition
from raftmq.partition.ports import OffsetResult, ReadResult
from raftmq.promise import Promise
from raftmq.records import BatchHeader
from raftmq.types import Buffer, Offset
from raftmq.views.filling import JudgeJob, RebuiltBatches

SLOW_S: Final = 0.2

_judge_on = NodeViews._judge_on
_load = NodeViews._load
_get = RebuiltBatches.get
_put = RebuiltBatches.put


def _never_aborted(_self: JudgeJob, _header: BatchHeader) -> bool:
    return False


async def _read_to_the_logs_end(_self: NodeViews, base: Partition, offset: Offset) -> ReadResult:
    """What is not committed yet is judged, too."""
    spans, _ = base._spans(offset, 4_096, base.replica.log_end_offset, True, True)
    return ReadResult(ErrorCode.NONE, spans=spans)


async def _believed_to_the_logs_end(self: NodeViews, fill: Fill) -> None:
    """What came between the last save and the crash is not looked at."""
    await _load(self, fill)
    index = fill.shown.view_index
    if index is not None and fill.base.replica.log_end_offset > index.examined_end:
        index.pass_to(fill.base.replica.log_end_offset)


def _get_of_anybody(self: RebuiltBatches, _owner: object, base_offset: int) -> Buffer | None:
    return _get(self, "", base_offset)


def _put_for_anybody(self: RebuiltBatches, _owner: object, rebuilt: Any) -> None:
    _put(self, "", rebuilt)


def _end_of_the_index(self: FilteredPartition) -> Promise[OffsetResult]:
    """Whatever is examined so far counts as all."""
    end = self.start if self.view_index is None else self.view_index.end
    return Promise.resolved(OffsetResult(ErrorCode.NONE, end, leader_epoch=self.leader_epoch))


async def _slowly(self: NodeViews, fill: Fill, stable: Offset) -> bool:
    """Each replica is behind by another time."""
    await self._tasks.sleep(SLOW_S * (1 + fill.base.node_id % 3))
    return await _judge_on(self, fill, stable)


def _bug(
    *targets: tuple[object, str, object], caught_by: tuple[str, ...], begins_at: int = 1
) -> Bug:
    return Bug(patching(*targets), stress.views, 13, (29,), caught_by, begins_at)


VIEW_BUGS: Final[dict[str, Bug]] = {
    "views-show-the-aborted": _bug(
        (JudgeJob, "_is_aborted", _never_aborted), caught_by=("ViewEqualsFilter",)
    ),
    "views-judge-the-uncommitted": _bug(
        (NodeViews, "_read", _read_to_the_logs_end),
        caught_by=("ViewEqualsFilter",),
    ),
    "views-believe-what-they-did-not-see": _bug(
        (NodeViews, "_load", _believed_to_the_logs_end),
        caught_by=("ViewEqualsFilter", "LatestNeverFalls"),
    ),
    "made-batches-have-no-owner": _bug(
        (RebuiltBatches, "get", _get_of_anybody),
        (RebuiltBatches, "put", _put_for_anybody),
        caught_by=("ViewEqualsFilter",),
    ),
    "views-end-where-their-index-does": _bug(
        (FilteredPartition, "when_examined", _end_of_the_index),
        (NodeViews, "_judge_on", _slowly),
        caught_by=("LatestNeverFalls",),
    ),
}
