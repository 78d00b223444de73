"""A topic that shrinks and grows: an operator of it, who reads what it retired, and the last word.

The operator lists fewer partitions of one topic, more again, and deletes all that a retired one
holds, so that it is gone. Producers and readers of the topic are the usual ones: they find those
that are not listed by way of the view, and go on with them under the topic's own name. In some runs
it is written in transactions alone, and readers of committed records read it. What it draws comes
from a stream of its own, so that what else strikes is not shifted by it. Once faults end all
partitions are listed again and take records, and in half of the runs some are retired once more.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

from jepsen_like.cluster.admins import ADMIN_TIMEOUT_MS, RecordDeleter, ask_controller
from jepsen_like.cluster.committed_reads import CommittedReader
from jepsen_like.cluster.consumers import EARLIEST, LATEST, Fetcher, Member, Reader, Where, name_of
from jepsen_like.cluster.kafka import NARROW, VIEW, Kafka, Lost
from jepsen_like.cluster.producers import Probe, Producer
from jepsen_like.cluster.transactional import TransactionalProducer
from jepsen_like.invariants import InvariantViolation
from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import ShrinkTopicCall
from raftmq.metadata.commands import PartitionState
from raftmq.metadata.image import TopicImage
from raftmq.promise import Promise
from raftmq.protocol import ApiKey

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld

WIDTH: Final = 4
"""So many partitions the topic has at most."""
QUIET: Final = (("raftmq.closing.quiet.ms", "400"),)
GROUP: Final = "narrow-group"
NARROWED: Final = ("shrunk", "grown", "number listed anew")
"""What must have come of it over many runs."""


class Narrower:
    """Who shrinks the topic and grows it.

    Attributes:
        is_tidy: nothing is left that it would have to do.
    """

    def __init__(self, world: ClusterWorld, process: int) -> None:
        self._world = world
        self._random = Random(f"narrow {world.seed}")
        self._kafka = Kafka(world, process)
        self._deleter = RecordDeleter(world, process + 1)
        self.is_tidy = False

    async def run(self) -> None:
        """Go on until faults end; then tidy up."""
        world, random = self._world, self._random
        while True:
            await world.clients.sleep(random.uniform(*world.options.narrow_every_ms) / 1e3)
            if world.is_healed:
                break
            draw = random.random()
            if draw < 0.45:
                await self._shrink(is_now=random.random() < 0.6)
            elif draw < 0.75:
                await self._grow(random.randint(2, WIDTH))
            elif not world.options.narrow_members:
                await self._empty()
        while self._listed() != WIDTH:
            await self._grow(WIDTH)
            await self._kafka.pause()
        for number in range(WIDTH):
            await self._probe(self._kafka.process + 2 + number, number)
        if random.random() < 0.5:
            while self._listed() == WIDTH:
                await self._shrink(is_now=True)
                await self._kafka.pause()
        self.is_tidy = True

    async def _probe(self, process: int, number: int) -> None:
        """Write until something is acknowledged there."""
        if not self._world.options.narrow_in_transactions:
            await Probe(self._world, process, NARROW, number).run()
            return
        probe = NarrowTransactions(
            self._world, process, f"probe-{number}", protocol_of(self._world, number), number
        )
        await probe.run_once()

    def why_not_done(self) -> str:
        """What of all this has not come to its end, "" when nothing."""
        if not self.is_tidy:
            return "who shrinks a topic is not done"
        topic = self._topic()
        for partition in () if topic is None else topic.retired:
            if partition.state is not PartitionState.SEALED:
                return f"{NARROW}-{partition.index} is {partition.state}"
        return ""

    async def judge(self) -> None:
        """What is listed is not in the view, and what is retired is there as it is.

        To be run when nothing is under way, and nothing is written any more.
        """
        fetcher = Fetcher(self._world, self._kafka.process)
        topic = self._topic()
        for number in range(WIDTH if topic is not None else 0):
            assert topic is not None
            if topic.partition(number) is None or not topic.retired:
                continue
            own, seen = (NARROW, number), (VIEW, number)
            before = await _bounds(fetcher, own)
            start, end = await _bounds(fetcher, seen)
            after = await _bounds(fetcher, own)
            if number < len(topic.partitions):
                is_right = start == end
            else:
                is_right = before[0] <= start <= after[0] and end == before[1] == after[1]
            if not is_right:
                told = f"{name_of(own)} goes from {before} to {after}, in the view {start} to {end}"
                raise InvariantViolation("ViewIsTheRest", told)
        fetcher.kafka.hang_up()
        self._kafka.hang_up()

    # ---- what it does ----

    async def _shrink(self, *, is_now: bool) -> None:
        listed = self._listed()
        if listed < 2:
            return
        call = ShrinkTopicCall(
            name=NARROW,
            partitions=self._random.randrange(1, listed),
            now=is_now,
            force=True,
            keep=True,
            timeout_ms=900,
        )
        code = await ask_controller(self._world, self._random, call)
        self._world.note("shrink", call.partitions, code)
        if code == "NONE":
            self._world.had_effect("shrunk")

    async def _grow(self, count: int) -> None:
        kafka, topic = self._kafka, self._topic()
        listed = self._listed()
        if topic is None or count <= listed:
            return
        is_anew = any(
            topic.partition(n) is None and n in topic.numbers for n in range(listed, count)
        )
        try:
            answer = await kafka.ask(
                kafka.any_node(),
                ApiKey.CREATE_PARTITIONS,
                topics=[{"name": NARROW, "count": count, "assignments": None}],
                timeout=ADMIN_TIMEOUT_MS,
                validate_only=False,
            )
        except Lost:
            return
        code = ErrorCode(answer.results[0].error_code)
        self._world.note("grow", count, code.name)
        if code is ErrorCode.NONE:
            self._world.had_effect("grown")
            if is_anew:
                self._world.had_effect("number listed anew")

    async def _empty(self) -> None:
        """Delete all that some retired partition holds."""
        topic = self._topic()
        if topic is not None and topic.retired:
            number = self._random.choice(topic.retired).index
            await self._deleter.delete((NARROW, number), 1.0)

    def _topic(self) -> TopicImage | None:
        return self._world.newest_image.topics.get(NARROW)

    def _listed(self) -> int:
        topic = self._topic()
        return 0 if topic is None else len(topic.partitions)


def _is_there(world: ClusterWorld, number: int) -> bool:
    topic = world.newest_image.topics.get(NARROW)
    return topic is not None and topic.partition(number) is not None


async def _earliest(fetcher: Fetcher, where: Where) -> int | None:
    """Where a partition begins, asked until somebody says; None when it is gone."""
    while _is_there(fetcher.world, where[1]):
        offset = await fetcher.offset_of(where, EARLIEST)
        if offset is not None:
            return offset
        await fetcher.kafka.pause()
    return None


async def _bounds(fetcher: Fetcher, where: Where) -> tuple[int, int]:
    """Where a partition begins and ends, asked until somebody says."""
    while True:
        start = await fetcher.offset_of(where, EARLIEST)
        end = await fetcher.offset_of(where, LATEST)
        if start is not None and end is not None:
            return start, end
        await fetcher.kafka.pause()


class NarrowReader(Reader):
    """One process that reads the topic, listed or not; what is gone is not waited for."""

    async def earliest(self, where: Where) -> int:
        """Where a partition begins; where this reader stands, when it is gone."""
        offset = await _earliest(self, where)
        return self.positions[where] if offset is None else offset

    async def read_all(self) -> None:
        """Read every partition that is there to its end."""
        ends: dict[Where, int] = {}
        for where in list(self.positions):
            while _is_there(self.world, where[1]):
                end = await self.offset_of(where, LATEST)
                if end is not None:
                    ends[where] = end
                    break
                await self.kafka.pause()
        while behind := [
            where
            for where, end in ends.items()
            if self.positions[where] < end and _is_there(self.world, where[1])
        ]:
            await self._once(behind)


class NarrowMember(Member):
    """One member of a group of the topic, whose partitions are retired while it owns them."""

    async def earliest(self, where: Where) -> int:
        """Where a partition begins; its first offset, when it is gone."""
        return await _earliest(self, where) or 0

    def _to_commit(self) -> dict[Where, int]:
        """Where something was read. An empty partition may go, and what a group has committed
        there goes with it."""
        topic = self.world.newest_image.topics.get(NARROW)
        found = {} if topic is None else {p.index: p.begins_at for p in topic.held}
        return {
            where: offset
            for where, offset in self.positions.items()
            if offset > found.get(where[1], offset)
        }


class ViewReader(Fetcher):
    """One process that reads the view, by number, for as long as there is something in it."""

    async def run(self) -> None:
        """Read until everything is written."""
        world = self.world
        self.positions = {(VIEW, number): 0 for number in range(WIDTH)}
        while not world.is_written:
            for where in await self.poll():
                offset = await self.offset_of(where, EARLIEST)
                if offset is not None:
                    self.positions[where] = offset
            await self.kafka.think(5.0, 60.0)
        self.kafka.hang_up()

    def _is_led(self, node_id: int, wanted: list[Where]) -> bool:
        """False: a number that is listed again has nothing in a view, whoever is asked."""
        return False


class NarrowTransactions(TransactionalProducer):
    """One process that writes to the topic in transactions, wherever it was told of last.

    A transaction whose partition is listed no more is aborted, as clients do that find nobody to
    send it to.
    """

    def __init__(
        self,
        world: ClusterWorld,
        process: int,
        transactional_id: str,
        protocol: int,
        number: int | None = None,
    ) -> None:
        """`number`: the only one that it writes to."""
        super().__init__(world, process, transactional_id, protocol, NARROW)
        self._number = number

    async def run_once(self) -> None:
        """Go on until one transaction is committed."""
        while not await self.ready() or await self.transact() != "ok":
            await self._kafka.pause()
        self._kafka.hang_up()

    def _choose_partition(self) -> int:
        return self._kafka.random.randrange(self._width) if self._number is None else self._number

    def _is_listed(self, partition: int) -> bool:
        return partition < self._width

    @property
    def _width(self) -> int:
        return self._kafka.partition_counts.get(NARROW, WIDTH)


class NarrowCommittedReader(CommittedReader):
    """One process that reads what was committed there; what is gone is not waited for."""

    def _is_there(self, partition: int) -> bool:
        return _is_there(self._world, partition)


def protocol_of(world: ClusterWorld, number: int) -> int:
    """The protocol of one of its transactional producers."""
    protocols = world.options.transaction_protocols
    return protocols[(world.seed + number) % len(protocols)]


def start_narrow(world: ClusterWorld, process: int) -> dict[str, Promise[None]]:
    """Start who shrinks a topic, writes to it, and reads it and its view; gives when each ends."""
    world.narrower = Narrower(world, process + WIDTH + 2)
    world.clients.spawn(world.narrower.run)
    if world.options.narrow_in_transactions:
        return _start_transactions(world, process)
    spawn, ends = world.clients.spawn, dict[str, Promise[None]]()
    for number in range(WIDTH):
        producer = Producer(world, process + number, NARROW, number)
        ends[f"producer {process + number}"] = spawn(producer.run)
    process += WIDTH
    reader = NarrowReader(world, process, [(NARROW, number) for number in range(WIDTH)])
    ends[f"reader {process}"] = spawn(reader.run)
    ends[f"reader {process + 1}"] = spawn(ViewReader(world, process + 1).run)
    process += 4 + WIDTH  # behind who shrinks it, who deletes records, and who has the last word
    for number in range(process, process + world.options.narrow_members):
        member = NarrowMember(world, number, GROUP, [NARROW])
        ends[f"member {number}"] = spawn(member.run)
    return ends


def _start_transactions(world: ClusterWorld, process: int) -> dict[str, Promise[None]]:
    spawn, ends = world.clients.spawn, dict[str, Promise[None]]()
    ids = [f"narrow-{number}" for number in range(2)]
    for number, transactional_id in enumerate(ids):
        producer = NarrowTransactions(
            world, process + number, transactional_id, protocol_of(world, number)
        )
        ends[f"transactional {process + number}"] = spawn(producer.run)
    reader = NarrowCommittedReader(world, process + WIDTH, ids, NARROW, WIDTH)
    ends[f"committed reader {process + WIDTH}"] = spawn(reader.run)
    return ends
