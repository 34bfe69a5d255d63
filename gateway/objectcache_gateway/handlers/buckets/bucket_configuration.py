"""How a bucket's configuration is changed: a part of it, whoever changes others meanwhile."""

from __future__ import annotations

from typing import Any

import msgspec

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.storage.change_bucket import change_configuration


async def configure(exchange: Exchange, **changes: Any) -> None:
    """Change these fields of the request's bucket. Raises as `change_configuration`."""
    await change_configuration(
        exchange.storage, exchange.bucket, lambda seen: msgspec.structs.replace(seen, **changes)
    )
