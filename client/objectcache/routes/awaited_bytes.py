"""The bytes of one delivery that are to come by one way."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from objectcache.routes.accounts import RelayAccount, WayAccount


class FollowedLayers(Protocol):
    """How far a delivery is, as `LayerProgress` says it."""

    first_layer: int

    @property
    def ready_end(self) -> int:
        """All layers below this are there."""
        ...

    @property
    def complete(self) -> bool:
        """Whether all are."""
        ...

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        ...


class AwaitedBytes:
    """Counted in an account until they have come, or will not. Thread-safe; it holds no memory."""

    def __init__(
        self,
        lock: threading.Lock,
        account: WayAccount,
        length_bytes: int,
        queue_bytes: float,
        now_s: float,
    ) -> None:
        """Made with `lock`, the account's, held. `queue_bytes` are to come before."""
        self._lock = lock
        self._account = account
        self._queue_bytes = queue_bytes
        self._left_bytes = length_bytes
        self._assigned_s = now_s
        self._seen_end: int | None = None
        self._is_over = False
        account.assigned(length_bytes, now_s)

    def heard(self, progress: FollowedLayers, layer_bytes: int, *, is_at_full_rate: bool) -> None:
        """Look at how far the delivery is. One that came as fast as it could tells a rate."""
        with self._lock:
            if self._is_over:
                return
            now_s = time.monotonic()
            ready_end, is_complete, has_ended = (
                progress.ready_end,
                progress.complete,
                progress.ended,
            )
            seen_end = progress.first_layer if self._seen_end is None else self._seen_end
            self._seen_end = ready_end
            arrived_bytes = min((ready_end - seen_end) * layer_bytes, self._left_bytes)
            self._left_bytes -= arrived_bytes
            self._account.arrived(arrived_bytes, now_s)
            if not has_ended:
                return
            self._end(now_s)
            if is_complete and isinstance(self._account, RelayAccount):
                self._account.went_well()
                if is_at_full_rate:
                    length_bytes = (ready_end - progress.first_layer) * layer_bytes
                    elapsed_s = now_s - self._assigned_s
                    self._account.took(self._queue_bytes, length_bytes, elapsed_s, now_s)

    def end(self) -> None:
        """The rest will not come. Repeating has no effect."""
        with self._lock:
            self._end(time.monotonic())

    def _end(self, now_s: float) -> None:
        if not self._is_over:
            self._is_over = True
            self._account.dropped(self._left_bytes, now_s)
            self._left_bytes = 0
