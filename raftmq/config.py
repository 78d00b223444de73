"""One node's configuration: a TOML file, overridden by `RAFTMQ_*` variables, then by flags.

Every key is a field of `NodeConfig` and carries its own documentation, which is shown in
`docs/operations.md` and by `raftmq config check`. Unknown keys are refused by name, with the
nearest known one; nothing is ever guessed. This module reads no files, only the text it is given.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import attrs
from attrs import field, frozen

from raftmq.listeners import (
    CLIENT_CERTIFICATES,
    PLAINTEXT,
    PROTOCOLS,
    SERVED_PROTOCOLS,
    Address,
    ClientListener,
    ConfigError,
    check_listener,
    read_listener,
)

__all__ = [
    "CLIENT_CERTIFICATES",
    "PLAINTEXT",
    "PROTOCOLS",
    "SERVED_PROTOCOLS",
    "Address",
    "ClientListener",
    "ConfigError",
    "NodeConfig",
    "PeerAddress",
    "connections_per_ip",
    "documented_keys",
    "load_config",
]

ENVIRONMENT_PREFIX: Final = "RAFTMQ_"
METADATA_ENGINES: Final = ("raft", "pysyncobj")
PEER_TLS_OFF: Final = "off"
PEER_TLS_ACCEPT: Final = "accept"
PEER_TLS_REQUIRED: Final = "required"
PEER_TLS: Final = (PEER_TLS_OFF, PEER_TLS_ACCEPT, PEER_TLS_REQUIRED)
"""Whether nodes speak TLS with each other."""
AUTHORIZERS: Final = ("off", "acl")
BY_RULES: Final = "acl"
"""The authorizer that goes by the rules in the metadata."""
LOG_FORMATS: Final = ("console", "json")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_EVERY_ADDRESS: Final = ("0.0.0.0", "::")
SASL_PLAIN: Final = "PLAIN"
SASL_OAUTHBEARER: Final = "OAUTHBEARER"
SASL_MECHANISMS: Final = (SASL_PLAIN, "SCRAM-SHA-256", "SCRAM-SHA-512", SASL_OAUTHBEARER)
"""By which clients can authenticate."""
OAUTH_ALGORITHMS: Final = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
"""By which tokens can be signed: with a key of two halves, all of them."""

NOT_NODE_VARIABLES: Final = frozenset(
    {"RAFTMQ_BOOTSTRAP", "RAFTMQ_FAULTS", "RAFTMQ_CONFIG", "RAFTMQ_SEED", "RAFTMQ_REWRITE"}
    | {"RAFTMQ_ADMIN", "RAFTMQ_ADMIN_TOKEN", "RAFTMQ_ADMIN_CA_FILE", "RAFTMQ_SECURITY"}
    | {"RAFTMQ_ADMIN_CLIENT_CERTIFICATE_FILE", "RAFTMQ_ADMIN_CLIENT_KEY_FILE"}
    | {"RAFTMQ_RAFT_SEEDS", "RAFTMQ_RAFT_STEPS"}
)
"""Variables of that prefix which are for other commands, or for the tests."""


@frozen(slots=True)
class PeerAddress:
    """A first voter of the metadata group, as every node's `peers` must name it."""

    id: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.id}@{self.host}:{self.port}"


def _key(doc: str, **kwargs: Any) -> Any:
    return field(metadata={"doc": doc}, **kwargs)


