"""Stories of committed offsets, groups, topics, and of orders that do not exist."""

from __future__ import annotations

from tests.jepsen_like.checkers.histories import accepted, four, rejected
from tests.jepsen_like.checkers.scribe import KEY, Scribe

# ---- committed offsets ----


@rejected("phantom-commit")
def told_what_nobody_committed(s: Scribe) -> None:
    s.committed(1, 5)


@accepted("phantom-commit")
def told_what_may_have_been_committed(s: Scribe) -> None:
    s.info(s.invoke(1, "commit", group="g", offsets={KEY: 5}))
    s.committed(2, 5)


@rejected("lost-commit")
def told_of_an_older_one(s: Scribe) -> None:
    s.commit(1, 5)
    s.commit(1, 7)
    s.committed(2, 5)


@rejected("lost-commit")
def told_of_none(s: Scribe) -> None:
    s.commit(1, 5)
    s.committed(2, -1)


@accepted("lost-commit")
def overwritten_while_asking(s: Scribe) -> None:
    s.commit(1, 5)
    asking = s.invoke(2, "committed", group="g", partitions=[KEY])
    s.commit(1, 7)
    s.ok(asking, offsets={KEY: 5})


@accepted("lost-commit")
def committed_again(s: Scribe) -> None:
    s.commit(1, 5)
    s.commit(1, 7)
    s.commit(1, 5)
    s.committed(2, 5)


@accepted("lost-commit")
def unknown_commit_takes_effect_late(s: Scribe) -> None:
    s.info(s.invoke(1, "commit", group="g", offsets={KEY: 5}))
    s.commit(2, 7)
    s.committed(3, 7)
    s.committed(3, 5)


@rejected("commit-regression")
def went_back_within_a_generation(s: Scribe) -> None:
    s.commit(1, 5, generation=1)
    s.commit(1, 4, generation=1)


@rejected("commit-regression")
def next_owner_went_back(s: Scribe) -> None:
    s.commit(1, 5, generation=1)
    s.commit(2, 4, generation=2)


@accepted("commit-regression")
def went_back_on_purpose(s: Scribe) -> None:
    s.commit(1, 5, generation=1)
    s.commit(1, 4)
    s.committed(1, 4)


@rejected("zombie-commit")
def older_generation_accepted(s: Scribe) -> None:
    s.assigned(1, 1, KEY)
    s.assigned(2, 2, KEY)
    s.commit(1, 5, generation=1)


@rejected("zombie-commit")
def older_generation_alive(s: Scribe) -> None:
    s.commit(2, 5, generation=2)
    s.ok(s.invoke(1, "heartbeat", group="g", generation=1))


@accepted("zombie-commit")
def older_generation_refused(s: Scribe) -> None:
    s.assigned(1, 1, KEY)
    s.assigned(2, 2, KEY)
    s.fail(s.invoke(1, "commit", group="g", generation=1, offsets={KEY: 5}), code=22)


@accepted("zombie-commit")
def accepted_just_before(s: Scribe) -> None:
    s.assigned(1, 1, KEY)
    under_way = s.invoke(1, "commit", group="g", generation=1, offsets={KEY: 5})
    s.assigned(2, 2, KEY)
    s.ok(under_way)


# ---- groups ----


@rejected("double-assignment")
def two_owners(s: Scribe) -> None:
    s.assigned(1, 1, KEY, "t-1")
    s.assigned(2, 1, "t-1")


@accepted("double-assignment")
def owners_in_turn(s: Scribe) -> None:
    s.assigned(1, 1, KEY, "t-1")
    s.assigned(2, 2, "t-1")
    s.assigned(1, 2, KEY)


@rejected("generation-back")
def forgotten_generation(s: Scribe) -> None:
    s.assigned(1, 3, KEY)
    s.assigned(1, 1, KEY)


@rejected("generation-back")
def same_generation_other_assignment(s: Scribe) -> None:
    s.assigned(1, 3, KEY)
    s.assigned(1, 3, KEY, "t-1")


@accepted("double-assignment")
@accepted("generation-back")
@accepted("zombie-commit")
@accepted("lost-commit")
@accepted("commit-regression")
def forgotten_when_it_was_empty(s: Scribe) -> None:
    s.assigned(1, 1, KEY)
    s.ok(s.invoke(1, "commit", group="g", generation=1, offsets={KEY: 5}))
    s.assigned(1, 2, KEY)
    s.note(-1, "group_gone", group="g")
    s.ok(s.invoke(2, "committed", group="g", partitions=[KEY]), offsets={KEY: -1})
    s.assigned(2, 1, KEY)
    s.ok(s.invoke(2, "commit", group="g", generation=1, offsets={KEY: 2}))


@rejected("consume-skip")
def committed_past_what_was_polled(s: Scribe) -> None:
    four(s)
    s.subscribe(2)
    s.poll(2, {0: 10})
    s.commit(2, 3)


@accepted("consume-skip")
def polled_by_two_members(s: Scribe) -> None:
    four(s)
    s.subscribe(2)
    s.subscribe(3)
    s.poll(2, {0: 10, 1: 11})
    s.poll(3, {2: 12})
    s.commit(3, 3)


# ---- topics ----


@rejected("lost-topic")
def created_and_not_listed(s: Scribe) -> None:
    s.topic("create_topic", "a")
    s.topics()


@accepted("lost-topic")
def stale_list(s: Scribe) -> None:
    s.topic("create_topic", "a")
    s.topics(stale=True)


