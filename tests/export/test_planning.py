"""What an export is to write, decided from the archive's end, the group and the log."""

from __future__ import annotations

from typing import Any

import pytest

from raftmq_client.blocking import Admin
from raftmq_spark.export.errors import ArchiveError, LostRecordsError
from raftmq_spark.export.manifest import PartitionKey, Until
from raftmq_spark.export.planning import Position, Wishes, decide, need_topics, positions
from tests.client.fake_broker import FakeBroker

KEY = PartitionKey("t", "id-2", 0)
OLD = PartitionKey("t", "id-1", 0)


def ranges(
    position: Position, end: int | None = None, old: int | None = None, **wishes: Any
) -> tuple[list[tuple[int, int]], list[tuple[int, int, str]]]:
    ends = {} if end is None else {KEY: end}
    if old is not None:
        ends[OLD] = old
    decided = decide(Wishes("g", **wishes), ends, {KEY: position})
    return (
        [(part.start, part.end) for part in decided.parts],
        [(gap.start, gap.end, gap.why) for gap in decided.gaps],
    )


@pytest.mark.parametrize(
    ("position", "end", "expected"),
    [
        pytest.param(Position(0, 9), None, [(0, 9)], id="never committed: from the log start"),
        pytest.param(Position(4, 9), None, [(4, 9)], id="from a later log start"),
        pytest.param(Position(0, 9, 3), None, [(3, 9)], id="from the committed offset"),
        pytest.param(Position(0, 9, 3), 3, [(3, 9)], id="goes on"),
        pytest.param(Position(0, 9, 3), 6, [(6, 9)], id="the manifest is ahead of the group"),
        pytest.param(Position(0, 9), 6, [(6, 9)], id="the group's offset is gone"),
        pytest.param(Position(0, 9, 9), 9, [], id="nothing new"),
        pytest.param(Position(0, 0), None, [], id="empty"),
    ],
)
def test_until_stable(position: Position, end: int | None, expected: list[Any]) -> None:
    assert ranges(position, end) == (expected, [])


@pytest.mark.parametrize(
    ("position", "end", "expected"),
    [
        pytest.param(Position(0, 9), None, [], id="never committed: nothing was consumed"),
        pytest.param(Position(0, 9, 5), None, [(0, 5)], id="from the log start"),
        pytest.param(Position(0, 9, 5), 2, [(2, 5)], id="goes on"),
        pytest.param(Position(0, 9, 2), 5, [], id="consumers went back"),
        pytest.param(Position(0, 4, 6), 2, [(2, 4)], id="an open transaction bounds it"),
    ],
)
def test_until_committed(position: Position, end: int | None, expected: list[Any]) -> None:
    assert ranges(position, end, until=Until.COMMITTED) == (expected, [])


def test_retention_is_an_error_unless_accepted() -> None:
    with pytest.raises(LostRecordsError, match=r"t-0: the records \[3, 5\)"):
        ranges(Position(5, 9, 3), 3)
    assert ranges(Position(5, 9, 3), 3, accepts_loss=True) == ([(5, 9)], [(3, 5, "retention")])
    assert ranges(Position(9, 9, 3), 3, accepts_loss=True) == ([], [(3, 9, "retention")])
    with pytest.raises(LostRecordsError):  # a group that stands before the log
        ranges(Position(5, 9, 0))


def test_a_group_ahead_of_the_archive() -> None:
    with pytest.raises(ArchiveError, match="--skip-to-committed"):
        ranges(Position(0, 9, 7), 3)
    assert ranges(Position(0, 9, 7), 3, skips_to_committed=True) == ([(7, 9)], [(3, 7, "skipped")])
    both = ranges(Position(8, 9, 7), 3, skips_to_committed=True, accepts_loss=True)
    assert both == ([(8, 9)], [(3, 7, "skipped"), (7, 8, "retention")])


def test_a_log_that_ends_before_the_archive() -> None:
    with pytest.raises(ArchiveError, match="t-0 ends at 9, before 12"):
        ranges(Position(0, 9, 12), 12)


def test_a_topic_created_anew() -> None:
    """An offset that was committed for the deleted one says nothing; another one counts."""
    assert ranges(Position(0, 30, 20), old=20) == ([(0, 30)], [])
    assert ranges(Position(0, 30, 25), old=20) == ([(25, 30)], [])


def test_large_ranges_are_cut() -> None:
    cut, _ = ranges(Position(0, 10), records_per_file=4)
    assert cut == [(0, 3), (3, 6), (6, 10)]


def test_what_a_topic_lists_no_more_is_exported_with_it() -> None:
    """Under its own name and number, as before; and the view shows none of it once more."""
    with FakeBroker({"t": 3, "t.retired": 3}) as broker, Admin(broker.address) as admin:
        broker.logs["t", 2].start = broker.logs["t", 2].end = 7
        broker.listed["t"] = 1
        for names in (["t"], ["t", "t.retired"]):
            topics = need_topics(admin, names)
            found = positions(admin, topics, "g")
            t = str(broker.topic_ids["t"])
            assert sorted(found) == [PartitionKey("t", t, number) for number in range(3)]
            assert found[PartitionKey("t", t, 2)] == Position(7, 7)
        assert [info.has(number) for info in topics[:1] for number in range(4)] == [
            *(True, True, True),
            False,
        ]
        assert len(positions(admin, need_topics(admin, ["t.retired"]), "g")) == 3
