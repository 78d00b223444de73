"""Sends batches and settles their receipts: sequences, retries without reordering, outcomes.

Idempotent by default (KIP-98): every batch of a partition carries a sequence, so a broker appends
a repeated one once. After any failure a partition first waits until all its batches in flight are
answered, then sends them again in their order. A sequence gap left by a batch that was given up is
closed by a new producer epoch (KIP-360), and only when the broker said that nothing behind the gap
was appended. Never reads a clock or a socket; `calls()` gives the requests that are due.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from raftmq.errors import ErrorCode
from raftmq.protocol.produce import ProducePartitionResponse, ProduceResponse
from raftmq.records import SEQUENCE_MODULUS
from raftmq.types import TopicPartition
from raftmq_client.core.accumulator import (
    RECORD_OVERHEAD,
    Accumulator,
    Batch,
    Fields,
    Listener,
    Receipt,
    record_size,
)
from raftmq_client.core.call import Call
from raftmq_client.core.identity import ProducerIdentity
from raftmq_client.core.metadata import Broker, MetadataCore, check_topic
from raftmq_client.core.outstanding import Listeners, Outstanding
from raftmq_client.core.partitioners import Partitioner, check_partition, choose_partition
from raftmq_client.core.produce_requests import (
    ACKS_ALL,
    CONCURRENT_MS,
    NOT_APPENDED,
    SEQUENCE_CODES,
    STALL_MS,
    Attempt,
    PartitionState,
    ProducerOptions,
    Unrouted,
    answers_of,
    make_request,
    refusal,
)
from raftmq_client.core.transactions import Ending, State, TransactionCore
from raftmq_client.core.untold import Untold
from raftmq_client.errors import (
    BrokerError,
    ClientError,
    CorruptAnswerError,
    Outcome,
    RecordTooLargeError,
    TimedOutError,
    UsageError,
)

LOG: Final = logging.getLogger("raftmq_client.producer")
_EPOCH_MAX: Final = 32767
_STUCK_MS: Final = 3_000.0
"""An election takes less."""


class ProducerCore:
    """One producer's deciding code."""

    def __init__(
        self,
        options: ProducerOptions,
        metadata: MetadataCore,
        partitioner: Partitioner,
        backoff_until: Callable[[int], float],
        transactions: TransactionCore | None = None,
    ) -> None:
        if options.idempotent and options.acks != ACKS_ALL:
            raise UsageError("an idempotent producer needs acks=all")
        if not 1 <= options.in_flight_max <= 5:
            raise UsageError("in_flight_max is 1 to 5: brokers remember five batches (KIP-98)")
        self.options = options
        self.accumulator = Accumulator(
            batch_bytes=min(options.batch_bytes, options.request_bytes_max),
            linger_ms=options.linger_ms,
            delivery_timeout_ms=options.delivery_timeout_ms,
        )
        self.pending = 0
        """Records whose receipts are not settled."""
        self.untold = Untold()
        self.callback_errors = 0
        """How many calls of `on_delivery` raised."""
        self.stuck: set[str] = set()
        """Topics whose records do not get on: unknown, without a leader, or refused for now."""
        self._stuck_since: dict[str, float] = {}
        self._stuck_told: set[str] = set()
        self._stuck_bytes = 0
        self._unrouted_bytes = 0
        self.receipt_class: type[Receipt] = Receipt
        self._open: dict[object, Batch] = {}  # by topic, or topic and partition: `append`'s
        self.listeners = Listeners()
        self._metadata = metadata
        self._partitioner = partitioner
        self._backoff_until = backoff_until
        self._partitions: dict[TopicPartition, PartitionState] = {}
        self._unrouted: dict[str, deque[Unrouted]] = {}
        self.transactions = transactions
        self._identity = ProducerIdentity(options.request_timeout_ms, options.backoff_ms)
        self._requests: dict[int, int] = {}
        self._wake_at = 0.0
        self._now = 0.0

    # What users do.

    def send(
        self,
        topic: str,
        record: Fields,
        partition: int | None,
        waiter: Any,
        now: float,
        on_delivery: Listener | None = None,
    ) -> tuple[Any, bool]:
        """Take a record: its receipt, and whether `calls` should be asked soon.

        Raises:
            RecordTooLargeError: it cannot fit into a request.
            TransactionError: what is wrong with the transaction that it belongs to.
            UsageError: topic or partition are none, or no transaction is open.
        """
        if self.transactions is not None:
            self.transactions.check_open()
        check_topic(topic)
        if partition is not None:
            check_partition(partition)
        if on_delivery is not None and not callable(on_delivery):
            raise UsageError(f"on_delivery is a function of a receipt, not {on_delivery!r}")
        size = record_size(record)
        if size > self.options.request_bytes_max:
            raise RecordTooLargeError(
                f"a record of {size} bytes; request_bytes_max is {self.options.request_bytes_max}"
            )
        stamp = record[2]
        receipt = self.receipt_class(-1 if stamp is None else stamp, waiter)
        if on_delivery is not None:
            receipt.listen(on_delivery)
        self.pending += 1
        count = self._metadata.partition_count(topic)
        is_new = partition is not None and count is not None and partition >= count
        if count is None or is_new or topic in self._unrouted:
            self._metadata.want((topic,))
            self._open.clear()  # what waits must not be overtaken
            waiting = self._unrouted.setdefault(topic, deque())
            deadline = now + self.options.delivery_timeout_ms
            waiting.append(Unrouted(record, receipt, deadline, size, partition))
            waiting[-1].question = self._metadata.next_question
            self.accumulator.size_bytes += size
            self._unrouted_bytes += size
            self._stuck_bytes += size
            self.stuck.add(topic)
            return receipt, True
        return receipt, self._route(topic, record, receipt, partition, count, size, now)

    def append(self, topic: str, record: Fields, partition: int | None, waiter: Any) -> Any | None:
        """Put a record into the last one's batch and give a receipt; None when `send` must look."""
        key, value, stamp, headers = record
        batch = self._open.get(topic if partition is None else (topic, partition))
        if batch is None or batch.is_closed or headers or value is None:
            return None
        size = RECORD_OVERHEAD + len(value)
        if key is not None:
            if partition is None:
                return None
            size += len(key)
        if batch.size_bytes + size >= self.accumulator.batch_bytes:
            return None
        self.accumulator.size_bytes += size  # first, so that an interrupt here leaves no debt
        batch.size_bytes += size
        self.pending += 1
        records = batch.records
        receipt = self.receipt_class(-1 if stamp is None else stamp, waiter, batch, len(records))
        records.append(record)
        return receipt

    def has_room(self, topic: str) -> bool:
        """Whether the buffer takes a record of this topic.

        Topics that are stuck have half of it, all together. What they hold beyond that, from before
        they were, does not keep the records of others out, to which the other half is.
        """
        size, limit = self.accumulator.size_bytes, self.options.buffer_memory
        if topic in self.stuck:
            return size < limit // 2
        return size < limit or size - self._stuck_bytes < limit // 2

    def why_full(self, topic: str) -> str:
        """Why there is no room for a record of this topic, for people."""
        if topic not in self.stuck:
            return ""
        return f"; topic {topic!r} does not get on: {self._reason(topic)}"

    def hurry(self, receipt: Receipt) -> bool:
        """Somebody waits: do not linger. True when that changes anything."""
        batch = receipt.batch
        if batch is None or batch.is_hurried or batch.is_closed:
            return False
        batch.is_hurried = True
        return True

    def outstanding(self) -> Outstanding:
        """What is not settled now; no more is put into its batches, and none of them lingers."""
        batches: list[Batch] = []
        for partition in self._partitions.values():
            batches += [*partition.in_flight, *partition.retries]
        for queue in self.accumulator.queues.values():
            batches += queue
        for batch in batches:
            batch.is_closed = True
        unrouted = [item.receipt for waiting in self._unrouted.values() for item in waiting]
        return Outstanding(batches, unrouted, self.listeners)

    def give_up(self, error: ClientError) -> None:
        """Settle everything that is not settled: the producer is closed."""
        for topic, waiting in self._unrouted.items():
            for item in waiting:
                self._settle_unrouted(topic, item, error)
        self._unrouted.clear()
        for partition in self._partitions.values():
            for batch in partition.in_flight:
                self._settle(batch, TimedOutError(str(error), sent=batch.has_left))
            for batch in partition.retries:
                self._settle(batch, TimedOutError(str(error), sent=batch.may_exist))
        for queue in self.accumulator.queues.values():
            while queue:
                self._settle(queue.popleft(), error)

    # The transaction.

    def end_transaction(self, *, commit: bool) -> Ending:
        """Begin to end the transaction that is open; nothing more is put into its batches.

        Raises:
            MustAbortError: it cannot be committed.
            UsageError: none is open.
        """
        assert self.transactions is not None
        ending = self.transactions.end(commit=commit)
        self._open.clear()
        self.outstanding()
        return ending

    def abort_open(self) -> bool:
        """Abort what is open, since the producer ends; whether an end is to be waited for."""
        transactions = self.transactions
        if transactions is None:
            return False
        if transactions.state is State.OPEN:
            self.end_transaction(commit=False)
        return self.is_ending

    @property
    def is_ending(self) -> bool:
        """True while a transaction is being ended."""
        transactions = self.transactions
        return transactions is not None and transactions.state in (
            State.COMMITTING,
            State.ABORTING,
        )

    def _drop(self, error: ClientError) -> None:
        """Let everything go that is not settled: its transaction will be aborted."""
        is_resolved = True
        for topic, waiting in self._unrouted.items():
            for item in waiting:
                self._settle_unrouted(topic, item, error)
        self._unrouted.clear()
        for partition in self._partitions.values():
            requests = [batch.request for batch in partition.in_flight]
            for batch in (*partition.in_flight, *partition.retries):
                is_resolved = is_resolved and batch.base_sequence < 0
                self._settle(batch, error)
            partition.in_flight.clear()
            partition.retries.clear()
            partition.is_recovering, partition.failures, partition.not_before = False, 0, 0.0
            for request in requests:
                if request is not None:
                    request.drop(self._now)
        for queue in self.accumulator.queues.values():
            while queue:
                self._settle(queue.popleft(), error)
        self._open.clear()
        assert self.transactions is not None
        self.transactions.dropped(is_resolved=is_resolved)

    # What drivers ask.

    def calls(self, now: float) -> list[Call]:
        """The requests that are due."""
        self._wake_at = float("inf")
        self._now = now
        self._route_waiting(now)
        self._expire(now)
        if self.transactions is not None and self.transactions.drop is not None:
            self._drop(self.transactions.drop)
        ready_by_node = self._ready(now)
        calls = self._identity_calls(now)
        self._weigh_stuck()
        if self.stuck or self._stuck_since:
            self._tell_stuck(now)
        for node, ready in ready_by_node.items():
            while ready and self._requests.get(node, 0) < self.options.in_flight_max:
                calls.append(self._request(node, ready, now))
        return calls

    def deadline(self) -> float:
        """When `calls` should next be asked."""
        if self.transactions is not None:
            return min(self._wake_at, self.transactions.deadline())
        return self._wake_at

    def _identity_calls(self, now: float) -> list[Call]:
        """What makes batches fit to be sent: an id, and what a transaction needs."""
        transactions = self.transactions
        if transactions is None:
            needs_identity = self.options.is_idempotent and self.pending > 0
            return self._identity.calls(now) if needs_identity else []
        return transactions.calls(now, is_drained=self.pending == 0)

    # From record to batch.

    def _route(
        self,
        topic: str,
        record: Fields,
        receipt: Receipt,
        wanted: int | None,
        count: int,
        size: int,
        now: float,
    ) -> bool:
        try:
            partition = choose_partition(self._partitioner, topic, record[0], wanted, count)
        except UsageError as error:
            self._refuse(topic, receipt, error)
            return receipt.listeners is not None  # the next turn tells them
        key = TopicPartition(topic, partition)
        queue = self.accumulator.queues.get(key)
        was_empty = not queue
        closed = self.accumulator.add(key, record, receipt, size, now)
        if closed:
            self._partitioner.batch_closed(topic, partition)
        if wanted is not None:
            self._open[topic, partition] = self.accumulator.queues[key][-1]
        elif record[0] is None and self._partitioner.is_sticky:
            self._open[topic] = self.accumulator.queues[key][-1]
        return closed or was_empty

    def _route_waiting(self, now: float) -> None:
        for topic in [*self._unrouted]:
            self._metadata.used(topic, now)
            count = self._metadata.partition_count(topic)
            waiting = self._unrouted[topic]
            refusal = self._refusal_of(topic)
            while waiting and (refusal is not None or waiting[0].deadline <= now):
                reason = self._metadata.why_not(topic)
                message = f"topic {topic!r} could not be found in time: {reason}"
                error = refusal or TimedOutError(message, sent=False)
                self._settle_unrouted(topic, waiting.popleft(), error)
            if refusal is not None:
                self._metadata.forget(topic)  # who sends to it again, asks again
            if count is not None and not self._asks_for_more(waiting, count):
                for item in waiting:
                    self.accumulator.size_bytes -= item.size
                    self._unrouted_bytes -= item.size
                    wanted = item.partition
                    self._route(topic, item.record, item.receipt, wanted, count, item.size, now)
                    self.hurry(item.receipt)  # it waited long enough, and somebody may wait for it
                waiting.clear()
            if not waiting:
                del self._unrouted[topic]
            else:
                self._wake(waiting[0].deadline)

    def _refusal_of(self, topic: str) -> ClientError | None:
        """Why waiting for this topic is of no use."""
        return self._metadata.final_refusal((topic,)) or self._metadata.refusal

    def _asks_for_more(self, waiting: Iterable[Unrouted], count: int) -> bool:
        """Whether a partition is wanted that may be newer than what is known of its topic."""
        return any(
            item.partition is not None
            and item.partition >= count
            and not self._metadata.has_answered(item.question)
            for item in waiting
        )

    def _settle_unrouted(self, topic: str, item: Unrouted, error: ClientError) -> None:
        self.accumulator.size_bytes -= item.size
        self._unrouted_bytes -= item.size
        self._refuse(topic, item.receipt, error)

    def _refuse(self, topic: str, receipt: Receipt, error: ClientError) -> None:
        self.pending -= 1
        receipt.fail(error, topic)
        if self.transactions is not None:
            self.transactions.record_failed(error, is_resolved=True)
        if receipt.listeners is not None:
            self.listeners.add([receipt])
        elif receipt.batch is not None and self.transactions is None:
            receipt.batch.loss = self.untold.add(receipt.batch.key, error, 1)

    # From batch to request.

    def _ready(self, now: float) -> dict[int, list[PartitionState]]:
        """Partitions with something to send, by leader; notes which topics are stuck."""
        ready: dict[int, list[PartitionState]] = {}
        self.stuck = set(self._unrouted)
        for key, queue in self.accumulator.queues.items():
            partition = self._partitions.get(key)
            if partition is None:
                if not queue:
                    continue
                partition = self._partitions[key] = PartitionState(key)
            if not queue and not partition.retries and not partition.in_flight:
                continue
            self._metadata.used(key.topic, now)
            leader = self._metadata.leader(*key)
            if leader is None or partition.failures:
                self.stuck.add(key.topic)
            if partition.in_flight:
                self._watch_in_flight(partition, leader, now)
            if not self._may_send(partition, now):
                continue
            if leader is None:
                self._metadata.invalidate()
                continue
            until = self._backoff_until(leader[0])
            if until > now:
                self._wake(until)
            elif self._has_identity(now) and self._may_write(key):
                ready.setdefault(leader[0], []).append(partition)
        return ready

    def _weigh_stuck(self) -> None:
        """How many bytes of the buffer belong to topics that are stuck."""
        self._stuck_bytes = self._unrouted_bytes
        if not self.stuck:
            return
        for key, queue in self.accumulator.queues.items():
            if key.topic in self.stuck:
                partition = self._partitions.get(key)
                sent = (*partition.in_flight, *partition.retries) if partition is not None else ()
                self._stuck_bytes += sum(
                    batch.size_bytes for batch in (*queue, *sent) if not batch.is_done
                )

    def _tell_stuck(self, now: float) -> None:
        """Log which topics do not get on for seconds, once, and when they do."""
        for topic in [topic for topic in self._stuck_since if topic not in self.stuck]:
            del self._stuck_since[topic]
            if topic in self._stuck_told:
                self._stuck_told.discard(topic)
                LOG.info("topic %s gets on again", topic)
        for topic in self.stuck:
            since = self._stuck_since.setdefault(topic, now)
            if topic in self._stuck_told:
                continue
            if now - since < _STUCK_MS:
                self._wake(since + _STUCK_MS)
                continue
            self._stuck_told.add(topic)
            LOG.warning("topic %s does not get on: %s", topic, ascii(self._reason(topic)))

    def _reason(self, topic: str) -> str:
        """What is known of a topic that does not get on, for people."""
        if topic in self._unrouted:
            return self._metadata.why_not(topic)
        for key, partition in self._partitions.items():
            if key.topic == topic and partition.retries and partition.retries[0].last_error:
                return str(partition.retries[0].last_error)
        return str(self._metadata.last_error or "no leader was reached")

    def _may_send(self, partition: PartitionState, now: float) -> bool:
        if partition.is_recovering and partition.in_flight:
            return False
        partition.is_recovering = False
        limit = partition.in_flight_limit(self.options)
        if len(partition.in_flight) >= limit:
            return False
        if partition.not_before > now:
            self._wake(partition.not_before)
            return False
        if partition.retries:
            head = partition.retries[0]
            return head.slot < 0 or partition.may_number(head.slot, limit)
        if self.options.is_idempotent and not partition.may_number(partition.next_slot, limit):
            return False
        queue = self.accumulator.queues[partition.key]
        if not queue:
            return False
        if not self.accumulator.is_ready(queue[0], now):
            self._wake(self.accumulator.ready_at(queue[0]))
            return False
        return True

    def _watch_in_flight(
        self, partition: PartitionState, leader: tuple[int, int] | None, now: float
    ) -> None:
        """A frozen leader never answers; go on with its successor as soon as there is one.

        Only with sequences: without them a batch sent twice would be appended twice.
        """
        if not self.options.is_idempotent:
            return
        if leader is not None and leader[0] != partition.node:
            for batch in [*partition.in_flight]:
                request, batch.may_exist = batch.request, batch.has_left
                self._retry(partition, batch, None, now)
                if request is not None:
                    request.drop(now)
            partition.not_before = 0.0
        elif now - partition.sent_at >= STALL_MS:
            partition.sent_at = now
            self._metadata.invalidate()
        if partition.in_flight:
            self._wake(partition.sent_at + STALL_MS)

    def _may_write(self, key: TopicPartition) -> bool:
        """Whether a partition is part of the transaction, if there is one."""
        return self.transactions is None or self.transactions.may_send(key)

    def _has_identity(self, now: float) -> bool:
        if self.transactions is not None:
            return self.transactions.is_known
        if not self.options.is_idempotent or self._identity.is_known:
            return True
        at = self._identity.ask_at(now)
        if at is not None:
            self._wake(at)
        return False

    def _request(self, node: int, ready: list[PartitionState], now: float) -> Call:
        """Take one batch of each ready partition, up to the request's size."""
        attempts: list[Attempt] = []
        size = 0
        remaining: list[PartitionState] = []
        for partition in ready:
            head = self._peek(partition)
            if attempts and size + head.size_bytes > self.options.request_bytes_max:
                remaining.append(partition)
                continue
            size += head.size_bytes
            attempts.append(self._take(partition, node, now))
            if self._may_send(partition, now):
                remaining.append(partition)
        ready[:] = remaining
        self._requests[node] = self._requests.get(node, 0) + 1
        return self._make_call(node, attempts)

    def _peek(self, partition: PartitionState) -> Batch:
        return (partition.retries or self.accumulator.queues[partition.key])[0]

    def _take(self, partition: PartitionState, node: int, now: float) -> Attempt:
        if partition.retries:
            batch = partition.retries.popleft()
        else:
            batch = self.accumulator.take(partition.key)
            self._partitioner.batch_closed(*partition.key)
        if self.options.is_idempotent and batch.base_sequence < 0:
            self._number(partition, batch)
        if self.options.is_idempotent and batch.slot < 0:
            batch.slot = partition.next_slot
            partition.next_slot += 1
        batch.sent_as_head = not partition.in_flight
        batch.attempts += 1
        partition.in_flight.append(batch)
        partition.node = node
        partition.sent_at = now
        if self.options.is_idempotent:
            self._wake(now + STALL_MS)  # whatever else happens: see _watch_in_flight
        return Attempt.of(partition, batch)

    def _number(self, partition: PartitionState, batch: Batch) -> None:
        identity = self.transactions or self._identity
        now_is = (identity.producer_id, identity.producer_epoch)
        is_new = (partition.producer_id, partition.producer_epoch) != now_is
        if partition.producer_id < 0 or (self.transactions is not None and is_new):
            partition.is_known = partition.is_known and self.transactions is None
            partition.producer_id, partition.producer_epoch = now_is
            partition.next_sequence = 0
        batch.base_sequence = partition.next_sequence
        batch.producer_epoch = partition.producer_epoch
        partition.next_sequence = (partition.next_sequence + len(batch.records)) % SEQUENCE_MODULUS

    def _make_call(self, node: int, attempts: Sequence[Attempt]) -> Call:
        def finish(response: Any, error: ClientError | None, now: float) -> None:
            self._requests[node] -= 1
            self._wake(now)  # an acks=0 request is finished while it is sent
            self._finished(attempts, response, error, now)

        transactions = self.transactions
        if transactions is None:
            return make_request(self.options, node, attempts, finish)
        name, versions = transactions.transactional_id, transactions.produce_versions
        return make_request(self.options, node, attempts, finish, name, versions)

    # From answer to receipt.

    def _finished(
        self,
        attempts: Sequence[Attempt],
        response: ProduceResponse | None,
        error: ClientError | None,
        now: float,
    ) -> None:
        answers, nodes = answers_of(response)
        for attempt in attempts:
            partition, batch = attempt.partition, attempt.batch
            if attempt.is_stale:
                continue  # it was sent again meanwhile, to another leader
            answer = answers.get(partition.key)
            if error is not None:
                self._failed(partition, batch, error, now)
            elif answer is not None:
                self._answered(partition, batch, answer, nodes, now)
            elif self.options.acks == 0:
                self._acknowledge(partition, batch, -1, -1)
            else:
                self._failed(
                    partition, batch, CorruptAnswerError("an answer without this partition"), now
                )

    def _answered(
        self,
        partition: PartitionState,
        batch: Batch,
        answer: ProducePartitionResponse,
        nodes: Sequence[Broker],
        now: float,
    ) -> None:
        code = answer.error_code
        if code == ErrorCode.NONE:
            self._acknowledge(partition, batch, answer.base_offset, answer.log_append_time)
            return
        if code == ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
            self._acknowledge(partition, batch, -1, -1)  # appended before, offset forgotten
            return
        error = BrokerError(code, refusal(answer), about=f"partition {partition.key}")
        if code in SEQUENCE_CODES and self.options.is_idempotent:
            if self.transactions is None:
                self._sequence_refused(partition, batch, error, now)
                return
            if code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and not batch.sent_as_head:
                self._retry(partition, batch, error, now)  # one before it was refused
                return
        if code == ErrorCode.CONCURRENT_TRANSACTIONS:
            self._retry(partition, batch, error, now)
            partition.failures = 0
            partition.not_before = now + CONCURRENT_MS
            self._wake(partition.not_before)
            return
        if code == ErrorCode.MESSAGE_TOO_LARGE and len(batch.records) > 1:
            self._split(partition, batch)
            return
        leader = answer.current_leader
        if leader is not None and self._metadata.learn_leader(
            *partition.key, leader.leader_id, leader.leader_epoch, nodes
        ):
            partition.failures = 0
        self._failed(partition, batch, error, now)

    def _acknowledge(
        self, partition: PartitionState, batch: Batch, base_offset: int, log_append_time: int
    ) -> None:
        partition.in_flight.remove(batch)
        partition.failures = 0
        partition.is_known = partition.is_known or batch.producer_epoch == partition.producer_epoch
        self._settle(batch, None, base_offset, log_append_time)

    def _failed(
        self, partition: PartitionState, batch: Batch, error: ClientError, now: float
    ) -> None:
        if error.outcome is Outcome.UNKNOWN or (
            isinstance(error, BrokerError) and error.retriable and error.code not in NOT_APPENDED
        ):
            batch.may_exist = True
        if batch.is_done:  # its delivery timeout passed while it was in flight
            partition.in_flight.remove(batch)
            return
        if not error.retriable or (batch.may_exist and self.options.sends_once):
            partition.in_flight.remove(batch)
            if batch.may_exist:
                error = error.fresh()  # it may be another batch's, too
                error.outcome = Outcome.UNKNOWN  # an earlier attempt may have been appended
            else:
                self._rewind(partition, batch)
            self._settle(batch, error)
            return
        self._metadata.invalidate()
        self._retry(partition, batch, error, now)

    def _retry(
        self, partition: PartitionState, batch: Batch, error: ClientError | None, now: float
    ) -> None:
        partition.in_flight.remove(batch)
        batch.last_error = error or batch.last_error
        if batch.is_done:
            return
        if batch.last_error is not None:
            said = ascii(str(batch.last_error))
            LOG.debug("a batch of %s is sent again: %s", partition.key, said)
        partition.put_back(batch)
        partition.is_recovering = True
        backoff = self.options.backoff_ms * 2 ** min(partition.failures, 8)
        partition.not_before = now + min(backoff, self.options.backoff_max_ms)
        self._wake(partition.not_before)
        if not partition.in_flight:
            partition.failures += 1

    def _sequence_refused(
        self, partition: PartitionState, batch: Batch, error: BrokerError, now: float
    ) -> None:
        if batch.sent_as_head and not batch.is_done:
            # Nothing of ours stood before it, so the gap is final and neither it nor any
            # later batch was appended: all of them may be numbered anew (KIP-360).
            LOG.warning("records of %s begin a new epoch: %s", partition.key, ascii(str(error)))
            if partition.producer_epoch >= _EPOCH_MAX:
                self._identity.forget()
                partition.producer_id = -1
            else:
                partition.producer_epoch += 1
            partition.next_sequence = 0
            partition.is_known = False
            for other in [batch, *partition.in_flight, *partition.retries]:
                other.base_sequence = -1
        self._retry(partition, batch, error, now)

    def _split(self, partition: PartitionState, batch: Batch) -> None:
        partition.in_flight.remove(batch)
        if batch.is_done:
            return
        for half in batch.split():
            partition.put_back(half)
        partition.renumber_slots(batch)
        partition.is_recovering = True

    def _rewind(self, partition: PartitionState, batch: Batch) -> None:
        """A refused batch that nothing follows gives its sequence back: no gap."""
        if batch.base_sequence >= 0 and not partition.in_flight and not partition.retries:
            partition.next_sequence = batch.base_sequence

    def _expire(self, now: float) -> None:
        timeout = self.options.delivery_timeout_ms
        for partition in self._partitions.values():
            for batch in [*partition.in_flight]:
                if not batch.is_done and batch.deadline <= now:
                    message = f"{batch.key} did not acknowledge within {timeout:.0f} ms"
                    request = batch.request
                    self._settle(batch, TimedOutError(message, sent=batch.has_left))
                    if request is not None:
                        request.drop(now)
                elif not batch.is_done:
                    self._wake(batch.deadline)
            overdue = [batch for batch in partition.retries if batch.deadline <= now]
            for batch in overdue:
                partition.retries.remove(batch)
                self._settle(batch, self._overdue(batch))
            for batch in partition.retries:
                self._wake(batch.deadline)
        for queue in self.accumulator.queues.values():
            while queue and queue[0].deadline <= now:
                batch = queue.popleft()
                self._settle(batch, self._overdue(batch))
            if queue:
                self._wake(queue[0].deadline)

    @property
    def _identity_error(self) -> ClientError | None:
        return (self.transactions or self._identity).error

    def _overdue(self, batch: Batch) -> TimedOutError:
        timeout = self.options.delivery_timeout_ms
        reason = batch.last_error or self._identity_error or self._metadata.last_error
        message = f"not acknowledged within {timeout:.0f} ms: {reason or 'no leader was reached'}"
        return TimedOutError(message, sent=batch.may_exist)

    def _settle(
        self,
        batch: Batch,
        error: ClientError | None,
        base_offset: int = -1,
        log_append_time: int = -1,
    ) -> None:
        if batch.is_done:
            return
        self.pending -= len(batch.records)
        unheard = len(batch.records) - len(batch.listening)
        if error is not None and self.transactions is not None:
            # Its `commit` tells.
            self.transactions.record_failed(error, is_resolved=batch.base_sequence < 0)
        elif error is not None and unheard:
            batch.loss = self.untold.add(batch.key, error, unheard)
        batch.settle(error, base_offset, log_append_time)
        self.listeners.add(batch.listening)
        batch.listening.clear()
        self.accumulator.release(batch)

    def _wake(self, at: float) -> None:
        self._wake_at = min(self._wake_at, at)
