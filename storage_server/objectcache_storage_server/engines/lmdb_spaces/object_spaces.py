"""The records of all objects in one LMDB database: four bytes of a space's number, then the text.

A bucket's number is its space; long keys go on in segments, see `long_keys`. Values are bytes as
they are stored; what they mean is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lmdb

from objectcache_storage_server.engines.key_order import BUCKET_BYTES, raw_hash
from objectcache_storage_server.engines.lmdb_spaces import long_keys
from objectcache_storage_server.engines.lmdb_spaces.long_keys import (
    DIRECT_BYTES,
    END_OF_SPACE,
    FIRST_SEGMENT,
)
from objectcache_storage_server.engines.lmdb_spaces.seals import seal, unseal

_NAME_END_BYTES = BUCKET_BYTES + DIRECT_BYTES  # longer names go on in segments


def raw_space(space: int) -> bytes:
    """A space's number as it begins a raw key."""
    return space.to_bytes(BUCKET_BYTES, "big")


class ObjectSpaces:
    """The records that one transaction sees."""

    def __init__(self, txn: lmdb.Transaction[bytes], database: Any) -> None:
        self._txn = txn
        self._database = database

    # --- what `long_keys` needs ---

    def segment(self, space: int, pointer: bytes) -> int | None:
        """The segment that a pointer leads to; None where there is none, or it is damaged."""
        raw = raw_space(space) + pointer
        stored = self._txn.get(raw, db=self._database)
        body = None if stored is None else unseal(stored, raw_hash(raw))
        return None if body is None else int.from_bytes(body, "big")

    def items(self, space: int, first: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Texts of the space from `first` on, pointers too, and their values, in byte order."""
        head = raw_space(space)
        cursor = self._txn.cursor(self._database)
        if not cursor.set_range(head + first):
            return
        for raw, stored in cursor:
            if not raw.startswith(head):
                return
            yield raw[BUCKET_BYTES:], stored

    # --- look-ups ---

    def get(self, raw: bytes) -> bytes | None:
        """What is stored under a key, which follows its bucket's `raw_space`."""
        if len(raw) > _NAME_END_BYTES:
            return self._get_long(int.from_bytes(raw[:BUCKET_BYTES], "big"), raw[BUCKET_BYTES:])
        return self._txn.get(raw, db=self._database)

    def _get_long(self, space: int, key: bytes) -> bytes | None:
        located = long_keys.locate(self, space, key)
        if located is None:
            return None
        space, text = located
        return self._txn.get(raw_space(space) + text, db=self._database)

    def walk(
        self, space: int, first: bytes, end: bytes = END_OF_SPACE
    ) -> Iterator[tuple[bytes, bytes]]:
        """Keys from `first` to below `end`, and their values, in byte order."""
        return long_keys.walk(self, space, first, end)

    def is_empty(self, space: int) -> bool:
        """Whether the space holds nothing; a pointer leads to at least one key."""
        return next(self.items(space, b""), None) is None

    def bucket_from(self, number: int) -> int | None:
        """The first bucket from this number on that holds an object."""
        cursor = self._txn.cursor(self._database)
        if not cursor.set_range(raw_space(number)):
            return None
        found = int.from_bytes(cursor.key()[:BUCKET_BYTES], "big")
        return found if found < FIRST_SEGMENT else None

    # --- changes ---

    def put_many(
        self, items: Iterable[tuple[int, bytes, bytes]], new_segment: Callable[[], int]
    ) -> None:
        """Store (space, key, value) each, in place of what is under the key."""
        named = [(raw_space(space) + key, value) for space, key, value in items]
        self._txn.cursor(self._database).putmulti(self._raw_items(named, new_segment))

    def exchange_many(
        self, items: Iterable[tuple[bytes, bytes]], new_segment: Callable[[], int]
    ) -> list[bytes]:
        """Store (name, value) each, and return the values that were replaced. A name is a key
        behind its `raw_space`; no value was ever stored before.
        """
        raw_items = self._raw_items(items, new_segment)
        consumed, added = self._txn.cursor(self._database).putmulti(raw_items, overwrite=False)
        if added == consumed:
            return []
        replaced: list[bytes] = []
        for raw, value in raw_items:
            before = self._txn.get(raw, db=self._database)
            if before is not None and before != value:
                self._txn.put(raw, value, db=self._database)
                replaced.append(before)
        return replaced

    def delete(self, space: int, key: bytes) -> None:
        """Delete what is stored under a key, and the segments that it leaves empty."""
        way = long_keys.pointers_on_way(self, space, key)
        innermost = way[-1][2] if way else space
        rest = key[len(way) * DIRECT_BYTES :]
        self._txn.delete(raw_space(innermost) + rest, db=self._database)
        for above, pointer, segment in reversed(way):
            if not self.is_empty(segment):
                return
            self._txn.delete(raw_space(above) + pointer, db=self._database)

    def _raw_items(
        self, items: Iterable[tuple[bytes, bytes]], new_segment: Callable[[], int]
    ) -> list[tuple[bytes, bytes]]:
        """Where each is stored, sorted: neighbours share the way down the tree."""
        raw_items = [
            item if len(item[0]) <= _NAME_END_BYTES else self._long_item(item, new_segment)
            for item in items
        ]
        raw_items.sort()
        return raw_items

    def _long_item(
        self, item: tuple[bytes, bytes], new_segment: Callable[[], int]
    ) -> tuple[bytes, bytes]:
        name, value = item
        space = int.from_bytes(name[:BUCKET_BYTES], "big")
        space, key = self._make_way(space, name[BUCKET_BYTES:], new_segment)
        return raw_space(space) + key, value

    def _make_way(
        self, space: int, key: bytes, new_segment: Callable[[], int]
    ) -> tuple[int, bytes]:
        while long_keys.is_pointer(key):
            pointer = long_keys.pointer_to(key)
            segment = self.segment(space, pointer)
            if segment is None:
                segment = new_segment()
                raw = raw_space(space) + pointer
                stored = seal(raw_space(segment), raw_hash(raw))
                self._txn.put(raw, stored, db=self._database)
            space, key = segment, key[DIRECT_BYTES:]
        return space, key
