"""The timeline of one turn as an SVG picture: arrivals above compute, for both deliveries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from objectcache_laboratory.demo.results import LayerEvents, ReuseMeasurement, TurnMeasurement
from objectcache_laboratory.drawing.svg import (
    ARRIVAL_FILLS,
    COMPUTE_FILLS,
    LANE,
    MUTED,
    Scale,
    document,
    legend,
    rect,
    text,
    time_axis,
)

WIDTH, PANEL_HEIGHT, HEADER_HEIGHT, FOOTER_HEIGHT = 960, 148, 84, 64
LEFT, RIGHT = 104, 56  # margins of the time axis
LANE_HEIGHT = 38
ARRIVALS_Y, COMPUTE_Y = 38, 84  # of the lanes, below the panel's top
MERGE_PX = 2.0  # arrivals closer than this are one bar
LABEL_PX = 22.0  # narrower bars carry no layer number
FIRST_TOKEN_LABEL_PX = 170
FIRST_TOKEN = "#1a7f5a"  # noqa: S105 - a colour
TITLES = {
    "layerwise": "Layer by layer: compute starts with the first layer",
    "chunkwise": "Chunk by chunk: compute waits for the whole prefix",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """A run of layers and its time span."""

    first_layer: int
    last_layer: int
    start_s: float
    end_s: float

    @property
    def label(self) -> str:
        """`7`, or `0-11`."""
        if self.first_layer == self.last_layer:
            return str(self.first_layer)
        return f"{self.first_layer}\N{EN DASH}{self.last_layer}"


def timeline_svg(turn: TurnMeasurement, path: str) -> str:
    """An SVG document that draws the turn's reuses over `path` on one time axis."""
    reuses = [reuse for delivery in TITLES if (reuse := turn.reuse(path, delivery)) is not None]
    assert reuses
    height = HEADER_HEIGHT + PANEL_HEIGHT * len(reuses) + FOOTER_HEIGHT
    end_s = max(reuse.ttft_s for reuse in reuses) * 1.04
    scale = Scale(end_s, LEFT, WIDTH - LEFT - RIGHT)
    parts = [
        *_header(turn, path),
        *time_axis(scale, HEADER_HEIGHT, height - FOOTER_HEIGHT, WIDTH - 12),
    ]
    for index, reuse in enumerate(reuses):
        parts += _panel(reuse, scale, HEADER_HEIGHT + index * PANEL_HEIGHT)
    return document(WIDTH, height, [*parts, *_legend(height - 14)])


def arrival_bars(reuse: ReuseMeasurement, merge_s: float) -> list[Bar]:
    """What arrived when: each layer from the arrival before it, near-simultaneous ones as one."""
    bars: list[Bar] = []
    for events in reuse.layers:
        start_s = bars[-1].end_s if bars else reuse.fetch_start_s
        end_s = max(start_s, events.arrival_s)
        if bars and end_s - start_s < merge_s:
            bars[-1] = Bar(bars[-1].first_layer, events.layer, bars[-1].start_s, end_s)
        else:
            bars.append(Bar(events.layer, events.layer, start_s, end_s))
    return bars


def compute_bars(layers: tuple[LayerEvents, ...]) -> list[Bar]:
    """One bar for each layer's compute; the gaps are stalls."""
    return [
        Bar(events.layer, events.layer, events.compute_start_s, events.compute_end_s)
        for events in layers
    ]


def _header(turn: TurnMeasurement, path: str) -> Iterator[str]:
    share = turn.hit_tokens / turn.prompt_tokens
    yield text(
        LEFT - 80,
        32,
        f"Turn {turn.turn}: {turn.hit_tokens:,} of {turn.prompt_tokens:,} tokens ({share:.0%}) "
        f"from the store, {turn.fetched_bytes / (1 << 20):.0f} MiB",
        'font-size="18" font-weight="600"',
    )
    yield text(
        LEFT - 80,
        56,
        f"Path: {path}. Time from the prompt to its first token; recomputing all of it takes "
        f"{turn.recompute_ttft_s * 1e3:,.0f} ms",
        f'fill="{MUTED}"',
    )


def _panel(reuse: ReuseMeasurement, scale: Scale, top: float) -> Iterator[str]:
    yield text(LEFT - 80, top + 26, TITLES[reuse.delivery], 'font-weight="600"')
    for name, y in (("arrivals", top + ARRIVALS_Y), ("compute", top + COMPUTE_Y)):
        yield rect(LEFT, y, scale.width_px, LANE_HEIGHT, LANE)
        yield text(LEFT - 10, y + 24, name, f'fill="{MUTED}" text-anchor="end"')
    yield from _bars(
        arrival_bars(reuse, scale.seconds(MERGE_PX)), scale, top + ARRIVALS_Y, ARRIVAL_FILLS
    )
    yield from _bars(compute_bars(reuse.layers), scale, top + COMPUTE_Y, COMPUTE_FILLS)
    yield from _first_token(reuse.ttft_s, scale, top)


def _bars(bars: list[Bar], scale: Scale, y: float, fills: tuple[str, str]) -> Iterator[str]:
    for index, bar in enumerate(bars):
        x, width = scale.x(bar.start_s), scale.x(bar.end_s) - scale.x(bar.start_s)
        duration_ms = (bar.end_s - bar.start_s) * 1e3
        title = f"layer {bar.label}: {bar.start_s * 1e3:.1f} ms, for {duration_ms:.1f} ms"
        yield rect(x, y + 4, max(width, 1.0), LANE_HEIGHT - 8, fills[index % 2], title)
        if width >= LABEL_PX:
            yield text(x + width / 2, y + 24, bar.label, 'fill="#ffffff" text-anchor="middle"')


def _first_token(ttft_s: float, scale: Scale, top: float) -> Iterator[str]:
    x = scale.x(ttft_s)
    yield (
        f'<path d="M{x:.1f} {top + ARRIVALS_Y - 6}V{top + COMPUTE_Y + LANE_HEIGHT + 4}" '
        f'stroke="{FIRST_TOKEN}" stroke-width="2"/>'
    )
    label, style = f"first token {ttft_s * 1e3:.0f} ms", f'fill="{FIRST_TOKEN}" font-weight="600"'
    if x + FIRST_TOKEN_LABEL_PX < WIDTH:  # beside the line, where every layer has arrived
        yield text(x + 8, top + ARRIVALS_Y + 24, label, style)
    else:  # above it, right of the lane's title
        yield text(x, top + 26, label, f'{style} text-anchor="end"')


def _legend(y: float) -> Iterator[str]:
    entries = (
        (ARRIVAL_FILLS[0], "a layer's KV arrives, with its number"),
        (COMPUTE_FILLS[0], "the layer computes"),
    )
    yield from legend(LEFT, y, entries, 270)
