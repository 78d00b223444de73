"""What handlers see of the node: identity, metadata, partitions, the ways to the controller.

A plain composition that runs nothing itself; `node/composition.py` builds it. Questions that
several handlers ask of more than one part (which node leads, where does a broker listen) are
answered here, so that all answers agree. Two small parts stand here with it: the encoded Metadata
bodies of the present state, and the producer ids that this broker may hand out.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeAlias
from uuid import UUID

import structlog

from raftmq.config import BY_RULES, NodeConfig
from raftmq.controller.control_plane import QuorumReplica, QuorumState, view_of
from raftmq.controller.leaders import LeaderRow, LeaderTable
from raftmq.errors import ErrorCode, KafkaError
from raftmq.logs import RateLimitedLog
from raftmq.metadata.broker_messages import (
    AdminRequest,
    Asker,
    CreateTopicsCall,
    NewTopic,
    Outcome,
    Way,
)
from raftmq.metadata.commands import AllocateProducerIds, client_endpoint
from raftmq.metadata.configs import (
    broker_value,
    describe_topic,
    describe_view,
    effective_topic_configs,
)
from raftmq.metadata.features import SUPPORTED, Ranges, named
from raftmq.metadata.image import (
    BrokerImage,
    MetadataImage,
    PartitionImage,
    Reassignment,
    TopicImage,
    reassignment_of,
)
from raftmq.metadata.results import ProducerIds
from raftmq.partition.parked import Deadlines
from raftmq.partition.partition import Partition
from raftmq.partition.registry import PartitionRegistry
from raftmq.ports import Buggify, Clock, Random
from raftmq.promise import Promise
from raftmq.protocol.wire import CurrentLeader, NodeEndpoint
from raftmq.rights import Authorizer, Rules
from raftmq.runtime.threads import WorkerPool
from raftmq.server.audit import Audit, AuditRow, Who, outcome_of
from raftmq.server.kafka.counts import ServerCounts
from raftmq.server.kafka.fetch_sessions import FetchSessions
from raftmq.server.kafka.leader_waits import Hold, LeaderWaits
from raftmq.server.kafka.limits import TokenBucket
from raftmq.server.kafka.replies import Drains
from raftmq.server.kafka.views import Views
from raftmq.server.kafka.work import WorkScheduler, gather
from raftmq.server.kafka.writers import RetiredWriters
from raftmq.transactions.coordinator import TransactionCoordinator
from raftmq.types import NodeId, TopicId, TopicPartition

CACHE_BYTES_MAX: Final = 32 << 20
"""Of encoded Metadata bodies."""
PRODUCER_IDS_PER_BLOCK: Final = 1000
PRODUCER_IDS_TIMEOUT_MS: Final = 5_000
NO_LEADER: Final = CurrentLeader(-1, -1)
ELECTION_POLL_MS: Final = 20
ELECTION_ASK_MS: Final = 250
QUORUM_WAIT_MS: Final = 1_000
"""How long a follower waits for what the leader knows of the metadata group."""
_log = RateLimitedLog(structlog.get_logger("raftmq.server"))
_TOPIC_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_COMING: Final = (
    ErrorCode.NONE,
    ErrorCode.TOPIC_ALREADY_EXISTS,
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.NOT_CONTROLLER,
)


class MetadataAnswers:
    """Encoded Metadata bodies, newest use last, bounded by bytes; emptied when the state moves.

    Many clients ask for the same topics at the same moment (after an election, all of them), and a
    body of a thousand partitions takes milliseconds to encode.
    """

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self.hits = 0
        self._bytes_max = bytes_max
        self._bytes = 0
        self._state: object = None
        self._bodies: OrderedDict[object, bytes] = OrderedDict()
        self._under_way: dict[object, Promise[bytes]] = {}

    def get(self, state: object, key: object) -> bytes | None:
        """A body that was encoded at exactly this state."""
        if state != self._state:
            self._bodies.clear()
            self._under_way = {}
            self._bytes = 0
            self._state = state
            return None
        body = self._bodies.get(key)
        if body is not None:
            self.hits += 1
            self._bodies.move_to_end(key)
        return body

    def under_way(self, key: object) -> Promise[bytes] | None:
        """A body of the state last asked for that is being encoded."""
        return self._under_way.get(key)

    def begin(self, state: object, key: object, promise: Promise[bytes]) -> None:
        """A body of `state` is being encoded: requests that come meanwhile share it."""
        self._under_way[key] = promise

        def settled(done: Promise[bytes]) -> None:
            if self._state == state:
                self._under_way.pop(key, None)
                if done.error is None:
                    self.put(state, key, done.result())

        promise.when_done(settled)

    def put(self, state: object, key: object, body: bytes) -> None:
        """Keep a body of `state`, if that is the one last asked for."""
        if state != self._state:
            return
        self._bodies[key] = body
        self._bytes += len(body)
        while self._bytes > self._bytes_max:
            _, dropped = self._bodies.popitem(last=False)
            self._bytes -= len(dropped)


class ProducerIdBlocks:
    """The producer ids that this broker may hand out.

    They come in blocks from the metadata group, so that most InitProducerId need no round trip. A
    block is never handed out twice, also not after a crash: what was left of it is lost.
    """

    def __init__(self, node_id: NodeId, engine: Any) -> None:
        self._node_id = node_id
        self._engine = engine
        self._next = 0
        self._end = 0
        self._is_asking = False
        self._waiting: deque[Promise[int]] = deque()

    def take(self) -> Promise[int]:
        """A producer id that no other producer has or will have."""
        if self._next < self._end and not self._waiting:
            self._next += 1
            return Promise.resolved(self._next - 1)
        promise: Promise[int] = Promise()
        self._waiting.append(promise)
        self._ask()
        return promise

    @property
    def waiting_count(self) -> int:
        """Producers that wait for a block."""
        return len(self._waiting)

    def _ask(self) -> None:
        if self._is_asking:
            return
        self._is_asking = True
        command = AllocateProducerIds(node_id=self._node_id, count=PRODUCER_IDS_PER_BLOCK)
        answer = self._engine.propose(command, timeout_ms=PRODUCER_IDS_TIMEOUT_MS)
        answer.when_done(self._answered)

    def _answered(self, promise: Promise[ProducerIds]) -> None:
        self._is_asking = False
        if promise.error is not None:
            waiting, self._waiting = self._waiting, deque()
            for one in waiting:
                one.fail(promise.error)
            return
        block = promise.result()
        # A block whose answer was lost is not used: the newest one is this broker's alone.
        self._next, self._end = block.start, block.end
        while self._waiting and self._next < self._end:
            self._next += 1
            self._waiting.popleft().resolve(self._next - 1)
        if self._waiting:
            self._ask()


class ControllerPort(Protocol):
    """The way to the controller, wherever it is."""

    def call(self, request: AdminRequest, asker: Asker) -> Promise[tuple[Outcome, ...]]:
        """Get an admin call decided; fails with a KafkaError when it may not have been."""
        ...

    def ask_quorum(self) -> Promise[QuorumState | None]:
        """The metadata group as its leader knows it; None when that one does not answer."""
        ...


HandOver: TypeAlias = Callable[[NodeId, TopicPartition], bool]
"""hand_over(leader, partition): ask that node to hand the partition to its preferred leader; False
when it cannot be asked."""


class Broker:
    """One node, as its handlers see it."""

    def __init__(
        self,
        node_id: NodeId,
        cluster_id: str,
        *,
        engine: Any,
        controller: ControllerPort,
        leader_table: LeaderTable,
        partitions: PartitionRegistry,
        coordinator: Any,
        transactions: TransactionCoordinator,
        deadlines: Deadlines,
        clock: Clock,
        config: NodeConfig,
        random: Random,
        buggify: Buggify,
        drains: Drains,
        hand_over: HandOver,
        has_ended: Callable[[NodeId], bool],
        is_cut_off: Callable[[], bool],
        workers: WorkerPool,
        filtered: Callable[[TopicId, Partition], Partition | None],
        audit: Audit,
        supported: Ranges = SUPPORTED,
    ) -> None:
        self.node_id = node_id
        self.cluster_id = cluster_id
        self.engine = engine
        self.controller = controller
        self.leader_table = leader_table
        self.partitions = partitions
        self.coordinator = coordinator
        self.transactions = transactions
        self.deadlines = deadlines
        self.clock = clock
        self.config = config
        self.metadata_replica: QuorumReplica | None = None
        """The replica of the metadata group, once this node has opened it."""
        self.supported = supported
        """Levels of features that this node supports."""
        self.supported_text = named(supported)
        self.workers = workers
        self._filtered = filtered
        self.audit = audit
        self.is_cut_off = is_cut_off
        """True while other nodes may see a majority of the metadata group, but not this one."""
        self.drains = drains
        """The engine of this node's replicas."""
        self._hand_over = hand_over
        self.authorizer = authorizer_of(config, lambda: self.image.rules)
        """Who may do what; None where everybody may do everything."""
        self.metrics = ServerCounts()
        self.sessions = FetchSessions(clock, random, buggify=buggify)
        self.metadata_answers = MetadataAnswers()
        self.scheduler = WorkScheduler(deadlines)
        self.views = Views(lambda: self.image, deadlines, clock)
        self.retired_writers = RetiredWriters(clock)
        self.leader_waits = LeaderWaits(
            leader_table,
            deadlines,
            clock,
            has_ended=has_ended,
            has_left=self._has_left,
        )
        self.producer_ids = ProducerIdBlocks(node_id, engine)
        self._creating: dict[str, Promise[ErrorCode]] = {}
        self._auto_create_room = TokenBucket(
            clock.monotonic_ms, config.auto_create_topics_max, config.auto_create_topics_per_s
        )

    def batch(self) -> AbstractContextManager[None]:
        """Do several things to replicas and drain each of them once, at the end."""
        return self.drains.batch()

    @property
    def image(self) -> MetadataImage:
        """The newest metadata applied on this node."""
        image: MetadataImage = self.engine.image
        return image

    # ---- partitions ----

    def find_topic(self, name: str | None, topic_id: UUID | None) -> TopicImage | None:
        """A topic by name or by id, whichever is given."""
        if name is not None:
            return self.image.topics.get(name)
        return None if topic_id is None else self.image.topic_by_id(TopicId(topic_id))

    def find_base(self, name: str | None, topic_id: UUID | None) -> TopicImage | None:
        """As `find_topic`; of a view the topic that it looks at."""
        topic = self.find_topic(name, topic_id)
        if topic is None and (view := self.views.find(name, topic_id)) is not None:
            return view.topic
        return topic

    def find_partition(
        self, name: str | None, topic_id: UUID | None, index: int
    ) -> Partition | ErrorCode:
        """This node's replica of a partition, or why there is none."""
        if name is not None:
            found = self.partitions.by_name(name, index)
        elif topic_id is not None:
            found = self.partitions.by_id(TopicId(topic_id), index)
            if found is None and (aliased := self.image.topic_by_id(TopicId(topic_id))) is not None:
                found = self.partitions.by_id(aliased.topic_id, index)
        else:
            return ErrorCode.UNKNOWN_TOPIC_ID
        if found is not None:
            return found
        topic = self.find_topic(name, topic_id)
        if topic is None:
            if self.views.find(name, topic_id) is not None:
                return ErrorCode.INVALID_TOPIC_EXCEPTION  # nobody writes to a view
            is_named = name is not None
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if is_named else ErrorCode.UNKNOWN_TOPIC_ID
        if topic.partition(index) is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return ErrorCode.NOT_LEADER_OR_FOLLOWER

    def find_readable(
        self, name: str | None, topic_id: UUID | None, index: int
    ) -> Partition | ErrorCode:
        """As `find_partition`, for what is read only: that may be a view as well."""
        found = self.find_partition(name, topic_id, index)
        if found is not ErrorCode.INVALID_TOPIC_EXCEPTION:
            return found
        view = self.views.find(name, topic_id)
        if view is None or index not in view:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if not view.image.condition and not view.is_retired(index):
            return self.views.empty(view, index)
        found = self.find_partition(view.topic.name, None, index)
        if not view.image.condition:
            return found
        if isinstance(found, Partition):
            shown = self._filtered(view.image.topic_id, found)
            return ErrorCode.NOT_LEADER_OR_FOLLOWER if shown is None else shown
        is_gone = found is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return self.views.empty(view, index) if is_gone else found

    # ---- leaders and addresses ----

    def leader_of(self, topic: TopicImage, index: int) -> CurrentLeader:
        """The leader of a partition, or its last one: it is kept while a new one is elected, since
        clients that are told of none may not ask again."""
        partition = topic.partition(index)
        if partition is not None:
            found = self.leader_table.of(topic.topic_id, partition)
        else:
            found = self.leader_table.get(topic.topic_id, index)
        return NO_LEADER if found is None else CurrentLeader(found.leader_id, found.leader_epoch)

    def _has_left(self, row: LeaderRow) -> bool:
        """True when a row names this node, which does not lead there or is handing over."""
        if row.leader_id != self.node_id:
            return False
        partition = self.partitions.by_id(row.topic_id, row.partition)
        return partition is None or not partition.takes_records

    def misses_leaders(self, topics: Iterable[TopicImage]) -> bool:
        """True when this node has replicas of these topics, knows no leader of one of them and
        leads none of them."""
        misses_one = False
        for topic in topics:
            for image in topic.held:
                partition = self.partitions.by_id(topic.topic_id, image.index)
                if partition is None:
                    continue
                if partition.is_leader:
                    return False
                misses_one = misses_one or partition.replica.leader is None
        return misses_one

    def next_leaders(
        self, wanted: Iterable[tuple[str | None, UUID | None, int]], hold: Hold
    ) -> Promise[None] | None:
        """Resolves when partitions that this node has just ceased to lead have another leader;
        None when it is known, or not to be expected soon. `hold` is the connection's."""
        keys = []
        for name, topic_id, index in wanted:
            topic = self.find_base(name, topic_id)
            if topic is not None:
                keys.append((topic.topic_id, index))
        return self.leader_waits.next_leaders_of(keys, hold)

    def current_leader(self, name: str | None, topic_id: UUID | None, index: int) -> CurrentLeader:
        """As `leader_of`, for a topic as a request names it."""
        topic = self.find_base(name, topic_id)
        return NO_LEADER if topic is None else self.leader_of(topic, index)

    def leader_hint(self, name: str | None, topic_id: UUID | None, index: int) -> CurrentLeader:
        """As `current_leader`, for an answer that this node does not lead: it never names itself,
        or the client would ask here again and again."""
        leader = self.current_leader(name, topic_id, index)
        if leader.leader_id == self.node_id:
            found = self.find_partition(name, topic_id, index)
            if isinstance(found, ErrorCode) or not found.is_leader:
                return NO_LEADER
        return leader

    def endpoint(self, broker: BrokerImage, listener: str) -> NodeEndpoint | None:
        """Where a broker listens for clients that came by the listener of that name."""
        address = broker.endpoint(client_endpoint(listener))
        if address is None:
            return None
        return NodeEndpoint(broker.node_id, address.host, address.port, broker.rack)

    def endpoints(self, node_ids: Iterable[int], listener: str) -> list[NodeEndpoint]:
        """Where these brokers listen for clients of that listener; unknown ones are left out, and
        those without it."""
        brokers = self.image.brokers
        found = []
        for node_id in sorted(set(node_ids)):
            broker = brokers.get(NodeId(node_id))
            endpoint = None if broker is None else self.endpoint(broker, listener)
            if endpoint is not None:
                found.append(endpoint)
        return found

    def live_endpoints(self, listener: str) -> list[NodeEndpoint]:
        """Where the live brokers listen for clients of that listener."""
        found = (self.endpoint(broker, listener) for broker in self.image.live_brokers())
        return [endpoint for endpoint in found if endpoint is not None]

    def out_of_reach(self, listener: str) -> frozenset[int]:
        """Live brokers that have no listener of that name: its clients cannot go there."""
        return frozenset(
            int(broker.node_id)
            for broker in self.image.live_brokers()
            if self.endpoint(broker, listener) is None
        )

    @property
    def controller_id(self) -> int:
        """The node that clients should send admin requests to; any live one forwards them."""
        controller = self.engine.controller_id
        return -1 if controller is None else int(controller)

    def closest_replica(self, partition: Partition, rack: str) -> int | None:
        """An in-sync replica in the consumer's rack that may serve it better than this leader
        (KIP-392); None when this leader is as close, or no replica is closer. For consumers that
        catch up: at the end of the log the leader has new records first."""
        brokers = self.image.brokers
        own = brokers.get(self.node_id)
        if own is not None and own.rack == rack:
            return None
        for replica in partition.replica.in_sync_replicas():
            broker = brokers.get(replica.node_id)
            if broker is not None and broker.rack == rack and not broker.is_fenced:
                return int(replica.node_id)
        return None

    # ---- metadata ----

    @property
    def metadata_state(self) -> object:
        """Changes whenever an answer about topics or brokers could change."""
        image, configuration = self.image, self.engine.configuration
        return (
            image.structure_version,
            image.version if image.structure_version < 0 else 0,
            self.leader_table.version,
            self.controller_id,
            () if configuration is None else configuration.voters,
        )

    def in_sync_nodes(self, topic_id: TopicId, partition: PartitionImage) -> list[int]:
        """The in-sync replicas that a partition's leader last reported."""
        row = self.leader_table.of(topic_id, partition)
        return [] if row is None else [int(node_id) for node_id in row.isr]

    def reassignment(self, topic_id: TopicId, partition: PartitionImage) -> Reassignment | None:
        """The move of a partition that runs or waits, by the voters that its leader last named."""
        if not partition.planned and not partition.moving_from:
            return None
        row = self.leader_table.of(topic_id, partition)
        voters = partition.voters if row is None or not row.voters else row.voters
        return reassignment_of(partition, voters)

    def shown_replicas(self, topic_id: TopicId, partition: PartitionImage) -> Sequence[NodeId]:
        """The replicas that clients are told of: while it moves, the target's and those that go."""
        move = self.reassignment(topic_id, partition)
        return partition.replicas if move is None else move.replicas

    def offline_nodes(self, replicas: Iterable[int]) -> list[int]:
        """Those of these nodes that are not live."""
        brokers = self.image.brokers
        offline = []
        for node_id in replicas:
            broker = brokers.get(NodeId(node_id))
            if broker is None or broker.is_fenced:
                offline.append(int(node_id))
        return offline

    def metadata_voters(self) -> list[int]:
        """The nodes that vote on metadata now, as far as this node knows."""
        configuration = self.engine.configuration
        if configuration is not None and configuration.voters:
            return sorted({int(voter.node_id) for voter in configuration.voters})
        return [peer.id for peer in self.config.peers] or [int(self.node_id)]

    def check_topic_name(self, name: str) -> ErrorCode | None:
        """INVALID_TOPIC_EXCEPTION for a name that no topic can have."""
        is_legal = _TOPIC_NAME.fullmatch(name) is not None and name not in (".", "..")
        return None if is_legal else ErrorCode.INVALID_TOPIC_EXCEPTION

    def topic_configs(self, topic: str) -> dict[str, str]:
        """The effective configs of a topic on this node."""
        return effective_topic_configs(self.image, topic, self.node_id, self.config.defaults)

    def created_topic_configs(self, topic: str) -> list[dict[str, Any]]:
        """A new topic's configs, as CreateTopics v5+ returns them."""
        view = self.views.find(topic, None)
        static = self.config.defaults
        try:
            if view is not None and view.image.condition:
                entries = describe_view(self.image, view.image, self.node_id, static)
            else:
                entries = describe_topic(self.image, topic, self.node_id, static)
        except KafkaError:
            return []  # not known here: validated only, or deleted again
        return [
            {
                "name": entry.name,
                "value": entry.value,
                "read_only": entry.is_read_only,
                "config_source": int(entry.source),
                "is_sensitive": entry.is_sensitive,
            }
            for entry in entries
        ]

    # ---- the controller ----

    def call_controller(self, call: AdminRequest, who: Who) -> Promise[tuple[Outcome, ...]]:
        """Let the controller decide, wherever it is, on a client's behalf; fails with a
        KafkaError."""
        asker = Asker(Way.CLIENT, who.principal or "", who.host, who.listener, who.client_id)
        return self.controller.call(call, asker)

    def outcomes(
        self,
        call: AdminRequest,
        who: Who,
        refused: Callable[[ErrorCode, str], tuple[Outcome, ...]],
    ) -> Promise[tuple[Outcome, ...]]:
        """The controller's outcomes; where it cannot be reached, what `refused` makes of why."""
        promise: Promise[tuple[Outcome, ...]] = Promise()

        def settled(done: Promise[tuple[Outcome, ...]]) -> None:
            if done.error is None:
                promise.resolve(done.result())
            else:
                promise.resolve(refused(*self.explain(done.error)))

        self.call_controller(call, who).when_done(settled)
        return promise

    def explain(self, error: Exception) -> tuple[ErrorCode, str]:
        """Code and message for a client whose call failed as a whole."""
        if isinstance(error, KafkaError):
            return error.code, error.message
        return ErrorCode.UNKNOWN_SERVER_ERROR, "the controller could not be reached"

    @property
    def may_auto_create(self) -> bool:
        """True unless `auto.create.topics.enable` is off."""
        text = broker_value(
            self.image, self.node_id, self.config.defaults, "auto.create.topics.enable"
        )
        return text is None or text.lower() == "true"

    def auto_create(self, names: Iterable[str], who: Who) -> Promise[dict[str, ErrorCode]]:
        """Create missing topics, since a client named them; gives the error code of each, for the
        answer to it."""
        wanted = list(dict.fromkeys(names))
        fresh = [
            name
            for name in wanted
            if name not in self._creating and self.check_topic_name(name) is None
        ]
        later = self._auto_create_room.take(fresh)
        fresh = fresh[: len(fresh) - len(later)]
        if later:
            self.metrics.refuse("auto_create_topics_max")
            _log.warning(
                "topics are not created yet: auto_create_topics_max",
                named=len(wanted),
                left=len(later),
            )
        if fresh:
            self._create(fresh, who)
        results = [self._creating.get(name, ErrorCode.INVALID_TOPIC_EXCEPTION) for name in wanted]
        if later:
            # The client asks again, and by then there may be room.
            unmade = frozenset(later)
            results = [
                ErrorCode.LEADER_NOT_AVAILABLE if name in unmade else result
                for name, result in zip(wanted, results, strict=True)
            ]
        promise: Promise[dict[str, ErrorCode]] = Promise()

        def finish(codes: list[ErrorCode]) -> None:
            promise.resolve(
                {
                    name: code
                    for name, code in zip(wanted, codes, strict=True)
                    if code is not ErrorCode.NONE
                }
            )

        gather(results, finish)
        return promise

    def _create(self, names: list[str], who: Who) -> None:
        """One call for all; requests for the same names meanwhile share its outcome."""
        promises: dict[str, Promise[ErrorCode]] = {name: Promise() for name in names}
        self._creating.update(promises)
        call = CreateTopicsCall(
            topics=tuple(NewTopic(name=name) for name in names),
            timeout_ms=self.config.topic_create_wait_ms,
            is_auto=True,
        )

        def settled(done: Promise[tuple[Outcome, ...]]) -> None:
            codes = dict.fromkeys(names, ErrorCode.LEADER_NOT_AVAILABLE)
            if done.error is None:
                made = {one.name: one.code for one in done.result()}
                codes.update({name: _auto_code(code) for name, code in made.items()})
            else:  # refused by the controller, or unknown
                code = getattr(done.error, "code", ErrorCode.UNKNOWN_SERVER_ERROR)
                made = dict.fromkeys(names, code)
            self._tell_created(made, who)
            for name, promise in promises.items():
                del self._creating[name]
                promise.resolve(codes[name])

        self.call_controller(call, who).when_done(settled)

    def _tell_created(self, made: Mapping[str, ErrorCode], who: Who) -> None:
        for name, code in made.items():
            row = AuditRow(f"topic:{name}", "named by a client", code.name)
            self.audit.administration(who, "Metadata", outcome_of({code.name}), [row])

    def elect_preferred(
        self, name: TopicPartition, timeout_ms: int
    ) -> ErrorCode | Promise[ErrorCode]:
        """Hand a partition to its preferred leader; resolves when that one leads."""
        topic = self.image.topics.get(name.topic)
        found = self.image.partition(name)
        if topic is None or found is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        preferred = found.preferred_leader
        leader = self.leader_of(topic, name.partition)
        if leader.leader_id == preferred:
            return ErrorCode.ELECTION_NOT_NEEDED
        in_sync = self.in_sync_nodes(topic.topic_id, found)
        if self.offline_nodes([preferred]) or (in_sync and preferred not in in_sync):
            return ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
        if leader.leader_id < 0:
            return ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE
        if not self._hand_over(NodeId(leader.leader_id), name):
            return ErrorCode.LEADER_NOT_AVAILABLE
        promise: Promise[ErrorCode] = Promise()
        hand_over = self._hand_over
        give_up_ms = self.clock.monotonic_ms() + timeout_ms
        ask_at_ms = self.clock.monotonic_ms() + ELECTION_ASK_MS

        def look() -> None:
            nonlocal ask_at_ms
            if self.clock.monotonic_ms() >= ask_at_ms:
                # The leader may have refused, since too much was on its way for a moment.
                ask_at_ms += ELECTION_ASK_MS
                leads = self.leader_of(topic, name.partition).leader_id
                if leads != preferred:
                    hand_over(NodeId(leads), name)
            now_leads = self.leader_of(topic, name.partition).leader_id == preferred
            if now_leads:
                promise.resolve(ErrorCode.NONE)
            elif self.clock.monotonic_ms() >= give_up_ms:
                promise.resolve(ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE)
            else:
                self.deadlines.after(ELECTION_POLL_MS, look)

        look()
        return promise

    def quorum_view(self) -> QuorumState | None:
        """The metadata group as this node's replica knows it; a follower knows only its own end."""
        replica = self.metadata_replica
        if replica is None:
            return None
        return view_of(
            replica,
            node_id=self.node_id,
            leader_id=self.controller_id,
            wall_ms=self.clock.wall_ms(),
        )

    def quorum_state(self) -> QuorumState | Promise[QuorumState | None] | None:
        """The metadata group as its leader knows it; where no answer comes, as this node does."""
        own = self.quorum_view()
        if own is None or self.metadata_replica is None or self.metadata_replica.is_leader:
            return own
        promise: Promise[QuorumState | None] = Promise()

        def settle(state: QuorumState | None) -> None:
            if not promise.is_done:
                promise.resolve(self.quorum_view() if state is None else state)

        self.deadlines.after(QUORUM_WAIT_MS, lambda: settle(None))
        self.controller.ask_quorum().when_done(lambda done: settle(done.result()))
        return promise


def authorizer_of(config: NodeConfig, rules: Callable[[], Rules]) -> Authorizer | None:
    """What says who may do what, by these rules; None where everybody may do everything."""
    return Authorizer(rules, config.super_users) if config.authorizer == BY_RULES else None


def _auto_code(code: ErrorCode) -> ErrorCode:
    """The code for an auto-creating client: the topic comes, unless it never can."""
    if code in _COMING:
        return ErrorCode.LEADER_NOT_AVAILABLE
    return code
