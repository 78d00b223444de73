"""Plans of a broker's answers: topics, partitions, offsets by every kind of bound."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import pytest

from raftmq.records import NewRecord, build_batch
from raftmq_client.errors import ClientError
from raftmq_spark.errors import DataLossError, PlanError
from raftmq_spark.options import read_options
from raftmq_spark.plan import Plan, make_plan, split
from tests.client.fake_broker import FakeBroker


def fill(broker: FakeBroker, topic: str, partition: int, *times: int) -> None:
    """One batch of one record for each time."""
    for timestamp in times:
        batch = build_batch([NewRecord(None, b"v", timestamp)])
        broker.logs[(topic, partition)].append(memoryview(batch))


def plan_of(broker: FakeBroker, **options: Any) -> Plan:
    texts = {name: str(value) for name, value in options.items()}
    return make_plan(read_options({"kafka.bootstrap.servers": broker.address, **texts}))


def test_what_is_chosen() -> None:
    with FakeBroker({"a": 2, "b": 1, "ab": 1}) as broker:
        fill(broker, "a", 0, 1, 2, 3)
        fill(broker, "b", 0, 1)
        broker.logs[("a", 0)].start = 1
        plan = plan_of(broker, subscribe="b,a")
        assert plan.ranges == {"a": {0: (1, 3), 1: (0, 0)}, "b": {0: (0, 1)}}
        assert plan.size == 3
        assert plan.topic_ids == {name: broker.topic_ids[name] for name in ("a", "b")}
        assert [str(part) for part in split(plan)] == ["a-0 [1, 3)", "b-0 [0, 1)"]
        assert split(plan)[0].topic_id == broker.topic_ids["a"]
        assert plan_of(broker, assign='{"a": [1]}').ranges == {"a": {1: (0, 0)}}
        assert sorted(plan_of(broker, subscribePattern="a.?").ranges) == ["a", "ab"]
        assert plan_of(broker, subscribePattern="b").ranges == {"b": {0: (0, 1)}}
        assert plan_of(broker, subscribePattern="c").ranges == {}


def test_what_a_topic_lists_no_more_is_read_with_it() -> None:
    with FakeBroker({"a": 4, "a.retired": 4}) as broker:
        fill(broker, "a", 0, 1, 2)
        fill(broker, "a", 3, 1, 2, 3)
        fill(broker, "a.retired", 3, 1, 2, 3)
        broker.listed["a"] = 2
        whole = {0: (0, 2), 1: (0, 0), 2: (0, 0), 3: (0, 3)}
        assert plan_of(broker, subscribe="a").ranges == {"a": whole}
        assert plan_of(broker, subscribe="a,a.retired").ranges == {"a": whole}, "not twice"
        assert plan_of(broker, subscribePattern="a.*").ranges == {"a": whole}
        assert plan_of(broker, subscribe="a.retired").ranges["a.retired"][3] == (0, 3)
        assert plan_of(broker, assign='{"a": [3]}').ranges == {"a": {3: (0, 3)}}
        with pytest.raises(PlanError, match="there is no partition a-4"):
            plan_of(broker, assign='{"a": [4]}')


def test_what_is_not_there() -> None:
    with FakeBroker({"a": 2}) as broker:
        with pytest.raises(PlanError, match="there is no topic 'b'"):
            plan_of(broker, subscribe="a,b")
        with pytest.raises(PlanError, match="there is no partition a-2"):
            plan_of(broker, assign='{"a": [0, 2]}')
        with pytest.raises(PlanError, match="startingOffsets says nothing about a-1"):
            plan_of(broker, subscribe="a", startingOffsets='{"a": {"0": 0}}')
        assert "b" not in broker.topic_ids, "reading makes no topics"


def test_groups_and_timestamps() -> None:
    with FakeBroker({"t": 2}) as broker:
        fill(broker, "t", 0, 10, 20, 30, 40)
        fill(broker, "t", 1, 15)
        broker.groups["g"] = {("t", 0): 3}
        assert plan_of(broker, subscribe="t", group="g").ranges["t"] == {0: (3, 4), 1: (0, 1)}
        committed = plan_of(broker, subscribe="t", group="g", endingOffsets="committed")
        assert committed.ranges["t"] == {0: (0, 3), 1: (0, 0)}
        never = plan_of(broker, subscribe="t", group="never")
        assert never.ranges["t"] == {0: (0, 4), 1: (0, 1)}
        until = plan_of(broker, subscribe="t", endingTimestamp=25)
        assert until.ranges["t"] == {0: (0, 2), 1: (0, 1)}
        with pytest.raises(PlanError, match="t-1 has no record at or after"):
            plan_of(broker, subscribe="t", startingTimestamp=25)
        table = json.dumps({"t": {"0": 25, "1": 15}})
        found = plan_of(broker, subscribe="t", startingOffsetsByTimestamp=table)
        assert found.ranges["t"] == {0: (2, 4), 1: (0, 1)}


def test_what_is_lost_is_told_when_planning() -> None:
    with FakeBroker({"t": 1}) as broker:
        fill(broker, "t", 0, 10, 20, 30, 40)
        broker.logs[("t", 0)].start = 2
        broker.groups["g"] = {("t", 0): 1}
        with pytest.raises(DataLossError, match=r"t-0: offsets \[1, 2\) .* starts at 2"):
            plan_of(broker, subscribe="t", group="g")
        with pytest.warns(RuntimeWarning, match="data loss"):
            plan = plan_of(broker, subscribe="t", group="g", failOnDataLoss="false")
        assert plan.ranges["t"] == {0: (2, 4)}


def test_a_thousand_partitions_within_a_second() -> None:
    with FakeBroker({"t": 1_000}) as broker:
        seconds = []
        for _ in range(3):
            started = time.process_time()
            assert len(plan_of(broker, subscribe="t").ranges["t"]) == 1_000
            seconds.append(time.process_time() - started)
    assert statistics.median(seconds) < 1.0, "of CPU, the fake broker's included"


def test_nobody_answers() -> None:
    with FakeBroker() as broker:
        address = broker.address
    options = read_options(
        {
            "kafka.bootstrap.servers": address,
            "subscribe": "t",
            "kafka.request.timeout.ms": "1000",
        }
    )
    with pytest.raises(ClientError):
        make_plan(options)
