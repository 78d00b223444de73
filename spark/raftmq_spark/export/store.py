"""Where an archive lies: a local folder, S3 or HDFS, each with what an export needs of it.

Three things are promised of every store: `put_if_absent` gives a name to at most one writer, whole;
a file made by `create` is seen under its name only when it is complete; on a local disk both are
durable on return. Data goes through `pyarrow.fs`; that has no conditional put, so S3 manifests go
through boto3 (`s3.py`). A `Location` is what travels to tasks; they open their own store.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import pyarrow as pa
from attrs import frozen
from pyarrow import fs

from raftmq_spark.errors import MissingPrerequisiteError
from raftmq_spark.export.errors import StoreError

_WRITE_BYTES: Final = 1 << 20
_S3: Final = ("s3", "s3a", "s3n")
_HDFS: Final = ("hdfs", "viewfs")
_TEMPORARY: Final = "._tmp."


@frozen
class Location:
    """An archive's address, complete: it means the same on every machine of a Spark cluster."""

    uri: str

    @property
    def scheme(self) -> str:
        """`file`, `s3` or `hdfs`."""
        scheme = urlsplit(self.uri).scheme
        if scheme in _S3:
            return "s3"
        return "hdfs" if scheme in _HDFS else "file"

    def __str__(self) -> str:
        """For people: without keys and options."""
        if self.scheme == "file":
            return self.uri
        parts = urlsplit(self.uri)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")


@frozen
class Entry:
    """A file in a store."""

    path: str
    size: int


class ConditionalPut(Protocol):
    """Puts an object unless there is one of that name."""

    def __call__(self, path: str, data: bytes) -> bool:
        """False when the name was taken."""
        ...


def locate(text: str) -> Location:
    """Read `DIR`, `s3://BUCKET/PREFIX` or `hdfs://HOST:PORT/DIR`.

    Raises:
        StoreError: of another kind.
    """
    parts = urlsplit(text)
    if "://" not in text:
        return Location(str(Path(text).expanduser().absolute()))
    if parts.scheme == "file":
        return Location(parts.path)
    if parts.scheme not in (*_S3, *_HDFS):
        known = "a folder, s3://bucket/prefix or hdfs://host:port/folder"
        raise StoreError(f"{text}: an archive is {known}")
    if parts.scheme in _S3:
        if not parts.netloc.rpartition("@")[2]:
            raise StoreError(f"{text} names no bucket, as in s3://bucket/prefix")
        from raftmq_spark.export.s3 import complete_uri

        return Location(complete_uri(text))
    return Location(text)


