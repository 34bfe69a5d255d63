"""Who waits for a change of the accounts or of the buckets, and is told of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

from objectcache_runtime.first_of import first_of
from objectcache_schemas.operators.account_changes import Directory, WatchDirectory
from objectcache_storage_server.accounts.account_book import AccountBook, as_directory

FOLLOWED_TIMEOUT_S = 1.0  # for a gateway that hangs; others need milliseconds


class Known(NamedTuple):
    """What a follower has put in force."""

    version: int
    buckets_version: int


class AccountDirectory:
    """The book's accounts as gateways follow them. `buckets_changed` is called from any thread."""

    def __init__(self, book: AccountBook, digest: Callable[[], int] | None = None) -> None:
        """`digest` tells of all buckets in a number that every server of the store finds alike,
        where there are others; without it changes are counted.
        """
        self._book = book
        self._digest = digest
        self._lock = threading.Lock()
        self._waiters: set[Callable[[], None]] = set()
        self._buckets_version = digest() if digest is not None else time.time_ns() // 1000
        self._followers: WeakKeyDictionary[object, Known] = WeakKeyDictionary()
        self._acknowledged: set[asyncio.Event] = set()
        book.on_change(self._wake)

    @property
    def buckets_version(self) -> int:
        """Another number after every change of a bucket, also over restarts."""
        return self._buckets_version

    def buckets_changed(self) -> None:
        """A bucket was made, deleted or configured: what gateways know of buckets is outdated.

        Called after the change, and before whoever asked for it is answered.
        """
        digest = self._digest
        with self._lock:
            self._buckets_version = self._buckets_version + 1 if digest is None else digest()
        self._wake()

    # --- who has heard of what; in the event loop ---

    def follows(self, follower: object, known: Known) -> None:
        """A follower asks for what comes after this, so it has put it in force."""
        self._followers[follower] = known
        self._tell_acknowledged()

    def left(self, follower: object) -> None:
        """A follower is gone."""
        self._followers.pop(follower, None)
        self._tell_acknowledged()

    def _tell_acknowledged(self) -> None:
        for event in self._acknowledged:
            event.set()

    async def wait_followed(self, version: int, timeout_s: float) -> None:
        """Wait until a version of the accounts is in force with all who follow.

        Whoever has not asked again when the time is over is waited for no more.
        """
        await self._wait(lambda known: known.version < version, timeout_s)

    async def wait_buckets_followed(self, timeout_s: float) -> None:
        """Wait until all who follow have heard of every change of a bucket up to now, as above."""
        await self._wait(lambda known: known.buckets_version != self._buckets_version, timeout_s)

    async def _wait(self, is_behind: Callable[[Known], bool], timeout_s: float) -> None:
        event = asyncio.Event()
        self._acknowledged.add(event)
        try:
            async with asyncio.timeout(timeout_s):
                while any(map(is_behind, self._followers.values())):
                    event.clear()
                    await event.wait()
        except TimeoutError:
            for follower, known in list(self._followers.items()):
                if is_behind(known):
                    del self._followers[follower]
        finally:
            self._acknowledged.discard(event)

    def _wake(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, set()
        for wake in waiters:
            wake()

    async def answer(self, request: WatchDirectory, closed: asyncio.Event) -> Directory:
        """The directory, once it is another than the one known, the time is over, or `closed` is
        set.
        """
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        with self._lock:
            self._waiters.add(wake)
        try:
            if self._is_known(request):
                await first_of(changed.wait(), closed.wait(), timeout_s=request.timeout_s)
        finally:
            with self._lock:
                self._waiters.discard(wake)
        return self._directory(request)

    def _is_known(self, request: WatchDirectory) -> bool:
        known = request.known_version, request.known_buckets_version
        return known == (self._book.version, self._buckets_version)

    def _directory(self, request: WatchDirectory) -> Directory:
        # The buckets' version first: a change in between is told again, and never missed.
        buckets_version = self._buckets_version
        version, accounts = self._book.directory()
        if version == request.known_version:
            return Directory(version=version, buckets_version=buckets_version)
        return as_directory(version, accounts, buckets_version)

    def __repr__(self) -> str:
        return f"<AccountDirectory {len(self._waiters)} waiting>"
