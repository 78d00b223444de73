"""Damage to what nodes keep: flipped bits, lost folders, rubbish on a connection.

Never more than the design promises to survive: what is lost or damaged in one place of a group is
sound on the others, and the next loss waits until the cluster is whole again. So everything here
asks for wholeness first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from jepsen_like.cluster.kafka import VERSIONS, ClientEnd
from jepsen_like.inode import SECTOR
from jepsen_like.invariants import InvariantViolation
from jepsen_like.virtual_time import EPOCH_MS
from raftmq.errors import ErrorCode
from raftmq.log.indexes import HEADER_SIZE as HEADER_SIZE_OF_INDEX
from raftmq.log.journal import RECORD_SIZE, SECTOR_SIZE, TWICE, decode_header, decode_record
from raftmq.promise import Promise
from raftmq.protocol import ApiKey, decode_response_header, encode_request_header
from raftmq.protocol.produce import (
    ProducePartition,
    ProduceRequest,
    ProduceTopic,
    decode_produce_response,
    encode_produce_request,
)
from raftmq.records import HEADER_SIZE, NewRecord, build_batch, parse_header
from raftmq.tools.inspect import base_offset_of
from raftmq.types import METADATA_GROUP, NodeId, RaftGroupId

if TYPE_CHECKING:
    from jepsen_like.cluster.node import ClusterNode
    from jepsen_like.cluster.world import ClusterWorld

ROOT = "data"
EVERYTHING = range(1 << 62)
ZEROS_BELOW, STALE_FROM = 0.3, 0.6
"""Of all damage so much is a sector of zeros, and from there on a stale one, where that can be."""


def flushed_batches(data: bytes, sure_end: int) -> list[tuple[int, int]]:
    """Batches of a segment that lie wholly below an offset: (position, size)."""
    found: list[tuple[int, int]] = []
    position = 0
    while position + HEADER_SIZE <= len(data):
        header = parse_header(data, position)
        if header.batch_length <= 0 or header.next_offset > sure_end:
            break
        found.append((position, header.size))
        position += header.size
    return found


class Damage:
    """What was damaged in this run, and may be."""

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world
        # Damage in closed segments is found late, so a second one might meet the only sound copy:
        # more than the design promises to survive. One per group and run.
        self._rotten: dict[RaftGroupId, bool] = {}
        # The other copy might be next, before anybody has come to mend the first.
        self._halved: dict[tuple[int, str], bool] = {}

    def lose_folder(self, node: ClusterNode, random: Random) -> None:
        """Lose one group's files, and nothing else."""
        groups = [g for g in self._world.watch.groups() if self._folder(node, g) is not None]
        if not groups:
            return
        group = random.choice(groups)
        folder = self._folder(node, group)
        assert folder is not None
        self._world.note("lose folder", node.node_id, folder)
        self._world.had_effect("folder lost")
        self._world.counts.wipes += 1
        self._world.watch.forget(node.node_id, group)
        for path in node.disk.files(folder):
            node.disk.remove(path)
        node.disk.sync_directory(folder)

    def rot_journal(self, node: ClusterNode, random: Random) -> None:
        """Spoil or lose the journal of hard states: this node does not know any more how it voted.

        Two flips strike both copies of a record that the header counts. One that no other word
        vouches for may look like a write that the power loss cut short.
        """
        disk, path = node.disk, f"{ROOT}/state.journal"
        if path not in disk.files(ROOT):
            return
        content = disk.content(path)
        header = decode_header(content)
        count, draw = 0 if header is None else header.count, random.random()
        if draw < 0.5 and count:
            slot, at = random.randrange(count), random.randrange(RECORD_SIZE)
            for position in TWICE.positions(slot):
                disk.flip(path, position + at, random.randrange(8))
        elif draw < 0.8:
            disk.overwrite(path, random.randbytes(len(content)))
        else:
            disk.lose(path)
        self._world.note("rot journal", node.node_id, len(content), count)
        self._world.counts.journals += 1
        self._world.watch.forget(node.node_id)

    def rot_promise(self, node: ClusterNode, random: Random) -> None:
        """Spoil one copy of what the journal holds, preferably of the newest record that was not
        lazy: the other one keeps every promise, so this node has forgotten nothing."""
        disk, path = node.disk, f"{ROOT}/state.journal"
        if path not in disk.files(ROOT):
            return
        data = bytearray(disk.content(path))
        # A write cut short has no second copy that could be spared.
        whole = [slot for slot, (one, other) in TWICE.slots(bytes(data)) if one == other]
        if not whole:
            return
        before = _promised(node)
        copy, draw = random.randrange(TWICE.copies), random.random()
        newest = _newest_promise(bytes(data), whole)
        struck = [newest]
        if draw < 0.2:  # a whole sector
            first = newest * RECORD_SIZE // SECTOR_SIZE * SECTOR_SIZE // RECORD_SIZE
            struck = [slot for slot in whole if first <= slot < first + SECTOR_SIZE // RECORD_SIZE]
        elif draw < 0.4:
            struck = [random.choice(whole)]
        for slot in struck:
            position = TWICE.positions(slot)[copy]
            if draw < 0.7:
                piece = bytes(RECORD_SIZE) if draw < 0.1 else random.randbytes(RECORD_SIZE)
                data[position : position + RECORD_SIZE] = piece
            else:
                data[position + random.randrange(RECORD_SIZE)] ^= 1 << random.randrange(8)
        disk.overwrite(path, bytes(data))
        after = _promised(node)
        if after != before:
            where = f"node {node.node_id}, copy {copy} of {struck}"
            raise InvariantViolation("PromisesSurvive", f"{where}: {before} became {after}")
        self._world.note("rot promise", node.node_id, copy, *struck)
        self._world.had_effect("promise spoilt")

    def _groups(self) -> list[RaftGroupId]:
        """Whose bytes may go bad."""
        groups = self._world.watch.groups()
        spared = (METADATA_GROUP,) if self._world.options.spares_metadata else ()
        return [group for group in groups if group not in spared]

    def _folder(self, node: ClusterNode, group: RaftGroupId) -> str | None:
        return self._world.watch.folder_of(node.node_id, group)

    def rot(self, node: ClusterNode, random: Random) -> None:
        """Spoil a batch that the journal knows to be flushed, preferably a late one, or lose a
        segment; of a group that has any."""
        groups = [group for group in self._groups() if group not in self._rotten]
        random.shuffle(groups)
        spoil = partial(self._rot_group, part=EVERYTHING)
        ways: tuple[Callable[[ClusterNode, RaftGroupId, Random], bool], ...] = (spoil,)
        if random.random() < 0.25:
            ways = (self._lose_segment, spoil)
        for way in ways:
            for group in groups:
                if way(node, group, random):
                    self._rotten[group] = True
                    return

    def _lose_segment(self, node: ClusterNode, group: RaftGroupId, random: Random) -> bool:
        """Lose the file of a closed segment, all of which others have."""
        folder = self._folder(node, group)
        if folder is None:
            return False
        sure_end = min(self._sure_offset(node, group), self._world.watch.committed_offset(group))
        paths = [path for path in node.disk.files(folder) if path.endswith(".log")]
        ends = [base_offset_of(path) for path in paths[1:]]
        lost = [path for path, end in zip(paths, ends, strict=False) if end <= sure_end]
        if not lost:
            return False
        path = random.choice(lost)
        self._world.note("lose segment", node.node_id, path)
        self._world.had_effect("segment lost")
        self._world.counts.rots += 1
        node.disk.lose(path)
        return True

    def rot_everywhere(self, random: Random) -> None:
        """All nodes lose power; each one's copy of a partition is damaged in another third."""
        world = self._world
        groups = [group for group in self._groups() if group not in self._rotten]
        if not groups:
            return
        group = random.choice(groups)
        self._rotten[group] = True
        for node in world.nodes:
            node.crash()
        nodes = list(world.nodes)
        random.shuffle(nodes)
        # By offsets: what each node knows to be flushed differs, and so would thirds of that.
        end = world.watch.committed_offset(group)
        bases = sorted({row[0] for node in nodes for row in self._batches(node, group, end)})
        bounds = [bases[at * len(bases) // len(nodes)] for at in range(len(nodes)) if bases]
        for node, part in zip(nodes, map(range, bounds, [*bounds[1:], end]), strict=False):
            draw = Random(random.getrandbits(32))
            node.must_start.append(partial(self._rot_group, node, group, draw, part=part))
        world.had_effect("spoilt everywhere")

    def _sure_offset(self, node: ClusterNode, group: RaftGroupId) -> int:
        """Below this offset the node's journal knows the log to be flushed: what is bad there is
        damage, what is bad above it may be a torn write, and cut."""
        journal = node.open_journal()
        state = journal.get(group)
        journal.close()
        bare_count = self._world.watch.bare_count(node.node_id, group)
        return 0 if state is None else max(0, state.flushed_end - bare_count)

    def _batches(
        self, node: ClusterNode, group: RaftGroupId, end: int
    ) -> list[tuple[int, str, int, int]]:
        """Batches of a node's copy below an offset: (base offset, path, position, size)."""
        folder = self._folder(node, group)
        if folder is None:
            return []
        found: list[tuple[int, str, int, int]] = []
        for path, size in node.disk.files(folder).items():
            if path.endswith(".log"):
                data = node.disk.content(path)[:size]
                for position, length in flushed_batches(data, end):
                    found.append((parse_header(data, position).base_offset, path, position, length))
        return found

    def _rot_group(
        self, node: ClusterNode, group: RaftGroupId, random: Random, *, part: range
    ) -> bool:
        """Spoil a batch that is committed and known to be flushed, with a base offset in `part`."""
        end = min(self._sure_offset(node, group), self._world.watch.committed_offset(group))
        chosen = [row for row in self._batches(node, group, end) if row[0] in part]
        if not chosen:
            return False
        _, path, position, length = chosen[-1] if random.random() < 0.5 else random.choice(chosen)
        self._world.note("rot", node.node_id, path, position)
        self._world.counts.rots += 1
        self._world.counts.stale_sectors += _spoil(node, path, position, length, random)
        return True

    def rot_indexes(self, node: ClusterNode, random: Random) -> None:
        """Spoil or remove some indexes, or all; a log is not known to be worse for it.

        A header is looked at when its log is opened, the pairs behind it when they are needed. The
        opening itself needs those of an offset index, and makes both indexes anew. So sometimes
        only time indexes go bad: that shows when a client asks by time.
        """
        disk = node.disk
        endings = random.choice((("index", ".fill.tmp"), (".timeindex",)))
        paths = [p for p in disk.files(ROOT) if p.endswith(endings)]
        for path in random.sample(paths, random.choice((min(len(paths), 4), len(paths)))):
            self._world.note("rot index", node.node_id, path)
            self._world.had_effect("index spoilt")
            size = len(disk.content(path))
            if size > HEADER_SIZE_OF_INDEX and random.random() < 0.5:
                disk.flip(path, random.randrange(HEADER_SIZE_OF_INDEX, size), random.randrange(8))
            elif size and random.random() < 0.5:
                disk.flip(path, random.randrange(size), random.randrange(8))
            else:
                disk.remove(path)

    def rot_one_copy(self, node: ClusterNode, random: Random) -> None:
        """Flip bits in files of which everything is written twice: nothing is lost by one."""
        disk = node.disk
        rotten = [self._folder(node, group) for group in self._rotten]
        names = ("/log-start", "/bare.entries")
        paths = [
            path
            for path in disk.files(ROOT)
            if path.endswith(names)
            and path.rpartition("/")[0] not in rotten
            and (node.node_id, path) not in self._halved
        ]
        for path in random.sample(paths, min(len(paths), random.choice((1, 2, 4)))):
            size = len(disk.content(path).rstrip(b"\0"))
            if size:
                self._halved[node.node_id, path] = True
                self._world.note("rot one copy", node.node_id, path)
                self._world.had_effect("one copy spoilt")
                disk.flip(path, random.randrange(size), random.randrange(8))

    def malformed(self, node: ClusterNode, random: Random) -> None:
        """A client sends rubbish: it must cost its own connection alone."""
        end = ClientEnd.dial(self._world, int(NodeId(node.node_id)))
        if not end.is_open:
            return
        self._world.counts.malformed += 1
        kind = random.randrange(5)
        if kind == 4:
            self._wrong_sum(end, random)
            return
        body = random.randbytes(random.randrange(8, 200))
        if kind == 0:
            data = body
        elif kind == 1:
            data = len(body).to_bytes(4) + body
        elif kind == 2:  # a known API and version with a body of chance
            key, version = random.choice(((0, 9), (1, 12), (3, 9), (8, 8), (11, 7), (19, 5)))
            head = key.to_bytes(2) + version.to_bytes(2) + b"\0\0\0\1\xff\xff\0"
            data = (len(head) + len(body)).to_bytes(4) + head + body
        else:
            data = (1 << 30).to_bytes(4) + body
        answer: Promise[memoryview] = Promise()
        end.send(data, 1, answer)
        self._world.schedule(1_000.0, end.close)

    def _wrong_sum(self, end: ClientEnd, random: Random) -> None:
        """A batch whose bytes changed on the way; whoever leads must refuse it."""
        topic, index = random.choice(self._world.partitions)
        value = b"%d." % self._world.next_value()
        data = bytearray(build_batch([NewRecord(None, value)], timestamp=EPOCH_MS))
        data[-2] ^= 1 << random.randrange(8)
        part = ProducePartition(index, memoryview(data))
        request = ProduceRequest(None, -1, 1_000, [ProduceTopic(topic, None, [part])])
        body = b"".join(map(bytes, encode_produce_request(VERSIONS[ApiKey.PRODUCE], request)))
        head = encode_request_header(ApiKey.PRODUCE, VERSIONS[ApiKey.PRODUCE], 1, "rubbish")
        answer: Promise[memoryview] = Promise()

        def judge(done: Promise[memoryview]) -> None:
            if done.error is not None:
                return
            version, frame = VERSIONS[ApiKey.PRODUCE], done.result()
            _, position = decode_response_header(ApiKey.PRODUCE, version, frame)
            told = decode_produce_response(version, frame[position:]).topics[0].partitions[0]
            if told.error_code == ErrorCode.NONE:
                where = f"{topic}-{index} at {told.base_offset}"
                raise InvariantViolation("BadInputIsRefused", f"{where}: a batch of a wrong sum")

        answer.when_done(judge)
        end.send((len(head) + len(body)).to_bytes(4) + head + body, 1, answer)
        self._world.schedule(3_000.0, end.close)


def _promised(node: ClusterNode) -> tuple[bool, dict[RaftGroupId, object]]:
    """What a start would make of the journal: whether it is damaged, and all that it holds."""
    journal = node.open_journal(disk=node.disk.copy(Random(0)))
    return journal.damaged, {group: journal.get(group) for group in journal.groups()}


def _newest_promise(content: bytes, slots: list[int]) -> int:
    """Where the newest term, vote or floor stands that the record of its group before lacks."""
    newest = slots[-1]
    known: dict[RaftGroupId, object] = {}
    for slot in slots:
        record = decode_record(content[TWICE.positions(slot)[0] :][:RECORD_SIZE])
        if record is not None and record.state is not None:
            state = record.state
            promised = (state.term, state.vote, state.bootstrapped, state.cut_floor)
            if known.get(record.group) != promised:
                known[record.group], newest = promised, slot
    return newest


def _spoil(node: ClusterNode, path: str, position: int, length: int, random: Random) -> bool:
    """A bit flips, or a sector of this batch alone holds nothing, or what it held a write ago: then
    it is True."""
    first = -(-position // SECTOR) * SECTOR
    kind, end = random.random(), position + length
    if kind >= STALE_FROM:
        sectors = range(position // SECTOR, -(-end // SECTOR))
        if any(node.disk.make_stale(path, sector, (position, end)) for sector in sectors):
            return True
    elif kind < ZEROS_BELOW and first + SECTOR <= end:
        content = bytearray(node.disk.content(path))
        if any(content[first : first + SECTOR]):
            content[first : first + SECTOR] = bytes(SECTOR)
            node.disk.overwrite(path, bytes(content))
            return False
    node.disk.flip(path, position + random.randrange(length), random.randrange(8))
    return False