@frozen(slots=True, kw_only=True)
class NodeConfig:
    """All keys of a node."""

    node_id: int = _key("This broker's number, unique in the cluster, from 0.")
    cluster_id: str = _key(
        "Name of the cluster; nodes of another one are refused. Kafka clients see it.",
        default="raftmq",
    )
    rack: str | None = _key(
        "Failure domain of this node; replicas of a partition are spread over racks.", default=None
    )
    data: Path = _key("Folder of this node's data; made when absent.", converter=Path)
    client_listener: Address | None = _key(
        "Where Kafka clients connect: the listener PLAINTEXT. Beside `listeners` there is none "
        "unless this key is set.",
        default=Address("127.0.0.1", 9092),
    )
    listeners: tuple[ClientListener, ...] = _key(
        "Other ports for Kafka clients, a table `[listeners.NAME]` each: address, advertised, "
        "protocol (PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL), and where it is encrypted "
        "certificate_file, key_file, key_password_file, client_certificates (off, wanted, "
        "required), client_ca_file, client_crl_file and principal_mapping_rules "
        "(ssl.principal.mapping.rules).",
        factory=tuple,
    )
    sasl_mechanisms: str = _key(
        "How clients of listeners with SASL may authenticate (sasl.enabled.mechanisms): some of "
        "SCRAM-SHA-512, SCRAM-SHA-256, PLAIN and OAUTHBEARER, with commas between.",
        default="SCRAM-SHA-512,SCRAM-SHA-256",
    )
    sasl_plain_without_tls: bool = _key(
        "Offer PLAIN, which says the password itself, and OAUTHBEARER, which says the token, also "
        "where nothing is encrypted.",
        default=False,
    )
    sasl_session_ms_max: int = _key(
        "A client has to authenticate again after so long (connections.max.reauth.ms); 0: never.",
        default=0,
    )
    oauth_jwks_url: str | None = _key(
        "OAUTHBEARER: where the issuer shows its public keys (sasl.oauthbearer.jwks.endpoint.url), "
        "by https; by http on the loopback alone, or with `insecure`.",
        default=None,
    )
    oauth_jwks_file: Path | None = _key(
        "OAUTHBEARER: or a file with these keys, a JWK set.", default=None
    )
    oauth_jwks_ca_file: Path | None = _key(
        "OAUTHBEARER: PEM, the CAs that oauth_jwks_url is trusted by; unset: the system's.",
        default=None,
    )
    oauth_jwks_refresh_ms: int = _key(
        "OAUTHBEARER: how often keys are fetched anew (sasl.oauthbearer.jwks.endpoint.refresh.ms), "
        "besides when a token names an unknown one.",
        default=3_600_000,
    )
    oauth_issuer: str | None = _key(
        "OAUTHBEARER: who issues tokens, their `iss` (sasl.oauthbearer.expected.issuer).",
        default=None,
    )
    oauth_audience: str | None = _key(
        "OAUTHBEARER: whom tokens must be for, their `aud`; some, with commas between "
        "(sasl.oauthbearer.expected.audience).",
        default=None,
    )
    oauth_principal_claim: str = _key(
        "OAUTHBEARER: the claim that names the principal (sasl.oauthbearer.sub.claim.name).",
        default="sub",
    )
    oauth_algorithms: str = _key(
        "OAUTHBEARER: how tokens may be signed: some of RS256, RS384, RS512, PS256, PS384, PS512, "
        "ES256, ES384, ES512 and EdDSA, with commas between.",
        default="RS256,PS256,ES256,EdDSA",
    )
    oauth_clock_skew_s: int = _key(
        "OAUTHBEARER: how far the issuer's clock and this one may be apart, in seconds "
        "(sasl.oauthbearer.clock.skew.seconds).",
        default=30,
    )
    first_user_file: Path | None = _key(
        "A file with NAME:PASSWORD in its first line: a cluster that never had users gets that "
        "one, once.",
        default=None,
    )
    sasl_failure_delay_ms: int = _key(
        "How long a client that failed to authenticate waits for the answer "
        "(connection.failed.authentication.delay.ms).",
        default=100,
    )
    peer_listener: Address = _key("Where other nodes connect.", default=Address("127.0.0.1", 9192))
    admin_listener: Address = _key(
        "HTTP: /metrics, /health, /status.", default=Address("127.0.0.1", 9292)
    )
    admin_token_file: Path | None = _key(
        "A file with a token in each line, for `Authorization: Bearer`: pages of the admin port "
        "that change something take nothing else, others are read without it from this machine "
        "alone. "
        "The command line reads the same variable (RAFTMQ_ADMIN_TOKEN_FILE).",
        default=None,
    )
    admin_certificate_file: Path | None = _key(
        "PEM, the certificate of the admin port, and those between it and the CA; unset: it speaks "
        "plain HTTP.",
        default=None,
    )
    admin_key_file: Path | None = _key("PEM, its private key.", default=None)
    admin_client_ca_file: Path | None = _key(
        "PEM, the CAs of operators: whoever shows a certificate of theirs at the admin port needs "
        "no token.",
        default=None,
    )
    admin_client_crl_file: Path | None = _key(
        "PEM, lists of their certificates that are good no more (CRLs); with admin_client_ca_file.",
        default=None,
    )
    advertised_client: Address | None = _key(
        "Address that clients are told; default: client_listener.", default=None
    )
    advertised_peer: Address | None = _key(
        "Address that other nodes are told; default: peer_listener.", default=None
    )
    advertised_admin: Address | None = _key(
        "Admin address that other nodes are told; default: admin_listener.", default=None
    )
    audit_file: Path | None = _key(
        "A file with a line of JSON for each authentication, denial and administrative change; it "
        "is made, for the node's own user alone, and opened anew when it was moved, and at SIGHUP.",
        default=None,
    )
    peer_tls: str = _key(
        "TLS between nodes, by certificates of both sides or a secret of the cluster. required: "
        "nothing else. accept: a peer may also speak plain, while it is turned on or off node by "
        "node. off: none.",
        default=PEER_TLS_OFF,
    )
    peer_certificate_file: Path | None = _key(
        "PEM, this node's certificate for other nodes, and those between it and the CA: for server "
        "and client, with the DNS name raftmq-node-ID among its subject alternative names.",
        default=None,
    )
    peer_key_file: Path | None = _key("PEM, its private key.", default=None)
    peer_key_password_file: Path | None = _key(
        "What that key is encrypted with; unset: it is not.", default=None
    )
    peer_ca_file: Path | None = _key(
        "PEM, the CA of nodes, and of nothing else: whoever has a certificate of it is a node. "
        "While it is replaced, the old and the new one.",
        default=None,
    )
    peer_crl_file: Path | None = _key(
        "PEM, lists of certificates of that CA that are good no more (CRLs): a node that shows one "
        "is refused.",
        default=None,
    )
    cluster_secret_file: Path | None = _key(
        "Instead of these four: a file with a secret in each line, of 32 random bytes "
        "(openssl rand -hex 32), the same on all nodes; whoever knows one is a node. The first is "
        "proved to others, all are accepted, so that one can be replaced.",
        default=None,
    )
    insecure: bool = _key(
        "It is meant that nodes speak plain outside the loopback, which is not warned of any more, "
        "and that anybody changes things at an admin port without a token.",
        default=False,
    )
    peers: tuple[PeerAddress, ...] = _key(
        "The first voters of the metadata group: [{id, host, port}], port being their peer "
        "listener's; the same list on every node. Empty: a cluster of this node alone.",
        default=(),
    )
    takes_data_at_once: bool = _key(
        "A node that joins and is not among `peers` takes data without `raftmq node add`.",
        default=False,
    )
    authorizer: str = _key(
        "Who may do what. off: everybody everything. acl: super users everything, others what "
        "rules allow (`raftmq acl`); the same on every node.",
        default="off",
    )
    super_users: tuple[str, ...] = _key(
        "Principals that may do everything where the authorizer is acl, such as User:admin.",
        default=(),
    )
    formation_wait_ms: int = _key(
        "A node with an empty data folder listens for so long for a cluster that it belonged to "
        "before it helps to form a new one; other nodes dial it again within 3.5 s. 0 where the "
        "cluster is certainly new.",
        default=4_000,
    )
    metadata_engine: str = _key(
        "The engine that replicates metadata: raft, or pysyncobj (a reference, loses data; "
        "loopback only).",
        default="raft",
    )
    log_format: str = _key("console or json.", default="console")
    log_level: str = _key("debug, info, warning or error.", default="info")
    tick_ms: int = _key("Length of a Raft tick.", default=25)
    election_ticks: int = _key(
        "A follower stands for election after this many ticks without its leader, up to twice "
        "that.",
        default=6,
    )
    heartbeat_ticks: int = _key("A leader sends heartbeats every so many ticks.", default=2)
    broker_session_ms: int = _key(
        "A broker that the controller has not heard for this long leaves Metadata.", default=2000
    )
    broker_heartbeat_ms: int = _key("How often a broker reports to the controller.", default=250)
    shutdown_timeout_ms: int = _key(
        "A stopping node ends after so long also where no other node took over its leaderships.",
        default=5_000,
    )
    flusher_threads: int = _key(
        "Threads that fdatasync; all but one of them help only with flushes that waited for 10 ms.",
        default=4,
    )
    request_bytes_max: int = _key("Largest Produce or OffsetCommit request.", default=100 << 20)
    request_control_bytes_max: int = _key("Largest request of any other API.", default=1 << 20)
    request_elements_max: int = _key("Most array elements in one request.", default=100_000)
    produce_elements_max: int = _key(
        "Most topics and partitions in one Produce request, which is read in one go.",
        default=10_000,
    )
    request_memory_bytes_max: int = _key(
        "Memory of this node for requests, whole ones and those still arriving. Beyond it large "
        "ones wait, and connections of the largest and slowest incomplete ones are closed.",
        default=256 << 20,
    )
    connections_max: int = _key("Most client connections.", default=10_000)
    connections_per_ip_max: int = _key(
        "Most client connections from one address (max.connections.per.ip); 0 is no limit.",
        default=0,
    )
    connections_per_ip_overrides: str = _key(
        "Another number for single addresses, such as 10.0.0.7:100,batch.example:0 "
        "(max.connections.per.ip.overrides); 0 refuses all of that address. A name stands for the "
        "addresses that it has when the node starts.",
        default="",
    )
    descriptors_reserved: int = _key(
        "File descriptors that clients never get: the last ones that the process may have are for "
        "other nodes, the admin port, files and clean-up.",
        default=64,
    )
    connection_creation_rate_max: int = _key(
        "Client connections accepted in a second (max.connection.creation.rate); others wait to be "
        "accepted. 0 is no limit.",
        default=0,
    )
    auto_create_topics_max: int = _key(
        "Most topics that are created at once, on this node, since clients name missing ones; "
        "others wait.",
        default=100,
    )
    auto_create_topics_per_s: int = _key(
        "And how many are created in each second after that.", default=10
    )
    group_bytes_max: int = _key(
        "Most bytes of the subscriptions of a group's members, all together, and of its "
        "assignments; a member beyond it gets GROUP_MAX_SIZE_REACHED.",
        default=4 << 20,
    )
    client_id_length_max: int = _key(
        "Most characters of a client id that are kept and shown in groups.", default=256
    )
    pipeline_depth_max: int = _key("Most unanswered requests of a connection.", default=64)
    pipeline_bytes_max: int = _key("Most unanswered bytes of a connection.", default=16 << 20)
    parked_fetches_max: int = _key(
        "Most fetches that wait for records; beyond it they are answered at once.",
        default=100_000,
    )
    socket_send_bytes: int = _key(
        "The kernel's send buffer of a client connection; 0: small for clients of this machine, "
        "the kernel's choice for others.",
        default=0,
    )
    request_receive_timeout_ms: int = _key(
        "The connection of a client that sends no byte of a request it began for so long is "
        "closed; so is that of one that needs more than this plus the request's size at "
        "request_receive_bytes_per_s_min.",
        default=30_000,
    )
    request_receive_bytes_per_s_min: int = _key(
        "Slowest rate at which requests may come.", default=8 << 10
    )
    connection_idle_ms: int = _key("A connection silent for so long is closed.", default=600_000)
    peer_queue_bytes_max: int = _key("Most bytes waiting for one other node.", default=64 << 20)
    peer_memory_bytes_max: int = _key(
        "Most bytes received from other nodes in frames that are not complete yet; at least the "
        "metadata snapshot and some megabytes. Beyond it the stream that holds most of them ends.",
        default=256 << 20,
    )
    open_files_max: int = _key("Most open segment files.", default=5_000)
    index_memory_bytes_max: int = _key("Most memory for offset and time indexes.", default=64 << 20)
    delay_memory_bytes_max: int = _key(
        "Most memory for delayed records that are pending, some 20 bytes each, 46 with a key. "
        "Beyond it those due last are left, and found by reading the log again.",
        default=128 << 20,
    )
    recent_bytes_max: int = _key(
        "Memory for the newest batches of all partitions, from which followers are served.",
        default=16 << 20,
    )
    replica_lag_time_max_ms: int = _key(
        "A follower not caught up for so long leaves the reported ISR; so does one that a new "
        "leader has not heard for so long.",
        default=10_000,
    )
    topic_create_wait_ms: int = _key(
        "How long creating a topic waits until every broker knows it.", default=1_000
    )
    replica_catchup_bytes_per_s: int = _key(
        "Most bytes a second to replicas that catch up, of all partitions that this node leads, "
        "beside what is written to these meanwhile; not where the commit waits for one. "
        "0 and -1 are no limit.",
        default=12 << 20,
    )
    replicas_max: int = _key(
        "Most partition replicas on a node: each keeps two files open, beside open_files_max. "
        "Nodes tell the controller; topics, partitions and moves that would make it more go to "
        "others or are refused. "
        "0: as many as the limit of descriptors (ulimit -Hn) has room for, at most 20,000.",
        default=0,
    )
    replica_moves_max: int = _key(
        "Partitions that change their replicas at a time, in the whole cluster; "
        "`raftmq.moves.max`, which can be altered at run time, goes before it.",
        default=4,
    )
    scrub_bytes_per_s: int = _key(
        "Background check of stored batches; 0 switches it off.", default=4 << 20
    )
    metrics_partitions_max: int = _key(
        "Most partitions with rows of their own in /metrics; the rest is summed.", default=2_000
    )
    metrics_groups_max: int = _key(
        "Most rows of group lag in /metrics; the rest is summed.", default=2_000
    )
    retention_check_ms: int = _key("How often retention looks at each log.", default=5_000)
    defaults: Mapping[str, str] = _key(
        "Kafka's broker-wide settings by their Kafka names (num.partitions, log.retention.ms).",
        factory=dict,
    )

    def __attrs_post_init__(self) -> None:
        _check(self)

    @property
    def kafka_settings(self) -> dict[str, str]:
        """The settings that Kafka clients see: `defaults`, and other keys by their Kafka names.

        A key with its default value is left out, as not set.
        """
        settings = {
            "advertised.listeners": ",".join(
                f"{each.name}://{each.told_address}" for each in self.client_listeners
            ),
            "broker.id": str(self.node_id),
            "listeners": ",".join(
                f"{each.name}://{each.address}" for each in self.client_listeners
            ),
            "log.dirs": str(self.data),
            "node.id": str(self.node_id),
            "raftmq.admin.listener": str(self.admin_address),
        }
        fields = attrs.fields_dict(type(self))
        for kafka_name, key in KAFKA_FILE_KEYS.items():
            value = getattr(self, key)
            if kafka_name not in settings and value != fields[key].default:
                settings[kafka_name] = str(value)
        return {**settings, **self.defaults}

    @property
    def client_listeners(self) -> tuple[ClientListener, ...]:
        """All ports for clients, `client_listener` first; at least one."""
        if self.client_listener is None:
            return self.listeners
        plain = ClientListener(
            name=PLAINTEXT, address=self.client_listener, advertised=self.advertised_client
        )
        return (plain, *self.listeners)

    def mechanisms_of(self, listener: ClientListener) -> tuple[str, ...]:
        """The mechanisms of SASL that a listener offers."""
        words = [word.strip() for word in self.sasl_mechanisms.split(",")]
        is_private = listener.has_tls or self.sasl_plain_without_tls
        secrets = (SASL_PLAIN, SASL_OAUTHBEARER)
        return tuple(word for word in words if word and (word not in secrets or is_private))

    @property
    def takes_tokens(self) -> bool:
        """True when a listener offers OAUTHBEARER."""
        return any(
            listener.has_sasl and SASL_OAUTHBEARER in self.mechanisms_of(listener)
            for listener in self.client_listeners
        )

    @property
    def audiences(self) -> tuple[str, ...]:
        """Whom tokens may be for."""
        return tuple(filter(None, map(str.strip, (self.oauth_audience or "").split(","))))

    @property
    def token_algorithms(self) -> tuple[str, ...]:
        """How tokens may be signed."""
        return tuple(filter(None, map(str.strip, self.oauth_algorithms.split(","))))

    @property
    def client_address(self) -> Address:
        """The address that clients of the first listener are told."""
        return self.client_listeners[0].told_address

    @property
    def peer_address(self) -> Address:
        """The address that other nodes are told."""
        return self.advertised_peer or self.peer_listener

    @property
    def has_open_peer_port(self) -> bool:
        """True when others than processes of this machine may pass for a node, or listen."""
        return self.peer_tls != PEER_TLS_REQUIRED and not self.peer_listener.is_loopback

    @property
    def admin_address(self) -> Address:
        """Where the admin port is reached."""
        return self.advertised_admin or self.admin_listener


