"""Fetch: three parts, each with a file of its own.

The session says which partitions are wanted (`fetch_sessions.py`), a reading looks at them once
(`fetch_reading.py`), and where that finds less than `min_bytes`, or what is to be confirmed or made
ready first, the fetch waits (`fetch_waiting.py`) until `max_wait_ms` is over.
"""

from __future__ import annotations

from typing import Final

from raftmq.errors import ErrorCode, KafkaError
from raftmq.promise import Promise
from raftmq.protocol.fetch import (
    FetchRequest,
    FetchResponse,
)
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.fetch_reading import TOPIC_IDS_FROM, Reading
from raftmq.server.kafka.fetch_waiting import ParkedFetch
from raftmq.server.kafka.request_context import RequestContext

MAX_WAIT_MS_MAX: Final = 300_000


def handle(
    broker: Broker, context: RequestContext, request: FetchRequest
) -> FetchResponse | Promise[FetchResponse]:
    """Read what there is; wait when that is too little."""
    version = context.api_version
    if request.replica_id >= 0:
        # Replicas of ours do not come this way; nobody else may claim to be one.
        return _refuse_all(broker, ErrorCode.INVALID_REQUEST)
    try:
        session = broker.sessions.begin(request, uses_topic_ids=version >= TOPIC_IDS_FROM)
    except KafkaError as error:
        return _refuse_all(broker, error.code)
    reading = Reading(broker, context, request, session)
    min_bytes, wait_ms = request.min_bytes, min(request.max_wait_ms, MAX_WAIT_MS_MAX)
    if reading.is_large:
        parked = ParkedFetch(broker, reading, min_bytes)
        parked.look(broker.clock.monotonic_ms() + wait_ms)
        return parked
    reading.read()
    if reading.jobs:
        parked = ParkedFetch(broker, reading, min_bytes)
        parked.check(wait_ms)
        return parked
    waits = reading.next_leaders()
    if waits is not None:
        parked = ParkedFetch(broker, reading, min_bytes)
        parked.await_leaders(waits)
        return parked
    if reading.beyond:
        parked = ParkedFetch(broker, reading, min_bytes)
        parked.finish()
        return parked
    if reading.is_urgent or reading.size >= min_bytes or wait_ms <= 0:
        return reading.respond()
    parked = ParkedFetch(broker, reading, min_bytes)
    parked.park(wait_ms)
    return parked


def _refuse_all(broker: Broker, code: ErrorCode) -> FetchResponse:
    broker.metrics.api("fetch").error(code)
    return FetchResponse(error_code=code)
