"""The accounts as a gateway follows them, and what it believes while it cannot."""

from __future__ import annotations

import asyncio

import pytest

from objectcache_gateway.access.directory import AccessDirectory
from objectcache_gateway.signing.credentials import CredentialStore, RootCredentials
from objectcache_schemas.accounts import AccessKey, User
from objectcache_schemas.errors import AccessDenied, Unavailable
from objectcache_schemas.operators.account_changes import Directory, WatchDirectory

ROOT = RootCredentials("rootkey", "root-secret", "environment")
ALICE = User(name="alice", created_s=1.0)
KEY = AccessKey(
    access_key="alice-1", secret_key="alice-secret", user="alice", created_s=1.0, expires_s=100.0
)


def told(version: int, buckets_version: int = 1, *records: User | AccessKey) -> Directory:
    return Directory(
        version=version,
        buckets_version=buckets_version,
        users=tuple(one for one in records if isinstance(one, User)),
        keys=tuple(one for one in records if isinstance(one, AccessKey)),
    )


class Storage:
    """A storage server that answers what a test puts into it; None is a lost connection."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[Directory | None] = asyncio.Queue()
        self.asked: list[WatchDirectory] = []
        self.was_asked = asyncio.Event()
        self.connections = 0

    async def connect(self) -> Storage:
        self.connections += 1
        return self

    async def ask(
        self,
        message: WatchDirectory,
        reply_type: type[Directory],
        *,
        timeout_s: float | None = None,
    ) -> Directory:
        self.asked.append(message)
        self.was_asked.set()
        assert timeout_s is not None
        assert timeout_s > message.timeout_s
        answer = await self.answers.get()
        if answer is None:
            raise Unavailable("gone")
        return answer

    def close(self) -> None:
        self.connections -= 1


async def until_asked(storage: Storage, count: int) -> None:
    """Until the directory has asked so often: everything before that was taken in."""
    while len(storage.asked) < count:
        storage.was_asked.clear()
        await storage.was_asked.wait()


@pytest.mark.asyncio
async def test_changes_are_followed_and_the_unchanged_is_kept() -> None:
    storage = Storage()
    directory = AccessDirectory(storage.connect)
    changes: list[int] = []
    directory.on_buckets_changed(lambda: changes.append(1))
    directory.start()
    storage.answers.put_nowait(told(5, 1, ALICE, KEY))
    await directory.wait_loaded()
    await until_asked(storage, 2)
    assert directory.key("alice-1") == KEY
    assert directory.is_followed
    assert len(changes) == 1
    storage.answers.put_nowait(told(5, 2))
    await until_asked(storage, 3)
    assert directory.user("alice") == ALICE
    assert len(changes) == 2
    storage.answers.put_nowait(told(6, 2, ALICE))
    await until_asked(storage, 4)
    assert directory.key("alice-1") is None
    assert len(changes) == 2
    assert [one.known_version for one in storage.asked] == [0, 5, 5, 6]
    assert storage.asked[0].timeout_s == 0.0
    await directory.close()
    await directory.close()
    assert storage.connections == 0


@pytest.mark.asyncio
async def test_while_it_cannot_be_asked_the_last_accounts_hold_and_buckets_are_not_believed() -> (
    None
):
    storage = Storage()
    directory = AccessDirectory(storage.connect)
    changes: list[int] = []
    directory.on_buckets_changed(lambda: changes.append(1))
    directory.start()
    storage.answers.put_nowait(told(5, 1, ALICE, KEY))
    await directory.wait_loaded()
    storage.answers.put_nowait(None)
    await until_asked(storage, 3)  # on another connection
    assert not directory.is_followed
    assert directory.is_loaded
    assert directory.key("alice-1") == KEY
    assert len(changes) == 2
    assert storage.asked[2].timeout_s == 0.0  # what there is now, at once
    storage.answers.put_nowait(told(5, 1))
    await until_asked(storage, 4)
    assert directory.is_followed
    await directory.close()


@pytest.mark.asyncio
async def test_before_the_first_answer_only_the_root_key_is_known() -> None:
    directory = AccessDirectory(Storage().connect)
    store = CredentialStore(ROOT, directory)
    assert store.secret_for("rootkey") == "root-secret"
    with pytest.raises(Unavailable):
        store.secret_for("alice-1")
    with pytest.raises(Unavailable, match="not known yet"):
        await directory.wait_loaded(0.0)


@pytest.mark.asyncio
async def test_a_key_that_is_not_in_force_is_none() -> None:
    storage = Storage()
    directory = AccessDirectory(storage.connect)
    now_s = [99.0]
    store = CredentialStore(ROOT, clock=lambda: now_s[0])
    assert store.secret_for("alice-1") is None  # without a directory there is the root key alone
    store.follow(directory)
    directory.start()
    storage.answers.put_nowait(told(1, 1, ALICE, KEY))
    await directory.wait_loaded()
    assert store.secret_for("alice-1") == "alice-secret"
    assert store.identity_for("alice-1") == "alice"
    assert store.caller_for("rootkey").is_root
    now_s[0] = 100.0
    assert store.secret_for("alice-1") is None
    now_s[0] = 0.0
    off = AccessKey(
        access_key="off", secret_key="12345678", user="alice", created_s=1.0, enabled=False
    )
    orphan = AccessKey(access_key="orphan", secret_key="12345678", user="bob", created_s=1.0)
    locked = User(name="carol", created_s=1.0, enabled=False)
    hers = AccessKey(access_key="hers", secret_key="12345678", user="carol", created_s=1.0)
    storage.answers.put_nowait(told(2, 1, ALICE, KEY, off, orphan, locked, hers))
    await until_asked(storage, 3)
    told_of = {
        "off": "the access key is disabled",
        "orphan": "the access key does not exist",
        "hers": "the access key's user is disabled",
        "never": "the access key does not exist",
    }
    for name, why in told_of.items():
        assert store.secret_for(name) is None
        with pytest.raises(AccessDenied, match=why) as caught:
            store.caller_for(name)
        assert caught.value.code == "InvalidAccessKeyId"
    now_s[0] = 100.0
    former = store.former_key_for("alice-1")
    assert former is not None
    assert former.why == "the access key has expired"
    assert store.former_key_for("rootkey") is None
    await directory.close()


@pytest.mark.asyncio
async def test_a_key_called_like_the_root_key_is_the_root_key() -> None:
    storage = Storage()
    directory = AccessDirectory(storage.connect)
    directory.start()
    taken = AccessKey(access_key="rootkey", secret_key="12345678", user="alice", created_s=1.0)
    storage.answers.put_nowait(told(1, 1, ALICE, taken))
    await directory.wait_loaded()
    store = CredentialStore(ROOT, directory)
    assert store.secret_for("rootkey") == "root-secret"
    assert store.caller_for("rootkey").is_root
    assert "alice-secret" not in repr(store) + repr(directory)
    await directory.close()
