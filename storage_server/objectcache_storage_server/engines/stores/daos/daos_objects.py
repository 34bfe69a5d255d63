"""Objects in DAOS: the keys of one DAOS object that is spread over all targets.

Below its name an object has its size and its bytes, written in one update. A read asks for both at
once, so that what is not there, or shorter, is seen. What is read lands in memory of the store
first: a call that is not answered in time cannot be called back, and writes later.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from ctypes import addressof, byref, c_uint32
from itertools import groupby
from operator import attrgetter

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.stores.daos.daos_access import (
    KeyAccess,
    KeyFetch,
    KeyPart,
    begin_fetch,
)
from objectcache_storage_server.engines.stores.daos.daos_client import DaosClient
from objectcache_storage_server.engines.stores.daos.libdaos import (
    ALL_TARGETS,
    ANCHOR_END,
    HASHED_KEYS,
    NO_TRANSACTION,
    Anchor,
    Buffer,
    BufferList,
    KeyDescription,
    check,
)
from objectcache_storage_server.engines.stores.landing_batch import LandingBatch, joined_ranges
from objectcache_storage_server.engines.stores.shared_store import (
    NAME_BYTES_MAX,
    LostObject,
    ObjectRead,
    StoredObject,
)
from objectcache_storage_server.engines.stores.store_calls import check_deadline

PAGE_NAMES = 256
UNDER_WAY_MAX = 64  # of removals, and of questions for sizes
_SIZE, _DATA = b"size", b"data"
_SIZE_BYTES = 8


class DaosObjects:
    """Writes, reads, lists and removes. Threads may do all of it at once."""

    def __init__(self, client: DaosClient, number: int, deadline_s: float) -> None:
        """In the DAOS object of this number. Raises `Unavailable`."""
        self._client = client
        self._object = client.open_object(number, HASHED_KEYS, ALL_TARGETS, deadline_s)

    def put(self, name: str, parts: Sequence[memoryview], deadline_s: float) -> None:
        """See `SharedStore.put`. The parts are copied: a call may outlive its deadline."""
        data = b"".join(parts)
        access = KeyAccess(
            name.encode(),
            KeyPart(_SIZE, memoryview(len(data).to_bytes(_SIZE_BYTES, "little"))),
            KeyPart(_DATA, memoryview(data), [(0, len(data))]),
        )
        what = f"put {name}"
        check(self._client.call(what, deadline_s, access.update(self._client, self._object)), what)

    def begin_reads(self, reads: Sequence[ObjectRead], batch: LandingBatch) -> None:
        """Begin the reads of a batch, one call an object."""
        by_name = attrgetter("name")
        for name, of in groupby(sorted(reads, key=attrgetter("name", "offset_bytes")), by_name):
            self._begin_read(name, list(of), batch)

    def _begin_read(self, name: str, reads: Sequence[ObjectRead], batch: LandingBatch) -> None:
        """Begin the reads of an object, in order of their offsets."""
        groups, extents = disjoint_extents([read for read in reads if read.landing])
        data = bytearray(sum(length_bytes for _, length_bytes in extents))
        size = bytearray(_SIZE_BYTES)
        parts = [KeyPart(_SIZE, memoryview(size))]
        if extents:
            parts.append(KeyPart(_DATA, memoryview(data), extents))
        fetch = begin_fetch(self._client, self._object, KeyAccess(name.encode(), *parts))

        def land(answer: Future[int]) -> None:
            if answer.cancelled():
                return
            try:
                check(answer.result(), f"read {name}", name)
                whole_bytes = size_of(fetch.access, size)
                for read in reads:
                    require(read, whole_bytes)
                position = 0
                for group, (offset_bytes, length_bytes) in zip(groups, extents, strict=True):
                    piece = memoryview(data)[position : position + length_bytes]
                    if not batch.land(group, piece, offset_bytes):
                        return
                    position += length_bytes
                batch.end_task()
            except (LostObject, Unavailable) as error:
                batch.fail(error)

        fetch.future.add_done_callback(land)

    def size_bytes(self, name: str, deadline_s: float) -> int:
        """How large an object is. Raises `LostObject`."""
        return self._size(name, *self._begin_size(name), deadline_s)

    def list(self, prefix: str, deadline_s: float) -> Iterator[StoredObject]:
        """See `SharedStore.list_objects`. It goes through all names."""
        under_way: deque[tuple[str, KeyFetch, bytearray]] = deque()
        for name in self._names(deadline_s):
            if name.startswith(prefix):
                under_way.append((name, *self._begin_size(name)))
            if len(under_way) == UNDER_WAY_MAX:
                yield from self._listed(*under_way.popleft(), deadline_s)
        while under_way:
            yield from self._listed(*under_way.popleft(), deadline_s)

    def remove(self, names: Iterable[str], deadline_s: float) -> None:
        """See `SharedStore.delete`."""
        under_way: deque[KeyFetch] = deque()
        what = "delete objects"
        for name in names:
            access = KeyAccess(name.encode())
            call = access.remove(self._client, self._object)
            under_way.append(KeyFetch(access, self._client.begin(call)))
            if len(under_way) == UNDER_WAY_MAX:
                check(self._client.answer(under_way.popleft().future, what, deadline_s), what)
        for fetch in under_way:
            check(self._client.answer(fetch.future, what, deadline_s), what)

    # --- parts ---

    def _begin_size(self, name: str) -> tuple[KeyFetch, bytearray]:
        size = bytearray(_SIZE_BYTES)
        access = KeyAccess(name.encode(), KeyPart(_SIZE, memoryview(size)))
        return begin_fetch(self._client, self._object, access), size

    def _size(self, name: str, fetch: KeyFetch, size: bytearray, deadline_s: float) -> int:
        what = f"look for {name}"
        check(self._client.answer(fetch.future, what, deadline_s), what, name)
        found = size_of(fetch.access, size)
        if not found:
            raise LostObject(name, "DAOS has no such object")
        return found

    def _listed(
        self, name: str, fetch: KeyFetch, size: bytearray, deadline_s: float
    ) -> Iterator[StoredObject]:
        try:
            yield StoredObject(name, self._size(name, fetch, size, deadline_s))
        except LostObject:
            return  # deleted meanwhile

    def _names(self, deadline_s: float) -> Iterator[str]:
        anchor = Anchor()
        while anchor.kind != ANCHOR_END:
            check_deadline(deadline_s, "list objects")
            yield from self._page(anchor, deadline_s)

    def _page(self, anchor: Anchor, deadline_s: float) -> Iterator[str]:
        """Names from the anchor on, which is moved."""
        count = c_uint32(PAGE_NAMES)
        keys = (KeyDescription * PAGE_NAMES)()
        text = ctypes.create_string_buffer(PAGE_NAMES * NAME_BYTES_MAX)
        buffer = Buffer(addressof(text), len(text), 0)
        buffers = BufferList(1, 0, ctypes.pointer(buffer))
        moved = Anchor.from_buffer_copy(anchor)
        answer = self._client.call(
            "list objects",
            deadline_s,
            lambda event: self._client.calls.obj_list_dkey(
                self._object, NO_TRANSACTION, byref(count), keys, addressof(buffers),
                addressof(moved), event,
            ),
        )  # fmt: skip
        check(answer, "list objects")
        position = 0
        for key in keys[: count.value]:
            yield text.raw[position : position + key.size_bytes].decode()
            position += key.size_bytes
        ctypes.memmove(byref(anchor), byref(moved), ctypes.sizeof(anchor))


def disjoint_extents(
    reads: Sequence[ObjectRead],
) -> tuple[list[list[ObjectRead]], list[tuple[int, int]]]:
    """Reads of an object, in order of their offsets, in groups that touch or overlap, and what each
    group reads: offset and bytes. DAOS refuses a call two of whose extents overlap.
    """
    bytes_max = sum(read.landing.nbytes for read in reads)
    groups = joined_ranges(reads, bytes_max, gap_bytes_max=0)
    extents = []
    for group in groups:
        first_bytes = group[0].offset_bytes
        end_bytes = max(read.offset_bytes + read.landing.nbytes for read in group)
        extents.append((first_bytes, end_bytes - first_bytes))
    return groups, extents


def size_of(access: KeyAccess, size: bytearray) -> int:
    """The object's bytes that a fetch of its size has found; 0 where there is none."""
    return int.from_bytes(size, "little") if access.size_bytes(0) == _SIZE_BYTES else 0


def require(read: ObjectRead, whole_bytes: int) -> None:
    """Raises `LostObject` where a read is not within an object of so many bytes."""
    if not whole_bytes:
        raise LostObject(read.name, "DAOS has no such object")
    if read.offset_bytes + read.landing.nbytes > whole_bytes:
        raise LostObject(read.name, f"it has {whole_bytes} bytes")
