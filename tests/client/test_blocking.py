"""The blocking driver on real sockets, against a broker that misbehaves on request."""

from __future__ import annotations

import gc
import os
import re
import selectors
import socket
import threading

import pytest

from raftmq.codec import Codec
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.records import parse_header
from raftmq.types import TopicPartition
from raftmq_client import (
    Admin,
    BrokerError,
    BufferFullError,
    ClientError,
    Consumer,
    ConsumerRecord,
    ForkedError,
    NoOffsetError,
    Outcome,
    PollIntervalError,
    Producer,
    Receipt,
    TimedOutError,
    UsageError,
)
from raftmq_client.blocking import engine as engine_module
from raftmq_client.blocking.engine import Engine
from raftmq_client.core.build import build_client
from tests.client.fake_broker import FakeBroker

KEY = TopicPartition("t", 0)
LEFT_ALONE_MS = engine_module._LEFT_ALONE_MS


def test_what_is_sent_is_read_back(broker: FakeBroker) -> None:
    with Producer(broker.address) as producer:
        receipt = producer.send("t", b"v", b"k", [("h", b"1"), ("n", None)], 0, 1_000)
        place = receipt.result(20)
        assert (place.topic, place.partition, place.offset, place.timestamp) == ("t", 0, 0, 1_000)
        producer.send("t", None, None, partition=0)
    with Consumer(broker.address, reset="earliest") as consumer:
        consumer.assign([KEY])
        first = consumer.poll(20, 1)
        (second,) = consumer.poll(20)
        headers = (("h", b"1"), ("n", None))
        assert first[0] == ConsumerRecord("t", 0, 0, 1_000, b"k", b"v", headers, 0, 0)
        assert (second.offset, second.key, second.value) == (1, None, None)
        assert consumer.position(KEY) == 2


def test_records_that_wait_are_not_the_garbage_collectors_business(broker: FakeBroker) -> None:
    with Producer(broker.address, linger_ms=60_000) as producer:
        assert producer.partitions("t") == 2
        last = [producer.send("t", b"v%d" % n, b"k", partition=0) for n in range(9)][-1]
        assert last.batch is not None
        assert len(last.batch.records) > 1
        gc.collect()
        assert not any(map(gc.is_tracked, last.batch.records))


@pytest.mark.parametrize("codec", [codec.name.lower() for codec in Codec])
def test_batches_are_compressed_as_asked(broker: FakeBroker, codec: str) -> None:
    with Producer(broker.address, compression=codec) as producer:
        for _ in range(100):
            producer.send("t", b"the same again and again", partition=1)
    header = parse_header(broker.logs[("t", 1)].batches[0])
    assert header.codec.name.lower() == codec
    with Consumer(broker.address) as consumer:
        consumer.assign({TopicPartition("t", 1): 0})
        assert len(consumer.poll(20, 1_000)) == 100


def test_a_large_record_travels(broker: FakeBroker) -> None:
    value = os.urandom(900_000)
    with Producer(broker.address) as producer:
        producer.send("t", value, partition=0).result(20)
    with Consumer(broker.address) as consumer:
        consumer.assign({KEY: 0})
        assert consumer.poll(20)[0].value == value


@pytest.mark.parametrize("kind", ["drop", "drop after"])
def test_a_lost_connection_loses_and_doubles_nothing(broker: FakeBroker, kind: str) -> None:
    with Producer(broker.address) as producer:
        producer.send("t", b"0", partition=0).result(20)
        broker.fault(ApiKey.PRODUCE, kind)
        receipts = [producer.send("t", b"%d" % i, partition=0) for i in range(1, 50)]
        assert [receipt.result(10).offset for receipt in receipts] == list(range(1, 50))
    assert broker.logs[("t", 0)].end == 50


