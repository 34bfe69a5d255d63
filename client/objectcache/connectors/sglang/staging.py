"""Memory in which pages are put into chunk order before they are stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np

from objectcache.landing.targets import SessionTarget
from objectcache.payload import Bytes
from objectcache_schemas.errors import ObjectCacheError


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
