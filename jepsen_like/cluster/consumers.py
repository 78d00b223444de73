"""Consumers: readers of partitions by hand, and members of groups with rebalances.

Each fetch names its positions, so every poll is a direct fetch of the history's terms. A reader
seeks where its offset is gone. A member speaks the classic protocol: join, sync, heartbeats beside
its polls, commits of what it polled, and what it owns ends with its generation.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

from jepsen_like.cluster.fetch_session import NO_SESSION, SESSION_LOST, WAIT_MS, Session
from jepsen_like.cluster.kafka import NARROW, STALE_LEADER, VERSIONS, VIEW, Kafka, Lost
from jepsen_like.cluster.tasks import until
from jepsen_like.invariants import InvariantViolation
from raftmq.errors import CorruptBatchError, ErrorCode
from raftmq.protocol import ApiKey
from raftmq.protocol.fetch import (
    FetchPartitionResponse,
    decode_fetch_response,
    encode_fetch_request,
)
from raftmq.records import check_batch, read_records, split_batches
from raftmq.types import TopicPartition
from raftmq_client.core.assignors import (
    Subscription,
    assign_range,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld

EARLIEST: Final = -2
LATEST: Final = -1
PATIENT_WAIT_MS: Final = 400
LINGER_POLLS: Final = 3
"""So many polls of a patient reader find nothing at the end, at each node."""
SILENCE_MAX: Final = 2.5
"""Members fall silent for so many sessions at most."""

Where = tuple[str, int]


def name_of(where: Where) -> str:
    """A partition as histories name it: seen through a view it is the same."""
    return f"{NARROW if where[0] == VIEW else where[0]}-{where[1]}"


class Fetcher:
    """Fetches partitions from their leaders and tells the history."""

    def __init__(self, world: ClusterWorld, process: int) -> None:
        self.world = world
        self.kafka = Kafka(world, process)
        self.process = process
        self.positions: dict[Where, int] = {}
        self._uses_sessions = self.kafka.random.random() < world.options.session_share
        self._sessions: dict[int, Session] = {}
        self._wait_ms = WAIT_MS

    async def poll(self, behind: Collection[Where] | None = None) -> list[Where]:
        """One fetch of what one node leads; gives the partitions whose offset is out of range.

        `behind`: the node leads one of these, or it is any.
        """
        kafka = self.kafka
        by_node: dict[int, list[Where]] = {}
        for where in sorted(self.positions):
            try:
                by_node.setdefault(await kafka.leader(*where), []).append(where)
            except Lost:
                continue
        if not by_node:
            await kafka.pause()
            return []
        nodes = [
            n for n, led in by_node.items() if behind is None or not set(led).isdisjoint(behind)
        ]
        node_id = kafka.random.choice(sorted(nodes or by_node))
        # A rebalance may have come in between.
        wanted = [where for where in by_node[node_id] if where in self.positions]
        astray = self.world.options.astray
        if astray and kafka.random.random() < astray:
            node_id = kafka.any_node()
        return await self._fetch(node_id, wanted) if wanted else []

    async def _fetch(self, node_id: int, wanted: list[Where]) -> list[Where]:
        world, kafka = self.world, self.kafka
        asked = {where: self.positions[where] for where in wanted}
        was_led = self._is_led(node_id, wanted)
        operation = world.recorder.invoke(
            self.process, "poll", offsets={name_of(w): o for w, o in asked.items()}, node=node_id
        )
        session = self._sessions.pop(node_id, NO_SESSION)
        epochs = {where: self.kafka.epochs.get(where, -1) for where in asked}
        request = session.request(asked, epochs)
        if not self._uses_sessions:
            request.session_epoch = -1
        request.max_wait_ms = self._wait_ms
        body = encode_fetch_request(VERSIONS[ApiKey.FETCH], request)
        patience_ms = world.options.request_timeout_ms + self._wait_ms - WAIT_MS
        try:
            answer = await until(kafka.request(node_id, ApiKey.FETCH, body, timeout_ms=patience_ms))
        except Lost as error:
            world.recorder.info(operation, error=str(error))
            self._forget_leaders(wanted)
            await kafka.pause()
            return []
        response = decode_fetch_response(VERSIONS[ApiKey.FETCH], answer)
        if response.error_code:
            # The node has forgotten the session: the next fetch begins another.
            assert response.error_code in SESSION_LOST, ErrorCode(response.error_code).name
            world.recorder.fail(operation, code=response.error_code)
            return []
        if self._uses_sessions and response.session_id:
            self._sessions[node_id] = session.after(asked, response.session_id, epochs)
        found: dict[str, list[tuple[int, int | str]]] = {}
        gone: list[Where] = []
        for told in response.topics:
            for part in told.partitions:
                assert told.name is not None
                where = (told.name, part.partition)
                if where not in asked:
                    raise InvariantViolation("FetchSession", f"{where} was not asked for")
                if part.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
                    gone.append(where)
                elif part.error_code:
                    self._forget_leaders([where])
                    assert part.error_code in STALE_LEADER, ErrorCode(part.error_code).name
                else:
                    self._take(where, asked[where], part, found)
        world.counts.acked += 1
        world.recorder.ok(
            operation,
            records=found,
            offsets={name_of(w): asked[w] for w in gone},
            code=int(ErrorCode.OFFSET_OUT_OF_RANGE) if gone else 0,
            stale=not (was_led and self._is_led(node_id, wanted)),
        )
        if not found:
            await kafka.think(1.0, 20.0)
        return gone

    def _take(
        self,
        where: Where,
        position: int,
        part: FetchPartitionResponse,
        found: dict[str, list[tuple[int, int | str]]],
    ) -> None:
        if not part.records:
            return
        data = memoryview(b"".join(map(bytes, part.records)))
        rows: list[tuple[int, int | str]] = []
        for header, batch in split_batches(data):
            try:
                check_batch(batch)
            except CorruptBatchError as error:
                told = f"{name_of(where)} at {header.base_offset}: {error}"
                raise InvariantViolation("DamageIsNeverServed", told) from error
            for record in read_records(batch):
                if record.offset >= position:
                    assert record.value is not None
                    rows.append((record.offset, int(record.value.partition(b".")[0])))
        if rows:
            found[name_of(where)] = rows
            if where in self.positions:
                self.positions[where] = rows[-1][0] + 1

    def _is_led(self, node_id: int, wanted: list[Where]) -> bool:
        """True when the node asked leads them all; others answer, too, and may be behind."""
        return all(self.world.is_newest_leader(node_id, name_of(where)) for where in wanted)

    def _forget_leaders(self, wanted: list[Where]) -> None:
        for where in wanted:
            self.kafka.leaders.pop(where, None)

    async def offset_of(self, where: Where, timestamp: int) -> int | None:
        """An offset by time, earliest or latest; None when nobody says."""
        try:
            leader = await self.kafka.leader(*where)
            row = {"partition_index": where[1], "current_leader_epoch": -1, "timestamp": timestamp}
            answer = await self.kafka.ask(
                leader,
                ApiKey.LIST_OFFSETS,
                replica_id=-1,
                isolation_level=0,
                topics=[{"name": where[0], "partitions": [row]}],
            )
        except Lost:
            self._forget_leaders([where])
            return None
        part = answer.topics[0].partitions[0]
        if part.error_code:
            self._forget_leaders([where])
            return None
        return int(part.offset)

    async def earliest(self, where: Where) -> int:
        """Where a partition begins, asked until somebody says."""
        while True:
            offset = await self.offset_of(where, EARLIEST)
            if offset is not None:
                return offset
            await self.kafka.pause()


class Reader(Fetcher):
    """One process that reads partitions from their beginning, and again from there at the end."""

    def __init__(self, world: ClusterWorld, process: int, partitions: list[Where]) -> None:
        super().__init__(world, process)
        self._partitions = partitions
        self._is_patient = not self._uses_sessions and process % 2 == 1
        if self._is_patient:
            self._wait_ms = PATIENT_WAIT_MS

    async def run(self) -> None:
        """Read until everything is written, and everything was read."""
        world = self.world
        self._assign(dict.fromkeys(self._partitions, 0))
        while not world.is_written:
            await self._once()
            if self.kafka.random.random() < 0.01:
                where = self.kafka.random.choice(self._partitions)
                self._assign({**self.positions, where: await self.earliest(where)})
        await self.read_all()
        if self._is_patient:
            for _ in range(LINGER_POLLS * len(self.world.nodes)):
                await self._once()
        self.kafka.hang_up()

    async def read_all(self) -> None:
        """Read every partition to its end: nobody is asked who has no more of it, and would let
        this reader wait while it falls behind elsewhere."""
        ends: dict[Where, int] = {}
        for where in self._partitions:
            while (end := await self.offset_of(where, LATEST)) is None:
                await self.kafka.pause()
            ends[where] = end
        while behind := [where for where, end in ends.items() if self.positions[where] < end]:
            await self._once(behind)

    async def _once(self, behind: Collection[Where] | None = None) -> None:
        gone = await self.poll(behind)
        if gone:
            starts = {where: await self.earliest(where) for where in gone}
            self._assign({**self.positions, **starts})

    def _assign(self, positions: dict[Where, int]) -> None:
        self.positions = dict(positions)
        offsets = {name_of(where): offset for where, offset in positions.items()}
        operation = self.world.recorder.invoke(self.process, "assign", offsets=offsets)
        self.world.recorder.ok(operation)


class Member(Fetcher):
    """One process that is a member of a group."""

    def __init__(self, world: ClusterWorld, process: int, group: str, topics: list[str]) -> None:
        super().__init__(world, process)
        self.kafka.keeps_epochs = process % 2 == 0
        self._group = group
        self._topics = topics
        self._member_id = ""
        self._generation = -1
        self._coordinator: int | None = None
        self._must_join = True
        self._is_stalled = False
        self._round = 0
        is_static = self.kafka.random.random() < world.options.static_share
        self._instance_id = f"static-{process}" if is_static else None
        # A join is answered once a rebalance is over.
        self._patience_ms = world.options.rebalance_ms + world.options.request_timeout_ms + 500

    @property
    def generation(self) -> int:
        """The generation whose partitions this member has, -1 while it has none."""
        return -1 if self._must_join else self._generation

    # ---- life ----

    async def run(self) -> None:
        """Be a member until the world is quiet; leave and come back now and then."""
        world, kafka = self.world, self.kafka
        subscribed = world.recorder.invoke(
            self.process, "subscribe", group=self._group, topics=self._topics
        )
        world.recorder.ok(subscribed)
        world.clients.spawn(self._heartbeats)
        while not world.is_quiet:
            if self._must_join:
                if not await self._join():
                    await kafka.pause()
                continue
            if not self.positions:
                await kafka.sleep(50.0)
            else:
                await self._consume()
            # A run that saw no rebalance says little of groups.
            if kafka.random.random() < (0.06 if world.counts.rebalances < 2 else 0.004):
                await self._leave()
        await self._commit()
        self._round += 1
        kafka.hang_up()

    async def _consume(self) -> None:
        number = self._round
        gone = await self.poll()
        for where in gone:
            offset = await self.earliest(where)
            if number == self._round and where in self.positions:
                self.positions[where] = offset
        if self.kafka.random.random() < 0.25:
            await self._commit()
        if self.kafka.random.random() < 0.004 and not self.world.is_healed:
            await self._stall()

    async def _stall(self) -> None:
        """Hear and say nothing for longer than the session, then go on as if nothing were."""
        self._is_stalled = True
        session_ms = self.world.options.session_ms
        await self.kafka.sleep(self.kafka.random.uniform(0.8, SILENCE_MAX) * session_ms)
        self._is_stalled = False
        await self._commit()

    def _lose_assignment(self, *, forget_member: bool = False) -> None:
        if self.positions:
            self.world.recorder.note(
                self.process,
                "revoked",
                group=self._group,
                generation=self._generation,
                partitions=[name_of(where) for where in self.positions],
            )
        self.positions = {}
        self._must_join = True
        self._round += 1
        if forget_member:
            self._member_id = ""
            self._generation = -1

    def _heard(self, code: int) -> bool:
        """Draw conclusions from an error code; True when there is none."""
        if code == ErrorCode.NONE:
            return True
        if code in (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE):
            self._coordinator = None
        elif code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID):
            self._lose_assignment(forget_member=True)
        elif code in (ErrorCode.ILLEGAL_GENERATION, ErrorCode.REBALANCE_IN_PROGRESS):
            self._lose_assignment()
        return False

    async def _ask(self, api: ApiKey, *, timeout_ms: float | None = None, **fields: Any) -> Any:
        """Ask the coordinator; None when it is not there."""
        kafka = self.kafka
        try:
            if self._coordinator is None:
                found = await kafka.ask(
                    kafka.any_node(), ApiKey.FIND_COORDINATOR, key=self._group, key_type=0
                )
                if found.error_code:
                    return None
                self._coordinator = found.node_id
            return await kafka.ask(self._coordinator, api, timeout_ms=timeout_ms, **fields)
        except Lost:
            self._coordinator = None
            return None

    # ---- the protocol ----

    async def _join(self) -> bool:
        options = self.world.options
        subscription = encode_subscription(Subscription(tuple(self._topics)))
        answer = await self._ask(
            ApiKey.JOIN_GROUP,
            timeout_ms=self._patience_ms,
            group_id=self._group,
            session_timeout=options.session_ms,
            rebalance_timeout=options.rebalance_ms,
            member_id=self._member_id,
            group_instance_id=self._instance_id,
            protocol_type="consumer",
            protocols=[{"name": "range", "metadata": subscription}],
        )
        if answer is None:
            return False
        if answer.error_code == ErrorCode.MEMBER_ID_REQUIRED:
            self._member_id = answer.member_id
            return True
        if not self._heard(answer.error_code):
            return False
        self._member_id, self._generation = answer.member_id, answer.generation_id
        plan: list[dict[str, Any]] = []
        if answer.leader == answer.member_id:
            plan = await self._plan(answer.members)
        synced = await self._ask(
            ApiKey.SYNC_GROUP,
            timeout_ms=self._patience_ms,
            group_id=self._group,
            generation_id=self._generation,
            member_id=self._member_id,
            group_instance_id=self._instance_id,
            protocol_type="consumer",
            protocol_name="range",
            assignments=plan,
        )
        if synced is None or not self._heard(synced.error_code):
            return False
        return await self._take_over(decode_assignment(bytes(synced.assignment)))

    async def _plan(self, members: Any) -> list[dict[str, Any]]:
        kafka = self.kafka
        while not all(topic in kafka.partition_counts for topic in self._topics):
            if not await kafka.refresh(self._topics):
                await kafka.pause()
        subscriptions = {m.member_id: decode_subscription(bytes(m.metadata)) for m in members}
        counts = {topic: kafka.partition_counts[topic] for topic in self._topics}
        return [
            {"member_id": member, "assignment": encode_assignment(partitions)}
            for member, partitions in assign_range(subscriptions, counts).items()
        ]

    async def _take_over(self, assigned: tuple[TopicPartition, ...]) -> bool:
        """Begin with what this member owns, where the group's commits say."""
        world = self.world
        self._must_join = False
        self._round += 1
        number = self._round
        owned = sorted((p.topic, p.partition) for p in assigned)
        if (self._group, self._generation) not in world.generations:
            world.generations[self._group, self._generation] = True
            world.counts.rebalances += 1
        world.counts.acked += 1
        world.note("assigned", self.process, self._generation, *map(name_of, owned))
        world.recorder.note(
            self.process,
            "assigned",
            group=self._group,
            generation=self._generation,
            member=self._member_id,
            partitions=[name_of(where) for where in owned],
        )
        committed = await self._committed(owned)
        if committed is None:
            self._lose_assignment()
            return False
        for where, offset in committed.items():
            if offset < 0:
                offset = await self.earliest(where)
            if number != self._round:
                return False
            self.positions[where] = offset
        return True

    async def _committed(self, owned: list[Where]) -> dict[Where, int] | None:
        if not owned:
            return {}
        world = self.world
        topics: dict[str, list[int]] = {}
        for topic, index in owned:
            topics.setdefault(topic, []).append(index)
        operation = world.recorder.invoke(
            self.process, "committed", group=self._group, partitions=[name_of(w) for w in owned]
        )
        answer = await self._ask(
            ApiKey.OFFSET_FETCH,
            group_id=self._group,
            topics=[{"name": t, "partition_indexes": rows} for t, rows in topics.items()],
            require_stable=True,
        )
        if answer is None or not self._heard(answer.error_code):
            world.recorder.fail(operation)
            return None
        found: dict[Where, int] = {}
        for topic in answer.topics:
            for row in topic.partitions:
                if not self._heard(row.error_code):
                    world.recorder.fail(operation)
                    return None
                found[topic.name, row.partition_index] = row.committed_offset
        world.counts.acked += 1
        world.recorder.ok(operation, offsets={name_of(w): o for w, o in found.items()})
        return found

    def _to_commit(self) -> dict[Where, int]:
        return dict(self.positions)

    async def _commit(self) -> None:
        world, offsets = self.world, self._to_commit()
        if not offsets:
            return
        topics: dict[str, list[dict[str, Any]]] = {}
        for (topic, index), offset in offsets.items():
            topics.setdefault(topic, []).append(
                {
                    "partition_index": index,
                    "committed_offset": offset,
                    "committed_leader_epoch": -1,
                    "committed_metadata": "",
                }
            )
        operation = world.recorder.invoke(
            self.process,
            "commit",
            group=self._group,
            generation=self._generation,
            member=self._member_id,
            offsets={name_of(where): offset for where, offset in offsets.items()},
        )
        answer = await self._ask(
            ApiKey.OFFSET_COMMIT,
            group_id=self._group,
            generation_id_or_member_epoch=self._generation,
            member_id=self._member_id,
            group_instance_id=self._instance_id,
            topics=[{"name": t, "partitions": rows} for t, rows in topics.items()],
        )
        if answer is None:
            world.recorder.info(operation)
            return
        codes = [row.error_code for topic in answer.topics for row in topic.partitions]
        refused = [code for code in codes if code]
        if not refused:
            world.counts.acked += 1
            world.note("committed", operation.op)
            world.recorder.ok(operation)
            return
        is_certain = len(refused) == len(codes) and all(code in _NOT_DONE for code in refused)
        told = world.recorder.fail if is_certain else world.recorder.info
        told(operation, code=refused[0])
        for code in refused:
            self._heard(code)

    async def _leave(self) -> None:
        await self._commit()
        member_id = self._member_id
        self._lose_assignment(forget_member=True)
        instance_id = self._instance_id
        if instance_id is not None:
            if self.kafka.random.random() < 0.5:
                # A process that begins anew and is back before anybody misses it.
                await self.kafka.sleep(self.kafka.random.uniform(50.0, 600.0))
                return
            member_id = self.kafka.random.choice((member_id, ""))
        await self._ask(
            ApiKey.LEAVE_GROUP,
            group_id=self._group,
            members=[{"member_id": member_id, "group_instance_id": instance_id}],
        )
        await self.kafka.sleep(self.kafka.random.uniform(50.0, 600.0))

    async def _heartbeats(self) -> None:
        world, kafka = self.world, self.kafka
        while not world.is_quiet:
            await kafka.sleep(world.options.session_ms / 5)
            if self._must_join or self._is_stalled:
                continue
            number = self._round
            answer = await self._ask(
                ApiKey.HEARTBEAT,
                group_id=self._group,
                generation_id=self._generation,
                member_id=self._member_id,
                group_instance_id=self._instance_id,
            )
            if answer is not None and number == self._round:
                self._heard(answer.error_code)


_NOT_DONE = frozenset(
    {
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.REBALANCE_IN_PROGRESS,
        ErrorCode.FENCED_INSTANCE_ID,
    }
)
"""Refusals that say that nothing was committed."""
