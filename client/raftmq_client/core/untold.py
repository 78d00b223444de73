"""Records that failed, or whose outcome is unknown, and whose sender has not heard of it.

A receipt that nobody looks at tells nothing, so a producer counts what it could not deliver until
somebody hears: by awaiting the receipt, by its `error` or `outcome`, or by `on_delivery`. What is
left when the producer ends is raised as one group. Counts, not records: a producer whose topic is
gone may run for weeks. Pure.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from attrs import define, field

from raftmq.types import TopicPartition
from raftmq_client.errors import ClientError, Outcome, UndeliveredError

LOG: Final = logging.getLogger("raftmq_client.producer")
_KINDS_MAX: Final = 100
"""Of partition and error; the rest is counted by error alone."""


@define(eq=False)
class Loss:
    """Records that one kind of error ended."""

    where: str
    error: ClientError
    count: int = 0


@define(eq=False)
class Untold:
    """What one producer could not deliver."""

    _losses: dict[tuple[Any, ...], Loss] = field(factory=dict)

    def add(self, key: TopicPartition, error: ClientError, count: int) -> Loss:
        """So many records ended by this error; the Loss to be told of each that is heard of."""
        kind = (type(error), getattr(error, "number", None), error.outcome)
        where = key.topic if key.partition < 0 else str(key)
        known = self._losses.get((key, *kind))
        if known is None and len(self._losses) >= _KINDS_MAX:
            key, where = TopicPartition("", -1), "others"
            known = self._losses.get((key, *kind))
        if known is None:
            known = self._losses[(key, *kind)] = Loss(where, error)
            LOG.warning("records of %s are not delivered: %s", ascii(where), ascii(str(error)))
        known.count += count
        return known

    @property
    def failed(self) -> int:
        """Records that are certainly not in the log."""
        return self._sum(Outcome.FAILED)

    @property
    def unknown(self) -> int:
        """Records that may be in the log."""
        return self._sum(Outcome.UNKNOWN)

    def _sum(self, outcome: Outcome) -> int:
        return sum(loss.count for loss in self._losses.values() if loss.error.outcome is outcome)

    def take(self) -> UndeliveredError | None:
        """All of it as one error, once."""
        losses = [loss for loss in self._losses.values() if loss.count > 0]
        self._losses = {}
        errors = []
        for loss in losses:
            error = loss.error.fresh()
            error.records = loss.count
            error.add_note(f"{loss.count} records of {loss.where}")
            errors.append(error)
        if not errors:
            return None
        total = sum(error.records for error in errors)
        return UndeliveredError(f"{total} records were not delivered", errors)
