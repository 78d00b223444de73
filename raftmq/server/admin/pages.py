"""Pages of the admin port: what they share, and those of nodes, leaders, the balance and topics.

`GET /nodes` shows every node with its role and what is being replaced; `POST /nodes/replace` takes
`{"old_id": 1, "new_id": 4}`, with `even_if_alive` and `dry_run`, and answers when the controller
has decided. What happens then is the cluster's work, shown by `GET /nodes`.

`POST /nodes/change` takes `{"ids": [4], "change": "drain"}`, with `voters` and `dry_run`: what
`raftmq node add`, `drain`, `remove`, `cordon` and `maintenance` ask for; `GET /moves` shows the
moves of replicas that are planned or under way.

`GET /leaders` shows every partition with its leader, preferred leader and in-sync replicas;
`POST /leaders/transfer` takes `{"topic": "t", "partition": 0, "to": 2}` and answers when node 2
leads, or at its timeout. A transfer is first a metadata command that puts the node in front of the
partition's replicas (it becomes the preferred leader, or balancing would undo the transfer), and
then a request to the present leader; only to a replica in sync, and by a command that names the
state it was computed from.

`POST /balance` takes `{"dry_run": true}` and answers with each move, its reason and its bytes (-1
where nobody knows them), in a dry run also with what the partition's group goes through. Without
`dry_run` it answers once the moves are planned; `GET /moves` shows what becomes of them. With
`"onto": [4]` only these brokers gain replicas.

`GET /topics?name=orders` shows every partition of a topic that there is, with its state, and what
is left of those that are gone; also who has lately written to those that are listed no more, as far
as this node led them, what is pending in those of a delay topic that it leads, and how far this
node's indexes of the topic's views are. `POST /topics/shrink` takes `{"topic": "orders",
"partitions": 4}`, with `view`, `now`, `force`, `keep` and `dry_run`, and answers when the
controller has decided. What happens then is the cluster's work.

Any node can be asked: it reads its own copy of metadata and leader table, which is the same
everywhere, give or take a moment.

Invariants: a body is read up to a limit; a page that acts takes only `application/json`, which no
page of another site can make a browser send unasked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import trio
from attrs import asdict
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from raftmq.controller.control_plane import ControlPlane
from raftmq.controller.leaders import preference_error
from raftmq.controller.moves import Bounds, Survey, move_rows
from raftmq.controller.node_changes import changes_under_way
from raftmq.controller.replacement import progress
from raftmq.controller.topic_validation import no_such_topic
from raftmq.errors import ErrorCode, KafkaError, RemoteProtocolError
from raftmq.foreign import decode_foreign
from raftmq.metadata.broker_messages import (
    AdminRequest,
    Asker,
    BalanceCall,
    ChangeNodesCall,
    Outcome,
    PreferLeaderCall,
    ReplaceNodeCall,
    ShrinkTopicCall,
)
from raftmq.metadata.commands import ReassignPartition
from raftmq.metadata.image import PartitionImage, TopicImage
from raftmq.metadata.voters import metadata_target, voters_wanted
from raftmq.promise import Promise
from raftmq.raft.membership import Configuration
from raftmq.server.audit import Audit, AuditRow, Who, outcome_of
from raftmq.types import NodeId

BODY_BYTES_MAX: Final = 4 << 10
POLL_S: Final = 0.02
ASK_AGAIN_S: Final = 0.5
TIMEOUT_MS_MAX: Final = 60_000
WHO: Final = "raftmq.who"
"""Where a request's scope says who sent it."""
WAY: Final = "raftmq.way"
"""Where it says whether rules judge that one, or the port has let it do everything."""
_JSON: Final = "application/json"
_UNTOLD: Final = frozenset(("timeout_ms", "dry_run"))

Page: TypeAlias = Callable[[Request], Awaitable[Response]]
_Value = TypeVar("_Value")
_Wanted = TypeVar("_Wanted", bound=msgspec.Struct)


def answer(body: dict[str, Any], status_code: int = 200) -> Response:
    """A JSON answer."""
    content = msgspec.json.encode(body)
    return Response(content, status_code=status_code, media_type=_JSON)


def too_large(bytes_max: int) -> Response:
    """The answer to a body above its limit."""
    return answer({"error": f"more than {bytes_max} bytes"}, 413)


async def read_body(request: Request, bytes_max: int) -> bytes | None:
    """Read a body; None, and no more of it, once it is above `bytes_max`."""
    body = b""
    async with aclosing(request.stream()) as stream:
        async for piece in stream:
            body += piece
            if len(body) > bytes_max:
                return None
    return body


def who_of(request: Request) -> Who:
    """Who sent a request, as the port's access found."""
    who: Who = request.scope[WHO]
    return who


