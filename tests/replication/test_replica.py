"""The replica engine under one fault at a time: disks that fill, fail, rot or vanish."""

from __future__ import annotations

import attrs
import pytest

from raftmq.errors import NotLeaderError, RemoteProtocolError, StorageError
from raftmq.log.model import DamagedError
from raftmq.raft.messages import AppendRequest, Entry, EntryKind, Heartbeat
from raftmq.records import NewRecord, build_batch, stamp
from raftmq.replication.clocks import RetentionClock
from raftmq.replication.messages import WrongReplica
from raftmq.types import Offset, RaftIndex, ReplicaId, StorageId
from tests.replication.sim_cluster import SimCluster
from tests.replication.sim_nodes import SimNode

DAY_MS = 86_400_000


class TestAppending:
    def test_offsets_begin_at_0_and_an_election_takes_none(self) -> None:
        cluster = SimCluster()
        assert cluster.append() == 0
        assert cluster.append(count=3) == 1
        cluster.settle()
        leader = cluster.leader
        leader.crash()
        cluster.until(lambda: bool(cluster.leaders()))
        assert cluster.append() == 4

    def test_only_a_leader_appends(self) -> None:
        cluster = SimCluster()
        with pytest.raises(NotLeaderError):
            cluster.append(cluster.followers()[0])

    def test_a_full_disk_refuses_the_append_and_nothing_else(self) -> None:
        cluster = SimCluster()
        cluster.commit()
        leader = cluster.leader
        leader.disk.capacity_bytes = leader.disk.used_bytes() + 20
        end = cluster.replica(leader).log.end_index
        with pytest.raises(StorageError):
            cluster.append(size=500)
        assert cluster.replica(leader).failure is None
        assert cluster.replica(leader).log.end_index == cluster.replica(leader).core.log_end == end
        leader.disk.capacity_bytes = None
        cluster.commit(3)
        cluster.settle()

    def test_a_follower_with_a_full_disk_catches_up_when_there_is_room(self) -> None:
        cluster = SimCluster()
        follower = cluster.followers()[0]
        follower.disk.capacity_bytes = follower.disk.used_bytes() + 20
        cluster.commit(10, size=300)
        cluster.run(500)
        assert cluster.replica(follower).failure is None
        assert cluster.replica(follower).log_end_offset < 10
        follower.disk.capacity_bytes = None
        cluster.settle()
        assert cluster.replica(follower).log_end_offset == 10

    def test_batches_staged_behind_an_election_may_meet_a_full_disk(self) -> None:
        cluster = SimCluster(fsync_ms=(20.0, 25.0))
        cluster.commit(3)
        cluster.leader.crash()
        cluster.until(lambda: bool(cluster.world.leaders(cluster.group)))
        node = cluster.world.leaders(cluster.group)[0]
        replica = cluster.replica(node)
        node.disk.capacity_bytes = node.disk.used_bytes() + 50
        # Its election entry is not flushed yet, so the batch waits in memory.
        assert cluster.append(node, size=400) == 3
        cluster.until(lambda: not replica.is_leader, 500)
        assert replica.failure is None
        assert replica.log_end_offset == 3
        assert node.machines[cluster.group].end == replica.log.end_index == replica.core.log_end
        node.disk.capacity_bytes = None
        cluster.until(lambda: bool(cluster.leaders()))
        cluster.commit(2)
        cluster.settle()

    def test_a_leader_without_room_for_a_bare_entry_goes_on_when_opened_again(self) -> None:
        """Beyond its reserve it cannot even say so to its log; the node opens it again."""
        cluster = SimCluster()
        cluster.commit(3)
        node = cluster.leader
        replica = cluster.replica(node)
        node.disk.capacity_bytes = node.disk.used_bytes()
        while replica.failure is None:
            assert replica.is_writable
            replica.move_log_start(Offset(2))
            cluster.run(50)
        assert replica.lacks_space
        cluster.until(lambda: cluster.leaders() not in ([], [node]))
        node.crash()
        node.disk.capacity_bytes = None
        node.start()
        assert cluster.replica(node).failure is None
        cluster.commit(2)

    def test_a_failed_flush_stops_the_replica_for_good(self) -> None:
        cluster = SimCluster()
        follower = cluster.followers()[0]
        replica = cluster.replica(follower)
        follower.disk.fail_when(lambda verb, path: verb == "fdatasync" and path.endswith(".log"))
        cluster.append()
        cluster.until(lambda: replica.failure is not None, 100)
        assert "flush failed" in str(replica.failure)
        assert not replica.is_leader
        assert replica.flush_job() is None
        follower.disk.fail_when(None)
        cluster.settle()  # the supervisor started the node again

    def test_a_failed_journal_stops_the_node(self) -> None:
        cluster = SimCluster()
        follower = cluster.followers()[0]
        incarnation = follower.incarnation
        follower.disk.fail_when(lambda verb, path: verb == "fdatasync" and "journal" in path)
        cluster.leader.crash()
        cluster.until(lambda: follower.incarnation != incarnation)
        assert not follower.is_up

    def test_damaged_batches_from_a_peer_are_refused_before_they_are_written(self) -> None:
        cluster = SimCluster()
        cluster.commit()
        leader, follower = (
            cluster.replica(cluster.leader),
            cluster.replica(cluster.followers()[0]),
        )
        end = follower.log.end_index
        batch = build_batch([NewRecord(None, b"v")])
        stamp(batch, follower.log_end_offset, leader.leader_epoch)
        batch[-1] ^= 1
        term = leader.core.term
        entry = Entry(end, RaftIndex(end + 1), term, EntryKind.BATCH, batch)
        request = AppendRequest(
            term, leader.self_id, follower.self_id, end, term, RaftIndex(0), (entry,)
        )
        with pytest.raises(RemoteProtocolError, match="damaged batch"):
            follower.step(request)
        batch[-1] ^= 1
        wide = attrs.evolve(entry, end=RaftIndex(end + 2))
        with pytest.raises(RemoteProtocolError, match="wrong place"):
            follower.step(attrs.evolve(request, entries=(wide,)))
        assert follower.log.end_index == end


