"""Options by name, the same for every driver: reading them, their defaults, what contradicts.

Text and numbers in, checked values out; what makes no sense is a `UsageError` that names it.
Resolves no name and opens nothing. `ProducerSettings` and `ConsumerSettings` are the keyword
arguments of `Producer` and `Consumer`; their defaults stand in the functions that read them.
`core/build.py` makes clients of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, Literal, TypeAlias, TypedDict

from raftmq.codec import Codec
from raftmq.types import TopicPartition
from raftmq_client.core.admin import READ_COMMITTED, READ_UNCOMMITTED
from raftmq_client.core.assignors import COOPERATIVE
from raftmq_client.core.consumer import ConsumerOptions
from raftmq_client.core.fetcher import FetcherOptions, Reset
from raftmq_client.core.group_state import GroupOptions
from raftmq_client.core.partitioners import PartitionerName, PartitionFunction
from raftmq_client.core.produce_requests import ACKS_ALL, ProducerOptions
from raftmq_client.core.security import SecurityChoice
from raftmq_client.errors import UsageError
from raftmq_client.serializers import Deserializer, K, Serializer, V, read_deserializer

DEFAULT_PORT: Final = 9092
DEFAULT_BOOTSTRAP: Final = "127.0.0.1:9092"
Delivery: TypeAlias = Literal["at_least_once", "at_most_once", "exactly_once"]
Isolation: TypeAlias = Literal["read_uncommitted", "read_committed"]
Acks: TypeAlias = Literal["all", 1, 0, -1, "1", "0", "-1"]
Compression: TypeAlias = Literal["none", "gzip", "snappy", "lz4", "zstd"]
DELIVERIES: Final = ("at_least_once", "at_most_once", "exactly_once")
_UNSET: Final = -1.0
_AT_LEAST: Final = {
    "auto_commit_ms": 0,
    "batch_bytes": 1,
    "buffer_bytes_max": 1,
    "buffer_memory": 1,
    "delivery_timeout_ms": 1,
    "heartbeat_interval_ms": 1,
    "in_flight_max": 1,
    "linger_ms": 0,
    "max_block_ms": 0,
    "max_bytes": 1,
    "max_poll_interval_ms": 1,
    "max_wait_ms": 0,
    "metadata_max_age_ms": 1,
    "min_bytes": 0,
    "partition_bytes_max": 1,
    "request_bytes_max": 1,
    "request_timeout_ms": 1,
    "session_timeout_ms": 1,
    "transaction_timeout_ms": 1,
}
"""Of settings that are numbers."""
_AT_MOST: Final = (1 << 31) - 1
"""What the protocol can say: 24 days, or 2 GiB."""
_LEVELS: Final = {Codec.GZIP: (-1, 9), Codec.LZ4: (0, 17), Codec.ZSTD: (-131_072, 22)}
"""Of each codec that has any, as Kafka has them."""


_TEXTS: Final = ("client_id", "group", "instance_id", "rack", "transactional_id")
"""Settings that are said to brokers."""
_TEXT_MAX: Final = 32_767


def check_text(name: str, value: object) -> None:
    """Whether a setting that is a text can be said to a broker.

    Raises:
        UsageError: it cannot; the message names the setting.
    """
    if name not in _TEXTS or value is None:
        return
    try:
        size = len(value.encode()) if isinstance(value, str) else -1
    except UnicodeEncodeError:
        size = -1
    if not 0 <= size <= _TEXT_MAX:
        said = ascii(value)[:60]
        raise UsageError(f"{name} is a text of at most {_TEXT_MAX} bytes in UTF-8, not {said}")


def check_number(name: str, value: object) -> None:
    """Whether a setting's value is a number that makes sense, where it is one at all.

    Raises:
        UsageError: it is not; the message names the setting.
    """
    least = _AT_LEAST.get(name)
    if least is None or (value is None and name == "auto_commit_ms"):
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= _AT_MOST:  # type: ignore[operator]  # nor is NaN
        raise UsageError(f"{name} is a number from {least} to {_AT_MOST}, not {value!r}")


def parse_bootstrap(bootstrap: str | Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Read `host:port,host:port`, or a sequence of such; the port defaults to 9092.

    Raises:
        UsageError: not of that form; the message names the part.
    """
    parts = bootstrap.split(",") if isinstance(bootstrap, str) else list(bootstrap)
    addresses = []
    for part in (part.strip() for part in parts):
        if not part:
            continue
        host, colon, port = part.rpartition(":")
        if not colon or part.endswith("]"):
            host, port = part, str(DEFAULT_PORT)
        if not port.isdigit() or not 0 < int(port) < 65536 or not host:
            raise UsageError(f"{part!r} is not host:port, such as 127.0.0.1:9092")
        addresses.append((host.strip("[]"), int(port)))
    if not addresses:
        raise UsageError("no bootstrap address; give host:port[,host:port...]")
    return tuple(addresses)


