"""Limits and times of consumer groups: Kafka's names and meanings, one default of our own.

Owns plain values. `initial_rebalance_delay_ms` is 500 where Kafka has 3000: the first members of a
group wait that long for each other, which spares a large group many rebalances but makes every
small one, and every test, start late.
"""

from __future__ import annotations

from attrs import frozen


@frozen(slots=True, kw_only=True)
class GroupConfig:
    """Kafka's broker configs of groups, in its order."""

    session_timeout_ms_min: int = 6_000  # group.min.session.timeout.ms
    session_timeout_ms_max: int = 1_800_000  # group.max.session.timeout.ms
    initial_rebalance_delay_ms: int = 500  # group.initial.rebalance.delay.ms
    size_max: int = 10_000  # group.max.size, there without a limit
    new_member_join_timeout_ms: int = 300_000  # a constant there
    bytes_max: int = 4 << 20  # group_bytes_max: of all members' subscriptions; of all assignments
    offset_metadata_chars_max: int = 4_096  # offset.metadata.max.bytes, chars of Java in truth
    commit_metadata_bytes_max: int = 1 << 20  # of all offsets of one request, in one command
    commit_linger_ms: int = 5  # group.coordinator.append.linger.ms
    offsets_retention_ms: int = 7 * 86_400_000  # offsets.retention.minutes
    retention_check_ms: int = 600_000  # offsets.retention.check.interval.ms
    group_id_bytes_max: int = 4_096  # a key of the metadata state, so it has a limit
    instance_id_length_max: int = 249  # of group.instance.id, as Kafka's own client has it
    member_id_length_max: int = 1_024  # no longer one is given out, so none can be meant
