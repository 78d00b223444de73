"""A client that asks for everything that others have no use for, so that every handler is visited.

Answers are decoded and otherwise not judged: what matters is that no question, asked at whatever
moment, costs more than its own answer. `request_kinds.py` has the questions; what is produced to
and fetched from its own topic, well and badly, is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jepsen_like.cluster.admins import topic_row
from jepsen_like.cluster.kafka import VERSIONS, Kafka, Lost
from jepsen_like.cluster.request_kinds import OWN, QUESTIONS
from jepsen_like.cluster.tasks import until
from jepsen_like.virtual_time import EPOCH_MS
from raftmq.codec import Codec
from raftmq.protocol import ApiKey
from raftmq.protocol.fetch import (
    FetchPartition,
    FetchRequest,
    FetchTopic,
    ForgottenTopic,
    decode_fetch_response,
    encode_fetch_request,
)
from raftmq.protocol.produce import (
    ProducePartition,
    ProduceRequest,
    ProduceTopic,
    decode_produce_response,
    encode_produce_request,
)
from raftmq.records import NewRecord, build_batch

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld

_DAY_MS: Final = 86_400_000


class ApiFuzzer:
    """One process that goes round."""

    def __init__(self, world: ClusterWorld, process: int) -> None:
        self._world = world
        self._kafka = Kafka(world, process)
        self._session = (0, 0)
        self._sequence = 0

    async def run(self) -> None:
        """Ask until the world is quiet."""
        world, kafka = self._world, self._kafka
        random = kafka.random
        while not world.is_quiet:
            draw = random.random()
            try:
                if draw < 0.3:
                    await self._produce()
                elif draw < 0.6:
                    await self._fetch()
                else:
                    api, fields = random.choice(QUESTIONS)(random, world.now_ms)
                    await kafka.ask(await self._whom(fields), api, **fields)
            except Lost:
                await kafka.pause()
            await kafka.sleep(random.uniform(20.0, 120.0))
        kafka.hang_up()

    async def _whom(self, fields: dict[str, Any]) -> int:
        """The coordinator for what is asked of a group, mostly; any node for the rest."""
        kafka = self._kafka
        groups = [
            fields.get("group_id"),
            *fields.get("groups", ()),
            *fields.get("groups_names", ()),
        ]
        group = next((name for name in groups if name), None)
        if group is None or kafka.random.random() < 0.2:
            return kafka.any_node()
        found = await kafka.ask(kafka.any_node(), ApiKey.FIND_COORDINATOR, key=group, key_type=0)
        return kafka.any_node() if found.error_code else int(found.node_id)

    async def _leader(self) -> int:
        kafka = self._kafka
        if kafka.random.random() < 0.2:
            return kafka.any_node()
        if OWN not in kafka.partition_counts:
            row = topic_row(OWN, 1)
            fields: dict[str, Any] = {"topics": [row], "timeout": 500, "validate_only": False}
            await kafka.ask(kafka.any_node(), ApiKey.CREATE_TOPICS, **fields)
        if kafka.random.random() < 0.2:
            kafka.leaders.pop((OWN, 0), None)
        return await kafka.leader(OWN, 0)

    async def _produce(self) -> None:
        kafka = self._kafka
        leader = await self._leader()
        request = ProduceRequest(
            "transaction" if kafka.random.random() < 0.05 else None,
            kafka.random.choice((-1, -1, 1, 1, 0, 7)),
            kafka.random.choice((1, 300, 1_000)),
            [ProduceTopic(OWN, None, [ProducePartition(0, memoryview(self._records()))])],
        )
        version = VERSIONS[ApiKey.PRODUCE]
        body = b"".join(map(bytes, encode_produce_request(version, request)))
        answer = kafka.request(leader, ApiKey.PRODUCE, body)
        if request.acks == 0:
            return  # there is none
        frame = await until(answer)
        decode_produce_response(version, frame)

    def _records(self) -> bytearray:
        random, now = self._kafka.random, EPOCH_MS + int(self._world.now_ms)
        count = random.choice((1, 1, 3))
        value = bytes(random.choice((10, 100, 1_000, 5_000)))
        is_numbered = random.random() < 0.3
        self._sequence += random.choice((0, 1, 1, 1, 5))
        keys = [random.choice((None, b"key")) for _ in range(count)]
        codec = random.choice(tuple(Codec))
        stamp = random.choice((now, now, now, now - 3 * _DAY_MS, -1))
        times = (stamp,) if stamp < 0 else (stamp, stamp + 2, stamp + 1)
        batch = build_batch(
            [NewRecord(key, value, times[i % len(times)]) for i, key in enumerate(keys)],
            codec=codec,
            timestamp=stamp,
            producer_id=random.choice((5, 5_000_000)) if is_numbered else -1,
            producer_epoch=random.choice((0, 1)) if is_numbered else -1,
            base_sequence=self._sequence if is_numbered else -1,
            transactional=is_numbered and random.random() < 0.1,
        )
        draw = random.random()
        if draw < 0.05:
            return batch + batch
        if draw < 0.1:
            batch[random.randrange(len(batch))] ^= 1 << random.randrange(8)
        elif draw < 0.12:
            del batch[random.randrange(len(batch)) :]
        return batch

    async def _fetch(self) -> None:
        kafka, random = self._kafka, self._kafka.random
        leader = await self._leader()
        session_id, epoch = self._session if random.random() < 0.8 else (77, 3)
        wanted = FetchPartition(
            random.choice((0, 0, 0, 9)),
            current_leader_epoch=random.choice((-1, -1, 1, 2, 99)),
            fetch_offset=random.choice((0, 1, random.randrange(200), 1 << 40)),
            last_fetched_epoch=random.choice((-1, -1, 0, 1, 2, 99)),
            partition_max_bytes=random.choice((1, 4_096, 1 << 20)),
        )
        request = FetchRequest(
            replica_id=-1 if random.random() < 0.97 else 2,
            max_wait_ms=random.choice((0, 50, 500)),
            min_bytes=random.choice((0, 1, 1, 100_000)),
            max_bytes=random.choice((1, 4_096, 1 << 30)),
            isolation_level=random.choice((0, 1)),
            session_id=session_id,
            session_epoch=epoch,
            topics=[FetchTopic(OWN, None, [wanted])] if random.random() < 0.8 else [],
            forgotten=[ForgottenTopic(OWN, None, [0])] if random.random() < 0.1 else [],
            rack_id=random.choice(("", "", "rack1", "rack2", "rack9")),
        )
        version = VERSIONS[ApiKey.FETCH]
        self._session = (0, 0)
        answer = await until(
            kafka.request(leader, ApiKey.FETCH, encode_fetch_request(version, request))
        )
        response = decode_fetch_response(version, answer)
        if response.session_id and random.random() < 0.9:
            self._session = (response.session_id, epoch + 1)
