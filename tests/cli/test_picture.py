"""`raftmq cluster status` puts nodes' answers side by side, whatever they answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from raftmq.cli.picture import Picture, remarks, take_picture
from tests.cli.conftest import Call

RIVAL = {"node_id": 3, "storage_id": "0f", "address": "h:9"}
TROUBLE = "no quorum: 1 of voters [1, 2] are there, node 1 misses [2]"


def answer(node_id: int, addresses: dict[int, str], **more: Any) -> dict[str, Any]:
    """A small /status."""
    return {
        "node_id": node_id,
        "health": {"status": "ok"},
        "isolation": {"is_isolated": False, "isolated_ms": 0},
        "metadata": {
            "voters": [1, 2],
            "leader": 1,
            "leader_epoch": 4,
            "members": [
                {"node_id": 1, "flushed_index": 9, "lag_entries": 0},
                {"node_id": 2, "flushed_index": 7, "lag_entries": 2 if node_id == 1 else None},
            ],
        },
        "brokers": [
            {"node_id": n, "is_fenced": False, "addresses": {"admin": address}}
            for n, address in addresses.items()
        ],
        "partitions": [],
        "not_running": [],
        "quarantined": [],
        "journal_is_damaged": False,
        "faults": None,
        "disk": {"free_bytes": 100, "is_full": False},
        **more,
    }


def partition(leads: bool, *troubles: str, **more: Any) -> dict[str, Any]:
    return {
        "topic": "t",
        "partition": 0,
        "is_leader": leads,
        "leader": 1 if leads else None,
        "leader_epoch": 5 if leads else 4,
        "catching_up": [],
        "troubles": list(troubles),
        **more,
    }


@contextmanager
def serving(body: bytes, code: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_other_nodes_are_found_through_the_first_and_may_be_dead() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = f"127.0.0.1:{closed.getsockname()[1]}"
    with serving(msgspec.json.encode(answer(2, {}))) as second:
        known = {2: second, 3: dead}
        with serving(msgspec.json.encode(answer(1, known))) as first:
            picture = take_picture(None, [first], 5.0)
    assert [report.node_id for report in picture.reports] == [1, 2, 3]
    assert not picture.is_complete
    rows = {row[0]: row for row in picture.nodes()}
    assert rows[1][2:5] == ("ok", "leader", 0)
    assert rows[2][2:5] == ("ok", "voter", 2)
    assert rows[3][2] == "no answer"
    assert "refused" in str(rows[3][-1])


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        (b"oops", 200, "answers something else"),
        (b"[]", 200, "answers something else"),
        (b'{"node_id": 1}', 200, "another version of raftmq"),
        (b"", 500, "answers HTTP 500"),
    ],
)
def test_strange_answers_are_part_of_the_picture(body: bytes, code: int, text: str) -> None:
    with serving(body, code) as address:
        (row,) = take_picture(None, [address], 5.0).nodes()
    assert row[0] is None
    assert text in str(row[-1])


def test_a_node_that_hangs_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        (row,) = take_picture(None, [address], 0.2).nodes()
    assert "no answer in time" in str(row[-1])


def pictured(*answers: dict[str, Any]) -> Picture:
    from raftmq.cli.picture import NodeReport

    return Picture([NodeReport("a", a["node_id"], a) for a in answers])


def test_reasons_of_all_replicas_are_put_together() -> None:
    one = answer(1, {}, partitions=[partition(False, TROUBLE)])
    two = answer(2, {}, partitions=[partition(False, TROUBLE, "damaged")])
    assert pictured(one, two).stuck() == [("t", 0, None, 4, [TROUBLE, "damaged"])]
    assert pictured(answer(1, {}, partitions=[partition(True)])).stuck() == []


def test_partitions_that_only_lost_nodes_hold_are_told_by_the_newest_metadata() -> None:
    gone = [{"topic": "t", "partition": 1, "why": "all on nodes [3]"}]
    newer = answer(1, {}, metadata={"version": 7}, unheld=gone)
    older = answer(2, {}, metadata={"version": 6}, unheld=[{**gone[0], "partition": 2}])
    assert pictured(older, newer).stuck() == [("t", 1, None, None, ["all on nodes [3]"])]
    holding = answer(3, {}, partitions=[partition(False, TROUBLE, partition=1)])
    assert pictured(newer, holding).stuck() == [("t", 1, None, 4, [TROUBLE])]


def test_only_leaders_tell_what_catches_up() -> None:
    behind = [{"node_id": 3, "bytes_left": 500, "end_offset": 7}]
    leader = answer(1, {}, partitions=[partition(True, catching_up=behind)])
    former = answer(2, {}, partitions=[partition(False, catching_up=behind)])
    assert pictured(leader, former).catching_up() == [("t", 0, 3, 500, 7)]


def test_the_metadata_group_is_told_by_who_knows_most() -> None:
    told = pictured(answer(2, {}), answer(1, {})).metadata()
    assert told is not None
    assert told["members"][1]["lag_entries"] == 2
    assert pictured(answer(1, {}, metadata={"engine": "pysyncobj"})).metadata() is None


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"health": {"status": "unavailable", "reason": "stopping"}}, "stopping"),
        (
            {"isolation": {"is_isolated": True, "isolated_ms": 12_345}},
            "cut off from the metadata majority for 12 s",
        ),
        ({"disk": {"free_bytes": 0, "is_full": True}}, "disk full"),
        ({"journal_is_damaged": True}, "journal was damaged"),
        ({"metadata": {"failure": "fsync"}}, "__cluster_metadata: fsync"),
        ({"turned_away": {"4": "node 4 was replaced"}}, "node 4 was replaced"),
        ({"quarantined": ["x", "y"]}, "2 folders in quarantine"),
        ({"not_running": [{}]}, "1 replicas not running yet"),
        ({"faults": {"block_to": [], "fsync_delay_ms": 0}}, "faults armed"),
        ({"peer_tls": {"mode": "off", "is_open": True}}, "speaks plain with other nodes"),
        ({"peer_tls": {"mode": "accept", "plain_peers": [2, 3]}}, "peers without TLS: 2, 3"),
        ({"faults": {"block_to": [2], "fsync_delay_ms": 0}}, "faults on: {'block_to': [2]}"),
    ],
)
def test_remarks(more: dict[str, Any], text: str) -> None:
    assert remarks(answer(1, {}, **more)) == [text]


@pytest.mark.parametrize(
    ("answers", "alive", "texts"),
    [
        ([answer(1, {}), answer(2, {})], [1, 2], []),
        ([answer(1, {})], [1, 2], []),
        ([answer(1, {}), answer(2, {})], [], []),
        ([answer(1, {})], [1], ["metadata voter 2 is not there"]),
        ([answer(1, {}, metadata={"engine": "pysyncobj"})], [1], []),
        (
            [answer(1, {}, disk={"free_bytes": 0, "is_full": True}), answer(2, {})],
            [1, 2],
            ["node 1: its disk is full"],
        ),
        (
            [answer(1, {}), answer(2, {}, disk={"is_full": False, "is_stuck": True})],
            [1, 2],
            ["node 2: its disk does not answer"],
        ),
        (
            [answer(n, {}, rivals=[RIVAL]) for n in (1, 2)],
            [1, 2],
            ["node_id 3 is used twice: a process at h:9 with storage 0f is refused"],
        ),
        ([], [1, 2], []),
    ],
)
def test_all_is_well_only_with_every_voter_and_every_disk(
    answers: list[dict[str, Any]], alive: list[int], texts: list[str]
) -> None:
    found = pictured(*answers).troubles(alive)
    assert len(found) == len(texts)
    assert all(wanted in said for wanted, said in zip(texts, found, strict=True))


@pytest.mark.parametrize("name", ["voter", "disk"])
def test_status_is_bad_while_a_voter_or_a_disk_is(call: Call, name: str) -> None:
    disk = {"free_bytes": 0, "is_full": name == "disk"}
    metadata = answer(1, {})["metadata"] | {"voters": [1, 2] if name == "voter" else [1]}
    body = msgspec.json.encode(answer(1, {}, disk=disk, metadata=metadata))
    with serving(body) as address:
        done = call("cluster", "status", "--admin", address, "--wait", "0.3", "--json")
        assert done.exit_code == 1, done.output
        (trouble,) = msgspec.json.decode(done.stdout)["Troubles"]
        assert name in trouble
        assert trouble in call("cluster", "status", "--admin", address).stdout


def test_status_is_bad_while_only_a_leaders_own_page_says_that_a_replica_is_behind(
    call: Call,
) -> None:
    lagging = [{"node_id": 2, "lag_ms": 31_000}]
    led = partition(True, voters=[1, 2], isr=[1], lagging=lagging)
    former = partition(True, voters=[1, 2], isr=[1, 2], lagging=[]) | {"leader_epoch": 4}
    assert pictured(answer(1, {}, partitions=[partition(True)])).behind() == []
    assert pictured(answer(1, {}, partitions=[former])).behind() == []
    told = answer(1, {}, partitions=[led])
    told["metadata"]["voters"] = [1]
    assert pictured(answer(2, {}, partitions=[former]), told).behind() == [("t", 0, 1, [1, 2], [1])]
    with serving(msgspec.json.encode(told)) as address:
        done = call("cluster", "status", "--admin", address, "--json")
        assert done.exit_code == 1, done.output
        (row,) = msgspec.json.decode(done.stdout)["UnderReplicatedPartitions"]
        assert (row["Topic"], row["Replicas"], row["Isr"]) == ("t", [1, 2], [1])
        shown = call("cluster", "status", "--admin", address)
        assert (shown.exit_code, "1 under-replicated" in shown.stdout) == (1, True)
