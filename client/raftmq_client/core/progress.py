"""What the application has finished with, partition by partition, and what of it is saved.

Records that were handed out are *in hand*. They count as finished when the next are asked for, or
when the application commits them; nothing that is only in hand is ever committed by itself. So an
exception in a handler finishes nothing more, however the consumer ends. A place is the offset of
the next record to read and the leader epoch of the one before it (KIP-320). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raftmq.types import TopicPartition
from raftmq_client.core.group_admin import CommittedOffset
from raftmq_client.core.messages import ConsumerRecord

Places = dict[TopicPartition, CommittedOffset]


class Progress:
    """The places of one consumer's partitions."""

    def __init__(self) -> None:
        self.finished: Places = {}
        """Everything below is finished with. What was chosen by a reset counts, too."""
        self.in_hand: Places = {}
        """Where partitions stand once what is in hand is finished."""
        self._epochs_before: dict[TopicPartition, int] = {}  # the records in hand
        self._saved: dict[TopicPartition, int] = {}
        self._bases: Places = {}  # where the group saved, or where reading began

    # Where partitions begin and end.

    def begin(self, key: TopicPartition, place: CommittedOffset, *, is_saved: bool) -> None:
        """Read on from here: by a commit, a seek, or a reset."""
        self.in_hand.pop(key, None)
        self.finished[key] = self._bases[key] = place
        if is_saved:
            self._saved[key] = place.offset

    def begin_by_reset(self, key: TopicPartition, offset: int) -> None:
        """A reset chose this offset, perhaps while records of before it are in hand."""
        place = self._bases[key] = CommittedOffset(offset)
        if key in self.in_hand:
            self.in_hand[key] = place
            self.finished.pop(key, None)  # those in hand come first, and may have higher offsets
        else:
            self.finished[key] = place

    def restart(self, key: TopicPartition) -> None:
        """The place is not known until a reset has chosen one."""
        self.in_hand.pop(key, None)
        self.finished.pop(key, None)
        self._bases.pop(key, None)

    def forget(self, keys: Iterable[TopicPartition]) -> None:
        """These are not read any more."""
        for key in keys:
            self.restart(key)
            self._saved.pop(key, None)

    # Records.

    def took(self, places: Places) -> None:
        """Records are in hand; `places` is where their partitions stand behind them.

        Those that were in hand before are finished.
        """
        self.finish()
        finished = self.finished
        self._epochs_before = {
            key: finished[key].leader_epoch if key in finished else -1 for key in places
        }
        self.in_hand = places

    def finish(self) -> None:
        """What is in hand is finished."""
        in_hand, self.in_hand = self.in_hand, {}
        for key, place in in_hand.items():
            self.finish_up_to(key, place)

    def finish_up_to(self, key: TopicPartition, place: CommittedOffset) -> None:
        """Everything below this place is finished; it never takes anything back."""
        known = self.finished.get(key)
        if known is None or known.offset <= place.offset:
            self.finished[key] = place

    def finish_first(self, records: Sequence[ConsumerRecord], count: int) -> None:
        """Of these, which are all that is in hand, the first are finished."""
        for key, place in self._places_behind(records, count).items():
            self.finish_up_to(key, place)

    def hold_first(self, records: Sequence[ConsumerRecord], count: int) -> None:
        """Of these, which were in hand, only the first still are: the rest is read again."""
        self.in_hand = self._places_behind(records, count)

    def drop(self) -> None:
        """What is in hand will not be finished."""
        self.in_hand = {}

    def _places_behind(self, records: Sequence[ConsumerRecord], count: int) -> Places:
        """Where partitions stand behind the first of the records in hand.

        A partition with none behind them stands where the fetcher left it, which may be more than
        the last offset + 1: it has passed over control batches and compacted gaps, too.
        """
        places = dict(self.in_hand)
        first: dict[tuple[str, int], int] = {
            (record.topic, record.partition): record.offset for record in reversed(records[count:])
        }
        epochs = {
            (record.topic, record.partition): record.leader_epoch for record in records[:count]
        }
        for where, offset in first.items():
            key = TopicPartition(*where)
            if key in places:
                epoch = epochs.get(where, self._epochs_before.get(key, -1))
                places[key] = CommittedOffset(offset, epoch)
        return places

    # Saving.

    def unsaved(self, keys: Iterable[TopicPartition]) -> Places:
        """The finished places of these that the group does not have."""
        return {
            key: self.finished[key]
            for key in keys
            if key in self.finished and self._saved.get(key) != self.finished[key].offset
        }

    def is_saved(self, key: TopicPartition, offset: int) -> bool:
        """True when the group has this very offset."""
        return self._saved.get(key) == offset

    def saved(self, positions: Mapping[TopicPartition, int]) -> None:
        """The group has these."""
        self._saved.update(positions)
        for key, offset in positions.items():
            place = self.finished.get(key)
            known = place is not None and place.offset == offset
            self._bases[key] = place if known and place else CommittedOffset(offset)

    # Going back.

    def has_moved(self, key: TopicPartition) -> bool:
        """True when records were handed out that are not saved."""
        base, place = self._bases.get(key), self.in_hand.get(key) or self.finished.get(key)
        return base is not None and place is not None and base.offset != place.offset

    def base(self, key: TopicPartition) -> CommittedOffset | None:
        """Where the group saved last, or where reading began."""
        return self._bases.get(key)
