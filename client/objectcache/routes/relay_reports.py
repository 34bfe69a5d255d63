"""Reads what relays say of themselves, in the background, while deliveries are being made."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from objectcache.channel.http_channel import HttpChannel
from objectcache.channel.requests import GatewayRequest
from objectcache.routes.json_answers import read_json
from objectcache.thread_reserve import ThreadReserve
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.operators.relay_report import REPORT_PATH, RelayReport

# Drawn between these, so that many clients do not ask together. The second is for a while after the
# last delivery, so that the next one finds a report that counts.
INTERVAL_S, IDLE_INTERVAL_S = (0.05, 0.1), (0.3, 0.5)
BUSY_S, LINGER_S = 2.0, 30.0  # so long after the last delivery began
FIRST_ANSWER_S = 0.05  # that a delivery may begin later, so as not to go directly for want of one
ANSWER_S_MAX = 0.5  # what takes longer is nearly too old to count

logger = logging.getLogger("objectcache.routes.relay_reports")


class RelayReports:
    """Of one relay. Thread-safe."""

    def __init__(
        self,
        channel: HttpChannel,
        threads: ThreadReserve,
        told: Callable[[RelayReport, float], None],
        untold: Callable[[], bool],
    ) -> None:
        """`told` gets each report with the time at which it was asked for. `untold` hears of each
        that could not be read, and says whether none is asked for until it is wanted again.
        """
        self._channel = channel
        self._threads = threads
        self._told, self._untold = told, untold
        self._lock = threading.Lock()
        self._wanted_s = float("-inf")
        self._is_reading = False
        self._begun_s = float("-inf")
        self._answered = threading.Event()  # or failed to, since it is being read
        self._ended = threading.Event()

    def want(self) -> None:
        """A delivery is being made: read for a while."""
        with self._lock:
            self._wanted_s = time.monotonic()
            if self._is_reading or self._ended.is_set():
                return
            self._is_reading = True
            self._begun_s = self._wanted_s
            self._answered.clear()
        self._threads.start(self._read)

    def wait_first(self) -> None:
        """Wait for the first report since they are being read, or until there is none to be had;
        for FIRST_ANSWER_S after the beginning at most, so that later deliveries never wait.
        """
        if not self._answered.is_set():
            self._answered.wait(max(0.0, self._begun_s + FIRST_ANSWER_S - time.monotonic()))

    def _read(self) -> None:
        while (interval_s := self._interval_s()) is not None:
            asked_s = time.monotonic()
            try:
                reply = self._channel.call(GatewayRequest("GET", REPORT_PATH), ANSWER_S_MAX)
                self._told(read_json(reply.body, RelayReport), asked_s)
            except ObjectCacheError as error:
                logger.debug("no report: %s", error)
                if self._untold():
                    with self._lock:
                        self._wanted_s = float("-inf")
            self._answered.set()
            self._ended.wait(random.uniform(*interval_s))  # noqa: S311 - no secret

    def _interval_s(self) -> tuple[float, float] | None:
        """Between which to wait for the next; None where nobody wants one any more."""
        with self._lock:
            idle_s = time.monotonic() - self._wanted_s
            self._is_reading = not self._ended.is_set() and idle_s < LINGER_S
            if not self._is_reading:
                return None
            return INTERVAL_S if idle_s < BUSY_S else IDLE_INTERVAL_S

    def close(self) -> None:
        """Read nothing more. Repeating has no effect."""
        self._ended.set()

    def __repr__(self) -> str:
        return f"<RelayReports {'being read' if self._is_reading else 'not read'}>"
