"""What a type checker knows of producers: keys and values by the serializers, settings by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
from typing import Any, assert_type
from raftmq_client import Producer, Typed
from raftmq_client import aio

class Order: ...
def encode(number: int) -> bytes: return b""

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
Producer(delivery="exactly_once")  # wrong
Producer(compression="rar")  # wrong
Producer(buffer="big")  # wrong
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
