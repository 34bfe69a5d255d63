"""The timeline of one reuse as text: a row a layer, time to the right."""

from __future__ import annotations

from objectcache_laboratory.demo.results import LayerEvents, ReuseMeasurement

TRANSFER, WAITING, COMPUTE = "░", "·", "█"
LEGEND = f"{TRANSFER} on its way   {WAITING} there, not yet needed   {COMPUTE} computing"


def timeline_rows(reuse: ReuseMeasurement, columns: int) -> list[str]:
    """A row for each layer, scaled so that the first token ends the last column."""
    column_s = reuse.ttft_s / columns
    return [
        f"layer {events.layer:>3} |{_row(events, reuse.fetch_start_s, column_s, columns)}| "
        f"arrived {events.arrival_s * 1e3:>6.1f}, done {events.compute_end_s * 1e3:>6.1f} ms"
        for events in reuse.layers
    ]


def _row(events: LayerEvents, fetch_start_s: float, column_s: float, columns: int) -> str:
    return "".join(
        _cell(events, fetch_start_s, (column + 0.5) * column_s) for column in range(columns)
    )


def _cell(events: LayerEvents, fetch_start_s: float, now_s: float) -> str:
    if not fetch_start_s <= now_s < events.compute_end_s:
        return " "
    if now_s >= events.compute_start_s:
        return COMPUTE
    return TRANSFER if now_s < events.arrival_s else WAITING
