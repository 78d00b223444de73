"""Options that stress one thing, so that a planted bug is met soon; the seed draws all the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from jepsen_like.cluster.options import ClusterOptions, draw_cluster_options

Stress = Callable[[int], ClusterOptions]


def drawn(seed: int, **changes: Any) -> ClusterOptions:
    """Three nodes with little on them."""
    options = draw_cluster_options(seed)
    small: dict[str, Any] = {
        "nodes": 3,
        "partitions": 1,
        "safety_ms": 4_000,
        "retention_bytes": -1,
        "slowdown": 1.0,
        "transactional": 0,
        "pipe_members": 0,
        "narrow": False,
        "newcomers": 0,
        "elastic": False,
        "replace_after_ms": 600_000,
        "racks": 0,
        "liveness_ms": 20_000,
        "delayed": False,
        "views": False,
    }
    return attrs.evolve(options, **{**small, **changes})


def briefly(stress: Stress) -> Stress:
    """The same, no longer than the safety phase: what is to be caught shows after the heal."""
    return lambda seed: attrs.evolve(stress(seed), has_floors=False)


def leaders(seed: int) -> ClusterOptions:
    """Leaders die or are cut off again and again, and producers send again."""
    return drawn(
        seed,
        client_drop=0.02,
        fault_every_ms=(80.0, 350.0),
        fault_lasts_ms=(60.0, 500.0),
    ).with_weights(isolate_leader=4, crash_leader=3, transfer=2, one_way=1, kill=1)


def transactions(seed: int) -> ClusterOptions:
    """Little but transactions, while leaders, brokers and the controller come and go."""
    return drawn(
        seed,
        has_floors=False,
        safety_ms=6_000,
        producers=1,
        consumers=1,
        members=1,
        registers=1,
        api_fuzzers=0,
        historians=0,
        transactional=3,
        pipe_members=2,
        offsets_retention_ms=7 * 86_400_000,
        think_ms=(1.0, 8.0),
        fault_every_ms=(80.0, 500.0),
        fault_lasts_ms=(60.0, 700.0),
    ).with_weights(
        isolate_leader=4,
        isolate=2,
        isolate_controller=2,
        one_way=1,
        crash_leader=3,
        crash_controller=1,
        crash_all=0.5,
        kill=2,
        pause=4,
        transfer=3,
        stale_metadata=4,
        slow_disk=1,
        crash_in_change=1,
        wipe=0.5,
        clients_cut=1,
    )


def views(seed: int) -> ClusterOptions:
    """Little but views and what they look at, while leaders come and go and nodes start again."""
    return drawn(
        seed,
        has_floors=False,
        safety_ms=6_000,
        partitions=2,
        producers=2,
        consumers=1,
        members=1,
        registers=1,
        api_fuzzers=0,
        historians=0,
        transactional=2,
        views=True,
        offsets_retention_ms=7 * 86_400_000,
        think_ms=(2.0, 15.0),
        records_max=8,
        fault_every_ms=(80.0, 500.0),
        fault_lasts_ms=(60.0, 700.0),
    ).with_weights(
        isolate_leader=5,
        isolate=2,
        one_way=1,
        crash_leader=3,
        crash_all=1,
        kill=3,
        pause=2,
        transfer=4,
        slow_disk=1,
        delete_records=2,
        stale_metadata=1,
    )


def delays(seed: int) -> ClusterOptions:
    """Little but delayed records, while the leaders of both topics come and go."""
    return drawn(
        seed,
        has_floors=False,
        safety_ms=8_000,
        producers=1,
        consumers=1,
        members=1,
        registers=1,
        api_fuzzers=0,
        historians=0,
        delayed=True,
        delayed_transactions=True,
        parting=True,
        gives_up=True,
        think_ms=(2.0, 20.0),
        records_max=4,
        segment_bytes=2_048,
        retention_bytes=4_096,
        fault_every_ms=(80.0, 500.0),
        fault_lasts_ms=(60.0, 700.0),
    ).with_weights(
        isolate_leader=4,
        isolate=2,
        isolate_controller=1,
        one_way=1,
        crash_leader=3,
        crash_all=1,
        kill=3,
        pause=3,
        transfer=4,
        slow_disk=1,
        stale_metadata=1,
    )


def late_ends(seed: int) -> ClusterOptions:
    """Most transactions by protocol 2 are ended a second time, some time later."""
    return attrs.evolve(
        transactions(seed), transaction_protocols=(2,), transaction_strays=0.8, pipe_members=0
    )


def stale_leaders(seed: int) -> ClusterOptions:
    """Leaders move all the time, to nodes whose metadata are old; and much that was given up comes
    late."""
    return attrs.evolve(
        transactions(seed),
        transaction_protocols=(1,),
        transaction_pauses=0.0,
        transactional=6,
        pipe_members=0,
        transaction_aborts=0.7,
        transaction_strays=1.0,
        strays_insist=True,
        transaction_plain=0.0,
        transaction_volatile=0.0,
        # Of one node at a time: with more of them nothing would be decided.
        fault_every_ms=(250.0, 500.0),
        fault_lasts_ms=(300.0, 600.0),
    ).with_weights(transfer=1, stale_metadata=8)


def hasty_transactions(seed: int) -> ClusterOptions:
    """Transactions that expire about when they end, while controllers are cut off and come back."""
    return attrs.evolve(
        transactions(seed),
        transaction_timeout_ms=150,
        transaction_pauses=0.5,
        fault_every_ms=(100.0, 400.0),
        fault_lasts_ms=(200.0, 600.0),
    ).with_weights(isolate_controller=5, stale_metadata=1, pause=1)


def full_logs_of_transactions(seed: int) -> ClusterOptions:
    """Retention takes what it may, and snapshots are taken all the time."""
    return attrs.evolve(
        transactions(seed), segment_bytes=1_024, retention_bytes=2_048, snapshot_bytes=8_192
    )


def leaders_and_power(seed: int) -> ClusterOptions:
    """The same, and others lose power as well."""
    return attrs.evolve(leaders(seed), has_floors=False).with_weights(
        isolate_leader=4, crash_leader=4, crash=3, transfer=1
    )


def leaders_and_readers(seed: int) -> ClusterOptions:
    """Leaders go again and again, and nearly all that clients do is read."""
    return attrs.evolve(
        leaders(seed), has_floors=False, consumers=5, members=1, registers=1, api_fuzzers=0
    )


def astray(seed: int) -> ClusterOptions:
    """Leaders are cut off or paused, and readers go on asking them."""
    return attrs.evolve(
        leaders_and_readers(seed), astray=0.3, fault_lasts_ms=(300.0, 800.0)
    ).with_weights(isolate_leader=3, halves=1, pause=3, isolate=1, transfer=1)


def split_votes(seed: int) -> ClusterOptions:
    """Candidates that compete, and voters that lose power right after they voted."""
    return drawn(
        seed,
        has_floors=False,
        tick_ms=10,
        election_ticks=6,
        heartbeat_ticks=1,
        latency_ms=(0.5, 10.0),
        straggler=0.2,
        straggler_ms=60,
        fsync_ms=(0.5, 3.0),
        fault_every_ms=(30.0, 100.0),
        fault_lasts_ms=(20.0, 200.0),
    ).with_weights(crash_voter=6, isolate_leader=2, crash_leader=1)


def power(seed: int) -> ClusterOptions:
    """Power loss and failing syncs, short outages."""
    return drawn(
        seed,
        fsync_ms=(1.0, 10.0),
        fault_every_ms=(60.0, 250.0),
        fault_lasts_ms=(20.0, 200.0),
    ).with_weights(crash=3, crash_leader=2, crash_all=2, failed_sync=4, kill=1)


def restarts(seed: int) -> ClusterOptions:
    """Processes end, one or all of them, and come back to what their disks hold."""
    return drawn(seed, fault_every_ms=(150.0, 500.0), fault_lasts_ms=(20.0, 200.0)).with_weights(
        kill=3, crash_all=1, shutdown=2
    )


def coordinators(seed: int) -> ClusterOptions:
    """The metadata group and the coordinators change, members come late."""
    return drawn(
        seed,
        client_drop=0.02,
        straggler=0.03,
        session_ms=700,
        fault_every_ms=(80.0, 400.0),
        fault_lasts_ms=(100.0, 900.0),
    ).with_weights(isolate_controller=4, isolate=2, clients_cut=3, pause=3, transfer=1, kill=2)


def wipes(seed: int) -> ClusterOptions:
    """Storages are lost while leaders change."""
    return drawn(seed, fault_every_ms=(150.0, 500.0), fault_lasts_ms=(50.0, 400.0)).with_weights(
        wipe=4, isolate_leader=2, crash_leader=1
    )


def wipes_of_the_newest(seed: int) -> ClusterOptions:
    """Storages are lost while others are behind, and leaders right after."""
    return drawn(
        seed, has_floors=False, fault_every_ms=(40.0, 160.0), fault_lasts_ms=(100.0, 600.0)
    ).with_weights(wipe=5, isolate=4, crash_leader=3, isolate_leader=2, slow_disk=2)


def replacements(seed: int) -> ClusterOptions:
    """Nodes are replaced while the cluster falls into halves: for a while an even number votes."""
    return drawn(
        seed,
        has_floors=False,
        spares=2,
        fault_every_ms=(60.0, 250.0),
        fault_lasts_ms=(100.0, 600.0),
    ).with_weights(replace=5, halves=4, isolate_leader=3, one_way=1)


def moves(seed: int) -> ClusterOptions:
    """Replicas go to other nodes and come back, while some nodes are down, behind or cut off."""
    return drawn(
        seed,
        nodes=4,
        has_floors=False,
        fault_every_ms=(60.0, 250.0),
        fault_lasts_ms=(100.0, 900.0),
    ).with_weights(move=8, isolate=2, isolate_leader=2, halves=1, crash=2, crash_leader=1, kill=1)


def changed_minds(seed: int) -> ClusterOptions:
    """Targets change before they are reached, and nodes lead that have not heard of it."""
    return drawn(
        seed,
        nodes=4,
        has_floors=False,
        fault_every_ms=(60.0, 250.0),
        fault_lasts_ms=(100.0, 900.0),
    ).with_weights(
        move=12, stale_metadata=6, isolate=1, isolate_leader=2, transfer=4, crash=1, kill=0.5
    )


def newcomers(seed: int) -> ClusterOptions:
    """Storages are lost, and who has a new one is heard by its leader before the voters are."""
    return drawn(
        seed,
        has_floors=False,
        partitions=4,
        election_ticks=10,
        broker_session_ms=1_500,
        fault_every_ms=(60.0, 250.0),
        fault_lasts_ms=(20.0, 200.0),
    ).with_weights(wipe=2, newcomer_first=1)


def journals(seed: int) -> ClusterOptions:
    """Votes are forgotten while others are out of touch, in terms that are still asked for."""
    return drawn(
        seed,
        has_floors=False,
        partitions=8,
        fault_every_ms=(60.0, 250.0),
        fault_lasts_ms=(400.0, 1_000.0),
    ).with_weights(rot_journal=4, halves=3, isolate_leader=3)


def indexes(seed: int) -> ClusterOptions:
    """Indexes go bad, and many clients ask by time for what lies in closed segments."""
    return drawn(
        seed,
        has_floors=False,
        segment_bytes=4_096,
        consumers=1,
        registers=1,
        api_fuzzers=1,
        historians=8,
        records_max=8,
        safety_ms=6_000,
        fault_every_ms=(80.0, 250.0),
        fault_lasts_ms=(20.0, 120.0),
    ).with_weights(rot_index=2, transfer=8)


def lost_folders(seed: int) -> ClusterOptions:
    """Folders of partitions are lost while others vote."""
    return drawn(
        seed, has_floors=False, fault_every_ms=(80.0, 400.0), fault_lasts_ms=(20.0, 500.0)
    ).with_weights(lose_folder=4, isolate_leader=2, crash_leader=2, isolate=2)


def log_starts(seed: int) -> ClusterOptions:
    """Log starts move and the power goes, mostly in the middle of it."""
    return drawn(
        seed,
        has_floors=False,
        segment_bytes=2_048,
        snapshot_bytes=8_192,
        fault_every_ms=(40.0, 200.0),
        fault_lasts_ms=(20.0, 200.0),
    ).with_weights(delete_records=4, crash_in=6, crash_point=2, crash=1)


def slow_flushes(seed: int) -> ClusterOptions:
    """Bare entries with records right behind them, long flushes, and the power goes."""
    return drawn(
        seed,
        has_floors=False,
        fsync_ms=(15.0, 50.0),
        think_ms=(2.0, 10.0),
        fault_every_ms=(20.0, 90.0),
        fault_lasts_ms=(20.0, 120.0),
    ).with_weights(delete_records=4, crash=3, crash_leader=2)


def rot(seed: int) -> ClusterOptions:
    """Flushed bytes go bad."""
    return drawn(
        seed, fault_every_ms=(150.0, 500.0), fault_lasts_ms=(50.0, 300.0), segment_bytes=2_048
    ).with_weights(rot=3, rot_everywhere=1, transfer=2, kill=1)


def rot_as_clients_see_it(seed: int) -> ClusterOptions:
    """The same, judged by what clients were told alone."""
    return attrs.evolve(rot(seed), is_black_box=True, spares_metadata=True)


def deletions(seed: int) -> ClusterOptions:
    """Records are deleted while leaders change and replicas are replaced."""
    return drawn(
        seed, fault_every_ms=(80.0, 350.0), fault_lasts_ms=(60.0, 500.0), segment_bytes=2_048
    ).with_weights(delete_records=5, isolate=3, isolate_leader=2, transfer=2, wipe=1, kill=1)


def deletions_at_rest(seed: int) -> ClusterOptions:
    """Everything is deleted while producers rest; then processes end, and producers go on."""
    return drawn(
        seed,
        rest=0.05,
        fault_every_ms=(60.0, 250.0),
        fault_lasts_ms=(30.0, 200.0),
        segment_bytes=2_048,
        transactional=0,
    ).with_weights(delete_records=6, kill=4, crash_leader=1, transfer=2)


def clocks(seed: int) -> ClusterOptions:
    """Clocks jump by days."""
    return drawn(seed, clock_skew_ms=15 * 86_400_000.0, segment_bytes=2_048).with_weights(
        clock_jump=4, transfer=2, crash_leader=1
    )


def changes(seed: int) -> ClusterOptions:
    """Power is lost in the middle of truncations and resets."""
    return drawn(seed, fault_every_ms=(300.0, 900.0)).with_weights(crash_in_change=1)


def snapshots(seed: int) -> ClusterOptions:
    """Metadata snapshots are taken and installed."""
    return drawn(seed, snapshot_bytes=8_192).with_weights(wipe=2, crash=2, isolate=2, kill=1)


def full_disks(seed: int) -> ClusterOptions:
    """Disks are full for a while."""
    return drawn(seed, fault_every_ms=(200.0, 600.0), fault_lasts_ms=(200.0, 900.0)).with_weights(
        full_disk=4, isolate_leader=1, kill=1
    )


def slow_disks(seed: int) -> ClusterOptions:
    """Every flush takes longer than an election timeout, and nothing else is wrong."""
    return drawn(
        seed,
        has_floors=False,
        keeps_leaders=True,
        slow_fsync_ms=1_200.0,
        fault_every_ms=(300.0, 900.0),
        fault_lasts_ms=(500.0, 1_500.0),
        drop=0.0,
        straggler=0.0,
        client_drop=0.0,
    ).with_weights(slow_disk=1)


def rubbish(seed: int) -> ClusterOptions:
    """Clients send rubbish, and batches whose bytes changed on the way."""
    return drawn(seed, fault_every_ms=(50.0, 200.0)).with_weights(
        malformed=6, transfer=1, crash_leader=1, kill=1
    )


def out_of_touch(seed: int) -> ClusterOptions:
    """A broker loses sight of the controller, and of nobody else, for longer than ten seconds."""
    return drawn(
        seed,
        has_floors=False,
        safety_ms=16_000,
        fault_every_ms=(500.0, 1_500.0),
        drop=0.0,
        straggler=0.0,
    ).with_weights(cut_controller=1)


def secluded(seed: int) -> ClusterOptions:
    """Nodes are out of touch for longer than a broker's session, and clients go on asking them."""
    return drawn(
        seed,
        has_floors=False,
        session_ms=1_200,
        safety_ms=10_000,
        registers=6,
        fault_every_ms=(500.0, 1_500.0),
        fault_lasts_ms=(1_800.0, 3_500.0),
    ).with_weights(isolate=4, pause=1)


