"""What the controller refuses other nodes: counted, and told to its log and to its audit file."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from structlog.testing import capture_logs

from raftmq.controller.call_rights import NOBODY_ASKS, CallRefusal
from raftmq.metadata.broker_messages import (
    NODE_ITSELF,
    AdminRequest,
    AlterUsersCall,
    Asker,
    DeleteTopicsCall,
    UserRequest,
    Way,
)
from raftmq.node.composition import NodeCore
from raftmq.rights import Kind, Operation
from raftmq.runtime.clock import RealClock
from raftmq.server.audit import Audit
from raftmq.types import NodeId
from tests.server.auditing import Lines

ALICE = Asker(Way.CLIENT, "User:alice", "10.0.0.9", "CLIENTS", "app")
DELETION = DeleteTopicsCall(names=("orders",))
DENIED = CallRefusal(Operation.DELETE, Kind.TOPIC, "orders")


class Controller:
    """As much of a node as refusals meet."""

    def __init__(self) -> None:
        self.lines = Lines()
        self.audit = Audit(self.lines, RealClock(), cluster="cluster", node=1)
        self.denied: list[tuple[Kind, Operation]] = []
        metrics = SimpleNamespace(deny=lambda *right: self.denied.append(right))
        self.broker = SimpleNamespace(metrics=metrics)

    def refuse(self, request: AdminRequest, asker: Asker | None, refusal: CallRefusal) -> Any:
        """The line of it."""
        core: Any = self
        with capture_logs():
            NodeCore._call_refused(core, NodeId(3), request, asker, refusal)
        (line,) = self.lines.read
        return line


def test_a_call_of_a_client_is_told_with_who_from_where_and_by_which_node() -> None:
    controller = Controller()
    assert controller.refuse(DELETION, ALICE, DENIED) == {
        "kind": "denial",
        "outcome": "denied",
        "principal": "User:alice",
        "host": "10.0.0.9",
        "listener": "CLIENTS",
        "client_id": "app",
        "request": "DeleteTopicsCall",
        "operation": "delete",
        "resource": "topic:orders",
        "by_node": 3,
        "why": "not authorized",
    }
    assert controller.denied == [(Kind.TOPIC, Operation.DELETE)]


def test_a_call_for_nobody_is_the_nodes_own() -> None:
    for asker in (None, NODE_ITSELF):
        line = Controller().refuse(DELETION, asker, NOBODY_ASKS)
        assert "principal" not in line
        assert (line["listener"], line["by_node"]) == ("peer_listener", 3)
        assert line["why"] == NOBODY_ASKS.message


def test_nothing_of_what_a_call_holds_is_written() -> None:
    controller = Controller()
    key = b"hunter2" * 5
    user = UserRequest(
        user="bob", mechanism=1, iterations=4_096, salt=key, stored_key=key, server_key=key
    )
    controller.refuse(AlterUsersCall(users=(user,), secret=key), ALICE, NOBODY_ASKS)
    assert b"hunter2" not in controller.lines.raw[0]
    assert b"bob" not in controller.lines.raw[0]


def test_a_command_that_a_node_may_not_send_is_told() -> None:
    controller: Any = Controller()
    controller._node_refused = partial(NodeCore._node_refused, controller)
    NodeCore._command_refused(controller, NodeId(3), "DeleteTopics", "the controller alone may")
    (line,) = controller.lines.read
    assert (line["kind"], line["request"], line["by_node"]) == ("denial", "DeleteTopics", 3)
    assert (line["listener"], line["why"]) == ("peer_listener", "the controller alone may")
    assert "principal" not in line
