"""Compiles the codecs that a client will use, before its loop needs them.

The first use of a codec costs milliseconds, the very first the import of the schemas: together
about a tenth of a second, in which nothing else of an event loop would run. So async drivers call
this in a thread as they start. Only a head start: what is missing is compiled at its first use, as
for a broker that speaks older versions. Owns no state but what was compiled.
"""

from __future__ import annotations

from typing import Final

from raftmq.protocol import SPOKEN, ApiKey, warm_client
from raftmq_client.core.admin import LIST_OFFSETS_VERSION_MAX
from raftmq_client.core.client import BASIC_APIS
from raftmq_client.core.connection import HANDSHAKE_VERSION
from raftmq_client.core.fetcher import FETCH_VERSION_MAX
from raftmq_client.core.produce_requests import PRODUCE_VERSION_MAX

PRODUCER: Final = (*BASIC_APIS, ApiKey.INIT_PRODUCER_ID, ApiKey.PRODUCE)
TRANSACTIONAL: Final = (*PRODUCER, ApiKey.FIND_COORDINATOR, ApiKey.END_TXN)
READER: Final = (*BASIC_APIS, ApiKey.LIST_OFFSETS, ApiKey.FETCH)
MEMBER: Final = (
    *READER,
    ApiKey.FIND_COORDINATOR,
    ApiKey.JOIN_GROUP,
    ApiKey.SYNC_GROUP,
    ApiKey.HEARTBEAT,
    ApiKey.OFFSET_FETCH,
    ApiKey.OFFSET_COMMIT,
    ApiKey.LEAVE_GROUP,
)
_VERSIONS: Final = {
    ApiKey.API_VERSIONS: HANDSHAKE_VERSION,
    ApiKey.FETCH: FETCH_VERSION_MAX,
    ApiKey.LIST_OFFSETS: LIST_OFFSETS_VERSION_MAX,
    ApiKey.PRODUCE: PRODUCE_VERSION_MAX,
}
"""What a broker as new as we are is asked in, where that is not the newest."""
_done: Final[dict[ApiKey, None]] = {}


def is_cold(apis: tuple[ApiKey, ...]) -> bool:
    """True when `warm_up` would have something to do."""
    return any(api not in _done for api in apis)


def warm_up(apis: tuple[ApiKey, ...]) -> None:
    """Compile the codecs of these; for a thread."""
    for api in apis:
        if api not in _done:
            warm_client([(api, _VERSIONS.get(api, SPOKEN[api][1]))])
            _done[api] = None
