"""What the runner refuses, what it reads, and one live run at tiny size."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import catalog, peers
from benchmarks.cli import main
from benchmarks.errors import BenchmarkError, UnsupportedError
from benchmarks.plan import TINY
from benchmarks.processes import CpuWatch, usage
from benchmarks.results import read
from benchmarks.targets import Target, parse_pids, read_cluster_file
from benchmarks.wire import batch_of, check_fetched, check_produced, fetch_frame, produce_frame
from raftmq.protocol import ApiKey, decode_request_header, encode_response_header
from raftmq.protocol.fetch import (
    FetchPartitionResponse,
    FetchResponse,
    FetchTopicResponse,
    decode_fetch_request,
    encode_fetch_response,
)
from raftmq.protocol.produce import (
    ProducePartitionResponse,
    ProduceResponse,
    ProduceTopicResponse,
    decode_produce_request,
    encode_produce_response,
)
from raftmq.records import check_batch, read_records


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["compare"],
        ["compare", "--all"],
        ["compare", "--all", "--only", "bulk", "--out", "x"],
        ["compare", "--all", "--secure", "--out", "x"],
        ["run", "--only", "bulk"],
        ["run", "--bootstrap", "x:1", "--engine", "raftmq"],
        ["run", "--engine", "rabbit"],
        ["report"],
        ["dance"],
    ],
    ids=" ".join,
)
def test_usage_errors_end_with_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--only", "bulkk", "--out", "x"], "did you mean 'bulk'"),
        (["compare", "--only", "bulk", "--engines", "rabbit", "--out", "x"], "no engine 'rabbit'"),
        (["compare", "--only", "bulk", "--runs", "0", "--out", "x"], "--runs"),
        (["run", "--bootstrap", "127.0.0.1:1", "--pids", "1:x"], "ID:PID or PID"),
        (["run", "--cluster", "/nonexistent/cluster.json"], "no cluster.json"),
        (["run", "--bootstrap", "127.0.0.1:1", "--only", "start"], "needs --engine"),
        (["report", "/nonexistent/file.json"], "no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_other_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("benchmarks: ")
    assert error.count("\n") == 1


def test_pids_with_and_without_node_ids() -> None:
    assert parse_pids("1:11,2:22") == {1: 11, 2: 22}
    assert parse_pids("11,22") == {-1: 11, -2: 22}
    assert parse_pids("") == {}
    for text in ("a:1", "1:", ":x"):
        with pytest.raises(BenchmarkError, match="--pids"):
            parse_pids(text)


def test_a_node_whose_process_is_unknown_cannot_be_killed() -> None:
    target = Target("any", "127.0.0.1:1", {-1: 11})
    with pytest.raises(UnsupportedError, match="node 1"):
        target.pid_of(1)
    with pytest.raises(UnsupportedError, match="cluster of its own"):
        target.restart(1)


def test_a_cluster_file_of_dev_is_a_target(tmp_path: Path) -> None:
    node = {"id": 1, "pid": 7, "host": "127.0.0.1", "port": 9092, "admin_port": 9292}
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({"bootstrap": "127.0.0.1:9092", "nodes": [node]}))
    target = read_cluster_file(file)
    assert (target.pids, target.admin) == ({1: 7}, {1: "127.0.0.1:9292"})
    assert target.replicas == 1
    file.write_text("{}")
    with pytest.raises(BenchmarkError, match="no cluster"):
        read_cluster_file(file)


def test_usage_of_a_process_that_lives_and_of_one_that_does_not() -> None:
    now = usage(os.getpid())
    assert now.rss_bytes > 1 << 20
    assert now.cpu_s > 0
    watch = CpuWatch([os.getpid()])
    while watch.servers_s < 0.02:
        sum(range(10_000))
    assert 0 < watch.client_cores < 4
    with pytest.raises(ProcessLookupError):
        usage(2**22 + 1)


def test_frames_are_what_a_broker_reads() -> None:
    batch = batch_of(3, 10, bytes(range(100)))
    frame = memoryview(produce_frame("t", 5, batch))
    assert int.from_bytes(frame[:4]) == len(frame) - 4
    header, position = decode_request_header(frame[4:])
    assert header.api_key == ApiKey.PRODUCE
    request = decode_produce_request(header.api_version, frame[4 + position :])
    (part,) = request.topics[0].partitions
    assert part.index == 5
    assert part.records is not None
    check_batch(part.records)
    assert [len(record.value or b"") for record in read_records(part.records)] == [10, 10, 10]

    frame = memoryview(fetch_frame("t", 2, 77, 500))
    header, position = decode_request_header(frame[4:])
    wanted = decode_fetch_request(header.api_version, frame[4 + position :])
    assert wanted.max_wait_ms == 500
    assert wanted.topics[0].partitions[0].fetch_offset == 77


@pytest.mark.parametrize("code", [0, 6])
def test_answers_are_checked(code: int) -> None:
    part = ProducePartitionResponse(0, code, 42)
    produced = encode_response_header(ApiKey.PRODUCE, 9, 1) + encode_produce_response(
        9, ProduceResponse([ProduceTopicResponse("t", None, [part])])
    )
    fetched_part = FetchPartitionResponse(0, code, records=[b"abc"])
    body = encode_fetch_response(12, FetchResponse([FetchTopicResponse("t", None, [fetched_part])]))
    pieces = [piece for piece in body if isinstance(piece, bytes | bytearray)]
    fetched = encode_response_header(ApiKey.FETCH, 12, 1) + b"".join(pieces)
    if code:
        with pytest.raises(BenchmarkError, match="error 6"):
            check_produced(produced)
        with pytest.raises(BenchmarkError, match="error 6"):
            check_fetched(fetched)
    else:
        assert check_produced(produced) == 42
        assert check_fetched(fetched) == 3


def test_without_java_kafka_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BenchmarkError, match="java"):
        peers.make("kafka")


@pytest.mark.soak
@pytest.mark.live
@pytest.mark.slow
def test_a_tiny_comparison_runs_and_goes_on_where_it_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Runs are kept for the version that they measured; the tree may change under a test.
    monkeypatch.setattr("benchmarks.machine._commit", lambda: "a-commit")
    out = tmp_path / "out"
    arguments = ["compare", "--only", "bulk,single,failover", "--runs", "1", "--tiny"]
    arguments += ["--engines", "raftmq", "--out", str(out)]
    assert main(arguments) == 0
    comparison = read(out / "comparison.json")
    errors = [run.error for one in comparison.workloads for run in one.runs if run.error]
    assert errors == []
    by_name = {one.workload: one for one in comparison.workloads}
    assert set(by_name) == {"bulk", "single", "failover"}
    assert by_name["bulk"].median("raftmq", "produce_mb_s")
    assert by_name["failover"].of("raftmq", "lost") == [0, 0]

    (out / "single.json").unlink()
    before = read(out / "bulk.json")
    assert main(arguments) == 0
    assert read(out / "bulk.json") == before  # kept, not measured again
    assert read(out / "single.json").workloads[0].of("raftmq", "p50_ms")

    capsys.readouterr()
    assert main(["report", str(out)]) == 0
    assert "| one in flight, p50 (p99) |" in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.live
@pytest.mark.slow
def test_a_tiny_secured_comparison_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["compare", "--only", "secured-bulk,secured-single,secured-failover,rules"]
    arguments += ["--runs", "1", "--tiny", "--engines", "raftmq", "--out", str(out)]
    assert main(arguments) == 0
    comparison = read(out / "comparison.json")
    assert [run.error for one in comparison.workloads for run in one.runs if run.error] == []
    by_name = {one.workload: one for one in comparison.workloads}
    assert by_name["secured-bulk"].median("raftmq", "consume_mb_s")
    assert by_name["secured-failover"].of("raftmq", "lost") == [0, 0]
    assert by_name["rules"].median("raftmq", "produce_mb_s_ratio")


def test_a_secured_workload_wants_a_secured_cluster() -> None:
    (one,) = catalog.workloads_named(["secured-single"])
    with pytest.raises(UnsupportedError, match="TLS"):
        one.measure_on(Target("plain", "127.0.0.1:1"), TINY)
    mixed = ["run", "--engine", "raftmq", "--only", "single,secured-single"]
    assert main(mixed) == 1