def test_the_delivery_timeout_of_an_unanswered_request_is_unknown(broker: FakeBroker) -> None:
    held = broker.fault(ApiKey.PRODUCE, "hold")
    with Producer(broker.address, delivery_timeout_ms=1_000) as producer:
        receipt = producer.send("t", b"x", partition=0)
        with pytest.raises(ClientError) as caught:
            receipt.result(20)
        assert held.was_met.is_set(), "it was sent in time"
        assert caught.value.outcome is Outcome.UNKNOWN
        assert receipt.outcome is Outcome.UNKNOWN


def test_nobody_there_is_a_failure_not_a_doubt() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with (
        Producer(f"127.0.0.1:{port}", delivery_timeout_ms=150) as producer,
        pytest.raises(TimedOutError) as caught,
    ):
        producer.send("t", b"x").result(20)
    assert caught.value.outcome is Outcome.FAILED


def test_a_pending_receipt_says_so(broker: FakeBroker) -> None:
    fault = broker.fault(ApiKey.PRODUCE, "hold")
    producer = Producer(broker.address, delivery_timeout_ms=60_000)
    receipt = producer.send("t", b"x", partition=0)
    assert fault.was_met.wait(20)
    with pytest.raises(TimeoutError):
        receipt.result(0.01)
    assert receipt.outcome is None
    producer.close(flush=False)
    assert receipt.outcome is Outcome.UNKNOWN


def test_a_full_buffer_blocks_and_then_refuses(broker: FakeBroker) -> None:
    broker.fault(ApiKey.PRODUCE, "hold")
    producer = Producer(broker.address, buffer_memory=2_000, linger_ms=0, max_block_ms=50)
    try:
        assert producer.partitions("t") == 2  # or half of the buffer would be all there is for it
        for _ in range(17):  # 120 bytes each, as the buffer counts
            producer.send("t", b"x" * 100, partition=0)
        with pytest.raises(BufferFullError):
            producer.send("t", b"x" * 100, partition=0)
    finally:
        producer.close(flush=False)


def test_old_brokers_are_spoken_to_in_their_versions(broker: FakeBroker) -> None:
    broker.handshake_max = 2
    broker.versions = {**broker.versions, ApiKey.PRODUCE: (0, 7), ApiKey.FETCH: (4, 11)}
    with Producer(broker.address) as producer:
        producer.send("t", b"x", partition=0).result(20)
    with Consumer(broker.address) as consumer:
        consumer.assign({KEY: 0})
        assert consumer.poll(20)[0].value == b"x"
    assert (ApiKey.API_VERSIONS, 0) in broker.seen
    assert (ApiKey.PRODUCE, 7) in broker.seen
    assert (ApiKey.FETCH, 11) in broker.seen


def test_acks_0_and_1(broker: FakeBroker) -> None:
    with Producer(broker.address, acks=0) as producer:
        assert producer.send("t", b"x", partition=0).result(20).offset == -1
    with Producer(broker.address, acks=1) as producer:
        assert producer.send("t", b"x", partition=0).result(20).offset == 1
    assert parse_header(broker.logs[("t", 0)].batches[1]).producer_id == -1


