"""A delivery's timeline as an SVG picture: one row a layer, and a bar of the phases above."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from objectcache_laboratory.drawing.svg import (
    ARRIVAL_FILLS,
    COMPUTE_FILLS,
    LANE,
    MUTED,
    TEXT,
    Scale,
    document,
    legend,
    rect,
    text,
    time_axis,
)
from objectcache_operations.admin.printable import printable
from objectcache_operations.admin.traces.layer_times import LayerTimes, layer_times
from objectcache_runtime.amounts import payload_text
from objectcache_schemas.operators.traces import DeliveryTrace

WIDTH, LEFT, RIGHT = 960, 104, 56
TITLE_Y, SUBTITLE_Y, PHASES_Y, PHASES_HEIGHT, ROWS_Y = 32, 54, 70, 18, 132
FOOTER_HEIGHT = 64
ROW_HEIGHT, ROW_HEIGHT_MIN = 16, 4
ROWS_HEIGHT_MAX = 1600  # above it rows get thinner
NUMBERED_ROW_HEIGHT = 12  # thinner rows carry a number every few layers only
PHASE_LABEL_PX = 76  # narrower phases carry no name
READY_FILL, WAIT_FILL = "#1a7f5a", "#f0c9c9"
PHASE_FILLS = {
    "client": "#9ca3af",
    "control_plane": "#8b6fb0",
    "queue": "#d9a441",
    "storage": ARRIVAL_FILLS[0],
    "network": "#2f9e8f",
}


def trace_svg(trace: DeliveryTrace) -> str:
    """An SVG document of one trace; layers without times have empty rows."""
    layers = list(layer_times(trace.layers))
    row_height = max(ROW_HEIGHT_MIN, min(ROW_HEIGHT, ROWS_HEIGHT_MAX // max(1, len(layers))))
    bottom = ROWS_Y + row_height * len(layers)
    scale = Scale(_end_s(trace, layers) * 1.02, LEFT, WIDTH - LEFT - RIGHT)
    shapes = [
        *_header(trace),
        *_phases(trace),
        *_lanes(len(layers), scale, row_height),
        *time_axis(scale, ROWS_Y, bottom, WIDTH - 12),
        *_rows(layers, scale, row_height),
        *_legend(bottom + FOOTER_HEIGHT - 14),
    ]
    return document(WIDTH, bottom + FOOTER_HEIGHT, shapes)


def _end_s(trace: DeliveryTrace, layers: Sequence[LayerTimes]) -> float:
    """The last moment of the picture; at least a microsecond, so that the axis has a length."""
    moments = [trace.duration_s or 0.0, 1e-6]
    for layer in layers:
        moments += [time_s for time_s in (layer.ready_s, layer.consumed_s) if time_s is not None]
    return max(moments)


def _header(trace: DeliveryTrace) -> Iterator[str]:
    yield text(
        LEFT - 80,
        TITLE_Y,
        f"Request {printable(trace.request_id)}",
        'font-size="18" font-weight="600"',
    )
    taken = "under way" if trace.duration_s is None else f"{trace.duration_s * 1e3:,.1f} ms"
    failed = f", {printable(trace.error.code)}" if trace.error else ""
    payload = payload_text(trace.payload_bytes, trace.decoded_bytes)
    yield text(
        LEFT - 80,
        SUBTITLE_Y,
        f"{payload} from {printable(trace.bucket)}, {trace.path} over {trace.transport}, "
        f"{trace.delivery}, {trace.policy}: {taken}{failed}",
        f'fill="{MUTED}"',
    )


def _phases(trace: DeliveryTrace) -> Iterator[str]:
    """Shares of the time, side by side; they are no moments of the axis below."""
    whole_s = sum(phase.seconds for phase in trace.phases)
    x, width_px = float(LEFT), WIDTH - LEFT - RIGHT
    yield text(LEFT - 10, PHASES_Y + 14, "phases", f'fill="{MUTED}" text-anchor="end"')
    for phase in trace.phases:
        width = phase.seconds / whole_s * width_px if whole_s else 0.0
        title = f"{phase.name}: {phase.seconds * 1e3:.2f} ms"
        fill = PHASE_FILLS.get(phase.name, MUTED)
        yield rect(x, PHASES_Y, width, PHASES_HEIGHT, fill, title)
        if width >= PHASE_LABEL_PX:
            style = 'fill="#ffffff" text-anchor="middle" font-size="11"'
            yield text(x + width / 2, PHASES_Y + 13, phase.name, style)
        x += width


def _lanes(layer_count: int, scale: Scale, row_height: int) -> Iterator[str]:
    """A ground for every other row, under the axis."""
    for index in range(0, layer_count, 2):
        yield rect(LEFT, ROWS_Y + index * row_height, scale.width_px, row_height, LANE)


def _rows(layers: Sequence[LayerTimes], scale: Scale, row_height: int) -> Iterator[str]:
    yield text(LEFT - 10, ROWS_Y - 8, "layer", f'fill="{MUTED}" text-anchor="end"')
    step = 1 if row_height >= NUMBERED_ROW_HEIGHT else -(-NUMBERED_ROW_HEIGHT // row_height)
    for index, layer in enumerate(layers):
        y = ROWS_Y + index * row_height
        if index % step == 0:
            style = f'fill="{TEXT}" text-anchor="end" font-size="11"'
            yield text(LEFT - 10, y + min(row_height, NUMBERED_ROW_HEIGHT), str(layer.layer), style)
        yield from _row(layer, scale, y + 1, max(2, row_height - 2))


def _row(layer: LayerTimes, scale: Scale, y: int, height: int) -> Iterator[str]:
    """Where its bytes were read, when they were in place, and the GPU's wait and compute."""
    name, ready_s, start_s = f"layer {layer.layer}", layer.ready_s, layer.compute_start_s
    if ready_s is None:
        return
    if layer.consumed_s is not None and layer.wait_s and start_s is not None:
        wait_ms = layer.wait_s * 1e3
        title = f"{name}: the GPU waited {wait_ms:.2f} ms"
        yield _span(scale, start_s - layer.wait_s, start_s, (y, height), WAIT_FILL, title)
    if layer.first_read_s is not None:
        title = f"{name}: read in {(ready_s - layer.first_read_s) * 1e3:.2f} ms"
        yield _span(scale, layer.first_read_s, ready_s, (y, height), ARRIVAL_FILLS[0], title)
    if start_s is not None and layer.consumed_s is not None:
        title = f"{name}: computed in {(layer.consumed_s - start_s) * 1e3:.2f} ms"
        yield _span(scale, start_s, layer.consumed_s, (y, height), COMPUTE_FILLS[0], title)
    yield rect(scale.x(ready_s) - 1, y, 2, height, READY_FILL, f"{name}: {ready_s * 1e3:.2f} ms")


def _span(
    scale: Scale, begin_s: float, end_s: float, lane: tuple[int, int], fill: str, title: str
) -> str:
    y, height = lane
    width = max(scale.x(end_s) - scale.x(begin_s), 1.0)
    return rect(scale.x(begin_s), y, width, height, fill, title)


def _legend(y: float) -> Iterator[str]:
    entries = (
        (ARRIVAL_FILLS[0], "reading"),
        (READY_FILL, "ready"),
        (COMPUTE_FILLS[0], "computing"),
        (WAIT_FILL, "the GPU waits"),
    )
    yield from legend(LEFT, y, entries, 150)
