"""The same protection for both engines: TLS and SCRAM-SHA-512 for clients, rules, and between nodes
TLS with certificates of both sides.

raftmq gets it from `raftmq dev --secure`, Kafka from what is written here, with certificates of the
same kind (P-256, signed by a CA for a day). Load comes in as a user whose rights come from rules; a
super user makes topics and rules.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

from attrs import frozen
from confluent_kafka import KafkaException
from confluent_kafka.admin import AclBinding, AclBindingFilter, AdminClient
from confluent_kafka.admin._acl import AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from benchmarks.clients import admin
from benchmarks.errors import BenchmarkError
from benchmarks.targets import Target
from raftmq.cli.dev_cluster import user_rules
from raftmq.rights import KIND_CODES, OPERATION_CODES, PATTERN_CODES, PERMISSION_CODES, Rule
from raftmq.runtime.throw_away import ADMIN, MECHANISM, USER, ThrowAwaySecurity

LIMIT_S: Final = 60.0
_AGAIN_S: Final = 0.2
RULES_PER_REQUEST: Final = 1_000
"""As many as one request of raftmq's may have; also of filters."""

FILTERS_PER_REQUEST: Final = 20
USER_PRINCIPAL: Final = f"User:{USER}"
T = TypeVar("T", AclBinding, AclBindingFilter)

KAFKA_LISTENERS: Final = """\
listeners=CLIENTS://127.0.0.1:{port},PEERS://127.0.0.1:{peer_port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=CLIENTS://127.0.0.1:{port},PEERS://127.0.0.1:{peer_port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CLIENTS:SASL_SSL,PEERS:SSL,CONTROLLER:SSL
inter.broker.listener.name=PEERS
sasl.enabled.mechanisms=SCRAM-SHA-512
listener.name.clients.scram-sha-512.sasl.jaas.config=\
org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.peers.ssl.client.auth=required
listener.name.controller.ssl.client.auth=required
ssl.keystore.type=PEM
ssl.keystore.location={pair}
ssl.truststore.type=PEM
ssl.truststore.location={ca}
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users={super_users}
"""
"""In place of the plain listeners."""


@frozen
class KafkaSecurity:
    """What the nodes of one Kafka cluster show, and who may come."""

    made: ThrowAwaySecurity
    nodes: range

    @classmethod
    def make(cls, folder: Path, nodes: range) -> KafkaSecurity:
        """Sign certificates and draw passwords.

        Raises:
            RaftmqError: they cannot be made.
        """
        return cls(ThrowAwaySecurity.make(folder, "scram", nodes), nodes)

    def listeners(self, node: int, port: int, peer_port: int, controller_port: int) -> str:
        """The lines of a node's properties."""
        names = [ADMIN, *(f"CN=node-{number}" for number in self.nodes)]
        folder = self.made.folder
        pair = folder / f"kafka-{node}.pem"
        pair.touch(mode=0o600)
        key, chain = ((folder / f"node-{node}.{end}").read_text() for end in ("key", "pem"))
        pair.write_text(key + chain)
        return KAFKA_LISTENERS.format(
            port=port,
            peer_port=peer_port,
            controller_port=controller_port,
            pair=pair,
            ca=self.made.ca_file,
            super_users=";".join(f"User:{name}" for name in names),
        )

    @property
    def users(self) -> list[str]:
        """Words for the command that formats a folder: who there is from the beginning."""
        words: list[str] = []
        for user in self.made.users:
            words += [
                "--add-scram",
                f"{MECHANISM}=[name={user},password={self.made.password(user)}]",
            ]
        return words


def let_in(target: Target, made: ThrowAwaySecurity) -> None:
    """Say how clients of a target come in: load as the user, what administrates as the admin."""
    target.client, target.operator = (
        {
            "security.protocol": made.protocol,
            "ssl.ca.location": str(made.ca_file),
            "sasl.mechanism": MECHANISM,
            "sasl.username": user,
            "sasl.password": made.password(user),
        }
        for user in (USER, ADMIN)
    )


def _as_client(kind: type[T], rule: Rule) -> T:
    """A rule as the client library says it: a rule, or the filter that means it alone."""
    return kind(
        ResourceType(KIND_CODES[rule.kind]),
        rule.name,
        ResourcePatternType(PATTERN_CODES[rule.pattern]),
        rule.principal,
        rule.host,
        AclOperation(OPERATION_CODES[rule.operation]),
        AclPermissionType(PERMISSION_CODES[rule.permission]),
    )


def create_rules(client: AdminClient, rules: Sequence[Rule]) -> list[float]:
    """Create rules, a thousand in a request; the seconds of each request.

    Raises:
        BenchmarkError: one was refused.
    """
    times = []
    for first in range(0, len(rules), RULES_PER_REQUEST):
        some = [_as_client(AclBinding, one) for one in rules[first : first + RULES_PER_REQUEST]]
        started = time.perf_counter()
        _settle("creating rules", client.create_acls(some))
        times.append(time.perf_counter() - started)
    return times


def delete_rules_of(client: AdminClient, principals: Sequence[str], host: str) -> None:
    """Delete the rules of these principals from a host, a few principals in a request.

    Raises:
        BenchmarkError: one was refused.
    """
    for first in range(0, len(principals), FILTERS_PER_REQUEST):
        filters = [
            AclBindingFilter(
                ResourceType.ANY,
                None,
                ResourcePatternType.ANY,
                principal,
                host,
                AclOperation.ANY,
                AclPermissionType.ANY,
            )
            for principal in principals[first : first + FILTERS_PER_REQUEST]
        ]
        _settle("deleting rules", client.delete_acls(filters))


def _settle(what: str, answers: Mapping[Any, Future[Any]]) -> None:
    try:
        for future in answers.values():
            future.result(LIMIT_S)
    except KafkaException as error:
        raise BenchmarkError(f"{what}: {error}") from error


def admit_user(target: Target) -> None:
    """Give the user under load the rules of `raftmq dev --secure`, as soon as the cluster takes
    them.

    Raises:
        BenchmarkError: it does not in time.
    """
    deadline = time.monotonic() + LIMIT_S
    client = admin(target)
    while True:
        try:
            create_rules(client, user_rules(USER_PRINCIPAL))
            return
        except BenchmarkError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN_S)
