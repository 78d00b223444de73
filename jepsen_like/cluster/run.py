"""One seed, one verdict: safety under faults, heal, liveness, and the history judged at the end.

Safety: invariants are checked at every step while the nemesis strikes. Then a majority heals, and
moves within ten election timeouts (`majority.py`). Then everything heals, and within a bounded time
every node serves, every group leads, is whole and accepts, every member of the consumer group has
its place; then clients come to an end and read everything, and all logs and images must be equal.
At last the checkers read the history.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import structlog
from attrs import define, field

from jepsen_like.checkers import Validity, check_events
from jepsen_like.cluster import delayed, delayed_more, viewing
from jepsen_like.cluster.admins import RecordDeleter, TopicAdmin, create_topics
from jepsen_like.cluster.api_fuzzer import ApiFuzzer
from jepsen_like.cluster.committed_reads import CommittedReader
from jepsen_like.cluster.consumers import Member, Reader
from jepsen_like.cluster.elastic import Elastic
from jepsen_like.cluster.faults import LONGEST, draw_faults
from jepsen_like.cluster.historian import Historian
from jepsen_like.cluster.kafka import NARROW
from jepsen_like.cluster.majority import Majority
from jepsen_like.cluster.narrow import QUIET, WIDTH, start_narrow
from jepsen_like.cluster.nemesis import Nemesis
from jepsen_like.cluster.options import ClusterOptions, draw_cluster_options
from jepsen_like.cluster.pipelines import PipeMember
from jepsen_like.cluster.producers import Producer
from jepsen_like.cluster.registers import RegisterClient
from jepsen_like.cluster.scraper import Scraper
from jepsen_like.cluster.settling import Settling, why_transactions_run
from jepsen_like.cluster.strays import GroupDeleter, StrayProducer, VolatileTopic
from jepsen_like.cluster.supervisor import Supervisor
from jepsen_like.cluster.transactional import PARTITIONS, TOPIC
from jepsen_like.cluster.world import FLOORS, ClusterWorld, Counts, Fault
from jepsen_like.history_events import Event
from jepsen_like.invariants import InvariantViolation, name_of_finding
from raftmq.promise import Promise

STEP_MS = 50.0
FORMATION_MS = 30_000.0
GROUP = "g"
PIPE_GROUP = "pipe"
NARROWING, PIPES, TRANSACTIONAL, HISTORIAN, LAST_ADMIN, DELAYED = 30, 45, 60, 80, 81, 93
PARTING, DELAYED_TRANSACTIONAL = 101, 100
VIEWING = 110
WRITERS = ("producer", "transact", "delayed producer")
"""Process numbers that no other client comes to; further historians count down."""


class Verdict(IntEnum):
    """How a run ended; also the exit code."""

    CLEAN = 0
    ANOMALY = 1
    UNKNOWN = 2


@define
class ClusterResult:
    """What came of one seed."""

    seed: int
    verdict: Verdict
    name: str = ""
    detail: str = ""
    counts: Counts = field(factory=Counts)
    faults: Sequence[Fault] = ()
    trace: tuple[str, ...] = ()
    trace_hash: str = ""
    history: list[Event] = field(factory=list)
    seconds: float = 0.0
    """Of one core; 0 where nobody measured."""


@contextmanager
def quiet_logs() -> Iterator[None]:
    """The product's log lines are not wanted in a simulated world."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


