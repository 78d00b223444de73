"""Kinds of config values: how a text is checked and what a client is told about it.

Owns parsing and bounds, with Kafka's rules (ConfigDef). Never knows a key by name. A checked value
is kept as the client wrote it, trimmed: effective values are texts everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

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


def check_all(keys: Sequence[ConfigKey]) -> dict[str, ConfigKey]:
    """Index keys by name; each appears once and its default is valid."""
    index: dict[str, ConfigKey] = {}
    for key in keys:
        assert key.name not in index, key.name
        if key.default is not None:
            key.check(key.name, key.default)
        index[key.name] = key
    return index
