"""ApiVersions: what this broker offers; the first thing that every client asks."""

from __future__ import annotations

import re
from typing import Final

from raftmq.errors import ErrorCode
from raftmq.metadata.features import Ranges
from raftmq.metadata.metadata_image import RAFTMQ_LEVEL, MetadataImage
from raftmq.protocol import ANNOUNCED, ApiKey, Struct, encode_response
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.request_context import RequestContext

_SOFTWARE: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_SOFTWARE_FROM: Final = 3

_encoded: dict[tuple[object, ...], bytes] = {}
_ENCODED_MAX: Final = 64
"""Levels change seldom, and only operators change them; still, what is kept is bounded."""


def handle(broker: Broker, context: RequestContext, request: Struct) -> bytes:
    """Answer the announced ranges and the levels of features; the same bytes for everybody."""
    version = context.api_version
    code = ErrorCode.NONE
    if version >= _SOFTWARE_FROM and not (
        _SOFTWARE.fullmatch(request.client_software_name)
        and _SOFTWARE.fullmatch(request.client_software_version)
    ):
        code = ErrorCode.INVALID_REQUEST  # KIP-511
        broker.metrics.api("api_versions").error(code)
    image = broker.image
    key = (version, code, broker.supported_text, image.features, image.features_epoch)
    if key not in _encoded:
        if len(_encoded) >= _ENCODED_MAX:
            _encoded.clear()
        _encoded[key] = _encode(version, code, broker.supported, image)
    return _encoded[key]


def _encode(version: int, code: ErrorCode, supported: Ranges, image: MetadataImage) -> bytes:
    ranges = ANNOUNCED if code is ErrorCode.NONE else {}
    levels = {RAFTMQ_LEVEL: image.level, **image.features}
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
                for name, (low, high) in sorted(supported.items())
            ],
            # Java believes no levels of an epoch that is not above the last one it knows.
            finalized_features_epoch=max(image.features_epoch, 0),
            finalized_features=[
                Struct(name=name, max_version_level=levels[name], min_version_level=levels[name])
                for name in sorted(levels)
            ],
        ),
    )
