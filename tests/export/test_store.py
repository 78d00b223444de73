"""What every store promises: names given once, files seen whole. A folder, S3 by moto."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from raftmq_spark.errors import MissingPrerequisiteError
from raftmq_spark.export.errors import StoreError
from raftmq_spark.export.store import Store, locate, open_store

pytestmark = pytest.mark.spark
MakeStore = Callable[[], Store]


@pytest.fixture(params=["file", "s3"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Opens one and the same store anew, as another process would."""
    if request.param == "file":
        uri = str(tmp_path / "archive")
    else:
        uri = request.getfixturevalue("s3_bucket") + "/archive"
    return lambda: open_store(locate(uri))


def test_a_name_is_given_once(make_store: MakeStore) -> None:
    assert make_store().put_if_absent("_manifests/1.json", b"first")
    assert not make_store().put_if_absent("_manifests/1.json", b"second")
    assert make_store().read("_manifests/1.json") == b"first"


def test_of_many_at_once_one_has_the_name(make_store: MakeStore) -> None:
    stores = [make_store() for _ in range(6)]
    barrier = threading.Barrier(len(stores))
    won: list[int] = []

    def put(number: int) -> None:
        barrier.wait()
        if stores[number].put_if_absent("_manifests/2.json", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert make_store().read("_manifests/2.json") == b"%d" % won[0]


def test_files_are_seen_whole(make_store: MakeStore) -> None:
    store = make_store()
    with store.create("topic=t/date=2026-03-01/a.parquet") as stream:
        stream.write(b"one")
        assert store.entries("topic=t", is_deep=True) == []
        stream.write(b"two")
    (entry,) = store.entries("topic=t", is_deep=True)
    assert (entry.path, entry.size) == ("topic=t/date=2026-03-01/a.parquet", 6)
    assert store.read(entry.path) == b"onetwo"
    assert store.folders() == ["topic=t"]


def test_a_file_that_failed_leaves_nothing(make_store: MakeStore) -> None:
    store = make_store()

    def fail() -> None:
        with store.create("topic=t/a") as stream:
            stream.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert store.entries("topic=t", is_deep=True, with_unfinished=True) == []


def test_what_is_not_there(make_store: MakeStore) -> None:
    store = make_store()
    assert store.read("nothing") is None
    assert store.entries("no/folder") == []
    assert store.folders() == []
    store.delete("nothing")
    with pytest.raises(FileNotFoundError):
        store.open_input("nothing")


def test_addresses() -> None:
    assert locate("/data/x").uri == "/data/x"
    assert locate("file:///data/x").uri == "/data/x"
    assert Path(locate("x").uri).is_absolute()
    with pytest.raises(StoreError, match="ftp://h/x: an archive is a folder"):
        locate("ftp://h/x")
    with pytest.raises(StoreError, match="names no bucket"):
        locate("s3:///x")
    assert str(locate("s3://key:secret@bucket/x?scheme=http")) == "s3://bucket/x"


def test_s3_takes_its_endpoint_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks on other machines have another environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    assert "endpoint_override=127.0.0.1%3A9000" in locate("s3a://bucket/x").uri
    assert "scheme=http" in locate("s3://bucket/x").uri


def test_an_s3_that_ignores_conditions_is_refused(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.client import BaseClient

    plain = BaseClient._make_api_call

    def forgetful(self: object, name: str, arguments: dict[str, object]) -> object:
        return plain(self, name, {k: v for k, v in arguments.items() if k != "IfNoneMatch"})

    monkeypatch.setattr(BaseClient, "_make_api_call", forgetful)
    with pytest.raises(StoreError, match="ignores If-None-Match"):
        open_store(locate(f"{s3_bucket}/x")).put_if_absent("_manifests/1.json", b"x")


def test_hdfs_without_hadoop_says_what_it_needs() -> None:
    with pytest.raises(MissingPrerequisiteError, match="JAVA_HOME, HADOOP_HOME"):
        open_store(locate("hdfs://127.0.0.1:1/x"))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="file"):
        open_store(locate(str(tmp_path / "file" / "archive"))).put_if_absent("_m/1", b"x")
