"""Users, keys and tokens as the storage server knows them now.

Every look asks for what has changed since the last one, a round trip on the same host, so that a
change is seen by the next request. While the storage server cannot be asked, `known` are the last.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from objectcache_gateway.storage.storage_fleet import StorageFleet
from objectcache_schemas.accounts import AccessKey, AccountChange, AdminToken, PutUser, User
from objectcache_schemas.errors import NotFound
from objectcache_schemas.operators.account_changes import (
    AccountsChanged,
    ChangeAccounts,
    Directory,
    WatchDirectory,
)


@dataclass(frozen=True, slots=True)
class KnownAccounts:
    """All accounts at one moment, by name."""

    users: dict[str, User] = field(default_factory=dict[str, User])
    keys: dict[str, AccessKey] = field(default_factory=dict[str, AccessKey])
    tokens: dict[str, AdminToken] = field(default_factory=dict[str, AdminToken])

    def user(self, name: str) -> User:
        """The user; raises `NotFound`."""
        if name not in self.users:
            raise NotFound(f"there is no user {name!r}", code="NoSuchEntity")
        return self.users[name]

    def key(self, access_key: str) -> AccessKey:
        """The key; raises `NotFound`."""
        if access_key not in self.keys:
            raise NotFound(f"there is no access key {access_key!r}", code="NoSuchEntity")
        return self.keys[access_key]

    def token(self, token_id: str) -> AdminToken:
        """The token; raises `NotFound`."""
        if token_id not in self.tokens:
            raise NotFound(f"there is no token {token_id!r}", code="NoSuchEntity")
        return self.tokens[token_id]

    def keys_of(self, user: str) -> list[AccessKey]:
        """The user's keys."""
        return [key for key in self.keys.values() if key.user == user]


class AccountsView:
    """Follows the accounts by asking, and changes them."""

    def __init__(self, storage: StorageFleet) -> None:
        self._storage = storage
        self._version = 0  # never one that is known
        self._asking = asyncio.Lock()  # so that an older answer never replaces a newer one
        self.changing = asyncio.Lock()  # held from the look that a change builds on to the change
        self.known = KnownAccounts()

    async def look(self) -> KnownAccounts:
        """The accounts now. Raises `Unavailable`."""
        async with self._asking:
            directory = await self._storage.call(
                WatchDirectory(known_version=self._version, known_buckets_version=0, timeout_s=0.0),
                Directory,
            )
            if directory.version != self._version:
                self._version = directory.version
                self.known = KnownAccounts(
                    {user.name: user for user in directory.users},
                    {key.access_key: key for key in directory.keys},
                    {token.token_id: token for token in directory.tokens},
                )
            return self.known

    async def change(self, change: AccountChange) -> None:
        """Make one change; raises what the storage server refuses it with."""
        await self._storage.call(ChangeAccounts(change=change), AccountsChanged)

    async def put_user(self, user: User) -> None:
        """Replace a user that exists."""
        await self.change(PutUser(user=user, create=False))

    def __repr__(self) -> str:
        return f"<AccountsView version {self._version}, {len(self.known.users)} users>"
