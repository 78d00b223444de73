"""Stories of records: what was appended, and what was polled."""

from __future__ import annotations

from tests.jepsen_like.checkers.histories import accepted, four, rejected
from tests.jepsen_like.checkers.scribe import KEY, Scribe

# ---- records ----


@rejected("lost-write")
def acked_and_overtaken(s: Scribe) -> None:
    s.append(1, {0: 10})
    s.append(1, {1: 11})
    s.append(1, {2: 12})
    s.poll(2, [(0, 10), (2, 12)])


@rejected("lost-write")
def acked_where_another_value_is_read(s: Scribe) -> None:
    s.append(1, {0: 10})
    s.poll(2, {0: 99})


@rejected("lost-write")
def acked_as_part_of_an_unknown_append(s: Scribe) -> None:
    both = s.begin_append(1, 10, 11)
    s.info(both, records={KEY: [(0, 10), (-1, 11)]})
    s.append(1, {1: 12})
    s.poll(2, {1: 12})


@accepted("lost-write")
def unknown_append_never_seen(s: Scribe) -> None:
    s.info(s.begin_append(1, 10))
    s.append(2, {0: 11})
    s.poll(3, {0: 11})


@accepted("lost-write")
def deleted_before_anybody_polled(s: Scribe) -> None:
    s.append(1, {0: 10})
    s.append(1, {1: 11})
    s.ok(s.invoke(5, "delete_records", offsets={KEY: 1}))
    s.poll(2, {1: 11})


@accepted("lost-write")
def polled_by_somebody_else(s: Scribe) -> None:
    s.append(1, {0: 10, 1: 11})
    s.poll(2, {0: 10})
    s.poll(3, {1: 11})


@rejected("unseen")
def acked_and_nobody_got_that_far(s: Scribe) -> None:
    s.append(1, {0: 10})
    s.append(1, {1: 11})
    s.poll(2, {0: 10})


@rejected("unseen")
def acked_without_offset_and_gone(s: Scribe) -> None:
    s.ok(s.begin_append(1, 10))


@accepted("unseen")
def acked_without_offset_and_read(s: Scribe) -> None:
    s.ok(s.begin_append(1, 10))
    s.poll(2, {0: 10})


@rejected("duplicate")
def idempotent_twice(s: Scribe) -> None:
    s.append(1, {0: 10})
    s.poll(2, {0: 10, 1: 10})


@rejected("duplicate")
def unknown_twice(s: Scribe) -> None:
    s.info(s.begin_append(1, 10))
    s.poll(2, {0: 10, 1: 10})


@accepted("duplicate")
def plain_producer_twice(s: Scribe) -> None:
    s.append(1, {1: 10}, idempotent=False)
    s.poll(2, {0: 10, 1: 10})


@accepted("duplicate")
def gave_up_and_came_twice(s: Scribe) -> None:
    s.info(s.begin_append(1, 10), idempotent=False)
    s.poll(2, {0: 10, 1: 10})


@accepted("duplicate")
def same_value_in_two_partitions(s: Scribe) -> None:
    s.append(1, {0: 10})
    s.append(1, {0: 10}, key="t-1")
    s.poll(2, {0: 10})
    s.poll(2, {0: 10}, key="t-1")


@rejected("inconsistent-offsets")
def acknowledged_at_one_offset_twice(s: Scribe) -> None:
    s.append(1, {0: 10})
    s.append(2, {0: 11})
    s.poll(3, {0: 10})


@rejected("inconsistent-offsets")
def acknowledged_elsewhere_than_read(s: Scribe) -> None:
    s.append(1, {0: 10})
    s.append(1, {1: 11})
    s.poll(2, {0: 11, 1: 10})


@rejected("divergence")
def two_reads_differ(s: Scribe) -> None:
    s.info(s.begin_append(1, 10))
    s.info(s.begin_append(2, 11))
    s.poll(3, {0: 10})
    s.poll(4, {0: 11})


@rejected("aborted-read")
def failed_and_there(s: Scribe) -> None:
    s.fail(s.begin_append(1, 10))
    s.poll(2, {0: 10})


@rejected("aborted-read")
def there_and_failed_later(s: Scribe) -> None:
    under_way = s.begin_append(1, 10)
    s.poll(2, {0: 10})
    s.fail(under_way)


