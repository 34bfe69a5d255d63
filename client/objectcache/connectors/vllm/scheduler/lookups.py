"""How many blocks of a prompt are stored, asked beside the scheduler's loop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from objectcache.connectors.identity.namespace import KvNamespace, keys_of_all_ranks
from objectcache.connectors.store.outage import Outage
from objectcache.connectors.vllm.store import Complaints

logger = logging.getLogger("objectcache.connectors.vllm")
WAITING_MAX = 256  # lookups under way; a request beyond is computed
THREADS = 8


class Lookup:
    """One question under way. Asking for its result never blocks."""

    def __init__(self, answer: Future[int] | None, started_s: float, timeout_s: float) -> None:
        """Without an `answer` nothing is stored."""
        self._answer = answer
        self.started_s = started_s
        self._timeout_s = timeout_s

    def result(self, now_s: float) -> int | None:
        """Leading blocks that are stored; None until that is known, 0 when it takes too long."""
        if self._answer is None:
            return 0
        if self._answer.done():
            return 0 if self._answer.cancelled() else self._answer.result()
        if now_s - self.started_s < self._timeout_s:
            return None
        self._answer.cancel()
        return 0


NOTHING_STORED = Lookup(None, 0.0, 0.0)


class Lookups:
    """Asks in threads of its own, one round trip a lookup. What fails counts as nothing stored, and
    a server that failed is left alone for a while.
    """

    def __init__(self, match: Callable[[Sequence[str]], int], timeout_s: float) -> None:
        """`match` tells how many leading keys are stored."""
        self._match = match
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(THREADS, "objectcache-lookup")
        self._under_way = threading.Semaphore(WAITING_MAX)
        self._outage = Outage(logger)
        self._defects = Complaints(logger, "looking up stored KV failed, prompts are computed")
        self.count = 0  # of the store being asked

    @property
    def failures(self) -> int:
        """Lookups that failed so far."""
        return self._outage.failure_count + self._defects.count

    def begin(self, ranks: Sequence[KvNamespace], hashes: Sequence[bytes]) -> Lookup:
        """Ask how many leading blocks every rank has stored. Nothing is asked of a server that
        failed a moment ago, nor beyond WAITING_MAX.
        """
        now_s = time.monotonic()
        if not hashes or self._outage.rest_s or not self._under_way.acquire(blocking=False):
            return Lookup(None, now_s, self._timeout_s)
        self.count += 1
        answer = self._threads.submit(self._ask, ranks, hashes)
        answer.add_done_callback(lambda _: self._under_way.release())
        return Lookup(answer, now_s, self._timeout_s)

    def _ask(self, ranks: Sequence[KvNamespace], hashes: Sequence[bytes]) -> int:
        keys = keys_of_all_ranks(ranks, hashes)
        try:
            matched = self._outage.attempt("a lookup", lambda: self._match(keys), 0)
        except Exception as error:  # whatever it is, the scheduler must go on
            self._defects.add(error)
            return 0
        return matched // len(ranks)

    def close(self) -> None:
        """End the threads; what is under way ends with its timeout."""
        self._threads.shutdown(wait=False, cancel_futures=True)
