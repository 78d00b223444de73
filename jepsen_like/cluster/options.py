"""What one run with whole nodes is like, drawn from its seed.

Every run differs: how many nodes and partitions, how fast disks and networks are, which faults come
how often, what clients do. Nothing else in the simulation draws what this module has decided.
Times are virtual milliseconds.
"""

from __future__ import annotations

from random import Random
from typing import Final

import attrs
from attrs import frozen

FAULTS = (
    "isolate",
    "isolate-leader",
    "isolate-controller",
    "one-way",
    "deaf",
    "halves",
    "newcomer-first",
    "bridge",
    "swizzle",
    "crash",
    "crash-leader",
    "crash-controller",
    "crash-all",
    "crash-point",
    "crash-in",
    "crash-in-change",
    "kill",
    "pause",
    "slow-disk",
    "full-disk",
    "failed-sync",
    "storm",
    "transfer",
    "wipe",
    "replace",
    "move",
    "lose-folder",
    "rot",
    "rot-everywhere",
    "rot-index",
    "rot-journal",
    "clock-jump",
    "clock-strobe",
    "delete-records",
    "clients-cut",
    "malformed",
    "shutdown",
    "cut-controller",
    "crash-voter",
    "stale-metadata",
)


EXPIRY_MS = 4_000
TOPIC_CONFIGS: tuple[tuple[tuple[str, str], ...], ...] = (
    (),
    (),
    (("compression.type", "lz4"),),
    (("compression.type", "gzip"), ("message.timestamp.type", "LogAppendTime")),
    (("compression.type", "zstd"), ("min.insync.replicas", "2")),
    (("compression.type", "uncompressed"), ("segment.ms", "1000")),
    (("message.timestamp.type", "LogAppendTime"), ("index.interval.bytes", "64")),
)
"""What a topic may be created with, beside the brokers' defaults."""


SLOW_CATCH_UP: Final = 64 << 10
"""Bytes per second that replicas that catch up have to share: most of them wait."""