class TestIdentity:
    def test_a_message_for_another_storage_is_only_answered(self) -> None:
        cluster = SimCluster()
        leader, follower = (
            cluster.replica(cluster.leader),
            cluster.replica(cluster.followers()[0]),
        )
        said: list[object] = []
        follower.send = said.append
        other = ReplicaId(follower.self_id.node_id, StorageId(12345))
        term = follower.core.term + 5
        follower.step(Heartbeat(term, leader.self_id, other, RaftIndex(0), 1))  # type: ignore[arg-type]
        assert said == [WrongReplica(term, follower.self_id, leader.self_id)]  # type: ignore[arg-type]
        assert follower.core.term < term

    @pytest.mark.parametrize("loss", ["all", "folder", "journal"])
    def test_a_node_that_lost_storage_is_readmitted_as_another(self, loss: str) -> None:
        cluster = SimCluster()
        cluster.commit(5)
        node = cluster.followers()[0]
        before = cluster.replica(node).self_id
        if loss == "all":
            node.wipe()
        elif loss == "folder":
            node.lose_folder(0)
        else:
            node.crash()
            node.forget()
            node.disk.overwrite("data/state.journal", b"\xff" * 600)
        node.start()
        after = cluster.replica(node).self_id
        assert after.node_id == before.node_id
        assert after != before
        cluster.commit(3)
        cluster.until(cluster.world.is_whole)
        voters = cluster.replica(cluster.leader).voters
        assert len(voters) == 3
        assert after in voters
        cluster.settle()

    def test_a_readmitted_node_that_leads_removes_its_own_earlier_name(self) -> None:
        cluster = SimCluster()
        cluster.commit(5)
        node = cluster.followers()[0]
        node.wipe()
        node.start()
        for _ in range(1_000):
            leader = cluster.leaders()
            if leader and len(cluster.replica(leader[0]).voters) == 4:
                break
            cluster.run(1.0)
        leader_node = cluster.leader
        assert len(cluster.replica(leader_node).voters) == 4
        leader_node.crash()
        leader_node.start()
        cluster.until(cluster.world.is_whole)
        assert len(cluster.replica(cluster.leader).voters) == 3

    def test_a_lost_majority_elects_nobody(self) -> None:
        cluster = SimCluster()
        cluster.commit(5)
        lost = cluster.nodes[:2]
        for node in lost:
            node.wipe()
        for node in lost:
            node.start()
        cluster.run(4_000)
        assert not cluster.leaders()


