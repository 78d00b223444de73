"""The transactions of one producer: its epoch, what is added to them, how they end. Pure.

One request at a time goes to a coordinator, so that nothing overtakes: InitProducerId fences older
producers of the same id, partitions (protocol 1) and groups are added before they are written to,
EndTxn comes when all of it is acknowledged. An end without an answer is asked for again until one
tells, and nobody may begin before that. Whether an old epoch means that the transaction took too
long or that another producer took over, only InitProducerId with the old epoch tells (KIP-360).
Where a request or answer was lost, protocol 1 raises the epoch before the next transaction, so that
nothing late gets into it (KAFKA-17754); protocol 2 does so at every end (KIP-890). Never reads a
clock; `ProducerCore` owns records and batches.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final

from attrs import define

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct
from raftmq.types import TopicPartition
from raftmq_client.core.call import ANY_NODE, Call, struct_call
from raftmq_client.core.client import coordinator_link
from raftmq_client.core.group_admin import (
    GROUP,
    TRANSACTIONS,
    CommittedOffset,
    coordinator_lookup,
)
from raftmq_client.core.group_requests import Identity
from raftmq_client.core.metadata import Broker, MetadataCore
from raftmq_client.core.transaction_requests import (
    ADD_PARTITIONS_VERSION_MAX,
    END_VERSIONS,
    FEATURE,
    FENCE_VERSION_MIN,
    OFFSET_VERSIONS,
    PRODUCE_VERSIONS,
    Protocol,
    TransactionHandle,
    Verdict,
    add_offsets_request,
    add_partitions_request,
    end_request,
    init_request,
    judge,
    offset_commit_request,
    read_added,
    read_offset_commit,
)
from raftmq_client.errors import (
    BrokerError,
    ClientError,
    CorruptAnswerError,
    EndUnknownError,
    FencedError,
    MustAbortError,
    Outcome,
    TransactionError,
    UsageError,
    check_code,
)

LOG: Final = logging.getLogger("raftmq_client.transactions")
_EPOCH_MAX: Final = 32767
_TIMEOUT_MS_MAX: Final = 10_000.0
_CONCURRENT_MS: Final = 20.0
"""The transaction before is not over yet on all partitions: that takes milliseconds."""


class State(Enum):
    """What a transactional producer is doing."""

    NEW = "asks for its epoch"
    READY = "has no transaction"
    OPEN = "has one"
    COMMITTING = "commits"
    ABORTING = "aborts"
    DETACHED = "left its transaction to another process"
    OVER = "is over"


@define(eq=False)
class Ending:
    """The end of one transaction, asked for once and waited for as often as one likes."""

    commit: bool
    is_done: bool = False
    error: ClientError | None = None
    is_told: bool = False
    """Whoever asked has heard how it went."""

    def settle(self, error: ClientError | None) -> None:
        """It ended so; the first word counts."""
        if not self.is_done:
            self.is_done, self.error = True, error

    def result(self) -> None:
        """Tell how it went.

        Raises:
            ClientError: not as was asked.
        """
        assert self.is_done
        self.is_told = True
        if self.error is not None:
            raise self.error.fresh()


@define(eq=False)
class OffsetCommit:
    """Positions that become a group's when the transaction is committed."""

    who: Identity
    offsets: Mapping[TopicPartition, CommittedOffset]
    deadline: float
    is_done: bool = False
    error: ClientError | None = None

    def settle(self, error: ClientError | None) -> None:
        """They are part of the transaction, or never will be."""
        if not self.is_done:
            self.is_done, self.error = True, error


