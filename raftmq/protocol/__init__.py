"""The Kafka protocol: headers, bodies, versions. Sans-IO; nothing of kio is imported until used.

`compile.py` alone knows kio; `produce.py` and `fetch.py` are written by hand, for speed. Whatever
is wrong with bytes from outside is a RemoteProtocolError, whatever is wrong with what we encode a
TypeError.
"""

from raftmq.protocol.api_versions import ANNOUNCED, SPOKEN, ApiKey, is_announced, is_flexible
from raftmq.protocol.compile import (
    decode_request,
    decode_request_slowly,
    decode_response,
    encode_request,
    encode_response,
    encode_response_slowly,
    warm,
    warm_client,
)
from raftmq.protocol.schema import Struct
from raftmq.protocol.wire import (
    Framer,
    RequestHeader,
    check_frame_size,
    decode_request_header,
    decode_response_header,
    encode_request_header,
    encode_response_header,
    encode_unsupported_api_versions,
    frame,
)

__all__ = [
    "ANNOUNCED",
    "SPOKEN",
    "ApiKey",
    "Framer",
    "RequestHeader",
    "Struct",
    "check_frame_size",
    "decode_request",
    "decode_request_header",
    "decode_request_slowly",
    "decode_response",
    "decode_response_header",
    "encode_request",
    "encode_request_header",
    "encode_response",
    "encode_response_header",
    "encode_response_slowly",
    "encode_unsupported_api_versions",
    "frame",
    "is_announced",
    "is_flexible",
    "warm",
    "warm_client",
]