@accepted("aborted-read")
def unknown_and_there(s: Scribe) -> None:
    s.info(s.begin_append(1, 10))
    s.poll(2, {0: 10})


@accepted("phantom")
def read_before_it_was_acknowledged(s: Scribe) -> None:
    under_way = s.begin_append(1, 10)
    s.poll(2, {0: 10})
    s.end_append(under_way, {0: 10})


@rejected("phantom")
def never_sent(s: Scribe) -> None:
    s.poll(2, {0: 10})


@rejected("phantom")
def read_before_it_was_sent(s: Scribe) -> None:
    s.poll(2, {0: 10})
    s.append(1, {0: 10})


# ---- order of sends ----


@rejected("nonmonotonic-send")
def own_appends_swapped(s: Scribe) -> None:
    s.append(1, {1: 10})
    s.append(1, {0: 11})
    s.poll(2, {0: 11, 1: 10})


@rejected("nonmonotonic-send")
def pipelined_and_swapped(s: Scribe) -> None:
    first, second, third = (s.begin_append(1, value) for value in (10, 11, 12))
    s.end_append(third, {2: 12})
    s.end_append(first, {1: 10})
    s.end_append(second, {0: 11})
    s.poll(2, {0: 11, 1: 10, 2: 12})


@rejected("nonmonotonic-send")
def plain_and_swapped_though_not_pipelined(s: Scribe) -> None:
    s.append(1, {1: 10}, idempotent=False)
    s.append(1, {0: 11}, idempotent=False)
    s.poll(2, {0: 11, 1: 10})


@accepted("nonmonotonic-send")
def plain_and_pipelined(s: Scribe) -> None:
    first = s.begin_append(1, 10, idempotent=False)
    second = s.begin_append(1, 11, idempotent=False)
    s.end_append(first, {1: 10})
    s.end_append(second, {0: 11})
    s.poll(2, {0: 11, 1: 10})


@accepted("nonmonotonic-send")
def two_processes_at_once(s: Scribe) -> None:
    first, second = s.begin_append(1, 10), s.begin_append(2, 11)
    s.end_append(first, {1: 10})
    s.end_append(second, {0: 11})
    s.poll(3, {0: 11, 1: 10})


@rejected("int-nonmonotonic-send")
def one_append_in_disorder(s: Scribe) -> None:
    both = s.begin_append(1, 10, 11)
    s.ok(both, records={KEY: [(1, 10), (0, 11)]})
    s.poll(2, {0: 11, 1: 10})


@accepted("int-nonmonotonic-send")
def one_append_with_another_between(s: Scribe) -> None:
    both, other = s.begin_append(1, 10, 11), s.begin_append(2, 12)
    s.end_append(other, {1: 12})
    s.end_append(both, {0: 10, 2: 11})
    s.poll(3, {0: 10, 1: 12, 2: 11})


@rejected("realtime-send")
def later_append_before_acknowledged_one(s: Scribe) -> None:
    s.append(1, {1: 10})
    s.append(2, {0: 11})
    s.poll(3, {0: 11, 1: 10})


# ---- order of polls ----


@rejected("nonmonotonic-poll")
def polled_again(s: Scribe) -> None:
    four(s)
    s.poll(2, {0: 10, 1: 11})
    s.poll(2, {1: 11, 2: 12})


@rejected("nonmonotonic-poll")
def below_what_was_assigned(s: Scribe) -> None:
    four(s)
    s.assign(2, t_0=2)
    s.poll(2, {1: 11})


@accepted("nonmonotonic-poll")
def sought_back(s: Scribe) -> None:
    four(s)
    s.poll(2, {0: 10, 1: 11})
    s.assign(2, t_0=0)
    s.poll(2, {0: 10, 1: 11})


@accepted("nonmonotonic-poll")
def assigned_away_and_back(s: Scribe) -> None:
    four(s)
    s.poll(2, {0: 10, 1: 11})
    s.assign(2, t_1=0)
    s.assign(2, t_1=0)
    s.poll(2, {0: 10})


@accepted("nonmonotonic-poll")
def subscribed_anew(s: Scribe) -> None:
    four(s)
    s.poll(2, {0: 10, 1: 11})
    s.subscribe(2)
    s.poll(2, {0: 10, 1: 11})


