"""Pages of the admin port about topics: their partitions that are listed no more, and shrinking.

`GET /topics?name=orders` shows every partition of a topic that there is, with its state, and what
is left of those that are gone; also who has lately written to those that are listed no more, as far
as this node led them, what is pending in those of a delay topic that it leads, and how far this
node's indexes of the topic's views are. `POST /topics/shrink` takes `{"topic": "orders",
"partitions": 4}`, with `view`, `now`, `force`, `keep` and `dry_run`, and answers when the
controller has decided. What happens then is the cluster's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from raftmq.controller.control_plane import ControlPlane
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import ShrinkTopicCall
from raftmq.metadata.image import PartitionImage, TopicImage
from raftmq.server.admin.pages import action_page, answer, value_of, within_limits
from raftmq.server.audit import Audit


class ShrinkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /topics/shrink`."""

    topic: str
    partitions: int
    view: str = ""
    now: bool = False
    force: bool = False
    keep: bool = False
    dry_run: bool = False
    timeout_ms: int = 10_000


class TopicsPage:
    """What one node shows and does on these pages."""

    def __init__(
        self,
        control: ControlPlane,
        writers_of: Callable[[TopicImage, int], list[dict[str, Any]]],
        delays_of: Callable[[str], list[dict[str, Any]]],
        fills_of: Callable[[str], Iterable[dict[str, Any]]],
    ) -> None:
        """`writers_of` tells who writes to a number of a topic that it lists no more, `delays_of`
        what waits in a delay topic, `fills_of` how far the indexes of a topic's views are here."""
        self._control = control
        self._fills_of = fills_of
        self._delays_of = delays_of
        self._writers_of = writers_of

    def show(self, name: str) -> dict[str, Any] | None:
        """A topic with all that there is of it; None when there is none of that name."""
        image = self._control.engine.image
        topic = image.topics.get(name)
        if topic is None:
            return None
        view = image.view_of(topic.topic_id)
        return {
            "topic": topic.name,
            "topic_id": str(topic.topic_id),
            "aliases": [str(alias) for alias in topic.aliases],
            "view": None if view is None else view.name,
            "partitions": [self._row(topic, partition) for partition in topic.held],
            "gone": [
                {"partition": number, "end_offset": known.end_offset}
                for number, known in sorted(topic.numbers.items())
                if topic.partition(number) is None
            ],
            "delays": self._delays_of(name),
            "conditions": {v.name: v.condition for v in image.conditions_of(topic.topic_id)},
            "views": [{"node": self._control.node_id, **row} for row in self._fills_of(name)],
        }

    def _row(self, topic: TopicImage, partition: PartitionImage) -> dict[str, Any]:
        row = self._control.leaders.of(topic.topic_id, partition)
        known = topic.numbers.get(partition.index)
        return {
            "partition": partition.index,
            "state": partition.state.value,
            "leader": None if row is None else row.leader_id,
            "leader_epoch": None if row is None else row.leader_epoch,
            "replicas": list(partition.replicas),
            "isr": [] if row is None else list(row.isr),
            "sealed_end": None if known is None or partition.takes_records else known.end_offset,
            "writers": self._writers_of(topic, partition.index),
        }

    async def shrink(self, wanted: ShrinkRequest) -> dict[str, Any]:
        """Have the controller judge a shrink, and begin it unless only asked."""
        call = ShrinkTopicCall(
            name=wanted.topic,
            partitions=wanted.partitions,
            view=wanted.view,
            now=wanted.now,
            force=wanted.force,
            keep=wanted.keep,
            dry_run=wanted.dry_run,
            timeout_ms=within_limits(wanted.timeout_ms),
        )
        try:
            verdict, *rows = await value_of(self._control.call(call))
        except KafkaError as error:
            return {"code": error.code.name, "message": error.message, "steps": [], "groups": []}
        return {
            "code": ErrorCode(verdict.code).name,
            "message": verdict.message or "",
            "steps": [row.message or "" for row in rows if row.name == "step"],
            "groups": [row.message or "" for row in rows if row.name == "group"],
        }


def topics_routes(page: TopicsPage, audit: Audit) -> list[Route]:
    """The pages' routes."""

    async def show(request: Request) -> Response:
        name = request.query_params.get("name", "")
        found = page.show(name)
        if found is None:
            return answer({"error": f"there is no topic {name!r}"}, 404)
        return answer(found)

    return [
        Route("/topics", show, methods=["GET"]),
        Route("/topics/shrink", action_page(ShrinkRequest, page.shrink, audit), methods=["POST"]),
    ]
