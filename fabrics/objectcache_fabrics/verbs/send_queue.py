"""What the send queue of one queue pair holds, and what waits for it. Pure: time is an argument.

A queue of the device has a fixed depth, and only what is signalled tells of its end, along with
all before it. So less than half a queue in a row is unsignalled, and what nothing follows never
is. Announcements take one of the receives that the client has posted (a credit); without credits
they wait, and a later watermark of the same delivery takes an earlier one's place. The end of a
delivery is told otherwise, so nothing that waits is needed for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from objectcache_fabrics.peers import WriteDone
from objectcache_fabrics.verbs.address import Announcement
from objectcache_fabrics.verbs.queue_pair import Segment

WAITING_MAX = 4096  # deliveries whose watermark waits; more than any client that returns credits


class TransferKind(Enum):
    """What a transfer does with the client's memory."""

    WRITE = auto()
    READ = auto()


@dataclass(frozen=True, slots=True)
class VerbsTransfer:
    """A run of staging memory, and the client's memory that it is written to or read from.

    `done` is for whoever carries it out, None where a later transfer ends the same request.
    """

    operation: TransferKind
    segment: Segment
    address: int
    key: int
    done: WriteDone | None


class Work(NamedTuple):
    """One entry of the send queue: neighbours among the transfers, or an announcement."""

    number: int
    transfers: tuple[VerbsTransfer, ...]
    announcement: Announcement | None
    signalled: bool


class _Posted(NamedTuple):
    number: int
    transfers: tuple[VerbsTransfer, ...]
    posted_s: float


class SendQueue:
    """Decides what is posted next. Not thread-safe."""

    def __init__(
        self,
        *,
        depth: int,
        segments_max: int,
        read_segments_max: int,
        message_bytes_max: int,
        credits_max: int,
    ) -> None:
        assert depth >= 2
        self._depth = depth
        self._segments_max = {
            TransferKind.WRITE: segments_max,
            TransferKind.READ: read_segments_max,
        }
        self._message_bytes_max = message_bytes_max
        self._credits_max = credits_max
        self._announced_count = 0
        self._taken_count = 0
        self._transfers: deque[VerbsTransfer] = deque()
        self._end_layers: dict[int, int] = {}  # announcements that wait, by tag
        self._posted: deque[_Posted] = deque()
        self._next_number = 0
        self._unsignalled_count = 0
        self._completed_s = float("-inf")

    @property
    def credits(self) -> int:
        """Announcements that the client can take now."""
        return self._credits_max - (self._announced_count - self._taken_count)

    @property
    def posted_count(self) -> int:
        """Entries of the device's queue."""
        return len(self._posted)

    @property
    def posted_segments(self) -> list[Segment]:
        """This process's memory in them, which the device may be reading or writing."""
        return [transfer.segment for posted in self._posted for transfer in posted.transfers]

    @property
    def last_number(self) -> int:
        """Of the entry that was posted last; -1 before the first."""
        return self._next_number - 1

    @property
    def waits_since_s(self) -> float | None:
        """Since when the device is at the oldest entry; None where nothing is posted."""
        return max(self._posted[0].posted_s, self._completed_s) if self._posted else None

    def add(self, transfer: VerbsTransfer) -> None:
        """Have this carried out, after what was added before; split where no message is so long."""
        segment, address = transfer.segment, transfer.address
        while segment.length_bytes > self._message_bytes_max:
            taken_bytes = self._message_bytes_max
            first = segment._replace(length_bytes=taken_bytes)
            self._transfers.append(
                VerbsTransfer(transfer.operation, first, address, transfer.key, None)
            )
            segment = Segment(
                segment.address + taken_bytes, segment.length_bytes - taken_bytes, segment.local_key
            )
            address += taken_bytes
        self._transfers.append(
            VerbsTransfer(transfer.operation, segment, address, transfer.key, transfer.done)
        )

    def announce(self, announcement: Announcement) -> None:
        """Have the client told. What is announced is in place: it need not wait for transfers.

        Where too many wait, the one that has waited longest is dropped.
        """
        self._end_layers[announcement.tag] = announcement.end_layer
        if len(self._end_layers) > WAITING_MAX:
            del self._end_layers[next(iter(self._end_layers))]

    def forget(self, tag: int) -> None:
        """The delivery with this tag has ended: a watermark of it that waits would take a credit
        from those that go on.
        """
        self._end_layers.pop(tag, None)

    def return_credits(self, taken_count: int) -> None:
        """The client has taken this many announcements since the beginning, and posted a receive
        again for each. More than were sent, or less than it said before, is not believed.
        """
        self._taken_count = max(self._taken_count, min(taken_count, self._announced_count))

    def take(self, now_s: float) -> list[Work]:
        """What is to be posted now, in this order; it counts as posted."""
        taken: list[Work] = []
        while len(self._posted) < self._depth:
            if self._end_layers and self.credits:
                tag = next(iter(self._end_layers))
                announcement = Announcement(tag, self._end_layers.pop(tag))
                self._announced_count += 1
                taken.append(self._post((), announcement, now_s))
            elif self._transfers:
                taken.append(self._post(self._neighbours(), None, now_s))
            else:
                break
        return taken

    def _neighbours(self) -> tuple[VerbsTransfer, ...]:
        """The next transfer, with those behind it that continue it in the client's memory."""
        transfers = [self._transfers.popleft()]
        length_bytes = transfers[0].segment.length_bytes
        segments_max = self._segments_max[transfers[0].operation]
        while self._transfers and len(transfers) < segments_max:
            last, following = transfers[-1], self._transfers[0]
            length_bytes += following.segment.length_bytes
            if not _continues(last, following) or length_bytes > self._message_bytes_max:
                break
            transfers.append(self._transfers.popleft())
        return tuple(transfers)

    def _post(
        self, transfers: tuple[VerbsTransfer, ...], announcement: Announcement | None, now_s: float
    ) -> Work:
        more = self._transfers or (self._end_layers and self.credits)
        signalled = not more or self._unsignalled_count + 1 >= self._depth // 2
        self._unsignalled_count = 0 if signalled else self._unsignalled_count + 1
        number = self._next_number
        self._next_number += 1
        self._posted.append(_Posted(number, transfers, now_s))
        return Work(number, transfers, announcement, signalled)

    def completed(self, number: int, now_s: float) -> list[WriteDone]:
        """This entry has ended, and with it all before: whom to tell, in order."""
        self._completed_s = now_s
        done: list[WriteDone] = []
        while self._posted and self._posted[0].number <= number:
            done += _to_tell(self._posted.popleft().transfers)
        return done

    def abandon(self) -> list[WriteDone]:
        """Nothing is carried out any more, posted or not: whom to tell, in order."""
        done = [tell for posted in self._posted for tell in _to_tell(posted.transfers)]
        done += _to_tell(tuple(self._transfers))
        self._posted.clear()
        self._transfers.clear()
        self._end_layers.clear()
        return done

    def __repr__(self) -> str:
        return (
            f"<SendQueue {len(self._posted)}/{self._depth} posted, {len(self._transfers)} waiting, "
            f"{self.credits} credits>"
        )


def _continues(last: VerbsTransfer, following: VerbsTransfer) -> bool:
    return (
        following.operation is last.operation
        and following.key == last.key
        and following.address == last.address + last.segment.length_bytes
    )


def _to_tell(transfers: tuple[VerbsTransfer, ...]) -> list[WriteDone]:
    return [transfer.done for transfer in transfers if transfer.done is not None]
