"""The examples run as they stand, against real nodes and, with the marker `kafka`, Apache Kafka."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raftmq.errors import ErrorCode
from raftmq_client import Admin, BrokerError, Consumer, Producer
from tests.live.harness import Cluster, wait_until
from tests.tree import PYTHONPATH

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
# The export needs Spark and is run beside the other tests of exports.
TESTED_IN = (Path(__file__), Path(__file__).parent.parent / "export" / "test_example.py")
pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.fixture
def topic(bootstrap: str) -> Iterator[str]:
    """The examples' own topic, fresh."""
    with Admin(bootstrap) as admin:
        with contextlib.suppress(BrokerError):  # there is none
            admin.delete_topic("orders")
        wait_until(lambda: _made(admin), 60, "the topic can be made")
        yield "orders"
        admin.delete_topic("orders")


def _made(admin: Admin, name: str = "orders") -> bool:
    try:
        admin.create_topic(name, 3)
    except BrokerError as error:
        if error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
            raise
        return False  # it is being deleted
    return True


@contextlib.contextmanager
def example(name: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-u", str(EXAMPLES / name), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        try:
            yield run
        finally:
            run.kill()


def line(run: subprocess.Popen[str]) -> str:
    assert run.stdout is not None
    return run.stdout.readline()


def billed(run: subprocess.Popen[str]) -> str:
    """The next line about an order, among those that FastStream logs."""
    assert run.stdout is not None
    return next(text for text in run.stdout if text.startswith("billed"))


def test_every_example_is_tested() -> None:
    text = "".join(path.read_text() for path in TESTED_IN)
    names = [path.name for path in EXAMPLES.glob("*.py")]
    assert [name for name in names if f'"{name}"' not in text] == []
    assert len(names) >= 4


def test_the_quick_start(bootstrap: str, topic: str) -> None:
    with example("quick_start.py", bootstrap) as run:
        assert line(run).startswith("sent to partition ")
        assert line(run) == "read {'item': 7} of customer-1\n"
        assert run.wait(60) == 0


def test_the_service_answers_when_an_order_is_safe(bootstrap: str, topic: str) -> None:
    with example("service.py", bootstrap, "0") as run:
        host, port = line(run).split()[-1].split(":")
        with socket.create_connection((host, int(port)), 60) as sock:
            answers = sock.makefile("r")

            def ask(text: str) -> Any:
                sock.sendall(text.encode() + b"\n")
                return json.loads(answers.readline())

            first, second = ask('{"customer": "a"}'), ask('{"customer": "a"}')
            assert second == {"partition": first["partition"], "offset": first["offset"] + 1}
            assert ask("no order")["outcome"] == "failed"
            answers.close()
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 0


def test_the_fastapi_service_answers_when_an_order_is_safe(bootstrap: str, topic: str) -> None:
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(EXAMPLES), "--port", "0"]
    name = "fastapi_service.py"
    with subprocess.Popen(
        [*command, f"{name.removesuffix('.py')}:app"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAFTMQ": bootstrap},
    ) as run:
        try:
            assert run.stderr is not None
            said = itertools.takewhile(bool, iter(run.stderr.readline, ""))
            url = next(filter(None, (re.search(r"http://[\d.:]+", text) for text in said)))[0]
            first, second = (post(f"{url}/orders", {"customer": "a"}) for _ in range(2))
            assert second == {"partition": first["partition"], "offset": first["offset"] + 1}
            run.send_signal(signal.SIGTERM)
            rest = run.stderr.read()
            assert run.wait(60) in (0, -signal.SIGTERM), rest
            assert "Application shutdown complete" in rest
        finally:
            run.kill()


def post(url: str, body: object) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 201
        return json.load(answer)


def test_the_fixtures_for_pytest_asyncio_work(bootstrap: str, tmp_path: Path) -> None:
    """In a process of its own, without this suite's settings and plugins."""
    settings = tmp_path / "pytest.ini"
    settings.write_text(
        "[pytest]\nfilterwarnings = error\nasyncio_default_fixture_loop_scope = function\n"
    )
    alone = ["-c", str(settings), "-p", "no:trio", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *alone, str(EXAMPLES / "test_with_fixtures.py")],
        env={**os.environ, "RAFTMQ": bootstrap, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "2 passed" in run.stdout, run.stdout + run.stderr


def test_the_worker_ends_well_at_sigterm(bootstrap: str, topic: str) -> None:
    count = 200
    with Admin(bootstrap) as admin:
        with contextlib.suppress(BrokerError):  # of an earlier run
            admin.delete_group("billing")
        wait_until(lambda: _made(admin, "invoices"), 60, "the topic can be made")
    try:
        with Producer(bootstrap, value_serializer="json") as producer:
            for number in range(count):
                producer.send(topic, number)
        billed: list[Any] = []
        with Consumer(
            bootstrap, topics="invoices", reset="earliest", value_deserializer="json"
        ) as invoices:
            for _ in range(2):  # the second goes on where the first stopped
                with example("worker.py", bootstrap) as run:
                    assert line(run) == "works\n"
                    while len(billed) < count:
                        billed += [message.value["order"] for message in invoices.poll(0.5)]
                    run.send_signal(signal.SIGTERM)
                    assert run.stdout is not None
                    assert run.stdout.read().endswith("stopped; the next run goes on here\n")
                    assert run.wait(60) == 0
            assert invoices.poll(1.0) == []
        assert sorted(billed) == list(range(count))
    finally:
        with Admin(bootstrap) as admin:
            admin.delete_topic("invoices")


def test_faststream_retries_through_the_broker(shared_cluster: Cluster) -> None:
    """Its nack goes to the retry topic, its reject to the dead one; two runs, as after a crash."""
    bootstrap = shared_cluster.bootstrap
    names = ("orders", "orders.billing.retry", "orders.billing", "orders.billing.dead")
    with Admin(bootstrap) as admin:
        for group in ("billing", "billing.replay"):
            with contextlib.suppress(BrokerError):  # of an earlier run
                admin.delete_group(group)
        wait_until(lambda: _made(admin), 60, "the topic can be made")
    policy = ("--min", "100ms", "--max", "300ms", "--attempts", "3")
    made = shared_cluster.run("retry", "create", "billing", "--of", "orders", *policy)
    assert made.returncode == 0, made.stderr
    try:
        with example("faststream_worker.py", bootstrap) as run:
            with Producer(bootstrap, value_serializer="json") as producer:
                for customer in ("busy", "nobody", "calm"):
                    producer.send("orders", {"customer": customer}, partition=0)
                producer.send("orders", {"no": "customer"}, b"odd", partition=0)
            said = sorted(billed(run) for _ in range(2))
            assert said == ["billed busy at attempt 3\n", "billed calm at attempt 1\n"]
            dead: list[Any] = []
            with Consumer(bootstrap, topics=names[3], reset="earliest") as consumer:
                wait_until(lambda: dead.extend(consumer.poll(0.2)) or len(dead) == 2, 60, "dead")
            told = {message.key: dict(message.headers) for message in dead}
            assert told[b"odd"]["__dlq.errors.message"] == b"RejectMessage: Message was rejected"
            assert told[None]["__dlq.errors.message"] == b"ValueError: no such customer"
            assert told[None]["raftmq-attempt"] == b"3"
            assert told[None]["__dlq.errors.topic"] == b"orders"
            run.send_signal(signal.SIGTERM)
            assert run.wait(60) in (0, -signal.SIGTERM)
        with example("faststream_worker.py", bootstrap) as run:
            with Producer(bootstrap, value_serializer="json") as producer:
                producer.send("orders", {"customer": "last"}, partition=0)
            assert billed(run) == "billed last at attempt 1\n", "what was done is committed"
    finally:
        with Admin(bootstrap) as admin:
            for name in (names[1], names[0], *names[2:]):
                admin.delete_topic(name)


def test_no_record_is_lost_or_doubled_in_the_database(
    bootstrap: str, topic: str, tmp_path: Path
) -> None:
    count, draw = 3_000, random.Random(5)
    file = tmp_path / "orders.db"
    with Producer(bootstrap) as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number)
    for _ in range(2):
        with example("at_least_once.py", bootstrap, str(file)) as run:
            run.stdout.read(draw.randrange(1, 20))  # type: ignore[union-attr]  # it is piped
            time.sleep(draw.random() / 50)  # killed anywhere, not where it printed
            run.kill()
    with example("at_least_once.py", bootstrap, str(file)) as run:
        wait_until(lambda: len(rows(file)) >= count, 90, "every record is stored")
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 0
    assert sorted(int(value) for (value,) in rows(file)) == list(range(count))


def rows(file: Path) -> list[tuple[bytes]]:
    database = sqlite3.connect(file)
    try:
        return database.execute("SELECT value FROM orders").fetchall()
    finally:
        database.close()
