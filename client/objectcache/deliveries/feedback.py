"""Where a delivery's consumption goes: to the server at once, or into what the client remembers."""

from __future__ import annotations

from objectcache.deliveries.consumption import Consumption, ConsumptionReports
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.learned_windows import FetchShape, RememberedWindows
from objectcache.sessions.target_session import TargetSession
from objectcache_schemas.compute_windows import is_computed, is_no_copy
from objectcache_schemas.messages.sessions import LayersConsumed


def tell_session(
    progress: LayerProgress, session: TargetSession, tag: int, layer_bytes: int
) -> ConsumptionReports:
    """Reports that go to the storage server on the session that announces the layers.

    A time that is that of a copy goes as 0, of which nothing is learned.
    """

    def tell(consumption: Consumption) -> None:
        session.tell(
            LayersConsumed(
                tag=tag,
                end_layer=consumption.end_layer,
                compute_s=consumption.compute_s if _is_window(consumption, layer_bytes) else 0.0,
                waited_s=consumption.waited_s,
            )
        )

    return ConsumptionReports(progress, tell)


def teach_windows(
    progress: LayerProgress, windows: RememberedWindows, shape: FetchShape, layer_bytes: int
) -> ConsumptionReports:
    """Reports from which the next delivery of this shape gets its compute window."""
    layers_compute_s: list[float] = []

    def note(consumption: Consumption) -> None:
        if _is_window(consumption, layer_bytes):
            layers_compute_s.append(consumption.compute_s)

    return ConsumptionReports(progress, note, lambda: windows.learn(shape, layers_compute_s))


def _is_window(consumption: Consumption, layer_bytes: int) -> bool:
    """Whether the time can be that of computing on a layer."""
    is_believed = is_computed if consumption.is_measured else is_no_copy
    return is_believed(consumption.compute_s, layer_bytes)
