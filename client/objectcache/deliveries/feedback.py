"""Where a delivery's consumption goes: to the server at once, or into what the client remembers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from objectcache.deliveries.consumption import Consumption, ConsumptionReports
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.split.split_parts import SplitPart
from objectcache.learned_windows import FetchShape, RememberedWindows
from objectcache.sessions.target_session import TargetSession
from objectcache_schemas.compute_windows import is_computed, is_no_copy
from objectcache_schemas.messages.sessions import LayersConsumed

INTERVAL_S_MAX = 0.25  # in which one layer at least is heard of, where any comes


def tell_session(
    progress: LayerProgress, session: TargetSession, tag: int, layer_bytes: int
) -> ConsumptionReports:
    """Reports that go to the storage server on the session that announces the layers.

    A time that is that of a copy goes as 0, of which nothing is learned.
    """

    return ConsumptionReports(
        progress, lambda consumption: _tell(session, tag, consumption, layer_bytes)
    )


def tell_sessions(
    progress: LayerProgress,
    consumers: Mapping[SplitPart, tuple[TargetSession, int]],
    layer_bytes: int,
) -> ConsumptionReports:
    """Reports that go to every server of a delivery that several share, each with its tag. How long
    the engine waited is told to one of them, or it would count as often.
    """

    def tell(consumption: Consumption) -> None:
        for number, (session, tag) in enumerate(list(consumers.values())):
            waited_s = None if number else consumption.waited_s
            _tell(session, tag, replace(consumption, waited_s=waited_s), layer_bytes)

    return ConsumptionReports(progress, tell)


def _tell(session: TargetSession, tag: int, consumption: Consumption, layer_bytes: int) -> None:
    session.tell(
        LayersConsumed(
            tag=tag,
            end_layer=consumption.end_layer,
            compute_s=consumption.compute_s if _is_window(consumption, layer_bytes) else 0.0,
            waited_s=consumption.waited_s,
        )
    )


def spare_events(progress: LayerProgress, session: TargetSession, tag: int) -> None:
    """Have the session's server announce only what is waited for, and often enough that its silence
    stands out.
    """
    interval_s = _interval_s(progress.silence_s_max)
    progress.spare_by(lambda end_layer: session.awaits(tag, end_layer, interval_s))


def spare_events_of_parts(
    progress: LayerProgress,
    consumers: Mapping[SplitPart, tuple[TargetSession, int]],
    silence_s: float,
) -> None:
    """The same of whoever delivers a part by then; each may be silent for so long."""
    interval_s = _interval_s(silence_s)

    def awaits(end_layer: int) -> None:
        for session, tag in list(consumers.values()):
            session.awaits(tag, end_layer, interval_s)

    progress.spare_by(awaits)


def _interval_s(silence_s: float | None) -> float:
    return INTERVAL_S_MAX if silence_s is None else min(INTERVAL_S_MAX, silence_s / 4)


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
