"""Transactional producers of both client libraries, as the workload on transactions asks of them.

What a call comes to is one of three: it was done, it was not and never will be (`DoomedError`,
`OverError`), or nobody knows (`UnansweredError`): then the transaction is unknown. librdkafka
speaks protocol 1 (KIP-98), our own client protocol 2 (KIP-890).

By protocol 1 an EndTxn whose answer was lost may end the next transaction (KAFKA-17754). librdkafka
sends it again by itself, so its own log is read for answers that were lost (`lost_ends`); it tells
the producer's id and epoch, too.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import confluent_kafka
from attrs import evolve, frozen

from jepsen_like.history_events import OFFSET_UNKNOWN
from jepsen_like.live.workloads.base import (
    FAST_RETRIES,
    Around,
    ClientLog,
    Headers,
    HungError,
    UnansweredError,
    parts_of,
    unless_hung,
)
from jepsen_like.live.workloads.poll import new_consumer
from jepsen_like.live.workloads.senders import FULL_S, Settled, tells_of
from raftmq.types import TopicPartition
from raftmq_client.blocking import Admin, Producer
from raftmq_client.blocking.producer import Transaction
from raftmq_client.errors import (
    BufferFullError,
    ClientError,
    EndUnknownError,
    MustAbortError,
    Outcome,
    TransactionError,
)

T = TypeVar("T")

CALL_S: Final = 5.0
ANSWER_S: Final = 30.0
"""Longer than any fault lasts; who has no answer by then asks no more."""
RETRY_S: Final = 0.05
"""Between two tries: some refusals come at once, and others need the core."""
BESIDE_S: Final = 60.0
"""How long the cluster may take to answer our own client where one of librdkafka hangs."""
_ACQUIRED: Final = re.compile(r"Acquired PID\{Id:(\d+),Epoch:(\d+)\}")
_BUMPED: Final = re.compile(r"bumped epoch to PID\{Id:(\d+),Epoch:(\d+)\}")
_ENDED: Final = re.compile(r"EndTxn returned (\S+) in state")
_TOLD: Final = frozenset({"NO_ERROR", "CONCURRENT_TRANSACTIONS"})
"""Answers that say of an EndTxn that it is done, or that it was not."""


class DoomedError(Exception):
    """This transaction cannot be committed."""


class OverError(Exception):
    """This producer is over: another one has its transactional id, or it can do no more.

    Attributes:
        is_certain: what it was asked for last was not done, and never will be, unless an answer to
            it was lost (`lost_ends`).
    """

    def __init__(self, why: str, *, is_certain: bool) -> None:
        super().__init__(why)
        self.is_certain = is_certain


class Transactor(Protocol):
    """One producer of a transactional id."""

    protocol: int
    is_hung: bool
    """A call of it never came back: it is asked for nothing more, and left as it is."""

    def begin(self) -> tuple[int, int]:
        """Begin a transaction, as the producer of its id: its producer id and epoch."""

    def send(self, key: str, data: bytes, settled: Settled, headers: Headers = ()) -> None:
        """Write a record."""

    def commit_offset(self, group: str, key: str, offset: int) -> None:
        """Commit an offset of a group within it."""

    def end(self, *, is_commit: bool) -> None:
        """Commit or abort; after `UnansweredError` it may be asked for again."""

    def lost_ends(self) -> int:
        """EndTxns that got no answer since this was asked last."""

    def close(self) -> None:
        """Leave whatever is open as it is, as far as the library can."""


@frozen
class Made:
    """What a producer is made of."""

    around: Around
    transactional_id: str
    timeout_ms: int
    number: int


class Librdkafka:
    """One of confluent-kafka."""

    protocol = 1

    def __init__(self, made: Made) -> None:
        self._made, self._around = made, made.around
        self._name = f"transactor-{made.number}"
        self._identity = (-1, -1)
        self._lost = 0
        self._is_ready = self.is_hung = False
        self._producer = confluent_kafka.Producer(
            {
                **FAST_RETRIES,
                "bootstrap.servers": made.around.plan.bootstrap,
                "client.id": self._name,
                "transactional.id": made.transactional_id,
                "transaction.timeout.ms": made.timeout_ms,
                "request.timeout.ms": 1_000,
                "linger.ms": (0, 2, 20)[made.number % 3],
                "debug": "eos",
                "log_level": 7,
            },
            logger=ClientLog(self._name, self._heard),
        )
        self._group: confluent_kafka.Consumer | None = None

    def begin(self) -> tuple[int, int]:
        """Begin; the first one fences whoever was before."""
        if not self._is_ready:
            self._insist(self._producer.init_transactions)
            self._is_ready = True
        self._insist(lambda _timeout_s: self._producer.begin_transaction())
        self._serve()
        return self._identity

    def send(self, key: str, data: bytes, settled: Settled, headers: Headers = ()) -> None:
        """Write a record."""

        def delivered(
            error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message
        ) -> None:
            offset = message.offset()
            is_told = error is None and offset is not None and offset >= 0
            settled(
                offset if is_told and offset is not None else OFFSET_UNKNOWN,
                "" if error is None else str(error),
            )

        topic, partition = parts_of(key)
        while True:
            try:
                self._producer.produce(
                    topic, data, partition=partition, on_delivery=delivered, headers=list(headers)
                )
            except BufferError:
                self._serve(FULL_S)
            except confluent_kafka.KafkaException as error:
                self._raise(error.args[0])
            else:
                self._serve()
                return

    def commit_offset(self, group: str, key: str, offset: int) -> None:
        """Commit an offset within it, as nobody's member."""
        if self._group is None:
            self._group = new_consumer(self._around.plan.bootstrap, group)
        position = confluent_kafka.TopicPartition(*parts_of(key), offset)
        who = self._group.consumer_group_metadata()
        send = partial(self._producer.send_offsets_to_transaction, [position], who)
        what = f"send_offsets_to_transaction of {self._name}"
        try:
            # It passes over its timeout (librdkafka#5456) where it waits for a coordinator that it
            # has dismissed itself, since metadata left it out (librdkafka#5511).
            unless_hung(self._around, what, ANSWER_S + 2 * CALL_S, partial(self._insist, send))
        except HungError:
            self.is_hung = True
            ask_beside(self._made, group, what)
            raise

    def end(self, *, is_commit: bool) -> None:
        """Commit or abort."""
        producer = self._producer
        try:
            self._insist(producer.commit_transaction if is_commit else producer.abort_transaction)
        finally:
            self._serve()

    def lost_ends(self) -> int:
        """As its log has it."""
        lost, self._lost = self._lost, 0
        return lost

    def close(self) -> None:
        """Nothing is aborted: this is as if its process had died."""
        if self.is_hung:
            return  # so would its end
        if self._group is not None:
            self._group.close()
        self._producer.purge()
        self._serve()
        del self._producer

    def _serve(self, seconds: float = 0.0) -> None:
        """Let it call back. A producer that is over is told of where something is asked of it."""
        with contextlib.suppress(confluent_kafka.KafkaException):
            self._producer.poll(seconds)

    def _heard(self, message: str) -> None:
        if found := _ACQUIRED.search(message) or _BUMPED.search(message):
            self._identity = int(found[1]), int(found[2])
        elif (found := _ENDED.search(message)) and found[1] not in _TOLD:
            self._lost += 1

    def _insist(self, ask: Callable[[float], Any]) -> None:
        """Ask until it is done."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                ask(CALL_S)
            except confluent_kafka.KafkaException as error:
                self._raise(error.args[0], is_last=time.monotonic() > deadline)
            else:
                return
            self._around.is_over.wait(RETRY_S)

    def _raise(self, error: confluent_kafka.KafkaError, *, is_last: bool = True) -> None:
        if error.fatal():
            raise OverError(str(error), is_certain=True)
        if error.txn_requires_abort():
            raise DoomedError(str(error))
        if not error.retriable():
            raise OverError(str(error), is_certain=True)
        if is_last or self._around.is_over.is_set():
            raise UnansweredError(str(error))


class OwnClient:
    """One of `raftmq_client`."""

    protocol = 2
    is_hung = False

    def __init__(self, made: Made) -> None:
        self._around = made.around
        self._producer: Producer[bytes, bytes] = Producer(
            made.around.plan.bootstrap,
            client_id=f"transactor-{made.number}",
            transactional_id=made.transactional_id,
            transaction_timeout_ms=made.timeout_ms,
            linger_ms=2,
            request_timeout_ms=1_000,
            metadata_max_age_ms=5_000,
            max_block_ms=CALL_S * 1_000,
        )
        self._transaction: Transaction[bytes, bytes] | None = None

    def begin(self) -> tuple[int, int]:
        """Begin; the first one fences whoever was before."""
        self._transaction = self._insist(self._producer.begin)
        core = self._producer._transactions
        self.protocol = core.protocol
        return core.producer_id, core.producer_epoch

    def send(self, key: str, data: bytes, settled: Settled, headers: Headers = ()) -> None:
        """Write a record."""
        delivered = tells_of(settled)
        topic, partition = parts_of(key)
        self._insist(
            lambda: self._running.send(
                topic, data, None, headers, partition=partition, on_delivery=delivered
            )
        )

    def commit_offset(self, group: str, key: str, offset: int) -> None:
        """Commit an offset within it, as nobody's member."""
        position = TopicPartition(*parts_of(key))
        self._insist(lambda: self._running.commit_offsets(group, {position: offset}, ANSWER_S))

    def end(self, *, is_commit: bool) -> None:
        """Commit or abort."""
        running = self._running
        self._insist(partial(running.commit if is_commit else running.abort, CALL_S))

    def lost_ends(self) -> int:
        """None that matters: by protocol 2 nothing late reaches another transaction."""
        return 0

    def close(self) -> None:
        """It aborts what is open, if a coordinator answers soon."""
        self._producer.close(flush=False)

    @property
    def _running(self) -> Transaction[bytes, bytes]:
        assert self._transaction is not None
        return self._transaction

    def _insist(self, ask: Callable[[], T]) -> T:
        """Ask until it is done."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                return ask()
            except (EndUnknownError, BufferFullError) as error:
                failure: ClientError = error
            except MustAbortError as error:
                raise DoomedError(str(error)) from error
            except TransactionError as error:
                is_certain = error.outcome is Outcome.FAILED
                raise OverError(str(error), is_certain=is_certain) from error
            except ClientError as error:
                if not error.retriable:
                    raise
                failure = error
            if time.monotonic() > deadline or self._around.is_over.is_set():
                raise UnansweredError(str(failure))
            self._around.is_over.wait(RETRY_S)


# ---- where one hangs ----


def ask_beside(made: Made, group: str, what: str) -> None:
    """Tell whether the cluster answers where one of librdkafka hangs in `what`.

    Our own client asks for the same until that is done, or for so long that the cluster is at
    fault: then it is told of in `unanswered`.
    """
    around = made.around
    began = time.monotonic()
    while True:
        try:
            state = _commit_beside(made, group)
        except (DoomedError, OverError, UnansweredError, ClientError) as error:
            failure = str(error)
        else:
            took_s = time.monotonic() - began
            told = f"our own client was answered after {took_s:.1f} s, its transaction is {state}"
            around.hung.append(f"{what}: {told}")
            return
        if time.monotonic() > began + BESIDE_S or around.is_over.is_set():
            around.unanswered.append(f"{what}: our own client got no answer either: {failure}")
            return
        around.is_over.wait(RETRY_S)


def _commit_beside(made: Made, group: str) -> str:
    """Commit an offset in the same group from a transaction of another id, which is aborted, and
    see that the transaction of this id has ended, as its timeout is over; its state.

    Raises:
        DoomedError, OverError, UnansweredError, ClientError: something of that was not done.
    """
    plan = made.around.plan
    beside = OwnClient(evolve(made, transactional_id=f"beside-{made.transactional_id}"))
    try:
        beside.begin()
        beside.commit_offset(group, plan.transactional_keys[-1], 0)
        beside.end(is_commit=False)
    finally:
        beside.close()
    with Admin(plan.bootstrap, timeout_ms=CALL_S * 1e3) as admin:
        told = admin.describe_transaction(made.transactional_id)
    if told.is_open:
        raise UnansweredError(f"the transaction of {made.transactional_id!r} is {told.state}")
    return told.state


KINDS: Final[tuple[Callable[[Made], Transactor], ...]] = (Librdkafka, OwnClient)
