"""How an object's attributes are changed: some of them, whoever changes others meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.handlers.objects.objects import stat_object
from objectcache_schemas.errors import Conflict, PreconditionFailed
from objectcache_schemas.messages.reads import Object
from objectcache_schemas.messages.writes import ReplaceAttributes
from objectcache_schemas.records import ObjectAttributes

CHANGE_ATTEMPTS_MAX = 5  # each fails only because somebody else's change has succeeded


async def change_attributes(
    exchange: Exchange, change: Callable[[ObjectAttributes], ObjectAttributes]
) -> None:
    """Replace the attributes of the request's object by what `change` makes of them.

    Raises `NotFound` (NoSuchKey), and `Conflict` (OperationAborted) where others change the object
    all the time.
    """
    for _ in range(CHANGE_ATTEMPTS_MAX):
        seen = await stat_object(exchange)
        request = ReplaceAttributes(
            bucket=exchange.bucket, seen=seen, attributes=change(seen.attributes)
        )
        try:
            await exchange.storage.call(request, Object)
        except PreconditionFailed:
            continue
        return
    raise Conflict("the object is being changed all the time; try again", code="OperationAborted")
