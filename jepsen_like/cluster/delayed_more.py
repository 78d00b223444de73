"""More of delayed records: in transactions, and those whose target is gone.

A producer of a transactional id writes to the delay topic that `delayed.py` is about: what it
committed has to come, what it aborted never may (DeliveredOnce). Of these transactions histories
are told without their records, for which nobody looks in the delay topic itself.

Another retry topic, or a delay topic that retries nothing, has a target of its own, which somebody
deletes. What is due behind that is given up after a while, and comes to the dead topic:

    GivesUpInTime            no record is given up before it is late by as much as the topic says
    DeliveredOnce, CancelledStaysAway, NothingPendingIsDropped
                             as for all delayed records. What was due about when the target went may
                             have been delivered there; who sent it does not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import define

from jepsen_like.cluster.admins import ADMIN_TIMEOUT_MS, create_in_turn, topic_row
from jepsen_like.cluster.delayed import (
    ATTEMPTS,
    CONFIGS,
    KEPT,
    LATER,
    PARTITIONS,
    Delayed,
    DelayedReader,
    Ledger,
    timed,
)
from jepsen_like.cluster.kafka import Kafka, Lost
from jepsen_like.cluster.transactional import Records, Running, TransactionalProducer
from jepsen_like.invariants import InvariantViolation
from raftmq.delays.headers import GIVEN_UP
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.records import NewRecord, Record

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld

ID: Final = "delayer"
GONE: Final = "gone"
GONE_LATER: Final = "gone.later"
GONE_DEAD: Final = "gone.dead"
GIVE_UP_MS: Final = 400
GONE_CONFIGS: Final = {
    **CONFIGS,
    "raftmq.delivers.to": GONE,
    "raftmq.dead.to": GONE_DEAD,
    "raftmq.delivery.giveup.ms": str(GIVE_UP_MS),
}
GONE_PLAIN_CONFIGS: Final = {
    "raftmq.delivers.to": GONE,
    "raftmq.dead.to": GONE_DEAD,
    "raftmq.retry.attempts": "0",
    "raftmq.delivery.giveup.ms": str(GIVE_UP_MS),
}
GOES_MS: Final = (200.0, 2_000.0)
HEARD_MS: Final = 3_000.0
"""By then whoever could take deliveries to the target knows that it is gone."""


class DelayedTransactor(TransactionalProducer):
    """Delayed records in transactions, by protocol 2: what is late reaches no other one."""

    def __init__(self, world: ClusterWorld, process: int, ledger: Ledger) -> None:
        super().__init__(world, process, ID, 2, LATER)
        self._ledger = ledger
        self._records: dict[int, NewRecord] = {}
        """Of the transaction under way, by value."""

    def _choose_partition(self) -> int:
        return self._kafka.random.randrange(PARTITIONS)

    def _record(self, partition: int, value: int) -> NewRecord:
        if value not in self._records:
            random = self._kafka.random
            row, record = timed(self._world, random, partition, value=value)
            self._ledger.rows[value], self._records[value] = row, record
        return self._records[value]

    def _told_of(self, records: Records) -> Records:
        del records
        return {}

    def _is_over(self, running: Running, how: str) -> None:
        for value in [value for _, values in running.batches for value in values]:
            row = self._ledger.rows.get(value)
            self._records.pop(value, None)
            if row is None:
                continue  # it was not sent
            if how == "ok":
                row.is_acked = True
            row.is_aborted = how == "fail"
            if row.is_aborted and row.offset >= 0:
                told = f"{value} at {row.offset}, which was aborted"
                raise InvariantViolation("DeliveredOnce", told)
        self._world.had_effect(f"delayed records in a transaction: {how}")


@define(eq=False)
class Parting(Ledger):
    """Records whose target goes."""

    gone_ms: float = -1.0
    """When it was asked to, and that was answered."""

    def why_incomplete(self) -> str:
        """What should have come to the dead topic and has not; "" when all has."""
        if not self.rows:
            return ""
        if self.gone_ms < 0:
            return "the target is not gone"
        missing = [row.value for row in self.rows.values() if self._must_come(row)]
        return f"{len(missing)} records were not given up: {missing[:5]}" if missing else ""

    def _must_come(self, row: Delayed) -> bool:
        is_left = row.is_dead or row.due_ms > self.gone_ms + HEARD_MS
        return row.is_acked and not row.is_called_back and row.offset < 0 and is_left


async def create_parting_topics(world: ClusterWorld, process: int) -> None:
    """Create the target that will go, the dead topic, and the delay topic."""
    configs = GONE_PLAIN_CONFIGS if world.options.parting_plain else GONE_CONFIGS
    rows = [
        topic_row(GONE, 1),
        topic_row(GONE_DEAD, 1, KEPT.items()),
        topic_row(GONE_LATER, 1, configs.items()),
    ]
    await create_in_turn(world, process, rows)


async def delete_target(world: ClusterWorld, process: int, ledger: Parting) -> None:
    """Have the target go, some time."""
    kafka = Kafka(world, process)
    await kafka.sleep(kafka.random.uniform(*GOES_MS))
    while True:
        try:
            answer: Any = await kafka.ask(
                kafka.any_node(),
                ApiKey.DELETE_TOPICS,
                topic_names=[GONE],
                timeout=ADMIN_TIMEOUT_MS,
            )
        except Lost:
            await kafka.pause()
            continue
        code = answer.responses[0].error_code
        if code in (ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
            break
        await kafka.pause()
    ledger.gone_ms = world.now_ms
    world.note("gone", GONE)
    kafka.hang_up()


class DeadReader(DelayedReader):
    """Reads what is dead since its target is gone, or since it was tried often enough."""

    def __init__(self, world: ClusterWorld, process: int, ledger: Parting) -> None:
        super().__init__(world, process, GONE_DEAD, 0, ledger)

    def _judge(self, record: Record) -> None:
        value, row = self._find(record)
        told = f"{GONE_DEAD}: {value} at {record.offset}"
        headers = dict(record.headers)
        attempt = int(headers.get("raftmq-attempt") or b"1")
        if GIVEN_UP in headers:
            self._judge_given_up(row, attempt, told, GIVE_UP_MS)
        elif not row.is_dead or attempt != row.attempt:
            raise InvariantViolation("AttemptsAreCounted", f"{told}: {row.attempt} of {ATTEMPTS}")
        self._judge_times(row, record, told)
