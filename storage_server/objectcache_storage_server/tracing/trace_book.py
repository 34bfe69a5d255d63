"""The last deliveries' recorders by request id, running ones included."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from objectcache_schemas.errors import NotFound
from objectcache_schemas.operators.traces import DeliveryTrace, GetTraces, Traces
from objectcache_storage_server.tracing.recorder import DeliveryRecorder

TRACES_LISTED_MAX = 1000  # in one reply
LAYERS_LISTED_MAX = 100_000  # in one reply, which is then some MB; the latest trace is always in it


class TraceBook:
    """Keeps the `kept` deliveries that began last, and passes each on when it has ended.

    From any thread. Several deliveries may carry one request id.

    Args:
        kept: `scheduler.traces_kept`; 0 keeps none.
        export: Called with each recorder that ended, in the thread that ended it; must not block.
    """

    def __init__(self, kept: int, export: Callable[[DeliveryRecorder], None] | None = None) -> None:
        self._kept = kept
        self._export = export
        self._lock = threading.Lock()
        self._recorders: deque[DeliveryRecorder] = deque(maxlen=kept)
        self._by_id: dict[str, list[DeliveryRecorder]] = {}

    def begin(self, recorder: DeliveryRecorder) -> None:
        """A delivery begins; the oldest goes where there are too many."""
        if self._export is not None:
            recorder.when_ended(self._export)
        if not self._kept:
            return
        with self._lock:
            if len(self._recorders) == self._kept:
                self._forget(self._recorders[0])
            self._recorders.append(recorder)
            self._by_id.setdefault(recorder.request_id, []).append(recorder)

    def _forget(self, oldest: DeliveryRecorder) -> None:
        same_id = self._by_id[oldest.request_id]
        same_id.remove(oldest)
        if not same_id:
            del self._by_id[oldest.request_id]

    def find(self, request_id: str) -> list[DeliveryRecorder]:
        """The deliveries of a request, the latest first; none where it is unknown or too old."""
        with self._lock:
            return self._by_id.get(request_id, [])[::-1]

    def latest(self, limit: int) -> list[DeliveryRecorder]:
        """The last `limit` deliveries, the latest first."""
        with self._lock:
            return list(islice(reversed(self._recorders), limit))

    def answer(self, request: GetTraces, now_s: float) -> Traces:
        """The reply to `GetTraces`. Raises `NotFound` as it says."""
        limit = max(0, min(request.limit, TRACES_LISTED_MAX))
        if not request.request_id:
            return Traces(traces=tuple(_traces(self.latest(limit), now_s)))
        found = self.find(request.request_id)
        if not found:
            raise NotFound(
                f"no trace of request {request.request_id!r} is kept; the last {self._kept} "
                "deliveries' are (scheduler.traces_kept)"
            )
        return Traces(traces=tuple(_traces(found[:limit], now_s)))

    def __repr__(self) -> str:
        return f"<TraceBook {len(self._recorders)}/{self._kept} traces>"


def _traces(found: Iterable[DeliveryRecorder], now_s: float) -> Iterator[DeliveryTrace]:
    layer_count = 0
    for recorder in found:
        trace = recorder.trace(now_s)
        layer_count += len(trace.layers)
        if layer_count > max(LAYERS_LISTED_MAX, len(trace.layers)):
            return
        yield trace
