"""The configs of topics and brokers that Kafka clients see: names, types, defaults, documentation.

Owns the kinds of values, with their parsing and bounds (Kafka's ConfigDef), and the tables of keys.
Names and meanings are Kafka 4.1's; defaults differ where raftmq differs on purpose (retention of
two weeks, three replicas) and say so. A key that raftmq cannot honour takes only the value that it
does honour; unknown keys are refused where a value is set. A checked value is kept as the client
wrote it, trimmed: effective values are texts everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final

from attrs import frozen

from raftmq.errors import ErrorCode, KafkaError

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
LONG_MIN, LONG_MAX = -(2**63), 2**63 - 1


class ConfigType(IntEnum):
    """As DescribeConfigs v3+ numbers them."""

    UNKNOWN = 0
    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7
    CLASS = 8
    PASSWORD = 9


class ConfigSource(IntEnum):
    """Where an effective value comes from, as DescribeConfigs numbers it."""

    UNKNOWN = 0
    TOPIC = 1
    DYNAMIC_BROKER = 2
    DYNAMIC_DEFAULT_BROKER = 3
    STATIC_BROKER = 4
    DEFAULT = 5


Check = Callable[[str, str], None]
"""check(name, text): raises INVALID_CONFIG."""


@frozen(slots=True)
class ConfigKey:
    """One key of topics or brokers.

    Attributes:
        broker_name: of a topic key, the broker key that gives its default.
        broker_factor: what one unit of that broker key is in units of this one.
        is_read_only: of a broker key: set in the node's file alone.
    """

    name: str
    type: ConfigType
    default: str | None
    documentation: str
    check: Check
    broker_name: str | None = None
    is_read_only: bool = False
    is_sensitive: bool = False

    @property
    def is_list(self) -> bool:
        """True where append and subtract make sense (KIP-339)."""
        return self.type is ConfigType.LIST


def invalid(name: str, value: object, why: str) -> KafkaError:
    """The error that Kafka's ConfigDef gives for a bad value."""
    return KafkaError(
        f"Invalid value {value} for configuration {name}: {why}", code=ErrorCode.INVALID_CONFIG
    )


def boolean(name: str, text: str) -> None:
    """true or false, in any case."""
    if text.strip().lower() not in ("true", "false"):
        raise invalid(name, text, "Expected value to be either true or false")


def string(_name: str, _text: str) -> None:
    """Anything."""


def non_empty(name: str, text: str) -> None:
    """Anything but nothing."""
    if not text.strip():
        raise invalid(name, text, "String must be non-empty")


def integer(low: int = INT_MIN, high: int = INT_MAX) -> Check:
    """A whole number in [low, high]."""

    def check(name: str, text: str) -> None:
        try:
            value = int(text.strip())
        except ValueError as error:
            raise invalid(name, text, "Not a number of type INT") from error
        if value < low:
            raise invalid(name, value, f"Value must be at least {low}")
        if value > high:
            raise invalid(name, value, f"Value must be no more than {high}")

    return check


def long(low: int = LONG_MIN, high: int = LONG_MAX) -> Check:
    """A whole number in [low, high] of 64 bits."""
    return integer(low, high)


def long_or_off(name: str, text: str) -> None:
    """A time in milliseconds; -1 or off: never."""
    if text.strip().lower() != "off":
        long(-1)(name, text)


def double(low: float, high: float) -> Check:
    """A number in [low, high]."""

    def check(name: str, text: str) -> None:
        try:
            value = float(text.strip())
        except ValueError as error:
            raise invalid(name, text, "Not a number of type DOUBLE") from error
        if not low <= value <= high:
            raise invalid(name, value, f"Value must be between {low} and {high}")

    return check


def one_of(*choices: str) -> Check:
    """One of a few words."""

    def check(name: str, text: str) -> None:
        if text.strip() not in choices:
            raise invalid(name, text, f"String must be one of: {', '.join(choices)}")

    return check


def list_of(*choices: str, may_be_empty: bool = False) -> Check:
    """Words separated by commas; without choices any words."""

    def check(name: str, text: str) -> None:
        words = split_list(text)
        if not words and not may_be_empty:
            raise invalid(name, text, f"String must be one of: {', '.join(choices)}")
        for word in words:
            if choices and word not in choices:
                raise invalid(name, word, f"String must be one of: {', '.join(choices)}")

    return check


