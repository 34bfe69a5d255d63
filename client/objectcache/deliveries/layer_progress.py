"""Which layers of a delivery are usable, and how it ended: where receivers and waiters meet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from objectcache_schemas.errors import DeliveryFailed, InvalidRequest


class LayerProgress:
    """Layers become usable in order, until all are or the delivery fails. Thread-safe.

    A delivery that has failed stays failed, and one that is complete cannot fail. Failing early
    does not take back the layers that were usable.
    """

    def __init__(
        self,
        first_layer: int,
        end_layer: int,
        started_s: float | None = None,
        silence_s_max: float | None = None,
    ) -> None:
        """`started_s` (by time.monotonic; default now) is where `arrivals_s` count from.

        `silence_s_max` bounds the time without a layer while somebody waits; None leaves that bound
        to the receiver.
        """
        self.first_layer = first_layer
        self.end_layer = end_layer
        self.arrivals_s: list[float | None] = [None] * (end_layer - first_layer)
        self.silence_s_max = silence_s_max
        self._changed_s = time.monotonic()
        self._started_s = self._changed_s if started_s is None else started_s
        self._ready_end = first_layer
        self._failure: DeliveryFailed | None = None
        self._whole: LayerProgress | None = None
        self._count: Callable[[], int] | None = None
        self._condition = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._waited: list[int] = []  # layers that are waited for, once for each who waits
        self._awaits: Callable[[int], None] | None = None
        self._awaited_end = 0  # what that was told last

    @property
    def ready_end(self) -> int:
        """All layers below this are usable."""
        return self._ready_end

    @property
    def complete(self) -> bool:
        """Whether all layers are usable."""
        return self._ready_end >= self.end_layer

    @property
    def failure(self) -> DeliveryFailed | None:
        """Why it ended early; None where it has not."""
        return self._failure

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.complete or self._failure is not None

    def advance(self, ready_end: int) -> None:
        """All layers below `ready_end` are usable; going back, or past the end, has no effect."""
        ready_end = min(ready_end, self.end_layer)
        with self._condition:
            if ready_end <= self._ready_end or self._failure is not None:
                return
            now_s = time.monotonic()
            for layer in range(self._ready_end, ready_end):
                self.arrivals_s[layer - self.first_layer] = now_s - self._started_s
            self._ready_end = ready_end
            self._changed_s = now_s
            # Whoever waits for a later layer would only wake up to wait again.
            if self.complete or any(layer < ready_end for layer in self._waited):
                self._condition.notify_all()
        self._tell_listeners()

    def stir(self) -> None:
        """Something came, though no layer is whole by it: no silence."""
        self._changed_s = time.monotonic()
        if self._whole is not None:
            self._whole.stir()

    def count_by(self, count: Callable[[], int]) -> None:
        """`count` tells how many bytes have come, of layers that are not whole too."""
        self._count = count

    @property
    def came_bytes(self) -> int:
        """How many bytes have come, as far as the receiver sees them one by one; else 0."""
        return 0 if self._count is None else self._count()

    def spare_by(self, awaits: Callable[[int], None]) -> None:
        """`awaits` is told when all layers below an end are waited for, and none before them, and
        when that changes: of what comes in between nothing has to be heard. It must not block.
        """
        self._awaits = awaits

    def is_part_of(self, whole: LayerProgress) -> None:
        """What comes is none of `whole`'s silence either."""
        self._whole = whole

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """End the delivery unless it has ended."""
        with self._condition:
            if self.ended:
                return
            layer = self._ready_end
            what = f"layer {layer} did not arrive: "
            # Whoever relays the delivery said so, too.
            why = reason.replace(f"{DeliveryFailed.default_code}: {what}", "").replace(what, "")
            self._failure = DeliveryFailed(what + why, layer=layer)
            self._failure.__cause__ = cause
            self._condition.notify_all()
        self._tell_listeners()

    def arrived_s(self, layer: int) -> float | None:
        """When the layer became usable, by time.monotonic; None for one that is not, or is none of
        the delivery's.
        """
        if not self.first_layer <= layer < self.end_layer:
            return None
        after_s = self.arrivals_s[layer - self.first_layer]
        return None if after_s is None else self._started_s + after_s

    def is_ready(self, layer: int) -> bool:
        """Whether the layer is usable.

        Raises `InvalidRequest` for a layer that is not part of the delivery, `DeliveryFailed` for
        one that will never arrive.
        """
        self.check(layer)
        if layer < self._ready_end:
            return True
        if self._failure is not None:
            raise self._failure_for_one_caller()
        return False

    def wait(self, layer: int, timeout_s: float | None) -> None:
        """Return when the layer is usable; raises as `is_ready` does.

        Raises `DeliveryFailed` too when `timeout_s` has passed; the delivery goes on then, and may
        be waited for again.
        """
        if self.is_ready(layer):
            return
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._condition:
            self._waited.append(layer)
            try:
                self._spare()
                while not self.is_ready(layer):
                    self._wait(layer, timeout_s, deadline_s)
            finally:
                self._waited.remove(layer)

    def _wait(self, layer: int, timeout_s: float | None, deadline_s: float | None) -> None:
        """Until something has changed; the condition is held."""
        now_s = time.monotonic()
        if deadline_s is not None and now_s >= deadline_s:
            raise DeliveryFailed(
                f"layer {layer} did not arrive within {timeout_s} s", layer=self._ready_end
            )
        silent_until_s = self._silence_deadline_s()
        if silent_until_s is not None and now_s >= silent_until_s:
            self.fail(f"nothing arrived for {self.silence_s_max} s")
            return
        ends_s = [end_s for end_s in (deadline_s, silent_until_s) if end_s is not None]
        self._condition.wait(min(ends_s) - now_s if ends_s else None)

    def _spare(self) -> None:
        """Tell what is waited for, where that is not the next layer, or was a later one before."""
        end_layer = min(self._waited) + 1
        is_far = end_layer > max(self._ready_end + 1, self._awaited_end)
        if self._awaits is not None and (is_far or end_layer < self._awaited_end):
            self._awaited_end = end_layer
            self._awaits(end_layer)

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until nothing will change any more; False when that took too long."""
        with self._condition:
            return self._condition.wait_for(lambda: self.ended, timeout_s)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change from now on, in whichever thread made it.

        It is let go of with the last change, so it may hold what holds the progress.
        """
        with self._condition:
            if not self.ended:
                self._listeners.append(listener)

    def ignore_listeners(self) -> None:
        """Call nobody any more."""
        self._listeners.clear()

    def silence_left_s(self) -> float | None:
        """Seconds until the delivery counts as dead if nothing arrives; None without a bound."""
        deadline_s = self._silence_deadline_s()
        return None if deadline_s is None else deadline_s - time.monotonic()

    def fail_if_silent(self) -> None:
        """End the delivery where nothing has arrived for too long."""
        left_s = self.silence_left_s()
        if left_s is not None and left_s <= 0:
            self.fail(f"nothing arrived for {self.silence_s_max} s")

    def _silence_deadline_s(self) -> float | None:
        return None if self.silence_s_max is None else self._changed_s + self.silence_s_max

    def check(self, layer: int) -> None:
        """Raise `InvalidRequest` for a layer that is not part of the delivery."""
        if not hasattr(layer, "__index__"):
            raise InvalidRequest(f"layer must be a whole number, got {layer!r}")
        if not self.first_layer <= layer < self.end_layer:
            raise InvalidRequest(
                f"layer {layer} is not in the delivery, which has the layers from "
                f"{self.first_layer} to {self.end_layer - 1}"
            )

    def _failure_for_one_caller(self) -> DeliveryFailed:
        """A copy: an exception collects a traceback for everybody who raises it."""
        assert self._failure is not None
        failure = DeliveryFailed(self._failure.message, layer=self._failure.details.layer)
        failure.__cause__ = self._failure.__cause__
        return failure

    def _tell_listeners(self) -> None:
        for listener in list(self._listeners):
            listener()
        if self.ended:
            self._listeners.clear()

    def __repr__(self) -> str:
        ready = self._ready_end - self.first_layer
        state = "failed" if self._failure else f"{ready}/{len(self.arrivals_s)} layers ready"
        return f"<LayerProgress {state}>"
