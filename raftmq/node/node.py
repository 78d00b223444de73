"""The node of a process: `composition.py` with trio, sockets and threads around it.

Owns the order from the data folder to the client port: folder and journal, the start of the
composition, the client port, and at last, when clients are served, the admin port. It goes down in
the reverse order: leaderships are handed over, Metadata forgets this broker, requests in hand are
answered.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from random import Random
from typing import Any, Final, Protocol

import trio

from raftmq.config import ConfigError, NodeConfig
from raftmq.errors import ErrorCode
from raftmq.log.journal import HardStateJournal
from raftmq.logs import RateLimitedLog, structlog
from raftmq.metadata.broker_messages import NODE_ITSELF
from raftmq.metadata.engine import DrivenEngine
from raftmq.metadata.state_machine import UnappliableCommandError
from raftmq.node.composition import HANG_UP_S, NodeCore, Shutdown
from raftmq.node.environment import Environment, PeerEvents
from raftmq.node.first_user import FirstUser, first_call, make_first_user, read_first_user
from raftmq.node.status import Process, describe, health
from raftmq.principals import read_mapping_rules
from raftmq.runtime.audit_file import AuditFile
from raftmq.runtime.certificates import ServerTls, admin_files, files_of
from raftmq.runtime.clock import CoreWait, RealClock
from raftmq.runtime.data_folder import DataFolder
from raftmq.runtime.disk import RealDisk
from raftmq.runtime.faults import FaultSwitch, is_armed
from raftmq.runtime.loop import LoopBudget, TrioTasks, run_deadlines
from raftmq.runtime.peer_links import PeerLinks
from raftmq.runtime.peer_secret import peer_guard
from raftmq.runtime.peer_tls import PeerTls
from raftmq.runtime.threads import Flusher, NodeBatchOpening, NodeCatchUp, Workers
from raftmq.runtime.token_keys import TokenKeys
from raftmq.server.admin.access import Access
from raftmq.server.admin.connections import OpenConnections
from raftmq.server.audit import PEER_LISTENER, AuditOutcome, AuditRow, Who, outcome_of
from raftmq.server.kafka.dispatch import warm_up
from raftmq.server.kafka.limits import Limits, resolve_overrides
from raftmq.server.kafka.listener import ClientPort, Listening
from raftmq.views.conditions import prepare_parser

logger = structlog.get_logger("raftmq.node")

PEER_LINES_MAX: Final = 20
"""Most lines of one event in ten seconds: all peers of a large cluster may connect at once."""
RIVAL_POLL_S: Final = 0.25
RIVAL_PATIENCE_S: Final = 10.0
"""How long a start waits for another process of its node id to end: longer than a connection to a
host that lost power can seem open."""
CERTIFICATES_S: Final = 5.0
"""How often files of certificates are looked at."""
ADMIN_WAIT_S: Final = 1.0
"""How long after the node is ready its admin pages are imported, unless a request comes earlier."""


def _first(error: Exception) -> Exception:
    """One of the errors inside nested groups."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


class Watched(Protocol):
    """Files that are loaded anew when they change."""

    name: str

    def look(self, *, must_load: bool) -> Any: ...
    def take(self, loaded: Any) -> None: ...


