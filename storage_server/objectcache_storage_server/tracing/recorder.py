"""One delivery's life as it happens: where its time went, and when each layer came.

Every moment between a request's arrival at the gateway and the end of its delivery belongs to one
phase, so that the phases add up to the duration (paper, figure 10):

    control_plane  until it is planned: the gateway, parsing, looking chunks up, planning
    storage        at least one fragment is being read, whatever else goes on
    network        nothing is being read, and bytes wait for the client to take them: a piece of
                   the body is being sent, or everything was read and the end has not come yet
    queue          the rest: it waits for admission, for a rate, or for its turn on the link.
                   Pacing is queue: the bytes are held back, neither device nor client is slow

`client` comes on top: what the client spent before it sent the request, as it says. So a large
`storage` asks for faster devices or more reader threads, `network` for a faster client or link,
`queue` for a higher cap, another policy or fewer tenants, and `control_plane` for fewer, larger
requests.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

from objectcache_runtime.metrics.metric_cells import Histogram
from objectcache_schemas.compute_windows import WindowSource
from objectcache_schemas.errors import WireError
from objectcache_schemas.operators.traces import DeliveryTrace, LayerTrace, TracePhase

_CONTROL_PLANE, _QUEUE, _STORAGE, _NETWORK = range(4)
_NOT_YET = math.nan
PHASES: tuple[str, ...] = ("client", "control_plane", "queue", "storage", "network")


class DeliverySummary(NamedTuple):
    """A delivery that has ended, in a few numbers. Without a `delivery` it was refused."""

    tenant: str
    path: str
    transport: str
    delivery: str
    policy: str
    chunk_count: int
    read_bytes: int
    spared_bytes: int  # that were not read and sent, because what is whole was encoded
    duration_s: float  # from the arrival at the gateway
    first_layer_s: float | None  # from the same moment until the first of several was in place
    rate_bytes_per_s: float | None  # the mean of those it had
    achieved_bytes_per_s: float | None  # of a rate
    phases_s: tuple[float, ...]  # of `PHASES`
    error_code: str
    nic: str  # that it went to; empty where none was named


class DeliveryRecorder:
    """Records one delivery. Times are seconds of one monotonic clock, given by the caller.

    Any thread may call any method; each takes a lock of its own for a few additions. `accepted`
    comes before the first fragment, `ended` once nothing is read or sent any more. `ended` without
    `accepted` is a request that was refused. What comes after `ended` is without effect, except for
    `layers_consumed`: a GPU goes on after the last byte.

    Args:
        request_id: The id under which the trace is found.
        bucket: Bucket of the request.
        tenant: Who is charged with it.
        started_s: Arrival at the storage server.
        started_unix_s: The same moment as Unix time.
        client_s: What the client spent before it sent the request, as it says.
        gateway_s: What the gateway spent before it passed the request on, as it says.
        traceparent: W3C Trace Context of the request's span; empty where it is not traced.
        path: That the request asks for; empty where it leaves it to the server.
        policy: In force when it came. `accepted` says what both were in the end.
        nic: The storage NIC that it goes to, by its tenant's name; empty where none is named.
        reads: Where the time of each fragment's read is counted.
    """

    def __init__(
        self,
        request_id: str,
        bucket: str,
        tenant: str,
        *,
        started_s: float,
        started_unix_s: float,
        client_s: float = 0.0,
        gateway_s: float = 0.0,
        traceparent: str = "",
        path: str = "",
        policy: str = "",
        nic: str = "",
        reads: Histogram | None = None,
    ) -> None:
        self.request_id = request_id
        self._reads = reads
        self.traceparent = traceparent
        self.engine_s = 0.0  # in the engine, of all readers together
        self._bucket, self._tenant, self._nic = bucket, tenant, nic
        self._client_s, self._gateway_s = _duration(client_s), _duration(gateway_s)
        self._zero_s = started_s - self._gateway_s  # arrival at the gateway
        self._zero_unix_s = started_unix_s - self._gateway_s
        self._lock = threading.Lock()
        # One phase at a time; `_spent_s` is what went to each until `_now_s`.
        self._phase = _CONTROL_PLANE
        self._now_s = started_s
        self._spent_s = [self._gateway_s, 0.0, 0.0, 0.0]
        self._queued_s = 0.0  # of the time before acceptance
        self._readers = 0
        self._sending = False
        self._read_bytes = self._payload_bytes = self._decoded_bytes = 0
        self._accepted_s: float | None = None
        self._ended_s: float | None = None
        self._error: WireError | None = None
        self._on_end: Callable[[DeliveryRecorder], None] | None = None
        # What `accepted` says
        self._path, self._policy = path, policy
        self._transport = self._delivery = ""
        self._chunk_count = 0
        self._compute_window_s: float | None = None
        self._window_source = WindowSource.NONE.value
        self._rate_bytes_per_s: float | None = None
        self._rates_bytes = self._rates_s = 0.0  # what earlier rates came to, and for how long
        self._rate_since_s = started_s
        # By layer, from `_first_layer`
        self._first_layer = self._ready_layer = self._consumed_layer = 0
        self._first_read_s, self._ready_s, self._consumed_s = array("d"), array("d"), array("d")
        self._computes_s = array("d")  # as the client reported them, one a layer at most

    def when_ended(self, on_end: Callable[[DeliveryRecorder], None]) -> None:
        """Have `on_end` called once, in the thread that calls `ended`. It must not block."""
        self._on_end = on_end

    # --- what happens ---

    def queued(self, seconds: float) -> None:
        """The request waited this long for admission, before it was planned.

        Later waits need no word: planned, with nothing read or sent, is waiting.
        """
        with self._lock:
            if self._accepted_s is None:
                self._queued_s += _duration(seconds)

    def planned(self, now_s: float) -> None:
        """All is known but the rate; until it is accepted it waits for that."""
        with self._lock:
            self._advance(now_s)
            self._phase = _QUEUE

    def accepted(
        self,
        *,
        path: str,
        transport: str,
        delivery: str,
        policy: str,
        chunk_count: int,
        payload_bytes: int,
        first_layer: int,
        end_layer: int,
        compute_window_s: float | None,
        window_source: str,
        rate_bytes_per_s: float | None,
        now_s: float,
        decoded_bytes: int | None = None,
    ) -> None:
        """The delivery has its rate, if it gets one, and may be read from now on. `decoded_bytes`
        is what the payload has once it is decoded; None is as much.

        A later call changes the rate alone.
        """
        with self._lock:
            self._advance(now_s)
            self._change_rate(rate_bytes_per_s)
            if self._accepted_s is not None:
                return
            self._accepted_s = self._now_s
            self._phase = _QUEUE
            self._path, self._transport = path, transport
            self._delivery, self._policy = delivery, policy
            self._chunk_count, self._payload_bytes = chunk_count, payload_bytes
            self._decoded_bytes = payload_bytes if decoded_bytes is None else decoded_bytes
            self._compute_window_s, self._window_source = compute_window_s, window_source
            self._first_layer = self._ready_layer = self._consumed_layer = first_layer
            not_yet = [_NOT_YET] * (end_layer - first_layer)
            self._first_read_s, self._ready_s, self._consumed_s = (
                array("d", not_yet),
                array("d", not_yet),
                array("d", not_yet),
            )

    def fragment_begun(self, layer: int, now_s: float) -> None:
        """A reader has taken a fragment that begins with `layer`."""
        with self._lock:
            self._advance(now_s)
            self._readers += 1
            self._phase = _STORAGE
            index = layer - self._first_layer
            first_read_s = self._first_read_s
            if 0 <= index < len(first_read_s) and first_read_s[index] != first_read_s[index]:
                first_read_s[index] = now_s  # it was NaN

    def fragment_read(self, layer: int, length_bytes: int, read_s: float, now_s: float) -> None:
        """The fragment is in memory; the engine had it for `read_s`.

        One that failed, or that came too late, is told with `length_bytes` 0.
        """
        if self._reads is not None:
            self._reads.observe(read_s)
        with self._lock:
            self._advance(now_s)
            self.engine_s += read_s
            self._read_bytes += length_bytes
            self._readers -= 1
            if not self._readers:
                self._phase = self._idle_phase()

    def layers_ready(self, end_layer: int, now_s: float) -> None:
        """All delivered layers below `end_layer` are in place."""
        with self._lock:
            self._ready_layer = self._mark(self._ready_s, self._ready_layer, end_layer, now_s)

    def sending_begun(self, now_s: float) -> None:
        """The body's sender waits for the socket; one piece at a time."""
        self._set_sending(True, now_s)

    def sending_ended(self, now_s: float) -> None:
        """The socket has taken the piece, or never will."""
        self._set_sending(False, now_s)

    def layers_consumed(self, end_layer: int, now_s: float, compute_s: float | None = None) -> None:
        """The client is through with the layers below `end_layer`, and computed `compute_s` on the
        last of them; None where it says nothing that could be a compute window.
        """
        with self._lock:
            if compute_s is not None and len(self._computes_s) < len(self._ready_s):
                self._computes_s.append(compute_s)
            self._consumed_layer = self._mark(
                self._consumed_s, self._consumed_layer, end_layer, now_s
            )

    def ended(self, now_s: float, error: WireError | None) -> None:
        """Nothing is read or sent for it any more; `error` None is success. Once only."""
        with self._lock:
            if self._ended_s is not None:
                return
            self._advance(now_s)
            self._ended_s = self._now_s
            self._error = error
        if self._on_end is not None:
            self._on_end(self)

    def _set_sending(self, sending: bool, now_s: float) -> None:
        with self._lock:
            self._advance(now_s)
            self._sending = sending
            if not self._readers:
                self._phase = self._idle_phase()

    def _advance(self, now_s: float) -> None:
        """Give the time since the last event to the phase that was on.

        Threads read the clock before they take the lock, so an event may be a little late; it takes
        no time back.
        """
        elapsed_s = now_s - self._now_s
        if elapsed_s > 0 and self._ended_s is None:
            self._spent_s[self._phase] += elapsed_s
            self._now_s = now_s

    def _idle_phase(self) -> int:
        """The phase while nothing is being read."""
        if self._accepted_s is None:
            return _CONTROL_PLANE
        if self._sending or self._read_bytes >= self._payload_bytes:
            return _NETWORK
        return _QUEUE

    def _mark(self, times_s: array[float], begin: int, end_layer: int, now_s: float) -> int:
        """Note `now_s` for the layers from `begin` that are not noted; returns how far it got."""
        end = min(end_layer, self._first_layer + len(times_s))
        for layer in range(begin, end):
            times_s[layer - self._first_layer] = now_s
        return max(begin, end)

    # --- what became of it ---

    def trace(self, now_s: float | None = None) -> DeliveryTrace:
        """All that is known; at any time.

        Times count from the arrival at the gateway. While the delivery is under way `duration_s` is
        None, and the phases reach to `now_s`, or to the last event where that is not given.
        """
        with self._lock:
            if now_s is not None:
                self._advance(now_s)
            return DeliveryTrace(
                request_id=self.request_id,
                bucket=self._bucket,
                tenant=self._tenant,
                path=self._path,
                transport=self._transport,
                delivery=self._delivery,
                policy=self._policy,
                chunk_count=self._chunk_count,
                payload_bytes=self._payload_bytes,
                compute_window_s=self._compute_window_s,
                window_source=self._window_source,
                reported_window_s=median(self._computes_s) if self._computes_s else None,
                rate_bytes_per_s=self._assigned_bytes_per_s(),
                achieved_bytes_per_s=self._achieved_bytes_per_s(),
                started_unix_s=self._zero_unix_s,
                duration_s=None if self._ended_s is None else self._ended_s - self._zero_s,
                phases=self._phases(),
                layers=tuple(self._layers()),
                error=self._error,
                nic=self._nic,
                decoded_bytes=self._decoded_bytes,
            )

    def summary(self) -> DeliverySummary:
        """What is counted of it, once it has ended; cheaper than its trace."""
        with self._lock:
            has_layers = len(self._ready_s) > 1
            assigned = self._assigned_bytes_per_s()
            return DeliverySummary(
                self._tenant,
                self._path,
                self._transport,
                self._delivery,
                self._policy,
                self._chunk_count,
                self._read_bytes,
                0 if self._error else self._decoded_bytes - self._payload_bytes,
                self._now_s - self._zero_s,
                self._since_zero(self._ready_s[0]) if has_layers else None,
                assigned,
                self._achieved_bytes_per_s() if assigned else None,
                self._phase_seconds(),
                self._error.code if self._error else "",
                self._nic,
            )

    @property
    def accepted_after_s(self) -> float | None:
        """From the arrival at the gateway to acceptance; None where that did not come."""
        return None if self._accepted_s is None else self._accepted_s - self._zero_s

    def _change_rate(self, rate_bytes_per_s: float | None) -> None:
        if self._rate_bytes_per_s is not None:
            held_s = self._now_s - self._rate_since_s
            self._rates_bytes += held_s * self._rate_bytes_per_s
            self._rates_s += held_s
        self._rate_bytes_per_s, self._rate_since_s = rate_bytes_per_s, self._now_s

    def _assigned_bytes_per_s(self) -> float | None:
        """The rate that it has; once it has ended, the mean over the time in which it had one."""
        rate = self._rate_bytes_per_s
        if self._ended_s is None or not self._rates_s:
            return rate
        held_s = 0.0 if rate is None else self._now_s - self._rate_since_s
        return (self._rates_bytes + (rate or 0.0) * held_s) / (self._rates_s + held_s)

    def _achieved_bytes_per_s(self) -> float | None:
        """What was read, over the time since acceptance."""
        if self._accepted_s is None or self._now_s <= self._accepted_s or not self._read_bytes:
            return None
        return self._read_bytes / (self._now_s - self._accepted_s)

    def _phases(self) -> tuple[TracePhase, ...]:
        named = zip(PHASES, self._phase_seconds(), strict=True)
        return tuple(TracePhase(name=name, seconds=seconds) for name, seconds in named)

    def _phase_seconds(self) -> tuple[float, ...]:
        control_s, queue_s, storage_s, network_s = self._spent_s
        queued_s = min(self._queued_s, max(0.0, control_s - self._gateway_s))
        return (self._client_s, control_s - queued_s, queue_s + queued_s, storage_s, network_s)

    def _layers(self) -> Iterator[LayerTrace]:
        """A layer that is ready and begins no fragment was read with the layers before it."""
        begun_s: float | None = None
        for index, ready_time_s in enumerate(self._ready_s):
            first_read_s = self._since_zero(self._first_read_s[index])
            ready_s = self._since_zero(ready_time_s)
            if first_read_s is None and ready_s is not None:
                first_read_s = begun_s
            begun_s = first_read_s
            yield LayerTrace(
                layer=self._first_layer + index,
                first_read_s=first_read_s,
                ready_s=ready_s,
                consumed_s=self._since_zero(self._consumed_s[index]),
            )

    def _since_zero(self, time_s: float) -> float | None:
        return None if math.isnan(time_s) else time_s - self._zero_s

    def __repr__(self) -> str:
        state = "under way" if self._ended_s is None else "ended"
        return f"<DeliveryRecorder {self.request_id} {state}, {self._read_bytes} bytes read>"


def _duration(seconds: float) -> float:
    """What somebody else says a duration is; nonsense counts as nothing."""
    return seconds if 0 <= seconds < math.inf else 0.0
