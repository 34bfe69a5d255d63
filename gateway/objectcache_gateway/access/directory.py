"""The accounts as the storage server has them, followed over a connection of their own.

They stay in memory, so a request needs no round trip to be authenticated, and a change is in force
as soon as it has travelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from objectcache_schemas.accounts import AccessKey, AdminToken, User
from objectcache_schemas.errors import ObjectCacheError, Unavailable
from objectcache_schemas.operators.account_changes import Directory, WatchDirectory

WATCH_S = 30.0  # one question; a change is told at once
ANSWER_SLACK_S = 10.0
RETRY_S, RETRY_MAX_S = 0.05, 1.0
LOAD_WAIT_S = 5.0  # of a request that comes before the first answer

logger = logging.getLogger("objectcache.gateway.directory")


class DirectorySource(Protocol):
    """A connection to the storage server, as far as it is needed here."""

    async def ask(
        self,
        message: WatchDirectory,
        reply_type: type[Directory],
        *,
        timeout_s: float | None = None,
    ) -> Directory:
        """Ask; raises `ObjectCacheError`."""
        ...

    def close(self) -> None:
        """Close."""
        ...


class AccessDirectory:
    """The users, keys and tokens in force.

    While the storage server cannot be asked, those last heard of stay in force, and what is known
    of buckets is not used (`is_followed` is false).
    """

    def __init__(self, connect: Callable[[], Awaitable[DirectorySource]]) -> None:
        self._connect = connect
        self._version = self._buckets_version = 0
        self._users: dict[str, User] = {}
        self._keys: dict[str, AccessKey] = {}
        self._tokens: dict[str, AdminToken] = {}
        self._loaded = asyncio.Event()
        self._is_followed = False
        self._following: asyncio.Task[None] | None = None
        self._on_buckets: list[Callable[[], None]] = []

    # --- what is known ---

    @property
    def is_loaded(self) -> bool:
        """Whether the accounts were ever heard of."""
        return self._loaded.is_set()

    @property
    def is_followed(self) -> bool:
        """Whether a change would be heard of now."""
        return self._is_followed

    @property
    def version(self) -> int:
        """Of the accounts; 0 before they are loaded."""
        return self._version

    @property
    def versions(self) -> tuple[int, int] | None:
        """Of the accounts and of the buckets; None where a change would not be heard of now."""
        return (self._version, self._buckets_version) if self._is_followed else None

    def user(self, name: str) -> User | None:
        """A user by name."""
        return self._users.get(name)

    def key(self, access_key: str) -> AccessKey | None:
        """A key pair by its access key."""
        return self._keys.get(access_key)

    @property
    def users(self) -> dict[str, User]:
        """All users by name; not to be changed."""
        return self._users

    @property
    def keys(self) -> dict[str, AccessKey]:
        """All key pairs by access key; not to be changed."""
        return self._keys

    @property
    def tokens(self) -> dict[str, AdminToken]:
        """All tokens of the admin API by id; not to be changed."""
        return self._tokens

    def on_buckets_changed(self, listener: Callable[[], None]) -> None:
        """Call `listener` when what is known of buckets may be outdated."""
        self._on_buckets.append(listener)

    async def wait_loaded(self, timeout_s: float = LOAD_WAIT_S) -> None:
        """Wait until the accounts are known. Raises `Unavailable`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._loaded.wait()
        except TimeoutError as error:
            raise Unavailable("the accounts are not known yet") from error

    # --- following ---

    def start(self) -> None:
        """Follow from now on."""
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Follow no more. A second call has no effect."""
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following

    async def _follow(self) -> None:
        wait_s = RETRY_S
        while True:
            try:
                connection = await self._connect()
                wait_s = RETRY_S
                await self._watch(connection)
            except ObjectCacheError as error:
                logger.log(
                    logging.WARNING if self._is_followed else logging.DEBUG,
                    "the accounts are not followed for now: %s",
                    error,
                )
            self._lost()
            await asyncio.sleep(wait_s)
            wait_s = min(RETRY_MAX_S, 2 * wait_s)

    async def _watch(self, connection: DirectorySource) -> None:
        """Ask again and again; raises what asking raises."""
        try:
            while True:
                # At first only for what there is: until it is heard, changes may have been missed.
                request = WatchDirectory(
                    known_version=self._version,
                    known_buckets_version=self._buckets_version,
                    timeout_s=WATCH_S if self._is_followed else 0.0,
                )
                timeout_s = request.timeout_s + ANSWER_SLACK_S
                self._take(await connection.ask(request, Directory, timeout_s=timeout_s))
        finally:
            connection.close()

    def _take(self, told: Directory) -> None:
        if told.version != self._version:
            self._users = {user.name: user for user in told.users}
            self._keys = {key.access_key: key for key in told.keys}
            self._tokens = {token.token_id: token for token in told.tokens}
            self._version = told.version
        if told.buckets_version != self._buckets_version:
            self._buckets_version = told.buckets_version
            self._tell_buckets()
        self._is_followed = True
        self._loaded.set()

    def _lost(self) -> None:
        self._is_followed = False
        self._tell_buckets()

    def _tell_buckets(self) -> None:
        for listener in self._on_buckets:
            listener()

    def __repr__(self) -> str:
        state = "followed" if self._is_followed else "not followed"
        return f"<AccessDirectory {len(self._users)} users, {len(self._keys)} keys, {state}>"
