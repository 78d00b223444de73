"""One seed, one verdict: safety under faults, heal, then liveness.

Safety: invariants are checked at every step while the nemesis strikes. Then everything heals, and
within a bounded time each group must elect a leader, accept and commit new records, bring every
node back as a voter under its present storage, and end with equal logs. At last every acknowledged
record must lie where its client was told.
"""

from __future__ import annotations

import traceback
from enum import IntEnum

from attrs import define, field

from jepsen_like.history import Outcome
from jepsen_like.invariants import InvariantViolation, name_of_finding
from jepsen_like.nemesis import Nemesis
from jepsen_like.options import SimOptions, draw_options
from jepsen_like.workload import Client
from jepsen_like.world import Summary, World
from raftmq.raft.messages import EntryKind
from raftmq.records import read_records
from raftmq.replication.replica import Replica
from raftmq.types import RaftGroupId


class Verdict(IntEnum):
    """How a run ended; also the exit code."""

    CLEAN = 0
    ANOMALY = 1
    UNKNOWN = 2


@define
class Result:
    """What came of one seed."""

    seed: int
    verdict: Verdict
    name: str = ""
    detail: str = ""
    summary: Summary = field(factory=Summary)
    trace: tuple[str, ...] = ()
    trace_hash: str = ""


LIVENESS_STEP_MS = 100.0


def run_seed(seed: int, options: SimOptions | None = None) -> Result:
    """Run one seed to its verdict; never raises what the product does wrong."""
    world = World(seed, options or draw_options(seed))
    try:
        _run(world)
    except InvariantViolation as violation:
        return _result(world, Verdict.ANOMALY, violation.name, violation.detail)
    except Exception as error:  # noqa: BLE001  # whatever is raised is the finding
        detail = "".join(traceback.format_exception(error)[-6:])
        return _result(world, Verdict.ANOMALY, name_of_finding(error), detail)
    if not world.history.acked_records:
        return _result(world, Verdict.UNKNOWN, "Idle", "nothing was acknowledged")
    return _result(world, Verdict.CLEAN, "", "")


def _result(world: World, verdict: Verdict, name: str, detail: str) -> Result:
    world.summary.acked_records = world.history.acked_records
    return Result(
        world.seed, verdict, name, detail, world.summary, tuple(world.trace), world.trace_hash
    )


def _run(world: World) -> None:
    options = world.options
    clients = [
        Client(world, number, group)
        for number, group in enumerate(
            group for group in world.groups for _ in range(options.clients_per_group)
        )
    ]
    world.start()
    for client in clients:
        client.start()
    nemesis = Nemesis(world)
    nemesis.start()
    world.run_until(options.safety_ms)
    nemesis.stop()
    world.heal()
    _check_liveness(world)
    for client in clients:
        client.is_stopped = True
    _check_convergence(world)
    for group in world.groups:
        _check_acked(world, group)


def _check_liveness(world: World) -> None:
    """Each group must acknowledge new records and be whole again."""
    deadline_ms = world.now_ms + world.options.liveness_ms
    waiting = list(world.groups)
    first = len(world.history.operations)
    while waiting:
        if world.now_ms >= deadline_ms:
            raise InvariantViolation("Liveness", f"{_state(world, waiting[0])}")
        world.run_until(world.now_ms + LIVENESS_STEP_MS)
        acked = {
            operation.group: True
            for operation in world.history.operations[first:]
            if operation.outcome is Outcome.OK
        }
        waiting = [
            group for group in waiting if group not in acked or not world.is_group_whole(group)
        ]


def _check_convergence(world: World) -> None:
    """Without new records all replicas must end with the same log."""
    deadline_ms = world.now_ms + world.options.liveness_ms
    while True:
        apart = [group for group in world.groups if not _is_converged(world, group)]
        if not apart:
            return
        if world.now_ms >= deadline_ms:
            raise InvariantViolation("Convergence", _state(world, apart[0]))
        world.run_until(world.now_ms + LIVENESS_STEP_MS)


def _replicas(world: World, group: RaftGroupId) -> list[Replica]:
    return [node.replicas[group] for node in world.nodes if node.is_up]


def _is_converged(world: World, group: RaftGroupId) -> bool:
    replicas = _replicas(world, group)
    ends = [(r.log.end_index, r.commit_end, r.log.flushed_end) for r in replicas]
    if len(replicas) < len(world.nodes) or any(end != ends[0] for end in ends):
        return False
    if len({*ends[0]}) != 1:
        return False
    digests = [node.machines[group].digest_at(ends[0][0]) for node in world.nodes]
    return all(digest == digests[0] for digest in digests)


def _state(world: World, group: RaftGroupId) -> str:
    lines = [str(group)]
    for node in world.nodes:
        if not node.is_up:
            lines.append(f"{node.node_id}: down")
            continue
        replica = node.replicas[group]
        core = replica.core
        lines.append(
            f"{replica.self_id}: {core.role.value} term={core.term} leader={core.leader} "
            f"log=[{replica.log.log_start.index}, {replica.log.end_index}) "
            f"flushed={replica.log.flushed_end} commit={replica.commit_end} "
            f"core_end={core.log_end} floor={core.claimed_end_floor} suspended={core.suspended} "
            f"damaged={replica.log.damaged} "
            f"failure={replica.failure} voters={[str(v) for v in replica.voters]} "
            f"learners={[str(v) for v in replica.configuration.learners]} "
            f"progress={ {str(k): str(v) for k, v in core.progress.items()} }"
        )
    return "\n  ".join(lines)


def _check_acked(world: World, group: RaftGroupId) -> None:
    """Every acknowledged record is where its client was told, on every replica."""
    acked = [
        operation
        for operation in world.history.operations
        if operation.group == group and operation.outcome is Outcome.OK
    ]
    for replica in _replicas(world, group):
        held: dict[int, bytes | None] = {}
        log = replica.log
        position = log.log_start.index
        while position < log.end_index:
            for entry in log.entries(position, 1 << 20):
                position = entry.end
                if entry.kind == EntryKind.BATCH:
                    for record in read_records(bytes(entry.payload)):
                        held[record.offset] = record.value
        for operation in acked:
            for number, value in enumerate(operation.values):
                offset = operation.offset + number
                if offset >= replica.log_start_offset and held.get(offset) != value:
                    raise InvariantViolation(
                        "AckedRecordsSurvive",
                        f"{group}: {replica.self_id} holds {held.get(offset)!r} at {offset}, "
                        f"acknowledged was {value!r}",
                    )
