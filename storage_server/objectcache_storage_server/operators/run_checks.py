"""The conversation of a check: progress frames while it runs, then what it found.

A check reads the whole store, so a storage server runs one at a time, and ends it when whoever
asked for it hangs up or the server drains.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager

from objectcache_runtime.first_of import first_done
from objectcache_runtime.networking.stream_socket import ConnectionEnded
from objectcache_schemas.errors import Busy, Unavailable
from objectcache_schemas.operators.engine_status import (
    CheckEnded,
    CheckEngine,
    CheckProgress,
    CheckReport,
)
from objectcache_storage_server.admission.gates import Gates
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.engines.engine_calls import EngineCalls

CHECK_RETRY_AFTER_S = 60.0  # a check reads the whole store
PROGRESS_INTERVAL_S = 0.3  # also tells a peer that waits that the server lives


class Checks:
    """The checks of one store."""

    def __init__(self, calls: EngineCalls, gates: Gates, stall_timeout_s: float) -> None:
        """`stall_timeout_s`: storage.send_stall_timeout_s, for whoever is told of progress."""
        self._calls = calls
        self._gates = gates
        self._stall_timeout_s = stall_timeout_s
        self._lock = threading.Lock()
        self._checking = False

    async def serve(self, talk: Conversation, request: CheckEngine) -> None:
        """`CheckEngine`. Raises `Busy` while another check runs, and what the engine raises."""
        with self.admitted():
            report = await self._run(talk, request.repair)
        await talk.send(CheckEnded(report=report))

    @contextmanager
    def admitted(self) -> Generator[None]:
        """A check, for the length of the block. Raises `Busy` while another runs."""
        if self._gates.draining:
            raise Unavailable("the storage server is stopping")
        with self._lock:
            if self._checking:
                raise Busy(
                    "another check of this store is running", retry_after_s=CHECK_RETRY_AFTER_S
                )
            self._checking = True
        try:
            yield
        finally:
            self._checking = False

    async def _run(self, talk: Conversation, repair: bool) -> CheckReport:
        check = _RunningCheck(self._calls, self._gates, repair)
        watching = asyncio.ensure_future(talk.stream.closed_by_peer())
        try:
            return await self._follow(talk, check, watching)
        finally:
            check.stop()
            watching.cancel()
            await asyncio.gather(check.ended, watching, return_exceptions=True)

    async def _follow(
        self, talk: Conversation, check: _RunningCheck, watching: asyncio.Future[None]
    ) -> CheckReport:
        """Send progress until the check has ended. Raises `ConnectionEnded` where the peer left."""
        while True:
            await first_done(check.ended, watching, timeout_s=PROGRESS_INTERVAL_S)
            if check.ended.done():
                break
            if watching.done():
                raise ConnectionEnded
            async with asyncio.timeout(self._stall_timeout_s):
                await talk.send(CheckProgress(report=check.latest))
        report = check.ended.result()
        if self._gates.draining:
            raise Unavailable("the storage server is stopping; the check did not finish")
        return report


class _RunningCheck:
    """A check in a worker thread, which asks after each step whether to go on."""

    def __init__(self, calls: EngineCalls, gates: Gates, repair: bool) -> None:
        self.latest = CheckReport()
        self._gates = gates
        self._stopped = False
        self.ended = asyncio.ensure_future(
            calls.call(calls.engine.check, repair, self._on_progress)
        )

    def _on_progress(self, report: CheckReport) -> bool:
        self.latest = report
        return not (self._stopped or self._gates.draining)

    def stop(self) -> None:
        """Have it end at its next step."""
        self._stopped = True
