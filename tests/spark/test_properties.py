"""Security settings in a file of Kafka's client properties."""

from __future__ import annotations

from pathlib import Path

import pytest

from raftmq_spark.errors import OptionError
from raftmq_spark.properties import read_security_file
from raftmq_spark.security import read_client_settings

JAAS = (
    'org.apache.kafka.common.security.scram.ScramLoginModule required username="u" password="p=1";'
)


def test_it_is_read_as_kafkas_tools_read_it(tmp_path: Path) -> None:
    path = tmp_path / "client.properties"
    path.write_text(
        "# who we are\n"
        "! and so on\n"
        "\n"
        "  security.protocol = SASL_SSL\n"
        "sasl.mechanism:SCRAM-SHA-256\n"
        "sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule \\\n"
        '   required username="u" \\\n'
        '   password="p=1";\n'
        "ssl.truststore.type PEM\n"
        "ssl.truststore.certificates=-----BEGIN\\n\\u0041\\\\B\n"
        "ssl.endpoint.identification.algorithm=\n"
    )
    found = read_security_file(path)
    assert found == {
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "SCRAM-SHA-256",
        "kafka.sasl.jaas.config": JAAS,
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.certificates": "-----BEGIN\nA\\B",
        "kafka.ssl.endpoint.identification.algorithm": "",
    }
    settings = read_client_settings(found, "h:1")
    assert (settings.username, settings.password) == ("u", "p=1")
    assert settings.mechanism == "SCRAM-SHA-256"
    assert settings.tls is not None
    assert not settings.tls.checks_host


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("security.protocol=SSL\nbootstrap.servers=h:1\n", "line 2: 'bootstrap.servers' is none"),
        ("security.protocol=SSL\n\nsecurity.protocol=SSL\n", "line 3: .* said twice"),
        ("=SSL\n", "line 1: not of the form"),
    ],
)
def test_nothing_is_passed_over(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "client.properties"
    path.write_text(text)
    with pytest.raises(OptionError, match=told):
        read_security_file(path)