def test_threads_share_a_producer(broker: FakeBroker) -> None:
    with Producer(broker.address) as producer:

        def send_some() -> None:
            for _ in range(200):
                producer.send("t", b"x", partition=0)

        threads = [threading.Thread(target=send_some) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        producer.flush(10)
    assert broker.logs[("t", 0)].end == 800


def test_a_fetch_that_fails_is_tried_again(broker: FakeBroker) -> None:
    with Producer(broker.address) as producer:
        producer.send("t", b"x", partition=0).result(20)
    broker.fault(ApiKey.FETCH, "refuse", ErrorCode.NOT_LEADER_OR_FOLLOWER)
    broker.fault(ApiKey.FETCH, "drop")
    with Consumer(broker.address) as consumer:
        consumer.assign({KEY: 0})
        assert consumer.poll(10)[0].value == b"x"


def test_an_offset_out_of_range_follows_the_policy(broker: FakeBroker) -> None:
    with Producer(broker.address) as producer:
        for i in range(4):
            producer.send("t", b"%d" % i, partition=0).result(20)
    broker.logs[("t", 0)].start = 2
    with Consumer(broker.address, reset="earliest") as consumer:
        consumer.assign({KEY: 0})
        assert [record.offset for record in consumer.poll(20)] == [2, 3]
    with Consumer(broker.address, reset="none") as consumer:
        consumer.assign({KEY: 0})
        with pytest.raises(NoOffsetError, match="offset 0"):
            consumer.poll(20)
        consumer.seek(KEY, 3)
        assert [record.offset for record in consumer.poll(20)] == [3]


def test_a_group_commits_what_was_handed_out_and_resumes(broker: FakeBroker) -> None:
    with Producer(broker.address) as producer:
        for i in range(10):
            producer.send("t", b"%d" % i, partition=0).result(20)
    gained: list[tuple[TopicPartition, ...]] = []
    lost: list[tuple[TopicPartition, ...]] = []
    with Consumer(
        broker.address,
        group="g",
        topics=["t"],
        reset="earliest",
        on_assigned=gained.append,
        on_revoked=lost.append,
    ) as consumer:
        assert consumer.generation == -1
        assert len(consumer.poll(20, 4)) == 4
        assert consumer.generation == 1
    assert broker.groups["g"] == {("t", 0): 4, ("t", 1): 0}
    assert gained == lost == [(KEY, TopicPartition("t", 1))]
    assert broker.count(ApiKey.LEAVE_GROUP) == 1
    with Consumer(broker.address, group="g", topics=["t"], auto_commit_ms=None) as consumer:
        assert [record.offset for record in consumer.poll(20)] == [4, 5, 6, 7, 8, 9]
        consumer.commit({KEY: 7})
        assert consumer.committed([KEY]) == {KEY: 7}
    assert broker.groups["g"] == {("t", 0): 7, ("t", 1): 0}


def test_a_slow_callback_does_not_stop_heartbeats(broker: FakeBroker) -> None:
    beats = threading.Event()

    def wait_for_heartbeats(_partitions: tuple[TopicPartition, ...]) -> None:
        before = broker.count(ApiKey.HEARTBEAT)
        while broker.count(ApiKey.HEARTBEAT) < before + 3:
            assert beats.wait(0.001) is False
        beats.set()

    with Consumer(
        broker.address,
        group="g",
        topics=["t"],
        heartbeat_interval_ms=2,
        on_assigned=wait_for_heartbeats,
    ) as consumer:
        while not beats.is_set():
            consumer.poll(0.05)


def test_an_error_in_the_block_finishes_nothing(broker: FakeBroker) -> None:
    with Producer(broker.address) as producer:
        producer.send("t", b"x", partition=0).result(20)

    def read_and_fail() -> None:
        with Consumer(broker.address, group="g", topics=["t"], reset="earliest") as consumer:
            assert consumer.poll(20)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read_and_fail()
    assert broker.groups["g"] == {("t", 0): 0, ("t", 1): 0}, "where it began"


@pytest.mark.parametrize(
    ("api", "code"),
    [
        (ApiKey.FIND_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE),
        (ApiKey.JOIN_GROUP, ErrorCode.NOT_COORDINATOR),
        (ApiKey.SYNC_GROUP, ErrorCode.REBALANCE_IN_PROGRESS),
        (ApiKey.SYNC_GROUP, ErrorCode.UNKNOWN_MEMBER_ID),
        (ApiKey.OFFSET_FETCH, ErrorCode.UNSTABLE_OFFSET_COMMIT),
        (ApiKey.HEARTBEAT, ErrorCode.REBALANCE_IN_PROGRESS),
        (ApiKey.HEARTBEAT, ErrorCode.ILLEGAL_GENERATION),
    ],
    ids=lambda value: value.name,
)
def test_a_member_gets_over_refusals(broker: FakeBroker, api: ApiKey, code: ErrorCode) -> None:
    fault = broker.fault(api, "refuse", code)
    with Consumer(
        broker.address, group="g", topics=["t"], reset="earliest", heartbeat_interval_ms=5
    ) as consumer:
        while not fault.was_met.is_set():
            consumer.poll(0.05)
        with Producer(broker.address) as producer:
            producer.send("t", b"x", partition=0).result(20)
        values = []
        while not values:
            values = consumer.poll(20)
        assert values[0].value == b"x"


def test_a_fatal_refusal_reaches_the_caller(broker: FakeBroker) -> None:
    broker.fault(ApiKey.JOIN_GROUP, "refuse", ErrorCode.INVALID_GROUP_ID)
    broker.fault(ApiKey.JOIN_GROUP, "refuse", ErrorCode.INVALID_GROUP_ID)
    with (
        Consumer(broker.address, group="g", topics=["t"]) as consumer,
        pytest.raises(BrokerError, match="INVALID_GROUP_ID"),
    ):
        consumer.poll(20)


def test_seek_pause_and_resume(broker: FakeBroker) -> None:
    with Producer(broker.address) as producer:
        for i in range(6):
            producer.send("t", b"%d" % i, partition=0).result(20)
    with Consumer(broker.address) as consumer:
        consumer.assign({KEY: 0})
        assert len(consumer.poll(20)) == 6
        consumer.seek(KEY, 4)
        consumer.pause(KEY)
        assert consumer.poll(0.05) == []
        consumer.resume(KEY)
        assert [record.offset for record in consumer.poll(20)] == [4, 5]
        with pytest.raises(UsageError):
            consumer.seek(TopicPartition("other", 0), 1)


def test_administration(broker: FakeBroker) -> None:
    with Admin(broker.address) as admin:
        assert [item.node_id for item in admin.brokers()] == [1]
        created = admin.create_topic("new", 3, 1, {"retention.ms": "1000"})
        assert created.partitions == 3
        assert len(admin.topic("new").partitions) == 3
        admin.create_partitions("new", 4)
        assert len(admin.topic("new").partitions) == 4
        with pytest.raises(BrokerError) as caught:
            admin.create_topic("new")
        assert caught.value.code is ErrorCode.TOPIC_ALREADY_EXISTS
        admin.delete_topic("new")
        with pytest.raises(BrokerError) as caught:
            admin.topic("new")
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_lost_answer_to_a_change_is_unknown_but_reads_are_repeated(broker: FakeBroker) -> None:
    with Admin(broker.address) as admin:
        broker.fault(ApiKey.METADATA, "drop after")
        assert admin.topic("t").name == "t"
        broker.fault(ApiKey.CREATE_TOPICS, "drop after")
        with pytest.raises(ClientError) as caught:
            admin.create_topic("maybe")
        assert caught.value.outcome is Outcome.UNKNOWN
        assert "maybe" in broker.topic_ids


def test_closed_clients_refuse(broker: FakeBroker) -> None:
    producer = Producer(broker.address)
    producer.close()
    producer.close()
    with pytest.raises(UsageError):
        producer.send("t", b"x")
    admin = Admin(broker.address)
    admin.close()
    with pytest.raises(UsageError):
        admin.brokers()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_detected(broker: FakeBroker) -> None:
    with Producer(broker.address) as producer:
        producer.send("t", b"x", partition=0).result(20)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                producer.send("t", b"y")
            except ForkedError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        producer.send("t", b"z", partition=0).result(20)


@pytest.mark.parametrize("text", ["", ",", "host:", "host:x", "host:99999", ":9092"])
def test_addresses_that_make_no_sense_are_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError):
        Admin(text)