@accepted("nonmonotonic-poll")
def revoked_and_given_back(s: Scribe) -> None:
    four(s)
    s.subscribe(2)
    s.assigned(2, 1, KEY, t_0=0)
    s.poll(2, {0: 10, 1: 11})
    s.note(2, "revoked", group="g", partitions=[KEY])
    s.assigned(2, 2, KEY, t_0=0)
    s.poll(2, {0: 10, 1: 11})


@rejected("nonmonotonic-poll")
def kept_over_a_rebalance_and_back(s: Scribe) -> None:
    four(s)
    s.subscribe(2)
    s.assigned(2, 1, KEY, t_0=0)
    s.poll(2, {0: 10, 1: 11})
    s.assigned(2, 2, KEY, "t-1")
    s.poll(2, {0: 10, 1: 11})


@accepted("nonmonotonic-poll")
def rebalanced_during_the_poll(s: Scribe) -> None:
    four(s)
    s.poll(2, {0: 10, 1: 11})
    s.poll(2, {0: 10, 1: 11}, moved=(KEY,))
    s.poll(2, {3: 13})


@accepted("nonmonotonic-poll")
def another_life_of_the_process(s: Scribe) -> None:
    four(s)
    s.poll(2, {0: 10, 1: 11})
    s.note(2, "crash")
    s.poll(2, {0: 10})


@rejected("int-nonmonotonic-poll")
def one_poll_in_disorder(s: Scribe) -> None:
    four(s)
    s.poll(2, [(0, 10), (2, 12), (1, 11)])


@rejected("poll-skip")
def left_out_between_polls(s: Scribe) -> None:
    four(s)
    s.poll(2, {0: 10})
    s.poll(2, {2: 12})


@rejected("poll-skip")
def left_out_after_a_seek(s: Scribe) -> None:
    four(s)
    s.assign(2, t_0=1)
    s.poll(2, {3: 13})


@accepted("poll-skip")
def left_out_because_deleted(s: Scribe) -> None:
    four(s)
    s.poll(2, {0: 10})
    s.info(s.invoke(5, "delete_records", offsets={KEY: 2}))
    s.poll(2, {2: 12})


@rejected("int-poll-skip")
def left_out_within_a_poll(s: Scribe) -> None:
    four(s)
    s.poll(2, [(0, 10), (3, 13)])


@rejected("offset-gap")
def offset_that_never_was(s: Scribe) -> None:
    s.append(1, {0: 10})
    s.append(1, {2: 12})
    s.poll(2, [(0, 10), (2, 12)])


# ---- ranges ----


@rejected("out-of-range")
def refused_though_there(s: Scribe) -> None:
    four(s)
    refused = s.invoke(2, "poll", offsets={KEY: 2})
    s.fail(refused, code=1)


@rejected("out-of-range")
def refused_by_a_leader_of_before(s: Scribe) -> None:
    four(s)
    refused = s.invoke(2, "poll", offsets={KEY: 2})
    s.fail(refused, code=1, stale=True)


@accepted("out-of-range")
def refused_because_deleted(s: Scribe) -> None:
    four(s)
    refused = s.invoke(2, "poll", offsets={KEY: 2})
    s.info(s.invoke(5, "delete_records", offsets={KEY: 3}))
    s.fail(refused, code=1)


@accepted("out-of-range")
def refused_beyond_the_end(s: Scribe) -> None:
    four(s)
    s.fail(s.invoke(2, "poll", offsets={KEY: 9}), code=1)


@accepted("out-of-range")
def refused_for_another_partition(s: Scribe) -> None:
    four(s)
    refused = s.invoke(2, "poll", offsets={KEY: 2, "t-1": 100})
    s.fail(refused, code=1, offsets={"t-1": 100})


@rejected("out-of-range")
def deleted_and_served(s: Scribe) -> None:
    four(s)
    s.ok(s.invoke(5, "delete_records", offsets={KEY: 2}))
    s.poll(2, {1: 11}, start=1)


@rejected("out-of-range")
def below_what_was_asked_for(s: Scribe) -> None:
    four(s)
    s.poll(2, {1: 11, 2: 12}, start=2)


@rejected("out-of-range")
def negative(s: Scribe) -> None:
    s.append(1, {0: 10})
    s.poll(2, {-1: 10, 0: 10})