KAFKA_FILE_KEYS: Final[Mapping[str, str]] = {
    "advertised.listeners": "advertised_client",
    "broker.heartbeat.interval.ms": "broker_heartbeat_ms",
    "broker.id": "node_id",
    "broker.rack": "rack",
    "broker.session.timeout.ms": "broker_session_ms",
    "cluster.id": "cluster_id",
    "connection.failed.authentication.delay.ms": "sasl_failure_delay_ms",
    "connections.max.idle.ms": "connection_idle_ms",
    "connections.max.reauth.ms": "sasl_session_ms_max",
    "listeners": "client_listener",
    "log.dirs": "data",
    "max.connection.creation.rate": "connection_creation_rate_max",
    "max.connections": "connections_max",
    "max.connections.per.ip": "connections_per_ip_max",
    "max.connections.per.ip.overrides": "connections_per_ip_overrides",
    "node.id": "node_id",
    "raftmq.admin.listener": "admin_listener",
    "raftmq.moves.max": "replica_moves_max",
    "replica.catchup.bytes.per.s": "replica_catchup_bytes_per_s",
    "replica.lag.time.max.ms": "replica_lag_time_max_ms",
    "sasl.enabled.mechanisms": "sasl_mechanisms",
    "sasl.oauthbearer.clock.skew.seconds": "oauth_clock_skew_s",
    "sasl.oauthbearer.expected.audience": "oauth_audience",
    "sasl.oauthbearer.expected.issuer": "oauth_issuer",
    "sasl.oauthbearer.jwks.endpoint.refresh.ms": "oauth_jwks_refresh_ms",
    "sasl.oauthbearer.jwks.endpoint.url": "oauth_jwks_url",
    "sasl.oauthbearer.sub.claim.name": "oauth_principal_claim",
    "socket.request.max.bytes": "request_bytes_max",
}
"""Kafka's names of settings, and the keys of a node's file that hold them; others: `defaults`."""


