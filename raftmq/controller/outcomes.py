"""What an admin call's rows say of each topic or resource: refused, validated, done, known to all.

Pure functions from plans and results to `Outcome` rows; nothing here decides or remembers.
"""

from __future__ import annotations

from collections.abc import Sequence

from raftmq.controller.topic_validation import NO_ID
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import ConfigResource, Outcome, Outcomes
from raftmq.metadata.commands import TopicOutcomes


def refused(name: str, error: KafkaError) -> Outcome:
    """A topic that is refused."""
    return Outcome(name=name, code=error.code, message=error.message)


def refused_resource(resource: ConfigResource, error: KafkaError) -> Outcome:
    """A resource whose change is refused."""
    return Outcome(
        name=resource.resource_name,
        resource_type=resource.resource_type,
        code=error.code,
        message=error.message,
    )


def unnamed(row: Outcome) -> Outcome:
    """A validated topic has no id: it was not created."""
    return Outcome(
        name=row.name,
        code=row.code,
        message=row.message,
        topic_id=NO_ID,
        partitions=row.partitions,
        replication_factor=row.replication_factor,
    )


def merged(rows: Sequence[Outcome], result: TopicOutcomes) -> Outcomes:
    """What was planned, with what became of it at apply."""
    by_id = {outcome.topic_id: outcome for outcome in result.topics}
    rows_now = []
    for row in rows:
        applied = None if row.topic_id is None else by_id.get(row.topic_id)
        if row.code is ErrorCode.NONE and applied is not None and applied.code is not row.code:
            row = Outcome(name=row.name, code=applied.code, message=applied.message)
        rows_now.append(row)
    return tuple(rows_now)


def settled(outcome: Outcome, is_known: bool, is_led: bool) -> Outcome:
    """A row, after waiting for live brokers to know of it and for leaders."""
    if outcome.code is not ErrorCode.NONE:
        return outcome
    if not is_known:
        return Outcome(
            name=outcome.name,
            resource_type=outcome.resource_type,
            code=ErrorCode.REQUEST_TIMED_OUT,
            message="done, but not every live broker has applied it yet",
            topic_id=outcome.topic_id,
        )
    return Outcome(
        name=outcome.name,
        message=outcome.message,
        resource_type=outcome.resource_type,
        topic_id=outcome.topic_id,
        partitions=outcome.partitions,
        replication_factor=outcome.replication_factor,
        is_led=is_led,
    )
