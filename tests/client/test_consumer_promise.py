"""Both deliveries under random handling, errors, rebalances, seeks, closes, crashes and restarts.

Members are real cores; the group's coordinator and the log are models that follow Kafka's rules,
among them that an empty group takes commits without a generation. Each planted bug is one that was
there once; a property that does not notice it is worth nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct, decode_request
from raftmq.protocol.fetch import (
    FetchPartitionResponse,
    FetchResponse,
    FetchTopicResponse,
    decode_fetch_request,
)
from raftmq.records import NewRecord, build_batch, stamp
from raftmq.types import TopicPartition
from raftmq_client.core.call import Call
from raftmq_client.core.client import ClientCore, ClientOptions
from raftmq_client.core.consumer import ConsumerCore
from raftmq_client.core.group import GroupCore
from raftmq_client.core.group_state import GaveUp, Pending
from raftmq_client.core.messages import ConsumerRecord
from raftmq_client.core.metadata import Broker, ClusterInfo, PartitionInfo, TopicInfo
from raftmq_client.core.progress import Progress
from raftmq_client.errors import ConnectionLostError
from raftmq_client.options import consumer_options

KEYS = tuple(TopicPartition("t", number) for number in range(3))
STEPS = 200
SEEDS = 25
VERSIONS = {ApiKey.JOIN_GROUP: 5, ApiKey.SYNC_GROUP: 3, ApiKey.OFFSET_COMMIT: 8}
VERSIONS |= {ApiKey.HEARTBEAT: 3, ApiKey.LEAVE_GROUP: 3, ApiKey.LIST_OFFSETS: 7}


def cluster() -> ClusterInfo:
    parts = tuple(PartitionInfo("t", key.partition, 1, 0) for key in KEYS)
    return ClusterInfo("c", 1, (Broker(1, "h", 1),), (TopicInfo("t", None, False, parts),))


class Coordinator:
    """One group, as Kafka has it (classic protocol), and what it has committed."""

    def __init__(self, committed: Callable[[TopicPartition, int], None]) -> None:
        self.members: dict[str, bytes] = {}
        self.generation = 0
        self.committed: dict[TopicPartition, int] = {}
        self._tell = committed
        self._count = 0
        self._is_stable = False
        self._joining: dict[str, Call] = {}
        self._syncing: dict[str, Call] = {}
        self._assigned: dict[str, bytes] = {}

    def evict(self, member: str) -> None:
        del self.members[member]
        for waiting in (self._joining, self._syncing):
            if member in waiting:
                answer(waiting.pop(member), error_code=ErrorCode.UNKNOWN_MEMBER_ID)
        self._prepare()

    def _prepare(self) -> None:
        self._is_stable = False
        syncing, self._syncing = self._syncing, {}
        for call in syncing.values():
            answer(call, error_code=ErrorCode.REBALANCE_IN_PROGRESS)
        if not self.members or set(self._joining) != set(self.members):
            return
        self.generation += 1
        self._assigned = {}
        joining, self._joining = self._joining, {}
        leader = min(joining)
        everybody = [Struct(member_id=m, metadata=data) for m, data in self.members.items()]
        for member, call in joining.items():
            answer(
                call,
                generation_id=self.generation,
                protocol_name=self.protocol,
                leader=leader,
                member_id=member,
                members=everybody if member == leader else [],
            )

    def join(self, call: Call, request: Struct) -> None:
        member = request.member_id
        if member and member not in self.members:
            answer(call, error_code=ErrorCode.UNKNOWN_MEMBER_ID)
            return
        if not member:
            self._count += 1
            member = f"m{self._count:04}"
        self.protocol = request.protocols[0].name
        self.members[member] = bytes(request.protocols[0].metadata)
        self._joining[member] = call
        self._prepare()

    def refusal(self, member: str, generation: int) -> ErrorCode:
        if member not in self.members:
            return ErrorCode.UNKNOWN_MEMBER_ID
        return ErrorCode.NONE if generation == self.generation else ErrorCode.ILLEGAL_GENERATION

    def sync(self, call: Call, request: Struct) -> None:
        code = self.refusal(request.member_id, request.generation_id)
        if not code and self._joining:
            code = ErrorCode.REBALANCE_IN_PROGRESS
        if code:
            answer(call, error_code=code)
            return
        self._syncing[request.member_id] = call
        for item in request.assignments:
            self._assigned[item.member_id] = bytes(item.assignment)
        if self._assigned:
            self._is_stable = True
            syncing, self._syncing = self._syncing, {}
            for member, waiting in syncing.items():
                answer(waiting, assignment=self._assigned.get(member, b""))

    def heartbeat(self, call: Call, request: Struct) -> None:
        code = self.refusal(request.member_id, request.generation_id)
        if not code and not self._is_stable:
            code = ErrorCode.REBALANCE_IN_PROGRESS
        answer(call, error_code=code)

    def commit(self, call: Call, request: Struct) -> None:
        generation = request.generation_id_or_member_epoch
        code = self.refusal(request.member_id, generation)
        if generation == -1 and not self.members:
            code = ErrorCode.NONE  # an empty group takes it, as a tool's
        parts = [part for topic in request.topics for part in topic.partitions]
        for part in parts if not code else ():
            key = TopicPartition("t", part.partition_index)
            self._tell(key, part.committed_offset)
            self.committed[key] = part.committed_offset
        items = [Struct(partition_index=p.partition_index, error_code=code) for p in parts]
        answer(call, topics=[Struct(name="t", partitions=items)])


def answer(call: Call, **fields: Any) -> None:
    fields.setdefault("error_code", 0)
    call.complete(Struct(**fields), None, 0)


class Process:
    """A member and its application; what drivers do around a core is done here as they do it."""

    def __init__(self, world: World) -> None:
        self.world = world
        client = ClientCore(ClientOptions())
        client.metadata.apply(cluster(), 0)
        self.metadata = client.metadata
        self.core = ConsumerCore(consumer_options(group="g", **world.settings()), client)
        self.core.subscribe(["t"], world.now)
        self.in_hand: list[ConsumerRecord] = []

    @property
    def group(self) -> GroupCore:
        assert self.core.group is not None
        return self.core.group

    def pump(self) -> None:
        """Send what is due, and answer it."""
        for _ in range(6):
            now = self.world.now
            calls = [*self.metadata.calls(now), *self.core.fetcher.calls(now)]
            calls += self.group.calls(now)
            for call in calls:
                self.world.serve(call, self.metadata.apply)

    def wait(self, pending: Pending | None) -> bool:
        """Whether it got through before the application lost its patience."""
        for _ in range(3):
            if pending is None or pending.is_done:
                break
            self.world.interfere()
            self.pump()
        return pending is None or (pending.is_done and pending.error is None)

    def poll(self, count: int) -> list[ConsumerRecord]:
        core, now = self.core, self.world.now
        self.world.finish(self.in_hand)
        self.in_hand = []
        while (event := core.next_event(now)) is not None:
            if isinstance(event, GaveUp) and not event.is_lost:
                self.wait(core.last_commit(event.partitions, now))
                if not event.is_lost:
                    self.world.stands(core, event.partitions)
            core.told(event)
        taken = core.take(count, now)
        if taken and core.options.commits_first:
            if not self.wait(core.commit_first(now)):
                core.put_back(taken)
                return []
            core.committed_first()
        return taken

    def take_batch(self, count: int) -> None:
        self.hand(self.poll(count))

    def iterate(self) -> None:
        self.world.finish(self.in_hand)
        self.in_hand = []
        record = self.core.next_record(self.world.now)
        if record is None:
            records = self.poll(self.world.draw.choice([2, 500]))
            record = self.core.iterate(records) if records else None
        self.hand([record] if record is not None else [])

    def hand(self, records: list[ConsumerRecord]) -> None:
        self.world.handed(records)
        self.in_hand = records

    def commit(self) -> None:
        """One that is in hand, by itself; or all of them."""
        if not self.in_hand or self.group.is_lost:
            return
        message = self.world.draw.choice([None, self.in_hand[-1]])
        if self.core.options.commits_first:
            message = None  # it would go back behind the rest of its poll, by its own word
        if message is None:
            self.world.finish(self.in_hand)
        else:
            place = message.topic, message.partition
            self.world.finish(r for r in self.in_hand if (r.topic, r.partition) == place)
        self.wait(self.core.commit(message, self.world.now))

    def seek(self) -> None:
        keys = self.core.assignment
        if not keys:
            return
        key = self.world.draw.choice(keys)
        position = self.core.position(key)
        if position is None:
            return
        self.world.seek(self.core, key, position)

    def pause(self) -> None:
        if keys := self.core.assignment:
            key = self.world.draw.choice(keys)
            self.core.set_paused([key], self.world.draw.random() < 0.4)

    def end(self, *, is_done: bool) -> None:
        """Close, or leave the block; an error in a handler finishes nothing."""
        if is_done:
            self.world.finish(self.in_hand)
        held = self.core.assignment
        self.core.stop(is_done=is_done)
        if self.wait(self.core.last_commit(held, self.world.now)) and not self.group.is_lost:
            self.world.stands(self.core, held)
        call = self.core.leave(lambda _response, _error, _now: None)
        if call is not None:
            self.world.serve(call, self.metadata.apply)


class World:
    """The log, the group, its members, and what their applications have done."""

    def __init__(self, seed: int, delivery: str | None) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.delivery = delivery
        self.reset = "earliest" if delivery == "at_least_once" else "latest"
        self.assignors = self.draw.choice([("range",), ("cooperative-sticky",)])
        self.seeks = self.draw.random() < 0.5
        self.ends = dict.fromkeys(KEYS, 0)
        self.base: dict[TopicPartition, int] = {}
        """From here on nothing may be passed over."""
        if self.reset == "earliest":
            self.base = dict.fromkeys(KEYS, 0)
        self.finished: dict[TopicPartition, set[int]] = {key: set() for key in KEYS}
        self.sought: set[TopicPartition] = set()
        self.seen: set[tuple[int, int]] = set()
        self.coordinator = Coordinator(self.committing)
        self.processes: list[Process] = []

    def settings(self) -> dict[str, Any]:
        return {
            "delivery": self.delivery,
            "reset": self.reset,
            "assignors": self.assignors,
            "heartbeat_interval_ms": 40,
            **({} if self.delivery == "at_most_once" else {"auto_commit_ms": 100}),
        }

    # What must hold.

    def committing(self, key: TopicPartition, offset: int) -> None:
        if self.delivery == "at_most_once":
            return  # what it committed and did not hand out it may put back
        self.check_finished(key, offset, "committed")
        if key not in self.sought:
            assert offset >= self.coordinator.committed.get(key, 0), f"{key} was put back"

    def check_finished(self, key: TopicPartition, end: int, what: str) -> None:
        missing = set(range(self.base.get(key, end), end)) - self.finished[key]
        assert not missing, f"{key}: {what} {end}, passed over {sorted(missing)}"

    def handed(self, records: Iterable[ConsumerRecord]) -> None:
        first: dict[TopicPartition, int] = {}
        for record in records:
            first.setdefault(TopicPartition(record.topic, record.partition), record.offset)
            place = record.partition, record.offset
            if self.delivery == "at_most_once":
                assert place not in self.seen, f"{place} was handed out twice"
            self.seen.add(place)
        if self.delivery != "at_most_once":
            for key, offset in first.items():
                self.check_finished(key, offset, "went on at")

    # What applications do.

    def finish(self, records: Iterable[ConsumerRecord]) -> None:
        for record in records:
            self.finished[TopicPartition(record.topic, record.partition)].add(record.offset)

    def stands(self, core: ConsumerCore, keys: Iterable[TopicPartition]) -> None:
        """A commit got through before these were given up: nothing after it may be skipped."""
        for key in keys:
            position = core.position(key) if key in core.fetcher.readers else None
            if position is not None and not self.finished[key]:
                self.base.setdefault(key, position)

    def seek(self, core: ConsumerCore, key: TopicPartition, position: int) -> None:
        """The application's own word: what it passes over is its own business."""
        low = position if self.delivery == "at_most_once" else 0
        offset = self.draw.randint(low, max(position, self.ends[key]))
        self.finished[key].update(range(self.base.get(key, 0), offset))
        self.sought.add(key)
        core.seek(key, offset)

    # What happens.

    def interfere(self) -> None:
        """Somebody else's turn while one waits."""
        self.now += self.draw.choice([1, 50])
        what = self.draw.random()
        if what < 0.15 and self.coordinator.members:
            self.coordinator.evict(self.draw.choice(sorted(self.coordinator.members)))
        for process in self.processes:
            if self.draw.random() < 0.3:
                process.pump()

    def step(self) -> None:
        draw = self.draw
        self.now += draw.choice([1, 10, 60])
        for process in [*self.processes]:
            if draw.random() < 0.8:
                process.pump()
        if draw.random() < 0.5:
            self.ends[draw.choice(KEYS)] += draw.randint(1, 6)
        dead = self.coordinator.members.keys() - {p.group.member_id for p in self.processes}
        if dead and draw.random() < 0.2:
            self.coordinator.evict(min(dead))
        what = draw.random()
        if not self.processes or (what < 0.04 and len(self.processes) < 3):
            self.processes.append(Process(self))
        elif what < 0.07 and self.coordinator.members:
            self.coordinator.evict(draw.choice(sorted(self.coordinator.members)))
        else:
            self.act(draw.choice(self.processes), draw.random())

    def act(self, process: Process, what: float) -> None:
        if what < 0.4:
            process.take_batch(self.draw.choice([1, 3, 500]))
        elif what < 0.75:
            process.iterate()
        elif what < 0.82:
            process.commit()
        elif what < 0.82 + 0.03 * self.seeks:
            process.seek()
        elif what < 0.90:
            process.pause()
        else:
            self.processes.remove(process)
            if what < 0.98:  # else it crashes, and is noticed some time
                process.end(is_done=what < 0.93)

    # The brokers.

    def serve(self, call: Call, tell: Callable[[ClusterInfo, float], None]) -> None:
        call.sent = True
        api = ApiKey(call.api)
        is_lost = self.draw.random() < 0.02 and api not in (ApiKey.METADATA, ApiKey.LEAVE_GROUP)
        if is_lost and self.draw.random() < 0.5:
            call.complete(None, ConnectionLostError("gone"), self.now)
            return
        finish = call.finish
        if is_lost:  # it is done, and nobody hears of it
            call.finish = lambda _r, _e, now: finish(None, ConnectionLostError("gone"), now)
        if api is ApiKey.METADATA:
            tell(cluster(), self.now)
            call.complete(None, ConnectionLostError("told above"), self.now)
        elif api is ApiKey.FIND_COORDINATOR:
            place = Struct(node_id=1, host="h", port=1, error_code=0, error_message=None)
            answer(call, coordinators=[place])
        elif api is ApiKey.FETCH:
            self.fetch(call)
        elif api is ApiKey.OFFSET_FETCH:
            known = self.coordinator.committed
            data = memoryview(b"".join(bytes(piece) for piece in call.body(8)))
            asked = decode_request(api, 8, data).groups[0].topics
            parts = [
                Struct(
                    partition_index=number,
                    committed_offset=known.get(KEYS[number], -1),
                    metadata="",
                    error_code=0,
                )
                for topic in asked
                for number in topic.partition_indexes
            ]
            group = Struct(error_code=0, topics=[Struct(name="t", partitions=parts)])
            answer(call, groups=[group])
        else:
            data = memoryview(b"".join(bytes(piece) for piece in call.body(VERSIONS[api])))
            self.handle(api, call, decode_request(api, VERSIONS[api], data))

    def handle(self, api: ApiKey, call: Call, request: Struct) -> None:
        if api is ApiKey.LIST_OFFSETS:
            parts = [
                Struct(
                    partition_index=part.partition_index,
                    error_code=0,
                    timestamp=-1,
                    offset=0 if part.timestamp == -2 else self.ends[KEYS[part.partition_index]],
                    leader_epoch=0,
                )
                for topic in request.topics
                for part in topic.partitions
            ]
            answer(call, topics=[Struct(name="t", partitions=parts)])
        elif api is ApiKey.LEAVE_GROUP:
            if request.members[0].member_id in self.coordinator.members:
                self.coordinator.evict(request.members[0].member_id)
            answer(call, members=[])
        else:
            handlers = {
                ApiKey.JOIN_GROUP: self.coordinator.join,
                ApiKey.SYNC_GROUP: self.coordinator.sync,
                ApiKey.HEARTBEAT: self.coordinator.heartbeat,
                ApiKey.OFFSET_COMMIT: self.coordinator.commit,
            }
            handlers[api](call, request)

    def fetch(self, call: Call) -> None:
        request = decode_fetch_request(12, memoryview(b"".join(bytes(b) for b in call.body(12))))
        parts = []
        for item in (item for topic in request.topics for item in topic.partitions):
            end = self.ends[KEYS[item.partition]]
            batches = []
            for base in range(item.fetch_offset, min(end, item.fetch_offset + 8), 4):
                count = min(4, end - base)
                batch = bytearray(build_batch([NewRecord(None, b"x", 0, ())] * count))
                stamp(batch, base, 0)
                batches.append(memoryview(batch))
            parts.append(FetchPartitionResponse(item.partition, 0, end, end, 0, records=batches))
        call.complete(FetchResponse([FetchTopicResponse("t", None, parts)]), None, self.now)


