"""How long whoever follows the accounts waits for an answer."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest

from objectcache_runtime.networking.stream_socket import StreamSocket
from objectcache_schemas.errors import Unavailable
from objectcache_schemas.operators.account_changes import WatchDirectory
from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.engines.engine_calls import EngineCalls
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.operators import account_requests
from objectcache_storage_server.operators.account_requests import AccountMeans, serve_watch
from objectcache_storage_server.quotas.books import Books, StoreCompany


@pytest.mark.asyncio
async def test_a_watch_at_a_server_that_is_cut_off_ends_before_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(account_requests, "CURRENT_LOOK_S", 0.005)
    is_current = True
    looked = asyncio.Event()

    def look() -> bool:
        looked.set()
        return is_current

    engine = MemoryEngine()
    books = Books(engine, AccountBook(), StoreCompany(lambda: 2, look))
    calls = EngineCalls(engine)
    gateway, near = socket.socketpair()
    means = AccountMeans(calls, books, asyncio.Event())
    known = books.versions
    assert known is not None
    request = WatchDirectory(
        known_version=known.accounts, known_buckets_version=known.buckets, timeout_s=3600.0
    )
    with closing(gateway), closing(StreamSocket(near)) as stream:
        watching = asyncio.create_task(serve_watch(means, Conversation(stream), request))
        for _ in range(3):
            looked.clear()
            await looked.wait()
        assert not watching.done()
        is_current = False
        with pytest.raises(Unavailable, match="does not hear of changes"):
            await asyncio.wait_for(watching, 30.0)
    calls.close()
