"""Who looks at transactions: readers of committed records and of all, of last stable offsets, of
the offsets that groups are told.

A reader goes through each partition from its beginning on, and now and then one begins anew.
`look_back` is the last word of a run: once every transaction has ended, last stable offsets have to
reach the high watermarks, no transaction may still be listed, and everything is read once more.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Literal

import confluent_kafka
from confluent_kafka import IsolationLevel
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec

from jepsen_like.live.workloads.base import (
    FAST_RETRIES,
    Around,
    Crowd,
    Restarting,
    UnansweredError,
    parts_of,
)
from jepsen_like.live.workloads.members import (
    ANSWER_S,
    GroupConsumer,
    Librdkafka,
    OwnClient,
)
from jepsen_like.live.workloads.poll import (
    POLL_RECORDS_MAX,
    POLL_S,
    READERS,
    assign,
    ends_in,
    new_consumer,
    records_of,
)
from raftmq.types import TopicPartition
from raftmq_client.blocking import Admin
from raftmq_client.core.admin import LATEST
from raftmq_client.errors import ClientError
from raftmq_client.options import Isolation

FIRST: Final = 10
"""Numbers of readers; others have those below."""
BEGIN_ANEW_S: Final = (60.0, 150.0)
ASK_S: Final = (0.05, 0.4)
SETTLE_S: Final = 45.0
"""Longer than any transaction may take that is not asked about any more, and to be looked for."""
READ_UNCOMMITTED, READ_COMMITTED = 0, 1
_POLLS: Final[Mapping[Isolation, Literal["poll_committed", "poll_uncommitted"]]] = {
    "read_committed": "poll_committed",
    "read_uncommitted": "poll_uncommitted",
}
KINDS: Final[tuple[tuple[int, Isolation], ...]] = tuple(
    (kind, isolation) for kind in range(len(READERS)) for isolation in _POLLS
)


class TransactionReaders(Restarting):
    """Consumers of both libraries and both isolation levels."""

    def __init__(self, around: Around) -> None:
        super().__init__(around, "committed-reader", len(KINDS), 88, BEGIN_ANEW_S)

    def _live(self, number: int, until: float) -> None:
        around, recorder = self._around, self._around.recorder
        kind, isolation = KINDS[number]
        process, f = around.process(), _POLLS[isolation]
        reader = READERS[kind](around, FIRST + number, _planted(around, isolation))
        try:
            reader.assign(dict.fromkeys(around.plan.transactional_keys, 0))
            while self._goes_on(until):
                invoked = recorder.invoke(process, f)
                found, errors = reader.take()
                around.polled_records += sum(map(len, found.values()))
                ends = {key: rows[-1][0] + 1 for key, rows in found.items()}
                error = "; ".join(sorted(errors))
                recorder.ok(invoked, records=found, offsets=ends, error=error)
        finally:
            reader.close()


def _planted(around: Around, isolation: Isolation) -> Isolation:
    return "read_uncommitted" if around.plan.plant == "reads-uncommitted" else isolation


# ---- last stable offsets ----

AskEnd = Callable[[str], tuple[int, int]]
"""The last stable offset of a partition, and in which leader's epoch that is."""


def ask_own(admin: Admin) -> AskEnd:
    """By our own client."""

    def ask(key: str) -> tuple[int, int]:
        where = TopicPartition(*parts_of(key))
        try:
            told = admin.list_offsets({where: LATEST}, isolation=READ_COMMITTED)[where]
        except ClientError as error:
            raise UnansweredError(str(error)) from error
        return told.offset, told.leader_epoch

    return ask


def ask_theirs(bootstrap: str) -> AskEnd:
    """By confluent-kafka."""
    admin = AdminClient({**FAST_RETRIES, "bootstrap.servers": bootstrap})

    def ask(key: str) -> tuple[int, int]:
        where = confluent_kafka.TopicPartition(*parts_of(key))
        futures = admin.list_offsets(
            {where: OffsetSpec.latest()},  # type: ignore[no-untyped-call]
            isolation_level=IsolationLevel.READ_COMMITTED,
            request_timeout=ANSWER_S,
        )
        try:
            told = futures[where].result(2 * ANSWER_S)
        except (confluent_kafka.KafkaException, TimeoutError) as error:
            raise UnansweredError(str(error)) from error
        if told.offset < 0:
            raise UnansweredError("no offset")  # it tells of a partition's error like that
        return told.offset, -1 if told.leader_epoch is None else told.leader_epoch

    return ask


class Askers(Crowd):
    """Two that ask for last stable offsets, and two for the offsets of groups; one of each is of
    our own client library."""

    def __init__(self, around: Around, groups: Mapping[str, str]) -> None:
        """`groups`: by transactional id."""
        super().__init__(around, "asker", 4)
        self._groups = groups

    def _run(self, number: int) -> None:
        around = self._around
        rng = random.Random(around.plan.seed * 66 + number)
        if number >= 2:
            self._ask_groups(number, rng)
        elif number == 1:
            with Admin(around.plan.bootstrap, timeout_ms=ANSWER_S * 1e3) as admin:
                self._ask_ends(rng, ask_own(admin))
        else:
            self._ask_ends(rng, ask_theirs(around.plan.bootstrap))

    def _ask_ends(self, rng: random.Random, ask: AskEnd) -> None:
        around, recorder = self._around, self._around.recorder
        process = around.process()
        while not around.stop.wait(rng.uniform(*ASK_S)):
            key = rng.choice(around.plan.transactional_keys)
            invoked = recorder.invoke(process, "stable_end", partitions=[key])
            try:
                offset, epoch = ask(key)
            except UnansweredError as error:
                recorder.fail(invoked, error=str(error))
            else:
                recorder.ok(invoked, offsets={key: offset}, leader_epoch=epoch)

    def _ask_groups(self, number: int, rng: random.Random) -> None:
        around = self._around
        process = around.process()
        consumers = stable_consumers(around, self._groups, is_own=number == 3)
        try:
            while not around.stop.wait(rng.uniform(*ASK_S)):
                ask_offset(around, process, rng.choice(list(self._groups)), consumers)
        finally:
            for consumer in consumers.values():
                consumer.close()


