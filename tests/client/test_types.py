"""What a type checker knows of producers and consumers.

Keys and values by the serializers, settings by name.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
from typing import Any, assert_type
import msgspec
from raftmq_client import Consumer, ConsumerRecord, Producer, Typed
from raftmq_client import aio

class Order: ...
def encode(number: int) -> bytes: return b""
def decode(data: bytes) -> int: return 0

typed = Producer(key_serializer=encode, value_serializer=Typed(Order))
assert_type(typed, Producer[int, Order])
typed.send("t", Order(), 5)
typed.send("t", None)
assert_type(Producer(), Producer[Any, Any])
assert_type(Producer(value_serializer="json"), Producer[Any, Any])
assert_type(aio.Producer(value_serializer=encode), aio.Producer[Any, int])
Producer(acks="all", delivery="at_least_once", compression="zstd", partitioner="crc32")
typed.send("t", 5)  # wrong
typed.send("t", Order(), "k")  # wrong
Producer(acks="most")  # wrong
Producer(delivery="once")  # wrong
Producer(delivery="exactly_once", transactional_id="x")
Producer(compression="rar")  # wrong
Producer(buffer="big")  # wrong

reader = Consumer(key_deserializer=decode, value_deserializer=Typed(Order), reset="earliest")
assert_type(reader, Consumer[int, Order])
assert_type(reader.poll(), list[ConsumerRecord[int, Order]])
for record in reader:
    assert_type(record.key, int | None)
    assert_type(record.value, Order | None)
    reader.commit(record)
assert_type(Consumer(), Consumer[Any, Any])
assert_type(Consumer(value_deserializer="json"), Consumer[Any, Any])
assert_type(Consumer(value_deserializer=msgspec.json.Decoder(Order)), Consumer[Any, Order])
async def read(plain: aio.Consumer) -> None:
    consumer = aio.Consumer(value_deserializer=decode)
    assert_type(consumer, aio.Consumer[Any, int])
    assert_type(await consumer.poll(), list[ConsumerRecord[Any, int]])
    async with consumer as entered:
        async for message in entered:
            assert_type(message, ConsumerRecord[Any, int])
            assert_type(message.value, int | None)
            message.value + 1  # wrong
    for of_any in await plain.poll():
        of_any.value.decode()  # wrong
def handle(order: ConsumerRecord[str, Order]) -> None: ...
handle(record)  # wrong
Consumer(value_deserializer="jsn")  # wrong
Consumer(value_deserializer=5)  # wrong
Consumer(value_deserializer=encode)  # wrong
Consumer(reset="first")  # wrong
"""


@pytest.mark.slow
def test_a_type_checker_finds_what_is_wrong_and_nothing_else(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = ["--follow-imports=silent", "--config-file", str(ROOT / "pyproject.toml")]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    said = {int(line.split(":")[1]) for line in run.stdout.splitlines() if ": error:" in line}
    wrong = {n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert said == wrong, run.stdout + run.stderr
