"""Which ranges of which objects are cached, and in which slots. Pure: whoever uses it has a lock.

Every object has a slot of its own, whatever of it is there. What was only put, and nobody has read,
goes first, as long as it takes more than a quarter of the slots, oldest first; otherwise what was
read longest ago. So what is put and never read again, as most is, does not drive out what is read.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

UNREAD_PART = 4  # one of so many slots is left to what nobody has read


class CachedObject(msgspec.Struct, array_like=True, gc=False):
    """An object's slot, and which of its bytes are there: from `bounds[0]` up to `bounds[1]`, from
    `bounds[2]` up to `bounds[3]`, and so on.
    """

    slot: int
    bounds: list[int]

    def has(self, begin: int, end: int) -> bool:
        """Whether all bytes from `begin` up to `end` are there."""
        place = bisect.bisect_right(self.bounds, begin)
        return place % 2 == 1 and end <= self.bounds[place]

    def add(self, begin: int, end: int) -> None:
        """They are there from now on."""
        first = bisect.bisect_left(self.bounds, begin)
        last = bisect.bisect_right(self.bounds, end)
        edges = [begin] * (first % 2 == 0) + [end] * (last % 2 == 0)
        self.bounds[first:last] = edges


class CacheIndex:
    """Names and slots, from the one that goes first to the one that goes last."""

    def __init__(self, slot_count: int) -> None:
        self.slot_count = slot_count
        self.unread = OrderedDict[str, CachedObject]()
        self.read = OrderedDict[str, CachedObject]()
        self.evicted_objects = 0
        self._free: list[int] = []
        self._next_slot = 0  # of those that never were in use

    def __len__(self) -> int:
        return len(self.unread) + len(self.read)

    def __repr__(self) -> str:
        return f"<CacheIndex {len(self)}/{self.slot_count} slots, {len(self.unread)} unread>"

    def get(self, name: str) -> CachedObject | None:
        """An object of which something may be there."""
        return self.read.get(name) or self.unread.get(name)

    def find(self, name: str, begin: int, end: int) -> CachedObject | None:
        """The object, if these bytes of it are there: they are read now."""
        cached = self.get(name)
        if cached is None or not cached.has(begin, end):
            return None
        self._note_read(name, cached)
        return cached

    def place(self, name: str, *, is_read: bool) -> CachedObject:
        """The object's slot, which another one's may have to be, for bytes that `is_read` says were
        asked for, or were put.
        """
        cached = self.get(name)
        if cached is None:
            cached = self.unread[name] = CachedObject(self._slot(), [])
        if is_read:
            self._note_read(name, cached)
        return cached

    def remove(self, name: str) -> bool:
        """Forget an object; false where it is not known."""
        cached = self.read.pop(name, None) or self.unread.pop(name, None)
        if cached is not None:
            self._free.append(cached.slot)
        return cached is not None

    def restore(
        self, unread: Iterable[tuple[str, CachedObject]], read: Iterable[tuple[str, CachedObject]]
    ) -> None:
        """Into an empty index: what another one held, less what has no slot here. Slots are no two
        objects'.
        """
        for found, into in ((unread, self.unread), (read, self.read)):
            into.update((name, cached) for name, cached in found if cached.slot < self.slot_count)
        taken = {cached.slot for each in (self.unread, self.read) for cached in each.values()}
        self._next_slot = max(taken, default=-1) + 1
        self._free = [slot for slot in range(self._next_slot) if slot not in taken]

    def _note_read(self, name: str, cached: CachedObject) -> None:
        if self.unread.pop(name, None) is not None:
            self.read[name] = cached
        else:
            self.read.move_to_end(name)

    def _slot(self) -> int:
        if self._free:
            return self._free.pop()
        if self._next_slot < self.slot_count:
            self._next_slot += 1
            return self._next_slot - 1
        is_unread = len(self.unread) * UNREAD_PART > self.slot_count or not self.read
        _, evicted = (self.unread if is_unread else self.read).popitem(last=False)
        self.evicted_objects += 1
        return evicted.slot
