"""Metrics per other node: what waits for it and what was dropped on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from raftmq.node.metrics.families import Area, Metric, Scrape, Work

if TYPE_CHECKING:
    from raftmq.node.composition import NodeCore

CONNECTED: Final = Metric(
    "raftmq_peer_connected", "gauge", "1 while the streams to that node stand", ("peer",)
)
QUEUED: Final = Metric(
    "raftmq_peer_queue_bytes", "gauge", "Bytes that wait for that node", ("peer", "stream")
)
SENT: Final = Metric(
    "raftmq_peer_sent_bytes_total", "counter", "Bytes given to that node", ("peer", "stream")
)
DROPPED: Final = Metric(
    "raftmq_peer_dropped_frames_total",
    "counter",
    "Frames dropped: no connection, or its queue is full; Raft sends again what matters",
    ("peer", "stream"),
)

REFUSED: Final = Metric(
    "raftmq_peer_streams_refused_total",
    "counter",
    "Streams at the peer port, or to peers, that were refused or ended for what came on them: no "
    "hello, another cluster's or version's, above a limit, a bad frame, too much memory, too slow, "
    "or a bug met",
    ("reason",),
)


def _collect(node: NodeCore, scrape: Scrape) -> Iterator[Work | None]:
    links = node.plane.links
    for peer, stream in sorted(links.streams()):
        counts = links.counts(peer, stream)
        labels = (str(peer), stream)
        scrape[QUEUED].add(labels, counts.queued_bytes)
        scrape[SENT].add(labels, counts.sent_bytes)
        scrape[DROPPED].add(labels, counts.dropped_frames)
        if stream == "bulk":
            scrape[CONNECTED].add((str(peer),), links.is_connected(peer))
    for reason, count in links.refusals.items():
        scrape[REFUSED].add((reason,), count)
    yield None


PEERS: Final = Area((CONNECTED, QUEUED, SENT, DROPPED, REFUSED), _collect)