class TransactionCore:
    """The transactional side of one producer."""

    def __init__(
        self,
        transactional_id: str,
        timeout_ms: int,
        metadata: MetadataCore,
        feature_level: Callable[[str], int],
        *,
        request_timeout_ms: float = 30_000,
        backoff_ms: float = 50,
        backoff_max_ms: float = 1_000,
    ) -> None:
        self.transactional_id = transactional_id
        self.timeout_ms = timeout_ms
        self.producer_id = -1
        self.producer_epoch = -1
        self.state = State.NEW
        self.protocol = Protocol.ONE
        self.number = 0
        """Counts the transactions that were begun."""
        self.doom: ClientError | None = None
        """Why the one that is open cannot be committed."""
        self.fatal: ClientError | None = None
        self.drop: ClientError | None = None
        """What `ProducerCore` is to settle all that is not settled with."""
        self.error: ClientError | None = None
        """Why the last request brought nothing."""
        self._metadata = metadata
        self._feature_level = feature_level
        self._timeout_ms = min(request_timeout_ms, _TIMEOUT_MS_MAX)
        self._backoff_ms = backoff_ms
        self._backoff_max_ms = backoff_max_ms
        self._coordinator: int | None = None
        self._group_coordinators: dict[str, int] = {}
        self._is_asking = False
        self._not_before = 0.0
        self._failures = 0
        self._begun_at = 0.0
        self._ending: Ending | None = None
        self._end_call: Call | None = None
        self._must_check = False
        self._is_touched = False  # a coordinator may know of the transaction
        self._is_unresolved = False  # brokers may hold, or yet get, what nobody can tell
        self._is_end_lost = False
        self._added: dict[TopicPartition, None] = {}
        self._wanted: dict[TopicPartition, None] = {}
        self._groups: dict[str, None] = {}
        self._commits: deque[OffsetCommit] = deque()
        self._wake_at = 0.0

    # What users do.

    def begin(self, now: float) -> int:
        """Begin a transaction; `is_ready` must hold. Its number."""
        self.check()
        assert self.state is State.READY
        self.state = State.OPEN
        level = self._feature_level(FEATURE)
        self.protocol = Protocol.TWO if level >= Protocol.TWO else Protocol.ONE
        self._begun_at = now
        self._ending, self._is_end_lost = None, False
        self.number += 1
        return self.number

    @property
    def is_ready(self) -> bool:
        """True when `begin` goes through, or raises at once."""
        is_ready = self.state is State.READY and not self._must_check
        return is_ready or self.fatal is not None

    def check_begin(self) -> None:
        """Refuse to begin where waiting would not help.

        Raises:
            ClientError: the producer is over.
            UsageError: another transaction is open, or how it ended was not asked.
        """
        self.check()
        if self.state is State.DETACHED:
            raise UsageError("its transaction is another process's now: make a new producer")
        if self.state is State.OPEN:
            raise UsageError("a transaction is open: commit or abort it first")
        if self._ending is not None and self._ending.commit and not self._ending.is_told:
            raise UsageError("nobody knows how the last commit ended: call its `commit` again")

    def check(self) -> None:
        """Tell, as often as it is asked, why this producer is over.

        Raises:
            ClientError: why it is.
        """
        if self.fatal is not None:
            raise self.fatal.fresh()

    def check_open(self) -> None:
        """Refuse what belongs into a transaction.

        Raises:
            UsageError: none is open.
            MustAbortError: it cannot be committed any more.
            ClientError: the producer is over.
        """
        self.check()
        if self.state is not State.OPEN:
            raise UsageError(f"no transaction is open: the producer {self.state.value}")
        if self.doom is not None:
            raise self.doom.fresh()

    def commit_offsets(self, commit: OffsetCommit) -> None:
        """Make positions part of the transaction."""
        self.check_open()
        self._commits.append(commit)

    def must_abort(self, error: MustAbortError) -> None:
        """It was found that the transaction must not be committed."""
        if self.state is State.OPEN:
            self._doom(error)

    def end(self, *, commit: bool) -> Ending:
        """Ask for the end; asked again for the same, it is the same.

        Raises:
            UsageError: no transaction is open, or its commit may stand already.
            ClientError: the producer is over.
        """
        ending = self._ending
        if ending is not None and ending.commit == commit:
            return ending
        self.check()
        if self.state is State.COMMITTING and not commit:
            if self._end_call is not None:
                raise UsageError("its commit may stand already: call `commit` again, which tells")
            assert ending is not None
            ending.is_told = True
            ending.settle(MustAbortError("it was aborted before its commit left"))
            self._ending = None
        elif self.state is not State.OPEN:
            raise UsageError(f"no transaction is open: the producer {self.state.value}")
        if not commit:
            return self._abort()
        if self.doom is not None and not self._must_check:
            raise self.doom.fresh()
        self.state = State.COMMITTING
        self._ending = Ending(commit=True)
        return self._ending

    def _abort(self) -> Ending:
        self.state = State.ABORTING
        self._ending = Ending(commit=False)
        error = self.doom or MustAbortError("the transaction was aborted")
        self._doom(error)
        return self._ending

    def detach(self, now: float) -> tuple[TransactionHandle, float]:
        """Leave the transaction to who has its handle: that, and how many ms it has left.

        Everything sent must be settled.
        """
        self.check_open()
        assert not self._commits
        self.state = State.DETACHED
        handle = TransactionHandle(
            self.transactional_id,
            self.producer_id,
            self.producer_epoch,
            self.protocol,
            0,
            is_empty=not self._is_touched,
        )
        return handle, max(0.0, self._begun_at + self.timeout_ms - now)

    def why_not(self) -> str:
        """What is waited for, for people."""
        return str(self.error or self._metadata.last_error or "no coordinator was reached")

    # What `ProducerCore` does.

    @property
    def is_known(self) -> bool:
        """True when batches can be numbered."""
        return self.producer_id >= 0

    @property
    def is_writing(self) -> bool:
        """True while batches may leave."""
        is_open = self.state in (State.OPEN, State.COMMITTING)
        return is_open and self.doom is None and self.fatal is None

    def may_send(self, key: TopicPartition) -> bool:
        """Whether a batch of this partition may leave now; if not, it is seen to."""
        if not self.is_writing:
            return False
        if self.protocol == Protocol.TWO:
            self._is_touched = True
            return True
        if key in self._added:
            return True
        self._wanted[key] = None
        return False

    @property
    def produce_versions(self) -> tuple[int, int]:
        """In what versions its records are sent."""
        return PRODUCE_VERSIONS[self.protocol]

    def record_failed(self, error: ClientError, *, is_resolved: bool) -> None:
        """A record is not in the transaction, so this cannot be committed."""
        if not is_resolved:
            self._is_unresolved = True
        code = error.code if isinstance(error, BrokerError) else None
        if code is not None and judge(error) is Verdict.CHECK:
            self._must_check = True
        if self.state in (State.OPEN, State.COMMITTING):
            self._doom(_must_abort(error))

    def dropped(self, *, is_resolved: bool) -> None:
        """All that was to be dropped is."""
        self.drop = None
        if not is_resolved:
            self._is_unresolved = True

    # What drivers ask, by way of `ProducerCore`.

    def calls(self, now: float, *, is_drained: bool) -> list[Call]:
        """The request that is due; `is_drained` says that all records are settled."""
        self._wake_at = float("inf")
        self._expire(now)
        if self.fatal is not None or self._is_asking or self.state is State.DETACHED:
            return []
        if self._not_before > now:
            self._wake_at = min(self._wake_at, self._not_before)
            return []
        call = self._next(is_drained)
        return [] if call is None else [call]

    def deadline(self) -> float:
        """When `calls` should next be asked."""
        return self._wake_at

    def _expire(self, now: float) -> None:
        for commit in self._commits:
            if commit.deadline <= now:
                reason = self.error or "no coordinator was reached"
                self._is_unresolved = True
                self._doom(MustAbortError(f"offsets were not taken in time: {reason}"))
                return
            self._wake_at = min(self._wake_at, commit.deadline)

    def _next(self, is_drained: bool) -> Call | None:
        if self.state is State.NEW or self._must_check:
            return self._at_coordinator(self._init)
        if self.state is State.ABORTING:
            if self.drop is not None:
                return None  # first what is under way is let go
            if not self._is_touched:
                self._ended()
            elif self.protocol == Protocol.ONE and self._is_unresolved:
                return self._at_coordinator(self._init)  # raises the epoch, and aborts
            else:
                return self._at_coordinator(self._end)
        elif self.is_writing:
            if self._wanted:
                return self._at_coordinator(self._add_partitions)
            if self._commits:
                return self._commit_offsets(self._commits[0])
            if self.state is State.COMMITTING and is_drained:
                if self._is_touched:
                    return self._at_coordinator(self._end)
                self._ended()
        return None

    def _take_identity(self, response: Any) -> None:
        if response.producer_id < 0 or not 0 <= response.producer_epoch <= _EPOCH_MAX:
            raise CorruptAnswerError(f"no producer id and epoch in an answer: {response}")
        self.producer_id = response.producer_id
        self.producer_epoch = response.producer_epoch

    # Requests.

    def _at_coordinator(self, make: Callable[[int], Call]) -> Call:
        if self._coordinator is None:
            return self._find(self.transactional_id, TRANSACTIONS)
        return make(coordinator_link(self._coordinator))

    def _find(self, name: str, key_type: int) -> Call:
        request, read = coordinator_lookup(name, key_type)

        def found(response: Any, _now: float) -> None:
            node, host, port = read(response)
            self._metadata.brokers.setdefault(node, Broker(node, host, port))
            if key_type == GROUP:
                self._group_coordinators[name] = node
            else:
                self._coordinator = node

        return self._ask(
            ApiKey.FIND_COORDINATOR,
            request,
            found,
            self._refused,
            min_version=min(key_type, 1),
        )

    def _init(self, node: int) -> Call:
        is_first = self.producer_id < 0
        request = init_request(
            self.transactional_id, self.timeout_ms, self.producer_id, self.producer_epoch
        )

        def answered(response: Any, _now: float) -> None:
            check_code(response.error_code, about=f"epoch of {self.transactional_id!r}")
            self._take_identity(response)
            self._must_check = self._is_touched = self._is_unresolved = False
            if self.state is State.NEW:
                self.state = State.READY
            elif self.state is State.ABORTING:
                self._ended()
            elif self.state is State.COMMITTING:
                assert self._ending is not None
                self._ending.settle(self.doom)
                self._ending, self.state = None, State.OPEN

        def refused(error: ClientError, verdict: Verdict) -> None:
            if verdict is Verdict.CHECK and not is_first:
                name = repr(self.transactional_id)
                self._fall(_fenced(f"a newer producer has the transactional id {name}", error))
            else:
                self._fall(error)

        return self._ask(
            ApiKey.INIT_PRODUCER_ID,
            request,
            answered,
            refused,
            node=node,
            min_version=0 if is_first else FENCE_VERSION_MIN,
        )

    def _add_partitions(self, node: int) -> Call:
        wanted = tuple(self._wanted)
        request = add_partitions_request(
            self.transactional_id, self.producer_id, self.producer_epoch, wanted
        )
        self._is_touched = True

        def answered(response: Any, _now: float) -> None:
            read_added(response, wanted)
            for key in wanted:
                self._wanted.pop(key, None)
                self._added[key] = None

        return self._ask(
            ApiKey.ADD_PARTITIONS_TO_TXN,
            request,
            answered,
            self._refused,
            node=node,
            max_version=ADD_PARTITIONS_VERSION_MAX,
        )

    def _commit_offsets(self, commit: OffsetCommit) -> Call:
        group = commit.who.group
        if self.protocol == Protocol.ONE and group not in self._groups:
            return self._at_coordinator(lambda node: self._add_group(node, group))
        coordinator = self._group_coordinators.get(group)
        if coordinator is None:
            return self._find(group, GROUP)
        request = offset_commit_request(
            self.transactional_id,
            self.producer_id,
            self.producer_epoch,
            commit.who,
            commit.offsets,
        )
        self._is_touched = True

        def answered(response: Any, _now: float) -> None:
            read_offset_commit(response, commit.offsets)
            commit.settle(None)
            if commit in self._commits:
                self._commits.remove(commit)

        low, high = OFFSET_VERSIONS[self.protocol]
        # Without v3 a member could not be fenced: better refused than doubled.
        return self._ask(
            ApiKey.TXN_OFFSET_COMMIT,
            request,
            answered,
            self._refused,
            node=coordinator_link(coordinator),
            min_version=max(low, 3 if commit.who.member_id else 0),
            max_version=high,
            group=group,
        )

    def _add_group(self, node: int, group: str) -> Call:
        request = add_offsets_request(
            self.transactional_id, self.producer_id, self.producer_epoch, group
        )
        self._is_touched = True

        def answered(response: Any, _now: float) -> None:
            check_code(response.error_code, about=f"adding group {group!r} to the transaction")
            self._groups[group] = None

        return self._ask(
            ApiKey.ADD_OFFSETS_TO_TXN,
            request,
            answered,
            self._refused,
            node=node,
        )

    def _end(self, node: int) -> Call:
        ending = self._ending
        assert ending is not None
        request = end_request(
            self.transactional_id, self.producer_id, self.producer_epoch, commit=ending.commit
        )

        def answered(response: Any, _now: float) -> None:
            check_code(response.error_code, about=f"end of {self.transactional_id!r}")
            if self.protocol == Protocol.TWO:
                before = self.producer_id, self.producer_epoch
                if response.producer_id == before[0] and response.producer_epoch <= before[1]:
                    raise CorruptAnswerError(f"an end that did not raise the epoch: {response}")
                self._take_identity(response)
            self._ended()

        low, high = END_VERSIONS[self.protocol]
        self._end_call = self._ask(
            ApiKey.END_TXN,
            request,
            answered,
            self._refused,
            node=node,
            min_version=low,
            max_version=high,
        )
        return self._end_call

    def _ask(
        self,
        api: ApiKey,
        request: Struct | Callable[[int], Struct],
        answered: Callable[[Any, float], None],
        refused: Callable[[ClientError, Verdict], None],
        *,
        node: int = ANY_NODE,
        min_version: int = 0,
        max_version: int = 32767,
        group: str | None = None,
    ) -> Call:
        """One request; `answered` raises what an answer refuses, `refused` has the final ones."""
        self._is_asking = True

        def finish(response: Any, error: ClientError | None, now: float) -> None:
            self._is_asking = False
            self._wake_at = now
            try:
                if error is not None:
                    raise error
                answered(response, now)
            except ClientError as failure:
                self._look_at(api, failure)
                self._failed(failure, refused, group, now)
                return
            self._failures = 0
            self.error = None

        return struct_call(
            api,
            request,
            finish,
            node=node,
            min_version=min_version,
            max_version=max_version,
            timeout_ms=self._timeout_ms,
            is_expendable=api is ApiKey.FIND_COORDINATOR,
        )

    # What comes of refusals.

    def _look_at(self, api: ApiKey, error: ClientError) -> None:
        """Note what may have been done, or yet be, by a request whose answer does not say."""
        is_unknown = error.outcome is Outcome.UNKNOWN
        if isinstance(error, BrokerError) and error.code is ErrorCode.COORDINATOR_NOT_AVAILABLE:
            is_unknown = True  # some brokers say so of what they could not finish
        if is_unknown and api is not ApiKey.FIND_COORDINATOR:
            self._is_unresolved = True
            if api is ApiKey.END_TXN:
                self._is_end_lost = True

    def _failed(
        self,
        error: ClientError,
        refused: Callable[[ClientError, Verdict], None],
        group: str | None,
        now: float,
    ) -> None:
        self.error = error
        verdict = judge(error)
        if verdict not in (Verdict.RETRY, Verdict.MOVED):
            refused(error, verdict)
            return
        if verdict is Verdict.MOVED:
            if group is not None:
                self._group_coordinators.pop(group, None)
            else:
                self._coordinator = None
        if isinstance(error, BrokerError) and error.code is ErrorCode.CONCURRENT_TRANSACTIONS:
            self._not_before = now + _CONCURRENT_MS  # everyday life
            return
        backoff = self._backoff_ms * 2 ** min(self._failures, 8)
        self._failures += 1
        if self._failures == 5:
            LOG.warning(
                "transactions of %r do not get on: %s", self.transactional_id, ascii(str(error))
            )
        self._not_before = now + min(backoff, self._backoff_max_ms)

    def _refused(self, error: ClientError, verdict: Verdict) -> None:
        """What asking again does not help."""
        if verdict is Verdict.FATAL or self.state is State.NEW:
            self._fall(error)
            return
        if verdict is Verdict.CHECK:
            self._must_check = True
        if self.state is State.ABORTING:
            if verdict is Verdict.ABORT:
                self._fall(error)
            return
        self._doom(_must_abort(error))

    def _doom(self, error: ClientError) -> None:
        """The transaction cannot be committed: let go what is not settled."""
        if self.doom is None:
            self.doom = error
            if self.state is not State.ABORTING:
                LOG.warning(
                    "transaction %d of %r must be aborted: %s",
                    self.number,
                    self.transactional_id,
                    ascii(str(error)),
                )
        self.drop = self.doom
        self._wanted.clear()
        self._settle_commits(self.doom)
        if self.state is State.COMMITTING and not self._must_check:
            assert self._ending is not None
            self._ending.settle(self.doom)
            self._ending, self.state, self._end_call = None, State.OPEN, None

    def _fall(self, error: ClientError) -> None:
        """The producer is over."""
        if not isinstance(error, TransactionError):
            cause = error
            error = TransactionError(f"the producer is over: {cause}", outcome=cause.outcome)
            error.__cause__ = cause
        ending = self._ending
        if self._is_end_lost and ending is not None and ending.commit and not ending.is_done:
            error.outcome = Outcome.UNKNOWN
        LOG.error("producer of %r: %s", self.transactional_id, ascii(str(error)))
        self.fatal = self.drop = error
        self.state = State.OVER
        self._settle_commits(error)
        if self._ending is not None:
            self._ending.settle(error)

    def _settle_commits(self, error: ClientError | None) -> None:
        commits, self._commits = self._commits, deque()
        for commit in commits:
            commit.settle(error)

    def _ended(self) -> None:
        """Nothing of the transaction is open at any coordinator."""
        assert self._ending is not None
        self.state = State.READY
        self.doom = self._end_call = None
        # Under protocol 1 what was lost may come late, in the next one: a new epoch keeps it out.
        self._must_check = self._is_unresolved and self.protocol == Protocol.ONE
        self._is_touched = self._is_unresolved = False
        self._added.clear()
        self._wanted.clear()
        self._groups.clear()
        self._ending.settle(None)


def _must_abort(error: ClientError) -> ClientError:
    if isinstance(error, MustAbortError):
        return error
    doom = MustAbortError(f"the transaction cannot be committed: {error}")
    doom.__cause__ = error
    return doom


def _fenced(message: str, cause: ClientError) -> FencedError:
    error = FencedError(f"{message}: {cause}")
    error.__cause__ = cause
    return error


def unknown_end(commit: bool, reason: str) -> EndUnknownError:
    """What waiting for an end ends with when its time is over."""
    what = "commit" if commit else "abort"
    return EndUnknownError(f"no answer told that the {what} is done: {reason}; call it again")