@contextmanager
def uncollected() -> Iterator[None]:
    """No collection of garbage: it would look at all that a run keeps, over and over. What a run
    leaves goes with the next collection, if not with its process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_cluster_seed(
    seed: int,
    options: ClusterOptions | None = None,
    *,
    faults: Sequence[Fault] | None = None,
) -> ClusterResult:
    """Run one seed to its verdict; never raises what the product does wrong.

    Args:
        faults: what strikes, in place of what the seed would have drawn.
    """
    with quiet_logs(), uncollected():
        return _run_quietly(seed, options, faults)


def _run_quietly(
    seed: int, options: ClusterOptions | None, faults: Sequence[Fault] | None
) -> ClusterResult:
    world = ClusterWorld(seed, options or draw_cluster_options(seed))
    strikes = draw_faults(world) if faults is None else faults
    verdict, name, detail = Verdict.CLEAN, "", ""
    try:
        _run(world, strikes)
        _check_history(world)
        detail = too_idle(world.counts)
        if detail and world.options.has_floors:
            verdict, name = Verdict.UNKNOWN, "Idle"
    except InvariantViolation as violation:
        verdict, name, detail = Verdict.ANOMALY, violation.name, violation.detail
    except _UnsureError as unsure:
        verdict, name, detail = Verdict.UNKNOWN, "Checkers", str(unsure)
    except Exception as error:  # noqa: BLE001  # whatever is raised is the finding
        detail = "".join(traceback.format_exception(error)[-8:])
        verdict, name = Verdict.ANOMALY, name_of_finding(error)
    finally:
        world.close()
    return ClusterResult(
        seed,
        verdict,
        name,
        detail,
        world.counts,
        strikes,
        tuple(world.trace),
        world.trace_hash,
        world.events,
    )


class _UnsureError(Exception):
    """A checker could not say."""


def too_idle(counts: Counts) -> str:
    """What a run had too little of to say much, "" when it had enough."""
    low = {name: getattr(counts, name) for name in FLOORS if getattr(counts, name) < FLOORS[name]}
    return f"{low}, wanted are {FLOORS}" if low else ""


def _run(world: ClusterWorld, faults: Sequence[Fault]) -> None:
    options = world.options
    topics = [f"t{number}" for number in range(options.topics)]
    world.partitions = [(t, p) for t in topics for p in range(options.partitions)]
    world.start()
    configs = options.topic_configs
    _create(world, 90, topics, options.partitions, configs)
    if options.transactional:
        _create(world, 91, [TOPIC], PARTITIONS, configs)
    if options.narrow:
        _create(world, 92, [NARROW], WIDTH, (*configs, *QUIET))
    if options.delayed:
        made = world.clients.spawn(lambda: delayed.create_delay_topics(world, DELAYED))
        _until(world, lambda: "" if made.is_done else "no delay topic", FORMATION_MS, "Forms")
    if options.parting:
        made = world.clients.spawn(lambda: delayed_more.create_parting_topics(world, PARTING))
        _until(world, lambda: "" if made.is_done else "no retry topic", FORMATION_MS, "Forms")
    if options.views:
        made = world.clients.spawn(lambda: viewing.create_views(world, VIEWING))
        _until(world, lambda: "" if made.is_done else "no view", FORMATION_MS, "Forms")
    ends = _start_clients(world, topics) | _start_transactions(world) | _start_delayed(world)
    ends |= _start_views(world)
    if options.narrow:
        ends |= start_narrow(world, NARROWING)
    if options.elastic:
        world.elastic = Elastic(world)
        world.clients.spawn(world.elastic.run)
    nemesis = Nemesis(world, faults)
    nemesis.start()
    world.is_under_faults = True
    began_ms = world.now_ms
    world.run_until(began_ms + options.safety_ms)
    while (
        too_idle(world.counts)
        and options.has_floors
        and world.now_ms < began_ms + LONGEST * options.safety_ms
    ):
        world.run_until(world.now_ms + STEP_MS)
    nemesis.stop()
    world.heal()
    _check_majority(world)
    _check_liveness(world)
    world.is_quiet = True
    limit_ms = options.liveness_ms
    writers = {name: end for name, end in ends.items() if name.startswith(WRITERS)}
    _until(world, lambda: _unfinished(writers), limit_ms, "Liveness")
    _until(world, lambda: why_transactions_run(world), limit_ms, "TransactionsEnd")
    world.is_written = True
    _until(world, world.delayed.why_incomplete, limit_ms, "NothingPendingIsDropped")
    _until(world, world.parting.why_incomplete, limit_ms, "NothingPendingIsDropped")
    _until(world, lambda: _unfinished(ends), limit_ms, "Liveness")
    _until(world, Settling(world).why_apart, limit_ms, "Convergence")
    if world.narrower is not None:
        judged = world.clients.spawn(world.narrower.judge)
        _until(world, lambda: "" if judged.is_done else "no ends told", limit_ms, "Liveness")
    listed = world.clients.spawn(TopicAdmin(world, LAST_ADMIN).list_at_last)
    _until(world, lambda: "" if listed.is_done else "nobody lists topics", limit_ms, "Liveness")


def _create(
    world: ClusterWorld,
    process: int,
    names: list[str],
    count: int,
    configs: Sequence[tuple[str, str]],
) -> None:
    made = world.clients.spawn(lambda: create_topics(world, process, names, count, configs))
    _until(world, lambda: "" if made.is_done else f"no {names}", FORMATION_MS, "Forms")


def _start_clients(world: ClusterWorld, topics: list[str]) -> dict[str, Promise[None]]:
    options, spawn = world.options, world.clients.spawn
    ends: dict[str, Promise[None]] = {}
    process = 1
    producers = max(options.producers, 1)
    for number in range(producers):
        topic, partition = world.partitions[number % len(world.partitions)]
        producer = Producer(world, process, topic, partition)
        ends[f"producer {process}"] = spawn(producer.run)
        process += 1
    for _ in range(options.consumers):
        reader = Reader(world, process, list(world.partitions))
        ends[f"reader {process}"] = spawn(reader.run)
        process += 1
    for _ in range(options.members):
        member = Member(world, process, GROUP, topics)
        world.members.append(member)
        ends[f"member {process}"] = spawn(member.run)
        process += 1
    for _ in range(2):
        admin = TopicAdmin(world, process)
        ends[f"admin {process}"] = spawn(admin.run)
        process += 1
    for number in range(options.registers):
        register = RegisterClient(world, process, f"register-{number % 2}")
        ends[f"register {process}"] = spawn(register.run)
        process += 1
    for _ in range(options.api_fuzzers):
        api_fuzzer = ApiFuzzer(world, process)
        ends[f"api_fuzzer {process}"] = spawn(api_fuzzer.run)
        process += 1
    for number in range(options.historians):
        spawn(Historian(world, HISTORIAN - number).run)
    spawn(Scraper(world).run)  # nobody waits for it
    world.deleter = RecordDeleter(world, process)
    return ends


def _start_transactions(world: ClusterWorld) -> dict[str, Promise[None]]:
    """Producers of transactional ids, two of the first one, and who reads what they committed."""
    options, spawn = world.options, world.clients.spawn
    ids = [f"id-{number}" for number in range(options.transactional)]
    if not ids:
        return {}
    ends: dict[str, Promise[None]] = {}
    process = TRANSACTIONAL
    for number, transactional_id in enumerate([ids[0], *ids]):
        protocols = options.transaction_protocols
        protocol = protocols[(world.seed + max(number - 1, 0)) % len(protocols)]
        producer = StrayProducer(world, process, transactional_id, protocol)
        ends[f"transactional {process}"] = spawn(producer.run)
        process += 1
    reader = CommittedReader(world, process, ids)
    ends[f"committed reader {process}"] = spawn(reader.run)
    ends["transactional topics"] = spawn(VolatileTopic(world, process + 1).run)
    ends["transactional groups"] = spawn(GroupDeleter(world, process + 2, ids[-1]).run)
    for number in range(options.pipe_members):
        protocol = options.transaction_protocols[number % len(options.transaction_protocols)]
        member = PipeMember(world, PIPES + 2 * number, PIPE_GROUP, protocol)
        ends[f"transactional member {number}"] = spawn(member.run)
    return ends


def _start_delayed(world: ClusterWorld) -> dict[str, Promise[None]]:
    """Who sends delayed records, and who reads what comes of them."""
    ends: dict[str, Promise[None]] = {}
    for index in range(delayed.PARTITIONS if world.options.delayed else 0):
        process = DELAYED + 1 + 2 * index
        producer = delayed.DelayedProducer(world, process, index, world.delayed)
        ends[f"delayed producer {index}"] = world.clients.spawn(producer.run)
        for number, topic in ((process + 1, delayed.TARGET), (98 + index, delayed.DEAD)):
            reader = delayed.DelayedReader(world, number, topic, index, world.delayed)
            ends[f"delayed reader {number}"] = world.clients.spawn(reader.run)
    if world.options.delayed_transactions:
        transactor = delayed_more.DelayedTransactor(world, DELAYED_TRANSACTIONAL, world.delayed)
        ends["delayed producer in transactions"] = world.clients.spawn(transactor.run)
    return ends | _start_parting(world)


def _start_parting(world: ClusterWorld) -> dict[str, Promise[None]]:
    """Who sends what is given up, who has its target go, and who reads what is dead."""
    if not world.options.parting:
        return {}
    ledger, spawn = world.parting, world.clients.spawn
    topic = delayed_more.GONE_LATER
    producer = delayed.DelayedProducer(world, PARTING + 1, 0, ledger, topic)
    reader = delayed_more.DeadReader(world, PARTING + 3, ledger)
    return {
        "delayed producer of a target that goes": spawn(producer.run),
        "deleter of a target": spawn(
            lambda: delayed_more.delete_target(world, PARTING + 2, ledger)
        ),
        "reader of what is given up": spawn(reader.run),
    }


def _start_views(world: ClusterWorld) -> dict[str, Promise[None]]:
    """Who reads views, and what they look at."""
    ends: dict[str, Promise[None]] = {}
    for view, width in viewing.views_of(world):
        for partition in range(width):
            process = VIEWING + 1 + len(ends)
            reader = viewing.ViewReader(world, process, view, partition)
            ends[f"view reader {process}"] = world.clients.spawn(reader.run)
    return ends


def _until(world: ClusterWorld, why_not: object, limit_ms: float, name: str) -> None:
    assert callable(why_not)
    deadline_ms = world.now_ms + limit_ms
    while reason := why_not():
        if world.now_ms >= deadline_ms:
            raise InvariantViolation(name, f"after {limit_ms:.0f} ms: {reason}")
        world.run_until(world.now_ms + STEP_MS)


def _check_majority(world: ClusterWorld) -> None:
    """All but one node go on soon."""
    majority = Majority(world)
    for limit_ms, why_not in majority.phases():
        _until(world, why_not, limit_ms, "Liveness")
    majority.end()


def _check_liveness(world: ClusterWorld) -> None:
    """Every node serves, every group is whole, every pipe moves, every member has its place."""
    first = len(world.events)
    settling = Settling(world)
    supervisors = {node.node_id: Supervisor(node) for node in world.nodes}
    wanted = {f"{t}-{p}" for t, p in world.partitions[: min(world.options.producers, 99)]}

    def why_not() -> str:
        for node in world.present:
            if not node.is_serving:
                return f"node {node.node_id} does not serve"
            supervisors[node.node_id].look()
        if why := settling.why_not_whole():
            return why
        acked = {
            name
            for event in world.events[first:]
            if event.f == "append" and event.type == "ok"
            for name in event.records
        }
        if missing := sorted(wanted - acked):
            return f"nothing acknowledged in {missing}"
        generations = {member.generation for member in world.members}
        if len(generations) > 1 or -1 in generations:
            return f"members are in generations {sorted(generations)}"
        return ""

    _until(world, why_not, world.options.liveness_ms, "Liveness")


def _unfinished(ends: dict[str, Promise[None]]) -> str:
    waiting = [name for name, end in ends.items() if not end.is_done]
    return f"these do not come to their end: {waiting}" if waiting else ""


def _check_history(world: ClusterWorld) -> None:
    report = check_events(world.events)
    if report.validity is Validity.INVALID:
        name = report.named(Validity.INVALID)[0]
        raise InvariantViolation(name, report.to_text())
    if report.validity is Validity.UNKNOWN:
        raise _UnsureError(report.to_text())