def _elastic(seed: int, **weights: float) -> ClusterOptions:
    """Brokers come and go all the time, in three racks, and little else happens."""
    return drawn(
        seed,
        elastic=True,
        newcomers=3,
        racks=3,
        replace_after_ms=600,
        elastic_every_ms=(10.0, 120.0),
        elastic_weights=tuple((name.replace("_", "-"), odds) for name, odds in weights.items()),
        has_floors=False,
        safety_ms=6_000,
        liveness_ms=40_000,
        fault_every_ms=(150.0, 700.0),
        fault_lasts_ms=(50.0, 400.0),
    ).with_weights(isolate=1, isolate_controller=1, crash=1, crash_leader=1, transfer=1, pause=1)


def drains(seed: int) -> ClusterOptions:
    """Nodes join, are drained and removed."""
    return _elastic(seed, join=4, add=4, drain=4, cancel_drain=1, remove=3, cordon=1, uncordon=1)


def votes(seed: int) -> ClusterOptions:
    """The same, and the number of votes on metadata goes up and down."""
    return _elastic(seed, join=4, add=4, drain=4, cancel_drain=1, remove=2, voters=3)


def plans(seed: int) -> ClusterOptions:
    """Moves are planned, changed on their way and cancelled."""
    return _elastic(seed, join=4, add=4, reassign=8, cancel=3, move=3, drain=1, cancel_drain=1)


