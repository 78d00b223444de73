"""What the comparison of views with consuming everything is made of."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.views import BATCH_RECORDS, DIFFERENT, LAYOUTS, TAG, batches, matches_of
from raftmq.records import read_records


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("share", [0.01, 0.004])
def test_as_many_match_as_are_waited_for(layout: str, share: float) -> None:
    records = BATCH_RECORDS * DIFFERENT
    options = argparse.Namespace(records=3 * records, share=share, size=10, seed=1)
    tags = [
        [dict(record.headers)["tag"] for record in read_records(batch)]
        for batch in batches(layout, options)
    ]
    assert sum(map(len, tags)) == records
    assert 3 * sum(batch.count(TAG) for batch in tags) == matches_of(options) == 3 * share * records
    mixed = [batch for batch in tags if TAG in batch and set(batch) != {TAG}]
    assert len(mixed) == (0 if (layout, share) == ("one tag", 0.01) else len(mixed))
    if layout == "mixed":
        assert len(mixed) > DIFFERENT // 2