def test_a_silent_broker_does_not_keep_us_from_the_next(broker: FakeBroker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never says a word
        bootstrap = f"127.0.0.1:{silent.getsockname()[1]},{broker.address}"
        with Admin(bootstrap, timeout_ms=4_000) as admin:
            assert admin.topic("t").name == "t"


def test_listeners_are_told_before_a_flush_ends(broker: FakeBroker) -> None:
    told: list[Receipt] = []
    with Producer(broker.address, value_serializer="json", key_serializer="str") as producer:
        producer.send("t", {"a": 1}, "k", partition=0, on_delivery=told.append)
        producer.send("t", [2], "k", partition=9, on_delivery=told.append)
        producer.flush(10)
        assert [receipt.outcome for receipt in told] == [Outcome.FAILED, Outcome.OK]
        assert told[1].place is not None
        assert told[1].place.offset == 0
    with Consumer(broker.address, value_deserializer="json", key_deserializer="str") as consumer:
        consumer.assign({KEY: 0})
        (message,) = consumer.poll(20)
        assert (message.key, message.value, message.value_size) == ("k", {"a": 1}, 7)


def test_an_iteration_that_ends_early_loses_nothing(broker: FakeBroker) -> None:
    with Producer(broker.address) as producer:
        for i in range(6):
            producer.send("t", b"%d" % i, partition=0)
    with Consumer(broker.address, group="g", topics=["t"], reset="earliest") as consumer:
        for message in consumer:
            if message.offset == 2:
                break
        assert [item.offset for item in consumer.poll(20, 1)] == [3]
    assert broker.groups["g"] == {("t", 0): 4, ("t", 1): 0}


def test_at_most_once_commits_before_it_hands_out(broker: FakeBroker) -> None:
    with Producer(broker.address) as producer:
        for i in range(6):
            producer.send("t", b"%d" % i, partition=0)
    with Consumer(
        broker.address, group="g", topics=["t"], reset="earliest", delivery="at_most_once"
    ) as consumer:
        assert len(consumer.poll(20, 4)) == 4
        assert broker.groups["g"] == {("t", 0): 4}


def test_a_member_that_did_not_poll_is_told_why_it_lost_its_partitions(broker: FakeBroker) -> None:
    with Producer(broker.address) as producer:
        producer.send("t", b"x", partition=0)
    revoked: list[tuple[TopicPartition, ...]] = []
    with Consumer(
        broker.address,
        group="g",
        topics=["t"],
        reset="earliest",
        max_poll_interval_ms=1_500,
        on_revoked=revoked.append,
    ) as consumer:
        while not consumer.poll(0.05):
            pass
        left = broker.wait_for(ApiKey.LEAVE_GROUP)
        assert left
        with pytest.raises(PollIntervalError, match="max_poll_interval_ms"):
            consumer.poll(0.05)
        assert (len(revoked), consumer.assignment) == (1, ()), "told before the reason"
        while not consumer.poll(0.05):  # joins again, and reads what it did not commit
            pass


def test_a_pattern_reads_what_it_matches(broker: FakeBroker) -> None:
    broker.make_topic("other", 1)
    with Producer(broker.address) as producer:
        producer.send("t", b"x", partition=0)
        producer.send("other", b"y", partition=0)
    with Consumer(
        broker.address, group="g", topics=re.compile("ot.*"), reset="earliest"
    ) as consumer:
        assert [(m.topic, m.value) for m in consumer.poll(20)] == [("other", b"y")]


def test_who_polls_has_the_sockets_to_himself_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that receive in turn cost more than one; a wake-up brings the other one back."""
    now = 1_000.0
    monkeypatch.setattr(engine_module, "now_ms", lambda: now)
    engine = Engine(build_client("127.0.0.1:1", "c", None, may_create_topics=False))
    ours, theirs = socket.socketpair()
    try:
        engine._selector.register(ours, selectors.EVENT_READ, "a socket")
        theirs.send(b"x")

        def sees() -> list[object]:
            return [key.data for key, _ in engine._select(0) if key.data is not None]

        assert sees() == ["a socket"]
        engine._pumped_ms = now
        assert sees() == []
        now += LEFT_ALONE_MS
        assert sees() == ["a socket"], "nobody polls any more"
        engine._pumped_ms = now
        with engine.lock:
            engine.wake()
        assert sees() == ["a socket"]
        assert any(key.data is None for key, _ in engine._select(0)), "the wake-up itself"
    finally:
        ours.close()
        theirs.close()
        engine.close()