class Node(NodeCore):
    """One node of a cluster, in this process.

    Attributes:
        failure: why it had to stop, None when it was asked to.
    """

    def __init__(
        self,
        config: NodeConfig,
        client_socks: Sequence[socket.socket],
        peer_sock: socket.socket,
        admin_sock: socket.socket,
    ) -> None:
        super().__init__(config)
        self._client_socks = tuple(client_socks)
        self._peer_sock = peer_sock
        self._admin_sock = admin_sock
        self.tls = {
            one.name: ServerTls(one.name, files_of(one))
            for one in config.client_listeners
            if one.has_tls
        }
        self.peer_tls = peer_guard(config)
        path = config.first_user_file
        self.access = Access(config)
        files = admin_files(config)
        self.admin_tls = None if files is None else ServerTls(self.access.name, files)
        self.admin_connections = OpenConnections()
        self._first_user = None if path is None else read_first_user(path)
        self.token_keys = TokenKeys(config) if config.takes_tokens else None
        self.audit_file = None if config.audit_file is None else AuditFile(config.audit_file)
        self._must_reload = trio.Event()
        self._stopping = trio.Event()
        self._is_warm = trio.Event()
        self.failure: str | None = None

    def reload(self) -> None:
        """Load certificates and keys anew, and open the audit file anew."""
        if self.audit_file is not None:
            self.audit_file.reopen()
        self._must_reload.set()

    def stop(self) -> None:
        """Ask the node to hand over and end."""
        self._stopping.set()

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Come up, serve, and go down when asked to or when the node cannot go on."""
        disk = RealDisk()
        disk.start_reaper()
        config = self.config
        folder = DataFolder.open(
            disk, config.data, cluster_id=config.cluster_id, node_id=self.node_id
        )
        folder.check_recovered()
        journal = HardStateJournal.open(
            disk, f"{folder.path}/state.journal", is_expected=not folder.is_new
        )
        if journal.mended:
            logger.warning("the journal of hard states was mended", records=journal.mended)
        if config.has_open_peer_port and not config.insecure:
            logger.warning("links between nodes are not protected", peer_tls=config.peer_tls)
        try:
            folder.take()
            self._compose_here(disk, folder, journal)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_when_failed, nursery.cancel_scope)
                nursery.start_soon(self._end_when_stopped, nursery.cancel_scope)
                nursery.start_soon(self._warm_up)
                nursery.start_soon(self._watch_rival)
                nursery.start_soon(self._watch_certificates)
                await nursery.start(self.links.run, self._peer_sock)
                nursery.start_soon(self.plane.tick_forever)
                await self.join()
                nursery.start_soon(self.live)
                await nursery.start(run_deadlines, self.deadlines, self.plane.clock)
                await self.until_ready()
                await nursery.start(self.port.serve, self._listening())
                self.is_serving = True
                logger.info("ready", client=str(config.client_address))
                on_ready()
                if self._first_user is not None:
                    nursery.start_soon(self._make_first_user, self._first_user)
                await self._serve_admin()
        except* UnappliableCommandError as group:
            self.plane.fail(str(_first(group)))  # reported once, whichever part met it first
        finally:
            self.failure = self.plane.failure if hasattr(self, "plane") else None
            self._close(journal, folder)

    async def _make_first_user(self, user: FirstUser) -> None:
        call = await trio.to_thread.run_sync(first_call, user)
        await make_first_user(
            call,
            lambda: self.engine.image,
            lambda call: self.tasks.wait(self.control.call(call, NODE_ITSELF)),
            trio.sleep,
            partial(self._tell_first_user, user.name),
        )

    def _tell_first_user(self, name: str, code: ErrorCode) -> None:
        row = AuditRow(f"user:{name}", "the first one", code.name)
        who = Who(None, "", "first_user_file")
        outcome = outcome_of({code.name})
        self.audit.administration(who, "AlterUserScramCredentials", outcome, [row])

    async def _watch_rival(self) -> None:
        """Log that another process has this node's id; end if that lasts before this one serves.

        A node that serves already goes on with the peers that know it: it may be the right one.
        """
        told, since_s = "", 0.0
        while True:
            await trio.sleep(RIVAL_POLL_S)
            reason = self.links.taken_reason
            if reason != told:
                told, since_s = reason, trio.current_time()
                if reason:
                    logger.error("the cluster refuses this node", reason=reason)
            elif (
                reason and not self.is_serving and trio.current_time() - since_s > RIVAL_PATIENCE_S
            ):
                self.plane.fail(reason)
                return

    # ---- coming up ----

    async def _warm_up(self) -> None:
        await trio.to_thread.run_sync(warm_up)
        self._is_warm.set()

    async def prepared(self) -> None:
        """Wait for the thread that compiles codecs. While it holds the interpreter each turn of
        the loop takes several times as long, and a node that serves may become leader at once."""
        await self._is_warm.wait()

    def _compose_here(self, disk: RealDisk, folder: DataFolder, journal: HardStateJournal) -> None:
        random = Random()
        self.core_wait = CoreWait()
        flusher = Flusher(self.config.flusher_threads)
        budget = LoopBudget()

        def connect(peer_events: PeerEvents) -> PeerLinks:
            self.links = PeerLinks(
                cluster_id=self.config.cluster_id,
                node_id=self.node_id,
                storage_id=folder.storage_id,
                process_id=f"{random.getrandbits(64):016x}",
                address=self.config.peer_address,
                queue_bytes_max=self.config.peer_queue_bytes_max,
                on_frame=peer_events.frame_received,
                on_identity=peer_events.peer_introduced,
                on_lost=peer_events.peer_lost,
                random=random,
                budget=budget,
                memory_bytes_max=self.config.peer_memory_bytes_max,
                on_broken_invariant=peer_events.fail,
                on_stranger=self._tell_stranger,
                log=RateLimitedLog(structlog.get_logger("raftmq.peers"), lines_max=PEER_LINES_MAX),
                tls=self.peer_tls,
            )
            return self.links

        def disk_space() -> tuple[int, int]:
            space = os.statvfs(folder.path)
            return space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail

        clock = RealClock()
        environment = Environment(
            disk=disk,
            folder=folder,
            clock=clock,
            random=random,
            tasks=TrioTasks(),
            flusher=flusher,
            workers=Workers(),
            connect=connect,
            make_catch_up=lambda _links, rate: NodeCatchUp(self.links, rate),
            batch_openers=NodeBatchOpening(clock),
            disk_space=disk_space,
            make_lock=threading.Lock,
            core_times=self.core_wait.times,
            core_stolen_ms=self.core_wait.stolen_ms,
            audit_sink=self.audit_file,
        )
        self.compose(environment, journal)
        flusher.around = self.plane.multiraft.batch
        self.faults = FaultSwitch(self.links, flusher) if self._may_break() else None
        self.port = ClientPort(
            self.dispatcher.begin,
            self._limits(),
            self.broker.metrics,
            drains=self.plane.multiraft,
            memory=self.request_memory,
            budget=budget,
            pause=self.plane.pause,
            authenticators=self.authenticators,
            audit=self.audit,
        )

    def _tell_stranger(self, where: str, mechanism: str, why: str) -> None:
        who = Who(None, where.rpartition(":")[0], PEER_LISTENER)
        self.audit.authentication(who, mechanism, AuditOutcome.FAILED, why=why)

    def _may_break(self) -> bool:
        """True when faults can be switched on at the admin port."""
        if not is_armed(os.environ):
            return False
        if self.config.admin_listener.is_loopback or self.access.is_guarded:
            return True
        logger.error("faults are refused: the admin port is not on the loopback and has no token")
        return False

    def _make_engine(self) -> DrivenEngine:
        plane = self.plane
        if self.config.metadata_engine == "pysyncobj":
            try:
                from raftmq.runtime.reference_engine import open_reference_engine  # an extra
            except ModuleNotFoundError as error:
                raise ConfigError(
                    f"key 'metadata_engine': pysyncobj is not installed ({error}); "
                    "`pip install 'raftmq[reference]'`"
                ) from error
            path = f"{plane.folder.path}/reference"
            plane.disk.make_directories(path)
            return open_reference_engine(self.config, plane.clock, path, plane.fail)
        return super()._make_engine()

    def _limits(self) -> Limits:
        config = self.config
        return Limits(
            request_bytes_max=config.request_bytes_max,
            request_control_bytes_max=config.request_control_bytes_max,
            request_elements_max=config.request_elements_max,
            request_memory_bytes_max=config.request_memory_bytes_max,
            connections_max=config.connections_max,
            connections_per_ip_max=config.connections_per_ip_max,
            connections_per_ip_overrides=resolve_overrides(config.connections_per_ip_overrides),
            descriptors_reserved=config.descriptors_reserved,
            connection_creation_rate_max=config.connection_creation_rate_max,
            pipeline_depth_max=config.pipeline_depth_max,
            pipeline_bytes_max=config.pipeline_bytes_max,
            request_receive_timeout_ms=config.request_receive_timeout_ms,
            request_receive_bytes_per_s_min=config.request_receive_bytes_per_s_min,
            connection_idle_ms=config.connection_idle_ms,
            socket_send_bytes=config.socket_send_bytes,
        )

    def _listening(self) -> list[Listening]:
        listeners = self.config.client_listeners
        return [
            Listening(
                sock,
                listener.name,
                self.tls.get(listener.name),
                read_mapping_rules(listener.principal_mapping_rules),
            )
            for sock, listener in zip(self._client_socks, listeners, strict=True)
        ]

    async def _watch_certificates(self) -> None:
        """Load them when they change, or when asked to; connections that are open stay, but those
        whose certificates were revoked."""
        watched: list[Watched] = [*self.tls.values()]
        watched += [one for one in (self.peer_tls, self.admin_tls) if one is not None]
        if self.token_keys is not None:
            watched.append(self.token_keys)
        if self.access.tokens is not None:
            watched.append(self.access.tokens)
        while watched:
            with trio.move_on_after(CERTIFICATES_S):
                await self._must_reload.wait()
            is_asked = self._must_reload.is_set()
            self._must_reload = trio.Event()
            for files in watched:
                try:
                    loaded = await trio.to_thread.run_sync(partial(files.look, must_load=is_asked))
                except ConfigError as error:
                    logger.error("certificates cannot be loaded, the old ones stay", why=str(error))
                    continue
                if loaded is not None:
                    files.take(loaded)
                    logger.info("certificates loaded", listener=files.name)
                    self._end_revoked(files)

    def _end_revoked(self, files: Watched) -> None:
        """Hang up on whoever came by a certificate that is good no more."""
        if not isinstance(files, ServerTls):
            return
        if isinstance(files, PeerTls):
            ended = self.links.end_revoked(files.revoked)
        elif files is self.admin_tls:
            ended = self.admin_connections.end_revoked(files.revoked)
        else:
            ended = self.port.end_revoked(files.name, files.revoked)
        if ended:
            logger.warning("revoked certificates: connections ended", listener=files.name, n=ended)

    async def _serve_admin(self) -> None:
        # Not before the node is ready, and in a thread, so that heartbeats go on: the import is
        # slow. It slows down the loop, too, so it waits a little, for the sake of the first
        # clients, unless a request for these pages is there already.
        with trio.move_on_after(ADMIN_WAIT_S):
            await trio.lowlevel.wait_readable(self._admin_sock)
        admin_http = await trio.to_thread.run_sync(import_module, "raftmq.server.admin.http")
        exposition = await trio.to_thread.run_sync(import_module, "raftmq.node.metrics.exposition")
        # As slow, and else done when somebody creates the first view, at the controller.
        await trio.to_thread.run_sync(prepare_parser)
        sources = admin_http.PageSources(
            health=lambda: health(self, self.links),
            status=lambda: describe(self, Process(self.links, self.faults)),
            metrics=exposition.Exposition(self).render,
            faults=self.faults,
            access=self.access,
            tls=self.admin_tls,
            connections=self.admin_connections,
            refuse=self.broker.metrics.refuse,
            audit=self.audit,
            authorizer=self.broker.authorizer,
            denied=self.broker.metrics.deny,
            nodes=admin_http.NodesPage(self.control),
            leaders=admin_http.LeadersPage(self.control),
            balance=admin_http.BalancePage(self.control),
            topics=admin_http.TopicsPage(
                self.control,
                self.broker.retired_writers.of,
                self.partitions.delays.rows,
                self.partitions.views.rows,
            ),
        )
        await admin_http.serve_admin(self._admin_sock, sources, self.broker.metrics.admin_bug)

    # ---- going down ----

    async def _end_when_failed(self, scope: trio.CancelScope) -> None:
        await self.tasks.wait(self.plane.failed)
        scope.cancel()

    async def _end_when_stopped(self, scope: trio.CancelScope) -> None:
        await self._stopping.wait()
        if self.is_serving:
            began = trio.current_time()
            await Shutdown(self).run()
            with trio.move_on_after(HANG_UP_S):
                await self.port.drain(self.partitions.answer_fetches)
            logger.info("handed over", took_ms=round((trio.current_time() - began) * 1e3))
        scope.cancel()

    def _close(self, journal: HardStateJournal, folder: DataFolder) -> None:
        self.is_serving = False
        if hasattr(self, "port"):  # else composing failed, and nothing of it runs
            self.port.hang_up_all()
            self.engine.close()
            self.plane.close()
            self.core_wait.close()
            for replica in self.plane.multiraft.replicas.values():
                replica.log.close()
        if self.audit_file is not None and (left := self.audit_file.close()):
            logger.error("the last lines of the audit file were lost", bytes=left)
        journal.close()
        folder.close()
