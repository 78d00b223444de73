"""Histories written by hand: each checker rejects its anomaly, and accepts what looks like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jepsen_like.checkers import Options, Validity, check_events
from tests.jepsen_like.checkers.scribe import KEY, Scribe

Story = Callable[[Scribe], None]
REJECTED: list[tuple[str, Story]] = []
ACCEPTED: list[tuple[str, Story]] = []


def rejected(name: str) -> Callable[[Story], Story]:
    """The verdict `name` must be invalid."""

    def add(story: Story) -> Story:
        REJECTED.append((name, story))
        return story

    return add


def accepted(name: str) -> Callable[[Story], Story]:
    """Nothing may be invalid; `name` is the verdict that might have been."""

    def add(story: Story) -> Story:
        ACCEPTED.append((name, story))
        return story

    return add


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


def four(s: Scribe) -> None:
    s.append(1, {0: 10, 1: 11, 2: 12, 3: 13})
    s.poll(9, {0: 10, 1: 11, 2: 12, 3: 13})


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
def old_poll(s: Scribe) -> None:
    four(s)
    s.poll(2, {0: 10, 1: 11})


def test_every_verdict_is_tried_with_a_history_that_it_must_reject() -> None:
    names = {verdict.name for verdict in check_events([]).verdicts}
    assert names == {name for name, _ in REJECTED}


@pytest.mark.parametrize(
    ("name", "story"), REJECTED, ids=[f"{name}-{story.__name__}" for name, story in REJECTED]
)
def test_rejects(name: str, story: Story) -> None:
    scribe = Scribe()
    story(scribe)
    report = scribe.report()
    verdict = report[name]
    assert verdict.validity is Validity.INVALID, report.to_text()
    assert verdict.count >= 1
    assert verdict.examples
    ops = {event.op for event in scribe.events}
    assert all(op in ops for example in verdict.examples for op in example.ops)
    assert report.exit_code == 1


@pytest.mark.parametrize(
    ("name", "story"), ACCEPTED, ids=[f"{name}-{story.__name__}" for name, story in ACCEPTED]
)
def test_accepts(name: str, story: Story) -> None:
    scribe = Scribe()
    story(scribe)
    report = scribe.report()
    assert name in {verdict.name for verdict in report.verdicts}
    assert report.validity is Validity.VALID, report.to_text()


def test_what_options_excuse() -> None:
    scribe = Scribe()
    scribe.append(1, {0: 10})
    scribe.append(1, {2: 12})
    scribe.append(1, {3: 13})
    scribe.poll(2, [(0, 10), (2, 12)])
    assert scribe.report().named(Validity.INVALID) == ("unseen", "offset-gap", "linear-log")
    report = check_events(scribe.events, Options(must_see_all=False, gaps_allowed=True))
    assert report.validity is Validity.VALID
    assert "1 excused" in report["unseen"].note
    assert "1 excused" in report["offset-gap"].note