def split_list(text: str) -> list[str]:
    """The words of a list value."""
    return [word.strip() for word in text.split(",") if word.strip()]


def throttled_replicas(name: str, text: str) -> None:
    """`*`, or `partition:broker` pairs."""
    words = split_list(text)
    if text.strip() == "*" or not words:
        return
    for word in words:
        partition, colon, broker = word.partition(":")
        if not (colon and partition.isdigit() and broker.isdigit()):
            raise invalid(
                name, text, "must be the literal '*' or a list of replicas in the following format"
            )


def retries_nothing(attempts: str | None) -> bool:
    """True for that value of RETRY_ATTEMPTS by which a delay topic with a dead topic is no retry
    topic; None, for it is not set, makes one."""
    return attempts is not None and int(attempts) == 0


def check_all(keys: Sequence[ConfigKey]) -> dict[str, ConfigKey]:
    """Index keys by name; each appears once and its default is valid."""
    index: dict[str, ConfigKey] = {}
    for key in keys:
        assert key.name not in index, key.name
        if key.default is not None:
            key.check(key.name, key.default)
        index[key.name] = key
    return index


FOREVER: Final = str(LONG_MAX)
CLOSING_QUIET: Final = "raftmq.closing.quiet.ms"
DELIVERS_TO: Final = "raftmq.delivers.to"
DELAY_MAX: Final = "raftmq.delay.max.ms"
DELIVERY_GIVEUP: Final = "raftmq.delivery.giveup.ms"
DEAD_TO: Final = "raftmq.dead.to"
RETRY_ATTEMPTS: Final = "raftmq.retry.attempts"
RETRY_MIN: Final = "raftmq.retry.min.ms"
RETRY_MAX: Final = "raftmq.retry.max.ms"
RETRY_FACTOR: Final = "raftmq.retry.factor"
SET_AT_CREATION: Final = (
    DELIVERS_TO,
    DEAD_TO,
    RETRY_ATTEMPTS,
    RETRY_MIN,
    RETRY_MAX,
    RETRY_FACTOR,
)
"""What is pending is ordered by these, so they never change, nor may their defaults below."""

COMPRESSIONS: Final = ("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")

_B, _S, _I, _L, _D, _LIST = (
    ConfigType.BOOLEAN,
    ConfigType.STRING,
    ConfigType.INT,
    ConfigType.LONG,
    ConfigType.DOUBLE,
    ConfigType.LIST,
)