def asker_of(request: Request) -> Asker:
    """On whose behalf the controller is asked for what a request wants."""
    who = who_of(request)
    return Asker(request.scope[WAY], who.principal or "", who.host, who.listener, who.client_id)


def action_page(
    kind: type[_Wanted], act: Callable[[_Wanted, Asker], Awaitable[dict[str, Any]]], audit: Audit
) -> Page:
    """A page that reads a `kind` from its body and answers what `act` makes of it, and of whoever
    asks; `audit` is told what was asked for, and the code of the answer."""

    def tell(request: Request, wanted: _Wanted | None, code: str) -> None:
        """`wanted` is None where a body says nothing that can be asked for."""
        fields = {} if wanted is None else msgspec.structs.asdict(wanted)
        said = {name: value for name, value in fields.items() if name not in _UNTOLD}
        detail = " ".join(f"{name}={value}" for name, value in said.items())
        audit.administration(
            who_of(request),
            f"{request.method} {request.url.path}",
            outcome_of({code}),
            [AuditRow("cluster", detail, code)],
            is_dry_run=bool(getattr(wanted, "dry_run", False)),
        )

    decoder = msgspec.json.Decoder(kind)

    async def page(request: Request) -> Response:
        wanted = await _read_wanted(request, decoder)
        if isinstance(wanted, Response):
            tell(request, None, ErrorCode.INVALID_REQUEST.name)
            return wanted
        code = ErrorCode.UNKNOWN_SERVER_ERROR.name
        try:
            result = await act(wanted, asker_of(request))
            code = result.get("code", code)
        finally:
            tell(request, wanted, code)
        return answer(result)

    return page


async def _read_wanted(
    request: Request, decoder: msgspec.json.Decoder[_Wanted]
) -> _Wanted | Response:
    """What a request's body asks for; the answer to one that asks for nothing."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != _JSON:
        return answer({"error": f"the body must be {_JSON}"}, 415)
    body = await read_body(request, BODY_BYTES_MAX)
    if body is None:
        return too_large(BODY_BYTES_MAX)
    try:
        return decode_foreign("body", decoder.decode, body)
    except RemoteProtocolError as error:
        return answer({"error": str(error)}, 400)


def within_limits(timeout_ms: int) -> int:
    """A timeout that a request asks for, as far as it is granted."""
    return max(1, min(timeout_ms, TIMEOUT_MS_MAX))


async def value_of(promise: Promise[_Value]) -> _Value:
    """Wait for a promise; raises what it fails with."""
    done = trio.Event()
    promise.when_done(lambda _promise: done.set())
    await done.wait()
    return promise.result()


async def _decided(
    control: ControlPlane, call: AdminRequest, asker: Asker
) -> tuple[dict[str, Any], list[Outcome]]:
    """What the controller says to a call, as pages tell it, and the rows that came with it; none
    where it refused."""
    try:
        verdict, *rows = await value_of(control.call(call, asker))
    except KafkaError as error:
        return {"code": error.code.name, "message": error.message}, []
    return _verdict(verdict), rows


def _verdict(row: Outcome) -> dict[str, Any]:
    return {"code": ErrorCode(row.code).name, "message": row.message or ""}


class ReplaceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /nodes/replace`."""

    old_id: int
    new_id: int
    even_if_alive: bool = False
    dry_run: bool = False
    timeout_ms: int = 10_000


class ChangeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /nodes/change`; `voters` None: as many as the change makes sensible."""

    ids: tuple[int, ...] = ()
    change: str = ""
    voters: int | None = None
    dry_run: bool = False
    timeout_ms: int = 10_000


class NodesPage:
    """What one node shows and does on these pages."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._survey = Survey()  # kept up, since a look at every partition costs much

    def show(self) -> dict[str, Any]:
        """All nodes, and what is being replaced."""
        engine, leaders = self._control.engine, self._control.leaders
        image = engine.image
        configuration = engine.configuration or Configuration()
        survey = self._seen()
        led: dict[NodeId, int] = {}
        for topic in image.topics_by_id():
            for partition in topic.held:
                row = leaders.of(topic.topic_id, partition)
                if row is not None:
                    led[row.leader_id] = led.get(row.leader_id, 0) + 1
        node_ids = sorted({*image.brokers, *(m.node_id for m in configuration.members)})
        controller = engine.controller_id
        return {
            "cluster_id": image.cluster_id,
            "controller_id": -1 if controller is None else controller,
            "nodes": [
                {
                    **self._describe(node_id, configuration),
                    "leaders": led.get(node_id, 0),
                    "replicas": len(survey.named.get(node_id, ())),
                }
                for node_id in node_ids
            ],
            "replacements": [asdict(row) for row in progress(image, engine.configuration, leaders)],
            "voters_wanted": voters_wanted(image, engine.first_voters),
            "is_voting_settled": metadata_target(configuration, image, engine.first_voters) is None,
            "changes": [
                {**asdict(row), "is_empty": row.is_empty, "is_idle": row.is_idle}
                for row in changes_under_way(survey, configuration, leaders, controller)
            ],
        }

    def _describe(self, node_id: NodeId, configuration: Configuration) -> dict[str, Any]:
        broker = self._control.engine.image.brokers.get(node_id)
        role = "none"
        if any(voter.node_id == node_id for voter in configuration.voters):
            role = "voter"
        elif any(learner.node_id == node_id for learner in configuration.learners):
            role = "learner"
        if broker is None:
            return {"node_id": node_id, "role": role, "state": "never seen"}
        addresses = {e.name: f"{e.host}:{e.port}" for e in broker.endpoints}
        return {
            "node_id": node_id,
            "role": role,
            "state": "fenced" if broker.is_fenced else "live",
            "node_state": broker.state.value,
            "storage_id": f"{broker.storage_id:016x}",
            "rack": broker.rack,
            **{f"{name}_address": address for name, address in addresses.items()},
        }

    async def replace(self, wanted: ReplaceRequest, asker: Asker) -> dict[str, Any]:
        """Have the controller judge a replacement, and begin it unless only asked."""
        call = ReplaceNodeCall(
            old_id=wanted.old_id,
            new_id=wanted.new_id,
            even_if_alive=wanted.even_if_alive,
            dry_run=wanted.dry_run,
            timeout_ms=within_limits(wanted.timeout_ms),
        )
        return await self._asked(call, asker)

    async def change(self, wanted: ChangeRequest, asker: Asker) -> dict[str, Any]:
        """Have the controller judge a change of nodes, and make it unless only asked."""
        call = ChangeNodesCall(
            node_ids=wanted.ids,
            change=wanted.change,
            voters=wanted.voters,
            dry_run=wanted.dry_run,
            timeout_ms=within_limits(wanted.timeout_ms),
        )
        return await self._asked(call, asker)

    async def _asked(self, call: AdminRequest, asker: Asker) -> dict[str, Any]:
        """The controller's verdict, and the steps that it names."""
        verdict, steps = await _decided(self._control, call, asker)
        return {**verdict, "steps": [step.message or "" for step in steps]}

    def moves(self) -> dict[str, Any]:
        """The moves of replicas that are planned, and those that are under way."""
        leaders = self._control.leaders
        survey = self._seen()
        return {"moves": [asdict(row) for row in move_rows(survey, leaders, Bounds())]}

    def _seen(self) -> Survey:
        self._survey.see(self._control.engine.image, (), 0.0)
        return self._survey


def nodes_routes(nodes: NodesPage, audit: Audit) -> list[Route]:
    """The pages' routes."""

    async def show(_request: Request) -> Response:
        return answer(nodes.show())

    async def show_moves(_request: Request) -> Response:
        return answer(nodes.moves())

    return [
        Route("/nodes", show, methods=["GET"]),
        Route(
            "/nodes/replace", action_page(ReplaceRequest, nodes.replace, audit), methods=["POST"]
        ),
        Route("/nodes/change", action_page(ChangeRequest, nodes.change, audit), methods=["POST"]),
        Route("/moves", show_moves, methods=["GET"]),
    ]


class TransferRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /leaders/transfer`."""

    topic: str
    partition: int
    to: int
    timeout_ms: int = 10_000


class LeadersPage:
    """What one node shows and does on these pages."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    def show(self) -> dict[str, Any]:
        """All partitions with their leaders and preferred leaders."""
        control = self._control
        rows = []
        for topic in sorted(control.engine.image.topics_by_id(), key=lambda t: t.name):
            for partition in topic.held:
                row = control.leaders.of(topic.topic_id, partition)
                rows.append(
                    {
                        "topic": topic.name,
                        "partition": partition.index,
                        "leader": None if row is None else row.leader_id,
                        "leader_epoch": None if row is None else row.leader_epoch,
                        "preferred": partition.preferred_leader,
                        "replicas": list(partition.replicas),
                        "isr": [] if row is None else list(row.isr),
                    }
                )
        return {"partitions": rows}

    async def transfer(self, wanted: TransferRequest, asker: Asker) -> dict[str, Any]:
        """Make a node the leader of a partition, and its preferred one."""
        try:
            with trio.fail_after(within_limits(wanted.timeout_ms) / 1e3):
                return {"code": ErrorCode.NONE.name, "message": await self._transfer(wanted, asker)}
        except KafkaError as error:
            return {"code": error.code.name, "message": error.message}
        except trio.TooSlowError:
            return {
                "code": ErrorCode.REQUEST_TIMED_OUT.name,
                "message": f"node {wanted.to} does not lead yet",
            }

    async def _transfer(self, wanted: TransferRequest, asker: Asker) -> str:
        control = self._control
        while True:
            topic, partition = self._find(wanted)
            to = NodeId(wanted.to)
            row = control.leaders.of(topic.topic_id, partition)
            leads = row is not None and row.leader_id == to
            if leads and partition.preferred_leader == to:
                return f"node {to} leads {topic.name}-{partition.index}"
            if (error := preference_error(partition, row, to)) is not None:
                raise error
            if partition.preferred_leader != to and not await self._prefer(wanted, asker):
                continue  # computed from a state that has changed meanwhile
            if not leads:
                control.move_leadership(topic.topic_id, partition.index, to)
                with trio.move_on_after(ASK_AGAIN_S):
                    await self._until_led(topic, partition, to)

    def _find(self, wanted: TransferRequest) -> tuple[TopicImage, PartitionImage]:
        image = self._control.engine.image
        topic = image.topics.get(wanted.topic)
        partition = None if topic is None else topic.partition(wanted.partition)
        why = f"there is no partition {wanted.topic}-{wanted.partition}"
        if topic is None:
            raise no_such_topic(image, wanted.topic, why)
        if partition is None:
            raise KafkaError(why, code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        return topic, partition

    async def _prefer(self, wanted: TransferRequest, asker: Asker) -> bool:
        """Put a node in front of a partition's replicas; False when the state has moved on."""
        call = PreferLeaderCall(
            topic=wanted.topic,
            partition=wanted.partition,
            to=wanted.to,
            timeout_ms=within_limits(wanted.timeout_ms),
        )
        try:
            (outcome,) = await value_of(self._control.call(call, asker))
        except KafkaError as error:
            if error.code is ErrorCode.UNSUPPORTED_VERSION:
                return await self._order(wanted)
            raise
        if outcome.code is not ErrorCode.NONE:
            raise KafkaError(outcome.message or "", code=outcome.code)
        return True

    async def _order(self, wanted: TransferRequest) -> bool:
        """The same where the controller is of a version that has no such call, and takes the
        command from any node."""
        engine = self._control.engine
        topic, partition = self._find(wanted)
        to = NodeId(wanted.to)
        others = tuple(node_id for node_id in partition.replicas if node_id != to)
        promise = engine.propose(
            ReassignPartition(
                topic_id=topic.topic_id, partition=partition.index, replicas=(to, *others)
            ),
            expected_version=engine.image.version,
        )
        try:
            await value_of(promise)
        except KafkaError as error:
            if error.code is ErrorCode.INVALID_UPDATE_VERSION:
                return False
            raise
        return True

    async def _until_led(self, topic: TopicImage, partition: PartitionImage, to: NodeId) -> None:
        while True:
            row = self._control.leaders.of(topic.topic_id, partition)
            if row is not None and row.leader_id == to:
                return
            await trio.sleep(POLL_S)


def leaders_routes(leaders: LeadersPage, audit: Audit) -> list[Route]:
    """The pages' routes."""

    async def show(_request: Request) -> Response:
        return answer(leaders.show())

    return [
        Route("/leaders", show, methods=["GET"]),
        Route(
            "/leaders/transfer",
            action_page(TransferRequest, leaders.transfer, audit),
            methods=["POST"],
        ),
    ]


ONTO_MAX: Final = 1_000


class BalanceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /balance`."""

    dry_run: bool = False
    onto: tuple[int, ...] | None = None
    timeout_ms: int = 30_000


class BalancePage:
    """What one node does on this page."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def balance(self, wanted: BalanceRequest, asker: Asker) -> dict[str, Any]:
        """Have the controller plan a balance, and submit it unless only asked."""
        call = BalanceCall(
            dry_run=wanted.dry_run,
            onto=None if wanted.onto is None else wanted.onto[:ONTO_MAX],
            timeout_ms=within_limits(wanted.timeout_ms),
        )
        verdict, rows = await _decided(self._control, call, asker)
        return {**verdict, "moves": [_told(row) for row in rows]}


def _told(row: Outcome) -> dict[str, Any]:
    move: dict[str, Any] = {} if row.move is None else msgspec.to_builtins(row.move)
    return {**move, **_verdict(row)}


def balance_routes(page: BalancePage, audit: Audit) -> list[Route]:
    """The page's route."""
    return [Route("/balance", action_page(BalanceRequest, page.balance, audit), methods=["POST"])]


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

    async def shrink(self, wanted: ShrinkRequest, asker: Asker) -> dict[str, Any]:
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
        verdict, rows = await _decided(self._control, call, asker)
        return {
            **verdict,
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
