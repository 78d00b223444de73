"""Moves of partitions, asked for and listed, by all drivers."""

from __future__ import annotations

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.types import TopicPartition
from raftmq_client import BrokerError, ClientError, Outcome, Reassignment, UnsupportedError
from tests.client.drivers import Driver
from tests.client.fake_broker import FakeBroker

ONE, TWO, NOWHERE = (TopicPartition("t", n) for n in (0, 1, 7))


def test_moves_are_asked_for_listed_and_cancelled(driver: Driver, broker: FakeBroker) -> None:
    with driver.admin(broker.address) as admin:
        assert admin.list_partition_reassignments() == {}
        told = admin.alter_partition_reassignments({ONE: [2, 3], TWO: (4,), NOWHERE: [2]})
        assert (told[ONE], told[TWO]) == (None, None)
        assert told[NOWHERE].code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert str(told[NOWHERE]).endswith("no such partition")
        both = {ONE: Reassignment((2, 3, 1), (2, 3), (1,)), TWO: Reassignment((4, 1), (4,), (1,))}
        assert admin.list_partition_reassignments() == both
        assert admin.list_partition_reassignments([TWO, NOWHERE]) == {TWO: both[TWO]}
        assert admin.list_partition_reassignments([]) == {}
        assert admin.alter_partition_reassignments({TWO: None}) == {TWO: None}
        (again,) = admin.alter_partition_reassignments({TWO: None}).values()
        assert again.code is ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
        assert list(admin.list_partition_reassignments()) == [ONE]


def test_a_factor_that_must_stay(driver: Driver, broker: FakeBroker) -> None:
    with driver.admin(broker.address) as admin:
        told = admin.alter_partition_reassignments({ONE: [2, 3]}, allow_factor_change=False)
        assert told[ONE].code is ErrorCode.INVALID_REPLICATION_FACTOR
        assert broker.moves == {}


def test_a_broker_that_cannot_say_that_is_not_asked(driver: Driver, broker: FakeBroker) -> None:
    broker.versions[ApiKey.ALTER_PARTITION_REASSIGNMENTS] = (0, 0)
    with driver.admin(broker.address) as admin:
        with pytest.raises(UnsupportedError):
            admin.alter_partition_reassignments({ONE: [2, 3]}, allow_factor_change=False)
        assert broker.moves == {}
        assert admin.alter_partition_reassignments({ONE: [2, 3]}) == {ONE: None}


def test_a_refusal_of_the_whole_is_raised(driver: Driver, broker: FakeBroker) -> None:
    broker.fault(ApiKey.ALTER_PARTITION_REASSIGNMENTS, "refuse", code=ErrorCode.UNSUPPORTED_VERSION)
    with driver.admin(broker.address) as admin, pytest.raises(BrokerError, match="all is") as said:
        admin.alter_partition_reassignments({ONE: [2]})
    assert said.value.code is ErrorCode.UNSUPPORTED_VERSION


def test_a_lost_answer_is_asked_for_again_but_not_of_a_cancelled_move(
    driver: Driver, broker: FakeBroker
) -> None:
    with driver.admin(broker.address) as admin:
        broker.fault(ApiKey.ALTER_PARTITION_REASSIGNMENTS, "drop after")
        assert admin.alter_partition_reassignments({ONE: [2]}) == {ONE: None}
        broker.fault(ApiKey.ALTER_PARTITION_REASSIGNMENTS, "drop after")
        with pytest.raises(ClientError) as raised:
            admin.alter_partition_reassignments({ONE: None})
        assert raised.value.outcome is Outcome.UNKNOWN
        assert broker.moves == {}
