"""Batches without records in the place of what was lost: sound, cut anywhere, read by everybody."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.log.batch_reader import Epochs
from raftmq.log.model import DamagedError
from raftmq.log.segment import cut_filler, fillers, is_filler
from raftmq.records import check_batch, empty_batch, parse_header, read_records
from raftmq.types import Offset
from tests.log.helpers import append, batch, elect, flush, open_log, sim_disk


@given(st.integers(0, 50), st.integers(1, 50), st.lists(st.integers(1, 90), max_size=4))
def test_fillers_fill_and_keep_the_epochs(start: int, count: int, borders: list[int]) -> None:
    starts = (0, *sorted(set(borders)))
    epochs = Epochs(starts, tuple(range(1, len(starts) + 1)))
    offset = start
    for data in fillers(start, start + count, epochs):
        header = check_batch(data)
        assert header.base_offset == offset
        assert epochs.allows(offset, header.leader_epoch)
        assert epochs.at(header.next_offset - 1) == header.leader_epoch
        assert is_filler(header)
        assert list(read_records(data)) == []
        offset = header.next_offset
    assert offset == start + count


def test_a_range_beyond_what_one_batch_holds_takes_several() -> None:
    headers = [parse_header(b) for b in fillers(0, (1 << 31) + 5, Epochs((0,), (1,)))]
    assert [(h.base_offset, h.next_offset) for h in headers] == [
        (0, 1 << 31),
        (1 << 31, (1 << 31) + 5),
    ]


@pytest.mark.parametrize(("start", "end"), [(10, 20), (12, 20), (10, 15), (13, 14)])
def test_a_filler_can_be_cut(start: int, end: int) -> None:
    whole = empty_batch(10, 20, 3)
    cut = cut_filler(whole, parse_header(whole), start, end)
    header = check_batch(cut)
    assert (header.base_offset, header.next_offset, header.leader_epoch) == (start, end, 3)


def test_no_batch_with_content_is_a_filler() -> None:
    assert not is_filler(parse_header(batch(0, 1)))


def test_a_log_without_what_was_lost_is_whole_again() -> None:
    disk = sim_disk()
    log = open_log(disk)
    elect(log, 1)
    for _ in range(3):
        append(log, 1, count=2, size=70)
    flush(log)
    end = log.flushed_end
    first = parse_header(disk.content("data/a-0/00000000000000000000.log")).size
    disk.flip("data/a-0/00000000000000000000.log", first + 70, 1)
    log = open_log(disk, claimed=end)
    assert log.damaged == [(2, 4)]
    log.accept_loss(Offset(2))
    assert log.damaged == []
    assert log.end_index == end
    again = open_log(disk, claimed=end)
    assert again.damaged == []
    counts = [(h.base_offset, h.record_count) for h in again.headers(Offset(0), Offset(6))]
    assert counts == [(0, 2), (2, 0), (4, 2)]
    try:
        spans = again.locate(Offset(2), 1 << 20, Offset(6))
    except DamagedError:
        pytest.fail("nothing is damaged any more")
    assert sum(span.size for span in spans) > 0