class TestDamage:
    def test_a_follower_repairs_flushed_bytes_from_its_peers(self) -> None:
        cluster = SimCluster(segment_bytes=400)
        cluster.commit(20, size=50)
        node = cluster.followers()[0]
        sound = cluster.replica(node)
        start = sound.log.locate(Offset(3), 1, Offset(10))[0]
        path, position = start.file.path, start.position
        node.crash()
        node.disk.flip(path, position + 70)
        node.start()
        cluster.until(lambda: bool(cluster.replica(node).damaged()))
        with pytest.raises(DamagedError):
            cluster.replica(node).log.locate(Offset(3), 1, Offset(10))
        cluster.until(lambda: not cluster.replica(node).damaged())
        assert cluster.replica(node).log.locate(Offset(3), 1, Offset(10))
        cluster.commit(2)
        cluster.settle()

    def test_a_leader_repairs_itself_and_goes_on(self) -> None:
        cluster = SimCluster(segment_bytes=400)
        cluster.commit(20, size=50)
        node = cluster.leader
        replica = cluster.replica(node)
        span = replica.log.locate(Offset(3), 1, Offset(10))[0]
        node.disk.flip(span.file.path, span.position + 70)
        cluster.until(lambda: bool(replica.damaged()))
        cluster.commit(2)
        cluster.until(lambda: not replica.damaged())
        assert replica.is_leader
        cluster.settle()

    def test_a_damaged_range_that_the_peers_dropped_is_dropped_here_too(self) -> None:
        cluster = SimCluster(segment_bytes=400)
        cluster.commit(20, size=50)
        node = cluster.followers()[0]
        span = cluster.replica(node).log.locate(Offset(3), 1, Offset(10))[0]
        path, position = span.file.path, span.position
        node.crash()
        node.disk.flip(path, position + 70)
        leader = cluster.replica(cluster.leader)
        leader.move_log_start(Offset(15))
        cluster.until(lambda: leader.log_start_offset == 15)
        node.start()
        cluster.until(lambda: cluster.replica(node).log.log_start_offset == 15)
        assert not cluster.replica(node).damaged()
        assert node.machines[cluster.group].inner.doubted == [3], "what it read there may be wrong"
        cluster.commit(2)
        cluster.settle()


class TestLogStart:
    def test_moves_on_every_replica_and_survives_a_restart(self) -> None:
        cluster = SimCluster(segment_bytes=300)
        cluster.commit(10, size=50)
        cluster.replica(cluster.leader).move_log_start(Offset(6))
        cluster.until(lambda: all(cluster.replica(n).log_start_offset == 6 for n in cluster.nodes))
        node = cluster.followers()[0]
        node.crash()
        node.start()
        assert cluster.replica(node).log_start_offset == 6
        cluster.commit(3)
        cluster.settle()

    def test_a_follower_behind_it_begins_anew_there(self) -> None:
        cluster = SimCluster(segment_bytes=300)
        cluster.commit(3)
        node = cluster.followers()[0]
        node.crash()
        cluster.commit(10, size=50)
        leader = cluster.replica(cluster.leader)
        leader.move_log_start(Offset(9))
        cluster.until(lambda: leader.log_start_offset == 9)
        node.start()
        cluster.settle()
        assert cluster.replica(node).log_start_offset == 9

    @pytest.mark.parametrize("who", ["leader", "follower"])
    def test_a_full_disk_keeps_nobody_from_dropping(self, who: str) -> None:
        """A leader whose disk was full served again what a follower had dropped already, and
        nothing gave it space back."""
        cluster = SimCluster(segment_bytes=300)
        cluster.commit(10, size=50)
        node = cluster.leader if who == "leader" else cluster.followers()[0]
        others = [other for other in cluster.nodes if other is not node]
        node.disk.capacity_bytes = node.disk.used_bytes()
        cluster.replica(cluster.leader).move_log_start(Offset(6))
        cluster.until(lambda: all(cluster.replica(n).log_start_offset == 6 for n in others))
        stuck = cluster.replica(node)
        cluster.until(lambda: stuck.log_start_offset == 6)
        cluster.until(lambda: stuck.log.log_start_offset == 6)
        assert stuck.failure is None
        assert node.disk.used_bytes() < node.disk.capacity_bytes, "and space was given back"
        node.disk.capacity_bytes = None
        cluster.commit(3)
        cluster.settle()

    @pytest.mark.parametrize("target", [6, 10, 25])
    def test_a_full_follower_drops_what_its_leader_dropped_before_it_can_hear_of_it(
        self, target: int
    ) -> None:
        """What says so stands in the log behind batches for which it has no room."""
        cluster = SimCluster(segment_bytes=300)
        cluster.commit(10, size=50)
        cluster.settle()
        node = cluster.followers()[0]
        stuck = cluster.replica(node)
        node.disk.capacity_bytes = node.disk.used_bytes()
        cluster.commit(20, size=50)
        end = stuck.log_end_offset
        assert end < 20
        cluster.replica(cluster.leader).move_log_start(Offset(target))
        cluster.until(lambda: stuck.log.log_start_offset >= min(target, end))
        assert stuck.failure is None
        assert node.disk.used_bytes() < node.disk.capacity_bytes, "space was given back"
        cluster.until(lambda: stuck.log_end_offset > end)
        node.disk.capacity_bytes = None
        cluster.commit(3)
        cluster.until(cluster.world.is_whole)
        cluster.settle()
        starts = {cluster.replica(n).log_start_offset for n in cluster.nodes}
        assert starts == {target}

    @pytest.mark.parametrize("seed", range(1, 13))
    def test_what_a_full_follower_has_staged_it_has_not_shown(self, seed: int) -> None:
        """A new log start, which always has room, has batches wait for its flush; these were told
        as committed before there was no room for them, and the replica stopped until space was
        back: it could not drop anything itself, nor vote."""
        cluster = SimCluster(seed, segment_bytes=300)
        cluster.commit(10, size=50)
        cluster.settle()
        node = cluster.followers()[0]
        stuck = cluster.replica(node)
        node.disk.capacity_bytes = node.disk.used_bytes()
        cluster.commit(20, size=50)
        for target in (6, 9, 20):
            cluster.replica(cluster.leader).move_log_start(Offset(target))
            cluster.run(1_000)
            assert stuck.failure is None
        node.disk.capacity_bytes = None
        cluster.commit(3)
        cluster.until(cluster.world.is_whole)
        cluster.settle()
        assert cluster.replica(node) is stuck
        assert stuck.high_watermark == cluster.replica(cluster.leader).high_watermark

    def test_a_follower_shows_no_more_than_is_written(self) -> None:
        """And all of it once it leads: its clients know of every record that was acknowledged."""
        cluster = SimCluster(2, fsync_ms=(1.0, 60.0), segment_bytes=300)
        held_back = 0

        def look() -> bool:
            nonlocal held_back
            for replica in (cluster.replica(node) for node in cluster.nodes if node.is_up):
                end = replica.commit_end
                if replica.is_writable:
                    assert end == replica.core.commit_end
                elif end < replica.core.commit_end:
                    assert end == replica.log.written_end
                    held_back += 1
            return True

        for _ in range(10):
            cluster.until(lambda: look() and bool(cluster.leaders()))
            leader = cluster.leader
            for _ in range(8):
                cluster.append(size=50)
                cluster.run(5)
                look()
            leader.crash()
            cluster.until(lambda: look() and bool(cluster.leaders()))
            leader.start()
            cluster.until(lambda: look() and cluster.world.is_whole())
        assert held_back

    def test_only_what_is_committed_may_go(self) -> None:
        cluster = SimCluster()
        cluster.append()
        with pytest.raises(AssertionError, match="only committed"):
            cluster.replica(cluster.leader).move_log_start(Offset(1))


