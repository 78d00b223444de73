"""A small broker in a thread: in-memory logs, real sockets, real bytes of the Kafka protocol.

Made for tests of drivers and commands. It answers what clients ask of one broker, keeps batches as
they came, and does to single requests what a test tells it: refuse, drop before or after the work,
hold the answer back. No groups' rebalancing beyond one member.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from attrs import define, field

from raftmq.errors import ErrorCode
from raftmq.protocol import (
    SPOKEN,
    ApiKey,
    Struct,
    decode_request,
    decode_request_header,
    encode_response,
    encode_response_header,
    encode_unsupported_api_versions,
)
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
from raftmq.records import check_batch, parse_header, stamp
from tests.client.fake_security import Users
from tests.client.fake_transactions import PRODUCER_ID, Transactions

NODE_ID = 1
CLUSTER_ID = "fake-cluster"
BROKER = 4
BROKER_CONFIGS: dict[str, tuple[str | None, str | None, bool]] = {
    "max.connections": ("7", "10000", True),
    "num.partitions": (None, "1", False),
    "log.retention.ms": ("60", "1209600000", False),
    "log.roll.ms": (None, "604800000", False),
}
"""Name: value in the node's file, default, whether only the file sets it."""


@define
class FakeLog:
    """Batches of one partition."""

    batches: list[bytes] = field(factory=list)
    start: int = 0
    end: int = 0

    def append(self, records: memoryview) -> int:
        header = check_batch(records)
        batch = bytearray(records)
        base = self.end
        stamp(batch, base, 0)
        self.batches.append(bytes(batch))
        self.end += header.record_count
        return base


@define(eq=False)
class _Connection:
    sock: socket.socket
    received: bytearray = field(factory=bytearray)


class Fault:
    """What to do to one coming request of an API."""

    def __init__(self, kind: str, code: ErrorCode = ErrorCode.NONE, body: bytes = b"") -> None:
        assert kind in ("refuse", "drop", "drop after", "hold", "garble")
        self.kind = kind
        self.code = code
        self.body = body
        self.was_met = threading.Event()


