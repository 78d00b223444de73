"""Configuration: sources in order, every refusal names the key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from raftmq.config import (
    Address,
    ClientListener,
    ConfigError,
    NodeConfig,
    PeerAddress,
    documented_keys,
    load_config,
)

GOOD = """
node_id = 2
data = "/tmp/n2"
client_listener = "127.0.0.2:9092"
peers = [{id = 2, host = "127.0.0.2", port = 9192}, {id = 1, host = "127.0.0.1", port = 9192}]
[defaults]
"num.partitions" = 3
"auto.create.topics.enable" = false
"""


def test_file_then_variables_then_flags() -> None:
    config = load_config(
        GOOD,
        environment={
            "RAFTMQ_NODE_ID": "3",
            "RAFTMQ_TICK_MS": "30",
            "RAFTMQ_BOOTSTRAP": "elsewhere:1",
            "HOME": "/",
        },
        overrides={"tick_ms": 40, "rack": None},
    )
    assert config.node_id == 3
    assert config.tick_ms == 40
    assert config.data == Path("/tmp/n2")
    assert config.client_address == Address("127.0.0.2", 9092)
    assert [peer.id for peer in config.peers] == [1, 2], "sorted, so that nodes agree"
    assert config.defaults == {"num.partitions": "3", "auto.create.topics.enable": "false"}


def test_true_and_false() -> None:
    known = "node_id = 1\ndata = 'd'\n"
    assert not load_config(known).takes_data_at_once
    assert load_config(known + "takes_data_at_once = true").takes_data_at_once
    variables = {"RAFTMQ_TAKES_DATA_AT_ONCE": "true"}
    assert load_config(known, environment=variables).takes_data_at_once
    with pytest.raises(ConfigError, match="neither true nor false"):
        load_config(known + "takes_data_at_once = 1")


def test_lists_and_tables_come_as_json_in_variables() -> None:
    config = load_config(
        "node_id = 1\ndata = 'd'",
        environment={
            "RAFTMQ_PEERS": '[{"id": 1, "host": "::1", "port": 5}]',
            "RAFTMQ_DEFAULTS": '{"num.partitions": 4}',
        },
    )
    assert config.peers == (PeerAddress(1, "::1", 5),)
    assert config.defaults == {"num.partitions": "4"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("node_id = 1\ndata='d'\nclient_listner = 'a:1'", "did you mean 'client_listener'"),
        ("data = 'd'", "'node_id' is missing"),
        ("node_id = 1", "'data' is missing"),
        ("node_id = 'x'\ndata='d'", "'node_id': cannot use 'x'"),
        ("node_id = true\ndata='d'", "'node_id'"),
        ("node_id = -1\ndata='d'", "'node_id': -1"),
        ("node_id = 1\ndata='d'\nclient_listener='9092'", "is not host:port"),
        ("node_id = 1\ndata='d'\npeers=[{id=1,host='a',prt=2}]", "'prt'"),
        (
            "node_id=1\ndata='d'\npeers=[{id=1,host='a',port=2},{id=1,host='b',port=2}]",
            "appears twice",
        ),
        ("node_id = 1\ndata='d'\nmetadata_engine='zk'", "raft, pysyncobj"),
        ("node_id = 1\ndata='d'\nheartbeat_ticks=9", "heartbeat_ticks"),
        ("node_id = 1\ndata='d'\ntick_ms=0", "'tick_ms': must be at least 1"),
        ("node_id = 1\ndata='d'\nmetrics_groups_max=0", "'metrics_groups_max': must be at least 1"),
        ("node_id = ", "not TOML"),
        ("node_id = 1\ndata='d'\ncluster_id=''", "'cluster_id'"),
        ("node_id = 1\ndata=''", "'data': must not be empty"),
        ("node_id = 1.5\ndata='d'", "'node_id': cannot use 1.5 .not a whole number"),
        ("node_id = 1\ndata='d'\nlog_level='loud'", "'log_level': one of debug, info"),
        ("node_id = 1\ndata='d'\nscrub_bytes_per_s=-1", "'scrub_bytes_per_s': must not be neg"),
        ("node_id = 1\ndata='d'\npeers=[{id=1,port=2}]", "'host' is missing"),
        ("node_id = 1\ndata='d'\n[peers]\nid=1", "a list of"),
        ("node_id = 1\ndata='d'\ndefaults=[]", "a table of"),
        (
            "node_id = 1\ndata='d'\n[defaults]\nlog.retention.ms=1",
            """in quotes: "log.retention.ms" =""",
        ),
        ("node_id = 1\ndata='d'\npeer_tls='on'", "'peer_tls': one of off, accept, required"),
        ("node_id = 1\ndata='d'\npeer_tls='accept'", "'peer_certificate_file': peer_tls 'accept'"),
        (
            "node_id = 1\ndata='d'\npeer_tls='accept'\ncluster_secret_file='s'\npeer_ca_file='c'",
            "'peer_ca_file': goes without cluster_secret_file",
        ),
        (
            "node_id = 1\ndata='d'\npeer_tls='accept'\ncluster_secret_file='s'\n"
            "metadata_engine='pysyncobj'",
            "'peer_tls': pysyncobj speaks plain alone",
        ),
        ("node_id = 1\ndata='d'\npeer_key_file=''", "'peer_key_file': must not be empty"),
        ("node_id = 1\ndata='d'\nclient_listener='0.0.0.0:9092'", "say in advertised_client"),
        ("node_id = 1\ndata='d'\npeer_listener='[::]:9192'", "say in advertised_peer"),
        ("node_id = 1\ndata='d'\nadvertised_admin='0.0.0.0:1'", "'advertised_admin': 0.0.0.0"),
        *(
            (
                f"node_id = 1\ndata='d'\nconnections_per_ip_overrides='{text}'",
                f"'connections_per_ip_overrides': '{word}' is not HOST:COUNT",
            )
            for text, word in (
                ("10.0.0.7", "10.0.0.7"),
                ("a:1,b:-1", "b:-1"),
                ("a:many", "a:many"),
                (":3", ":3"),
            )
        ),
    ],
)
def test_refusals_name_the_key(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(text)


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("RAFTMQ_TICK_MS", "abc", "'tick_ms': .*RAFTMQ_TICK_MS"),
        ("RAFTMQ_NODE_IDD", "1", "unknown key 'node_idd'.*RAFTMQ_NODE_IDD"),
        ("RAFTMQ_PEERS", "1@a:1", "'peers': .*not JSON.*RAFTMQ_PEERS"),
    ],
)
def test_refusals_name_the_variable(variable: str, value: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config("node_id = 1\ndata='d'", environment={variable: value})


def test_a_listener_of_every_address_needs_one_to_tell() -> None:
    text = "node_id = 1\ndata='d'\nclient_listener='0.0.0.0:9092'\n"
    assert load_config(text + "advertised_client='a.example:9092'").client_address == Address(
        "a.example", 9092
    )


# ---- listeners ----

NODE = "node_id = 1\ndata = 'd'\n"
INSIDE = "[listeners.inside]\naddress = '127.0.0.1:9094'\nprotocol = 'PLAINTEXT'\n"
SECURE = (
    "[listeners.secure]\naddress = '127.0.0.1:9093'\nprotocol = 'SSL'\n"
    "certificate_file = '~/c.pem'\nkey_file = 'k.pem'\n"
)


def test_a_secure_listener_has_files() -> None:
    more = "client_certificates = 'required'\nclient_ca_file = 'ca.pem'\n"
    (one,) = load_config(NODE + SECURE + more).client_listeners
    assert (one.name, one.has_tls, one.has_sasl) == ("SECURE", True, False)
    assert (one.certificate_file, one.key_file) == (Path.home() / "c.pem", Path("k.pem"))
    assert (one.client_certificates, one.client_ca_file) == ("required", Path("ca.pem"))


def test_a_node_without_listeners_has_one_for_clients() -> None:
    (one,) = load_config(NODE + "advertised_client = 'a.example:1'\n").client_listeners
    assert one == ClientListener(
        name="PLAINTEXT",
        address=Address("127.0.0.1", 9092),
        advertised=Address("a.example", 1),
    )
    assert (one.has_tls, one.has_sasl, one.told_address) == (False, False, Address("a.example", 1))


def test_listeners_stand_beside_the_client_listener_that_is_set_and_for_the_one_that_is_not() -> (
    None
):
    config = load_config(NODE + "client_listener = '127.0.0.1:9092'\n" + INSIDE)
    assert [one.name for one in config.client_listeners] == ["PLAINTEXT", "INSIDE"]
    assert config.client_listeners[1].told_address == Address("127.0.0.1", 9094)
    assert (
        config.kafka_settings["listeners"] == "PLAINTEXT://127.0.0.1:9092,INSIDE://127.0.0.1:9094"
    )
    alone = load_config(NODE + INSIDE + "advertised = 'n1.example:9094'\n")
    assert [one.name for one in alone.client_listeners] == ["INSIDE"]
    assert alone.client_address == Address("n1.example", 9094)
    assert alone.kafka_settings["advertised.listeners"] == "INSIDE://n1.example:9094"


def test_listeners_come_as_json_in_variables() -> None:
    table = '{"x": {"address": "127.0.0.1:1", "protocol": "PLAINTEXT"}}'
    config = load_config(NODE, environment={"RAFTMQ_LISTENERS": table})
    assert [(one.name, one.address.port) for one in config.client_listeners] == [("X", 1)]


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("listeners = 3", "a table of names"),
        ("[listeners]\nx = 3", "X is a table"),
        ("[listeners.'a b']\naddress = 'a:1'", "'A B' is no name"),
        ("[listeners.x]\nadress = 'a:1'", "did you mean 'address'"),
        ("[listeners.x]\naddress = 'a:1'", "X: 'protocol' is missing"),
        ("[listeners.x]\nprotocol = 'PLAINTEXT'", "X: 'address' is missing"),
        ("[listeners.x]\naddress = '1'\nprotocol = 'PLAINTEXT'", "is not host:port"),
        (
            "[listeners.x]\naddress = 'a:1'\nprotocol = 'TLS'",
            "X: protocol is one of PLAINTEXT, SSL",
        ),
        ("[listeners.x]\naddress = '0.0.0.0:1'\nprotocol = 'PLAINTEXT'", "say in advertised"),
        (
            "[listeners.x]\naddress = 'a:1'\nprotocol = 'PLAINTEXT'\nkey_file = 'k'",
            "key_file: protocol PLAINTEXT has no certificates",
        ),
        (
            "[listeners.x]\naddress='a:1'\nprotocol='PLAINTEXT'\nclient_certificates='required'",
            "client_certificates: PLAINTEXT has none",
        ),
        ("[listeners.x]\naddress='a:1'\nprotocol='SSL'", "protocol SSL needs certificate_file"),
        (SECURE.replace("key_file", "key_password_file"), "protocol SSL needs key_file"),
        (SECURE + "client_certificates = 'on'", "client_certificates is one of off, wanted, req"),
        (SECURE + "client_certificates = 'wanted'", "client_ca_file goes with"),
        (
            SECURE + "principal_mapping_rules = 'DEFAULT,RULE:(a/b/'",
            "principal_mapping_rules: at character 14: no pattern of RE2: missing",
        ),
        (
            SECURE + "principal_mapping_rules = 'RULE:a/b/'",
            "principal_mapping_rules goes with client_certificates",
        ),
        (SECURE + "client_ca_file = 'a'", "client_ca_file goes with"),
        (
            SECURE.replace("'SSL'", "'SASL_SSL'").replace("[", "sasl_mechanisms=''\n[", 1),
            "has none",
        ),
        (
            "client_listener = 'a:1'\n" + INSIDE.replace("inside", "plaintext"),
            "PLAINTEXT is client_listener already",
        ),
        ("advertised_client = 'a:1'\n" + INSIDE, "there is no client_listener"),
    ],
)
def test_refusals_of_listeners_name_what_is_wrong(table: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(NODE + table)


def test_every_key_is_documented() -> None:
    rows = documented_keys()
    assert len(rows) > 30
    assert all(len(doc) > 15 for _, _, doc in rows)
    assert ("node_id", "required") in {(name, default) for name, default, _ in rows}


def test_operations_page_lists_every_key() -> None:
    """Run with RAFTMQ_REWRITE=1 to write the table."""
    page = Path(__file__).parent.parent / "docs" / "operations.md"
    begin, end = "<!-- keys: written by tests/test_config.py -->\n", "<!-- end of keys -->"
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    table = "| key | default | what |\n|---|---|---|\n" + "".join(
        f"| `{name}` | {default} | {doc} |\n" for name, default, doc in documented_keys()
    )
    wanted = before + begin + table + end + after
    if os.environ.get("RAFTMQ_REWRITE"):
        page.write_text(wanted)
    assert page.read_text() == wanted, "run with RAFTMQ_REWRITE=1"


@pytest.mark.parametrize(
    ("host", "mode", "is_open"),
    [
        ("127.0.0.2", "off", False),
        ("localhost", "off", False),
        ("[::1]", "off", False),
        ("10.0.0.1", "off", True),
        ("n1.example.org", "off", True),
        ("10.0.0.1", "accept", True),
        ("10.0.0.1", "required", False),
    ],
)
def test_a_peer_port_that_strangers_may_reach(host: str, mode: str, is_open: bool) -> None:
    names = ("peer_certificate_file", "peer_key_file", "peer_ca_file")
    files = "".join(f"{name} = 'f'\n" for name in names)
    text = f"node_id = 1\ndata = 'd'\npeer_listener = '{host}:1'\npeer_tls = '{mode}'\n{files}"
    assert load_config(text).has_open_peer_port is is_open
    secret = text.replace(files, "cluster_secret_file = 's'\n")
    assert load_config(secret).has_open_peer_port is is_open


OAUTH: dict[str, Any] = {
    "sasl_mechanisms": "OAUTHBEARER",
    "sasl_plain_without_tls": True,
    "oauth_issuer": "https://issuer.example",
    "oauth_audience": "kafka, other",
    "oauth_jwks_url": "https://issuer.example/keys",
    "listeners": (
        ClientListener(name="S", address=Address("127.0.0.1", 1), protocol="SASL_PLAINTEXT"),
    ),
}


def test_tokens() -> None:
    config = NodeConfig(node_id=1, data=Path("d"), **OAUTH)
    assert config.takes_tokens
    assert config.audiences == ("kafka", "other")
    assert config.token_algorithms == ("RS256", "PS256", "ES256", "EdDSA")
    assert config.kafka_settings["sasl.oauthbearer.expected.issuer"] == "https://issuer.example"
    for url in ("http://localhost:8080/keys", "http://[::1]/keys", "http://127.1.2.3/"):
        assert NodeConfig(node_id=1, data=Path("d"), **{**OAUTH, "oauth_jwks_url": url})
    plain = {**OAUTH, "oauth_jwks_url": "http://issuer.example/", "insecure": True}
    assert NodeConfig(node_id=1, data=Path("d"), **plain).takes_tokens
    off = {**OAUTH, "sasl_mechanisms": "PLAIN", "oauth_issuer": None}
    assert not NodeConfig(node_id=1, data=Path("d"), **off).takes_tokens


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"oauth_jwks_url": None},
            "OAUTHBEARER needs it, or oauth_jwks_file",
        ),
        ({"oauth_jwks_file": Path("x")}, "key 'oauth_jwks_url': OAUTHBEARER needs it, or"),
        ({"oauth_issuer": None}, "key 'oauth_issuer': OAUTHBEARER needs it"),
        ({"oauth_audience": " , "}, "key 'oauth_audience': OAUTHBEARER needs it"),
        ({"oauth_principal_claim": ""}, "key 'oauth_principal_claim'"),
        ({"oauth_algorithms": "RS256,HS256"}, "key 'oauth_algorithms': some of .*, not 'HS256'"),
        ({"oauth_algorithms": "none"}, "not 'none'"),
        ({"oauth_algorithms": ""}, "key 'oauth_algorithms': must not be empty"),
        ({"oauth_jwks_url": "http://issuer.example/"}, "keys that come by http are anybody's"),
        ({"oauth_jwks_url": "ftp://issuer.example/"}, "is not https://HOST/PATH"),
        ({"oauth_jwks_url": "https://u:p@issuer.example/"}, "is not https://HOST/PATH"),
        ({"oauth_jwks_url": "https:///x"}, "is not https://HOST/PATH"),
        ({"oauth_jwks_url": "https://h:port/"}, "key 'oauth_jwks_url'"),
        ({"sasl_plain_without_tls": False}, "PLAIN and OAUTHBEARER want TLS"),
    ],
)
def test_refusals_about_tokens(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        NodeConfig(node_id=1, data=Path("d"), **{**OAUTH, **change})