@frozen(kw_only=True)
class ClusterOptions:
    """Settings of one run."""

    nodes: int = 3
    spares: int = 0
    """Nodes beside those, which are there only once one of them is replaced."""
    newcomers: int = 0
    """Nodes beside those again, which an operator of brokers takes in and sends away."""
    elastic: bool = False
    """Such an operator is at work."""
    elastic_every_ms: tuple[float, float] = (20.0, 300.0)
    elastic_weights: tuple[tuple[str, float], ...] = ()
    """Odds of what it does; none: its own."""
    replace_after_ms: int = 600_000
    """For so long a dead broker is waited for."""
    racks: int = 0
    """So many there are; 0: one for each node."""
    narrow: bool = False
    """A topic shrinks and grows."""
    narrow_in_transactions: bool = False
    """It is written to in transactions alone."""
    narrow_members: int = 0
    """So many members of a group read it. None of its partitions goes then: what the group has
    committed in one that goes is forgotten."""
    narrow_every_ms: tuple[float, float] = (100.0, 900.0)
    topics: int = 2
    partitions: int = 3
    producers: int = 3
    consumers: int = 2
    members: int = 3
    registers: int = 4
    api_fuzzers: int = 1
    historians: int = 1
    transactional: int = 0
    """So many transactional ids have producers, the first one two of them."""
    transaction_protocols: tuple[int, ...] = (1, 2)
    transaction_timeout_ms: int = 1_500
    transaction_pauses: float = 0.1
    """Share of the transactions that stand still for about as long as that."""
    transaction_aborts: float = 0.3
    """Share of them that are aborted by wish."""
    transaction_reads: float = 0.3
    """Share of them that read within."""
    transaction_plain: float = 0.15
    """How often something that is no transaction comes between two."""
    transaction_strays: float = 0.1
    """How often something comes too late."""
    strays_insist: bool = False
    """Batches come too late to all partitions of their transaction, and to each again and again, at
    whoever leads by then."""
    transaction_volatile: float = 0.1
    """Share of them that write to a topic that comes and goes."""
    pipe_members: int = 0
    """So many members of a group read, write and commit in transactions."""
    delayed: bool = False
    """There is a delay topic. Clocks do not jump then, since times are judged by them; that of the
    first node may be wrong from the beginning."""
    delayed_transactions: bool = False
    """It is written to in transactions, too."""
    gives_up: bool = False
    """What its target has not taken for some moments is dead there."""
    parting: bool = False
    """Another delay topic loses its target."""
    parting_plain: bool = False
    """It retries nothing: it has a dead topic for what is given up alone."""
    kills_within: bool = False
    """What would lose power in the middle of a change to its disk loses its process alone, half the
    time: names and bytes that were not synced are there until power goes."""
    views: bool = False
    """Records have tags, and there are views of those with some."""
    safety_ms: float = 3_000
    """Faults strike for so long at least, and on until enough has happened."""
    liveness_ms: float = 20_000
    tick_ms: int = 25
    election_ticks: int = 6
    heartbeat_ticks: int = 2
    latency_ms: tuple[float, float] = (0.3, 2.0)
    straggler: float = 0.005
    straggler_ms: float = 200
    drop: float = 0.005
    duplicate: float = 0.005
    reorder: bool = True
    client_drop: float = 0.002
    fsync_ms: tuple[float, float] = (0.3, 2.0)
    slow_fsync_ms: float = 120
    think_ms: tuple[float, float] = (4.0, 30.0)
    slowdown: float = 1.0
    """So much longer clients think once enough was acknowledged: until leaders have changed and
    nodes have crashed often enough, some runs would take three times as many operations."""
    records_max: int = 4
    value_bytes_max: int = 60
    segment_bytes: int = 4_096
    retention_bytes: int = -1
    open_files_max: int = 1_024
    snapshot_bytes: int = 1 << 20
    catch_up_bytes_per_s: int = 12 << 20
    broker_session_ms: int = 750
    session_ms: int = 500
    rebalance_ms: int = 500
    """For so long a rebalance waits for a member."""
    static_share: float = 0.0
    """How many of the group's members have a group.instance.id."""
    session_share: float = 0.5
    """How many consumers use fetch sessions."""
    astray: float = 0.0
    """Share of the polls that go to any node, as of clients that were told long ago who leads."""
    offsets_retention_ms: int = 7 * 86_400_000
    topic_configs: tuple[tuple[str, str], ...] = ()
    """Of the first topic."""
    request_timeout_ms: float = 500
    fault_every_ms: tuple[float, float] = (150.0, 900.0)
    fault_lasts_ms: tuple[float, float] = (100.0, 1_200.0)
    weights: tuple[tuple[str, float], ...] = ()
    clock_skew_ms: float = 0.0
    pauses_links: bool = True
    rest: float = 0.0
    """How often a producer rests after a batch, for long enough that its log may come to rest."""
    has_floors: bool = True
    """False where the fault that is wanted leaves too little time for what a run needs else."""
    keeps_leaders: bool = False
    """Nothing that strikes here is a reason for a new leader."""
    spares_metadata: bool = False
    """Bytes go bad in partitions alone."""
    is_black_box: bool = False
    """Judged by what clients were told alone: no invariant looks inside."""

    def with_weights(self, **weights: float) -> ClusterOptions:
        """Other odds of faults; a fault that is not named does not happen."""
        chosen = tuple((name.replace("_", "-"), weight) for name, weight in weights.items())
        assert all(name in FAULTS for name, _ in chosen), "no such fault"
        return attrs.evolve(self, weights=chosen)

    def with_patience(self) -> ClusterOptions:
        """Clients, and the controller with brokers, wait for longer than it takes to elect."""
        return attrs.evolve(
            self,
            broker_session_ms=1_500,
            session_ms=1_500,
            rebalance_ms=2_000,
            request_timeout_ms=1_500,
        )


DEFAULT_WEIGHTS: dict[str, float] = {
    "isolate": 1.0,
    "isolate-leader": 2.0,
    "isolate-controller": 1.0,
    "one-way": 0.8,
    "deaf": 0.5,
    "halves": 0.8,
    "bridge": 0.5,
    "swizzle": 0.5,
    "crash": 1.5,
    "crash-leader": 2.0,
    "crash-controller": 1.0,
    "crash-all": 0.5,
    "crash-point": 0.7,
    "crash-in": 1.5,
    "crash-in-change": 2.5,
    "kill": 1.5,
    "pause": 1.0,
    "slow-disk": 0.8,
    "full-disk": 0.4,
    "failed-sync": 0.3,
    "storm": 0.5,
    "transfer": 1.0,
    "wipe": 0.3,
    "replace": 0.6,
    "lose-folder": 0.3,
    "rot": 0.4,
    "rot-everywhere": 0.2,
    "rot-index": 0.4,
    "clock-jump": 0.5,
    "clock-strobe": 0.3,
    "delete-records": 1.0,
    "clients-cut": 0.5,
    "malformed": 0.5,
    "shutdown": 0.7,
}


def _draw_weights(random: Random, seed: int) -> dict[str, float]:
    weights = dict(DEFAULT_WEIGHTS)
    # Some runs lack some faults altogether, so that others come in bursts (swarm testing).
    for fault in DEFAULT_WEIGHTS:
        if random.random() < 0.25:
            weights[fault] = 0.0
    weights["crash-leader"] = max(weights["crash-leader"], 0.5)
    # By draws of their own, so that what is drawn below does not move.
    if _drawn_by("journals", seed) < 0.25:
        weights["rot-journal"] = 0.5
    if _drawn_by("voters", seed) < 0.25:
        weights["crash-voter"] = 0.5
    return weights


