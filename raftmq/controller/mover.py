"""The controller's part in moves of replicas: what it remembers for its term, and what it proposes.

Decides nothing: `moves.py` names the commands that are due, from the image, the leaders and what
this controller saw itself, which is since when each broker has been down, on its own monotonic
clock, and since when a move has had its target. All of that begins anew with a new controller: a
broker that was down for long before is given the whole time again. Also ends replacements that have
nothing left to do.

Invariants: while proposals are on their way none is made; a look is taken only where something has
changed, or after a while; from `LEVEL_OF_MOVES` on each command is compared with the partition that
it is about, and no longer with the whole state, which reports would change all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import structlog
from attrs import evolve, frozen

from raftmq.controller.leaders import LeaderTable
from raftmq.controller.moves import (
    Bounds,
    DeadBrokers,
    Figures,
    Step,
    Survey,
    figures,
    find_dead_brokers,
    next_moves,
)
from raftmq.controller.replacement import next_end
from raftmq.errors import ErrorCode
from raftmq.logs import RateLimitedLog
from raftmq.metadata.commands import AnyCommand, Origin
from raftmq.metadata.config_keys import MOVES_MAX, REPLACE_AFTER
from raftmq.metadata.configs import broker_value
from raftmq.metadata.engine import MetadataEngine
from raftmq.metadata.image import EMPTY_IMAGE, LEVEL_OF_MOVES, MetadataImage
from raftmq.metadata.results import MoveOutcomes
from raftmq.promise import Promise
from raftmq.types import NodeId, StorageId

LOOK_AGAIN_MS: Final = 500.0
LINES_MAX: Final = 50

_log = RateLimitedLog(structlog.get_logger("raftmq.controller"), lines_max=LINES_MAX)


@frozen(slots=True)
class _Down:
    """A broker that is down: since when this controller has known it, and its storage then."""

    since_ms: float
    storage_id: StorageId


def replace_after_ms(text: str | None) -> float | None:
    """What `replica.replace.after.ms` says; None: dead brokers are not replaced."""
    if text is None or text.strip().lower() == "off" or int(text) < 0:
        return None
    return float(text)


class Mover:
    """Moves of one controller's term."""

    def __init__(
        self,
        node_id: NodeId,
        engine: MetadataEngine,
        leaders: LeaderTable,
        static: Mapping[str, str],
        limit_of: Callable[[NodeId], int],
        is_silent: Callable[[NodeId, int, float], bool],
    ) -> None:
        """`static` are the Kafka settings of this node's file, `limit_of` tells how many replicas
        a broker has room for, `is_silent` whether one of some epoch has not been heard for long."""
        self._node_id = node_id
        self._engine = engine
        self._leaders = leaders
        self._static = static
        self._is_silent = is_silent
        self.survey = Survey()
        self.bounds = Bounds(limit_of=limit_of)
        self.dead_brokers = DeadBrokers()
        self._replace_after_ms: float | None = None
        self._image: MetadataImage = EMPTY_IMAGE
        self._down: dict[NodeId, _Down] = {}
        self._emptied: dict[NodeId, None] = {}
        self._under_way = 0
        self._seen: tuple[object, ...] = ()
        self._look_at_ms = 0.0

    def tick(self, now_ms: float) -> None:
        """Keep up with the image; propose what is due."""
        image = self._engine.image
        configuration = self._engine.configuration
        if configuration is None:
            return  # metadata does not run on Raft here
        self._follow(image, now_ms)
        if self._under_way:
            return
        seen = image.structure_version, self._leaders.version, self.bounds
        if seen == self._seen and now_ms < self._look_at_ms:
            return
        self._seen, self._look_at_ms = seen, now_ms + LOOK_AGAIN_MS
        expected = -1 if image.level >= LEVEL_OF_MOVES else image.structure_version
        steps = next_moves(self.survey, self._leaders, self.bounds, now_ms)
        for step in steps:
            self._propose(step.command, expected, partial(self._tell, step))
        if steps:
            return
        end = next_end(
            image,
            configuration,
            self.survey.has_any,
            lambda node_id, epoch: self._is_silent(node_id, epoch, now_ms),
        )
        if end is not None:
            self._propose(end, expected, lambda _result: None)

    def figures(self) -> dict[Origin, Figures]:
        """How many moves there are, by origin."""
        return figures(self.survey, self._leaders)

    # ---- what is seen ----

    def _follow(self, image: MetadataImage, now_ms: float) -> None:
        before, self._image = self._image, image
        if before.configs is not image.configs or before is EMPTY_IMAGE:
            self._read_configs(image)
        if before.brokers is not image.brokers:
            self._watch_brokers(image, now_ms)
        self.survey.see(image, self.bounds.dead, now_ms)
        if self._down or self.dead_brokers != DeadBrokers():
            self._judge(now_ms)

    def _read_configs(self, image: MetadataImage) -> None:
        def value(name: str) -> str | None:
            return broker_value(image, self._node_id, self._static, name)

        self._replace_after_ms = replace_after_ms(value(REPLACE_AFTER))
        moves_max = int(value(MOVES_MAX) or Bounds().moves_max)
        self.bounds = evolve(self.bounds, moves_max=moves_max)

    def _watch_brokers(self, image: MetadataImage, now_ms: float) -> None:
        for node_id in sorted({*image.brokers, *self._down}):
            broker, down = image.brokers.get(node_id), self._down.get(node_id)
            if broker is not None and broker.is_fenced:
                if down is None:
                    self._down[node_id] = _Down(now_ms, broker.storage_id)
                    self._emptied.pop(node_id, None)
            elif down is not None:
                del self._down[node_id]
                if broker is not None and broker.storage_id != down.storage_id:
                    self._emptied[node_id] = None
        self.bounds = evolve(self.bounds, emptied=tuple(self._emptied))

    def _judge(self, now_ms: float) -> None:
        """Which brokers are dead by now, and whether anything is done about it."""
        dead_brokers = DeadBrokers()
        if self._image.level >= LEVEL_OF_MOVES:
            since_ms = {node_id: down.since_ms for node_id, down in self._down.items()}
            dead_brokers = find_dead_brokers(self.survey, since_ms, self._replace_after_ms, now_ms)
        before, self.dead_brokers = self.dead_brokers, dead_brokers
        if dead_brokers == before:
            return
        for node_id in dead_brokers.dead:
            if node_id not in before.dead:
                count = len(self.survey.named.get(node_id, ()))
                _log.warning("dead broker replaced", broker=node_id, replicas=count)
        if dead_brokers.held_back and dead_brokers.held_back != before.held_back:
            _log.warning("dead brokers not replaced", reason=dead_brokers.held_back)
        self.bounds = evolve(self.bounds, dead=dead_brokers.dead)
        self.survey.see(self._image, dead_brokers.dead, now_ms)

    # ---- what is proposed ----

    def _propose(
        self, command: AnyCommand, expected_version: int, tell: Callable[[Any], None]
    ) -> None:
        self._under_way += 1

        def done(promise: Promise[Any]) -> None:
            # Whatever came of it: the next tick looks at the state again.
            self._under_way -= 1
            self._seen = ()
            if promise.error is None:
                tell(promise.result())

        self._engine.propose(
            command, expected_version=expected_version, may_resend=False
        ).when_done(done)

    def _tell(self, step: Step, result: object) -> None:
        if isinstance(result, MoveOutcomes) and result.moves[0].code is not ErrorCode.NONE:
            return
        fields = {
            "topic": self._image.topic_names.get(step.key[0]),
            "partition": step.key[1],
            "origin": str(step.origin),
            "before": list(step.before),
            "after": list(step.after),
        }
        if step.what == "begun":
            _log.info("move begun", **fields)
        elif step.what == "changed":
            _log.info("move changed", **fields)
        elif step.what == "cancelled":
            _log.info("move cancelled", **fields)
        else:
            _log.warning("plan dropped", reason=step.reason, **fields)
