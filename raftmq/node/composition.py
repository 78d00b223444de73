"""A node without the process around it: its parts, the order in which they come up, and how it
leaves.

Data folder and journal are there; then links, formation (once in a cluster's life), the metadata
replica, the registration as a broker, the partitions that the then current image names. The same
composition is the real node (`node.py` puts trio, sockets and threads around it) and the simulated
one. Never waits but through `Tasks`, never reads a clock but that of its environment.

It leaves (`Shutdown`) in this order: leaderships go to in-sync voters of live brokers, all at once;
the claims of groups go to their next coordinators; the controller fences this broker, so that
Metadata names it no more; the metadata group gets another leader; then the process answers the
requests under way and hangs up. What is not handed over in time is left to an election.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from raftmq.config import Address, ClientListener, ConfigError, NodeConfig
from raftmq.controller.broker_lifecycle import BrokerInfo
from raftmq.controller.call_rights import CallRefusal
from raftmq.controller.control_plane import ControlPlane, QuorumState
from raftmq.controller.controller import ControllerConfig
from raftmq.errors import AheadError
from raftmq.groups.coordinator import Coordinator
from raftmq.groups.model import GroupConfig
from raftmq.log.journal import HardStateJournal
from raftmq.log.model import LogConfig
from raftmq.logs import RateLimitedLog, structlog
from raftmq.metadata.broker_messages import AdminRequest, Asker, PartitionSize, Way
from raftmq.metadata.commands import Endpoint, FeatureUpdate, NodeState, client_endpoint
from raftmq.metadata.configs import check_static_configs
from raftmq.metadata.engine import DrivenEngine
from raftmq.metadata.features import (
    FORMATS,
    LEVEL_OF_WITNESSED_JOURNALS,
    first_levels,
    named,
)
from raftmq.metadata.formation import Formation
from raftmq.metadata.image import RAFTMQ_LEVEL, MetadataImage
from raftmq.metadata.raft_engine import RaftMetadataEngine
from raftmq.metadata.state_machine import MetadataMachine, UnappliableCommandError
from raftmq.node.data_plane import DataPlane
from raftmq.node.environment import Environment
from raftmq.node.events import Events
from raftmq.node.partitions import Partitions, RoleWatch, run_maintenance, tell_of_term
from raftmq.partition.parked import Deadlines
from raftmq.partition.partition import Partition
from raftmq.partition.settings import PartitionSettings
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import SoftState
from raftmq.replication.clocks import AgreedTime
from raftmq.replication.opening import Opening, open_replica
from raftmq.replication.replica import Replica
from raftmq.rights import CLUSTER_NAME, Kind
from raftmq.runtime.broker_calls import BrokerCalls
from raftmq.runtime.certificates import ServerTls
from raftmq.runtime.peer_links import KIND_FORMATION
from raftmq.runtime.peer_secret import SecretTls
from raftmq.runtime.peer_tls import PeerTls
from raftmq.runtime.token_keys import TokenKeys
from raftmq.sasl.oauthbearer import MECHANISM as OAUTHBEARER
from raftmq.sasl.oauthbearer import Verify
from raftmq.server.audit import PEER_LISTENER, Audit, Who
from raftmq.server.kafka.authentication import Authenticator, SaslSettings
from raftmq.server.kafka.broker import Broker, authorizer_of
from raftmq.server.kafka.dispatch import HANDLERS, Dispatcher
from raftmq.server.kafka.limits import RequestMemory
from raftmq.transactions.coordinator import TransactionConfig, TransactionCoordinator
from raftmq.transactions.expiry import TransactionExpiry
from raftmq.transactions.leader import LeaderTransactions
from raftmq.transactions.rows import RowQueue
from raftmq.types import (
    METADATA_GROUP,
    METADATA_TOPIC,
    Buffer,
    NodeId,
    ReplicaId,
    TopicId,
    TopicPartition,
)

logger = structlog.get_logger("raftmq.node")
_refused_log: Final = RateLimitedLog(structlog.get_logger("raftmq.security"))

POLL_S: Final = 0.01
HANDOVER_POLL_S: Final = 0.002
RESIGN_EVERY_MS: Final = 500.0
"""How often a node that should lead nothing looks whether it leads the metadata group."""
HANG_UP_S: Final = 0.5
"""The last part of the time of a shutdown, for answers to clients."""
EAGER_TICKS: Final = 20
"""Ticks in which the first voter of a cluster that was just formed stands for election."""
NO_MAJORITY_S: Final = 10.0
NO_MAJORITY_AGAIN_S: Final = 60.0
"""How long a start waits for other nodes before it logs that, and then before it logs it again."""
_BRING_BACK: Final = (
    "bring voters back with their data; if a majority of them is lost for good, see "
    "`raftmq recover --unsafe`"
)
_LOST_VOTE: Final = (
    "state.journal, the record of this node's votes, is lost or damaged, so it may not vote before "
    "a leader has admitted it anew"
)
LEARNED_MAX: Final = 8
"""Most addresses that a joining node takes from its peers, before the metadata names them: those of
the controller and its successors."""
LOST_HEARTBEATS: Final = 3
"""A broker whose connection ended is gone once so many of its heartbeats are missing."""
CUT_OFF_MS: Final = 1_000.0
"""How long the majority must be silent, though its nodes are connected, until this node counts
itself as cut off."""
METADATA_LOG: Final = LogConfig(
    segment_bytes=64 << 20,
    retention_ms=-1,
    segment_reserve_bytes=1 << 20,
    recent_bytes_max=2 << 20,  # its state is in memory already, and few replicas lag
)


def _unapplied(error: Exception) -> str:
    if isinstance(error, UnappliableCommandError | AheadError):
        return str(error)
    return f"a committed command cannot be applied: {error!r}"


def _may_vote(replica: Replica) -> bool:
    """False after its journal was lost, which makes it a new replica that is no member yet."""
    return replica.self_id in replica.voters


class _Reminder:
    """Logs what a start waits for: after a while, and then seldom."""

    def __init__(self, clock: Clock, tell: Callable[[], None]) -> None:
        self._clock = clock
        self._tell = tell
        self._at_ms = clock.monotonic_ms() + NO_MAJORITY_S * 1e3

    def look(self) -> None:
        """Log it when it is time."""
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._at_ms:
            self._at_ms = now_ms + NO_MAJORITY_AGAIN_S * 1e3
            self._tell()


class NodeCore:
    """One node of a cluster, to be driven by a process or by a simulation.

    Attributes:
        is_serving: clients may connect.
        metadata_log: how the metadata group keeps its log; set it before `join`.
        metadata_replica: None before it is opened, and where metadata is on the reference engine.
    """

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.node_id = NodeId(config.node_id)
        self.is_serving = False
        self.metadata_log = METADATA_LOG
        self.metadata_replica: Replica | None = None
        self._eager_ticks = 0
        self._resign_at_ms = 0.0
        self._learned: set[NodeId] = set()
        self.tls: dict[str, ServerTls] = {}
        """The certificates of each listener that is encrypted."""
        self.peer_tls: PeerTls | SecretTls | None = None
        """Those between nodes; None where their streams are not protected."""
        self.admin_tls: ServerTls | None = None
        """Those of the admin port; None where it speaks plain HTTP."""
        self.token_keys: TokenKeys | None = None
        """The keys of whoever issues tokens; None where no listener takes any."""

    def compose(self, environment: Environment, journal: HardStateJournal) -> None:
        """Make all parts; nothing runs yet."""
        self.tasks = environment.tasks
        self.supported = environment.supported
        self._compose_plane(environment, journal)
        self._compose_control()
        self._compose_server(environment)
        self.engine.on_image(lambda _before, _after: self._learn_addresses())
        self.engine.on_image(self._levels_changed)
        self.plane.links.set_addresses(
            {NodeId(peer.id): Address(peer.host, peer.port) for peer in self.config.peers}
        )

    async def join(self) -> None:
        """Become a broker that knows what it should run, and run it."""
        await self._form()
        self._open_metadata()
        await self.prepared()
        self.plane.on_tick.append(self.tick)
        await self._until(lambda: self.control.lifecycle.is_current)
        await self.partitions.start()

    async def prepared(self) -> None:
        """Finish what must be done before other nodes rely on this one; it votes meanwhile."""

    async def live(self) -> None:
        """Follow the metadata, and keep the logs well, until cancelled."""
        await self.tasks.together(
            [
                self.partitions.run,
                self.partitions.delays.run,
                self.partitions.views.run,
                lambda: run_maintenance(self.plane, self.partitions),
            ]
        )

    async def until_ready(self) -> None:
        """Wait until clients may come."""
        await self._until(lambda: self.control.lifecycle.is_ready)

    @property
    def is_behind(self) -> bool:
        """True when it stops because the cluster is ahead of this version."""
        error = self.machine.failure
        is_newer = isinstance(error, UnappliableCommandError) and error.is_newer
        return is_newer or isinstance(error, AheadError)

    # ---- the parts ----

    def _compose_plane(self, environment: Environment, journal: HardStateJournal) -> None:
        self.calls = BrokerCalls(self._send_frame, self._serve_broker, self._peer_version)
        self.plane = DataPlane(
            self.config,
            environment,
            journal,
            on_formation=self._on_formation,
            on_broker=self.calls.receive,
            on_identity=self._on_identity,
            on_lost=self._on_lost,
        )
        folder = self.plane.folder
        self.deadlines = Deadlines(self.plane.clock)
        self.formation = Formation(
            self.node_id,
            folder.storage_id,
            self._first_voters(),
            state=folder.load_formation(),
            save=folder.save_formation,
            send=self._send_formation,
            random=self.plane.random,
            wait_ms=self.config.formation_wait_ms,
        )

    def _compose_control(self) -> None:
        config, plane = self.config, self.plane
        check_static_configs(config.defaults)
        self.machine = MetadataMachine(plane.folder.load_formation().skips, self.supported)
        self.engine = self._make_engine()
        self.control = ControlPlane(
            self._info(),
            self.engine,
            self.calls,
            clock=plane.clock,
            random=plane.random,
            config=ControllerConfig(
                session_ms=config.broker_session_ms,
                lost_session_ms=min(
                    config.broker_session_ms, LOST_HEARTBEATS * config.broker_heartbeat_ms
                ),
                create_wait_ms=config.topic_create_wait_ms,
                static=config.defaults,
                voters_count=len(self._first_voters()),
                moves_max=config.replica_moves_max,
                replicas_max=config.replicas_max or ControllerConfig().replicas_max,
                supported=self.supported,
            ),
            heartbeat_ms=config.broker_heartbeat_ms,
            bootstrap=self._first_voters(),
            move_locally=self._move_locally,
            learn_address=self._learn_address,
            quorum_view=self._quorum_view,
            sizes_here=self._sizes_here,
            authorizer=authorizer_of(config, lambda: self.engine.image.rules),
            call_refused=self._call_refused,
            request_refused=self._request_refused,
            drain_later=self._drain_later,
        )
        self._compose_transactions()
        self.partitions = Partitions(
            plane,
            self.control,
            self.deadlines,
            on_role=self._role_changed,
            transactions=self.led_transactions,
            agreed=self.agreed_time,
        )
        self.control.take_delivery = self.partitions.delays.take

    def _compose_transactions(self) -> None:
        plane, engine, config = self.plane, self.engine, self._transaction_config()
        self.agreed_time = AgreedTime(
            self.node_id,
            plane.clock,
            plane.multiraft.leading_cores,
            self._voters_count,
            self._keep_metadata_awake,
        )
        rows = RowQueue(engine, self.deadlines, self.agreed_time.latest_ms, plane.clock.wall_ms)
        self.transaction_rows = rows
        self.transactions = TransactionCoordinator(engine, rows, self.deadlines, config)
        self.led_transactions = LeaderTransactions(
            engine,
            rows,
            self.transactions,
            self.deadlines,
            self._replica_of,
            plane.multiraft.batch,
        )
        self.transaction_expiry = TransactionExpiry(
            engine, rows, plane.clock, config, self.agreed_time.earliest_ms
        )

    def _sizes_here(self) -> Iterator[PartitionSize]:
        for partition in self.partitions.registry:
            if partition.is_leader:
                yield PartitionSize(partition.topic_id, partition.index, partition.size_bytes)

    def _call_refused(
        self, sender: NodeId, request: AdminRequest, asker: Asker | None, refusal: CallRefusal
    ) -> None:
        """Count and tell what this node, the controller, did not decide for want of a right."""
        operation = refusal.operation
        self.broker.metrics.deny(refusal.kind, operation)
        asker = asker or Asker(Way.NODE)
        call, resource = type(request).__name__, f"{refusal.kind}:{refusal.name}"
        listener = asker.listener or PEER_LISTENER
        _refused_log.warning(
            "admin call refused",
            sender=sender,
            call=call,
            principal=asker.principal,
            host=asker.host,
            operation=str(operation),
            resource=resource,
            why=refusal.message,
        )
        who = Who(asker.principal or None, asker.host, listener, asker.client_id)
        why = refusal.message
        self.audit.denial(who, call, str(operation), resource, by_node=sender, why=why)

    def _command_refused(self, sender: NodeId, kind: str, why: str) -> None:
        """Tell of a command that another node may not send; it is counted and logged already."""
        self._node_refused(sender, kind, "forward", why)

    def _request_refused(self, sender: NodeId, kind: str, why: str) -> None:
        """The same of a request."""
        self._node_refused(sender, kind, "ask", why)

    def _node_refused(self, sender: NodeId, kind: str, operation: str, why: str) -> None:
        who, resource = Who(None, "", PEER_LISTENER), f"{Kind.CLUSTER}:{CLUSTER_NAME}"
        self.audit.denial(who, kind, operation, resource, by_node=sender, why=why)

    def _replica_of(self, topic_id: TopicId, index: int) -> Partition | None:
        return self.partitions.registry.by_id(topic_id, index)

    def _transaction_config(self) -> TransactionConfig:
        defaults, built_in = self.config.defaults, TransactionConfig()
        return TransactionConfig(
            max_timeout_ms=int(defaults.get("transaction.max.timeout.ms", built_in.max_timeout_ms)),
            id_expiration_ms=int(
                defaults.get("transactional.id.expiration.ms", built_in.id_expiration_ms)
            ),
        )

    def _make_engine(self) -> DrivenEngine:
        return RaftMetadataEngine(
            self_id=self.node_id,
            incarnation=self.plane.clock.wall_ms(),
            machine=self.machine,
            forwarder=self.calls,
            clock=self.plane.clock,
            on_broken_invariant=self.plane.fail,
            wake=self._wake,
            drain_later=self._drain_later,
            on_unauthorized=self._command_refused,
            first_levels=self._first_levels,
        )

    def _compose_server(self, environment: Environment) -> None:
        config, plane = self.config, self.plane
        self.audit = Audit(
            environment.audit_sink, plane.clock, cluster=config.cluster_id, node=config.node_id
        )
        self.coordinator = Coordinator(
            self.node_id,
            self.engine,
            plane.clock,
            self._group_config(),
            random=plane.random,
            retention_now_ms=self.agreed_time.earliest_ms,
            latest_now_ms=self.agreed_time.latest_ms,
            deadlines=self.deadlines,
        )
        self.broker = Broker(
            self.node_id,
            config.cluster_id,
            engine=self.engine,
            controller=self.control,
            leader_table=self.control.leaders,
            partitions=self.partitions.registry,
            coordinator=self.coordinator,
            transactions=self.transactions,
            deadlines=self.deadlines,
            clock=plane.clock,
            config=config,
            random=plane.random,
            buggify=plane.buggify,
            drains=plane.multiraft,
            hand_over=self._hand_to_preferred,
            has_ended=plane.links.has_ended,
            is_cut_off=self._is_cut_off,
            workers=environment.workers,
            filtered=self.partitions.views.find,
            audit=self.audit,
            supported=self.supported,
        )
        self.dispatcher = Dispatcher(self.broker, HANDLERS)
        self.authenticators = {
            listener.name: self._authenticator(listener, environment)
            for listener in config.client_listeners
            if listener.has_sasl
        }
        self.request_memory = RequestMemory(config.request_memory_bytes_max)
        self.events = Events(self)
        self.events.attach()

    def _authenticator(self, listener: ClientListener, environment: Environment) -> Authenticator:
        config = self.config
        mechanisms = config.mechanisms_of(listener)
        authenticator = Authenticator(
            SaslSettings(
                mechanisms=mechanisms,
                session_ms_max=config.sasl_session_ms_max,
                failure_delay_ms=config.sasl_failure_delay_ms,
                timeout_ms=config.request_receive_timeout_ms,
            ),
            lambda: self.engine.image.users,
            workers=environment.workers,
            deadlines=self.deadlines,
            clock=self.plane.clock,
            counts=self.broker.metrics,
            audit=self.audit,
            verify=None if OAUTHBEARER not in mechanisms else self._judge(),
        )
        self.engine.on_image(authenticator.image_changed)
        self.machine.add_listener(authenticator.deletions)
        return authenticator

    def _judge(self) -> Verify:
        assert self.token_keys is not None, "made with the node, where a listener takes tokens"
        return self.token_keys.verify

    def _role_changed(self, name: TopicPartition, watch: RoleWatch, soft: SoftState) -> None:
        self.events.replica_changed(name, watch, soft)  # made after the partitions

    def _is_cut_off(self) -> bool:
        """True when metadata may go on without this node: the majority is silent, though its nodes
        are connected."""
        if self.metadata_replica is None or self.control.lifecycle.isolated_ms() <= CUT_OFF_MS:
            return False
        voters = [voter.node_id for voter in self.metadata_replica.voters]
        up = sum(v == self.node_id or self.plane.links.is_connected(v) for v in voters)
        return 2 * up > len(voters)

    def resign(self, *, must: bool = False) -> bool:
        """Give the metadata group another leader; True when it has one, or none is left.

        A node that should lead nothing takes it only where this one `must` go.
        """
        replica = self.metadata_replica
        if replica is None or not replica.is_leader:
            return True
        image = self.engine.image
        live = {broker.node_id for broker in image.live_brokers()}
        successors = [
            voter.node_id
            for voter in replica.in_sync_replicas()
            if voter.node_id != self.node_id and voter.node_id in live
        ]
        shunned = image.shunned()
        willing = [node_id for node_id in successors if node_id not in shunned]
        if willing or not must:
            successors = willing
        if successors and not replica.is_handing_over:
            replica.transfer_leadership(successors[0])
        return not successors

    def _first_voters(self) -> list[NodeId]:
        return [NodeId(peer.id) for peer in self.config.peers] or [self.node_id]

    def _info(self) -> BrokerInfo:
        config, folder = self.config, self.plane.folder
        clients = {client_endpoint(one.name): one.told_address for one in config.client_listeners}
        addresses = {**clients, "peer": config.peer_address, "admin": config.admin_address}
        return BrokerInfo(
            replica_id=ReplicaId(self.node_id, folder.storage_id),
            cluster_id=config.cluster_id,
            rack=config.rack,
            recoveries=len(folder.load_formation().recoveries),
            replicas_max=config.replicas_max,
            takes_no_data=not (config.takes_data_at_once or self.node_id in self._first_voters()),
            features=named(self.supported),
            endpoints=tuple(
                Endpoint(name, address.host, address.port) for name, address in addresses.items()
            ),
        )

    def _keep_metadata_awake(self) -> None:
        replica = self.metadata_replica
        if replica is not None and replica.is_leader and replica.quiescence.is_quiescent:
            self.plane.multiraft.touch(METADATA_GROUP)

    def _voters_count(self) -> int:
        replica = self.metadata_replica
        return len(self.config.peers if replica is None else replica.voters)

    def _group_config(self) -> GroupConfig:
        defaults, built_in = self.config.defaults, GroupConfig()

        def number(key: str, otherwise: int) -> int:
            return int(defaults.get(key, otherwise))

        return GroupConfig(
            session_timeout_ms_min=number(
                "group.min.session.timeout.ms", built_in.session_timeout_ms_min
            ),
            session_timeout_ms_max=number(
                "group.max.session.timeout.ms", built_in.session_timeout_ms_max
            ),
            initial_rebalance_delay_ms=number(
                "group.initial.rebalance.delay.ms", built_in.initial_rebalance_delay_ms
            ),
            size_max=number("group.max.size", built_in.size_max),
            bytes_max=self.config.group_bytes_max,
            commit_linger_ms=number(
                "group.coordinator.append.linger.ms", built_in.commit_linger_ms
            ),
            offsets_retention_ms=60_000
            * number("offsets.retention.minutes", built_in.offsets_retention_ms // 60_000),
        )

    # ---- coming up ----

    async def _form(self) -> None:
        """Wait until the cluster's first voters are known."""
        formation, clock = self.formation, self.plane.clock
        told: dict[int, tuple[int, ...]] = {}
        reminder = _Reminder(clock, self._tell_not_formed)
        while formation.chosen is None:
            formation.tick(clock.monotonic_ms())
            reminder.look()
            if formation.mismatches != told:
                told = dict(formation.mismatches)
                logger.warning("peers name other voters", mine=formation.voters, theirs=told)
            if formation.chosen is None:
                await self.tasks.sleep(POLL_S)
        self.plane.links.set_formation(formation.formation_id)

    def _open_metadata(self) -> None:
        plane, engine = self.plane, self.engine
        if not isinstance(engine, RaftMetadataEngine):
            return
        assert self.formation.chosen is not None
        replica = open_replica(
            Opening(
                node=plane.self_id,
                disk=plane.disk,
                journal=plane.journal,
                host=plane.multiraft,
                clock=plane.clock,
                random=plane.random,
                shared=plane.shared,
                catch_up=plane.catch_up,
                buggify=plane.buggify,
            ),
            METADATA_GROUP,
            f"{plane.folder.path}/meta",
            initial=Configuration(voters=tuple(sorted(self.formation.chosen))),
            machine=self.machine,
            log_config=self.metadata_log,
            config=plane.replica_config(announce_commit=True),
        )
        tell_of_term(TopicPartition(METADATA_TOPIC, 0), replica)
        engine.attach(replica, (voter.node_id for voter in self.formation.chosen))
        self.broker.metadata_replica = replica
        plane.multiraft.register(replica)
        if replica.leader_epoch == 0 and replica.self_id == min(self.formation.chosen):
            self._eager_ticks = EAGER_TICKS
            replica.stand()
        self._show_metadata_log(replica)
        self.metadata_replica = replica
        self._drain_later()

    def _show_metadata_log(self, replica: Replica) -> None:
        """Let Kafka clients read the committed metadata log, by its name alone."""
        log = Partition(
            TopicPartition(METADATA_TOPIC, 0),
            METADATA_GROUP,
            self.node_id,
            settings=PartitionSettings(),
            deadlines=self.deadlines,
            clock=self.plane.clock,
            on_broken_invariant=self.plane.fail,
            is_internal=True,
        )
        log.attach(replica)
        self.machine.on_progress.append(log.progressed)
        self.partitions.registry.add_internal(log)
        self.engine.on_image(lambda _before, _after: log.fetches.wake_all())
        self.engine.on_role(log.fetches.wake_all)

    async def _until(self, condition: Callable[[], bool]) -> None:
        refusal = None
        reminder = _Reminder(self.plane.clock, self._tell_no_majority)
        while not condition():
            reminder.look()
            if self.control.lifecycle.refusal != refusal:
                refusal = self.control.lifecycle.refusal
                logger.error("the cluster refuses this node", reason=refusal)
            if self.control.lifecycle.is_replaced:
                self.plane.fail(str(refusal))
            await self.tasks.sleep(POLL_S)

    def _tell_not_formed(self) -> None:
        """Log which nodes a node waits for that knows no cluster and cannot form one alone."""
        voters = self._first_voters()
        logger.warning(
            "no cluster yet",
            voters=voters,
            connected=[n for n in self.formation.heard_from if self.plane.links.is_connected(n)],
            hint="start a majority of these voters, or any node of the cluster that knows this "
            "one; `peers` must name the same nodes everywhere",
        )

    def _tell_no_majority(self) -> None:
        """Log whose votes are missing: without a leader of the metadata group nothing goes on."""
        engine, links = self.engine, self.plane.links
        configuration = engine.configuration
        if configuration is None or engine.controller_id is not None:
            return
        voters = [voter.node_id for voter in configuration.voters]
        replica = self.metadata_replica
        has_vote = replica is None or self.node_id not in voters or _may_vote(replica)
        logger.warning(
            "no majority of the metadata group",
            voters=voters,
            connected=[n for n in voters if n == self.node_id or links.is_connected(n)],
            hint=_BRING_BACK if has_vote else f"{_LOST_VOTE}; {_BRING_BACK}",
        )

    # ---- living ----

    def tick(self, now_ms: float) -> None:
        """Let time pass for everything above the data plane."""
        if self.machine.failure is not None:
            # The call that met it first may have reported it to its own client only.
            self.plane.fail(_unapplied(self.machine.failure))
            return
        if self.control.lifecycle.is_replaced:
            self.plane.fail(str(self.control.lifecycle.refusal))
            return
        replica = self.metadata_replica
        if replica is not None and replica.failure is not None:
            self.plane.fail(f"the metadata replica stopped: {replica.failure}")
            return
        if self._eager_ticks and replica is not None:
            # A cluster that was just formed need not wait for an election timeout; the other
            # nodes may not have the group yet, so its first voter asks more than once.
            self._eager_ticks -= 1
            replica.stand()
        self.agreed_time.tick()
        self.control.tick()
        self.coordinator.tick(now_ms)
        if self.node_id in self.engine.image.shunned():
            if not self._is_needed():
                self.coordinator.give_away(now_ms)
            if now_ms >= self._resign_at_ms:
                self._resign_at_ms = now_ms + RESIGN_EVERY_MS
                self.resign()
        self.transaction_expiry.tick()
        self.partitions.tick(now_ms)
        self.events.tick(now_ms)
        self.control.lifecycle.has_full_disk = self.events.is_disk_full
        self.control.lifecycle.has_stuck_disk = self.events.is_disk_stuck
        self.control.lifecycle.is_reading_delays = self.partitions.delays.followers.is_reading

    def _is_needed(self) -> bool:
        """True while this node leads a partition, or has one that it is to lose: its claims of
        groups go last."""
        replicas = self.partitions.replicas()
        is_drained = self.engine.image.brokers[self.node_id].state is NodeState.DRAINING
        return bool(replicas) if is_drained else any(replica.is_leader for replica in replicas)

    def _wake(self) -> None:
        """Drain the metadata replica and then the engine, now or after the round under way."""
        self._drain_later()
        if self.metadata_replica is not None:
            self.plane.multiraft.touch(METADATA_GROUP)

    def _drain_later(self) -> None:
        """Drain the engine after the round of drains that is under way, else after the next one."""
        if self.metadata_replica is not None:
            self.plane.multiraft.after_round(self.control.drain)

    def _send_frame(self, node_id: NodeId, kind: int, pieces: Sequence[Buffer]) -> bool:
        return self.plane.links.send(node_id, kind, pieces)

    def _peer_version(self, node_id: NodeId) -> int:
        return self.plane.links.version(node_id)

    def _first_levels(self) -> tuple[FeatureUpdate, ...]:
        """What a new cluster begins with, where this node is its first controller."""
        spoken = [self._peer_version(node_id) for node_id in self.formation.heard_from]
        return first_levels(self.supported, [version for version in spoken if version])

    def _levels_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        """Refuse links to nodes too old for the cluster's level, and use what the level allows."""
        if before.features is not after.features:
            self.plane.links.demand(FORMATS[after.level], f"{RAFTMQ_LEVEL} is {after.level}")
            if after.level >= LEVEL_OF_WITNESSED_JOURNALS:
                self.plane.journal.write_twice()

    def _send_formation(self, node_id: NodeId, payload: bytes) -> None:
        self.plane.links.send(node_id, KIND_FORMATION, [payload])

    def _on_formation(self, sender: NodeId, frame: memoryview) -> None:
        self.formation.receive(sender, bytes(frame))

    def _serve_broker(self, sender: NodeId, payload: bytes) -> Promise[bytes]:
        return self.control.receive(sender, payload)

    def _move_locally(self, topic_id: TopicId, partition: int, to: NodeId) -> bool:
        return self.partitions.move(topic_id, partition, to)

    def _on_identity(self, identity: ReplicaId) -> None:
        if self.formation.chosen is None:
            self.formation.heard(identity.node_id, identity.storage_id)
        if self.plane.links.is_connected(identity.node_id):
            self.broker.leader_waits.node_connected(identity.node_id)
            self.control.peer_connected(identity.node_id)

    def _on_lost(self, node_id: NodeId) -> None:
        self.calls.peer_lost(node_id)
        self.broker.leader_waits.node_lost(node_id)
        self.control.peer_lost(node_id)

    def _quorum_view(self) -> QuorumState | None:
        return self.broker.quorum_view()

    def _learn_address(self, node_id: NodeId, where: str) -> None:
        if node_id in self.engine.image.brokers:
            return  # the image has its address
        if node_id not in self._learned and len(self._learned) >= LEARNED_MAX:
            return
        with suppress(ConfigError):  # a peer sent nonsense: another one will be asked
            self.plane.links.set_addresses({node_id: Address.parse(where)})
            self._learned.add(node_id)

    def _learn_addresses(self) -> None:
        addresses = {}
        for broker in self.engine.image.brokers.values():
            endpoint = broker.endpoint("peer")
            if endpoint is not None:
                addresses[broker.node_id] = Address(endpoint.host, endpoint.port)
        self.plane.links.set_addresses(addresses)

    def _hand_to_preferred(self, _leader: NodeId, name: TopicPartition) -> bool:
        topic = self.engine.image.topics.get(name.topic)
        known = self.engine.image.partition(name)
        if topic is None or known is None:
            return False
        self.control.move_leadership(topic.topic_id, name.partition, known.preferred_leader)
        return True