class TestRetention:
    def retain(self, cluster: SimCluster, skews_ms: list[float]) -> Offset:
        """Two segments of old records; retention with these clocks of the three nodes."""
        for node, skew_ms in zip(cluster.nodes, skews_ms, strict=True):
            node.clock.skew_ms = skew_ms
        cluster.commit(20, size=50)
        cluster.run(500)  # replies bring the followers' clocks
        leader = cluster.replica(cluster.leader)
        leader.retain(leader.high_watermark)
        cluster.run(500)
        return leader.log_start_offset

    def test_a_minority_that_is_far_ahead_deletes_nothing(self) -> None:
        for ahead in range(3):
            cluster = SimCluster(segment_bytes=400)
            skews = [0.0, 0.0, 0.0]
            skews[ahead] = 30.0 * DAY_MS
            assert self.retain(cluster, skews) == 0

    def test_what_a_majority_finds_old_goes(self) -> None:
        cluster = SimCluster(segment_bytes=400)
        assert self.retain(cluster, [30.0 * DAY_MS, 0.0, 30.0 * DAY_MS]) > 0


class TestClocksOfVoters:
    def days_ahead(self, cluster: SimCluster, node: SimNode) -> list[int]:
        """By how much the clocks that the leader knows are ahead of one that is right."""
        now_ms = node.clock.wall_ms()
        replica = cluster.replica(cluster.leader)
        return [round((clock - now_ms) / DAY_MS) for clock in replica.voters_clocks_ms()]

    def test_its_own_and_those_it_hears(self) -> None:
        cluster = SimCluster()
        cluster.commit()
        right, other = cluster.followers()
        cluster.leader.clock.skew_ms = -30.0 * DAY_MS
        other.clock.skew_ms = 5.0 * DAY_MS
        cluster.run(500)
        assert self.days_ahead(cluster, right) == [-30, 0, 5]

    def test_they_are_read_when_a_heartbeat_is_answered(self) -> None:
        """A follower that stood still has not ticked since, and finds the heartbeat first."""
        cluster = SimCluster()
        cluster.commit()
        cluster.run(500)
        follower = cluster.followers()[0]
        follower.clock.skew_ms = 9.0 * DAY_MS
        replica = cluster.replica(follower)
        leader = replica.core.leader
        assert leader is not None
        for take in (replica.take_beat, replica.step):
            replica.core.clock_ms = 0
            take(Heartbeat(replica.core.term, leader, replica.self_id, RaftIndex(0), 9))
            assert replica.core.clock_ms == follower.clock.wall_ms()

    @pytest.mark.parametrize(("own_days", "stamped_days"), [(-30, 0), (0, 0), (5, 5)])
    def test_a_leader_that_is_behind_stamps_nothing_as_old(
        self, own_days: int, stamped_days: int
    ) -> None:
        """Retention would take what it has just appended for a month old."""
        cluster = SimCluster()
        cluster.leader.clock.skew_ms = own_days * DAY_MS
        cluster.commit()
        cluster.run(500)
        now_ms = cluster.followers()[0].clock.wall_ms()
        stamped_ms = cluster.replica(cluster.leader).append_time_ms()
        assert round((stamped_ms - now_ms) / DAY_MS) == stamped_days

    def test_time_goes_on_however_often_one_asks(self) -> None:
        """A look in every tenth of a millisecond must not lose what has passed since the last."""
        clock = RetentionClock()
        clock.read([0, 0], 2, 0.0)
        for number in range(1, 101):
            now_ms = clock.read([10_000, 10_000], 2, number / 10)
        assert now_ms == pytest.approx(10, abs=1)

    def test_who_is_silent_for_long_has_no_clock(self) -> None:
        cluster = SimCluster()
        cluster.commit()
        right, other = cluster.followers()
        cluster.isolate(other)
        cluster.run(2_000)
        assert self.days_ahead(cluster, right) == [0, 0]


