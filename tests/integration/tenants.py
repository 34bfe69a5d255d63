"""Users of a running server, made over the storage server's socket, and requests that they sign."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from objectcache_schemas.accounts import (
    AccessKey,
    AccountChange,
    DeleteKey,
    DeleteUser,
    Grant,
    PutKey,
    PutUser,
    User,
)
from objectcache_schemas.messages.buckets import Bucket, ConfigureBucket, GetBucket
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.operators.account_changes import AccountsChanged, ChangeAccounts
from objectcache_schemas.records import Quota
from tests.s3_clients import Answer, call, s3_client
from tests.servers import Credentials, RunningServer
from tests.storage_client import StorageClient

CREATED_S = 1.0e9


@dataclass(slots=True)
class Tenant:
    """A user with one key pair."""

    server: RunningServer
    user: User
    key: AccessKey

    @property
    def name(self) -> str:
        """The user's name."""
        return self.user.name

    @property
    def credentials(self) -> Credentials:
        """The key pair."""
        return Credentials(self.key.access_key, self.key.secret_key)

    def call(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """A request that this user signs."""
        return call(self.server, method, path, body, headers, credentials=self.credentials)

    def s3(self) -> Any:
        """A boto3 client; the caller closes it."""
        pair = self.credentials
        return s3_client(self.server, access_key=pair.access_key, secret_key=pair.secret_key)

    def change_user(self, **fields: Any) -> None:
        """Replace fields of the user."""
        self.user = msgspec.structs.replace(self.user, **fields)
        change(self.server, PutUser(user=self.user, create=False))

    def change_key(self, **fields: Any) -> None:
        """Replace fields of the key."""
        self.key = msgspec.structs.replace(self.key, **fields)
        change(self.server, PutKey(key=self.key, create=False))

    def another_key(self, **fields: Any) -> Tenant:
        """The same user with a key pair more."""
        key = new_key(self.name, **fields)
        change(self.server, PutKey(key=key, create=True))
        return Tenant(self.server, self.user, key)

    def delete_key(self) -> None:
        """Take the key away."""
        change(self.server, DeleteKey(access_key=self.key.access_key))

    def delete(self) -> None:
        """Take the user away; it must own nothing."""
        change(self.server, DeleteUser(name=self.name))

    def new_bucket(self) -> str:
        """A bucket of this user's."""
        name = f"{self.name}-{secrets.token_hex(4)}"
        made = self.call("PUT", f"/{name}")
        assert made.status == 200, made
        return name


def change(server: RunningServer, what: AccountChange) -> None:
    """Make a change; raises what the storage server answers."""
    with StorageClient(server.run_dir / "storage.sock") as storage:
        storage.ask(ChangeAccounts(change=what), AccountsChanged)


def new_key(user: str, **fields: Any) -> AccessKey:
    """A key pair of a user, not known to the server yet."""
    return AccessKey(
        access_key=f"{user}-{secrets.token_hex(4)}",
        secret_key=secrets.token_urlsafe(20),
        user=user,
        created_s=CREATED_S,
        **fields,
    )


def new_tenant(server: RunningServer, name: str = "tenant", **fields: Any) -> Tenant:
    """A user with a name that begins so, and its first key."""
    user = User(name=f"{name}-{secrets.token_hex(4)}", created_s=CREATED_S, **fields)
    change(server, PutUser(user=user, create=True))
    key = new_key(user.name)
    change(server, PutKey(key=key, create=True))
    return Tenant(server, user, key)


def grant(bucket: str, *access: Any, prefix: str = "") -> Grant:
    """A grant, in one line."""
    return Grant(bucket=bucket, access=access, prefix=prefix)


def set_bucket_quota(server: RunningServer, bucket: str, quota: Quota) -> None:
    """Give a bucket a quota."""
    with StorageClient(server.run_dir / "storage.sock") as storage:
        seen = storage.ask(GetBucket(name=bucket), Bucket).info.configuration
        changed = msgspec.structs.replace(seen, quota=quota)
        storage.ask(ConfigureBucket(name=bucket, configuration=changed, replaces=seen), Done)