def run(seed: int, delivery: str | None) -> World:
    world = World(seed, delivery)
    for _ in range(STEPS):
        world.step()
    return world


DELIVERIES = ("at_least_once", "at_most_once", None)


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_nothing_is_passed_over_and_nothing_put_back(delivery: str | None) -> None:
    handed = commits = 0
    for seed in range(SEEDS):
        try:
            world = run(seed, delivery)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        handed += len(world.seen)
        commits += len(world.coordinator.committed)
    assert handed > 50 * SEEDS, "or nothing was tried"
    assert commits > SEEDS


def finish_in_hand(self: Progress) -> None:
    self.finish()


def forget_starts(self: ConsumerCore) -> None:
    self.fetcher.starts.clear()


PLANTED: dict[str, list[tuple[type, str, Any]]] = {
    "what is in hand is committed at the end": [(Progress, "drop", finish_in_hand)],
    "a position that a reset chose is not committed": [
        (ConsumerCore, "_note_starts", forget_starts)
    ],
    "a member that was put out commits without a generation": [
        (GroupCore, "_lose", lambda _self: None),
        (GroupCore, "is_lost", property(lambda _self: False)),
    ],
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, name, wrong in PLANTED[bug]:
        monkeypatch.setattr(where, name, wrong)
    for seed in range(SEEDS * 4):
        for delivery in DELIVERIES:
            try:
                run(seed, delivery)
            except AssertionError:
                return
    pytest.fail("no seed noticed it")
