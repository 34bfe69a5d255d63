"""Users of a running server, made with the messages that the admin server sends."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from objectcache_schemas.accounts import AccessKey, Grant, PutKey, PutUser, User
from objectcache_schemas.operators.account_changes import AccountsChanged, ChangeAccounts
from tests.servers import RunningServer
from tests.storage_client import StorageClient


@dataclass(frozen=True, slots=True)
class AddedUser:
    """A user and its only access key."""

    name: str
    access_key: str
    secret_key: str = field(repr=False)


def add_user(
    server: RunningServer,
    name: str,
    *,
    grants: Sequence[Grant] = (),
    scope: Sequence[Grant] = (),
) -> AddedUser:
    """Make a user with one key; `scope` narrows what the key may do."""
    user = AddedUser(name, "OC" + secrets.token_hex(9).upper(), secrets.token_urlsafe(30))
    now_s = time.time()
    record = User(name=name, created_s=now_s, grants=tuple(grants))
    key = AccessKey(
        access_key=user.access_key,
        secret_key=user.secret_key,
        user=name,
        created_s=now_s,
        scope=tuple(scope),
    )
    with StorageClient(server.run_dir / "storage.sock") as storage:
        for change in (PutUser(user=record, create=True), PutKey(key=key, create=True)):
            storage.ask(ChangeAccounts(change=change), AccountsChanged)
    return user