TOPIC_KEYS: Final = check_all(
    [
        ConfigKey(
            "cleanup.policy",
            _LIST,
            "delete",
            "What happens to old records: delete drops segments by retention, compact keeps the "
            "newest record of each key. Of a compacted topic nothing is dropped by age.",
            list_of("compact", "delete"),
            "log.cleanup.policy",
        ),
        ConfigKey(
            "compression.gzip.level",
            _I,
            "-1",
            "Level used when compression.type is gzip; -1 is the library's default.",
            integer(-1, 9),
            "compression.gzip.level",
        ),
        ConfigKey(
            "compression.lz4.level",
            _I,
            "9",
            "Level used when compression.type is lz4.",
            integer(1, 17),
            "compression.lz4.level",
        ),
        ConfigKey(
            "compression.type",
            _S,
            "producer",
            "Codec in which batches are stored; producer keeps what the producer sent.",
            one_of(*COMPRESSIONS),
            "compression.type",
        ),
        ConfigKey(
            "compression.zstd.level",
            _I,
            "3",
            "Level used when compression.type is zstd.",
            integer(-131072, 22),
            "compression.zstd.level",
        ),
        ConfigKey(
            "delete.retention.ms",
            _L,
            "86400000",
            "How long a delete marker stays in a compacted topic.",
            long(0),
            "log.cleaner.delete.retention.ms",
        ),
        ConfigKey(
            "file.delete.delay.ms",
            _L,
            "60000",
            "How long a dropped segment's file stays on disk.",
            long(0),
            "log.segment.delete.delay.ms",
        ),
        ConfigKey(
            "flush.messages",
            _L,
            FOREVER,
            "Stored and shown; every batch is fsynced before it is acknowledged all the same.",
            long(1),
            "log.flush.interval.messages",
        ),
        ConfigKey(
            "flush.ms",
            _L,
            FOREVER,
            "Stored and shown; every batch is fsynced before it is acknowledged all the same.",
            long(0),
            "log.flush.interval.ms",
        ),
        ConfigKey(
            "follower.replication.throttled.replicas",
            _LIST,
            "",
            "Followers whose replication is throttled, as partition:broker pairs; kept and shown. "
            "A leader's rate holds for every replica that is being made.",
            throttled_replicas,
        ),
        ConfigKey(
            "index.interval.bytes",
            _I,
            "4096",
            "One entry of the sparse offset index per so many bytes of log.",
            integer(0),
            "log.index.interval.bytes",
        ),
        ConfigKey(
            "leader.replication.throttled.replicas",
            _LIST,
            "",
            "Leaders whose replication is throttled, as partition:broker pairs; stored and shown. "
            "A leader's rate holds for every replica that is being made.",
            throttled_replicas,
        ),
        ConfigKey(
            "max.compaction.lag.ms",
            _L,
            FOREVER,
            "A record is compacted after this time at the latest.",
            long(1),
            "log.cleaner.max.compaction.lag.ms",
        ),
        ConfigKey(
            "max.message.bytes",
            _I,
            "1048588",
            "Largest batch, compressed if it is.",
            integer(0),
            "message.max.bytes",
        ),
        ConfigKey(
            "message.timestamp.after.max.ms",
            _L,
            "3600000",
            "How far in the future of most brokers' clocks a record's timestamp may lie.",
            long(0),
            "log.message.timestamp.after.max.ms",
        ),
        ConfigKey(
            "message.timestamp.before.max.ms",
            _L,
            FOREVER,
            "How far in the past of most brokers' clocks a record's timestamp may lie.",
            long(0),
            "log.message.timestamp.before.max.ms",
        ),
        ConfigKey(
            "message.timestamp.type",
            _S,
            "CreateTime",
            "CreateTime keeps the producer's timestamps; LogAppendTime takes the leader's clock, "
            "or that of most replicas where it is behind.",
            one_of("CreateTime", "LogAppendTime"),
            "log.message.timestamp.type",
        ),
        ConfigKey(
            "min.cleanable.dirty.ratio",
            _D,
            "0.5",
            "Share of a log that must be uncompacted before it is compacted.",
            double(0, 1),
            "log.cleaner.min.cleanable.ratio",
        ),
        ConfigKey(
            "min.compaction.lag.ms",
            _L,
            "0",
            "A record stays uncompacted for this time at least.",
            long(0),
            "log.cleaner.min.compaction.lag.ms",
        ),
        ConfigKey(
            "min.insync.replicas",
            _I,
            "1",
            "So many replicas must have a batch on disk before acks=all is answered. A majority "
            "must in any case.",
            integer(1),
            "min.insync.replicas",
        ),
        ConfigKey(
            "preallocate",
            _B,
            "false",
            "Whether a new segment's file is allocated as a whole.",
            boolean,
            "log.preallocate",
        ),
        ConfigKey(
            "raftmq.acks1.fsync",
            _B,
            "false",
            "acks=1 waits for the leader's fsync (Kafka, and the default, answer from the cache).",
            boolean,
        ),
        ConfigKey(
            CLOSING_QUIET,
            _L,
            "900000",
            "For how long nobody must have written to partitions that the topic lists no more, "
            "until they are sealed.",
            integer(0),
        ),
        ConfigKey(
            DEAD_TO,
            _S,
            "",
            "Of a delay topic: what is as late as raftmq.delivery.giveup.ms says, and has no "
            "target that takes it, comes to this topic. Unless raftmq.retry.attempts is 0 it makes "
            "a retry topic: a record that was tried so often comes here. Set when the topic is "
            "created.",
            string,
        ),
        ConfigKey(
            DELAY_MAX,
            _L,
            "2592000000",
            "Of a delay topic: the longest time that a record may ask to wait.",
            long(0, 1 << 50),
        ),
        ConfigKey(
            DELIVERS_TO,
            _S,
            "",
            "Makes a delay topic: its records are delivered in this topic when they are due, as "
            "their headers deliver-at and deliver-after say. Set when the topic is created.",
            string,
        ),
        ConfigKey(
            DELIVERY_GIVEUP,
            _L,
            "86400000",
            "Of a delay topic with raftmq.dead.to: what is so late, and has no target that takes "
            "it, comes there.",
            long(1, 1 << 50),
        ),
        ConfigKey(
            RETRY_ATTEMPTS,
            _I,
            "8",
            "Of a delay topic with raftmq.dead.to: so often is a record tried, the first time "
            "included; 0: it is no retry topic. Set when the topic is created.",
            integer(0, 1_000),
        ),
        ConfigKey(
            RETRY_FACTOR,
            _D,
            "2",
            "Of a retry topic: each wait is so many times the one before it; of its digits two "
            "after the point count. Set when the topic is created.",
            double(1, 1_000),
        ),
        ConfigKey(
            RETRY_MAX,
            _L,
            "600000",
            "Of a retry topic: the longest wait that grows by itself. Set when the topic is "
            "created.",
            long(1, 1 << 50),
        ),
        ConfigKey(
            RETRY_MIN,
            _L,
            "1000",
            "Of a retry topic: the first wait; no record comes back sooner. Set when the topic is "
            "created.",
            long(1, 1 << 50),
        ),
        ConfigKey(
            "raftmq.produce.check",
            _S,
            "records",
            "What is looked at in a produced batch beside its header and checksum: all fields of "
            "every record, only their lengths (frame), or nothing (crc).",
            one_of("records", "frame", "crc"),
            "raftmq.produce.check",
        ),
        ConfigKey(
            "remote.storage.enable",
            _B,
            "false",
            "Tiered storage; not available.",
            one_of("false"),
        ),
        ConfigKey(
            "retention.bytes",
            _L,
            "-1",
            "Segments go when a partition is larger than this; -1 never.",
            long(-1),
            "log.retention.bytes",
        ),
        ConfigKey(
            "retention.ms",
            _L,
            "1209600000",
            "Segments go when their newest record is older than this; -1 never. (Kafka: 7 days.)",
            long(-1),
            "log.retention.ms",
        ),
        ConfigKey(
            "segment.bytes",
            _I,
            "1073741824",
            "A segment is closed before it would grow beyond this.",
            integer(14),
            "log.segment.bytes",
        ),
        ConfigKey(
            "segment.index.bytes",
            _I,
            "10485760",
            "Largest index of one segment.",
            integer(4),
            "log.index.size.max.bytes",
        ),
        ConfigKey(
            "segment.jitter.ms",
            _L,
            "0",
            "Greatest random shortening of segment.ms.",
            long(0),
            "log.roll.jitter.ms",
        ),
        ConfigKey(
            "segment.ms",
            _L,
            "604800000",
            "A segment is closed when it is this old.",
            long(1),
            "log.roll.ms",
        ),
        ConfigKey(
            "unclean.leader.election.enable",
            _B,
            "false",
            "Always false: a Raft group never elects a leader that lacks committed records.",
            one_of("false"),
            "unclean.leader.election.enable",
        ),
    ]
)

