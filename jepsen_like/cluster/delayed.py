"""Delayed records: producers that ask for a time, cancel and replace, and a reader that judges.

    NeverEarly               a record is in the target no sooner than it was to be
    DeliveredOnce            no record is there twice, however often leaders change
                             nor one of a transaction that was aborted
    NothingPendingIsDropped  what was acknowledged, and nobody wanted to cancel, is there in the end
    CancelledStaysAway       what was cancelled, and acknowledged to be, before it was due is not
    AttemptsAreCounted       what comes to be tried again says which attempt that is, and what was
                             tried often enough comes to the dead topic, as does what is given up
                             where that is drawn, nothing else does
    GivesUpInTime            no record is given up before it is late by as much as the topic says

The delay topic is a retry topic, with waits so short that they hardly show.
A batch is sent once, and without a producer id, so nobody but the brokers makes second copies. Each
record has a key of its own, by which later ones cancel or replace it. Times are the world's own,
which all nodes' clocks but the first one's tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Final

from attrs import define, field

from jepsen_like.cluster.admins import create_in_turn, topic_row
from jepsen_like.cluster.fetch_session import FETCH_BYTES, WAIT_MS
from jepsen_like.cluster.kafka import VERSIONS, Kafka, Lost
from jepsen_like.cluster.tasks import until
from jepsen_like.invariants import InvariantViolation
from jepsen_like.virtual_time import EPOCH_MS
from raftmq.delays.headers import GIVEN_UP
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.protocol.fetch import (
    FetchPartition,
    FetchRequest,
    FetchTopic,
    decode_fetch_response,
    encode_fetch_request,
)
from raftmq.protocol.produce import (
    ProducePartition,
    ProduceRequest,
    ProduceTopic,
    decode_produce_response,
    encode_produce_request,
)
from raftmq.records import NewRecord, Record, build_batch, read_records, split_batches

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld

TARGET: Final = "due"
LATER: Final = "later"
DEAD: Final = "dead"
ATTEMPTS: Final = 3
CONFIGS: Final = {
    "raftmq.delivers.to": TARGET,
    "raftmq.dead.to": DEAD,
    "raftmq.retry.attempts": str(ATTEMPTS),
    "raftmq.retry.min.ms": "1",
    "raftmq.retry.max.ms": "100",
}
GIVE_UP_MS: Final = 100
KEPT: Final = {"retention.bytes": "-1", "retention.ms": "-1"}
PARTITIONS: Final = 2
DELAY_MS: Final = (0, 2_500)


@define(eq=False)
class Delayed:
    """One record, and what became of it."""

    value: int
    partition: int
    due_ms: float
    is_acked: bool = False
    is_called_back: bool = False
    """Somebody asked to cancel or replace it."""
    away_ms: float = -1.0
    """When that was acknowledged, having been asked after it was acknowledged itself."""
    offset: int = -1
    """Where it was found."""
    attempt: int = 1
    """How often it was tried, as it was sent."""
    is_aborted: bool = False
    """Its transaction was, or nothing of it was sent."""

    @property
    def is_dead(self) -> bool:
        """True for what comes to the dead topic."""
        return self.attempt >= ATTEMPTS


@define(eq=False)
class Ledger:
    """All delayed records of a run, by value; in a retry topic some are sent with an attempt."""

    counts_attempts: bool = True
    rows: dict[int, Delayed] = field(factory=dict)

    def why_incomplete(self) -> str:
        """What should have come and has not; "" when all has."""
        missing = [
            row.value
            for row in self.rows.values()
            if row.is_acked and not row.is_called_back and row.offset < 0
        ]
        return f"{len(missing)} delayed records have not come: {missing[:5]}" if missing else ""


def timed(
    world: ClusterWorld,
    random: Random,
    partition: int,
    key: bytes = b"",
    headers: Sequence[tuple[str, bytes]] = (),
    value: int | None = None,
    counts_attempts: bool = True,
) -> tuple[Delayed, NewRecord]:
    """A record for later, tried some times before where that counts; under a key of its own, unless
    one is named."""
    value = world.next_value() if value is None else value
    delay_ms = random.randint(*DELAY_MS)
    row = Delayed(value, partition, world.now_ms + delay_ms)
    if random.random() < 0.5:
        at_ms = EPOCH_MS + int(world.now_ms) + delay_ms
        row.due_ms = at_ms - EPOCH_MS
        header = ("deliver-at", b"%d" % at_ms)
    else:
        header = ("deliver-after", b"%d" % delay_ms)
    headers = [header, *headers]
    if counts_attempts and random.random() < 0.5:
        row.attempt = random.randint(1, ATTEMPTS)
        headers.append(("raftmq-attempt", b"%d" % row.attempt))
        if row.is_dead:  # it is due at once
            row.due_ms = world.now_ms
    text = b"%d." % value + b"." * random.randrange(0, world.options.value_bytes_max)
    return row, NewRecord(key or b"%d" % value, text, None, headers)


async def create_delay_topics(world: ClusterWorld, process: int) -> None:
    """Create the targets, and then the topic that delivers to them."""
    configs = CONFIGS
    if world.options.gives_up:
        configs = {**CONFIGS, "raftmq.delivery.giveup.ms": str(GIVE_UP_MS)}
    wanted = ((TARGET, KEPT), (DEAD, KEPT), (LATER, configs))
    rows = [topic_row(name, PARTITIONS, configs.items()) for name, configs in wanted]
    await create_in_turn(world, process, rows)


class DelayedProducer:
    """One process that sends delayed records to one partition."""

    def __init__(
        self,
        world: ClusterWorld,
        process: int,
        partition: int,
        ledger: Ledger,
        topic: str = LATER,
    ) -> None:
        self._world = world
        self._kafka = Kafka(world, process)
        self._topic = topic
        self._partition = partition
        self._ledger = ledger
        self._mine: list[Delayed] = []

    async def run(self) -> None:
        """Go on until the world is quiet."""
        world, kafka = self._world, self._kafka
        while not world.is_quiet:
            records, made, called_back = self._make()
            code = await self._send(records)
            if code == ErrorCode.NONE:
                world.counts.acked += 1
                for row in made:
                    row.is_acked = True
                for row in called_back:
                    row.away_ms = world.now_ms if row.away_ms < 0 else row.away_ms
            elif code == ErrorCode.INVALID_RECORD:
                raise InvariantViolation("DelaysAreTaken", f"partition {self._partition}")
            await kafka.think(*world.options.think_ms)
        kafka.hang_up()

    def _make(self) -> tuple[list[NewRecord], list[Delayed], list[Delayed]]:
        """A batch: its records, those among them that are to come, and those called back."""
        random, world = self._kafka.random, self._world
        records: list[NewRecord] = []
        made: list[Delayed] = []
        called_back: list[Delayed] = []
        for _ in range(random.randint(1, world.options.records_max)):
            known = random.choice(self._mine[-12:]) if self._mine else None
            draw = random.random()
            if known is not None and draw < 0.25:
                known.is_called_back = True
                if known.is_acked:
                    called_back.append(known)
                key = b"%d" % known.value
                if draw < 0.15:
                    records.append(NewRecord(key, b"", None, [("deliver-at", b"never")]))
                    continue
                replaced = [("deliver-mode", b"replace")]
            else:
                key, replaced = b"", []
            row, record = timed(
                world,
                random,
                self._partition,
                key,
                replaced,
                counts_attempts=self._ledger.counts_attempts,
            )
            if replaced:
                row.is_called_back = True  # by what its key may yet be called back for
            records.append(record)
            made.append(row)
            self._ledger.rows[row.value] = row
        self._mine += [row for row in made if not row.is_called_back]
        return records, made, called_back

    async def _send(self, records: list[NewRecord]) -> int:
        kafka = self._kafka
        timestamp = EPOCH_MS + int(self._world.now_ms)
        data = build_batch(records, timestamp=timestamp)
        part = ProducePartition(self._partition, memoryview(data))
        request = ProduceRequest(None, -1, 1_000, [ProduceTopic(self._topic, None, [part])])
        version = VERSIONS[ApiKey.PRODUCE]
        body = b"".join(map(bytes, encode_produce_request(version, request)))
        try:
            leader = await kafka.leader(self._topic, self._partition)
            answer = await until(kafka.request(leader, ApiKey.PRODUCE, body))
        except Lost:
            kafka.leaders.pop((self._topic, self._partition), None)
            await kafka.pause()
            return ErrorCode.NETWORK_EXCEPTION
        response = decode_produce_response(version, answer)
        code = int(response.topics[0].partitions[0].error_code)
        if code:
            kafka.leaders.pop((self._topic, self._partition), None)
            await kafka.pause()
        return code


class DelayedReader:
    """One process that reads what is delivered in one partition of a topic, and judges it."""

    def __init__(
        self, world: ClusterWorld, process: int, topic: str, partition: int, ledger: Ledger
    ) -> None:
        self._world = world
        self._kafka = Kafka(world, process)
        self._topic = topic
        self._partition = partition
        self._ledger = ledger
        self._position = 0

    async def run(self) -> None:
        """Read until everything has come."""
        world, kafka = self._world, self._kafka
        while not (world.is_written and not self._ledger.why_incomplete()):
            if not await self._read():
                kafka.leaders.pop((self._topic, self._partition), None)
                await kafka.pause()
            await kafka.sleep(kafka.random.uniform(5.0, 30.0))
        kafka.hang_up()

    async def _read(self) -> bool:
        kafka, version = self._kafka, VERSIONS[ApiKey.FETCH]
        wanted = FetchPartition(
            self._partition, fetch_offset=self._position, partition_max_bytes=FETCH_BYTES
        )
        request = FetchRequest(
            max_wait_ms=WAIT_MS, topics=[FetchTopic(self._topic, None, [wanted])]
        )
        try:
            leader = await kafka.leader(self._topic, self._partition)
            body = encode_fetch_request(version, request)
            answer = await until(kafka.request(leader, ApiKey.FETCH, body))
        except Lost:
            return False
        part = decode_fetch_response(version, answer).topics[0].partitions[0]
        if part.error_code:
            return False
        for _, batch in split_batches(b"".join(map(bytes, part.records or ()))):
            for record in read_records(batch):
                if record.offset >= self._position:
                    self._judge(record)
                    self._position = record.offset + 1
        return True

    def _find(self, record: Record) -> tuple[int, Delayed]:
        """Whose record it is; it is the first of that value, and of nothing that was aborted."""
        assert record.value is not None, "nobody delays a tombstone here"
        value = int(record.value.partition(b".")[0])
        row = self._ledger.rows[value]
        told = f"{self._topic}-{self._partition}: {value} at {record.offset}"
        if row.offset >= 0:
            raise InvariantViolation("DeliveredOnce", f"{told} and {row.offset}")
        row.offset = record.offset
        if row.is_aborted:
            raise InvariantViolation("DeliveredOnce", f"{told}, which was aborted")
        if row.partition != self._partition:
            raise InvariantViolation("DeliveredOnce", f"{told}, not in {row.partition}")
        return value, row

    def _judge(self, record: Record) -> None:
        value, row = self._find(record)
        told = f"{self._topic}-{self._partition}: {value} at {record.offset}"
        attempt = int(dict(record.headers)["raftmq-attempt"] or b"")
        is_dead = self._topic == DEAD
        if is_dead and GIVEN_UP in dict(record.headers):
            self._judge_given_up(row, attempt, told)
        elif (is_dead, attempt) != (row.is_dead, row.attempt + (not is_dead)):
            raise InvariantViolation("AttemptsAreCounted", f"{told}: {row.attempt}, {attempt}")
        self._judge_times(row, record, told)
        self._world.had_effect("a dead record came" if is_dead else "a delayed record came")

    def _judge_given_up(
        self, row: Delayed, attempt: int, told: str, limit_ms: float = GIVE_UP_MS
    ) -> None:
        """It was late enough to be dead, and was not so by itself."""
        if row.is_dead or attempt != row.attempt:
            raise InvariantViolation("AttemptsAreCounted", f"{told}: {row.attempt} of {ATTEMPTS}")
        now_ms = self._world.now_ms
        if now_ms + 1 < row.due_ms + limit_ms:
            raise InvariantViolation("GivesUpInTime", f"{told}: due {row.due_ms}, it is {now_ms}")
        self._world.had_effect("a delayed record was given up")

    def _judge_times(self, row: Delayed, record: Record, told: str) -> None:
        """It came no sooner than it was due, and was not cancelled before."""
        now_ms = self._world.now_ms
        if row.due_ms > now_ms + 1:
            raise InvariantViolation("NeverEarly", f"{told}: due {row.due_ms}, it is {now_ms}")
        if record.timestamp < EPOCH_MS + int(row.due_ms):
            raise InvariantViolation("NeverEarly", f"{told}: stamped {record.timestamp}")
        if 0 <= row.away_ms < row.due_ms - 1:
            raise InvariantViolation(
                "CancelledStaysAway", f"{told}: cancelled {row.away_ms}, due {row.due_ms}"
            )
