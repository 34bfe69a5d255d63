"""Whether the gateway that a relay's deliveries come from answers, and takes the job's key."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from objectcache_schemas.errors import AccessDenied, Busy, NotFound, ObjectCacheError

LOOK_S = 10.0  # between two looks while it answers
RETRY_S = 1.0
TOLD_EVERY_S = 30.0  # each code; another one is told at once
# Of the key, or of its signature: such a gateway refuses every get.
KEY_CODES = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "RequestTimeTooSkewed")

logger = logging.getLogger("objectcache.relay.watch_upstream")


def serves(refusal: ObjectCacheError) -> bool:
    """Whether who refuses so would answer gets of the job's."""
    if isinstance(refusal, AccessDenied):  # of the bucket that was asked for
        return refusal.code not in KEY_CODES
    return isinstance(refusal, NotFound | Busy)


class UpstreamWatch:
    """Looks from `start` to `stop`. `is_answering` is False until the first answer."""

    def __init__(
        self,
        ask: Callable[[], None],
        endpoint: str,
        clock: Callable[[], float] = time.monotonic,
        name: str = "relay",
    ) -> None:
        """`ask` blocks, and raises what the gateway says; `endpoint` and `name`, the command's,
        are for the log.
        """
        self._ask, self._endpoint, self._clock, self._name = ask, endpoint, clock, name
        self.is_answering = False
        self._told_s: dict[str, float] = {}  # by code
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; returns at once."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S if self.is_answering else RETRY_S)

    async def look(self) -> None:
        """One look."""
        try:
            await asyncio.to_thread(self._ask)
        except ObjectCacheError as error:
            if not serves(error):
                self._refused(error)
                return
        if self._told_s:
            logger.info("relay.endpoint %s answers", self._endpoint)
        self.is_answering, self._told_s = True, {}

    def _refused(self, error: ObjectCacheError) -> None:
        self.is_answering = False
        now_s = self._clock()
        if now_s - self._told_s.get(error.code, float("-inf")) >= TOLD_EVERY_S:
            self._told_s[error.code] = now_s
            logger.warning(
                "this %s can serve nobody: relay.endpoint %s: %s: %s",
                self._name,
                self._endpoint,
                error.code,
                error.message,
            )

    def __repr__(self) -> str:
        return f"<UpstreamWatch of {self._endpoint}, answering: {self.is_answering}>"
