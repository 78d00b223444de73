"""Topics as a set: created, deleted and listed by several clients.

Every name belongs to one client and is created once. So "it exists" in answer to its creation, and
"no such topic" in answer to its deletion, mean that an earlier try of the same request had done it.
A list told while faults are at work may be old; the last one, of a whole cluster, may not be.
"""

from __future__ import annotations

import random
from typing import Final

import confluent_kafka
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from jepsen_like.live.workloads.base import FAST_RETRIES, Around, Crowd

PREFIX: Final = "set-"
CLIENTS: Final = 2
PAUSE_S: Final = (1.0, 4.0)
KEPT_MAX: Final = 6
ANSWER_S: Final = 10.0
_DONE_BEFORE: Final = {
    "create_topic": confluent_kafka.KafkaError.TOPIC_ALREADY_EXISTS,
    "delete_topic": confluent_kafka.KafkaError.UNKNOWN_TOPIC_OR_PART,
}


class Topics(Crowd):
    """Clients that create, delete and list."""

    def __init__(self, around: Around) -> None:
        super().__init__(around, "topics", CLIENTS)

    def _run(self, number: int) -> None:
        around = self._around
        rng = random.Random(around.plan.seed * 33 + number)
        admin = new_admin(around.plan.bootstrap)
        process = around.process()
        kept: list[str] = []
        count = 0
        while not around.stop.wait(rng.uniform(*PAUSE_S)):
            if rng.random() < 0.3:
                certain = list_topics(around, process, admin, stale=True)
            elif kept and (len(kept) >= KEPT_MAX or rng.random() < 0.4):
                certain = self._change(process, admin, "delete_topic", kept.pop(0))
            else:
                count += 1
                kept.append(f"{PREFIX}{number}-{count}")
                certain = self._change(process, admin, "create_topic", kept[-1])
            if not certain:
                process = around.process()

    def _change(self, process: int, admin: AdminClient, f: str, topic: str) -> bool:
        recorder = self._around.recorder
        invoked = recorder.invoke(process, f, topics=[topic])
        times = {"operation_timeout": ANSWER_S / 2, "request_timeout": ANSWER_S}
        try:
            if f == "create_topic":
                admin.create_topics([NewTopic(topic, 1, 3)], **times)[topic].result(2 * ANSWER_S)
            else:
                admin.delete_topics([topic], **times)[topic].result(2 * ANSWER_S)
        except confluent_kafka.KafkaException as error:
            told: confluent_kafka.KafkaError = error.args[0]
            if told.code() != _DONE_BEFORE[f]:
                recorder.info(invoked, topics=[topic], error=str(told), code=told.code())
                return False
        recorder.ok(invoked, topics=[topic])
        return True


def new_admin(bootstrap: str) -> AdminClient:
    """A client for topics."""
    return AdminClient({**FAST_RETRIES, "bootstrap.servers": bootstrap})


def list_topics(around: Around, process: int, admin: AdminClient, *, stale: bool) -> bool:
    """List all topics; False when nobody answered."""
    invoked = around.recorder.invoke(process, "list_topics", stale=stale)
    try:
        told = admin.list_topics(timeout=ANSWER_S)
    except confluent_kafka.KafkaException as error:
        around.recorder.info(invoked, error=str(error))
        return False
    names = sorted(name for name in told.topics if name.startswith(PREFIX))
    around.recorder.ok(invoked, topics=names, stale=stale)
    return True
