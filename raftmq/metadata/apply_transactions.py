"""What each row of a TransactionRows, and each offset commit within a transaction, does to an
image: a pure function, as `apply.py`.

Never raises on any row, and never raises `structure_version`: controllers act on other things. A
row that fails changes nothing, but for an InitProducer that finds a transaction under way: it is
told CONCURRENT_TRANSACTIONS, and the transaction is aborted.

Codes are those of the newest version of each API; handlers turn them into what older ones know.
CONCURRENT_TRANSACTIONS says that a row came at another moment than the one that it names: before
the end of the last transaction was complete, or for one that is not the running one. Credentials of
another producer id are INVALID_PRODUCER_ID_MAPPING, those of an epoch that is over PRODUCER_FENCED
(in offset commits, whose clients know no such code, INVALID_PRODUCER_EPOCH).

Invariants: those of `transactions.py`; what a decision does to pending offsets is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias, TypeGuard

from attrs import evolve
from immutables import Map, MapMutation
from msgspec.structs import replace

from raftmq.errors import ErrorCode
from raftmq.metadata.apply_groups import (
    check_transactional_commit,
    commit_plainly,
    current_group,
    pend,
    settle_pending,
)
from raftmq.metadata.commands import (
    UNDATED,
    AbortExpired,
    AddPartitions,
    CommitMany,
    CommitOffsets,
    EndTransaction,
    ForgetId,
    InitProducer,
    ReportMarkers,
    Row,
    TransactionRows,
)
from raftmq.metadata.image import GroupImage, MetadataImage
from raftmq.metadata.results import CommitsDone, GroupDone, Rejection, RowDone, RowsDone
from raftmq.metadata.transactions import (
    EPOCH_LAST,
    NOBODY,
    Credentials,
    PartitionKey,
    Transaction,
    TransactionsImage,
    TransactionState,
)
from raftmq.types import TopicId, TopicPartition

PRODUCER_ID_END: Final = 2**63 - 1
_NO_PARTITIONS: Final[Map[PartitionKey, int]] = Map()
_NO_STAKES: Final[Map[int, str]] = Map()
Partitions: TypeAlias = Sequence[tuple[TopicId, Sequence[int]]]


def apply_rows(image: MetadataImage, command: TransactionRows) -> tuple[MetadataImage, RowsDone]:
    """The next image, and what became of each row."""
    draft = Draft(image, command.now_ms, command.said_ms)
    done = tuple(_ROWS[type(row)](draft, row) for row in command.rows)
    return draft.finish(), RowsDone(done)


def is_transactional(command: object) -> TypeGuard[CommitOffsets | CommitMany]:
    """True for an offset commit any of which is part of a transaction."""
    if isinstance(command, CommitMany):
        return any(commit.transaction is not None for commit in command.commits)
    return isinstance(command, CommitOffsets) and command.transaction is not None


def apply_commits(
    image: MetadataImage, command: CommitOffsets | CommitMany
) -> tuple[MetadataImage, GroupDone | CommitsDone | Rejection]:
    """The next image, and what became of each commit; plain ones may be among them."""
    commits = command.commits if isinstance(command, CommitMany) else (command,)
    times = [entry.timestamp_ms for commit in commits for entry in commit.offsets]
    draft = Draft(image, max(times, default=UNDATED))
    codes = tuple(int(_commit(draft, commit)) for commit in commits)
    if isinstance(command, CommitMany):
        return draft.finish(), CommitsDone(codes)
    if codes[0]:
        return image, Rejection(ErrorCode(codes[0]))
    return draft.finish(), GroupDone()


def remove_partitions(
    image: TransactionsImage, topic_id: TopicId, partitions: Iterable[int]
) -> TransactionsImage:
    """Those of a deleted topic owe nothing any more."""
    keys = [(topic_id, number) for number in partitions]
    if not any(key in image.stakes_at for key in keys):
        return image
    draft = Draft(MetadataImage(transactions=image), None)
    for key in keys:
        stakes = draft.stakes_at.get(key, _NO_STAKES)
        for producer_id in sorted(stakes):
            draft.released(draft.ids[stakes[producer_id]], key)
    return draft.finish().transactions


class Draft:
    """The next image's transactions, groups and producer ids, while rows change them.

    Attributes:
        image: the one it began with; topics are read from it.
        now_ms: the time, UNDATED where nobody can tell it; None: no producer or leader did this.
        ids: with the three maps below as in `TransactionsImage`.
    """

    def __init__(self, image: MetadataImage, now_ms: int | None, said_ms: int = UNDATED) -> None:
        known = image.transactions
        self.image = image
        self.now_ms = now_ms
        self._said_ms = said_ms
        self.ids = known.ids.mutate()
        self.producers = known.producers.mutate()
        self.stakes_at = known.stakes_at.mutate()
        self.decided = known.decided.mutate()
        self._last_decision = known.last_decision
        self._next_producer_id = image.next_producer_id
        self._groups: MapMutation[str, GroupImage] | None = None

    @property
    def groups(self) -> MapMutation[str, GroupImage]:
        """Groups, as `GroupsImage` has them."""
        if self._groups is None:
            self._groups = self.image.groups.groups.mutate()
        return self._groups

    def finish(self) -> MetadataImage:
        """The next image."""
        groups = self.image.groups
        if self._groups is not None:
            groups = evolve(groups, groups=self._groups.finish())
        return evolve(
            self.image,
            transactions=TransactionsImage(
                ids=self.ids.finish(),
                producers=self.producers.finish(),
                stakes_at=self.stakes_at.finish(),
                decided=self.decided.finish(),
                last_decision=self._last_decision,
            ),
            groups=groups,
            next_producer_id=self._next_producer_id,
        )

    @property
    def started_at_ms(self) -> int:
        """When a transaction begins that does now, as people are told."""
        now_ms = self.now_ms
        return self._said_ms if now_ms is None or now_ms == UNDATED else now_ms

    def put(self, after: Transaction) -> Transaction:
        """Keep what became of an id, and when: no clock makes that earlier than it was."""
        changed_at_ms = after.changed_at_ms
        if self.now_ms is not None:
            is_dated = self.now_ms != UNDATED
            changed_at_ms = max(changed_at_ms, self.now_ms) if is_dated else UNDATED
        if changed_at_ms != after.changed_at_ms:
            after = replace(after, changed_at_ms=changed_at_ms)
        self.ids[after.transactional_id] = after
        return after

    def new_producer_id(self) -> int:
        """The next one of the cluster; -1 when they are used up."""
        number = self._next_producer_id
        if number >= PRODUCER_ID_END:
            return -1
        self._next_producer_id = number + 1
        return number

    def after(self, credentials: Credentials) -> Credentials:
        """Those that fence these; NOBODY when producer ids are used up."""
        producer_id, epoch = credentials
        if epoch < EPOCH_LAST:
            return producer_id, epoch + 1
        number = self.new_producer_id()
        return NOBODY if number < 0 else (number, 0)

    def stake(self, running: Transaction, keys: Iterable[PartitionKey]) -> None:
        """These partitions are part of the transaction."""
        for key in keys:
            stakes = self.stakes_at.get(key, _NO_STAKES)
            self.stakes_at[key] = stakes.set(running.producer_id, running.transactional_id)

    def released(self, known: Transaction, key: PartitionKey) -> None:
        """A partition has reported its marker, or was deleted."""
        stakes = self.stakes_at[key].delete(known.records_producer_id)
        if stakes:
            self.stakes_at[key] = stakes
        else:
            del self.stakes_at[key]
        after = replace(known, partitions=known.partitions.delete(key))
        if after.state.is_prepared and not after.partitions:
            self._complete(after)
        else:
            self.ids[after.transactional_id] = after

    def decide(
        self,
        running: Transaction,
        *,
        is_commit: bool,
        credentials: Credentials,
        marker: Credentials,
        last: Credentials,
    ) -> Transaction:
        """Commit or abort the running transaction; it is complete where no marker is owed."""
        for name in running.groups:
            group = self.groups.get(name)
            if group is not None:
                self.groups[name] = settle_pending(group, running.producer_id, is_commit)
        producer_id, epoch = credentials
        if producer_id != running.producer_id:
            self.producers[producer_id] = running.transactional_id
        state = TransactionState.PREPARE_COMMIT if is_commit else TransactionState.PREPARE_ABORT
        after = replace(
            running,
            producer_id=producer_id,
            epoch=epoch,
            last=last,
            state=state,
            groups=(),
            marker=marker,
        )
        if not after.partitions:
            return self._complete(after)
        self._last_decision += 1
        self.decided[self._last_decision] = after.transactional_id
        return self.put(replace(after, decision=self._last_decision))

    def _complete(self, prepared: Transaction) -> Transaction:
        if prepared.decision:
            del self.decided[prepared.decision]
        if prepared.marker[0] != prepared.producer_id:
            del self.producers[prepared.marker[0]]
        is_commit = prepared.state.is_commit
        state = TransactionState.COMPLETE_COMMIT if is_commit else TransactionState.COMPLETE_ABORT
        return self.put(replace(prepared, state=state, decision=0))


def _told(known: Transaction, code: ErrorCode = ErrorCode.NONE) -> RowDone:
    return RowDone(int(code), known.producer_id, known.epoch, known.txn_seq, int(known.state))


def _fence(known: Transaction, credentials: Credentials) -> ErrorCode:
    """Why these are not the present credentials."""
    if credentials[0] in (known.producer_id, known.last[0], known.marker[0]):
        return ErrorCode.PRODUCER_FENCED
    return ErrorCode.INVALID_PRODUCER_ID_MAPPING


_NO_ID: Final = RowDone(int(ErrorCode.INVALID_PRODUCER_ID_MAPPING))
_USED_UP: Final = ErrorCode.UNKNOWN_SERVER_ERROR
"""There are no more producer ids."""


# ---- rows ----


def _init_producer(draft: Draft, row: InitProducer) -> RowDone:
    known = draft.ids.get(row.transactional_id)
    if known is None:
        return _first(draft, row)
    named = (row.producer_id, row.epoch)
    is_named = row.producer_id >= 0
    is_again = is_named and named == known.last and known.state is not TransactionState.ONGOING
    if is_named and named != known.credentials and not is_again:
        return _told(known, ErrorCode.PRODUCER_FENCED)
    if known.state.is_prepared:
        return _told(known, ErrorCode.CONCURRENT_TRANSACTIONS)
    last = known.credentials if is_named else NOBODY
    if known.state is TransactionState.ONGOING:
        return _abort(draft, known, last, ErrorCode.CONCURRENT_TRANSACTIONS)
    if is_again:
        credentials, last = known.credentials, known.last
    else:
        credentials = draft.after(known.credentials)
    if credentials == NOBODY:
        return _told(known, _USED_UP)
    if credentials[0] != known.producer_id:
        del draft.producers[known.producer_id]
        draft.producers[credentials[0]] = known.transactional_id
    after = replace(
        known,
        producer_id=credentials[0],
        epoch=credentials[1],
        last=last,
        timeout_ms=row.timeout_ms,
        state=TransactionState.EMPTY,
    )
    return _told(draft.put(after))


def _first(draft: Draft, row: InitProducer) -> RowDone:
    number = draft.new_producer_id()
    if number < 0:
        return RowDone(int(_USED_UP))
    draft.producers[number] = row.transactional_id
    known = Transaction(
        transactional_id=row.transactional_id,
        producer_id=number,
        epoch=0,
        timeout_ms=row.timeout_ms,
    )
    return _told(draft.put(known))


def _abort(draft: Draft, running: Transaction, last: Credentials, code: ErrorCode) -> RowDone:
    """Abort what its producer did not end, and fence it."""
    credentials = draft.after(running.credentials)
    if credentials == NOBODY:
        return _told(running, _USED_UP)
    marker = (running.producer_id, running.epoch + 1)
    after = draft.decide(
        running, is_commit=False, credentials=credentials, marker=marker, last=last
    )
    return _told(after, code)


def _joined(
    draft: Draft,
    transactional_id: str,
    credentials: Credentials,
    txn_seq: int,
    protocol: int,
) -> Transaction | RowDone:
    """The transaction that something is to be part of, begun if need be but not put yet."""
    known = draft.ids.get(transactional_id)
    if known is None:
        return _NO_ID
    if credentials != known.credentials:
        return _told(known, _fence(known, credentials))
    if protocol == 1 and txn_seq < 0:
        return _told(known, ErrorCode.INVALID_REQUEST)
    if known.state is TransactionState.ONGOING:
        is_meant = txn_seq in (-1, known.txn_seq)
        return known if is_meant else _told(known, ErrorCode.CONCURRENT_TRANSACTIONS)
    if known.state.is_prepared or txn_seq not in (-1, known.txn_seq + 1):
        return _told(known, ErrorCode.CONCURRENT_TRANSACTIONS)
    return replace(
        known,
        txn_seq=known.txn_seq + 1,
        state=TransactionState.ONGOING,
        protocol=protocol,
        started_at_ms=draft.started_at_ms,
    )


def _add_partitions(draft: Draft, row: AddPartitions) -> RowDone:
    credentials = (row.producer_id, row.epoch)
    joined = _joined(draft, row.transactional_id, credentials, row.txn_seq, row.protocol)
    if isinstance(joined, RowDone):
        return joined
    added: dict[PartitionKey, int] = {}
    for topic_id, numbers in row.partitions:
        topic = draft.image.topic_by_id(topic_id)
        for number in numbers:
            partition = None if topic is None else topic.partition(number)
            if topic is None or partition is None or not partition.takes_records:
                known = draft.ids[row.transactional_id]
                return _told(known, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            if (topic.topic_id, number) not in joined.partitions:
                added[topic.topic_id, number] = partition.creation_epoch
    groups = _with_groups(joined.groups, row.groups)
    if not added and groups == joined.groups:
        return _told(draft.ids[row.transactional_id])
    draft.stake(joined, added)
    partitions = joined.partitions.update(added) if added else joined.partitions
    return _told(draft.put(replace(joined, partitions=partitions, groups=groups)))


def _with_groups(groups: tuple[str, ...], more: Iterable[str]) -> tuple[str, ...]:
    return (*groups, *(name for name in dict.fromkeys(more) if name not in groups))


def _end_transaction(draft: Draft, row: EndTransaction) -> RowDone:
    known = draft.ids.get(row.transactional_id)
    if known is None:
        return _NO_ID
    credentials = (row.producer_id, row.epoch)
    state = known.state
    is_over = state not in (TransactionState.EMPTY, TransactionState.ONGOING)
    if row.protocol == 2 and credentials == known.last and is_over:  # it lost the answer
        is_same = row.is_commit == state.is_commit
        return _told(known, ErrorCode.NONE if is_same else ErrorCode.INVALID_TXN_STATE)
    if credentials != known.credentials:
        return _told(known, _fence(known, credentials))
    if row.protocol == 2:
        return _end_second(draft, known, row)
    if row.txn_seq < 0:
        return _told(known, ErrorCode.INVALID_REQUEST)
    if row.txn_seq != known.txn_seq:
        return _told(known, ErrorCode.CONCURRENT_TRANSACTIONS)
    if state is TransactionState.ONGOING:
        after = draft.decide(
            replace(known, protocol=1),
            is_commit=row.is_commit,
            credentials=credentials,
            marker=credentials,
            last=known.last,
        )
        return _told(after)
    is_same = is_over and row.is_commit == state.is_commit
    return _told(known, ErrorCode.NONE if is_same else ErrorCode.INVALID_TXN_STATE)


def _end_second(draft: Draft, known: Transaction, row: EndTransaction) -> RowDone:
    """EndTransaction by protocol 2, with the present credentials."""
    if known.state.is_prepared or row.txn_seq not in (-1, known.txn_seq):
        return _told(known, ErrorCode.CONCURRENT_TRANSACTIONS)
    if known.state is not TransactionState.ONGOING and row.is_commit:
        return _told(known, ErrorCode.INVALID_TXN_STATE)
    credentials = draft.after(known.credentials)
    if credentials == NOBODY:
        return _told(known, _USED_UP)
    running = replace(known, protocol=2)
    if known.state is not TransactionState.ONGOING:  # it aborts one that never began
        running = replace(running, txn_seq=known.txn_seq + 1, started_at_ms=draft.started_at_ms)
    after = draft.decide(
        running,
        is_commit=row.is_commit,
        credentials=credentials,
        marker=(known.producer_id, known.epoch + 1),
        last=known.credentials,
    )
    return _told(after)


def _report_markers(draft: Draft, row: ReportMarkers) -> RowDone:
    key = (row.topic_id, row.partition)
    for producer_id, txn_seq in row.ended:
        name = draft.producers.get(producer_id)
        known = None if name is None else draft.ids[name]
        if (
            known is not None
            and known.state.is_prepared
            and known.txn_seq == txn_seq
            and known.marker[0] == producer_id
            and known.partitions.get(key) == row.creation_epoch
        ):
            draft.released(known, key)
    return RowDone(int(ErrorCode.NONE))


def _abort_expired(draft: Draft, row: AbortExpired) -> RowDone:
    known = draft.ids.get(row.transactional_id)
    if known is None:
        return _NO_ID
    if (
        known.state is not TransactionState.ONGOING
        or known.credentials != (row.producer_id, row.epoch)
        or known.txn_seq != row.txn_seq
    ):
        return _told(known, ErrorCode.INVALID_TXN_STATE)
    # Its producer, if it lives, asks who it is now (KIP-360) or, under protocol 2, for the abort,
    # and goes on with the new epoch.
    return _abort(draft, known, known.credentials, ErrorCode.NONE)


def _forget_id(draft: Draft, row: ForgetId) -> RowDone:
    known = draft.ids.get(row.transactional_id)
    if known is None:
        return RowDone(int(ErrorCode.NONE))
    if (
        not known.state.may_begin
        or known.credentials != (row.producer_id, row.epoch)
        or known.txn_seq != row.txn_seq
        or known.changed_at_ms != row.changed_at_ms
    ):
        return _told(known, ErrorCode.INVALID_TXN_STATE)
    if known.changed_at_ms == UNDATED:
        return _told(draft.put(known))
    del draft.ids[known.transactional_id]
    del draft.producers[known.producer_id]
    return RowDone(int(ErrorCode.NONE))


# ---- offsets ----


def _commit(draft: Draft, commit: CommitOffsets) -> ErrorCode:
    mine = commit.transaction
    if mine is None:
        return commit_plainly(draft.groups, commit)
    group = current_group(draft.groups, commit)
    if isinstance(group, ErrorCode):
        return group
    rejection = check_transactional_commit(group, commit)
    if rejection is not None:
        return rejection.code
    if len(mine.topic_ids) != len(commit.offsets):
        return ErrorCode.INVALID_REQUEST
    credentials = (mine.producer_id, mine.epoch)
    joined = _joined(draft, mine.transactional_id, credentials, mine.txn_seq, mine.protocol)
    if isinstance(joined, RowDone):
        return _COMMIT_CODES.get(joined.code, ErrorCode(joined.code))
    if commit.group not in joined.groups:
        if mine.protocol == 1:
            return ErrorCode.INVALID_TXN_STATE
        draft.put(replace(joined, groups=(*joined.groups, commit.group)))
    entries = {}
    for entry, topic_id in zip(commit.offsets, mine.topic_ids, strict=True):
        at = TopicPartition(entry.topic, entry.partition)
        if draft.image.committed_name(topic_id) != entry.topic:
            continue  # deleted meanwhile, with whatever was committed there
        if draft.image.committed_since(at) is not None:
            entries[at] = entry
    draft.groups[commit.group] = pend(group, mine.producer_id, entries)
    return ErrorCode.NONE


_COMMIT_CODES: Final[dict[int, ErrorCode]] = {
    int(ErrorCode.PRODUCER_FENCED): ErrorCode.INVALID_PRODUCER_EPOCH,
    # Who named no number under protocol 1 saw no transaction run.
    int(ErrorCode.INVALID_REQUEST): ErrorCode.INVALID_TXN_STATE,
}

_ROWS: Final[dict[type, Callable[[Draft, Row], RowDone]]] = {
    InitProducer: _init_producer,  # type: ignore[dict-item]
    AddPartitions: _add_partitions,  # type: ignore[dict-item]
    EndTransaction: _end_transaction,  # type: ignore[dict-item]
    ReportMarkers: _report_markers,  # type: ignore[dict-item]
    AbortExpired: _abort_expired,  # type: ignore[dict-item]
    ForgetId: _forget_id,  # type: ignore[dict-item]
}
