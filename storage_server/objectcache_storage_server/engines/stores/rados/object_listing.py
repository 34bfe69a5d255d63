"""Listing a namespace: pages of names, and the sizes of those that are asked for."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from ctypes import byref, c_void_p

from objectcache_storage_server.engines.stores.rados.librados import ListedObject, RadosPool
from objectcache_storage_server.engines.stores.rados.operations import Deadlines, SizeAnswer
from objectcache_storage_server.engines.stores.shared_store import (
    LostObject,
    StoredObject,
    StoreTimeout,
)
from objectcache_storage_server.engines.stores.store_calls import check_deadline

PAGE_OBJECTS = 1000
SIZES_MAX = 64  # asked for at a time


class ObjectListing:
    """Lists by a thread of its own: the library's call for it cannot be given up, and ends by the
    library's own timeout where an OSD does not answer. Who waits for it returns at the deadline.
    """

    def __init__(self, deadlines: Deadlines, pool: RadosPool) -> None:
        self._deadlines, self._pool = deadlines, pool
        self._executor = ThreadPoolExecutor(1, "rados-listing")

    def objects(self, prefix: str, deadline_s: float) -> Iterator[StoredObject]:
        """See `SharedStore.list_objects`."""
        cursor: c_void_p | None = None
        while True:
            check_deadline(deadline_s, "list objects")
            page = self._executor.submit(self._page, cursor)
            try:
                left_s = min(deadline_s - time.monotonic(), threading.TIMEOUT_MAX)
                names, cursor = page.result(max(left_s, 0.0))
            except TimeoutError:
                page.add_done_callback(self._free_page)
                raise StoreTimeout(f"pool {self._pool.name} was not listed in time") from None
            try:
                wanted = (name for name in names if name.startswith(prefix))
                yield from self._sized(wanted, deadline_s)
            except BaseException:
                self._free(cursor)
                raise
            if cursor is None:
                return

    def close(self) -> None:
        """Wait for the thread; the library's timeout bounds that."""
        self._executor.shutdown()

    def _sized(self, names: Iterator[str], deadline_s: float) -> Iterator[StoredObject]:
        under_way: deque[SizeAnswer] = deque()
        try:
            for name in names:
                if len(under_way) == SIZES_MAX:
                    yield from ended(under_way.popleft())
                under_way.append(SizeAnswer(self._deadlines, self._pool, name, deadline_s))
            while under_way:
                yield from ended(under_way.popleft())
        finally:
            for answer in under_way:
                answer.wait()

    def _page(self, cursor: c_void_p | None) -> tuple[list[str], c_void_p | None]:
        """The names from a cursor on, which is freed, and where the next begin."""
        calls, handle = self._pool.calls, self._pool.handle
        start = cursor or c_void_p(calls.quick.object_list_begin(handle))
        finish = c_void_p(calls.quick.object_list_end(handle))
        after = c_void_p(calls.quick.object_list_begin(handle))  # which the call moves on
        found = (ListedObject * PAGE_OBJECTS)()
        try:
            count = calls.waiting.object_list(
                handle, start, finish, PAGE_OBJECTS, None, 0, found, byref(after)
            )
            self._pool.check(count, "the listing")
            names = [
                ctypes.string_at(item.name, item.name_bytes).decode() for item in found[:count]
            ]
            calls.quick.object_list_free(count, found)
            if not calls.quick.object_list_is_end(handle, after):
                kept, after = after, c_void_p()
                return names, kept
            return names, None
        finally:
            for each in (start, finish, after):
                self._free(each)

    def _free_page(self, page: Future[tuple[list[str], c_void_p | None]]) -> None:
        if page.cancelled() or page.exception() is not None:
            return
        self._free(page.result()[1])

    def _free(self, cursor: c_void_p | None) -> None:
        if cursor:
            self._pool.calls.quick.object_list_cursor_free(self._pool.handle, cursor)


def ended(answer: SizeAnswer) -> Iterator[StoredObject]:
    """The object, if it is still there."""
    with suppress(LostObject):
        yield StoredObject(answer.name, answer.end())
