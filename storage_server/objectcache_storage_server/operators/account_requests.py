"""Requests about accounts: following them, changing them, and taking them along."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from objectcache_runtime.first_of import end, first_done
from objectcache_schemas.errors import NotFound
from objectcache_schemas.operators.account_changes import (
    AccountsChanged,
    AccountsExported,
    ChangeAccounts,
    ExportAccounts,
    ImportAccounts,
    WatchDirectory,
)
from objectcache_storage_server.accounts.directory import FOLLOWED_TIMEOUT_S, Known
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.puts.store_means import StoreMeans
from objectcache_storage_server.quotas.books import Books


async def serve_watch(means: StoreMeans, talk: Conversation, request: WatchDirectory) -> None:
    """`WatchDirectory`: answered once there is something to tell, or the time is over.

    It ends when the server drains, and when the gateway hangs up.
    """
    follower, followed, closed = talk.stream, means.books.directory, means.gates.entrance.closed
    if request.timeout_s:  # who does not wait does not follow
        known = Known(request.known_version, request.known_buckets_version)
        followed.follows(follower, known)
    await means.calls.call(means.books.accounts.purge)
    answering = asyncio.ensure_future(followed.answer(request, closed))
    watching = asyncio.ensure_future(talk.stream.closed_by_peer())
    try:
        await first_done(answering, watching)
        if answering.done():
            await talk.send(answering.result())
        else:
            followed.left(follower)
            talk.give_up()
    except BaseException:
        followed.left(follower)
        raise
    finally:
        await end(answering, watching)


async def change_accounts(means: StoreMeans, request: ChangeAccounts) -> AccountsChanged:
    """`ChangeAccounts`, answered when it is in force in every gateway that can be reached."""
    owned, created_s = buckets_of(means), created_s_of(means)
    return await _followed(
        means, await means.calls.call(means.books.accounts.change, request.change, owned, created_s)
    )


async def import_accounts(means: StoreMeans, request: ImportAccounts) -> AccountsChanged:
    """`ImportAccounts`, answered as a change."""
    data, passphrase = request.data, request.passphrase
    return await _followed(
        means,
        await means.calls.call(means.books.accounts.import_, data, passphrase, buckets_of(means)),
    )


def export_accounts(books: Books, request: ExportAccounts) -> AccountsExported:
    """`ExportAccounts`."""
    return AccountsExported(data=books.accounts.export(request.passphrase))


async def _followed(means: StoreMeans, version: int) -> AccountsChanged:
    await means.books.directory.wait_followed(version, FOLLOWED_TIMEOUT_S)
    return AccountsChanged(version=version)


def buckets_of(means: StoreMeans) -> Callable[[str], list[str]]:
    """What names the buckets that a user owns."""
    return lambda user: [one.name for one in means.calls.engine.each_bucket() if one.owner == user]


def created_s_of(means: StoreMeans) -> Callable[[str], float | None]:
    """What says when the bucket of a name was made."""

    def created_s(name: str) -> float | None:
        try:
            return means.calls.engine.bucket(name).created_s
        except NotFound:
            return None

    return created_s
