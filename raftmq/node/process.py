"""The process around a node: listeners, logs, signals, exit status.

Statuses: 0 ended as asked, 1 the node had to stop, 2 its configuration or data folder cannot be
used, 4 its cluster or data is ahead of this version: only a newer one can go on.
"""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Final

import attrs
import trio
from attrs import frozen

from raftmq.config import PEER_TLS_OFF, ConfigError, NodeConfig
from raftmq.errors import AheadError, KafkaError
from raftmq.logs import configure_logs, structlog
from raftmq.metadata.configs import check_static_configs
from raftmq.metadata.state_machine import AHEAD
from raftmq.node.loop_watch import watch_collections
from raftmq.node.node import Node
from raftmq.ports import DiskError
from raftmq.runtime.data_folder import DataFolderError
from raftmq.server.kafka.listener import open_listen_socket

OK, FAILED, UNUSABLE, BEHIND = 0, 1, 2, 4
"""Exit statuses."""
DESCRIPTORS_AT_START: Final = 4096
"""So many descriptors get their place in the kernel's table at the start: 32 KiB."""
SWITCH_INTERVAL_S: Final = 0.0005
"""A flusher thread that holds the interpreter longer delays every heartbeat."""
GC_THRESHOLDS: Final = 2_000, 3, 5_000
"""Requests leave no cycles behind; looking for some every 700 objects costs a tenth of the time.
The first two bound how many objects a collection of the middle generation looks at (8,000): the
loop stands still meanwhile, for longer where it has to share a core."""
OTHER_DESCRIPTORS: Final = 1_000
"""Peers, the admin port, the journal, threads."""
FILES_PER_REPLICA: Final = 2
"""The segment that is appended to, and the bare entries beside it."""
REPLICAS_MAX: Final = 20_000
"""At most, also where the limit of descriptors has room for more."""

logger = structlog.get_logger("raftmq.node")


@frozen(slots=True)
class Listeners:
    """The bound sockets of a node; a parent may bind them before it forks."""

    peer: socket.socket
    admin: socket.socket
    clients: tuple[socket.socket, ...]
    """In the order of `NodeConfig.client_listeners`."""

    def close(self) -> None:
        """Close all of them."""
        for sock in (self.peer, self.admin, *self.clients):
            sock.close()


class ListenError(Exception):
    """An address cannot be bound; the message names its key."""


def open_listeners(config: NodeConfig) -> Listeners:
    """Bind what the configuration names.

    Raises:
        ListenError: an address is taken, or is not of this machine.
    """
    opened: list[socket.socket] = []
    wanted = [("peer_listener", config.peer_listener), ("admin_listener", config.admin_listener)]
    for listener in config.client_listeners:
        is_table = listener in config.listeners
        key = f"listeners.{listener.name}" if is_table else "client_listener"
        wanted.append((key, listener.address))
    for key, address in wanted:
        try:
            opened.append(open_listen_socket(address.host, address.port))
        except OSError as error:
            for sock in opened:
                sock.close()
            raise ListenError(f"{key}: cannot listen on {address}: {error.strerror}") from error
    return Listeners(opened[0], opened[1], tuple(opened[2:]))


