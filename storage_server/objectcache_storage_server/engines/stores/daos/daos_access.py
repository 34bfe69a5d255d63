"""A key of a DAOS object and the values below it, in the structures that a call takes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future
from ctypes import addressof, c_uint64
from typing import NamedTuple

import numpy as np

from objectcache_storage_server.engines.stores.daos.daos_client import Begin, DaosClient
from objectcache_storage_server.engines.stores.daos.libdaos import (
    ANY_SIZE,
    ARRAY,
    NO_TRANSACTION,
    SINGLE,
    Buffer,
    BufferList,
    Extent,
    Value,
)


class KeyPart(NamedTuple):
    """A value: `data` is written, or filled. Of an array of bytes, in the order of the extents."""

    name: bytes
    data: memoryview | None  # None asks for the size alone
    extents: Sequence[tuple[int, int]] = ()  # offset and bytes; none: not an array


class KeyAccess:
    """Keeps all that its structures point to."""

    def __init__(self, key: bytes, *parts: KeyPart) -> None:
        self._kept: list[object] = []
        self.key = self._buffer(memoryview(key))
        self.values = (Value * len(parts))()
        self.lists = (BufferList * len(parts))()
        self._has_data = all(part.data is not None for part in parts)
        for part, value, of_value in zip(parts, self.values, self.lists, strict=True):
            self._describe(part, value)
            if part.data is not None:
                buffer = self._buffer(part.data)
                of_value.count, of_value.buffers = 1, ctypes.pointer(buffer)

    def size_bytes(self, index: int) -> int:
        """Of a record of a value, after a fetch; 0 where it is not there."""
        return int(self.values[index].record_bytes)

    def fetch(
        self, client: DaosClient, handle: c_uint64, transaction: c_uint64 = NO_TRANSACTION
    ) -> Begin:
        """The call that reads it."""
        lists = self.lists if self._has_data else None
        return lambda event: client.calls.obj_fetch(
            handle, transaction, 0, addressof(self.key), len(self.values), self.values, lists,
            None, event,
        )  # fmt: skip

    def update(
        self,
        client: DaosClient,
        handle: c_uint64,
        conditions: int = 0,
        transaction: c_uint64 = NO_TRANSACTION,
    ) -> Begin:
        """The call that writes it, all or nothing."""
        return lambda event: client.calls.obj_update(
            handle, transaction, conditions, addressof(self.key), len(self.values), self.values,
            self.lists, event,
        )  # fmt: skip

    def remove(self, client: DaosClient, handle: c_uint64) -> Begin:
        """The call that removes the key, which may be gone already."""
        return lambda event: client.calls.obj_punch_dkeys(
            handle, NO_TRANSACTION, 0, 1, addressof(self.key), event
        )

    def _describe(self, part: KeyPart, value: Value) -> None:
        value.key = self._buffer(memoryview(part.name))
        value.extent_count = 1
        if part.extents:
            extents = (Extent * len(part.extents))(*(Extent(*each) for each in part.extents))
            self._kept.append(extents)
            value.kind, value.record_bytes = ARRAY, 1
            value.extent_count, value.extents = len(extents), extents
        else:
            value.kind = SINGLE
            value.record_bytes = ANY_SIZE if part.data is None else part.data.nbytes

    def _buffer(self, data: memoryview) -> Buffer:
        array = np.frombuffer(data, np.uint8)
        buffer = Buffer(array.__array_interface__["data"][0], data.nbytes, data.nbytes)
        self._kept.append((array, buffer))
        return buffer


class KeyFetch(NamedTuple):
    """A fetch that was begun, and what it fills."""

    access: KeyAccess
    future: Future[int]


def begin_fetch(client: DaosClient, handle: c_uint64, access: KeyAccess) -> KeyFetch:
    """Begin to read."""
    return KeyFetch(access, client.begin(access.fetch(client, handle)))