def documented_keys() -> list[tuple[str, str, str]]:
    """(key, default as text, documentation) of every key, in order."""
    rows = []
    for attribute in attrs.fields(NodeConfig):
        default = attribute.default
        if default is attrs.NOTHING:
            text = "required"
        elif isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # attrs types it as a function
            text = "{}"
        else:
            text = {None: "unset", (): "[]"}.get(default, str(default))
        rows.append((attribute.name, text, attribute.metadata["doc"]))
    return rows


def load_config(
    text: str,
    *,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> NodeConfig:
    """Build a node's configuration from TOML, then variables, then flags.

    Args:
        text: the TOML file's content, or "" without one.
        environment: variables; `RAFTMQ_NODE_ID=3` sets `node_id`; lists and tables as JSON.
        overrides: flags by key; None values are passed over.

    Raises:
        ConfigError: bad TOML, an unknown key, a missing or unusable value; the message says which.
    """
    try:
        values: dict[str, Any] = dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML: {error}") from error
    known = {attribute.name: attribute for attribute in attrs.fields(NodeConfig)}
    variables = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): name
        for name in environment or {}
        if name.startswith(ENVIRONMENT_PREFIX) and name not in NOT_NODE_VARIABLES
    }
    values.update({key: (environment or {})[name] for key, name in variables.items()})
    flags = {k: v for k, v in (overrides or {}).items() if v is not None}
    values.update(flags)
    origins = {k: f" (variable {name})" for k, name in variables.items() if k not in flags}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown key {name!r}{hint}{origins.get(name, '')}")
    for name, attribute in known.items():
        if attribute.default is attrs.NOTHING and name not in values:
            raise ConfigError(f"key {name!r} is missing: {attribute.metadata['doc']}")
    read = {k: _read(k, value, origins.get(k, "")) for k, value in values.items()}
    if read.get("listeners"):
        read.setdefault("client_listener", None)  # its default is for files that name no listener
    return NodeConfig(**read)


