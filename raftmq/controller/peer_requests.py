"""Judges what other nodes ask of this one, by the rules of `metadata/authority.py`.

A node that is of the cluster may lie, and one that is honest may be ahead: it has applied what this
node has not yet. So whatever this node's image does not allow is judged a second time, after a read
barrier: then the image has all that was committed when the request came, and what it still does not
allow is refused, counted and logged. Without a barrier (no controller is reached) the sender is
told to ask again.

Rows of leaders are judged one by one. Those that the image does not allow yet wait here, not in the
table, where a lie would stand in the way of the leader's own word; the image's next change or the
barrier decides. What is wrong without being a lie (of an earlier term or life, passed on by a node
that believed it, of a deleted topic) is dropped without a word.

Invariants: nothing of another node gets by without `error` or `hear`; whatever waits has a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Any, Final, TypeAlias

import msgspec

from raftmq.controller.leaders import Key, LeaderRow, LeaderTable
from raftmq.delays.deliveries import producer_id_of
from raftmq.errors import ErrorCode
from raftmq.logs import RateLimitedLog, structlog
from raftmq.metadata.authority import Knowledge, request_error, row_error
from raftmq.metadata.broker_messages import DeliverRecords, Reply, encode
from raftmq.metadata.config_keys import DELIVERS_TO
from raftmq.metadata.engine import DrivenEngine
from raftmq.metadata.image import MetadataImage, TopicImage
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.records import HEADER_SIZE
from raftmq.types import NodeId, RaftGroupId

_log: Final = RateLimitedLog(structlog.get_logger("raftmq.security"))

WAITING_MAX: Final = 16
"""Requests of one node that wait for a barrier."""
EARLY_ROWS_MAX: Final = 20_000
"""Rows of one node that wait."""
ASK_AGAIN_MS: Final = 500.0
TOLD_MAX: Final = 1_024

Serve: TypeAlias = Callable[[], Promise[bytes]]


class _Verdict(Enum):
    TAKEN = auto()
    OLD = auto()
    UNKNOWN = auto()
    """There is no such partition here."""
    REFUSED = auto()


class DelaySources:
    """Which delay partition delivers under a producer id."""

    def __init__(self) -> None:
        self._groups: dict[int, RaftGroupId] = {}
        self._topics: object = None
        """What was looked through last; a partition's id never changes, so one that is known then
        needs no second look."""

    def find(self, image: MetadataImage, producer_id: int) -> RaftGroupId | None:
        """The source of that id; None: no delay partition has it."""
        if producer_id not in self._groups and self._topics is not image.topics:
            self._topics = image.topics
            self._groups = {
                producer_id_of(group): group
                for topic in image.topics.values()
                if topic.configs.get(DELIVERS_TO)
                for group in _groups(topic)
            }
        return self._groups.get(producer_id)


def _groups(topic: TopicImage) -> Iterable[RaftGroupId]:
    return (RaftGroupId(topic.topic_id, p.index, p.creation_epoch) for p in topic.held)


class PeerRequests:
    """What other nodes ask of this one.

    Attributes:
        refused: how many requests were refused, by their kind.
    """

    def __init__(
        self,
        engine: DrivenEngine,
        leaders: LeaderTable,
        clock: Clock,
        on_refused: Callable[[NodeId, str, str], None],
    ) -> None:
        """`engine` has the image and its barriers, `leaders` takes the rows that are allowed;
        `on_refused(sender, kind, why)` is told of each request that is refused."""
        self._on_refused = on_refused
        self._engine = engine
        self._leaders = leaders
        self._clock = clock
        self._sources = DelaySources()
        self._waiting: dict[NodeId, int] = {}
        self._early: dict[NodeId, dict[Key, tuple[int, LeaderRow]]] = {}
        """By their sender, each with the barrier that decides, if nothing does before."""
        self._round = 0
        self._is_asking = False
        self._ask_at_ms = 0.0
        self._told: dict[tuple[NodeId, str], None] = {}
        self.refused: dict[str, int] = {}

    # ---- requests ----

    def error(self, sender: NodeId, request: Any) -> str:
        """Say why the image as it is does not allow a request; "" when it does."""
        image = self._engine.image
        known = Knowledge(
            image, self._engine.controller_id, lambda number: self._sources.find(image, number)
        )
        return request_error(known, sender, request)

    def judge_again(self, sender: NodeId, request: Any, serve: Serve) -> Promise[bytes]:
        """Serve what `error` did not allow if it is allowed after a read barrier.

        A delivery, which may be large, is not kept meanwhile: its sender sends it again.
        """
        if self._waiting.get(sender, 0) >= WAITING_MAX:
            return Promise.resolved(encode(Reply(ErrorCode.THROTTLING_QUOTA_EXCEEDED)))
        self._waiting[sender] = self._waiting.get(sender, 0) + 1
        is_kept = not isinstance(request, DeliverRecords)
        if not is_kept:
            request = msgspec.structs.replace(request, batch=request.batch[:HEADER_SIZE])
        answer: Promise[bytes] = Promise()

        def judge(barrier: Promise[None]) -> None:
            self._waiting[sender] -= 1
            if not self._waiting[sender]:
                del self._waiting[sender]
            if barrier.error is not None:
                answer.resolve(encode(Reply(ErrorCode.NOT_CONTROLLER)))
            elif reason := self.error(sender, request):
                self._refuse(sender, type(request).__name__, reason)
                code = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
                answer.resolve(encode(Reply(code, message=reason)))
            elif is_kept:
                serve().when_done(lambda served: answer.resolve(served.result()))
            else:
                answer.resolve(encode(Reply(ErrorCode.NOT_LEADER_OR_FOLLOWER)))

        self._engine.read_barrier().when_done(judge)
        return answer

    def _refuse(self, sender: NodeId, kind: str, reason: str) -> None:
        """Count it, and log it once of each sender and kind."""
        self.refused[kind] = self.refused.get(kind, 0) + 1
        self._on_refused(sender, kind, reason)
        if (sender, kind) in self._told:
            return
        if len(self._told) >= TOLD_MAX:  # where nobody proves which node it is
            self._told.clear()
        self._told[sender, kind] = None
        _log.warning("request of another node refused", sender=sender, request=kind, why=reason)

    # ---- rows of leaders ----

    def hear(self, sender: NodeId, rows: Sequence[LeaderRow]) -> bool:
        """Take in the rows that a node sent; False where some should be sent again later.

        Raises:
            RemoteProtocolError: as `LeaderTable.merge`.
        """
        self._leaders.check_epochs(rows)
        image = self._engine.image
        early = self._early.get(sender, {})
        allowed: list[LeaderRow] = []
        has_room = True
        for row in filter(self._leaders.is_news, rows):
            verdict = _verdict(image, row)
            if verdict is _Verdict.TAKEN:
                allowed.append(row)
            elif verdict is not _Verdict.OLD:
                if row.key in early or len(early) < EARLY_ROWS_MAX:
                    early[row.key] = self._round, row
                else:
                    has_room = False
        self._leaders.merge(allowed)
        if early:
            self._early[sender] = early
            self._ask()
        return has_room

    def tick(self) -> None:
        """Let time pass: ask for a barrier again that did not come."""
        if self._early and self._clock.monotonic_ms() >= self._ask_at_ms:
            self._ask()

    def image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        """Take what is allowed now."""
        if self._early and before.topics is not after.topics:
            self._look_again(-1)

    def peer_lost(self, node_id: NodeId) -> None:
        """The connection to a node ended; it sends all of its rows when it is back."""
        self._early.pop(node_id, None)

    def _ask(self) -> None:
        if self._is_asking:
            return
        self._is_asking = True
        asked, self._round = self._round, self._round + 1

        def done(barrier: Promise[None]) -> None:
            self._is_asking = False
            self._ask_at_ms = self._clock.monotonic_ms() + ASK_AGAIN_MS
            if barrier.error is None:
                self._look_again(asked)

        self._engine.read_barrier().when_done(done)

    def _look_again(self, decided: int) -> None:
        """Take the rows that the image allows now; those that came before barrier `decided` was
        asked for are taken now or never."""
        image = self._engine.image
        allowed: list[LeaderRow] = []
        for sender, early in list(self._early.items()):
            for key, (number, row) in list(early.items()):
                verdict = _verdict(image, row)
                if verdict is _Verdict.TAKEN:
                    allowed.append(row)
                elif number > decided and verdict is not _Verdict.OLD:
                    continue
                elif (
                    verdict is _Verdict.REFUSED and row.is_firsthand and self._leaders.is_news(row)
                ):
                    why = row_error(image, row.leader_id, row.topic_id, row.partition)
                    self._refuse(sender, "LeaderUpdate", why)
                del early[key]
            if not early:
                del self._early[sender]
        self._leaders.merge(allowed)


def _verdict(image: MetadataImage, row: LeaderRow) -> _Verdict:
    found = image.partition_by_id(row.topic_id, row.partition)
    if found is None or row.creation_epoch > found.creation_epoch:
        return _Verdict.UNKNOWN
    if 0 <= row.creation_epoch < found.creation_epoch:
        return _Verdict.OLD
    if not row_error(image, row.leader_id, row.topic_id, row.partition):
        return _Verdict.TAKEN
    # Who led up to the change by which it left believes for a while that it still does.
    return _Verdict.OLD if row.leader_epoch <= found.voters_epoch else _Verdict.REFUSED
