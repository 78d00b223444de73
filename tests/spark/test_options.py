"""Options: Kafka's names in any case; what is unknown or contradicts is refused by its name."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from raftmq.types import TopicPartition
from raftmq_client.core.security import OAuthBearer, Plain, Scram
from raftmq_spark.errors import OptionError
from raftmq_spark.options import COLUMNS, BoundKind, SourceOptions, read_options

SERVERS = {"kafka.bootstrap.servers": "127.0.0.1:9092"}
TLS = Path(__file__).parent.parent / "client" / "tls"


def read(**options: str) -> SourceOptions:
    return read_options({**SERVERS, **options})


def test_defaults_are_the_kafka_sources() -> None:
    options = read(subscribe="a, b,a")
    assert options.topics == ("a", "b")
    assert (options.starts.kind, options.ends.kind) == (BoundKind.EARLIEST, BoundKind.LATEST)
    assert options.fails_on_data_loss
    assert (options.partitions_min, options.records_max, options.group) == (None, None, None)
    assert options.columns == COLUMNS[:-1]


def test_names_are_of_any_case() -> None:
    options = read(
        SUBSCRIBEpattern="x.*",
        failondataloss="False",
        MINPARTITIONS="5",
        maxrecordsperpartition="10",
        IncludeHeaders="TRUE",
        StartingOffsets="EARLIEST",
    )
    assert options.pattern == "x.*"
    assert not options.fails_on_data_loss
    assert (options.partitions_min, options.records_max) == (5, 10)
    assert options.columns == COLUMNS


def test_json_offsets_and_assignment() -> None:
    options = read(
        assign='{"t": [0, 2]}',
        startingOffsets='{"t": {"0": 5, "2": -2}}',
        endingOffsetsByTimestamp='{"t": {"0": 1000, "2": 2000}}',
    )
    assert options.assigned == (TopicPartition("t", 0), TopicPartition("t", 2))
    assert options.starts.offsets == {TopicPartition("t", 0): 5, TopicPartition("t", 2): -2}
    assert options.ends.kind is BoundKind.TIMESTAMPS
    assert options.ends.falls_to_latest
    assert not read(subscribe="t", startingTimestamp="7").starts.falls_to_latest
    latest = read(subscribe="t", startingTimestamp="7", startingOffsetsByTimestampStrategy="latest")
    assert (latest.starts.timestamp, latest.starts.falls_to_latest) == (7, True)


def test_a_group_gives_the_starts_or_the_ends() -> None:
    assert read(subscribe="t", group="g").starts.kind is BoundKind.COMMITTED
    until = read(subscribe="t", group="g", endingOffsets="committed")
    assert (until.starts.kind, until.ends.kind) == (BoundKind.EARLIEST, BoundKind.COMMITTED)


def test_columns_in_the_order_given() -> None:
    assert read(subscribe="t", columns="OFFSET,value,timestamptype").columns == (
        "offset",
        "value",
        "timestampType",
    )
    assert read(subscribe="t", columns="headers").columns == ("headers",)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "exactly one of subscribe, subscribePattern, assign"),
        ({"subscribe": "t", "assign": '{"t": [0]}'}, "subscribe and assign"),
        ({"subscribe": " , "}, "'subscribe' names no topic"),
        ({"subscribePattern": "("}, "'subscribePattern' is no pattern"),
        ({"assign": "{}"}, "'assign' names no partition"),
        ({"assign": '{"t": 0}'}, "'assign': topic 't'"),
        ({"assign": '{"t": [-1]}'}, "no partition -1"),
        ({"assign": '{"t": [true]}'}, "no partition True"),
        ({"assign": "[]"}, "'assign' wants a JSON object"),
        ({"assign": "{"}, "'assign' is not JSON"),
        ({"subscribe": "t", "startingOfsets": "earliest"}, "unknown option 'startingofsets'"),
        ({"subscribe": "t", "path": "/tmp"}, "load\\(\\) takes no path"),
        ({"subscribe": "t", "maxOffsetsPerTrigger": "5"}, "is for streams"),
        ({"subscribe": "t", "startingOffsets": "latest"}, "'startingOffsets' cannot be 'latest'"),
        ({"subscribe": "t", "endingOffsets": "earliest"}, "'endingOffsets' cannot be 'earliest'"),
        ({"subscribe": "t", "startingOffsets": "first"}, "'startingOffsets' is earliest"),
        ({"subscribe": "t", "startingOffsets": '{"t": {"0": -1}}'}, "cannot be -1 \\(latest\\)"),
        ({"subscribe": "t", "endingOffsets": '{"t": {"0": -2}}'}, "cannot be -2 \\(earliest\\)"),
        ({"subscribe": "t", "endingOffsets": '{"t": {"0": -3}}'}, "t-0 cannot be -3"),
        ({"subscribe": "t", "endingOffsets": '{"t": {"0": "7"}}'}, "t-0 cannot be '7'"),
        ({"subscribe": "t", "endingOffsets": '{"t": {}}'}, "names no partition"),
        ({"subscribe": "t", "endingOffsets": '{"u": {"0": 7}}'}, "names u-0, which is not read"),
        ({"assign": '{"t": [0, 1]}', "startingOffsets": '{"t": {"0": 7}}'}, "nothing about t-1"),
        (
            {"subscribe": "t", "startingOffsets": "earliest", "startingTimestamp": "5"},
            "startingOffsets and startingTimestamp contradict",
        ),
        (
            {"subscribe": "t", "endingTimestamp": "5", "endingOffsetsByTimestamp": "{}"},
            "endingTimestamp and endingOffsetsByTimestamp contradict",
        ),
        ({"subscribe": "t", "startingTimestamp": "soon"}, "'startingTimestamp' is milliseconds"),
        (
            {"subscribe": "t", "startingOffsetsByTimestampStrategy": "latest"},
            "'startingOffsetsByTimestampStrategy' needs",
        ),
        (
            {
                "subscribe": "t",
                "startingTimestamp": "1",
                "startingOffsetsByTimestampStrategy": "late",
            },
            "is error or latest",
        ),
        ({"subscribe": "t", "startingOffsets": "committed"}, "need the option 'group'"),
        ({"subscribe": "t", "group": ""}, "'group' is empty"),
        (
            {"subscribe": "t", "group": "g", "startingOffsets": "earliest"},
            "'group' contradicts the starting offsets",
        ),
        ({"subscribe": "t", "failOnDataLoss": "no"}, "'failOnDataLoss' is true or false"),
        ({"subscribe": "t", "minPartitions": "0"}, "'minPartitions' is a whole number"),
        ({"subscribe": "t", "maxRecordsPerPartition": "1e3"}, "'maxRecordsPerPartition'"),
        ({"subscribe": "t", "columns": "key,values"}, "'values' is none of"),
        ({"subscribe": "t", "columns": "key,KEY"}, "names 'key' twice"),
        (
            {"subscribe": "t", "columns": "headers", "includeHeaders": "false"},
            "'columns' and 'includeHeaders' contradict",
        ),
        ({"subscribe": "t", "kafka.group.id": "g"}, "'kafka.group.id' has no meaning here"),
        ({"subscribe": "t", "kafka.isolation.level": "read_uncommitted"}, "always read_committed"),
        ({"subscribe": "t", "kafka.max.partition.fetch.bytes": "1"}, "from 65536 to"),
        ({"subscribe": "t", "kafka.security.protocol": "TLS"}, "'kafka.security.protocol' is one"),
        ({"subscribe": "t", "kafka.sasl.mechanism": "PLAIN"}, "contradicts"),
        ({"subscribe": "t", "kafka.ssl.truststore.type": "PEM"}, "contradicts"),
        ({"subscribe": "t", "kafka.security.protocol": "SASL_SSL"}, "not 'GSSAPI'"),
        (
            {
                "subscribe": "t",
                "kafka.security.protocol": "SASL_PLAINTEXT",
                "kafka.sasl.mechanism": "PLAIN",
            },
            "'kafka.sasl.jaas.config' wants",
        ),
        (
            {
                "subscribe": "t",
                "kafka.security.protocol": "SSL",
                "kafka.ssl.truststore.location": "/store.jks",
            },
            "'kafka.ssl.truststore.type' must be PEM",
        ),
        (
            {
                "subscribe": "t",
                "kafka.security.protocol": "SSL",
                "kafka.ssl.keystore.type": "PEM",
                "kafka.ssl.keystore.key": "k",
            },
            "go together",
        ),
    ],
)
def test_what_is_refused(options: dict[str, str], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        read_options({**SERVERS, **options})


def test_bootstrap_is_needed_and_read() -> None:
    with pytest.raises(OptionError, match=r"'kafka\.bootstrap\.servers' is missing"):
        read_options({"subscribe": "t"})
    with pytest.raises(OptionError, match=r"'kafka.bootstrap.servers': .*host:port"):
        read_options({"subscribe": "t", "kafka.bootstrap.servers": "host:port"})


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_security_is_mapped_and_kept_out_of_sight(mechanism: str) -> None:
    options = read_options(
        {
            **SERVERS,
            "subscribe": "t",
            "kafka.security.protocol": "sasl_ssl",
            "kafka.sasl.mechanism": mechanism,
            "kafka.sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule"
            " required username=\"alice\" password='s;e cret';",
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.truststore.location": str(TLS / "cert.pem"),
            "kafka.ssl.endpoint.identification.algorithm": "",
        }
    )
    assert "cret" not in repr(options)
    security = pickle.loads(pickle.dumps(options)).client.security()
    assert security.tls is not None
    assert not security.tls.check_hostname
    assert (security.sasl.username, security.sasl.password) == ("alice", "s;e cret")
    assert security.sasl.mechanism == mechanism
    assert isinstance(security.sasl, Plain if mechanism == "PLAIN" else Scram)


BEARER = {
    **SERVERS,
    "subscribe": "t",
    "kafka.security.protocol": "SASL_PLAINTEXT",
    "kafka.sasl.mechanism": "OAUTHBEARER",
}


def test_where_tokens_come_from_goes_to_executors_and_no_secret(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("s;e cret")
    said = {
        "token.endpoint.url": "https://issuer.example/token",
        "client.id": "orders",
        "client.secret_file": str(secret),
        "scope": "kafka",
        "extensions": "pool=x",
    }
    named = {f"kafka.sasl.oauthbearer.{name}": value for name, value in said.items()}
    options = read_options(BEARER | named)
    sent = pickle.dumps(options)
    assert b"s;e cret" not in sent
    one, two = (pickle.loads(sent).client.security().sasl for _ in range(2))
    assert isinstance(one, OAuthBearer)
    assert one is two, "the clients of a process share a token"
    other = BEARER | {"kafka.sasl.oauthbearer.token_file": str(secret)}
    assert read_options(other).client.security().sasl is not one


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({}, "'kafka.sasl.oauthbearer.token_file' or"),
        ({"kafka.sasl.oauthbearer.client.secret": "s"}, "has no meaning here"),
        ({"kafka.sasl.oauthbearer.token.provider": "m.f"}, "is module:function"),
        (
            {
                "kafka.sasl.oauthbearer.token.endpoint.url": "https://issuer.example/token",
                "kafka.sasl.jaas.config": 'x required clientId="a" clientSecret="s3cret";',
            },
            "'kafka.sasl.oauthbearer.client.secret_file'",
        ),
    ],
)
def test_tokens_that_are_refused(more: dict[str, str], named: str) -> None:
    with pytest.raises(OptionError, match=named) as caught:
        read_options(BEARER | more)
    assert "s3cret" not in str(caught.value)


def test_a_certificate_of_ones_own() -> None:
    options = read_options(
        {
            **SERVERS,
            "subscribe": "t",
            "kafka.security.protocol": "SSL",
            "kafka.ssl.keystore.type": "PEM",
            "kafka.ssl.keystore.certificate.chain": (TLS / "cert.pem").read_text(),
            "kafka.ssl.keystore.key": (TLS / "key.pem").read_text(),
        }
    )
    assert "PRIVATE" not in repr(options)
    security = options.client.security()
    assert security is not None
    assert security.sasl is None


def test_a_file_that_is_not_there_is_named() -> None:
    options = read_options(
        {
            **SERVERS,
            "subscribe": "t",
            "kafka.security.protocol": "SSL",
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.truststore.location": "/no/such.pem",
        }
    )
    with pytest.raises(OptionError, match=r"kafka\.ssl\.\*: /no/such\.pem: No such"):
        options.client.security()


def test_plain_text_needs_no_security() -> None:
    assert read(subscribe="t").client.security() is None
