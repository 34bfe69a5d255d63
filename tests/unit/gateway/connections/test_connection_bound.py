"""What is counted when one connection ends for another."""

from __future__ import annotations

import logging
from typing import cast

import pytest

from objectcache_gateway.connections.end_connections import BoundConnection, ConnectionBound


class Client:
    """A connection that remembers whether it was ended."""

    def __init__(self) -> None:
        self.is_ended = False

    def end(self) -> None:
        self.is_ended = True


def a_client() -> tuple[Client, BoundConnection]:
    client = Client()
    return client, cast("BoundConnection", client)


@pytest.mark.asyncio
async def test_an_idle_connection_that_ends_for_a_newcomer_is_counted_as_a_tenants() -> None:
    bound = ConnectionBound(8, logging.getLogger("test"))
    first, connection = a_client()
    known = [connection, *(a_client()[1] for _ in range(7))]
    for connection in known:
        bound.arrived(connection)
    for connection in known[:7]:
        assert bound.request_begins(connection, "a")
        bound.request_ends(connection, stays_known=True)
    bound.arrived(a_client()[1])
    assert first.is_ended
    total = bound.crowding.total
    assert (total.tenants_ended, total.strangers_ended) == (1, 0)


@pytest.mark.asyncio
async def test_a_stranger_that_ends_for_a_newcomer_is_counted_as_one() -> None:
    bound = ConnectionBound(8, logging.getLogger("test"))
    oldest, connection = a_client()
    bound.arrived(connection)
    for _ in range(8):
        bound.arrived(a_client()[1])
    assert oldest.is_ended
    total = bound.crowding.total
    assert (total.tenants_ended, total.strangers_ended) == (0, 1)
