"""Kafka's rules for the names of clients that show certificates."""

from __future__ import annotations

import time

import pytest

from raftmq.principals import MappingRuleError, read_mapping_rules

DUKE = "CN=Duke,OU=ServiceUsers,O=Org,C=US"
KIP_371 = (
    "RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/, "
    "RULE:^CN=(.*?),OU=(.*?),O=(.*?),L=(.*?),ST=(.*?),C=(.*?)$/$1@$2/L, "
    "RULE:^.*[Cc][Nn]=([a-zA-Z0-9.]*).*$/$1/U, DEFAULT"
)


@pytest.mark.parametrize(
    ("rules", "subject", "name"),
    [
        ("DEFAULT", DUKE, DUKE),
        (KIP_371, "CN=Duke,OU=ServiceUsers,O=Org", "Duke"),
        (KIP_371, "CN=Duke,OU=SME,O=mycp,L=Fulton,ST=MD,C=US", "duke@sme"),
        (KIP_371, "cn=duke,OU=JavaSoft,O=Sun Microsystems", "DUKE"),
        (KIP_371, "OU=JavaSoft,O=Sun Microsystems", "OU=JavaSoft,O=Sun Microsystems"),
        ("RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/", "CN=a,OU=Other", None),
        ("RULE:Duke/found/", DUKE, None),
        ("RULE:CN=(.*?),.*/$0/", DUKE, DUKE),
        ("RULE:.*/x/", DUKE, "x"),
        ("RULE:CN=(.*?),.*/$1$2/", DUKE, "Duke$2"),
        ("RULE:CN=(.*?),.*/$12/", DUKE, "Duke2"),
        (r"RULE:CN=(.*?),.*/\$1/", DUKE, "$1"),
        (r"RULE:CN=(.*?),.*/a\/$1\\/", DUKE, "a/Duke\\"),
        (r"RULE:CN=a\/(.*)/$1/", "CN=a/b", "b"),
        ("RULE:CN=(?<who>.*?),.*/${who}/", DUKE, "Duke"),
        ("RULE:CN=(a)?.*/x$1/", DUKE, "x"),
        ("RULE:CN=a{1,3},(.*)/$1/", "CN=aa,b", "b"),
        ("RULE:.*//,DEFAULT", DUKE, None),
        (" , DEFAULT ,, ", DUKE, DUKE),
        ("RULE:CN=(.*)/$1/L", "CN=ÄÖ", "äö"),
        (r"RULE:CN=app\\\\, one,.*/one/", r"CN=app\\, one,O=x", "one"),
    ],
)
def test_names(rules: str, subject: str, name: str | None) -> None:
    assert read_mapping_rules(rules).name_of(subject) == name


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ("", "no rules"),
        (" , ", "no rules"),
        ("default", "at character 1: neither DEFAULT nor RULE:"),
        ("DEFAULT RULE:a/b/", "at character 9: a comma or the end"),
        ("DEFAULT,RULE:a/b", "at character 9: neither"),
        ("RULE:a/b/X", "at character 10: a comma or the end"),
        ("RULE:a/b/LU", "at character 11: a comma"),
        ("RULE:a/b/c/", "at character 10: a comma"),
        ("DEFAULT,RULE:(a/b/", "at character 14: no pattern of RE2: missing )"),
        ("RULE:(?=a)/b/", "at character 6: no pattern of RE2: invalid perl operator"),
        ("RULE:a/$1/", "at character 8: the pattern has no groups"),
        ("RULE:(a)/x${b}/", "at character 11: the pattern has no group 'b'"),
        ("RULE:(a)/x$/", "at character 11: $ without"),
    ],
)
def test_refusals_say_where(rules: str, told: str) -> None:
    with pytest.raises(MappingRuleError) as caught:
        read_mapping_rules(rules)
    assert str(caught.value).startswith(told)


def test_no_subject_takes_long() -> None:
    mapper = read_mapping_rules("RULE:(a*)*(a|aa)+$/x/,DEFAULT")
    subject = "a" * 50_000 + "b"
    began = time.process_time()
    assert mapper.name_of(subject) == subject
    assert time.process_time() - began < 1