class ProducerSettings(TypedDict, Generic[K, V], total=False):
    """Keyword arguments of a `Producer`; docs/client.md has a table with the defaults."""

    client_id: str
    security: SecurityChoice
    metadata_max_age_ms: float
    key_serializer: Serializer[K] | None
    value_serializer: Serializer[V] | None
    partitioner: PartitionerName | PartitionFunction
    delivery: Delivery | None
    acks: Acks | None
    idempotent: bool | None
    transactional_id: str | None
    transaction_timeout_ms: int
    compression: Compression
    compression_level: int | None
    linger_ms: float
    batch_bytes: int
    buffer_memory: int
    max_block_ms: float
    request_bytes_max: int
    in_flight_max: int
    request_timeout_ms: float
    delivery_timeout_ms: float


def producer_options(
    *,
    delivery: str | None = None,
    acks: str | int | None = None,
    idempotent: bool | None = None,
    transactional_id: str | None = None,
    transaction_timeout_ms: int = 60_000,
    compression: str = "none",
    compression_level: int | None = None,
    linger_ms: float = 5.0,
    batch_bytes: int = 128 * 1024,
    buffer_memory: int = 32 << 20,
    max_block_ms: float = 60_000,
    request_bytes_max: int = 1 << 20,
    in_flight_max: int = 5,
    request_timeout_ms: float = 30_000,
    delivery_timeout_ms: float = 120_000,
) -> ProducerOptions:
    """Options of a producer.

    Raises:
        UsageError: a value makes no sense, or two contradict each other.
    """
    check_producer_delivery(delivery, acks, idempotent)
    check_transactional(transactional_id, delivery, acks, idempotent)
    codec = read_codec(compression)
    check_level(codec, compression_level)
    sends_once = delivery == "at_most_once"
    return ProducerOptions(
        acks=ACKS_ALL if acks is None else read_acks(acks),
        idempotent=False if sends_once else idempotent,
        transactional_id=transactional_id,
        transaction_timeout_ms=int(transaction_timeout_ms),
        sends_once=sends_once,
        codec=codec,
        compression_level=compression_level,
        linger_ms=linger_ms,
        batch_bytes=batch_bytes,
        buffer_memory=buffer_memory,
        max_block_ms=max_block_ms,
        request_bytes_max=request_bytes_max,
        in_flight_max=in_flight_max,
        request_timeout_ms=request_timeout_ms,
        delivery_timeout_ms=delivery_timeout_ms,
    )


def check_producer_delivery(
    delivery: str | None, acks: str | int | None, idempotent: bool | None
) -> None:
    """Whether a producer's settings can keep what `delivery` promises.

    At least once: acknowledged by all, sent again until it is. At most once: never sent again
    after bytes had left, so there is nothing for idempotence to do. Exactly once: in transactions.

    Raises:
        UsageError: there is no such promise, or a setting contradicts it; both are named.
    """
    if delivery not in (None, *DELIVERIES):
        raise UsageError(f"delivery is {' or '.join(DELIVERIES)}, not {delivery!r}")
    if (
        delivery in ("at_least_once", "exactly_once")
        and acks is not None
        and read_acks(acks) != ACKS_ALL
    ):
        raise UsageError(
            f"acks={acks} contradicts delivery={delivery!r}: what only a leader has may be"
            " lost with it"
        )
    if delivery == "at_most_once" and idempotent:
        raise UsageError(
            "idempotent=True contradicts delivery='at_most_once', which sends nothing again;"
            " at_least_once with idempotence neither loses nor doubles"
        )


