"""How many requests a gateway may let through now, by the quotas of their tenant and bucket."""

from __future__ import annotations

import time

from objectcache_schemas.messages.quotas import RequestsTaken, TakeRequests
from objectcache_storage_server.engines.engine_calls import EngineCalls
from objectcache_storage_server.quotas.books import Books


async def take_requests(books: Books, calls: EngineCalls, request: TakeRequests) -> RequestsTaken:
    """`TakeRequests`: what the quotas of the tenant and of the bucket leave now."""
    rates_per_s: dict[str, float] = {}
    user_rate = books.quotas.of_user(request.identity).requests_per_s
    if user_rate is not None:
        rates_per_s[f"user {request.identity}"] = user_rate
    if request.bucket:
        quota = books.quotas.known_of_bucket(request.bucket)
        if quota is None:
            quota = await calls.call(books.quotas.of_bucket, request.bucket)
        if quota.requests_per_s is not None:
            rates_per_s[f"bucket {request.bucket}"] = quota.requests_per_s
    if not rates_per_s:
        return RequestsTaken(granted=request.wanted, limited=False)
    now_s = time.monotonic()
    serving = books.serving()  # gateways ask all servers alike, so each gives its part
    parts_per_s = {name: rate / serving for name, rate in rates_per_s.items()}
    taken, wait_s = books.request_tokens.take(parts_per_s, request.wanted, now_s)
    return RequestsTaken(granted=taken, retry_after_s=wait_s)
