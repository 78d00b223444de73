"""Real nodes with their metadata on pysyncobj: what loses nothing works there too."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import Consumer

from tests.live.harness import Cluster
from tests.live.load import Load, create_topic, leaders

pytestmark = [pytest.mark.live, pytest.mark.slow]


def test_topics_records_and_groups(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3, settings={"metadata_engine": "pysyncobj"}) as cluster:
        create_topic(cluster.bootstrap, "t", 3)
        assert set(leaders(cluster.bootstrap, "t")) == {0, 1, 2}
        with Load(cluster.bootstrap, "t", 3) as load:
            load.wait_for(300)
        load.reckon().check()
        consumer = Consumer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "group.id": "g",
                "auto.offset.reset": "earliest",
            }
        )
        try:
            consumer.subscribe(["t"])
            assert len(consumer.consume(100, timeout=20)) == 100
            consumer.commit(asynchronous=False)
        finally:
            consumer.close()
        assert cluster[1].get("/status")["metadata"]["engine"] == "pysyncobj"