def run_node(
    config: NodeConfig, *, listeners: Listeners | None, on_ready: Callable[[], None]
) -> int:
    """Run a node until SIGTERM or SIGINT; returns the exit status.

    Args:
        config: of this node.
        listeners: sockets that are bound already; None: bind what the configuration names.
        on_ready: called once clients are served.
    """
    if not __debug__:
        print("raftmq relies on its assertions: run python without -O", file=sys.stderr)  # noqa: T201
        return UNUSABLE
    configure_logs(
        log_format=config.log_format,
        level=config.log_level,
        cluster_id=config.cluster_id,
        node_id=config.node_id,
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
    watch_collections()
    try:
        check_static_configs(config.defaults)
    except KafkaError as error:
        logger.error("cannot start", reason=f"key 'defaults': {error.message}")
        return UNUSABLE
    limit = raise_descriptor_limit(config)
    grow_descriptor_table(limit)
    if not config.replicas_max:
        config = attrs.evolve(config, replicas_max=replicas_room(config, limit))
    try:
        opened = listeners or open_listeners(config)
    except ListenError as error:
        logger.error("cannot start", reason=str(error))
        return UNUSABLE
    try:
        return trio.run(_run, config, opened, on_ready)
    except (ConfigError, DataFolderError, DiskError, AheadError, ExceptionGroup) as error:
        cause = _only(error)
        if isinstance(cause, AheadError):
            logger.error("cannot start", reason=f"{AHEAD}: {cause}")
            return BEHIND
        if isinstance(cause, ConfigError | DataFolderError):
            logger.error("cannot start", reason=str(cause))
            return UNUSABLE
        if isinstance(cause, DiskError):
            logger.error("the disk failed", reason=str(cause))
            return FAILED
        raise
    finally:
        opened.close()


def raise_descriptor_limit(config: NodeConfig) -> int:
    """Raise the limit of descriptors as far as needed and allowed; warn when that is too little."""
    needed = config.connections_max + config.open_files_max + OTHER_DESCRIPTORS
    needed += FILES_PER_REPLICA * config.replicas_max
    wanted = needed if config.replicas_max else needed + FILES_PER_REPLICA * REPLICAS_MAX
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < needed:
        logger.warning(
            "descriptors may run out",
            limit=limit,
            wanted=needed,
            hint="raise the hard limit (ulimit -Hn), or lower connections_max, open_files_max or "
            "replicas_max",
        )
    return limit


def replicas_room(config: NodeConfig, limit: int) -> int:
    """How many replicas the limit of descriptors allows, beside clients, cached files and all else.
    Where the limit is low each of the three keeps a share of it: a node that is full of replicas
    still has to serve clients, and to open files in order to delete them."""
    others = min(OTHER_DESCRIPTORS, limit // 4)
    clients = min(config.connections_max, limit // 4)
    cached = min(config.open_files_max, limit // 8)
    return max(1, min(REPLICAS_MAX, (limit - others - clients - cached) // FILES_PER_REPLICA))


def grow_descriptor_table(limit: int) -> None:
    """Let the kernel make room for some thousand descriptors now, while there is one thread.

    Later, in a process with threads, each doubling waits for all cores to have passed through the
    kernel: 12 to 18 ms were seen, on the event loop, within `accept` and `open`.
    """
    least = min(limit, DESCRIPTORS_AT_START) - 1
    descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.close(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least))
    finally:
        os.close(descriptor)


async def _run(config: NodeConfig, listeners: Listeners, on_ready: Callable[[], None]) -> int:
    wanted = [signal.SIGTERM, signal.SIGINT]
    has_files = config.peer_tls != PEER_TLS_OFF or bool(
        config.admin_token_file
        or config.admin_certificate_file
        or config.audit_file
        or config.takes_tokens
    )
    if has_files or any(listener.has_tls for listener in config.client_listeners):
        wanted.append(signal.SIGHUP)  # else there is nothing to load anew, and it ends the process
    with trio.open_signal_receiver(*wanted) as signals:
        async with trio.open_nursery() as nursery:
            node = Node(config, listeners.clients, listeners.peer, listeners.admin)

            async def watch_signals() -> None:
                async for number in signals:
                    if number == signal.SIGHUP:
                        node.reload()
                        continue
                    logger.info("stopping", signal=signal.Signals(number).name)
                    node.stop()

            nursery.start_soon(watch_signals)

            def ready() -> None:
                # What lives now lives as long as the node: no collection need look at it again.
                gc.collect()
                gc.freeze()
                on_ready()

            await node.run(ready)
            nursery.cancel_scope.cancel()
    if node.failure is None:
        return OK
    return BEHIND if node.is_behind else FAILED


def _only(error: Exception) -> Exception:
    """The one error inside nested groups of one."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
