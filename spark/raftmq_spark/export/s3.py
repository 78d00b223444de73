"""S3: addresses, the data path through pyarrow, and the conditional put through boto3.

Owns everything that is particular to S3. pyarrow's S3 client cannot send `If-None-Match`, boto3
can; a store that ignores the header would let two exports replace each other's manifests, so it is
asked to prove itself once per process, with an object that is there already. Keys come from the
URI, else from where AWS's own tools find them. An address is completed with endpoint and region of
this process's environment, since tasks on other machines have another one.
"""

from __future__ import annotations

import os
import secrets
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from attrs import frozen
from pyarrow import fs

from raftmq_spark.errors import MissingPrerequisiteError
from raftmq_spark.export.errors import StoreError

_ENDPOINT: Final = "endpoint_override"
_PROOF: Final = "_manifests/put-if-absent"
_TAKEN: Final = ("PreconditionFailed", "412")
_RACED: Final = ("ConditionalRequestConflict", "409")
_RACES_MAX: Final = 8


@frozen
class _Address:
    bucket: str
    prefix: str
    scheme: str
    endpoint: str | None
    region: str | None
    access_key: str | None
    secret_key: str | None


def complete_uri(text: str) -> str:
    """An address with the endpoint and region of this environment, as pyarrow spells them."""
    parts = urlsplit(text)
    options = dict(parse_qsl(parts.query))
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint and _ENDPOINT not in options:
        told = urlsplit(endpoint)
        options[_ENDPOINT] = told.netloc or told.path
        options.setdefault("scheme", told.scheme or "https")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region:
        options.setdefault("region", region)
    elif _ENDPOINT in options:
        options.setdefault("region", "us-east-1")  # pyarrow would ask Amazon for the bucket's
    query = f"?{urlencode(options)}" if options else ""
    return f"s3://{parts.netloc}{parts.path.rstrip('/')}{query}"


def open_files(uri: str) -> tuple[fs.FileSystem, str]:
    """pyarrow's file system and the base path, `bucket/prefix`.

    Raises:
        StoreError: the address is no good.
    """
    try:
        files, base = fs.FileSystem.from_uri(uri)
    except (OSError, ValueError) as error:
        raise StoreError(f"{_shown(uri)}: {str(error).splitlines()[0]}") from None
    return files, base


def conditional_put(uri: str) -> _Putter:
    """How to put an object unless there is one of that name.

    Raises:
        MissingPrerequisiteError: boto3 is not installed.
        StoreError: the store cannot be reached, or ignores conditions.
    """
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise MissingPrerequisiteError(
            "an archive on S3 needs boto3, whose conditional put keeps manifests from being"
            " replaced: pip install 'raftmq[spark,s3]'"
        ) from None
    address = _parse(uri)
    client = boto3.client(
        "s3",
        endpoint_url=f"{address.scheme}://{address.endpoint}" if address.endpoint else None,
        region_name=address.region,
        aws_access_key_id=address.access_key,
        aws_secret_access_key=address.secret_key,
        # Custom endpoints rarely have a host name per bucket.
        config=Config(
            s3={"addressing_style": "path" if address.endpoint else "auto"},
            retries={"mode": "standard", "total_max_attempts": 4},
        ),
    )
    putter = _Putter(client, _shown(uri))
    putter.prove(f"{address.bucket}/{address.prefix}".rstrip("/"))
    return putter


class _Putter:
    """Puts objects unless there are some of that name."""

    def __init__(self, client: Any, shown: str) -> None:
        self._client = client
        self._shown = shown

    def __call__(self, path: str, data: bytes) -> bool:
        """False when the name was taken.

        A retry whose first attempt got through finds its own object: callers read it and see.
        """
        return self._put(path, data)

    def prove(self, base: str) -> None:
        """See whether the store keeps its word.

        Raises:
            StoreError: it replaced an object that it was told not to replace.
        """
        path = f"{base}/{_PROOF}"
        # Whichever exporter came first made it; the second put must be refused in any case.
        self._put(path, b"raftmq asks here whether this store honours If-None-Match\n")
        if self._put(path, secrets.token_bytes(8)):
            raise StoreError(
                f"{self._shown}: the store ignores If-None-Match, so that one export could replace"
                " another's manifest; raftmq cannot export there"
            )

    def _put(self, path: str, data: bytes) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        bucket, _, key = path.partition("/")
        for _ in range(_RACES_MAX):
            try:
                self._client.put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
            except ClientError as error:
                code = str(error.response.get("Error", {}).get("Code", ""))
                if code in _TAKEN:
                    return False
                if code in _RACED:
                    continue  # a put of the same name was under way; it may have failed
                raise StoreError(f"{self._shown}: {error}") from error
            except BotoCoreError as error:
                raise StoreError(f"{self._shown}: {error}") from error
            else:
                return True
        raise StoreError(f"{self._shown}: others put {key} over and over")


def _parse(uri: str) -> _Address:
    parts = urlsplit(uri)
    options = dict(parse_qsl(parts.query))
    return _Address(
        bucket=parts.netloc.rpartition("@")[2],
        prefix=parts.path.strip("/"),
        scheme=options.get("scheme", "https"),
        endpoint=options.get(_ENDPOINT),
        region=options.get("region"),
        access_key=unquote(parts.username) if parts.username else None,
        secret_key=unquote(parts.password) if parts.password else None,
    )


def _shown(uri: str) -> str:
    parts = urlsplit(uri)
    return f"s3://{parts.netloc.rpartition('@')[2]}{parts.path}"
