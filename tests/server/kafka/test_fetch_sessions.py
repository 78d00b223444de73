"""Incremental fetch sessions (KIP-227): epochs, what is news, who goes when the cache is full."""

from __future__ import annotations

from random import Random
from uuid import UUID

import pytest

from raftmq.errors import ErrorCode, KafkaError
from raftmq.ports import never
from raftmq.protocol.fetch import (
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchTopic,
    ForgottenTopic,
)
from raftmq.server.kafka.fetch_sessions import EVICTION_MS, FetchContext, FetchSessions, Wanted
from tests.partition.fake_replica import FakeClock


def request(
    *partitions: int, session: tuple[int, int] = (0, -1), forgotten: tuple[int, ...] = ()
) -> FetchRequest:
    session_id, epoch = session
    topics = [FetchTopic("t", None, [FetchPartition(p) for p in partitions])] if partitions else []
    gone = [ForgottenTopic("t", None, list(forgotten))] if forgotten else []
    return FetchRequest(session_id=session_id, session_epoch=epoch, topics=topics, forgotten=gone)


def answers(
    context: FetchContext, high_watermark: int = 10, records_of: tuple[int, ...] = ()
) -> list[tuple[Wanted, FetchPartitionResponse]]:
    return [
        (
            wanted,
            FetchPartitionResponse(
                wanted.request.partition,
                0,
                high_watermark,
                high_watermark,
                0,
                records=[b"x"] if wanted.request.partition in records_of else (),
            ),
        )
        for wanted in context.wanted
    ]


def told(
    context: FetchContext, high_watermark: int = 10, records_of: tuple[int, ...] = ()
) -> list[int]:
    selected = context.select(answers(context, high_watermark, records_of))
    return [answer.partition for _, answer in selected]


def make(sessions_max: int = 3, partitions_max: int = 100) -> tuple[FetchSessions, FakeClock]:
    clock = FakeClock()
    sessions = FetchSessions(
        clock, Random(1), sessions_max=sessions_max, partitions_max=partitions_max, buggify=never
    )
    return sessions, clock


def begin(sessions: FetchSessions, asked: FetchRequest, *, by_id: bool = False) -> FetchContext:
    return sessions.begin(asked, uses_topic_ids=by_id)


def start(sessions: FetchSessions, *partitions: int) -> int:
    context = begin(sessions, request(*partitions, session=(0, 0)))
    told(context)
    return context.session_id


def code_of(sessions: FetchSessions, asked: FetchRequest, *, by_id: bool = False) -> ErrorCode:
    with pytest.raises(KafkaError) as caught:
        begin(sessions, asked, by_id=by_id)
    return caught.value.code


def test_without_a_session_everything_is_told() -> None:
    sessions, _ = make()
    context = begin(sessions, request(1, 2))
    assert (context.session_id, told(context)) == (0, [1, 2])
    assert len(sessions) == 0


def test_a_session_tells_only_news() -> None:
    sessions, _ = make()
    session_id = start(sessions, 1, 2, 3)
    assert session_id != 0
    assert told(begin(sessions, request(session=(session_id, 1)))) == []
    moved = begin(sessions, request(session=(session_id, 2)))
    assert told(moved, 11) == [1, 2, 3], "a moved high watermark is news"
    read = begin(sessions, request(session=(session_id, 3)))
    assert told(read, 11, records_of=(2,)) == [2]
    after = begin(sessions, request(session=(session_id, 4)))
    assert [wanted.request.partition for wanted in after.wanted] == [1, 3, 2], "served, so last"


def test_an_error_is_told_and_its_end_as_well() -> None:
    sessions, _ = make()
    session_id = start(sessions, 1)
    failing = begin(sessions, request(session=(session_id, 1)))
    wanted = failing.wanted[0]
    refused = FetchPartitionResponse(1, ErrorCode.NOT_LEADER_OR_FOLLOWER, -1, -1, -1)
    assert failing.select([(wanted, refused)]) != []
    assert told(begin(sessions, request(session=(session_id, 2)))) == [1]
    assert told(begin(sessions, request(session=(session_id, 3)))) == []


