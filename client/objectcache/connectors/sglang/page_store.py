"""Pages of one pool, kept under one namespace: match, fetch, store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from objectcache.connectors.identity.namespace import KvNamespace
from objectcache.connectors.sglang.page_source import Page, PageSource, fill_page
from objectcache.connectors.store.load_budget import LoadBudget
from objectcache.connectors.store.outage import Outage
from objectcache.connectors.store.stored_chunks import match_prefix, put_chunks_absent
from objectcache.kv_bucket import KvBucket
from objectcache.landing.targets import SessionTarget
from objectcache.payload import Bytes
from objectcache_schemas.compute_windows import WHOLE_S
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.limits import MIB

# A batch of the engine is one request unless its pages are larger than this together.
FETCH_BYTES_MAX = 512 * MIB
PUT_BYTES_MAX = 128 * MIB  # also what an engine's rank keeps to put pages into order
DELIVERED_BYTES_PER_S_MIN = 32 * MIB  # a server that delivers slower than this is taken for dead


class PageStore:
    """A bucket's chunks under one namespace, one a page. Thread-safe.

    No method raises for what the store does: a failure is a miss, is logged, and where the store is
    out of reach nothing is asked of it for a while.
    """

    def __init__(
        self,
        bucket: KvBucket,
        namespace: KvNamespace,
        outage: Outage,
        *,
        lookup_timeout_s: float,
        timeout_s: float,
        load_bytes_max: int,
        put_memory: Callable[[int], SessionTarget] | None,
    ) -> None:
        """`lookup_timeout_s` bounds every silence of the server in a match, `timeout_s` in a load
        beside the time that its bytes take. `put_memory` is as in `PageStaging`. Raises
        `InvalidRequest` where `load_bytes_max` does not hold one page.
        """
        self.bucket = bucket
        self.namespace = namespace
        self._outage = outage
        self._lookup_timeout_s = lookup_timeout_s
        self._timeout_s = timeout_s
        chunk_bytes = bucket.chunk_bytes
        most = LoadBudget(load_bytes_max, chunk_bytes).chunk_count_max
        self._fetch_count_max = min(most, max(1, FETCH_BYTES_MAX // chunk_bytes))
        self._put_count_max = max(1, PUT_BYTES_MAX // chunk_bytes)
        staging_bytes = self._put_count_max * chunk_bytes
        self._staging = PageStaging(put_memory, staging_bytes)

    def patience_s(self, page_count: int) -> float:
        """How long a delivery of so many pages may take in all."""
        payload_bytes = page_count * self.bucket.chunk_bytes
        return self._timeout_s + payload_bytes / DELIVERED_BYTES_PER_S_MIN

    def match(self, hashes: Sequence[str]) -> int:
        """How many leading pages are stored, in one round trip; a scheduler may wait for it."""
        if not hashes:
            return 0
        keys = self.namespace.keys(hashes)
        match = partial(match_prefix, self.bucket, keys, self._lookup_timeout_s)
        return self._outage.attempt("a lookup", match, 0)

    def fetch(self, hashes: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Fill pages; for each whether it is filled. A page that is not was not touched."""
        filled: list[bool] = []
        for start in range(0, len(hashes), self._fetch_count_max):
            end = start + self._fetch_count_max
            keys, piece = self.namespace.keys(hashes[start:end]), pages[start:end]
            count = self._outage.attempt("a load", partial(self._fetch, keys, piece), 0)
            filled += [index < count for index in range(len(keys))]
            if count < len(keys):
                break
        return filled + [False] * (len(hashes) - len(filled))

    def store(
        self, hashes: Sequence[str], source: PageSource, parent_hash: str | None = None
    ) -> list[bool]:
        """Store pages that are not stored yet; for each whether it is stored now.

        A page that somebody else stored in other bytes, as rounding makes them, counts as stored.
        `parent_hash` is the page before the first one.
        """
        if not hashes:
            return []
        keys = self.namespace.keys(hashes)
        parent = self.namespace.keys([parent_hash])[0] if parent_hash else None
        done = self.match(hashes)
        while done < len(keys):
            end = done + self._put_count_max
            before = keys[done - 1] if done else parent
            put = partial(self._put_pages, keys[done:end], source, done, before)
            if not self._outage.attempt("a put", put, False):
                break
            done = min(end, len(keys))
        return [index < done for index in range(len(keys))]

    def close(self) -> None:
        """Let go of the memory for puts."""
        self._staging.close()

    def _fetch(self, keys: list[str], pages: Sequence[Page]) -> int:
        with self.bucket.fetch(
            keys, delivery="chunkwise", on_missing="truncate", compute_window_s=WHOLE_S
        ) as delivery:
            payload = delivery.wait(self.patience_s(len(keys)))
            for index in range(delivery.chunk_count):
                fill_page(pages[index], payload[:, index])
            return delivery.chunk_count

    def _put_pages(
        self, keys: list[str], source: PageSource, start: int, parent: str | None
    ) -> bool:
        chunk_bytes = self.bucket.chunk_bytes
        shape = (self.bucket.layout.num_layers, self.bucket.slice_bytes)
        end = start + len(keys)
        views = source.views(start, end)
        if views is not None:
            put_chunks_absent(self.bucket, keys, [view.reshape(shape) for view in views], parent)
            return True
        with self._staging.memory() as memory:
            chunks = memory[: len(keys) * chunk_bytes].reshape(len(keys), *shape)
            source.read(start, end, chunks)
            put_chunks_absent(self.bucket, keys, list(chunks), parent)
        return True

    def __repr__(self) -> str:
        return f"<PageStore {self.namespace.prefix} in {self.bucket.name}>"


class PageStaging:
    """One piece of memory for one put at a time, which the storage server reads by itself where it
    can: then what is copied into it is not copied again.
    """

    def __init__(self, register: Callable[[int], SessionTarget] | None, length_bytes: int) -> None:
        """`register` makes so many bytes of memory that the server reaches, or raises
        `ObjectCacheError`; without it puts go in bodies.
        """
        self._register = register
        self._length_bytes = length_bytes
        self._target: SessionTarget | None = None
        self._lock = threading.Lock()

    @contextmanager
    def memory(self) -> Generator[Bytes]:
        """uint8[length_bytes], for the length of the block; others wait."""
        with self._lock:
            try:
                yield self._array()
            except BaseException:
                # A put that failed may have lost the memory with the server's session.
                self._drop()
                raise

    def close(self) -> None:
        """Take the memory away from the server."""
        with self._lock:
            self._drop()

    def _array(self) -> Bytes:
        if self._register is not None and self._target is None:
            try:
                self._target = self._register(self._length_bytes)
            except ObjectCacheError:  # out of the server's reach: the body carries a copy
                return np.empty(self._length_bytes, np.uint8)
        if self._target is None:
            return np.empty(self._length_bytes, np.uint8)
        return self._target.array

    def _drop(self) -> None:
        if self._target is not None:
            self._target.close()
        self._target = None

    def __repr__(self) -> str:
        where = "registered" if self._target is not None else "private"
        return f"<PageStaging {self._length_bytes} bytes, {where}>"