def check_transactional(
    transactional_id: str | None,
    delivery: str | None,
    acks: str | int | None,
    idempotent: bool | None,
) -> None:
    """Whether a producer's settings fit transactions: all acknowledge, and nothing comes twice.

    Raises:
        UsageError: one is missing or contradicts; it is named.
    """
    if transactional_id is None:
        if delivery == "exactly_once":
            raise UsageError(
                "delivery='exactly_once' needs a transactional_id: one name for each task, the"
                " same after a restart"
            )
        return
    if not transactional_id:
        raise UsageError("transactional_id is a name, or None for a producer without transactions")
    if delivery == "at_most_once":
        raise UsageError("delivery='at_most_once' contradicts transactional_id")
    if idempotent is False:
        raise UsageError("idempotent=False contradicts transactional_id")
    if acks is not None and read_acks(acks) != ACKS_ALL:
        raise UsageError(f"acks={acks} contradicts transactional_id: all have to acknowledge")


class ConsumerSettings(TypedDict, Generic[K, V], total=False):
    """Keyword arguments of a `Consumer`; docs/client.md has a table with the defaults."""

    client_id: str
    security: SecurityChoice
    metadata_max_age_ms: float
    group: str | None
    key_deserializer: Deserializer[K] | None
    value_deserializer: Deserializer[V] | None
    delivery: Delivery | None
    reset: Literal["earliest", "latest", "none"] | None
    isolation: Isolation | None
    auto_commit_ms: float | None
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    partition_bytes_max: int
    buffer_bytes_max: int
    session_timeout_ms: int
    heartbeat_interval_ms: float
    max_poll_interval_ms: float
    assignors: Sequence[str]
    instance_id: str | None
    rack: str
    skip_unreadable: bool


def consumer_options(
    *,
    group: str | None = None,
    key_deserializer: Deserializer[Any] | None = None,
    value_deserializer: Deserializer[Any] | None = None,
    delivery: str | None = None,
    reset: str | None = None,
    isolation: str | None = None,
    auto_commit_ms: float | None = _UNSET,
    max_wait_ms: int = 500,
    min_bytes: int = 1,
    max_bytes: int = 50 << 20,
    partition_bytes_max: int = 1 << 20,
    buffer_bytes_max: int = 64 << 20,
    session_timeout_ms: int = 45_000,
    heartbeat_interval_ms: float = 3_000,
    max_poll_interval_ms: float = 300_000,
    assignors: Sequence[str] = ("range", "roundrobin"),
    instance_id: str | None = None,
    rack: str = "",
    skip_unreadable: bool = False,
) -> ConsumerOptions:
    """Options of a consumer.

    Raises:
        UsageError: a value makes no sense, or two contradict each other.
    """
    if isolation not in (None, "read_uncommitted", "read_committed"):
        raise UsageError(f"isolation is read_committed or read_uncommitted, not {isolation!r}")
    _check_grouping(group, assignors, session_timeout_ms, heartbeat_interval_ms)
    check_consumer_delivery(delivery, group, reset, auto_commit_ms)
    if delivery == "exactly_once":
        if isolation == "read_uncommitted":
            raise UsageError(
                "isolation='read_uncommitted' contradicts delivery='exactly_once': what is aborted"
                " would be handed out, too"
            )
        isolation = "read_committed"
    commits_first = delivery == "at_most_once"
    if reset is None:
        reset = "earliest" if delivery in ("at_least_once", "exactly_once") else "latest"
    if auto_commit_ms == _UNSET:
        auto_commit_ms = None if delivery in ("at_most_once", "exactly_once") else 5_000
    return ConsumerOptions(
        fetching=FetcherOptions(
            reset=read_reset(reset),
            isolation=READ_COMMITTED if isolation == "read_committed" else READ_UNCOMMITTED,
            max_wait_ms=max_wait_ms,
            min_bytes=min_bytes,
            max_bytes=max_bytes,
            partition_bytes_max=partition_bytes_max,
            buffer_bytes_max=buffer_bytes_max,
            rack=rack,
            skips_unreadable=skip_unreadable,
        ),
        grouping=GroupOptions(
            session_timeout_ms=session_timeout_ms,
            rebalance_timeout_ms=int(max_poll_interval_ms),
            heartbeat_interval_ms=heartbeat_interval_ms,
            max_poll_interval_ms=max_poll_interval_ms,
            assignors=tuple(assignors),
            instance_id=instance_id,
        ),
        group=group,
        decode_key=read_deserializer(key_deserializer),
        decode_value=read_deserializer(value_deserializer),
        auto_commit_ms=auto_commit_ms,
        commits_first=commits_first,
    )


