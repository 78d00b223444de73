"""Metrics of views with conditions: how far the indexes of this node are, and what that took.

Rows per view and partition are bounded by `metrics_partitions_max`; what is above is summed in one
row whose view is "(other)". Every node has rows for the replicas that it holds, leader or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from raftmq.node.metrics.families import OTHER, Collector, Metric, Scrape, Work

if TYPE_CHECKING:
    from raftmq.node.composition import NodeCore

LABELS: Final = ("view", "partition")
SLICE: Final = 64
END: Final = Metric(
    "raftmq_view_end", "gauge", "One past the last match, as far as this replica examined", LABELS
)
EXAMINED_END: Final = Metric(
    "raftmq_view_examined_end", "gauge", "Everything committed below is in the index", LABELS
)
LACKS: Final = Metric(
    "raftmq_view_lacks_bytes",
    "gauge",
    "About how many committed bytes of the topic are yet to be examined",
    LABELS,
)
FILLED: Final = Metric(
    "raftmq_view_filled_ratio", "gauge", "Share of the topic's log here that is examined", LABELS
)
LEFT_OUT: Final = Metric(
    "raftmq_views_left_out",
    "gauge",
    f'Partitions of views here without rows of their own: summed as "{OTHER}"',
)
INDEXES: Final = Metric(
    "raftmq_view_indexes", "gauge", "Indexes that this node keeps, one for each replica and view"
)
BLOCKED: Final = Metric(
    "raftmq_view_indexes_blocked", "gauge", "Those that could not be filled at the last attempt"
)
_TOTALS: Final = (
    (
        Metric("raftmq_view_judged_bytes_total", "counter", "Bytes of batches that were judged"),
        "judged_bytes",
    ),
    (
        Metric("raftmq_view_judged_batches_total", "counter", "Those batches"),
        "judged_count",
    ),
    (
        Metric("raftmq_view_matches_total", "counter", "Records among them that match"),
        "matches_count",
    ),
    (
        Metric(
            "raftmq_view_unreadable_batches_total",
            "counter",
            "Batches that no view shows, since nobody can read their records",
        ),
        "unreadable_count",
    ),
    (
        Metric(
            "raftmq_view_indexes_remade_total",
            "counter",
            "Indexes whose files said what the log does not have",
        ),
        "remade_count",
    ),
)


def _collect(node: NodeCore, scrape: Scrape) -> Iterator[Work | None]:
    views = node.partitions.views
    fills = sorted(views.fills(), key=lambda fill: fill.shown.name)
    rows_max = node.config.metrics_partitions_max
    rest = [0, 0, 0, 0]
    for number, fill in enumerate(fills):
        shown = fill.shown
        lacks, size = views.lacks_bytes(fill), max(fill.base.size_bytes, 1)
        end, examined_end = int(shown.readable_end), int(shown.examined_end)
        if number < rows_max:
            labels = (shown.name.topic, str(shown.index))
            scrape[END].add(labels, end)
            scrape[EXAMINED_END].add(labels, examined_end)
            scrape[LACKS].add(labels, lacks)
            scrape[FILLED].add(labels, 1 - min(lacks / size, 1.0))
        else:
            rest = [a + b for a, b in zip(rest, (end, examined_end, lacks, size), strict=True)]
        if number % SLICE == SLICE - 1:
            yield None
    left = max(0, len(fills) - rows_max)
    if left:
        for metric, value in zip((END, EXAMINED_END, LACKS), rest, strict=False):
            scrape[metric].add((OTHER, "-1"), value)
        scrape[FILLED].add((OTHER, "-1"), 1 - min(rest[2] / max(rest[3], 1), 1.0))
    scrape[LEFT_OUT].add((), left)
    scrape[INDEXES].add((), len(fills))
    scrape[BLOCKED].add((), sum(bool(fill.trouble) for fill in fills))
    for metric, attribute in _TOTALS:
        scrape[metric].add((), getattr(views, attribute))
    yield None


VIEWS: Final = Collector(
    (
        END,
        EXAMINED_END,
        LACKS,
        FILLED,
        LEFT_OUT,
        INDEXES,
        BLOCKED,
        *(metric for metric, _ in _TOTALS),
    ),
    _collect,
)
