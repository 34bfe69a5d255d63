"""Where a delivery's consumption goes: to the server at once, or into what the client remembers."""

from __future__ import annotations

from objectcache.deliveries.consumption import Consumption, ConsumptionReports
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.learned_windows import FetchShape, LearnedWindows
from objectcache.memory.target_session import TargetSession
from objectcache_schemas.target_messages import LayersConsumed


def tell_session(progress: LayerProgress, session: TargetSession, tag: int) -> ConsumptionReports:
    """Reports that go to the storage server on the session that announces the layers."""

    def tell(consumption: Consumption) -> None:
        session.tell(
            LayersConsumed(
                tag=tag,
                end_layer=consumption.end_layer,
                compute_s=consumption.compute_s,
                waited_s=consumption.waited_s,
            )
        )

    return ConsumptionReports(progress, tell)


def teach_windows(
    progress: LayerProgress, windows: LearnedWindows, shape: FetchShape
) -> ConsumptionReports:
    """Reports from which the next delivery of this shape gets its compute window."""
    layers_compute_s: list[float] = []

    def note(consumption: Consumption) -> None:
        layers_compute_s.append(consumption.compute_s)

    return ConsumptionReports(progress, note, lambda: windows.learn(shape, layers_compute_s))