class TestInSync:
    def test_a_follower_that_is_cut_off_leaves_and_comes_back(self) -> None:
        cluster = SimCluster()
        cluster.commit()
        leader = cluster.replica(cluster.leader)
        node = cluster.followers()[0]
        identity = cluster.replica(node).self_id
        cluster.until(lambda: len(leader.in_sync_replicas()) == 3)
        cluster.isolate(node)
        cluster.until(lambda: identity not in leader.in_sync_replicas())
        assert len(leader.in_sync_replicas()) == 2
        cluster.mend()
        cluster.until(lambda: identity in leader.in_sync_replicas())

    def test_only_a_leader_knows(self) -> None:
        cluster = SimCluster()
        assert cluster.replica(cluster.followers()[0]).in_sync_replicas() == ()


class TestReadBarrier:
    def test_covers_what_was_committed_before(self) -> None:
        cluster = SimCluster()
        cluster.commit(3)
        leader = cluster.replica(cluster.leader)
        promise = leader.read_barrier()
        cluster.until(lambda: promise.is_done)
        assert promise.result() >= 4

    def test_is_refused_by_followers(self) -> None:
        cluster = SimCluster()
        promise = cluster.replica(cluster.followers()[0]).read_barrier()
        assert isinstance(promise.error, NotLeaderError)

    def test_a_deposed_leader_cannot_keep_it(self) -> None:
        cluster = SimCluster()
        cluster.commit()
        node = cluster.leader
        cluster.isolate(node)
        promise = cluster.replica(node).read_barrier()
        cluster.until(lambda: promise.is_done)
        assert isinstance(promise.error, NotLeaderError)


class TestLeadership:
    def test_is_handed_over(self) -> None:
        cluster = SimCluster()
        cluster.commit()
        target = cluster.followers()[0]
        assert cluster.replica(cluster.leader).transfer_leadership(target.node_id)
        with pytest.raises(NotLeaderError):
            cluster.append(cluster.world.leaders(cluster.group)[0])
        cluster.until(lambda: [n.node_id for n in cluster.leaders()] == [target.node_id], 1_000)

    def test_a_lost_connection_is_a_hint_to_stand_at_once(self) -> None:
        cluster = SimCluster()
        cluster.commit()
        leader, others = cluster.leader, cluster.followers()
        leader.crash()
        cluster.run(5)  # what it sent last arrives before its connections end
        crashed_ms = cluster.world.now_ms
        for node in others:
            assert node.multiraft is not None
            node.multiraft.peer_lost(leader.node_id)
        cluster.until(lambda: bool(cluster.leaders()))
        # The timeout alone is at least election_ticks * tick_ms = 200 ms.
        assert cluster.world.now_ms - crashed_ms < 150
