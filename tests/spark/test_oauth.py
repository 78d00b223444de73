"""Reading with tokens of another service: each process gets its own, and none stands in a plan."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jepsen_like.live.cluster import free_ports
from raftmq_client import AuthenticationError
from raftmq_client.blocking import Admin
from raftmq_spark.errors import OptionError
from raftmq_spark.options import SourceOptions, read_options
from raftmq_spark.plan import make_plan
from tests.live.harness import Cluster
from tests.sasl.tokens import AUDIENCE, ISSUER, Issuer
from tests.spark.conftest import extra, produce

pytestmark = [pytest.mark.spark, pytest.mark.live, pytest.mark.slow]
extra("pyarrow")

from raftmq_spark.reader import read_range  # noqa: E402

RECORDS = 2_000
PROVIDER = "tests.spark.conftest:told_token"


class Served:
    """A node that takes tokens alone at its second listener, and a topic there."""

    def __init__(self, cluster: Cluster, address: str, issuer: Issuer) -> None:
        self.cluster = cluster
        self.address = address
        self.issuer = issuer

    def token(self, **said: Any) -> str:
        return self.issuer.token(**{"now_s": time.time(), **said})

    def options(self, **more: str) -> dict[str, str]:
        bearer = {f"kafka.sasl.oauthbearer.{name}": value for name, value in more.items()}
        return {
            "kafka.bootstrap.servers": self.address,
            "kafka.request.timeout.ms": "20000",
            "kafka.security.protocol": "SASL_PLAINTEXT",
            "kafka.sasl.mechanism": "oauthbearer",
            "subscribe": "t",
            "minPartitions": "4",
            **bearer,
        }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("oauth")
    issuer = Issuer()
    (folder / "jwks.json").write_bytes(issuer.jwks())
    settings = {
        "sasl_mechanisms": "OAUTHBEARER",
        "sasl_plain_without_tls": True,
        "oauth_issuer": ISSUER,
        "oauth_audience": AUDIENCE,
        "oauth_clock_skew_s": 0,
        "oauth_jwks_file": str(folder / "jwks.json"),
    }
    cluster = Cluster(folder, nodes=1, settings=settings)
    (port,) = free_ports(1, "127.0.0.1")
    listeners = {"SASL": {"address": f"127.0.0.1:{port}", "protocol": "SASL_PLAINTEXT"}}
    cluster[1].environment["RAFTMQ_LISTENERS"] = json.dumps(listeners)
    with cluster:
        with Admin(cluster.bootstrap, timeout_ms=60_000) as admin:
            admin.create_topic("t", 1, 1)
        produce(cluster.bootstrap, "t", RECORDS, size=1_000)
        yield Served(cluster, f"127.0.0.1:{port}", issuer)


@pytest.fixture
def ways(token_file: Path, served: Served) -> dict[str, dict[str, str]]:
    """Options that say where tokens come from; all of them come from one file."""
    token_file.write_text(served.token())
    return {
        "file": served.options(token_file=str(token_file)),
        "url": served.options(**{"token.endpoint.url": token_file.as_uri()}),
        "provider": served.options(**{"token.provider": PROVIDER}),
    }


def offsets(options: SourceOptions) -> list[int]:
    """Those that are read without Spark, by settings that were sent to another process."""
    parts = make_plan(options).parts()
    client = pickle.loads(pickle.dumps(options.client))
    batches = (batch for part in parts for batch in read_range(client, part, columns=("offset",)))
    return [row["offset"] for batch in batches for row in batch.to_pylist()]


def fresh(way: dict[str, str], name: str) -> dict[str, str]:
    """The same way, for which this process has no token yet."""
    return way | {"kafka.sasl.oauthbearer.extensions": f"of={name}"}


def test_tokens_are_kept_while_they_are_good(served: Served, token_file: Path) -> None:
    """A process that reads many ranges asks once for all of them."""
    options = read_options(fresh(served.options(token_file=str(token_file)), "kept"))
    token_file.write_text(served.token())
    assert offsets(options) == list(range(RECORDS))
    token_file.write_text("none")
    assert offsets(options) == list(range(RECORDS))


@pytest.mark.parametrize("way", ["file", "url", "provider"])
def test_a_range_is_read_with_a_token(
    served: Served, ways: dict[str, dict[str, str]], token_file: Path, way: str
) -> None:
    options = read_options(ways[way])
    told = token_file.read_text()
    assert told.encode() not in pickle.dumps(options)
    assert offsets(options) == list(range(RECORDS))
    assert told.encode() not in pickle.dumps(options), "nor afterwards"


@pytest.mark.parametrize("way", ["file", "provider"])
def test_a_token_that_is_no_good_is_told_without_it(
    served: Served, ways: dict[str, dict[str, str]], token_file: Path, way: str
) -> None:
    options = read_options(fresh(ways[way], "bad"))
    token_file.write_text(served.token(lives_s=-60))
    with pytest.raises(AuthenticationError, match="OAUTHBEARER") as caught:
        offsets(options)
    assert token_file.read_text() not in repr(caught.value)
    token_file.write_text(served.token())
    assert offsets(options) == list(range(RECORDS)), "it is not kept"


def test_a_read_outlives_its_token(served: Served, token_file: Path) -> None:
    """The node ends connections whose tokens are over: the reader shows another one before."""
    lives_s = 4.0
    token_file.write_text(served.token(lives_s=lives_s))
    options = read_options(
        served.options(token_file=str(token_file), extensions="of=long")
        | {"kafka.max.partition.fetch.bytes": "65536"}
    )
    (part,) = make_plan(options).parts()
    began = time.monotonic()
    found: list[int] = []
    for batch in read_range(options.client, part, columns=("offset",), rows_min=64):
        found += [row["offset"] for row in batch.to_pylist()]
        token_file.write_text(served.token(lives_s=lives_s))
        time.sleep(0.25)  # a consumer that is slow
    assert time.monotonic() - began > lives_s
    assert found == list(range(RECORDS))


def test_what_is_not_there_is_told_at_once(served: Served, token_file: Path) -> None:
    for provider in ("no.such.module:token", "tests.spark.conftest:no_such"):
        options = read_options(served.options(**{"token.provider": provider}))
        with pytest.raises(OptionError, match=r"token\.provider: " + provider):
            offsets(options)
    options = read_options(served.options(token_file="/no/such/token"))
    with pytest.raises(AuthenticationError, match="/no/such/token: No such file"):
        offsets(options)


@pytest.mark.parametrize("way", ["file", "provider"])
def test_executors_get_their_own(
    spark: Any, served: Served, ways: dict[str, dict[str, str]], token_file: Path, way: str
) -> None:
    frame = spark.read.format("raftmq").options(**ways[way]).load()
    assert [row.offset for row in frame.orderBy("offset").collect()] == list(range(RECORDS))
    shown = frame._jdf.queryExecution().toString()
    assert "raftmq" in shown.lower()
    assert token_file.read_text() not in shown
    token_file.write_text(served.token(lives_s=-60))
    bad = spark.read.format("raftmq").options(**fresh(ways[way], "executors")).load()
    with pytest.raises(Exception, match="OAUTHBEARER") as caught:
        bad.count()
    assert token_file.read_text() not in str(caught.value)


@pytest.fixture
def token_file(told_token_file: Path) -> Iterator[Path]:
    told_token_file.touch(mode=0o600)
    yield told_token_file
    told_token_file.unlink()