def stable_consumers(
    around: Around, groups: Mapping[str, str], *, is_own: bool
) -> dict[str, GroupConsumer]:
    """By transactional id, one that asks its group for offsets that no transaction may change."""
    return {
        name: OwnClient(around, group, f"asks-{group}")
        if is_own
        # It asks for stable offsets because it reads committed records, as it does unless told so.
        else Librdkafka(around, group, f"asks-{group}")
        for name, group in groups.items()
    }


def ask_offset(
    around: Around, process: int, name: str, consumers: Mapping[str, GroupConsumer]
) -> bool:
    """Ask what the group of a transactional id has committed; False when there is no answer."""
    recorder, key = around.recorder, around.plan.transactional_keys[0]
    invoked = recorder.invoke(process, "stable_offset", transactional_id=name, partitions=[key])
    try:
        offsets = consumers[name].committed([key])
    except UnansweredError as error:
        recorder.fail(invoked, error=str(error))
        return False
    recorder.ok(invoked, offsets=offsets)
    return True


# ---- the last word ----


def look_back(around: Around, groups: Mapping[str, str], timeout_s: float) -> bool:
    """See that everything has ended, and read it; False when something was not answered."""
    has_settled = _settle(around)
    process = around.process()
    consumers = stable_consumers(around, groups, is_own=True)
    deadline = time.monotonic() + ANSWER_S * 2
    has_asked = True
    for name in groups:
        while not (is_told := ask_offset(around, process, name, consumers)):
            if time.monotonic() > deadline:
                break
        has_asked &= is_told
    for consumer in consumers.values():
        consumer.close()
    has_read = [_read_to_end(around, isolation, timeout_s / len(_POLLS)) for isolation in _POLLS]
    return has_settled and has_asked and all(has_read)


def _settle(around: Around) -> bool:
    """Wait until nothing is open any more; what is then has to be told."""
    recorder, keys = around.recorder, around.plan.transactional_keys
    invoked = recorder.invoke(around.process(), "settle", partitions=keys)
    deadline = time.monotonic() + SETTLE_S
    pause = threading.Event()
    told: tuple[dict[str, int], list[str]] | None = None
    with Admin(around.plan.bootstrap, timeout_ms=ANSWER_S * 1e3) as admin:
        while time.monotonic() < deadline:
            try:
                told = _what_is_open(admin, keys)
            except ClientError:
                pause.wait(0.2)
                continue
            if told == ({}, []):
                break
            pause.wait(0.5)
    if told is None:
        recorder.info(invoked, error="nobody answered")
        return False
    behind, listed = told
    recorder.ok(invoked, partitions=sorted(behind), offsets=behind, error="; ".join(listed))
    return True


def _what_is_open(admin: Admin, keys: list[str]) -> tuple[dict[str, int], list[str]]:
    """Last stable offsets below their high watermark, and transactions that have not ended."""
    wanted = {TopicPartition(*parts_of(key)): LATEST for key in keys}
    stable = admin.list_offsets(wanted, isolation=READ_COMMITTED)
    ends = admin.list_offsets(wanted, isolation=READ_UNCOMMITTED)
    behind = {
        f"{where.topic}-{where.partition}": stable[where].offset
        for where in wanted
        if stable[where].offset < ends[where].offset
    }
    listed = [
        f"{one.transactional_id} {one.state}" for one in admin.list_transactions() if one.is_open
    ]
    return behind, listed


def _read_to_end(around: Around, isolation: Isolation, timeout_s: float) -> bool:
    """Read every partition from its start to its end; False when it took too long."""
    process, f = around.process(), _POLLS[isolation]
    consumer = new_consumer(
        around.plan.bootstrap,
        "final",
        **{
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
            "isolation.level": _planted(around, isolation),
        },
    )
    deadline = time.monotonic() + timeout_s
    missing = set(around.plan.transactional_keys)
    try:
        assign(consumer, dict.fromkeys(missing, 0))
        while missing and time.monotonic() < deadline:
            invoked = around.recorder.invoke(process, f)
            messages = consumer.consume(POLL_RECORDS_MAX, POLL_S)
            found, errors = records_of(messages)
            ends = {key: rows[-1][0] + 1 for key, rows in found.items()}
            reached = ends_in(messages)
            ends |= {key: end for key, end in reached.items() if key in missing}
            around.recorder.ok(
                invoked, records=found, offsets=ends, error="; ".join(sorted(errors))
            )
            missing -= set(reached)
        return not missing
    finally:
        consumer.close()
