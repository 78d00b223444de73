"""A node that starts without a majority says whose vote it lacks and what an operator may do."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs
from trio.testing import MockClock

from raftmq.node.composition import NO_MAJORITY_AGAIN_S, NO_MAJORITY_S
from raftmq.node.node import ADMIN_WAIT_S, Node
from raftmq.raft.membership import Configuration
from raftmq.runtime.loop import TrioTasks
from raftmq.types import NodeId, ReplicaId, StorageId


def _node(controller: int | None) -> Any:
    voters = tuple(ReplicaId(NodeId(n), StorageId(n)) for n in (1, 2, 3))
    node: Any = Node.__new__(Node)
    node.node_id = NodeId(1)
    node.control = SimpleNamespace(lifecycle=SimpleNamespace(refusal=None, is_replaced=False))
    node.engine = SimpleNamespace(controller_id=controller, configuration=Configuration(voters))
    node.metadata_replica = None
    node.tasks = TrioTasks()
    node.plane = SimpleNamespace(
        links=SimpleNamespace(is_connected=lambda n: n == 3),
        clock=SimpleNamespace(monotonic_ms=lambda: trio.current_time() * 1e3),
    )
    return node


async def _wait(node: Any, seconds: float) -> list[Any]:
    with capture_logs() as logs, trio.move_on_after(seconds):
        await node._until(lambda: False)
    return logs


async def test_it_is_told_after_a_while_and_then_seldom(autojump_clock: MockClock) -> None:
    assert await _wait(_node(None), NO_MAJORITY_S - 1) == []
    [told] = await _wait(_node(None), NO_MAJORITY_AGAIN_S)
    assert told["event"] == "no majority of the metadata group"
    assert (told["voters"], told["connected"]) == ([1, 2, 3], [1, 3])
    assert "raftmq recover --unsafe" in told["hint"]
    assert len(await _wait(_node(None), NO_MAJORITY_S + NO_MAJORITY_AGAIN_S + 1)) == 2


@pytest.mark.parametrize(("storage", "has_vote"), [(1, True), (9, False)])
async def test_a_node_that_lost_its_journal_says_that_it_has_no_vote(
    storage: int, has_vote: bool, autojump_clock: MockClock
) -> None:
    """As the only voter it would else name itself as connected, and nothing as missing."""
    node = _node(None)
    node.metadata_replica = SimpleNamespace(
        self_id=ReplicaId(NodeId(1), StorageId(storage)),
        voters=node.engine.configuration.voters,
    )
    [told] = await _wait(node, NO_MAJORITY_S + 1)
    assert ("state.journal" not in told["hint"]) is has_vote
    assert "raftmq recover --unsafe" in told["hint"]


async def test_a_start_that_only_takes_long_says_nothing(autojump_clock: MockClock) -> None:
    assert await _wait(_node(2), 100) == []


async def test_a_node_that_knows_no_cluster_says_whom_it_waits_for(
    autojump_clock: MockClock,
) -> None:
    node = _node(None)
    node.config = SimpleNamespace(peers=[SimpleNamespace(id=n) for n in (1, 2, 4)])
    node.formation = SimpleNamespace(
        chosen=None, mismatches={}, heard_from=[2, 3], tick=lambda _now_ms: None
    )
    with capture_logs() as logs, trio.move_on_after(NO_MAJORITY_S + 1):
        await node._form()
    [told] = logs
    assert told["event"] == "no cluster yet"
    assert (told["voters"], told["connected"]) == ([1, 2, 4], [3])


async def test_nobody_counts_on_a_node_that_still_compiles_codecs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once registered it may be made a leader at once, and its loop had three turns for one."""
    release = threading.Event()
    monkeypatch.setattr("raftmq.node.node.warm_up", lambda: release.wait(10))

    async def formed() -> None:
        """The first voters are known."""

    node = _node(None)
    node._is_warm = trio.Event()
    node.plane.on_tick = []
    node.control.lifecycle.is_current = False
    node._form = formed
    node._open_metadata = lambda: None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node._warm_up)
            nursery.start_soon(node.join)
            await trio.testing.wait_all_tasks_blocked()
            assert node.plane.on_tick == [], "what ticks registers the broker"
            release.set()
            with trio.fail_after(30):
                while not node.plane.on_tick:
                    await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    finally:
        release.set()


class _ImportedError(Exception):
    """The admin pages are wanted."""


@pytest.mark.parametrize("is_asked", [True, False])
async def test_admin_pages_are_imported_when_asked_for_or_later(
    is_asked: bool, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their import takes the interpreter from the first clients."""

    def imported(_name: str) -> None:
        raise _ImportedError

    monkeypatch.setattr("raftmq.node.node.import_module", imported)
    node = _node(1)
    with socket.create_server(("127.0.0.1", 0)) as node._admin_sock:
        asking = socket.create_connection(node._admin_sock.getsockname()) if is_asked else None
        began = trio.current_time()
        with pytest.raises(_ImportedError):
            await node._serve_admin()
        assert trio.current_time() - began == (0.0 if is_asked else ADMIN_WAIT_S)
        if asking is not None:
            asking.close()
