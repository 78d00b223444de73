"""Fetch, written by hand: the one answer that carries megabytes, and its request.

Owns Fetch v4 to v18 in both directions. An encoded answer is a list of pieces: bytes, and between
them the caller's own spans (anything with a `size`), which are sent straight from the log. Records
stand inside each partition's entry, so pieces and spans alternate; no span is ever read here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

from raftmq.protocol.api_versions import ApiKey
from raftmq.protocol.compile import decode_response, encode_request
from raftmq.protocol.fetch_messages import (
    ENDPOINTS_FROM,
    FLEXIBLE_FROM,
    REPLICA_STATE_FROM,
    TOPIC_IDS_FROM,
    AbortedTransaction,
    DivergingEpoch,
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    FetchTopicResponse,
    ForgottenTopic,
    Piece,
    Span,
)
from raftmq.protocol.fetch_request import decode_fetch_request
from raftmq.protocol.schema import Struct
from raftmq.protocol.wire import (
    NOBODY,
    CurrentLeader,
    NodeEndpoint,
    compact_string,
    current_leader_bytes,
    current_leader_of,
    from_uuid,
    node_endpoints_bytes,
    node_endpoints_of,
    plain_string,
    tagged,
    varint,
)
from raftmq.types import Buffer

__all__ = [
    "AbortedTransaction",
    "CurrentLeader",
    "DivergingEpoch",
    "FetchPartition",
    "FetchPartitionResponse",
    "FetchRequest",
    "FetchResponse",
    "FetchTopic",
    "FetchTopicResponse",
    "ForgottenTopic",
    "NodeEndpoint",
    "Piece",
    "Span",
    "decode_fetch_request",
    "decode_fetch_response",
    "encode_fetch_frame",
    "encode_fetch_request",
    "encode_fetch_response",
    "pieces_size",
]

_BUFFERS: Final = (bytes, bytearray, memoryview)

_pack_i = struct.Struct(">i").pack
_pack_q = struct.Struct(">q").pack
_pack_ihi = struct.Struct(">ihi").pack
_pack_ihqq = struct.Struct(">ihqq").pack
_pack_ihqqq = struct.Struct(">ihqqq").pack
_pack_ihqqqbi = struct.Struct(">ihqqqbi").pack
_pack_qq = struct.Struct(">qq").pack
_pack_qqb = struct.Struct(">qqB").pack


def encode_fetch_response(version: int, response: FetchResponse) -> list[Piece]:
    """Encode an answer's body as pieces to be sent in order; spans are the caller's own.

    Raises:
        TypeError: a value does not fit its field.
    """
    try:
        if version >= FLEXIBLE_FROM:
            return _encode_flexible_response(version, response)
        return _encode_plain_response(version, response)
    except (struct.error, AttributeError, ValueError) as error:
        raise TypeError(f"Fetch v{version} response: {error}") from error


def encode_fetch_frame(version: int, correlation_id: int, response: FetchResponse) -> list[Piece]:
    """Encode a whole answer: frame size, response header, then the body's pieces.

    Raises:
        TypeError: a value does not fit its field.
    """
    pieces = encode_fetch_response(version, response)
    first = pieces[0]
    assert isinstance(first, bytes)  # a body begins with its throttle time
    header = b"\x00" if version >= FLEXIBLE_FROM else b""
    size = 4 + len(header) + pieces_size(pieces)
    pieces[0] = b"".join((_pack_i(size), _pack_i(correlation_id), header, first))
    return pieces


def pieces_size(pieces: Sequence[Piece]) -> int:
    """How many bytes these pieces are on the wire."""
    size = 0
    for piece in pieces:
        size += len(piece) if isinstance(piece, _BUFFERS) else piece.size
    return size


def _encode_flexible_response(version: int, response: FetchResponse) -> list[Piece]:
    pieces: list[Piece] = []
    write = pieces.append
    out = bytearray(_pack_ihi(response.throttle_time_ms, response.error_code, response.session_id))
    out += varint(len(response.topics) + 1)
    for topic in response.topics:
        if version >= TOPIC_IDS_FROM:
            out += from_uuid(topic.topic_id)
        else:
            out += compact_string(_named(topic.name))
        out += varint(len(topic.partitions) + 1)
        for part in topic.partitions:
            aborted = part.aborted_transactions
            # One pack for what is usual: nothing aborted.
            out += _pack_ihqqqbi(
                part.partition,
                part.error_code,
                part.high_watermark,
                part.last_stable_offset,
                part.log_start_offset,
                0,
                part.preferred_read_replica,
            )
            if aborted is not None:
                _insert_aborted(out, aborted)
            records = part.records
            if records:
                out += varint(pieces_size(records) + 1)
                write(bytes(out))
                pieces += records
                out.clear()
            else:
                out += b"\x00" if records is None else b"\x01"
            if part.current_leader is None and part.diverging_epoch is None:
                out += b"\x00"
            else:
                out += _partition_tags(part)
        out += b"\x00"
    if response.node_endpoints and version >= ENDPOINTS_FROM:
        out += tagged((0, node_endpoints_bytes(response.node_endpoints)))
    else:
        out += b"\x00"
    pieces.append(bytes(out))
    return pieces


def _insert_aborted(out: bytearray, aborted: Sequence[AbortedTransaction]) -> None:
    """Replace the null list of aborted transactions, which stands before the last four bytes."""
    preferred = out[-4:]
    del out[-5:]
    out += varint(len(aborted) + 1)
    for transaction in aborted:
        out += _pack_qqb(transaction.producer_id, transaction.first_offset, 0)
    out += preferred


def _partition_tags(part: FetchPartitionResponse) -> bytes:
    fields = []
    diverging = part.diverging_epoch
    if diverging is not None and diverging != DivergingEpoch():
        fields.append((0, _pack_i(diverging.epoch) + _pack_q(diverging.end_offset) + b"\x00"))
    if part.current_leader is not None and part.current_leader != NOBODY:
        fields.append((1, current_leader_bytes(part.current_leader)))
    return tagged(*fields)


def _encode_plain_response(version: int, response: FetchResponse) -> list[Piece]:
    pieces: list[Piece] = []
    if version >= 7:
        throttle = response.throttle_time_ms
        out = bytearray(_pack_ihi(throttle, response.error_code, response.session_id))
    else:
        out = bytearray(_pack_i(response.throttle_time_ms))
    out += _pack_i(len(response.topics))
    for topic in response.topics:
        out += plain_string(_named(topic.name))
        out += _pack_i(len(topic.partitions))
        for part in topic.partitions:
            number, code, high = part.partition, part.error_code, part.high_watermark
            stable = part.last_stable_offset
            if version >= 5:
                out += _pack_ihqqq(number, code, high, stable, part.log_start_offset)
            else:
                out += _pack_ihqq(number, code, high, stable)
            aborted = part.aborted_transactions
            out += _pack_i(-1 if aborted is None else len(aborted))
            for transaction in aborted or ():
                out += _pack_qq(transaction.producer_id, transaction.first_offset)
            if version >= 11:
                out += _pack_i(part.preferred_read_replica)
            records = part.records
            out += _pack_i(-1 if records is None else pieces_size(records))
            if records:
                pieces.append(bytes(out))
                pieces += records
                out = bytearray()
    if out:
        pieces.append(bytes(out))
    return pieces


def _named(name: str | None) -> str:
    if name is None:
        raise TypeError("this version of Fetch names topics, the topic has no name")
    return name


def encode_fetch_request(version: int, request: FetchRequest) -> bytes:
    """Encode a request's body.

    Raises:
        TypeError: a value does not fit its field.
    """
    by_id = version >= TOPIC_IDS_FROM
    message: dict[str, Any] = {
        "max_wait": request.max_wait_ms,
        "min_bytes": request.min_bytes,
        "max_bytes": request.max_bytes,
        "isolation_level": request.isolation_level,
        "session_id": request.session_id,
        "session_epoch": request.session_epoch,
        "rack_id": request.rack_id,
        "cluster_id": request.cluster_id,
        "topics": [
            {
                **({"topic_id": topic.topic_id} if by_id else {"topic": topic.name}),
                "partitions": [_partition_fields(part) for part in topic.partitions],
            }
            for topic in request.topics
        ],
        "forgotten_topics_data": [
            {
                **({"topic_id": topic.topic_id} if by_id else {"topic": topic.name}),
                "partitions": topic.partitions,
            }
            for topic in request.forgotten
        ],
    }
    if version >= REPLICA_STATE_FROM:
        message["replica_state"] = {
            "replica_id": request.replica_id,
            "replica_epoch": request.replica_epoch,
        }
    else:
        message["replica_id"] = request.replica_id
    return encode_request(ApiKey.FETCH, version, message)


def _partition_fields(part: FetchPartition) -> dict[str, Any]:
    return {
        "partition": part.partition,
        "current_leader_epoch": part.current_leader_epoch,
        "fetch_offset": part.fetch_offset,
        "last_fetched_epoch": part.last_fetched_epoch,
        "log_start_offset": part.log_start_offset,
        "partition_max_bytes": part.partition_max_bytes,
        "replica_directory_id": part.replica_directory_id,
        "high_watermark": part.high_watermark,
    }


def decode_fetch_response(version: int, body: Buffer) -> FetchResponse:
    """Decode an answer's body; records are one view of it per partition, or nothing.

    Raises:
        RemoteProtocolError: malformed, or not an announced version.
    """
    message = decode_response(ApiKey.FETCH, version, body)
    by_id = version >= TOPIC_IDS_FROM
    return FetchResponse(
        topics=[
            FetchTopicResponse(
                None if by_id else topic.topic,
                topic.topic_id if by_id else None,
                [_partition_response(version, part) for part in topic.partitions],
            )
            for topic in message.responses
        ],
        throttle_time_ms=message.throttle_time,
        error_code=message.error_code if version >= 7 else 0,
        session_id=message.session_id if version >= 7 else 0,
        node_endpoints=node_endpoints_of(message) if version >= ENDPOINTS_FROM else [],
    )


def _partition_response(version: int, part: Struct) -> FetchPartitionResponse:
    aborted = part.aborted_transactions
    if part.records is None:
        records = None
    else:
        records = [part.records] if len(part.records) else []
    diverging = None
    if version >= FLEXIBLE_FROM:
        diverging = DivergingEpoch(part.diverging_epoch.epoch, part.diverging_epoch.end_offset)
    return FetchPartitionResponse(
        part.partition_index,
        part.error_code,
        part.high_watermark,
        part.last_stable_offset,
        part.log_start_offset if version >= 5 else -1,
        None
        if aborted is None
        else [AbortedTransaction(a.producer_id, a.first_offset) for a in aborted],
        part.preferred_read_replica if version >= 11 else -1,
        records,
        current_leader_of(part) if version >= FLEXIBLE_FROM else None,
        None if diverging == DivergingEpoch() else diverging,
    )