def draw_cluster_options(seed: int) -> ClusterOptions:
    """The options of the run with this seed."""
    random = Random(f"cluster options {seed}")
    weights = _draw_weights(random, seed)
    is_patient = _drawn_by("patience", seed) < 0.25
    catch_up = Random(f"catch-up {seed}").choice((12 << 20, 12 << 20, 0, SLOW_CATCH_UP))
    is_astray = _drawn_by("astray", seed) < 0.25
    transactional = Random(f"transactions {seed}").choice((0, 0, 2))
    if transactional:
        weights["stale-metadata"] = 1.0
    is_elastic = _drawn_by("elastic", seed) < 0.25
    is_delayed = _drawn_by("delays", seed) < 0.25
    if is_delayed:
        # Who reads what is delivered judges times by these clocks.
        weights["clock-jump"] = weights["clock-strobe"] = 0.0
    expires = random.random() < 0.1
    if expires:
        # Else what is the time would decide whether somebody's offsets are old.
        weights["clock-jump"] = weights["clock-strobe"] = 0.0
    options = ClusterOptions(
        nodes=5 if random.random() < 0.1 else 3,
        spares=random.choices((0, 1, 2), (15, 4, 1))[0],
        partitions=random.choice((1, 2, 4)),
        latency_ms=(0.3, random.choice((1.0, 3.0, 10.0))),
        drop=random.choice((0.0, 0.002, 0.01)),
        duplicate=random.choice((0.0, 0.005, 0.02)),
        straggler=random.choice((0.0, 0.005, 0.02)),
        reorder=random.random() < 0.5,
        client_drop=random.choice((0.0, 0.002, 0.01)),
        fsync_ms=(0.2, random.choice((0.8, 3.0, 10.0))),
        records_max=random.choice((1, 3, 8)),
        segment_bytes=random.choice((2_048, 16_384, 1 << 20)),
        retention_bytes=random.choice((-1, -1, 8_192)),
        snapshot_bytes=random.choice((8_192, 32_768, 1 << 20)),
        fault_every_ms=(100.0, random.choice((600.0, 1_200.0))),
        weights=tuple(weights.items()),
        clock_skew_ms=0.0 if expires else random.choice((0.0, 500.0, 15 * 86_400_000.0)),
        offsets_retention_ms=EXPIRY_MS if expires else 7 * 86_400_000,
        registers=0 if expires else 4,
        safety_ms=2 * EXPIRY_MS if expires else 3_000,
        static_share=random.choice((0.0, 0.0, 0.5, 1.0)),
        topic_configs=random.choice(TOPIC_CONFIGS),
        api_fuzzers=random.choice((1, 1, 2)),
        open_files_max=random.choice((1_024, 1_024, 12)),
        slowdown=8.0,
        astray=0.1 if is_astray else 0.0,
        transactional=0 if expires else transactional,
        catch_up_bytes_per_s=catch_up,
        pipe_members=2 if transactional and not expires else 0,
        views=_drawn_by("views", seed) < 0.25,
        kills_within=_drawn_by("kills", seed) < 0.25,
    )
    options = options.with_patience() if is_patient else options
    options = _delayed(seed, options) if is_delayed else options
    if _drawn_by("narrows", seed) < 0.25:
        is_drawn = options.transactional > 0 and _drawn_by("narrow in transactions", seed) < 0.5
        members = Random(f"narrow members {seed}").choice((0, 2)) * (not expires)
        options = attrs.evolve(
            options, narrow=True, narrow_in_transactions=is_drawn, narrow_members=members
        )
    return _elastic(seed, options) if is_elastic else options


def _drawn_by(name: str, seed: int) -> float:
    """A number from 0 to 1 of a stream of its own."""
    return Random(f"{name} {seed}").random()


def _delayed(seed: int, options: ClusterOptions) -> ClusterOptions:
    """The same with a delay topic; by draws of its own as well."""
    return attrs.evolve(
        options,
        delayed=True,
        delayed_transactions=_drawn_by("delays in transactions", seed) < 0.5,
        gives_up=_drawn_by("given up", seed) < 0.5,
        parting=_drawn_by("parting", seed) < 0.5,
        parting_plain=_drawn_by("parting without retries", seed) < 0.5,
    )


def _elastic(seed: int, options: ClusterOptions) -> ClusterOptions:
    """The same with brokers that come and go; by draws of its own as well."""
    random = Random(f"elastic options {seed}")
    return attrs.evolve(
        options,
        elastic=True,
        newcomers=random.choice((2, 3)),
        elastic_every_ms=(20.0, random.choice((200.0, 600.0))),
        replace_after_ms=random.choice((600, 1_500, 600_000)),
        racks=random.choice((0, 3)),
        safety_ms=max(options.safety_ms, 9_000.0),
        liveness_ms=2 * options.liveness_ms,
    )
