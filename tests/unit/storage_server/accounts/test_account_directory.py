"""Following the accounts: told at once, never missed, never late at the end."""

from __future__ import annotations

import asyncio

import pytest

from objectcache_schemas.accounts import PutUser, User
from objectcache_schemas.operators.account_changes import Directory, WatchDirectory
from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.accounts.directory import AccountDirectory, Known

LONG_S = 60.0


class Followed:
    """A book, its directory, and an event that ends all waits."""

    def __init__(self) -> None:
        self.book = AccountBook()
        self.directory = AccountDirectory(self.book)
        self.closed = asyncio.Event()

    def add_user(self, name: str) -> None:
        user = User(name=name, created_s=1.0)
        self.book.change(PutUser(user=user, create=True), lambda user: [])

    async def ask(self, known: Directory | None = None, timeout_s: float = LONG_S) -> Directory:
        request = WatchDirectory(
            known_version=known.version if known else 0,
            known_buckets_version=known.buckets_version if known else 0,
            timeout_s=timeout_s,
        )
        return await self.directory.answer(request, self.closed)

    async def waiting(self, known: Directory) -> asyncio.Task[Directory]:
        task = asyncio.create_task(self.ask(known))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        return task


@pytest.mark.asyncio
async def test_whoever_knows_nothing_is_told_at_once() -> None:
    followed = Followed()
    followed.add_user("alice")
    told = await followed.ask()
    assert [user.name for user in told.users] == ["alice"]
    assert told.version == followed.book.version


@pytest.mark.asyncio
async def test_a_change_in_another_thread_is_told_to_all_who_wait() -> None:
    followed = Followed()
    known = await followed.ask()
    waiting = [await followed.waiting(known) for _ in range(3)]
    await asyncio.to_thread(followed.add_user, "alice")
    for task in waiting:
        told = await task
        assert [user.name for user in told.users] == ["alice"]
        assert told.buckets_version == known.buckets_version


@pytest.mark.asyncio
async def test_a_change_of_a_bucket_is_told_without_the_accounts() -> None:
    followed = Followed()
    followed.add_user("alice")
    known = await followed.ask()
    task = await followed.waiting(known)
    await asyncio.to_thread(followed.directory.buckets_changed)
    told = await task
    assert told.version == known.version
    assert not told.users
    assert told.buckets_version != known.buckets_version


@pytest.mark.asyncio
async def test_a_change_between_two_questions_is_not_missed() -> None:
    followed = Followed()
    known = await followed.ask()
    followed.add_user("alice")
    followed.add_user("bob")
    told = await followed.ask(known)
    assert {user.name for user in told.users} == {"alice", "bob"}


@pytest.mark.asyncio
async def test_without_a_change_the_wait_ends_with_its_time() -> None:
    followed = Followed()
    known = await followed.ask()
    told = await followed.ask(known, timeout_s=0.0)
    assert (told.version, told.users) == (known.version, ())


@pytest.mark.asyncio
async def test_the_end_of_the_server_ends_every_wait() -> None:
    followed = Followed()
    task = await followed.waiting(await followed.ask())
    followed.closed.set()
    assert (await task).users == ()
    assert "0 waiting" in repr(followed.directory)


@pytest.mark.asyncio
async def test_whoever_leaves_is_forgotten() -> None:
    followed = Followed()
    task = await followed.waiting(await followed.ask())
    assert "1 waiting" in repr(followed.directory)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert "0 waiting" in repr(followed.directory)
    followed.add_user("alice")  # wakes nobody that is gone


class Follower:
    """Whoever follows, as an object that can be forgotten."""


@pytest.mark.asyncio
async def test_a_change_is_waited_for_until_all_who_follow_have_it() -> None:
    directory = Followed().directory
    first, second = Follower(), Follower()
    directory.follows(first, Known(1, 0))
    directory.follows(second, Known(1, 0))
    waiting = asyncio.create_task(directory.wait_followed(2, LONG_S))
    await asyncio.sleep(0)
    directory.follows(first, Known(2, 0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    directory.follows(second, Known(3, 0))
    await waiting
    await directory.wait_followed(2, 0.0)


@pytest.mark.asyncio
async def test_a_change_of_a_bucket_is_waited_for_until_all_who_follow_have_heard() -> None:
    directory = Followed().directory
    first, second = Follower(), Follower()
    before, after = directory.buckets_version, directory.buckets_version + 1
    directory.follows(first, Known(1, before))
    directory.follows(second, Known(1, before))
    directory.buckets_changed()
    waiting = asyncio.create_task(directory.wait_buckets_followed(LONG_S))
    directory.follows(first, Known(1, after))
    directory.follows(second, Known(2, before))  # has heard of the accounts alone
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    directory.follows(second, Known(2, after))
    await waiting


@pytest.mark.asyncio
async def test_whoever_left_or_hangs_is_not_waited_for_again() -> None:
    directory = Followed().directory
    gone, hanging = Follower(), Follower()
    directory.follows(gone, Known(1, 0))
    directory.follows(hanging, Known(1, 0))
    directory.left(gone)
    await directory.wait_followed(2, 0.0)  # the time is over for the one that hangs
    await directory.wait_followed(2, LONG_S)
    directory.follows(Follower(), Known(1, 0))  # forgotten with its connection
    await directory.wait_followed(2, LONG_S)
