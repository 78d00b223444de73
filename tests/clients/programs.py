"""Stock clients of other languages: small programs with one command line, made where they run.

    PROGRAM consume BOOTSTRAP TOPIC PARTITION OFFSET END FETCH_BYTES
        prints a JSON line {"offset", "key", "value"} for each record from OFFSET on and ends after
        the first whose offset is END - 1 or above; FETCH_BYTES bounds what it asks for at a time
    PROGRAM produce BOOTSTRAP TOPIC PARTITION
        reads lines {"key", "value"}, sends each with one producer for all of them, and answers
        {"offset"} or {"error"}, a line for a line
    PROGRAM group BOOTSTRAP TOPIC GROUP COUNT
        is a member of a group without others, goes on where that committed (at first from the
        beginning), prints {"partition", "offset", "key", "value"} of COUNT records, commits them
        and leaves
    PROGRAM time BOOTSTRAP TOPIC PARTITION TIMESTAMP
        prints {"offset"} of the first record whose time is not before that (in ms)
    PROGRAM load BOOTSTRAP TOPIC METADATA_MS TIMEOUT_MS   (java, franz, sarama)
        reads such lines and sends each by its key without waiting, with one producer that asks for
        metadata at that age; tells {"value", "partition", "offset"} of each, with an "error" if it
        failed, as it hears of it; ends once its input has and it told of all

All end with code 1 and a word on stderr when they cannot go on. The package managers of the
languages fetch the clients, at versions that Debian's own Go (1.19) and Node.js (18) take; but
franz-go's transactions (`franz/`) are of its newest version, which needs the newest Go.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest

from tests.live.harness import need

HERE = Path(__file__).parent
LIVE = HERE.parent / "live"
NAMES = ("java", "franz", "sarama", "kafka-go", "kafkajs")
FETCH_TIMEOUT_S = 600
CONSUME_TIMEOUT_S = 60


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two test processes must not fetch the same things at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(*words: str, folder: Path) -> None:
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"


def kafka_command() -> list[str]:
    """`java` with Kafka's own classes; the words of a program of theirs are to follow."""
    folder = _cache() / "raftmq-kafka"
    libraries = Path(os.environ.get("KAFKA_LIBS") or folder / "libs")
    with _alone(folder):
        if not any(libraries.glob("kafka-clients-*.jar")):
            shutil.copy(LIVE / "kafka-pom.xml", folder / "pom.xml")
            goal = ("dependency:copy-dependencies", "-DoutputDirectory=libs")
            _make(need("mvn"), "-q", "-B", *goal, folder=folder)
    quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
    return [need("java"), quiet, "-cp", f"{libraries}/*"]


def _java() -> tuple[list[str], dict[str, str]]:
    need("javac")
    return [*kafka_command(), str(HERE / "java" / "Client.java"), "java"], {}


GO_OF_FRANZ: Final = [1, 26]
"""Distributions have older ones: these tests are left out there."""


def transactions_program(name: str) -> list[str]:
    """The program of `transactional.py` for "java" or "franz"; skips where a tool is missing."""
    if name == "java":
        need("javac")
        return [*kafka_command(), str(HERE / "java" / "Transactions.java")]
    folder = _cache() / "raftmq-clients"
    with _alone(folder):
        made = str(folder / "franz-transactions")
        go = need("go")
        told = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False)
        numbers = [int(part) for part in re.findall(r"\d+", told.stdout)[:2]]
        if numbers < GO_OF_FRANZ:
            pytest.skip(f"this franz-go wants Go 1.26, here is {told.stdout.strip()}")
        _make(go, "build", "-o", made, ".", folder=HERE / "franz")
    return [made]


def _go(name: str) -> tuple[list[str], dict[str, str]]:
    folder = _cache() / "raftmq-clients"
    with _alone(folder):
        _make(need("go"), "build", "-o", str(folder / "go-clients"), ".", folder=HERE / "go")
    return [str(folder / "go-clients"), name], {}