VIEW_OF: Final = "raftmq.view.of"
VIEW_WHERE: Final = "raftmq.view.where"
VIEW_KEYS: Final = check_all(
    [
        ConfigKey(
            VIEW_OF,
            _S,
            None,
            "Makes a view instead of a topic: a topic that nobody writes to, over the one that is "
            "named here. Set when the view is created.",
            string,
            is_read_only=True,
        ),
        ConfigKey(
            VIEW_WHERE,
            _S,
            None,
            "Of a view: its condition, which those records meet that it shows. Set when the view "
            "is created.",
            string,
            is_read_only=True,
        ),
    ]
)
"""What only a view has."""


def _defaults_of_topics() -> list[ConfigKey]:
    """A broker key for each topic key that has one: the default of topics that do not set it."""
    return [
        ConfigKey(
            key.broker_name,
            key.type,
            key.default,
            f"Default of {key.name} for topics that do not set it. {key.documentation}",
            key.check,
        )
        for key in TOPIC_KEYS.values()
        if key.broker_name is not None
    ]


def _fixed(name: str, kind: ConfigType, default: str | None, documentation: str) -> ConfigKey:
    check = {_B: boolean, _I: integer(), _L: long()}.get(kind, string)
    return ConfigKey(name, kind, default, documentation, check, is_read_only=True)


