"""Requests about accounts: following them, changing them, and taking them along."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from objectcache_runtime.first_of import end, first_done
from objectcache_schemas.errors import NotFound, Unavailable
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
from objectcache_storage_server.engines.engine_calls import EngineCalls
from objectcache_storage_server.quotas.books import Books

CURRENT_LOOK_S = 1.0  # between two looks whether this server still hears of changes


@dataclass(frozen=True, slots=True)
class AccountMeans:
    """What requests about accounts are served with; `closed` is set when the server drains."""

    calls: EngineCalls
    books: Books
    closed: asyncio.Event


async def serve_watch(means: AccountMeans, talk: Conversation, request: WatchDirectory) -> None:
    """`WatchDirectory`: answered once there is something to tell, or the time is over.

    It ends when the server drains or is cut off from its store, and when the gateway hangs up.
    """
    follower, followed, closed = talk.stream, means.books.directory, means.closed
    if request.timeout_s:  # who does not wait does not follow
        known = Known(request.known_version, request.known_buckets_version)
        followed.follows(follower, known)
    purging = asyncio.ensure_future(means.calls.call(means.books.accounts.purge))
    answering = asyncio.ensure_future(followed.answer(request, closed))
    watching = asyncio.ensure_future(talk.stream.closed_by_peer())
    cut_off = asyncio.ensure_future(_until_cut_off(means.books))
    try:
        await first_done(answering, watching, cut_off)
        if not means.books.is_current():
            raise Unavailable("this server does not hear of changes now; follow them at another")
        if answering.done():
            await talk.send(answering.result())
        else:
            followed.left(follower)
            talk.give_up()
    except BaseException:
        followed.left(follower)
        raise
    finally:
        await end(answering, watching, cut_off, purging)


async def _until_cut_off(books: Books) -> None:
    while books.is_current():  # noqa: ASYNC110 - nobody tells: it ceases as time passes
        await asyncio.sleep(CURRENT_LOOK_S)


async def change_accounts(means: AccountMeans, request: ChangeAccounts) -> AccountsChanged:
    """`ChangeAccounts`, answered when it is in force in every gateway that can be reached."""
    owned, created_s = buckets_of(means), created_s_of(means)
    return await _followed(
        means, await means.calls.call(means.books.accounts.change, request.change, owned, created_s)
    )


async def import_accounts(means: AccountMeans, request: ImportAccounts) -> AccountsChanged:
    """`ImportAccounts`, answered as a change."""
    data, passphrase = request.data, request.passphrase
    return await _followed(
        means,
        await means.calls.call(means.books.accounts.import_, data, passphrase, buckets_of(means)),
    )


def export_accounts(means: AccountMeans, request: ExportAccounts) -> AccountsExported:
    """`ExportAccounts`."""
    return AccountsExported(data=means.books.accounts.export(request.passphrase))


async def _followed(means: AccountMeans, version: int) -> AccountsChanged:
    await means.books.directory.wait_followed(version, FOLLOWED_TIMEOUT_S)
    return AccountsChanged(version=version)


def buckets_of(means: AccountMeans) -> Callable[[str], list[str]]:
    """What names the buckets that a user owns."""
    return lambda user: [one.name for one in means.calls.engine.each_bucket() if one.owner == user]


def created_s_of(means: AccountMeans) -> Callable[[str], float | None]:
    """What says when the bucket of a name was made."""

    def created_s(name: str) -> float | None:
        try:
            return means.calls.engine.bucket(name).created_s
        except NotFound:
            return None

    return created_s