def _node() -> tuple[list[str], dict[str, str]]:
    folder = _cache() / "raftmq-clients" / "node"
    wanted = (HERE / "node" / "package.json").read_bytes()
    with _alone(folder):
        mark = folder / "package.json"
        if not mark.exists() or mark.read_bytes() != wanted or not (folder / "done").exists():
            (folder / "done").unlink(missing_ok=True)
            mark.write_bytes(wanted)
            options = ("--no-package-lock", "--no-audit", "--no-fund")
            _make(need("npm"), "install", *options, folder=folder)
            (folder / "done").touch()
    modules = {"NODE_PATH": str(folder / "node_modules"), "KAFKAJS_NO_PARTITIONER_WARNING": "1"}
    return [need("node"), str(HERE / "node" / "client.js"), "kafkajs"], modules


class Program:
    """One client of another language, ready to run."""

    def __init__(self, name: str) -> None:
        """Fetch and build what it needs; skip the test, in CI fail it, where a tool is missing."""
        self.name = name
        made = {"java": _java, "kafkajs": _node}.get(name) or (lambda: _go(name))
        self._words, self._variables = made()

    @property
    def environment(self) -> dict[str, str]:
        """What it needs of its environment."""
        return os.environ | self._variables

    def consume(
        self,
        bootstrap: str,
        topic: str,
        partition: int,
        offset: int,
        end: int,
        *,
        fetch_bytes: int = 1 << 20,
        timeout_s: float = CONSUME_TIMEOUT_S,
    ) -> list[dict[str, Any]]:
        """Its records from `offset` up to that at `end - 1`, each with offset, key and value."""
        words = (bootstrap, topic, *map(str, (partition, offset, end, fetch_bytes)))
        return self._run("consume", *words, timeout_s=timeout_s)

    def group(self, bootstrap: str, topic: str, group: str, count: int) -> list[dict[str, Any]]:
        """The next `count` records for a group, each with partition, offset, key and value."""
        return self._run("group", bootstrap, topic, group, str(count))

    def offset_at(self, bootstrap: str, topic: str, partition: int, timestamp: int) -> int:
        """The offset of the first record that is not older."""
        (told,) = self._run("time", bootstrap, topic, str(partition), str(timestamp))
        return int(told["offset"])

    def _run(self, *words: str, timeout_s: float = CONSUME_TIMEOUT_S) -> list[dict[str, Any]]:
        try:
            done = subprocess.run(
                [*self._words, *words],
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{self.name} stands still: {_tail(late.stdout)}") from late
        assert done.returncode == 0, f"{self.name}: {done.stderr[-2000:]}"
        return [json.loads(line) for line in done.stdout.splitlines()]

    def produce(self, bootstrap: str, topic: str, partition: int) -> Producing:
        """A producer that lives as long as the context."""
        words = [*self._words, "produce", bootstrap, topic, str(partition)]
        return Producing(words, self.environment)

    def load_words(
        self, bootstrap: str, topic: str, metadata_ms: int, timeout_ms: int
    ) -> list[str]:
        """What to run for a load."""
        return [*self._words, "load", bootstrap, topic, str(metadata_ms), str(timeout_ms)]


class Producing:
    """One producer of another language: a record in, what became of it out."""

    def __init__(self, words: Sequence[str], environment: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            words, env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._process.kill()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.close()
        code = self._process.wait(CONSUME_TIMEOUT_S)
        stdout.close()
        assert kind is not None or code == 0, f"it ended with {code}"

    def send(self, value: str | None, key: str | None = None) -> dict[str, Any]:
        """{"offset": N}, or {"error": "..."}."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"key": key, "value": value}) + "\n")
        stdin.flush()
        line = stdout.readline()
        assert line, "it ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


def _tail(output: bytes | str | None) -> str:
    told = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return "nothing read" if not told else f"after {told.splitlines()[-1]}"