_ADDRESSES: Final = frozenset(
    {"client_listener", "peer_listener", "admin_listener"}
    | {"advertised_client", "advertised_peer", "advertised_admin"}
)
_TEXTS: Final = frozenset(
    {
        "authorizer",
        "cluster_id",
        "rack",
        "connections_per_ip_overrides",
        "metadata_engine",
        "peer_tls",
        "log_format",
        "log_level",
        "sasl_mechanisms",
        "oauth_algorithms",
        "oauth_audience",
        "oauth_issuer",
        "oauth_jwks_url",
        "oauth_principal_claim",
    }
)


def _read(name: str, value: Any, origin: str) -> Any:
    try:
        if name in _ADDRESSES:
            return value if isinstance(value, Address) else Address.parse(str(value))
        if name == "peers":
            return _read_peers(value)
        if name == "listeners":
            return _read_listeners(value)
        if name == "super_users":
            return _read_principals(value)
        if name == "defaults":
            return _read_defaults(value)
        if name == "data" or name.endswith("_file"):
            return _read_data(value)
        if name in _TEXTS:
            return str(value)
        if name in ("takes_data_at_once", "sasl_plain_without_tls", "insecure"):
            return _yes_or_no(value)
        return _whole(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"key {name!r}: cannot use {value!r} ({error}){origin}") from error
    except ConfigError as error:
        raise ConfigError(f"key {name!r}: {error}{origin}") from error


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError("is a boolean")
    try:
        return int(str(value))
    except ValueError:
        raise ValueError("not a whole number") from None