@accepted("lost-topic")
def deleted_while_listing(s: Scribe) -> None:
    s.topic("create_topic", "a")
    listing = s.invoke(1, "list_topics")
    s.topic("delete_topic", "a")
    s.ok(listing, topics=[])


@rejected("resurrected-topic")
def deleted_and_listed(s: Scribe) -> None:
    s.topic("create_topic", "a")
    s.topic("delete_topic", "a")
    s.topics("a")


@accepted("resurrected-topic")
def perhaps_deleted(s: Scribe) -> None:
    s.topic("create_topic", "a")
    s.topic("delete_topic", "a", "info")
    s.topics("a")
    s.topics()


@rejected("phantom-topic")
def never_created(s: Scribe) -> None:
    s.topics("a")


@accepted("phantom-topic")
def there_before_the_history(s: Scribe) -> None:
    s.topics("t", "__internal")
    s.append(1, {0: 10})
    s.poll(2, {0: 10})


# ---- linearizability, as part of the whole ----


@rejected("linear-committed")
def read_went_back_and_forth(s: Scribe) -> None:
    s.info(s.invoke(1, "commit", group="g", offsets={KEY: 5}))
    s.commit(2, 7)
    for offset in (5, 7):
        s.committed(3, offset)


def twice(s: Scribe, sent: int) -> None:
    """Told of a commit, then of another, then of the first again, before it ends."""
    first = s.invoke(1, "commit", group="g", offsets={KEY: 281})
    s.committed(2, 281)
    s.commit(3, 283)
    s.ok(first, sent=sent)
    s.committed(2, 281)


@accepted("linear-committed")
@accepted("lost-commit")
def sent_again_and_taken_twice(s: Scribe) -> None:
    twice(s, 2)
    s.commit(3, 285)
    s.committed(2, 285)


@rejected("linear-committed")
def sent_once_and_taken_twice(s: Scribe) -> None:
    twice(s, 1)


@rejected("linear-committed")
def taken_more_often_than_sent(s: Scribe) -> None:
    first = s.invoke(1, "commit", group="g", offsets={KEY: 281})
    for offset in (283, 285):
        s.committed(2, 281)
        s.commit(3, offset)
        s.committed(2, offset)
    s.ok(first, sent=2)
    s.committed(2, 281)


@rejected("linear-committed")
@rejected("lost-commit")
def taken_again_after_its_end(s: Scribe) -> None:
    twice(s, 2)
    s.commit(3, 285)
    s.committed(2, 281)


@accepted("linear-committed")
def sent_again_and_never_answered(s: Scribe) -> None:
    s.info(s.invoke(1, "commit", group="g", offsets={KEY: 281}), sent=2)
    s.committed(2, 281)
    s.commit(3, 283)
    s.committed(2, 281)


@rejected("linear-committed")
def sent_once_and_never_answered(s: Scribe) -> None:
    s.info(s.invoke(1, "commit", group="g", offsets={KEY: 281}))
    s.committed(2, 281)
    s.commit(3, 283)
    s.committed(2, 281)


@rejected("linear-topics")
def created_twice(s: Scribe) -> None:
    s.topic("create_topic", "a")
    s.topic("create_topic", "a")


@rejected("linear-topics")
def refused_though_absent(s: Scribe) -> None:
    s.topic("create_topic", "a", "fail", code=36)


@rejected("linear-topics")
def lists_that_no_order_explains(s: Scribe) -> None:
    first = s.invoke(1, "create_topic", topics=["a"])
    second = s.invoke(2, "create_topic", topics=["b"])
    one, other = s.invoke(3, "list_topics"), s.invoke(4, "list_topics")
    s.ok(one, topics=["a"])
    s.ok(other, topics=["b"])
    s.ok(first)
    s.ok(second)


@accepted("linear-topics")
def created_by_the_unknown_try(s: Scribe) -> None:
    s.topic("create_topic", "a", "info")
    s.topic("create_topic", "a", "fail", code=36)
    s.topics("a")


@rejected("linear-log")
def fresh_read_misses_an_acknowledged_record(s: Scribe) -> None:
    four(s)
    s.poll(2, {0: 10, 1: 11}, f="read", start=0)


@rejected("linear-log")
def end_went_back(s: Scribe) -> None:
    four(s)
    s.ok(s.invoke(2, "end_offset", partitions=[KEY]), offsets={KEY: 3})


@accepted("linear-log")
def fresh_read_of_what_is_under_way(s: Scribe) -> None:
    under_way = s.begin_append(1, 10)
    s.poll(2, {}, f="read", start=0)
    s.poll(2, {0: 10}, f="read", start=0)
    s.end_append(under_way, {0: 10})


@accepted("linear-log")
def end_of_what_nobody_read(s: Scribe) -> None:
    s.append(1, {0: 10})
    s.poll(2, {0: 10})
    s.info(s.begin_append(1, 11, 12))
    s.ok(s.invoke(2, "end_offset"), offsets={KEY: 3})


@rejected("linear-log")
def end_of_what_nobody_sent(s: Scribe) -> None:
    s.append(1, {0: 10})
    s.poll(2, {0: 10})
    s.info(s.begin_append(1, 11))
    s.ok(s.invoke(2, "end_offset"), offsets={KEY: 3})


@accepted("linear-log")
def the_middle_of_what_is_unknown(s: Scribe) -> None:
    s.append(1, {0: 10})
    s.info(s.begin_append(1, 11, 12, 13))
    s.poll(2, {0: 10})
    s.assign(3, t_0=2)
    s.poll(3, {2: 12})


@accepted("linear-log")
def old_poll(s: Scribe) -> None:
    four(s)
    s.poll(2, {0: 10, 1: 11})
