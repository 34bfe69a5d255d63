"""Which announcements a session is spared, because its client waits for a later layer.

Sans I/O; time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from objectcache_schemas.messages.sessions import (
    DeliveryFailure,
    GetEnded,
    LayersAwaited,
    LayersReady,
)

AWAITED_MAX = 256  # deliveries of one session; of those before them everything is announced
INTERVAL_S_MAX = 10.0  # between two announcements, whatever the client says


@dataclass(slots=True)
class _Awaited:
    """What a client waits for of one delivery, and what it was not told of that."""

    end_layer: int
    interval_s: float
    told_s: float
    kept: LayersReady | None = None


class AwaitedLayers:
    """Of one session, by tag. An announcement that reaches what is awaited passes, and so does one
    in each interval: what is kept is `due` then. How a delivery ended passes behind what was kept
    of it.
    """

    def __init__(self) -> None:
        self._awaited: dict[int, _Awaited] = {}

    def awaits(self, message: LayersAwaited, now_s: float) -> Iterator[msgspec.Struct]:
        """The client waits for this now; yields what was kept and is due by it."""
        before = self._awaited.pop(message.tag, None)
        kept = None if before is None else before.kept
        if kept is not None and kept.end_layer >= message.end_layer:
            yield kept
            return
        if len(self._awaited) >= AWAITED_MAX:
            oldest = self._awaited.pop(next(iter(self._awaited)))
            if oldest.kept is not None:
                yield oldest.kept
        interval_s = min(message.interval_s, INTERVAL_S_MAX)
        told_s = now_s if before is None else before.told_s
        self._awaited[message.tag] = _Awaited(message.end_layer, interval_s, told_s, kept)

    def passed(self, event: msgspec.Struct, now_s: float) -> Iterator[msgspec.Struct]:
        """An event is to be sent; yields what is sent now."""
        if isinstance(event, LayersReady):
            awaited = self._awaited.get(event.tag)
            if awaited is not None and not self._is_due(awaited, event, now_s):
                awaited.kept = event
                return
        elif isinstance(event, DeliveryFailure | GetEnded):
            awaited = self._awaited.pop(event.tag, None)
            if awaited is not None and awaited.kept is not None:
                yield awaited.kept
        yield event

    def _is_due(self, awaited: _Awaited, event: LayersReady, now_s: float) -> bool:
        if event.end_layer >= awaited.end_layer:
            del self._awaited[event.tag]
            return True
        if now_s - awaited.told_s < awaited.interval_s:
            return False
        awaited.told_s, awaited.kept = now_s, None
        return True

    @property
    def next_due_s(self) -> float | None:
        """When to ask for what is `due`; None where nothing is kept."""
        dues_s = (
            one.told_s + one.interval_s for one in self._awaited.values() if one.kept is not None
        )
        return min(dues_s, default=None)

    def due(self, now_s: float) -> Iterator[msgspec.Struct]:
        """Yields what was kept for an interval."""
        for awaited in self._awaited.values():
            if awaited.kept is not None and now_s - awaited.told_s >= awaited.interval_s:
                yield awaited.kept
                awaited.told_s, awaited.kept = now_s, None

    def forget(self, tag: int) -> None:
        """Another delivery has this tag."""
        self._awaited.pop(tag, None)

    def __repr__(self) -> str:
        return f"<AwaitedLayers of {len(self._awaited)} deliveries>"
