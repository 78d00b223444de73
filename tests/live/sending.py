"""A stock client that sends numbers one after the other, and tells what came of each.

It is a program of its own: a client that fails leaves sockets and threads behind. It sends until
its input ends, and writes a line of JSON for each number that was acknowledged or given up, and for
each error that the client itself tells of.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.live.harness import wait_until

ROOT = Path(__file__).parents[2]
GIVE_UP_MS = 5_000
PACE_S = 0.01
CLIENTS = ("confluent-kafka", "kafka-python", "aiokafka")


class Sender:
    """One such program, and what it told so far."""

    def __init__(self, client: str, bootstrap: str, topic: str, user: str, password: str) -> None:
        conf = {"bootstrap": bootstrap, "topic": topic, "user": user, "password": password}
        words = [sys.executable, "-W", "ignore", "-m", __name__, client]
        pipe = subprocess.PIPE
        self._program = subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        assert self._program.stdin is not None
        self._program.stdin.write(json.dumps(conf) + "\n")
        self._program.stdin.flush()
        self.acked: dict[int, int] = {}
        """Offsets by number."""
        self.given_up: list[str] = []
        """Why, of each number that was not acknowledged."""
        self.told: list[str] = []
        """Errors of the client that belong to no number."""
        self._reading = threading.Thread(target=self._read)

    def __enter__(self) -> Sender:
        self._reading.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self._program.kill()
            self._reading.join()

    def stop(self) -> None:
        """Send no more; return once the outcome of all is known. A client that never came in is not
        waited for."""
        if not self.acked:
            self._program.kill()
        assert self._program.stdin is not None
        self._program.stdin.close()
        try:
            self._program.wait(60)
        finally:
            self._program.kill()
            self._reading.join()

    def _read(self) -> None:
        assert self._program.stdout is not None
        with self._program.stdout as output:
            for line in output:
                row = json.loads(line)
                if "offset" in row:
                    self.acked[row["number"]] = row["offset"]
                elif "number" in row:
                    self.given_up.append(row["why"])
                else:
                    self.told.append(row["why"])

    @property
    def errors(self) -> list[str]:
        """All that went wrong."""
        return [*self.given_up, *self.told]

    def wait_acked(self, more: int) -> None:
        """Return once so many more numbers were acknowledged."""
        goal = len(self.acked) + more
        wait_until(lambda: len(self.acked) >= goal, 60, f"{more} more; {self.errors[-3:]}")

    def wait_given_up(self, more: int) -> None:
        """Return once so many more numbers were given up."""
        goal = len(self.given_up) + more
        wait_until(lambda: len(self.given_up) >= goal, 90, f"{more} more; {self.errors[-3:]}")

    def wait_told(self, text: str) -> None:
        """Return once the client says that."""
        wait_until(lambda: any(text in one for one in self.errors), 60, f"{text} in {self.errors}")


# ---- the program ----

_writing = threading.Lock()
_is_over = threading.Event()


def _tell(**row: object) -> None:
    with _writing:
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


class _Log(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Tell what the client logs, but what it says of listeners without TLS."""
        if "in the clear" not in record.getMessage():
            _tell(why=f"{record.name}: {record.getMessage()}")


def _send_on(send: Callable[[bytes], int]) -> None:
    number = 0
    while not _is_over.is_set():
        try:
            _tell(number=number, offset=send(b"%d" % number))
        except Exception as error:  # noqa: BLE001 - whatever the client raises is told
            _tell(number=number, why=f"{type(error).__name__}: {error}")
        number += 1
        time.sleep(PACE_S)
    # What a client that cannot come in any more still tries at its end is not waited for.
    os._exit(0)


def _confluent(conf: dict[str, Any]) -> None:
    import confluent_kafka

    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": conf["bootstrap"],
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": conf["user"],
            "sasl.password": conf["password"],
            "acks": "all",
            "message.timeout.ms": GIVE_UP_MS,
            "error_cb": lambda error: _tell(why=str(error)),
            "log_level": 0,
        }
    )

    def send(value: bytes) -> int:
        told: list[Any] = []
        producer.produce(conf["topic"], value, on_delivery=lambda *row: told.append(row))
        while not told:
            producer.poll(0.1)
        ((error, message),) = told
        if error is not None:
            raise confluent_kafka.KafkaException(error)
        return int(message.offset())

    _send_on(send)


def _kafka_python(conf: dict[str, Any]) -> None:
    import kafka

    producer = kafka.KafkaProducer(
        bootstrap_servers=conf["bootstrap"],
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_plain_username=conf["user"],
        sasl_plain_password=conf["password"],
        acks="all",
        linger_ms=0,
        max_block_ms=GIVE_UP_MS,
        request_timeout_ms=GIVE_UP_MS - 1_000,
        delivery_timeout_ms=GIVE_UP_MS,
        bootstrap_timeout_ms=60_000,
    )
    _send_on(lambda value: int(producer.send(conf["topic"], value).get(20).offset))


def _aiokafka(conf: dict[str, Any]) -> None:
    from aiokafka import AIOKafkaProducer

    async def run() -> None:
        producer = AIOKafkaProducer(
            bootstrap_servers=conf["bootstrap"],
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="SCRAM-SHA-512",
            sasl_plain_username=conf["user"],
            sasl_plain_password=conf["password"],
            acks="all",
            request_timeout_ms=GIVE_UP_MS,
        )
        await producer.start()
        loop = asyncio.get_running_loop()

        def send(value: bytes) -> int:
            sending: Awaitable[Any] = producer.send_and_wait(conf["topic"], value)
            return int(asyncio.run_coroutine_threadsafe(sending, loop).result(20).offset)  # type: ignore[arg-type]

        await asyncio.to_thread(_send_on, send)

    asyncio.run(run())


_RUN = {"confluent-kafka": _confluent, "kafka-python": _kafka_python, "aiokafka": _aiokafka}


def main() -> None:
    """Run one client until the input ends."""
    logging.getLogger().addHandler(_Log(logging.WARNING))
    conf = json.loads(sys.stdin.readline())

    def await_end() -> None:
        sys.stdin.read()
        _is_over.set()

    threading.Thread(target=await_end, daemon=True).start()
    _RUN[sys.argv[1]](conf)


if __name__ == "__main__":
    main()
