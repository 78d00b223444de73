"""Checks of a node's configuration before strangers can reach the node.

They are the list "Before production" of `docs/security.md`, as far as a file and the file system
can tell. Nothing is decided here: `raftmq start` starts with any configuration that can be used.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from time import time
from typing import Final

from attrs import frozen

from raftmq.config import (
    BY_RULES,
    PEER_TLS_OFF,
    PEER_TLS_REQUIRED,
    Address,
    ClientListener,
    ConfigError,
    NodeConfig,
)
from raftmq.runtime.certificates import Certificates, admin_files, files_of, load
from raftmq.runtime.faults import VARIABLE
from raftmq.runtime.peer_secret import read_secrets
from raftmq.runtime.peer_tls import load_peer_files, peer_files
from raftmq.server.admin.access import Access
from raftmq.server.kafka.authentication import ANONYMOUS

SOON_S: Final = 30 * 86_400.0
"""A certificate that ends within that is told of."""
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class Verdict(StrEnum):
    """What a check came to. What this command cannot see is `look`: somebody has to."""

    OK = "ok"
    LOOK = "look"
    OPEN = "open"


@frozen
class Finding:
    """One check."""

    subject: str
    verdict: Verdict
    why: str


def review(config: NodeConfig, environment: Mapping[str, str]) -> list[Finding]:
    """All checks of a configuration, in the order of the list."""
    found = [_judge_listener(config, listener) for listener in config.client_listeners]
    found += _judge_rights(config)
    found += _judge_peers(config)
    found.append(_judge_admin(config))
    if (admin := admin_files(config)) is not None:
        found.append(_judge_certificate("admin_listener", partial(load, admin)))
    for listener in config.listeners:
        if listener.has_tls:
            found.append(_judge_certificate(listener.name, partial(load, files_of(listener))))
    found += _judge_files(config)
    found.append(_judge_audit(config.audit_file))
    if environment.get(VARIABLE):
        found.append(Finding(VARIABLE, Verdict.OPEN, "whoever reaches it switches faults on"))
    return found


def _judge_listener(config: NodeConfig, listener: ClientListener) -> Finding:
    name = f"listener {listener.name}"
    if listener.address.is_loopback:
        return Finding(name, Verdict.OK, f"{listener.address} is the loopback")
    if not listener.has_tls:
        return Finding(name, Verdict.OPEN, f"{listener.protocol} is not encrypted: SASL_SSL, SSL")
    if _knows_clients(listener):
        how = "SASL" if listener.has_sasl else "certificates"
        return Finding(name, Verdict.OK, f"TLS, and clients say by {how} who they are")
    return Finding(
        name, Verdict.OPEN, 'anybody comes in: SASL_SSL, or client_certificates="required"'
    )


def _knows_clients(listener: ClientListener) -> bool:
    return listener.has_sasl or listener.client_certificates == "required"


def _judge_rights(config: NodeConfig) -> Iterator[Finding]:
    if config.authorizer == BY_RULES:
        yield Finding("authorizer", Verdict.OK, "rules decide; the same on all nodes?")
    else:
        yield Finding("authorizer", Verdict.OPEN, 'everybody may do everything: authorizer="acl"')
    if ANONYMOUS not in config.super_users:
        return
    strange = [
        listener.name
        for listener in config.client_listeners
        if not (listener.address.is_loopback or _knows_clients(listener))
    ]
    if strange:
        why = f"{ANONYMOUS} is everybody at {', '.join(strange)}"
        yield Finding("super_users", Verdict.OPEN, why)
    else:
        why = f"{ANONYMOUS} is whoever comes by the loopback: take it away once a user can log in"
        yield Finding("super_users", Verdict.LOOK, why)


def _judge_peers(config: NodeConfig) -> Iterator[Finding]:
    name = "peer_listener"
    if config.peer_tls == PEER_TLS_REQUIRED:
        how = "show certificates; a CA of their own?"
        if config.cluster_secret_file is not None:
            how = "prove the cluster's secret; whoever reads it on any of them is any node"
        yield Finding(name, Verdict.OK, f"TLS, and nodes {how}")
    elif config.peer_tls == PEER_TLS_OFF:
        yield _judge_private(name, config.peer_listener)
    elif config.peer_listener.is_loopback:
        yield Finding(name, Verdict.OK, f"{config.peer_listener} is the loopback")
    else:
        yield Finding(name, Verdict.OPEN, 'nodes may speak plain: peer_tls="required" at last')
    if config.peer_tls == PEER_TLS_OFF:
        return
    if config.cluster_secret_file is not None:
        yield _judge_secrets(config.cluster_secret_file)
    else:
        load_files = partial(load_peer_files, peer_files(config), config.node_id)
        yield _judge_certificate(name, load_files)


def _judge_secrets(path: Path) -> Finding:
    name = "secret of peer_listener"
    try:
        count = len(read_secrets(path).texts)
    except ConfigError as error:
        return Finding(name, Verdict.OPEN, str(error))
    if count > 1:
        return Finding(name, Verdict.LOOK, f"{count} are accepted: is one of them being replaced?")
    return Finding(name, Verdict.OK, f"{path} has one, of 32 bytes or more; are they random?")


def _judge_admin(config: NodeConfig) -> Finding:
    name, address = "admin_listener", config.admin_listener
    if config.admin_token_file is not None:
        try:
            Access(config)
        except ConfigError as error:
            return Finding(name, Verdict.OPEN, str(error))
        if config.admin_certificate_file is not None:
            return Finding(name, Verdict.OK, "TLS, and what changes something wants a token")
        if address.is_loopback:
            return Finding(name, Verdict.OK, f"{address} is the loopback, and wants a token")
        why = f"{address} wants a token, which is not encrypted: only operators may reach it"
        return Finding(name, Verdict.LOOK, why)
    if config.admin_client_ca_file is not None:
        return Finding(name, Verdict.OK, "TLS, and what changes something wants a certificate")
    if not address.is_loopback and config.insecure:
        return Finding(name, Verdict.OPEN, "insecure: anybody changes things: admin_token_file")
    return _judge_private(name, address)


def _judge_private(key: str, address: Address) -> Finding:
    """Nothing protects these ports but the network that they are in."""
    if address.is_loopback:
        return Finding(key, Verdict.OK, f"{address} is the loopback")
    host = _number_of(address)
    if host is not None and host.is_unspecified:
        why = f"{address} is every address: name one of the nodes' network"
        return Finding(key, Verdict.OPEN, why)
    if host is not None and host.is_global:
        return Finding(key, Verdict.OPEN, f"{address} is an address of the Internet")
    return Finding(key, Verdict.LOOK, f"{address}: only nodes and operators may reach it")


def _number_of(address: Address) -> IPv4Address | IPv6Address | None:
    """None for a host that is named."""
    try:
        return ip_address(address.host)
    except ValueError:
        return None


def _judge_certificate(port: str, load_files: Callable[[], Certificates]) -> Finding:
    name = f"certificate of {port}"
    try:
        left_s = load_files().expires_s - time()
    except ConfigError as error:
        return Finding(name, Verdict.OPEN, str(error))
    days = int(left_s // 86_400)
    if left_s < 0:
        return Finding(name, Verdict.OPEN, f"it ended {-days} days ago")
    if left_s < SOON_S:
        return Finding(name, Verdict.LOOK, f"it ends in {days} days")
    return Finding(name, Verdict.OK, f"it ends in {days} days; is there an alert for its end?")


def _judge_files(config: NodeConfig) -> Iterator[Finding]:
    """Secrets, and the data folder, are for the node's own user."""
    secret: dict[Path, str] = {}
    for listener in config.listeners:
        for key in ("key_file", "key_password_file"):
            if (path := getattr(listener, key)) is not None:
                secret.setdefault(path, f"{key} of {listener.name}")
    if config.peer_tls != PEER_TLS_OFF:
        for key in ("peer_key_file", "peer_key_password_file"):
            if (path := getattr(config, key)) is not None:
                secret.setdefault(path, key)
    if config.cluster_secret_file is not None:
        secret.setdefault(config.cluster_secret_file, "cluster_secret_file")
    if config.admin_key_file is not None:
        secret.setdefault(config.admin_key_file, "admin_key_file")
    if config.admin_token_file is not None:
        secret.setdefault(config.admin_token_file, "admin_token_file")
    if config.first_user_file is not None:
        secret.setdefault(config.first_user_file, "first_user_file")
    for path, name in secret.items():
        yield _judge_modes(name, path, is_needed=name != "first_user_file")
    yield _judge_modes("data", config.data, is_needed=False)


