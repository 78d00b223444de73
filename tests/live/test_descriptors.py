"""Few descriptors: what they have no room for is refused, and what was let in works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.live.harness import Cluster

LIMIT = 400


def test_what_descriptors_have_no_room_for_is_refused(tmp_path: Path) -> None:
    """All 30 topics were made; sixty partitions could be written, no client could connect any more
    and nothing could be deleted."""
    cluster = Cluster(tmp_path, nodes=1)
    node = cluster.nodes[1]
    config = tmp_path / "node-1.toml"
    config.write_text(node.config_text())
    words = [str(Path(sys.executable).with_name("raftmq")), "start", "--config", str(config)]
    with node.log_path.open("wb") as log:
        node.process = subprocess.Popen(  # type: ignore[assignment]
            ["/bin/sh", "-c", f'ulimit -n {LIMIT}; exec "$@"', "sh", *words],
            stdout=log,
            stderr=log,
        )
    try:
        node.wait_ready()
        admin = AdminClient({"bootstrap.servers": node.address})
        made: list[str] = []
        refusals: set[int] = set()
        for number in range(30):
            name = f"topic-{number}"
            future = admin.create_topics([NewTopic(name, 10, 1)], operation_timeout=10)[name]
            try:
                future.result(30)
                made.append(name)
            except KafkaException as error:
                refusals.add(error.args[0].code())
        assert refusals == {KafkaError.POLICY_VIOLATION}
        assert made == [f"topic-{number}" for number in range(7)]
        failures: list[object] = []
        producer = Producer({"bootstrap.servers": node.address, "message.timeout.ms": 30_000})
        for name in made:
            for partition in range(10):
                producer.produce(
                    name,
                    b"v",
                    partition=partition,
                    on_delivery=lambda error, _message: error and failures.append(error),
                )
        assert producer.flush(40) == 0
        assert failures == [], "all that was let in can be written"
        later = AdminClient({"bootstrap.servers": node.address})
        later.delete_topics([made[0]], operation_timeout=10)[made[0]].result(30)
        again = later.create_topics([NewTopic("later", 10, 1)], operation_timeout=10)["later"]
        again.result(30)
    finally:
        cluster.stop()