class Store:
    """An archive's files by relative path. Errors of the file system become `StoreError`."""

    def __init__(self, location: Location, files: fs.FileSystem, base: str) -> None:
        self.location = location
        self.files = files
        self.base = base.rstrip("/")

    def full(self, path: str) -> str:
        """A path as the file system knows it."""
        return f"{self.base}/{path}" if path else self.base

    def read(self, path: str) -> bytes | None:
        """A small file's bytes; None where there is none."""
        try:
            with self.files.open_input_stream(self.full(path), compression=None) as stream:
                data: bytes = stream.read()
                return data
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed(path, error) from error

    def open_input(self, path: str) -> pa.NativeFile:
        """A file for random reading.

        Raises:
            FileNotFoundError: there is none.
        """
        return self.files.open_input_file(self.full(path))

    def entries(
        self, folder: str, *, is_deep: bool = False, with_unfinished: bool = False
    ) -> list[Entry]:
        """Files of a folder, sorted by path; none where there is no such folder.

        `with_unfinished` also gives what is being written, or was when its writer died.
        """
        selector = fs.FileSelector(self.full(folder), allow_not_found=True, recursive=is_deep)
        try:
            found = self.files.get_file_info(selector)
        except OSError as error:
            raise self._failed(folder, error) from error
        start = len(self.base) + 1
        return sorted(
            (
                Entry(info.path[start:], int(info.size or 0))
                for info in found
                if info.type is fs.FileType.File
                and (with_unfinished or _TEMPORARY not in info.base_name)
            ),
            key=lambda entry: entry.path,
        )

    def folders(self) -> list[str]:
        """Names of the folders at the top."""
        selector = fs.FileSelector(self.base, allow_not_found=True)
        try:
            found = self.files.get_file_info(selector)
        except OSError as error:
            raise self._failed("", error) from error
        return sorted(info.base_name for info in found if info.type is fs.FileType.Directory)

    def delete(self, path: str) -> None:
        """Delete a file; one that is not there is no error."""
        try:
            self.files.delete_file(self.full(path))
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._failed(path, error) from error

    @contextmanager
    def create(self, path: str) -> Iterator[Any]:
        """A new file to write; seen under its name once the block ended well."""
        try:
            with self.files.open_output_stream(
                self.full(path), compression=None, buffer_size=_WRITE_BYTES
            ) as stream:
                yield stream
        except OSError as error:
            raise self._failed(path, error) from error
        except BaseException:
            self.delete(path)  # closing the stream may have given the beginning its name
            raise

    def put(self, path: str, data: bytes) -> None:
        """Write a small file whose name nobody else uses."""
        with self.create(path) as stream:
            stream.write(data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Write a small file unless there is one of that name; whether it was written."""
        raise StoreError(f"{self.location} cannot keep one writer from another")

    def _failed(self, path: str, error: OSError) -> StoreError:
        told = (str(error).splitlines() or [type(error).__name__])[0]
        return StoreError(f"{self.location}/{path}: {error.strerror or told}")


class LocalStore(Store):
    """A folder. Names are given by `link(2)`, which never replaces; all is fsynced."""

    def __init__(self, location: Location) -> None:
        super().__init__(location, fs.LocalFileSystem(), location.uri)

    @contextmanager
    def create(self, path: str) -> Iterator[Any]:
        """A new file to write; seen under its name, and durable, once the block ended well."""
        target = Path(self.full(path))
        temporary = self._temporary(target)
        try:
            with temporary.open("xb", buffering=_WRITE_BYTES) as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(target)
            _sync_folder(target.parent)
        except OSError as error:
            raise self._failed(path, error) from error
        finally:
            temporary.unlink(missing_ok=True)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Write a small file unless there is one of that name; durable when it returns."""
        target = Path(self.full(path))
        temporary = self._temporary(target)
        try:
            with temporary.open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            _sync_folder(target.parent)
            return True
        except OSError as error:
            raise self._failed(path, error) from error
        finally:
            temporary.unlink(missing_ok=True)

    def _temporary(self, target: Path) -> Path:
        """Hidden from Spark and pyarrow by its leading dot."""
        try:
            if not target.parent.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                for folder in target.parent.relative_to(self.base).parents:
                    _sync_folder(Path(self.base) / folder)
        except OSError as error:
            raise self._failed(str(target.parent), error) from error
        return target.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}.{target.name}")


class HdfsStore(Store):
    """HDFS through libhdfs. Its rename refuses to replace a file, which decides who is first."""

    def __init__(self, location: Location) -> None:
        try:
            files, base = fs.FileSystem.from_uri(location.uri)
        except OSError as error:
            raise MissingPrerequisiteError(
                f"{location}: {str(error).splitlines()[0]}; HDFS needs Hadoop's native client:"
                " JAVA_HOME, HADOOP_HOME (or ARROW_LIBHDFS_DIR) and CLASSPATH from"
                " `hadoop classpath --glob`"
            ) from None
        super().__init__(location, files, base)

    @contextmanager
    def create(self, path: str) -> Iterator[Any]:
        """A new file to write; seen under its name once the block ended well."""
        temporary = self._temporary(path)
        with super().create(temporary) as stream:
            yield stream
        try:
            self.files.move(self.full(temporary), self.full(path))
        except OSError as error:
            raise self._failed(path, error) from error

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Write a small file unless there is one of that name; whether it was written."""
        temporary = self._temporary(path)
        with super().create(temporary) as stream:
            stream.write(data)
        try:
            self.files.move(self.full(temporary), self.full(path))
        except OSError as error:
            self.delete(temporary)
            if self.read(path) is not None:
                return False
            raise self._failed(path, error) from error
        return True

    def _temporary(self, path: str) -> str:
        folder, _, name = path.rpartition("/")
        try:
            self.files.create_dir(self.full(folder), recursive=True)
        except OSError as error:
            raise self._failed(folder, error) from error
        return f"{folder}/{_TEMPORARY}{secrets.token_hex(8)}.{name}"


class S3Store(Store):
    """An object store. An object appears whole; manifests are put with `If-None-Match: *`."""

    def __init__(self, location: Location) -> None:
        from raftmq_spark.export.s3 import open_files

        files, base = open_files(location.uri)
        super().__init__(location, files, base)
        self._conditional: ConditionalPut | None = None

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Write an object unless there is one of that name; whether it was written."""
        if self._conditional is None:
            from raftmq_spark.export.s3 import conditional_put

            self._conditional = conditional_put(self.location.uri)
        return self._conditional(self.full(path), data)


def open_store(location: Location) -> Store:
    """The store of an address.

    Raises:
        StoreError: it cannot be reached.
        MissingPrerequisiteError: what it needs is not installed.
    """
    if location.scheme == "s3":
        return S3Store(location)
    return HdfsStore(location) if location.scheme == "hdfs" else LocalStore(location)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
