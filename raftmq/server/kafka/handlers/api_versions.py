"""ApiVersions: what this broker offers; the first thing that every client asks."""

from __future__ import annotations

import re
from typing import Final

from raftmq.errors import ErrorCode
from raftmq.protocol import ANNOUNCED, FEATURES, ApiKey, RequestHeader, Struct, encode_response
from raftmq.server.kafka.broker import Broker

_SOFTWARE: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_SOFTWARE_FROM: Final = 3

_encoded: dict[tuple[int, ErrorCode], bytes] = {}


def handle(broker: Broker, header: RequestHeader, request: Struct) -> bytes:
    """Answer the announced ranges; the same bytes for everybody."""
    version = header.api_version
    code = ErrorCode.NONE
    if version >= _SOFTWARE_FROM and not (
        _SOFTWARE.fullmatch(request.client_software_name)
        and _SOFTWARE.fullmatch(request.client_software_version)
    ):
        code = ErrorCode.INVALID_REQUEST  # KIP-511
        broker.metrics.api("api_versions").error(code)
    key = (version, code)
    if key not in _encoded:
        _encoded[key] = _encode(version, code)
    return _encoded[key]


def _encode(version: int, code: ErrorCode) -> bytes:
    ranges = ANNOUNCED if code is ErrorCode.NONE else {}
    return encode_response(
        ApiKey.API_VERSIONS,
        version,
        Struct(
            error_code=code,
            api_keys=[
                Struct(api_key=int(key), min_version=low, max_version=high)
                for key, (low, high) in ranges.items()
            ],
            throttle_time=0,
            supported_features=[
                Struct(name=name, min_version=low, max_version=high)
                for name, (low, high) in FEATURES.items()
            ],
            finalized_features_epoch=0 if FEATURES else -1,
            finalized_features=[
                Struct(name=name, max_version_level=high, min_version_level=low)
                for name, (low, high) in FEATURES.items()
            ],
        ),
    )