def races(seed: int) -> ClusterOptions:
    """What is to move is decided by several at a time."""
    options = _elastic(seed, join=3, add=4, move=10, drain=5, cancel_drain=4)
    return attrs.evolve(
        options, elastic_every_ms=(2.0, 40.0), fsync_ms=(5.0, 20.0), latency_ms=(1.0, 10.0)
    )


def deaths(seed: int) -> ClusterOptions:
    """Nodes are away for about as long as is waited for them, one or two."""
    return _elastic(seed, join=5, add=5, death=5, balance=2, reassign=1)


def narrows(seed: int) -> ClusterOptions:
    """A topic shrinks and grows all the time, under leaders that change."""
    return drawn(
        seed,
        narrow=True,
        narrow_every_ms=(20.0, 250.0),
        has_floors=False,
        safety_ms=8_000,
        members=1,
        registers=0,
        api_fuzzers=0,
        historians=0,
        fault_every_ms=(100.0, 600.0),
        fault_lasts_ms=(60.0, 500.0),
    ).with_weights(
        isolate_leader=3,
        isolate=2,
        isolate_controller=1,
        crash_leader=2,
        transfer=3,
        pause=2,
        move=1,
    )


def narrows_in_transactions(seed: int) -> ClusterOptions:
    """The same, and what writes to it does so in transactions."""
    return attrs.evolve(
        narrows(seed), narrow_in_transactions=True, offsets_retention_ms=7 * 86_400_000
    )
