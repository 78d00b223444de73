"""What Apache Kafka answers to each kind of batch, held against what was recorded.

`pytest tests/poison -m kafka` compares; with RAFTMQ_RECORD=1 it writes `kafka.json` anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

import pytest

from tests.live.kafka import KafkaCluster
from tests.poison.asking import Asker
from tests.poison.kinds import KINDS, TOPICS

RECORDED: Final = Path(__file__).with_name("kafka.json")


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kafka_answers_as_recorded() -> None:
    found: dict[str, list[object]] = {}
    with KafkaCluster() as kafka:
        asker = Asker(kafka.bootstrap)
        try:
            for topic, configs in TOPICS.items():
                asker.create(topic, configs)
            for kind in KINDS.values():
                answer = asker.ask(kind, kind.topic)
                found[kind.name] = [answer.code, list(answer.records)]
        finally:
            asker.close()
    if os.environ.get("RAFTMQ_RECORD"):
        lines = [f"{json.dumps(name)}: {json.dumps(found[name])}" for name in found]
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert found == json.loads(RECORDED.read_text())
