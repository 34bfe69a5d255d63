"""Versions that are open for reading, and the cache that keeps them open for the next read.

A version is held while somebody reads it and while the cache holds it; its blob is released when
the last hold goes, so neither eviction nor deletion can take it from under a reader.

Rules of the cache. It holds only versions that the catalog holds. Whoever replaces or deletes
versions does so inside `changing`; meanwhile the cache answers nothing and takes nothing in, and
afterwards an `epoch` from before no longer counts, so a reader that looked up an old version cannot
put it back.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence

from objectcache_storage_server.engines.blobs.blob_catalog import BlobVersion
from objectcache_storage_server.engines.blobs.blob_store import OpenBlob


class OpenVersion:
    """One object version, and its blob open for reading."""

    __slots__ = ("blob", "block_bytes", "checksums", "holds", "size_bytes", "version")

    def __init__(self, version: BlobVersion, blob: OpenBlob) -> None:
        """Held once."""
        self.version = version
        self.blob = blob
        self.size_bytes = version.info.size_bytes
        self.block_bytes = version.block_bytes
        self.checksums = version.checksums
        self.holds = 1


class OpenVersionCache:
    """The versions read last, kept open; safe to use from any thread."""

    def __init__(self, versions_max: int, release: Callable[[Iterable[OpenBlob]], None]) -> None:
        """`release` lets go of blobs that nobody reads any more."""
        self._versions_max = versions_max
        self._release = release
        self._lock = threading.Lock()
        self._versions = OrderedDict[tuple[int, str], OpenVersion]()  # oldest use first
        self._epoch = 0
        self._changes = 0  # in progress

    def __repr__(self) -> str:
        return f"<OpenVersionCache {len(self._versions)}/{self._versions_max} versions>"

    def __len__(self) -> int:
        return len(self._versions)

    def hold(self, bucket_number: int, keys: Sequence[str]) -> tuple[int, dict[str, OpenVersion]]:
        """Hold what is cached of `keys`; returns it by key, and the epoch it belongs to."""
        held: dict[str, OpenVersion] = {}
        with self._lock:
            if self._changes:
                return self._epoch, held
            versions, move_to_end = self._versions, self._versions.move_to_end
            for key in keys:
                name = (bucket_number, key)
                each = versions.get(name)
                if each is not None and key not in held:
                    move_to_end(name)
                    each.holds += 1
                    held[key] = each
            return self._epoch, held

    def is_current(self, epoch: int) -> bool:
        """Whether no version was replaced or deleted since `epoch`, nor is just now."""
        with self._lock:
            return epoch == self._epoch and not self._changes

    def add(self, versions: Iterable[OpenVersion], epoch: int) -> None:
        """Keep versions that were looked up in the index during `epoch`, if that has not ended."""
        with self._lock:
            if epoch != self._epoch or self._changes:
                return
            for each in versions:
                version = each.version
                cached = self._versions.setdefault((version.bucket_number, version.info.key), each)
                if cached is each:
                    each.holds += 1
            over = max(0, len(self._versions) - self._versions_max)
            unused = self._released([self._versions.popitem(last=False)[1] for _ in range(over)])
        self._close(unused)

    def let_go(self, versions: Iterable[OpenVersion]) -> None:
        """The last hold that goes releases the blob."""
        with self._lock:
            unused = self._released(versions)
        self._close(unused)

    @contextlib.contextmanager
    def changing(self, bucket_number: int, keys: Iterable[str]) -> Generator[None, None, None]:
        """Versions under `keys` are replaced or deleted in the body."""
        with self._lock:
            self._changes += 1
            self._epoch += 1
        try:
            yield
        finally:
            with self._lock:
                gone = (self._versions.pop((bucket_number, key), None) for key in keys)
                unused = self._released(each for each in gone if each is not None)
                self._changes -= 1
                self._epoch += 1
            self._close(unused)

    def clear(self) -> None:
        """Let all go that nobody reads."""
        with self._lock:
            unused = self._released(self._versions.values())
            self._versions.clear()
        self._close(unused)

    @staticmethod
    def _released(versions: Iterable[OpenVersion]) -> list[OpenVersion]:
        unused: list[OpenVersion] = []
        for each in versions:
            each.holds -= 1
            if each.holds == 0:
                unused.append(each)
        return unused

    def _close(self, unused: Sequence[OpenVersion]) -> None:
        if unused:
            self._release([each.blob for each in unused])