def test_partitions_are_added_changed_and_forgotten() -> None:
    sessions, _ = make()
    session_id = start(sessions, 1, 2)
    asked = request(3, session=(session_id, 1), forgotten=(1,))
    context = begin(sessions, asked)
    assert [wanted.request.partition for wanted in context.wanted] == [2, 3]
    assert told(context) == [3]
    changed = request(2, session=(session_id, 2))
    changed.topics[0].partitions[0].fetch_offset = 77
    context = begin(sessions, changed)
    offsets = {w.request.partition: w.request.fetch_offset for w in context.wanted}
    assert offsets == {2: 77, 3: 0}


def test_wrong_sessions_start_afresh() -> None:
    sessions, _ = make()
    session_id = start(sessions, 1)
    not_found = ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert code_of(sessions, request(session=(session_id + 1, 1))) is not_found
    stale = request(session=(session_id, 3))
    assert code_of(sessions, stale) is ErrorCode.INVALID_FETCH_SESSION_EPOCH
    by_id = code_of(sessions, request(session=(session_id, 1)), by_id=True)
    assert by_id is ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR
    begin(sessions, request(session=(session_id, 1)))
    repeated = request(session=(session_id, 1))
    assert code_of(sessions, repeated) is ErrorCode.INVALID_FETCH_SESSION_EPOCH


@pytest.mark.parametrize("epoch", [0, -1], ids=["begin anew", "end"])
def test_a_client_leaves_its_session(epoch: int) -> None:
    sessions, _ = make()
    session_id = start(sessions, 1)
    context = begin(sessions, request(1, session=(session_id, epoch)))
    assert (context.session_id != 0) == (epoch == 0)
    assert context.session_id != session_id
    asked = request(session=(session_id, 1))
    assert code_of(sessions, asked) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND


def test_epochs_wrap_to_one() -> None:
    sessions, _ = make()
    session_id = start(sessions, 1)
    sessions._sessions[session_id].epoch = (1 << 31) - 1
    begin(sessions, request(session=(session_id, (1 << 31) - 1)))
    begin(sessions, request(session=(session_id, 1)))


def test_a_full_cache_gives_no_session() -> None:
    sessions, _ = make(sessions_max=2)
    assert start(sessions, 1)
    assert start(sessions, 1)
    assert start(sessions, 1, 2, 3) == 0
    assert len(sessions) == 2


def test_unused_sessions_make_room() -> None:
    sessions, clock = make(sessions_max=2)
    unused, used = start(sessions, 1), start(sessions, 1)
    clock.now_ms += EVICTION_MS + 1
    begin(sessions, request(session=(used, 1)))
    assert start(sessions, 1)
    assert code_of(sessions, request(session=(unused, 1))) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND


def test_smaller_sessions_make_room_for_larger_ones() -> None:
    sessions, clock = make(sessions_max=2)
    small, large = start(sessions, 1), start(sessions, 1, 2, 3)
    clock.now_ms += EVICTION_MS + 1
    begin(sessions, request(session=(small, 1)))
    begin(sessions, request(session=(large, 1)))
    assert start(sessions, 1) == 0, "no larger than the smallest"
    assert start(sessions, 1, 2)
    assert code_of(sessions, request(session=(small, 2))) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    begin(sessions, request(session=(large, 2)))


def test_partitions_of_all_sessions_are_bounded() -> None:
    sessions, _ = make(partitions_max=5)
    first = start(sessions, 1, 2, 3)
    assert start(sessions, 1, 2, 3) == 0
    second = start(sessions, 1, 2)
    growing = request(4, session=(second, 1))
    assert code_of(sessions, growing) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert len(sessions) == 1
    begin(sessions, request(4, 5, session=(first, 1)))


def test_topics_by_id() -> None:
    sessions, _ = make()
    topic_id = UUID(int=5)
    asked = FetchRequest(
        session_id=0, session_epoch=0, topics=[FetchTopic(None, topic_id, [FetchPartition(1)])]
    )
    context = begin(sessions, asked, by_id=True)
    assert context.wanted[0].topic == topic_id
    told(context)
    gone = FetchRequest(
        session_id=context.session_id,
        session_epoch=1,
        forgotten=[ForgottenTopic(None, topic_id, [1])],
    )
    assert begin(sessions, gone, by_id=True).wanted == []