def _check_grouping(
    group: str | None,
    assignors: Sequence[str],
    session_timeout_ms: float,
    heartbeat_interval_ms: float,
) -> None:
    if isinstance(assignors, str) or not assignors:
        raise UsageError(f"assignors is a tuple of names, such as ('range',), not {assignors!r}")
    if group == "":
        raise UsageError("group is a name, or None for a consumer without")
    cooperative = [name for name in assignors if name in COOPERATIVE]
    if cooperative and len(cooperative) < len(assignors):
        raise UsageError(f"assignor {cooperative[0]!r} is cooperative, and not to be mixed")
    if heartbeat_interval_ms >= session_timeout_ms:
        raise UsageError("heartbeat_interval_ms is not below session_timeout_ms")


def check_consumer_delivery(
    delivery: str | None, group: str | None, reset: str | None, auto_commit_ms: float | None
) -> None:
    """Whether a consumer's settings can keep what `delivery` promises.

    At least once: a record is committed after the caller asked for the next one, and who has no
    commit starts at the beginning. At most once: a record is committed before it is handed out,
    and never by a timer. Exactly once: transactions commit, and what is aborted is not seen.

    Raises:
        UsageError: there is no such promise, or a setting contradicts it; both are named.
    """
    if delivery is None:
        return
    if delivery not in DELIVERIES:
        raise UsageError(f"delivery is {' or '.join(DELIVERIES)}, not {delivery!r}")
    if group is None:
        raise UsageError(f"delivery={delivery!r} needs a group: it is the commits that promise it")
    if delivery in ("at_least_once", "exactly_once") and reset == "latest":
        raise UsageError(
            f"reset='latest' contradicts delivery={delivery!r}: a member that dies before its"
            " first commit would pass over what it had"
        )
    if delivery == "at_most_once" and auto_commit_ms not in (_UNSET, None):
        raise UsageError(
            "auto_commit_ms contradicts delivery='at_most_once', which commits every poll"
            " before it hands its records out"
        )
    if delivery == "exactly_once" and auto_commit_ms not in (_UNSET, None):
        raise UsageError(
            "auto_commit_ms contradicts delivery='exactly_once': a transaction commits the"
            " positions, with what was made of the records"
        )


def read_acks(acks: str | int) -> int:
    """Kafka's words for acks.

    Raises:
        UsageError: not 0, 1 or all.
    """
    known = {"0": 0, "1": 1, "all": ACKS_ALL, "-1": ACKS_ALL}
    if str(acks) not in known:
        raise UsageError(f"acks is 0, 1 or all, not {acks!r}")
    return known[str(acks)]


def read_codec(name: str) -> Codec:
    """A codec by Kafka's name.

    Raises:
        UsageError: there is none of that name.
    """
    try:
        return Codec[name.upper()]
    except KeyError:
        names = ", ".join(codec.name.lower() for codec in Codec)
        raise UsageError(f"unknown compression {name!r}; one of {names}") from None


def check_level(codec: Codec, level: int | None) -> None:
    """Whether a codec has this level.

    Raises:
        UsageError: it has not; the message names the range.
    """
    if level is None:
        return
    if codec not in _LEVELS:
        raise UsageError(f"compression_level is nothing to compression={codec.name.lower()!r}")
    lowest, highest = _LEVELS[codec]
    if type(level) is not int or not lowest <= level <= highest:
        name = codec.name.lower()
        raise UsageError(
            f"compression_level of {name} is from {lowest} to {highest}, not {level!r}"
        )


def read_reset(name: str) -> Reset:
    """A reset policy by Kafka's name.

    Raises:
        UsageError: not earliest, latest or none.
    """
    try:
        return Reset(name)
    except ValueError:
        raise UsageError(f"reset is earliest, latest or none, not {name!r}") from None


Callback = Callable[[tuple[TopicPartition, ...]], None]
"""Told of partitions that were assigned or are given up."""


def ignore(_partitions: Iterable[TopicPartition]) -> None:
    """The callback of those who want none."""
    return