def _yes_or_no(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise ValueError("neither true nor false")
    return text == "true"


def _read_data(value: Any) -> Path:
    if not str(value):  # Path("") would be the working directory
        raise ConfigError("must not be empty")
    return Path(str(value)).expanduser()


def _parsed(value: Any) -> Any:
    """A list or table; in variables and flags it comes as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None


def _read_defaults(value: Any) -> dict[str, str]:
    table = _parsed(value)
    if not isinstance(table, Mapping):
        raise ConfigError("a table of Kafka's names and their values")
    return {str(name): _setting(str(name), item) for name, item in table.items()}


def _setting(name: str, value: object) -> str:
    if isinstance(value, Mapping):  # TOML reads `log.retention.ms = 1` as three tables
        while isinstance(value, Mapping) and value:
            part, value = next(iter(value.items()))
            name = f"{name}.{part}"
        raise ConfigError(f'Kafka\'s names stand in quotes: "{name}" = {value}')
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_principals(value: Any) -> tuple[str, ...]:
    rows = _parsed(value)
    if not isinstance(rows, list | tuple) or not all(isinstance(row, str) for row in rows):
        raise ConfigError('a list of principals, such as ["User:admin"]')
    for row in rows:
        kind, _, name = row.partition(":")
        if not (kind and name):
            raise ConfigError(f"{row!r} is no principal, such as User:admin")
    return tuple(rows)


def _read_peers(value: Any) -> tuple[PeerAddress, ...]:
    rows = _parsed(value)
    if not isinstance(rows, list | tuple):
        raise ConfigError("a list of {id, host, port}")
    peers = []
    for row in rows:
        if isinstance(row, PeerAddress):
            peers.append(row)
            continue
        if not isinstance(row, Mapping):
            raise ConfigError("a list of {id, host, port}")
        unknown = sorted(set(row) - {"id", "host", "port"})
        if unknown:
            raise ConfigError(f"peers take id, host and port, not {unknown[0]!r}")
        missing = [key for key in ("id", "host", "port") if key not in row]
        if missing:
            raise ConfigError(f"peers take id, host and port; {missing[0]!r} is missing in {row}")
        peers.append(PeerAddress(_whole(row["id"]), str(row["host"]), _whole(row["port"])))
    return tuple(sorted(peers, key=lambda peer: peer.id))


def _read_listeners(value: Any) -> tuple[ClientListener, ...]:
    table = _parsed(value)
    if isinstance(table, tuple):
        return table
    if not isinstance(table, Mapping):
        raise ConfigError("a table of names, each with an address and a protocol")
    return tuple(read_listener(str(name).upper(), row) for name, row in table.items())


def _check_listeners(config: NodeConfig) -> None:
    names = [listener.name for listener in config.client_listeners]
    if not names:
        raise ConfigError("key 'listeners': clients need at least one")
    if len(set(names)) != len(names):
        raise ConfigError(f"key 'listeners': {PLAINTEXT} is client_listener already")
    if config.advertised_client is not None and config.client_listener is None:
        raise ConfigError("key 'advertised_client': there is no client_listener")
    for word in filter(None, map(str.strip, config.sasl_mechanisms.split(","))):
        if word not in SASL_MECHANISMS:
            raise ConfigError(
                f"key 'sasl_mechanisms': some of {', '.join(SASL_MECHANISMS)}, not {word!r}"
            )
    for listener in config.listeners:
        try:
            check_listener(listener)
            if listener.has_sasl and not config.mechanisms_of(listener):
                raise ConfigError(
                    "sasl_mechanisms has none for it; PLAIN and OAUTHBEARER want TLS or "
                    "sasl_plain_without_tls"
                )
        except ConfigError as error:
            raise ConfigError(f"key 'listeners': {listener.name}: {error}") from None


def _check_oauth(config: NodeConfig) -> None:
    if not config.takes_tokens:
        return  # the keys may be set already
    url = config.oauth_jwks_url
    if (url is None) == (config.oauth_jwks_file is None):
        raise ConfigError("key 'oauth_jwks_url': OAUTHBEARER needs it, or oauth_jwks_file")
    if not config.oauth_issuer:
        raise ConfigError("key 'oauth_issuer': OAUTHBEARER needs it")
    if not config.audiences:
        raise ConfigError("key 'oauth_audience': OAUTHBEARER needs it")
    if not config.oauth_principal_claim:
        raise ConfigError("key 'oauth_principal_claim': must not be empty")
    for word in config.token_algorithms:
        if word not in OAUTH_ALGORITHMS:
            known = ", ".join(OAUTH_ALGORITHMS)
            raise ConfigError(f"key 'oauth_algorithms': some of {known}, not {word!r}")
    if not config.token_algorithms:
        raise ConfigError("key 'oauth_algorithms': must not be empty")
    if url is not None:
        _check_jwks_url(url, may_be_plain=config.insecure)


def _check_jwks_url(text: str, *, may_be_plain: bool) -> None:
    try:
        url = urlsplit(text)
        host = Address(url.hostname or "", url.port or 0)
    except ValueError as error:
        raise ConfigError(f"key 'oauth_jwks_url': {text!r}: {error}") from None
    if url.scheme not in ("http", "https") or not host.host or url.username is not None:
        raise ConfigError(f"key 'oauth_jwks_url': {text!r} is not https://HOST/PATH")
    if url.scheme == "http" and not (host.is_loopback or may_be_plain):
        raise ConfigError(
            f"key 'oauth_jwks_url': {text!r}: keys that come by http are anybody's; https, or "
            "insecure = true"
        )


_POSITIVE: Final = (
    "tick_ms",
    "election_ticks",
    "heartbeat_ticks",
    "flusher_threads",
    "connections_max",
    "pipeline_depth_max",
    "auto_create_topics_max",
    "auto_create_topics_per_s",
    "group_bytes_max",
    "client_id_length_max",
    "request_bytes_max",
    "request_control_bytes_max",
    "request_receive_timeout_ms",
    "request_receive_bytes_per_s_min",
    "broker_session_ms",
    "broker_heartbeat_ms",
    "shutdown_timeout_ms",
    "oauth_jwks_refresh_ms",
    "replica_moves_max",
    "metrics_partitions_max",
    "metrics_groups_max",
)


def _check(config: NodeConfig) -> None:
    if not 0 <= config.node_id < 2**31:
        raise ConfigError(f"key 'node_id': {config.node_id} is not in 0..2147483647")
    if not config.cluster_id:
        raise ConfigError("key 'cluster_id': must not be empty")
    ids = [peer.id for peer in config.peers]
    if len(set(ids)) != len(ids):
        raise ConfigError(f"key 'peers': an id appears twice in {ids}")
    if config.metadata_engine not in METADATA_ENGINES:
        raise ConfigError(f"key 'metadata_engine': one of {', '.join(METADATA_ENGINES)}")
    _check_peer_tls(config)
    _check_admin_tls(config)
    if config.authorizer not in AUTHORIZERS:
        raise ConfigError(f"key 'authorizer': one of {', '.join(AUTHORIZERS)}")
    if config.log_format not in LOG_FORMATS:
        raise ConfigError(f"key 'log_format': one of {', '.join(LOG_FORMATS)}")
    if config.log_level not in LOG_LEVELS:
        raise ConfigError(f"key 'log_level': one of {', '.join(LOG_LEVELS)}")
    if config.heartbeat_ticks >= config.election_ticks:
        raise ConfigError("key 'heartbeat_ticks': must be below election_ticks")
    for name in _POSITIVE:
        if getattr(config, name) < 1:
            raise ConfigError(f"key {name!r}: must be at least 1")
    for attribute in attrs.fields(NodeConfig):
        value = getattr(config, attribute.name)
        if isinstance(value, int) and value < 0:
            raise ConfigError(f"key {attribute.name!r}: must not be negative")
    connections_per_ip(config.connections_per_ip_overrides)
    _check_listeners(config)
    _check_oauth(config)
    _check_told(config)


def _check_peer_tls(config: NodeConfig) -> None:
    if config.peer_tls not in PEER_TLS:
        raise ConfigError(f"key 'peer_tls': one of {', '.join(PEER_TLS)}")
    if config.peer_tls == PEER_TLS_OFF:
        return  # the files may be named already
    for name in ("peer_certificate_file", "peer_key_file", "peer_ca_file"):
        is_named = getattr(config, name) is not None
        if is_named and config.cluster_secret_file is not None:
            raise ConfigError(f"key {name!r}: goes without cluster_secret_file, which replaces it")
        if not is_named and config.cluster_secret_file is None:
            raise ConfigError(
                f"key {name!r}: peer_tls {config.peer_tls!r} needs it, or cluster_secret_file"
            )
    if config.peer_crl_file is not None and config.cluster_secret_file is not None:
        raise ConfigError("key 'peer_crl_file': goes with peer_ca_file")
    if config.metadata_engine != "raft":
        raise ConfigError(f"key 'peer_tls': {config.metadata_engine} speaks plain alone")


def _check_admin_tls(config: NodeConfig) -> None:
    if (config.admin_certificate_file is None) != (config.admin_key_file is None):
        raise ConfigError("key 'admin_key_file': goes with admin_certificate_file")
    if config.admin_client_ca_file is not None and config.admin_certificate_file is None:
        raise ConfigError("key 'admin_client_ca_file': goes with admin_certificate_file")
    if config.admin_client_crl_file is not None and config.admin_client_ca_file is None:
        raise ConfigError("key 'admin_client_crl_file': goes with admin_client_ca_file")


def connections_per_ip(text: str) -> dict[str, int]:
    """Hosts with their bounds, from `HOST:COUNT,HOST:COUNT`; the last one of a host counts.

    Raises:
        ConfigError: it reads otherwise.
    """
    found = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        host, _, count = word.rpartition(":")
        host = host.strip().removeprefix("[").removesuffix("]")
        if not host or not count.strip().isdecimal():
            raise ConfigError(
                f"key 'connections_per_ip_overrides': {word!r} is not HOST:COUNT, such as "
                "10.0.0.7:100"
            )
        found[host] = int(count)
    return found


def _check_told(config: NodeConfig) -> None:
    """Addresses that others are told must lead to this node; 0.0.0.0 would lead to themselves."""
    for port, who in (("client", "clients"), ("peer", "other nodes"), ("admin", "other nodes")):
        name = f"advertised_{port}"
        if getattr(config, name) is None:
            name = f"{port}_listener"
        address: Address | None = getattr(config, name)
        if address is not None and address.host in _EVERY_ADDRESS:
            raise ConfigError(
                f"key {name!r}: {address.host} is every address of this machine; "
                f"say in advertised_{port} which one {who} are told"
            )
    for listener in config.listeners:
        if listener.told_address.host in _EVERY_ADDRESS:
            raise ConfigError(
                f"key 'listeners': {listener.name}: {listener.told_address.host} is every address "
                "of this machine; say in advertised which one clients are told"
            )
