"""Builds what a client runs on from its arguments, the same for every driver.

Owns the defaults that belong to no core (client ids, the partitioner, how old metadata may be) and
puts the cores of one client together. Opens nothing and reads no clock: a driver's engine moves
bytes and time for the `ClientCore` it is given. A wrong argument is refused here, before anything
runs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from raftmq_client.core.client import ClientCore, ClientOptions
from raftmq_client.core.consumer import ConsumerCore
from raftmq_client.core.partitioners import make_partitioner
from raftmq_client.core.producer import ProducerCore
from raftmq_client.core.security import SecurityChoice, read_security
from raftmq_client.core.transactions import TransactionCore
from raftmq_client.core.warm_up import MEMBER, PRODUCER, READER, TRANSACTIONAL
from raftmq_client.errors import UsageError
from raftmq_client.later import RESEND_TIMEOUT_MS
from raftmq_client.options import (
    ConsumerSettings,
    ProducerSettings,
    check_number,
    check_text,
    consumer_options,
    parse_bootstrap,
    producer_options,
)
from raftmq_client.serializers import read_serializer

METADATA_MAX_AGE_MS: Final = 300_000.0
CONSUMER_METADATA_MAX_AGE_MS: Final = 30_000.0
"""A consumer notices new topics within half a minute."""
IDLE_TOPIC_MS: Final = 300_000.0
"""How long a producer keeps asking for a topic that it sends nothing to (Kafka's
`metadata.max.idle.ms`)."""


@frozen
class ProducerParts:
    """A producer without its driver."""

    client: ClientCore
    core: ProducerCore
    encode_key: Callable[[Any], bytes] | None
    encode_value: Callable[[Any], bytes] | None


@frozen
class ConsumerParts:
    """A consumer without its driver."""

    client: ClientCore
    core: ConsumerCore
    topics: tuple[str, ...] | re.Pattern[str]


def build_client(
    bootstrap: str | Sequence[str],
    client_id: str,
    security: SecurityChoice = None,
    metadata_max_age_ms: float = METADATA_MAX_AGE_MS,
    *,
    may_create_topics: bool = True,
) -> ClientCore:
    """Connections and metadata, which is all that an admin has.

    Raises:
        UsageError: a value makes no sense.
    """
    check_text("client_id", client_id)
    options = ClientOptions(
        bootstrap=parse_bootstrap(bootstrap),
        client_id=client_id,
        security=read_security(security),
    )
    options.metadata.max_age_ms = metadata_max_age_ms
    options.metadata.allow_auto_create = may_create_topics
    return ClientCore(options)


def build_producer(
    bootstrap: str | Sequence[str], settings: ProducerSettings[Any, Any]
) -> ProducerParts:
    """All that a producer decides with.

    Raises:
        UsageError: there is no such setting, a value makes no sense, or two contradict.
    """
    rest: dict[str, Any] = _known("Producer", settings, ProducerSettings)
    client = build_client(
        bootstrap,
        rest.pop("client_id", "raftmq-producer"),
        rest.pop("security", None),
        rest.pop("metadata_max_age_ms", METADATA_MAX_AGE_MS),
    )
    client.options.metadata.idle_ms = IDLE_TOPIC_MS
    encode_key = read_serializer(rest.pop("key_serializer", None))
    encode_value = read_serializer(rest.pop("value_serializer", None))
    partitioner = make_partitioner(rest.pop("partitioner", "murmur2"), random.Random())
    options = producer_options(**rest)
    transactions = None
    if options.transactional_id is not None:
        transactions = TransactionCore(
            options.transactional_id,
            options.transaction_timeout_ms,
            client.metadata,
            client.feature_level,
            request_timeout_ms=options.request_timeout_ms,
            backoff_ms=options.backoff_ms,
            backoff_max_ms=options.backoff_max_ms,
        )
    core = ProducerCore(options, client.metadata, partitioner, client.backoff_until, transactions)
    client.cores.append(core)
    client.apis = PRODUCER if transactions is None else TRANSACTIONAL
    return ProducerParts(client, core, encode_key, encode_value)


def build_consumer(
    bootstrap: str | Sequence[str],
    topics: str | Iterable[str] | re.Pattern[str],
    settings: ConsumerSettings[Any, Any],
) -> ConsumerParts:
    """All that a consumer decides with.

    Raises:
        UsageError: there is no such setting, a value makes no sense, or two contradict.
    """
    rest: dict[str, Any] = _known("Consumer", settings, ConsumerSettings)
    client = build_client(
        bootstrap,
        rest.pop("client_id", "raftmq-consumer"),
        rest.pop("security", None),
        rest.pop("metadata_max_age_ms", CONSUMER_METADATA_MAX_AGE_MS),
        may_create_topics=False,
    )
    core = ConsumerCore(consumer_options(**rest), client)
    client.apis = READER if core.group is None else MEMBER
    wanted: tuple[str, ...] | re.Pattern[str]
    if isinstance(topics, re.Pattern):
        wanted = topics
    else:
        wanted = (topics,) if isinstance(topics, str) else tuple(topics)
    return ConsumerParts(client, core, wanted)


def build_resender(client: ClientCore) -> ProducerCore:
    """A producer beside a consumer, over its connections: of what it could not process. It makes no
    topics, since a topic made by itself would retry nothing."""
    options = producer_options(linger_ms=0, delivery_timeout_ms=RESEND_TIMEOUT_MS)
    partitioner = make_partitioner("murmur2", random.Random())
    core = ProducerCore(options, client.metadata, partitioner, client.backoff_until)
    client.cores.append(core)
    return core


def _known(of: str, settings: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The settings, checked one by one; a name that nobody knows is most often a slip."""
    for name in settings:
        if name not in kind.__annotations__:
            known = ", ".join(sorted(kind.__annotations__))
            raise UsageError(f"{of} has no setting {name!r}; it has {known}")
        check_number(name, settings[name])
        check_text(name, settings[name])
    return dict(settings)