def _judge_audit(path: Path | None) -> Finding:
    """Where the audit goes: a file of the node's user alone, in a folder that takes one."""
    name = "audit_file"
    if path is None:
        return Finding(name, Verdict.LOOK, "none: nobody can tell afterwards who did what")
    folder = path.parent
    if not folder.is_dir():
        return Finding(name, Verdict.OPEN, f"there is no folder {folder}")
    if path.exists() and not path.is_file():
        return Finding(name, Verdict.OPEN, f"{path} is no file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        return Finding(name, Verdict.OPEN, f"{path} cannot be written by this user")
    if folder.stat().st_mode & stat.S_IWOTH and not folder.stat().st_mode & stat.S_ISVTX:
        return Finding(name, Verdict.OPEN, f"anybody may replace files of {folder}: chmod o-w")
    return _judge_modes(name, path, is_needed=False)


def _judge_modes(name: str, path: Path, *, is_needed: bool) -> Finding:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        verdict = Verdict.OPEN if is_needed else Verdict.OK
        return Finding(name, verdict, f"{path} is not there{'' if is_needed else ' (yet)'}")
    except OSError as error:
        return Finding(name, Verdict.LOOK, f"{path}: {error.strerror}")
    if mode & _OTHERS:
        return Finding(name, Verdict.OPEN, f"{path} is open to other users: chmod go-rwx")
    return Finding(name, Verdict.OK, f"{path} is for its user alone")
