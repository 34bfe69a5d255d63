"""The curves of a calibration as an SVG picture, one panel a geometry (paper, figure 15)."""

from __future__ import annotations

from collections.abc import Iterator

from objectcache_laboratory.calibration.calibrate import RATE_FACTORS, Calibration, Curve
from objectcache_laboratory.drawing.axis import ticks
from objectcache_laboratory.drawing.svg import GRID, MUTED, document, text
from objectcache_schemas.limits import BYTES_PER_GBIT

PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 420, 280, 2
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 44, 48  # within a panel
RATE_FACTOR_MAX = max(factor for factor in RATE_FACTORS if factor < float("inf")) * 1.04
LINE, TARGET = "#3d74ae", "#c66d1d"


def curves_svg(calibration: Calibration) -> str:
    """TTFT above the best by rate; dashed r*, dash-dotted r* and the margin, both as measured."""
    rows = -(-len(calibration.curves) // COLUMNS)
    width, height = PANEL_WIDTH * COLUMNS, PANEL_HEIGHT * rows
    parts: list[str] = []
    margin = (calibration.measured_margin_gbps or 0.0) * BYTES_PER_GBIT
    for number, curve in enumerate(calibration.curves):
        x, y = PANEL_WIDTH * (number % COLUMNS), PANEL_HEIGHT * (number // COLUMNS)
        parts += [f'<g transform="translate({x} {y})">', *_panel(curve, margin), "</g>"]
    return document(width, height, parts)


def _panel(curve: Curve, margin_bytes_per_s: float) -> Iterator[str]:
    zero_stall = curve.geometry.zero_stall_rate
    points = [
        (reading.rate_bytes_per_s / zero_stall, 100 * (reading.ttft_s / curve.best_ttft_s - 1))
        for reading in curve.readings
        if reading.rate_bytes_per_s < float("inf")
    ]
    top = max(1.0, *(above for _, above in points)) * 1.05
    yield text(LEFT, 24, curve.geometry.name, 'font-size="14" font-weight="600"')
    for tick in ticks(top, 5):
        y = _y(tick, top)
        yield f'<path d="M{LEFT} {y:.1f}H{PANEL_WIDTH - RIGHT}" stroke="{GRID}"/>'
        yield text(LEFT - 6, round(y + 4), f"{tick:g} %", f'fill="{MUTED}" text-anchor="end"')
    zero_stall_gbps = zero_stall / BYTES_PER_GBIT
    for tick_gbps in ticks(RATE_FACTOR_MAX * zero_stall_gbps, 6):
        x, place = _x(tick_gbps / zero_stall_gbps), PANEL_HEIGHT - BOTTOM + 18
        yield text(x, place, f"{tick_gbps:g}", f'fill="{MUTED}" text-anchor="middle"')
    yield text(
        (LEFT + PANEL_WIDTH - RIGHT) / 2,
        PANEL_HEIGHT - 10,
        "rate, Gbps; TTFT above the best",
        f'fill="{MUTED}" text-anchor="middle"',
    )
    yield _upright(1.0, "6 4", MUTED)
    yield _upright(1.0 + margin_bytes_per_s / zero_stall, "8 3 2 3", TARGET)
    line = " ".join(f"{_x(rate):.1f},{_y(above, top):.1f}" for rate, above in points)
    yield f'<polyline points="{line}" fill="none" stroke="{LINE}" stroke-width="2"/>'
    for rate, above in points:
        yield f'<circle cx="{_x(rate):.1f}" cy="{_y(above, top):.1f}" r="3" fill="{LINE}"/>'


def _x(factor: float) -> float:
    return LEFT + min(factor / RATE_FACTOR_MAX, 1.0) * (PANEL_WIDTH - LEFT - RIGHT)


def _y(above: float, top: float) -> float:
    return PANEL_HEIGHT - BOTTOM - above / top * (PANEL_HEIGHT - TOP - BOTTOM)


def _upright(factor: float, dashes: str, colour: str) -> str:
    x = _x(factor)
    return (
        f'<path d="M{x:.1f} {TOP}V{PANEL_HEIGHT - BOTTOM}" stroke="{colour}" '
        f'stroke-dasharray="{dashes}"/>'
    )