CATCH_UP_RATE: Final = "replica.catchup.bytes.per.s"
THROTTLED_RATE: Final = "leader.replication.throttled.rate"
MOVES_MAX: Final = "raftmq.moves.max"
REPLACE_AFTER: Final = "replica.replace.after.ms"

BROKER_KEYS: Final = check_all(
    [
        *_defaults_of_topics(),
        ConfigKey(
            "auto.create.topics.enable",
            _B,
            "true",
            "Whether Metadata creates a topic that a client names and allows to be created.",
            boolean,
        ),
        ConfigKey(
            "auto.leader.rebalance.enable",
            _B,
            "true",
            "Whether preferred leaders get their partitions back once they are up for a while.",
            boolean,
        ),
        ConfigKey(
            "default.replication.factor",
            _I,
            "3",
            "Replicas of a topic that does not say; fewer where brokers are fewer. (Kafka: 1.)",
            integer(1, 32767),
        ),
        ConfigKey(
            "num.partitions",
            _I,
            "1",
            "Partitions of a topic that does not say.",
            integer(1),
        ),
        ConfigKey(
            "delete.topic.enable",
            _B,
            "true",
            "Whether topics can be deleted.",
            boolean,
        ),
        ConfigKey(
            "group.coordinator.append.linger.ms",
            _I,
            "5",
            "Offset commits of a coordinator are written together, this far apart at least.",
            integer(0),
            is_read_only=True,
        ),
        ConfigKey(
            "group.initial.rebalance.delay.ms",
            _I,
            "500",
            "How long an empty group waits for more members before its first rebalance. "
            "(Kafka: 3000.)",
            integer(0),
            is_read_only=True,
        ),
        ConfigKey(
            "group.max.session.timeout.ms",
            _I,
            "1800000",
            "Longest session timeout that a member may ask for.",
            integer(1),
            is_read_only=True,
        ),
        ConfigKey(
            "group.min.session.timeout.ms",
            _I,
            "6000",
            "Shortest session timeout that a member may ask for.",
            integer(1),
            is_read_only=True,
        ),
        ConfigKey(
            "group.max.size",
            _I,
            "10000",
            "Most members of a group. (Kafka: no limit.)",
            integer(1),
            is_read_only=True,
        ),
        ConfigKey(
            "offsets.retention.minutes",
            _I,
            "10080",
            "How long the offsets of a group without members are kept.",
            integer(1),
            is_read_only=True,
        ),
        ConfigKey(
            "offset.metadata.max.bytes",
            _I,
            "4096",
            "Longest note beside a committed offset.",
            integer(0),
            is_read_only=True,
        ),
        ConfigKey(
            "transaction.max.timeout.ms",
            _I,
            "900000",
            "Longest timeout of a transaction that a producer may ask for.",
            integer(1),
            is_read_only=True,
        ),
        ConfigKey(
            "transactional.id.expiration.ms",
            _I,
            "604800000",
            "How long an unused transactional id is remembered.",
            integer(1),
            is_read_only=True,
        ),
        _fixed("advertised.listeners", _S, "", "Where clients reach this broker."),
        _fixed("broker.heartbeat.interval.ms", _I, "250", "How often a broker reports."),
        _fixed("broker.id", _I, "-1", "This broker's number; the same as node.id."),
        _fixed("broker.rack", _S, None, "This broker's failure domain."),
        _fixed("broker.session.timeout.ms", _I, "2000", "Silent for so long, a broker is dead."),
        _fixed("connections.max.idle.ms", _L, "600000", "Silent for so long, a connection goes."),
        _fixed("inter.broker.protocol.version", _S, "4.1", "Kafka's version that is spoken."),
        _fixed("listeners", _S, "", "Where this broker listens for clients."),
        _fixed("log.dirs", _S, "", "Folder of this broker's data."),
        _fixed(
            "connection.failed.authentication.delay.ms",
            _I,
            "100",
            "Delay of the answer to a failure.",
        ),
        _fixed("connections.max.reauth.ms", _L, "0", "How long a session lasts; 0: for ever."),
        _fixed(
            "sasl.enabled.mechanisms",
            _LIST,
            "SCRAM-SHA-512,SCRAM-SHA-256",
            "How clients may authenticate where a listener has SASL.",
        ),
        _fixed(
            "sasl.oauthbearer.clock.skew.seconds",
            _I,
            "30",
            "How far an issuer's clock may be apart from this broker's.",
        ),
        _fixed("sasl.oauthbearer.expected.audience", _LIST, "", "Whom tokens must be for."),
        _fixed("sasl.oauthbearer.expected.issuer", _S, None, "Who issues tokens."),
        _fixed(
            "sasl.oauthbearer.jwks.endpoint.refresh.ms",
            _L,
            "3600000",
            "How often an issuer's keys are fetched anew.",
        ),
        _fixed("sasl.oauthbearer.jwks.endpoint.url", _S, None, "Where an issuer shows its keys."),
        _fixed("sasl.oauthbearer.sub.claim.name", _S, "sub", "The claim that names the principal."),
        _fixed("max.connection.creation.rate", _I, "0", "Most new connections a second; 0: any."),
        _fixed("max.connections", _I, "10000", "Most client connections."),
        _fixed("max.connections.per.ip", _I, "0", "Most connections of one address; 0: any."),
        _fixed("max.connections.per.ip.overrides", _S, "", "Another number for single addresses."),
        _fixed("max.request.partition.size.limit", _I, "2000", "Most partitions in one answer."),
        _fixed("node.id", _I, "-1", "This broker's number."),
        _fixed("process.roles", _LIST, "broker,controller", "What this node does."),
        _fixed("raftmq.admin.listener", _S, "", "HTTP of this broker: /status, /nodes."),
        ConfigKey(
            MOVES_MAX,
            _I,
            "4",
            "Partitions that change their replicas at a time, in the whole cluster. One that "
            "cannot go on does not count, one that takes more than a minute counts a quarter. Set "
            "it for all brokers: the controller's counts.",
            integer(1, 10_000),
        ),
        ConfigKey(
            REPLACE_AFTER,
            _S,
            "600000",
            "The replicas of a broker that has been down for so many milliseconds are made again "
            "on others; off or -1: they are not. Set it for all brokers: the controller's counts.",
            long_or_off,
        ),
        ConfigKey(
            CATCH_UP_RATE,
            _L,
            str(12 << 20),
            "Most bytes per second to replicas that catch up (new ones, and those that fell far "
            "behind), of all partitions that a broker leads, beside what is written to these "
            "meanwhile; not where the commit waits for one. 0 and -1 are no limit.",
            long(-1),
        ),
        ConfigKey(
            THROTTLED_RATE,
            _L,
            FOREVER,
            f"Another limit like {CATCH_UP_RATE}, which kafka-reassign-partitions --throttle sets: "
            "the smaller one holds, for all replicas that catch up. 0 is no limit.",
            long(0),
        ),
        ConfigKey(
            "follower.replication.throttled.rate",
            _L,
            FOREVER,
            "Stored and shown for kafka-reassign-partitions, which sets it beside "
            f"{THROTTLED_RATE}: leaders send, so the leader's rate alone has an effect.",
            long(0),
        ),
        ConfigKey(
            "replica.alter.log.dirs.io.max.bytes.per.second",
            _L,
            FOREVER,
            "Stored and shown for kafka-reassign-partitions; a broker has one data folder, so "
            "nothing moves between folders.",
            long(0),
        ),
        _fixed("replica.lag.time.max.ms", _L, "10000", "Behind for so long, out of the ISR."),
        _fixed("socket.request.max.bytes", _I, "104857600", "Largest request."),
        ConfigKey("cluster.id", _S, "raftmq", "Name of the cluster.", non_empty, is_read_only=True),
    ]
)