class FakeBroker(Transactions, Users):
    """`with FakeBroker() as broker: Producer(broker.address)`."""

    def __init__(self, topics: dict[str, int] | None = None) -> None:
        Transactions.__init__(self)
        Users.__init__(self)
        self.logs: dict[tuple[str, int], FakeLog] = {}
        self.topic_ids: dict[str, UUID] = {}
        self.configs: dict[str, dict[str, str]] = {}
        self.moves: dict[tuple[str, int], list[int]] = {}
        self.listed: dict[str, int] = {}
        """Topics that list only so many of their partitions; the others are retired."""
        self.broker_configs: dict[str, dict[str, str]] = {}
        """What was set for a broker by its id, and for all of them by the empty name."""
        self.groups: dict[str, dict[tuple[str, int], int]] = {}
        self.group_states: dict[str, str] = {}
        self.commits: list[tuple[int, dict[tuple[str, int], int]]] = []
        """Generation and offsets of every commit that was taken."""
        self.seen: list[tuple[ApiKey, int]] = []
        self.faults: dict[ApiKey, deque[Fault]] = {}
        self.refusals: dict[tuple[ApiKey, str], ErrorCode] = {}
        self.topic_errors: dict[str, ErrorCode] = {}
        self.versions = dict(SPOKEN)
        self.handshake_max = 4
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self.advertised: tuple[str, int] | None = None
        """Another address than its own, told in metadata."""
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="fake-broker", daemon=True)
        self._came = threading.Condition()
        self._must_end = False
        self._members = 0
        self._producers = 0
        for name, count in (topics or {}).items():
            self.make_topic(name, count)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._must_end = True
        self._wake.send(b"x")
        self._thread.join()
        self._selector.close()
        for sock in (self._server, self._wake, self._woken):
            sock.close()

    def make_topic(self, name: str, partitions: int) -> None:
        self.topic_ids[name] = UUID(int=len(self.topic_ids) + 1)
        self.configs[name] = {}
        for partition in range(partitions):
            self.logs[(name, partition)] = FakeLog()

    def grow(self, name: str, partitions: int) -> None:
        have = sum(topic == name for topic, _ in self.logs)
        logs = {(name, partition): FakeLog() for partition in range(have, partitions)}
        self.logs = {**self.logs, **logs}  # at once: the broker's thread looks through it

    def fault(self, api: ApiKey, kind: str, code: ErrorCode = ErrorCode.NONE) -> Fault:
        """Do this to the next request of an API that has no fault yet."""
        fault = Fault(kind, code)
        self.faults.setdefault(api, deque()).append(fault)
        return fault

    def garble(self, api: ApiKey, body: bytes) -> Fault:
        """Do the work of the next request of an API, and answer with these bytes."""
        fault = Fault("garble", body=body)
        self.faults.setdefault(api, deque()).append(fault)
        return fault

    def refuse_always(self, api: ApiKey, topic: str, code: ErrorCode) -> None:
        """Refuse this topic in every Produce request from now on."""
        assert api is ApiKey.PRODUCE
        self.refusals[api, topic] = code

    def count(self, api: ApiKey) -> int:
        return sum(seen is api for seen, _ in self.seen)

    def wait_for(self, api: ApiKey, timeout_s: float = 20) -> bool:
        """Wait until a request of this API has come."""
        with self._came:
            return self._came.wait_for(lambda: self.count(api) > 0, timeout_s)

    def wait_for_more(self, api: ApiKey, count: int, timeout_s: float = 20) -> bool:
        """Wait until so many more requests of this API have come."""
        with self._came:
            wanted = self.count(api) + count
            return self._came.wait_for(lambda: self.count(api) >= wanted, timeout_s)

    # The thread.

    def _run(self) -> None:
        connections: list[socket.socket] = []
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        while not self._must_end:
            for key, _ in self._selector.select():
                if key.fileobj is self._server:
                    sock, _ = self._server.accept()
                    connections.append(sock)
                    self._selector.register(sock, selectors.EVENT_READ, _Connection(sock))
                elif key.data is not None and not self._serve(key.data):
                    self._selector.unregister(key.data.sock)
                    key.data.sock.close()
        for sock in connections:
            sock.close()

    def _serve(self, connection: _Connection) -> bool:
        try:
            data = connection.sock.recv(1 << 20)
        except ConnectionError:
            return False
        if not data:
            return False
        connection.received += data
        is_there = True
        while len(connection.received) >= 4:
            (size,) = struct.unpack_from(">i", connection.received)
            if len(connection.received) < size + 4:
                break
            frame = bytes(connection.received[4 : size + 4])
            del connection.received[: size + 4]
            try:
                answer = self._answer(memoryview(frame))
                if answer is not None and is_there:
                    connection.sock.sendall(struct.pack(">i", len(answer)) + answer)
            except _Drop:
                return False
            except ConnectionError:
                is_there = False  # what was read before is done all the same
        return is_there

    def _answer(self, frame: memoryview) -> bytes | None:
        header, position = decode_request_header(frame)
        api = ApiKey(header.api_key)
        version = header.api_version
        with self._came:
            self.seen.append((api, version))
            self._came.notify_all()
        if api is ApiKey.API_VERSIONS and version > self.handshake_max:
            return encode_unsupported_api_versions(header.correlation_id)
        assert SPOKEN[api][0] <= version <= SPOKEN[api][1]
        fault = self.faults[api].popleft() if self.faults.get(api) else None
        if fault is not None:
            fault.was_met.set()
        if fault is not None and fault.kind == "drop":
            raise _Drop
        code = fault.code if fault is not None else ErrorCode.NONE
        handler: Callable[..., Any] = getattr(self, f"_on_{api.name.lower()}")
        body = handler(version, frame[position:], code)
        if fault is not None and fault.kind == "drop after":
            raise _Drop
        if body is None or (fault is not None and fault.kind == "hold"):
            return None
        if fault is not None and fault.kind == "garble":
            body = fault.body
        if not isinstance(body, bytes):
            body = encode_response(api, version, body)
        return encode_response_header(api, version, header.correlation_id) + body

    # Requests, by name of their API.

    def _on_api_versions(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        keys = [
            Struct(api_key=api, min_version=low, max_version=high)
            for api, (low, high) in self.versions.items()
        ]
        return Struct(
            error_code=code,
            api_keys=keys,
            finalized_features_epoch=1,
            finalized_features=self.features,
        )

    def _on_metadata(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.METADATA, version, body)
        names = (
            sorted(self.topic_ids)
            if request.topics is None
            else [topic.name for topic in request.topics]
        )
        host, port = self.advertised or ("127.0.0.1", self.port)
        return Struct(
            brokers=[Struct(node_id=NODE_ID, host=host, port=port)],
            cluster_id=CLUSTER_ID,
            controller_id=NODE_ID,
            topics=[self._topic(name, code) for name in names],
        )

    def _topic(self, name: str, code: ErrorCode) -> Struct:
        code = self.topic_errors.get(name, code)
        if name not in self.topic_ids or code:
            return Struct(error_code=code or ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, name=name)
        rows = [
            Struct(
                partition_index=partition,
                leader_id=NODE_ID,
                leader_epoch=0,
                replica_nodes=[*self.moves.get((name, partition), ()), NODE_ID],
                isr_nodes=[NODE_ID],
            )
            for topic, partition in sorted(self.logs)
            if topic == name
        ]
        listed = self.listed.get(name, len(rows))
        return Struct(
            error_code=0,
            name=name,
            topic_id=self.topic_ids[name],
            partitions=rows[:listed],
            retired_partitions=rows[listed:],
            retired_view=f"{name}.retired" if rows[listed:] else "",
        )

    def _on_produce(self, version: int, body: memoryview, code: ErrorCode) -> bytes | None:
        request = decode_produce_request(version, body)
        topics = []
        for topic in request.topics:
            parts = []
            for part in topic.partitions:
                refused = self.refusals.get((ApiKey.PRODUCE, topic.name or ""), code)
                if refused:
                    parts.append(ProducePartitionResponse(part.index, refused))
                    continue
                assert part.records is not None
                if self.is_outdated(request.transactional_id, parse_header(part.records)):
                    code_of_old = ErrorCode.INVALID_PRODUCER_EPOCH
                    parts.append(ProducePartitionResponse(part.index, code_of_old))
                    continue
                base = self._append(topic.name or "", part.index, part.records)
                parts.append(ProducePartitionResponse(part.index, 0, base))
            topics.append(ProduceTopicResponse(topic.name, None, parts))
        if request.acks == 0:
            return None
        return encode_produce_response(version, ProduceResponse(topics))

    def _append(self, topic: str, partition: int, records: memoryview) -> int:
        """Append, unless the producer's sequence says that it is here already."""
        log = self.logs[(topic, partition)]
        header = parse_header(records)
        for batch in log.batches:
            known = parse_header(batch)
            if header.has_producer_id and known[9:12] == header[9:12]:  # id, epoch, sequence
                return known.base_offset
        return log.append(records)

    def _on_fetch(self, version: int, body: memoryview, code: ErrorCode) -> bytes:
        request = decode_fetch_request(version, body)
        topics = []
        for topic in request.topics:
            parts = []
            for part in topic.partitions:
                log = self.logs.get((topic.name or "", part.partition))
                error = code or (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if log is None else code)
                if log is not None and not log.start <= part.fetch_offset <= log.end:
                    error = ErrorCode.OFFSET_OUT_OF_RANGE
                records = []
                if log is not None and not error:
                    records = [
                        batch
                        for batch in log.batches
                        if parse_header(batch).next_offset > part.fetch_offset
                    ]
                end = log.end if log else -1
                parts.append(
                    FetchPartitionResponse(part.partition, int(error), end, end, 0, records=records)
                )
            topics.append(FetchTopicResponse(topic.name, None, parts))
        pieces = encode_fetch_response(version, FetchResponse(topics))
        return b"".join(bytes(piece) for piece in pieces)  # type: ignore[arg-type]  # no spans

    def _on_list_offsets(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.LIST_OFFSETS, version, body)
        topics = []
        for topic in request.topics:
            parts = []
            for part in topic.partitions:
                log = self.logs[(topic.name, part.partition_index)]
                offset = self._offset_of(log, part.timestamp)
                if getattr(request, "isolation_level", 0) and part.timestamp == -1:
                    offset = self.stable_end(topic.name, part.partition_index, offset)
                parts.append(
                    Struct(
                        partition_index=part.partition_index,
                        error_code=code,
                        timestamp=-1,
                        offset=offset,
                        leader_epoch=0,
                    )
                )
            topics.append(Struct(name=topic.name, partitions=parts))
        return Struct(topics=topics)

    def _offset_of(self, log: FakeLog, timestamp: int) -> int:
        if timestamp < 0:
            return log.start if timestamp == -2 else log.end
        for batch in log.batches:
            header = parse_header(batch)
            if header.max_timestamp >= timestamp:
                return header.base_offset
        return -1

    def _on_init_producer_id(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        name = decode_request(ApiKey.INIT_PRODUCER_ID, version, body).transactional_id
        if name is not None:
            epoch = -1 if code else self._epoch(name)
            return Struct(error_code=code, producer_id=PRODUCER_ID, producer_epoch=epoch)
        self._producers += 1
        return Struct(error_code=code, producer_id=self._producers, producer_epoch=0)

    def _on_create_topics(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.CREATE_TOPICS, version, body)
        results = []
        for topic in request.topics:
            configs = {c.name: c.value for c in topic.configs}
            base = configs.get("raftmq.view.of")  # a view has the numbers of its topic
            count = sum(n == base for n, _ in self.logs) if base else max(topic.num_partitions, 1)
            error = code
            if topic.name in self.topic_ids:
                error = ErrorCode.TOPIC_ALREADY_EXISTS
            elif not error and not request.validate_only:
                self.make_topic(topic.name, count)
                self.configs[topic.name] = configs
            results.append(
                Struct(
                    name=topic.name,
                    error_code=error,
                    num_partitions=count,
                    replication_factor=1,
                    configs=[],
                )
            )
        return Struct(topics=results)

    def _on_delete_topics(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.DELETE_TOPICS, version, body)
        results = []
        for topic in request.topics:
            error = code
            if topic.name in self.topic_ids:
                del self.topic_ids[topic.name]
                self.logs = {k: v for k, v in self.logs.items() if k[0] != topic.name}
            else:
                error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            results.append(Struct(name=topic.name, error_code=error))
        return Struct(responses=results)

    def _on_create_partitions(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.CREATE_PARTITIONS, version, body)
        results = []
        for topic in request.topics:
            have = sum(name == topic.name for name, _ in self.logs)
            error = code or (ErrorCode.INVALID_PARTITIONS if topic.count <= have else code)
            for partition in range(have, topic.count if not error else have):
                self.logs[(topic.name, partition)] = FakeLog()
            results.append(Struct(name=topic.name, error_code=error))
        return Struct(results=results)

    def _on_alter_partition_reassignments(
        self, version: int, body: memoryview, code: ErrorCode
    ) -> Struct:
        request = decode_request(ApiKey.ALTER_PARTITION_REASSIGNMENTS, version, body)
        topics = []
        for topic in request.topics:
            parts = []
            for part in topic.partitions:
                key, error, why = (topic.name, part.partition_index), ErrorCode.NONE, None
                if key not in self.logs:
                    error, why = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no such partition"
                elif part.replicas is None:
                    if self.moves.pop(key, None) is None:
                        error = ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
                elif len(part.replicas) > 1 and not request.allow_replication_factor_change:
                    error = ErrorCode.INVALID_REPLICATION_FACTOR
                else:
                    self.moves[key] = part.replicas
                parts.append(Struct(partition_index=key[1], error_code=error, error_message=why))
            topics.append(Struct(name=topic.name, partitions=parts))
        said = "all is refused" if code else None
        return Struct(error_code=code, error_message=said, responses=[] if code else topics)

    def _on_list_partition_reassignments(
        self, version: int, body: memoryview, code: ErrorCode
    ) -> Struct:
        request = decode_request(ApiKey.LIST_PARTITION_REASSIGNMENTS, version, body)
        asked = {(t.name, n) for t in request.topics or () for n in t.partition_indexes}
        topics = [
            Struct(
                name=topic,
                partitions=[
                    Struct(
                        partition_index=index,
                        replicas=[*replicas, NODE_ID],
                        adding_replicas=replicas,
                        removing_replicas=[NODE_ID],
                    )
                ],
            )
            for (topic, index), replicas in self.moves.items()
            if request.topics is None or (topic, index) in asked
        ]
        return Struct(error_code=code, error_message=None, topics=topics)

    def _on_delete_records(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.DELETE_RECORDS, version, body)
        topics = []
        for topic in request.topics:
            parts = []
            for part in topic.partitions:
                log = self.logs[(topic.name, part.partition_index)]
                refused = code
                if part.offset > log.end:
                    refused = ErrorCode.OFFSET_OUT_OF_RANGE
                if not refused:
                    log.start = log.end if part.offset == -1 else part.offset
                parts.append(
                    Struct(
                        partition_index=part.partition_index,
                        low_watermark=-1 if refused else log.start,
                        error_code=refused,
                    )
                )
            topics.append(Struct(name=topic.name, partitions=parts))
        return Struct(topics=topics)

    def _on_describe_configs(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.DESCRIBE_CONFIGS, version, body)
        results = []
        for resource in request.resources:
            if resource.resource_type == BROKER:
                unknown = {n for of in self.broker_configs.values() for n in of}
                configs = [self._broker_config(n) for n in sorted({*BROKER_CONFIGS, *unknown})]
            else:
                configs = [
                    Struct(name=name, value=value, config_source=1)
                    for name, value in self.configs.get(resource.resource_name, {}).items()
                ]
            results.append(
                Struct(
                    error_code=code,
                    resource_type=resource.resource_type,
                    resource_name=resource.resource_name,
                    configs=configs,
                )
            )
        return Struct(results=results)

    def _broker_config(self, name: str) -> Struct:
        """One setting of the only broker, with where its values are set."""
        static, default, is_read_only = BROKER_CONFIGS.get(name, (None, None, True))
        values = [
            (self.broker_configs.get(str(NODE_ID), {}).get(name), 2),
            (self.broker_configs.get("", {}).get(name), 3),
            (static, 4),
            (default, 5),
        ]
        synonyms = [Struct(name=name, value=v, source=s) for v, s in values if v is not None]
        return Struct(
            name=name,
            value=synonyms[0].value,
            config_source=synonyms[0].source,
            read_only=is_read_only,
            synonyms=synonyms,
            documentation=f"what {name} is",
        )

    def _on_incremental_alter_configs(
        self, version: int, body: memoryview, code: ErrorCode
    ) -> Struct:
        request = decode_request(ApiKey.INCREMENTAL_ALTER_CONFIGS, version, body)
        results = []
        for resource in request.resources:
            is_broker = resource.resource_type == BROKER
            place = self.broker_configs if is_broker else self.configs
            known = place.setdefault(resource.resource_name, {})
            for item in () if request.validate_only else resource.configs:
                if item.config_operation == 0:
                    known[item.name] = item.value
                else:
                    known.pop(item.name, None)
            results.append(
                Struct(
                    error_code=code,
                    resource_type=resource.resource_type,
                    resource_name=resource.resource_name,
                )
            )
        return Struct(responses=results)

    def _on_describe_quorum(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        voter = Struct(replica_id=NODE_ID, log_end_offset=10)
        partition = Struct(
            partition_index=0,
            leader_id=NODE_ID,
            leader_epoch=3,
            high_watermark=10,
            current_voters=[voter],
            observers=[],
        )
        return Struct(topics=[Struct(topic_name="__cluster_metadata", partitions=[partition])])

    # Groups of one member.

    def _on_find_coordinator(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.FIND_COORDINATOR, version, body)
        place = {"node_id": NODE_ID, "host": "127.0.0.1", "port": self.port, "error_code": code}
        if version >= 4:
            keys = request.coordinator_keys
            return Struct(coordinators=[Struct(key=key, **place) for key in keys])
        return Struct(**place)

    def _on_join_group(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.JOIN_GROUP, version, body)
        if not request.member_id and version >= 4:
            self._members += 1
            name = f"member-{self._members}"
            return Struct(error_code=ErrorCode.MEMBER_ID_REQUIRED, member_id=name)
        member = request.member_id or "member-old"
        protocol = request.protocols[0]
        return Struct(
            error_code=code,
            generation_id=1,
            protocol_type="consumer",
            protocol_name=protocol.name,
            leader=member,
            member_id=member,
            members=[Struct(member_id=member, metadata=bytes(protocol.metadata))],
        )

    def _on_sync_group(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.SYNC_GROUP, version, body)
        mine = [a for a in request.assignments if a.member_id == request.member_id]
        assignment = bytes(mine[0].assignment) if mine else b""
        return Struct(error_code=code, assignment=assignment)

    def _on_heartbeat(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        return Struct(error_code=code)

    def _on_leave_group(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        return Struct(error_code=code, members=[])

    def _on_offset_commit(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.OFFSET_COMMIT, version, body)
        known = self.groups.setdefault(request.group_id, {})
        topics = []
        offsets = {
            (topic.name, part.partition_index): part.committed_offset
            for topic in request.topics
            for part in topic.partitions
        }
        if not code:
            known.update(offsets)
            self.commits.append((request.generation_id_or_member_epoch, offsets))
        for topic in request.topics:
            parts = [
                Struct(partition_index=part.partition_index, error_code=code)
                for part in topic.partitions
            ]
            topics.append(Struct(name=topic.name, partitions=parts))
        return Struct(topics=topics)

    def _on_offset_fetch(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.OFFSET_FETCH, version, body)
        asked = request.groups[0] if version >= 8 else request
        known = self.groups.get(asked.group_id, {})
        wanted = (
            sorted(known)
            if asked.topics is None
            else [(topic.name, p) for topic in asked.topics for p in topic.partition_indexes]
        )
        topics = [
            Struct(
                name=name,
                partitions=[
                    Struct(
                        partition_index=partition,
                        committed_offset=known.get((name, partition), -1),
                        error_code=code,
                    )
                ],
            )
            for name, partition in wanted
        ]
        if version >= 8:
            return Struct(groups=[Struct(group_id=asked.group_id, topics=topics, error_code=0)])
        return Struct(topics=topics)

    def _on_list_groups(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        groups = [
            Struct(
                group_id=name, protocol_type="consumer", group_state="Empty", group_type="classic"
            )
            for name in sorted(self.groups)
        ]
        return Struct(error_code=code, groups=groups)

    def _on_describe_groups(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.DESCRIBE_GROUPS, version, body)
        groups = [
            Struct(
                error_code=code,
                group_id=name,
                group_state=self.group_states.get(name, "Empty" if name in self.groups else "Dead"),
                protocol_type="consumer",
                protocol_data="",
                members=[],
            )
            for name in request.groups
        ]
        return Struct(groups=groups)

    def _on_delete_groups(self, version: int, body: memoryview, code: ErrorCode) -> Struct:
        request = decode_request(ApiKey.DELETE_GROUPS, version, body)
        results = []
        for name in request.groups_names:
            gone = self.groups.pop(name, None)
            error = code or (ErrorCode.GROUP_ID_NOT_FOUND if gone is None else code)
            results.append(Struct(group_id=name, error_code=error))
        return Struct(results=results)


class _Drop(Exception):
    """Close this connection."""