class _EndOfHandoverError(Exception):
    """The time is over, or no node is left to hand anything to."""


class Shutdown:
    """How one node hands over all that it is responsible for: the order, and its deadline."""

    def __init__(self, node: NodeCore) -> None:
        self._node = node
        self._deadline_ms = 0.0

    async def run(self) -> None:
        """Hand over; ends within `shutdown_timeout_ms` less `HANG_UP_S` in any case."""
        node = self._node
        timeout_ms = max(0.0, node.config.shutdown_timeout_ms - HANG_UP_S * 1e3)
        self._deadline_ms = node.plane.clock.monotonic_ms() + timeout_ms
        try:
            await self._hand_over()
        except _EndOfHandoverError:
            if not self._is_alone():
                logger.warning("not everything was handed over in time", left=self._left())

    async def _hand_over(self) -> None:
        node = self._node
        await self._until(lambda: not node.partitions.transfer_all())
        releases = node.coordinator.drain()
        await self._until(lambda: all(release.is_done for release in releases))
        node.control.lifecycle.drain()
        await self._until(lambda: not node.control.lifecycle.is_ready)
        # Fenced, it gets no more leaderships; it hands over those it got meanwhile.
        await self._until(lambda: not node.partitions.transfer_all())
        await self._until(self._has_resigned)

    def _has_resigned(self) -> bool:
        return self._node.resign(must=True)

    async def _until(self, condition: Callable[[], bool]) -> None:
        node = self._node
        while not condition():
            if self._is_alone() or node.plane.clock.monotonic_ms() >= self._deadline_ms:
                raise _EndOfHandoverError
            await node.tasks.sleep(HANDOVER_POLL_S)

    def _is_alone(self) -> bool:
        node = self._node
        if node.metadata_replica is None:
            return False
        voters = node.metadata_replica.voters
        reached = [
            voter
            for voter in voters
            if voter.node_id == node.node_id or node.plane.links.is_connected(voter.node_id)
        ]
        return len(reached) <= len(voters) // 2

    def _left(self) -> int:
        return sum(replica.is_leader for replica in self._node.partitions.replicas())
