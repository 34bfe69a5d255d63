"""The conversation of a check: progress frames while it runs, then what it found.

A check reads the whole store, so a storage server runs one at a time, and ends it when whoever
asked for it hangs up or the server drains.
"""

from __future__ import annotations

import asyncio
from typing import Any

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.operators.engine_status import (
    CheckEnded,
    CheckEngine,
    CheckProgress,
    CheckReport,
)
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.conversations.sockets import ConnectionEnded
from objectcache_storage_server.service import Service

PROGRESS_INTERVAL_S = 0.3  # also tells a peer that waits that the server lives


class _RunningCheck:
    """A check in a worker thread, which asks after each step whether to go on."""

    def __init__(self, service: Service, repair: bool) -> None:
        self.latest = CheckReport()
        self._service = service
        self._stopped = False
        self.ended = asyncio.ensure_future(
            service.call(service.engine.check, repair, self._on_progress)
        )

    def _on_progress(self, report: CheckReport) -> bool:
        self.latest = report
        return not (self._stopped or self._service.draining)

    def stop(self) -> None:
        """Have it end at its next step."""
        self._stopped = True


async def serve_check(service: Service, talk: Conversation, request: CheckEngine) -> None:
    """`CheckEngine`. Raises `Busy` while another check runs, and what the engine raises."""
    service.admit_check()
    try:
        report = await _run(service, talk, request.repair)
    finally:
        service.end_check()
    await talk.send(CheckEnded(report=report))


async def _run(service: Service, talk: Conversation, repair: bool) -> CheckReport:
    check = _RunningCheck(service, repair)
    watching = asyncio.ensure_future(talk.stream.closed_by_peer())
    try:
        return await _follow(service, talk, check, watching)
    finally:
        check.stop()
        watching.cancel()
        await asyncio.gather(check.ended, watching, return_exceptions=True)


async def _follow(
    service: Service, talk: Conversation, check: _RunningCheck, watching: asyncio.Future[None]
) -> CheckReport:
    """Send progress until the check has ended. Raises `ConnectionEnded` where the peer left."""
    either: set[asyncio.Future[Any]] = {check.ended, watching}
    while True:
        await asyncio.wait(either, timeout=PROGRESS_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
        if check.ended.done():
            break
        if watching.done():
            raise ConnectionEnded
        async with asyncio.timeout(service.storage.send_stall_timeout_s):
            await talk.send(CheckProgress(report=check.latest))
    report = check.ended.result()
    if service.draining:
        raise Unavailable("the storage server is stopping; the check did not finish")
    return report
