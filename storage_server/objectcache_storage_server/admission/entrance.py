"""Where deliveries begin: `admitted` waits for its tenant's turn, and lets the next one in.

`delivery_turns` decides; here requests wait for what it decides. `leave` and `configure` may
be called from any thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from objectcache_runtime.first_of import first_of
from objectcache_runtime.networking.stream_socket import ConnectionEnded
from objectcache_runtime.settings import Settings
from objectcache_schemas.errors import ObjectCacheError, Unavailable
from objectcache_schemas.operators.schedule import TenantShare
from objectcache_storage_server.admission.delivery_turns import Admission, AdmissionLimits, Waiting

DRAINED_RETRY_S = 5.0
DRAINING = "Draining"  # the code: whoever is told so may go to another server at once
Gone = Callable[[], Coroutine[Any, Any, None]]  # returns when whoever asks has left

TIMER_MAX_S = 3600.0
TIMER_SLACK_S = 0.001  # a loop's clock is coarser than ours


class _Waiter:
    """A task that waits, and what became of it: let in, refused, or neither yet."""

    def __init__(self) -> None:
        self.is_in = False
        self.refusal: ObjectCacheError | None = None
        self._loop = asyncio.get_running_loop()
        self._settled = asyncio.Event()

    def settle(self) -> None:
        """Wake the task, from any thread."""
        self._loop.call_soon_threadsafe(self._settled.set)

    async def wait(self, gone: Gone | None) -> None:
        """Return once it is let in; raises the refusal, or `ConnectionEnded` where `gone`."""
        if gone is None:
            await self._settled.wait()
        else:
            await self._wait_or_leave(gone)
        if self.refusal is not None:
            raise self.refusal

    async def _wait_or_leave(self, gone: Gone) -> None:
        await first_of(self._settled.wait(), gone())
        if not self._settled.is_set():
            raise ConnectionEnded


class Entrance:
    """The deliveries that run and the requests that wait, of one storage server."""

    def __init__(self, settings: Settings, shares: Mapping[str, TenantShare] | None = None) -> None:
        """`shares` are the tenants' of the schedule in force."""
        limits = AdmissionLimits(
            deliveries_max=settings.storage.deliveries_max,
            tenant_deliveries_max=settings.scheduler.tenant_deliveries_max,
            queue_max=settings.scheduler.queue_max,
            queue_timeout_s=settings.scheduler.queue_timeout_s,
        )
        self._admission = Admission(limits, shares)
        self._waiters: dict[Waiting, _Waiter] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.closed = asyncio.Event()  # set by `close`
        self.drained = False  # newcomers are refused, those who wait and are in go on
        self._lock = threading.Lock()

    @property
    def running(self) -> int:
        """Deliveries that were let in and have not left."""
        return self._admission.running

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._admission.waiting

    def is_held_from_others(self, tenant: str) -> bool:
        """See `Admission.is_held_from_others`."""
        with self._lock:
            return self._admission.is_held_from_others(tenant)

    @asynccontextmanager
    async def admitted(self, tenant: str, gone: Gone | None = None) -> AsyncGenerator[float]:
        """Be in for the length of the block; the value is how long it waited, in seconds.

        Raises what `enter` does.
        """
        waited_s = await self.enter(tenant, gone)
        entered_s = time.monotonic()
        try:
            yield waited_s
        finally:
            self.leave(tenant, time.monotonic() - entered_s)

    async def enter(self, tenant: str, gone: Gone | None = None) -> float:
        """Wait until a delivery of this tenant may begin; `leave` ends it. Returns the seconds.

        Raises `Busy` where the queue is full or the wait is too long, `Unavailable` once the
        entrance is closed or drained, and `ConnectionEnded` when `gone` returns first. Whoever is
        cancelled is not in, and takes nobody's place.
        """
        now_s = time.monotonic()
        with self._lock:
            if self.closed.is_set():
                raise stopping()
            if self.drained:
                raise drained()
            token = self._admission.enter(tenant, now_s)
            if token is None:
                return 0.0
            waiter = self._waiters[token] = _Waiter()
            self._set_timer(now_s)
        try:
            await waiter.wait(gone)
        except BaseException:
            self._abandon(token, waiter)
            raise
        return time.monotonic() - now_s

    def leave(self, tenant: str, duration_s: float) -> None:
        """A delivery that was let in is over; it took this long. Lets the next one in."""
        with self._lock:
            self._let_in(self._admission.leave(tenant, duration_s))

    def configure(self, shares: Mapping[str, TenantShare]) -> None:
        """The tenants' shares have changed; lets in whoever may begin now."""
        with self._lock:
            self._let_in(self._admission.configure(shares))

    def close(self) -> None:
        """Refuse those who wait and those who come. Those who are in leave as ever."""
        with self._lock:
            self.closed.set()
            for token in list(self._waiters):
                self._admission.give_up(token)
                self._refuse(token, stopping())
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _let_in(self, tokens: Iterable[Waiting]) -> None:
        for token in tokens:
            waiter = self._waiters.pop(token)
            waiter.is_in = True
            waiter.settle()

    def _refuse(self, token: Waiting, error: ObjectCacheError) -> None:
        waiter = self._waiters.pop(token)
        waiter.refusal = error
        waiter.settle()

    def _abandon(self, token: Waiting, waiter: _Waiter) -> None:
        """Whoever is cancelled in the moment it is let in gives its place to the next."""
        with self._lock:
            if waiter.is_in:
                self._let_in(self._admission.leave(token.tenant, None))
            else:
                self._waiters.pop(token, None)
                self._admission.give_up(token)

    def _set_timer(self, now_s: float) -> None:
        """Wake for the next expiry, unless a timer runs: none is later than the next expiry."""
        expiry_s = self._admission.next_expiry_s
        if self._timer is None and expiry_s is not None:
            delay_s = min(max(0.0, expiry_s - now_s) + TIMER_SLACK_S, TIMER_MAX_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._timer = None
            for token, error in self._admission.expired(now_s):
                self._refuse(token, error)
            self._set_timer(now_s)

    def __repr__(self) -> str:
        return f"<Entrance {self.running} running, {self.waiting} waiting>"


def drained() -> Unavailable:
    """What newcomers are told while an operator drains the server."""
    return Unavailable(
        "the server is drained by its operator", code=DRAINING, retry_after_s=DRAINED_RETRY_S
    )


def stopping() -> Unavailable:
    """What whoever waits is told once the server drains."""
    return Unavailable("the storage server is stopping", code=DRAINING)
