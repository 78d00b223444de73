"""The facts of the comparison page, read out of the clients that are installed."""

from __future__ import annotations

import ctypes
import inspect
import warnings
from pathlib import Path
from typing import Any

import aiokafka
import aiokafka.errors
import confluent_kafka
import pytest

from raftmq_client.options import consumer_options, producer_options

PAGE = (Path(__file__).parent.parent.parent / "docs" / "client-comparison.md").read_text()


def librdkafka_defaults() -> dict[str, str]:
    """What the library itself says of its settings; the Python package has no call for it."""
    folder = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    found = list(folder.glob("librdkafka*.so*"))
    if not found:
        pytest.skip("this confluent-kafka has its library elsewhere")
    library = ctypes.CDLL(str(found[0]))
    defaults: dict[str, str] = {}
    for kind in ("rd_kafka_conf", "rd_kafka_topic_conf"):
        make, dump = library[f"{kind}_new"], library[f"{kind}_dump"]
        make.restype = ctypes.c_void_p
        dump.restype = ctypes.POINTER(ctypes.c_char_p)
        dump.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
        count = ctypes.c_size_t()
        items = dump(make(), ctypes.byref(count))
        for number in range(0, count.value, 2):
            name, value = items[number], items[number + 1]
            defaults[(name or b"").decode()] = (value or b"").decode()
    return defaults


def test_the_page_names_the_versions_it_was_checked_with() -> None:
    assert f"aiokafka\n{aiokafka.__version__}" in PAGE
    assert f"confluent-kafka {confluent_kafka.__version__}" in PAGE
    assert f"librdkafka {confluent_kafka.libversion()[0]}" in PAGE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request.required.acks", "-1"),
        ("enable.idempotence", "false"),
        ("queue.buffering.max.ms", "5"),
        ("queue.buffering.max.kbytes", "1048576"),
        ("queue.buffering.max.messages", "100000"),
        ("message.timeout.ms", "300000"),
        ("partitioner", "consistent_random"),
        ("sticky.partitioning.linger.ms", "10"),
        ("isolation.level", "read_committed"),
        ("check.crcs", "false"),
        ("queued.max.messages.kbytes", "65536"),
        ("enable.auto.offset.store", "true"),
    ],
)
def test_librdkafka_is_as_the_page_says(name: str, value: str) -> None:
    assert librdkafka_defaults()[name] == value


def defaults_of(kind: type) -> dict[str, Any]:
    return {name: item.default for name, item in inspect.signature(kind).parameters.items()}


def test_aiokafka_is_as_the_page_says() -> None:
    producer = defaults_of(aiokafka.AIOKafkaProducer)
    expected = {
        "enable_idempotence": False,
        "linger_ms": 0,
        "max_batch_size": 16 * 1024,
        "request_timeout_ms": 40_000,
    }
    assert {name: producer[name] for name in expected} == expected
    assert "defaults to ``acks=1``" in (aiokafka.AIOKafkaProducer.__doc__ or "")
    consumer = defaults_of(aiokafka.AIOKafkaConsumer)
    assert (consumer["isolation_level"], consumer["check_crcs"]) == ("read_uncommitted", True)
    assert aiokafka.errors.for_code(9_999) is aiokafka.errors.UnknownError
    assert not (Path(aiokafka.__file__).parent / "py.typed").exists()


def test_confluent_kafka_keeps_codes_and_refuses_when_full() -> None:
    assert confluent_kafka.KafkaError(9_999).code() == 9_999
    with warnings.catch_warnings():
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": "127.0.0.1:1", "queue.buffering.max.messages": 1, "log_level": 0}
        )
        producer.produce("t", b"v")
        with pytest.raises(BufferError):
            producer.produce("t", b"v")
        producer.purge()
        producer.flush(5)


def test_we_are_as_the_page_says() -> None:
    ours = producer_options()
    assert (ours.acks, ours.is_idempotent, ours.linger_ms) == (-1, True, 5)
    assert (ours.buffer_memory, ours.delivery_timeout_ms) == (32 << 20, 120_000)
    fetching = consumer_options().fetching
    assert (fetching.buffer_bytes_max, fetching.partition_buffer_bytes) == (64 << 20, 4 << 20)
    assert "32 MiB" in PAGE
    assert "64 MiB in all, 4 MiB a partition" in PAGE
