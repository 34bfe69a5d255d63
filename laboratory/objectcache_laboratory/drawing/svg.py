"""Shapes of SVG pictures with a time axis. Text of any origin is escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from objectcache_laboratory.drawing.axis import ticks

TEXT, MUTED, GRID, LANE = "#24292f", "#6b7280", "#e5e7eb", "#f4f5f7"
ARRIVAL_FILLS = ("#3d74ae", "#5d92c8")
COMPUTE_FILLS = ("#c66d1d", "#da8a45")


@dataclass(frozen=True, slots=True)
class Scale:
    """A time axis from 0 to `end_s`, from `left_px` on `width_px` wide."""

    end_s: float
    left_px: float
    width_px: float

    def x(self, time_s: float) -> float:
        """Where a time lies."""
        return self.left_px + time_s / self.end_s * self.width_px

    def seconds(self, width_px: float) -> float:
        """How long so many pixels are."""
        return width_px / self.width_px * self.end_s


def document(width_px: int, height_px: int, shapes: Sequence[str]) -> str:
    """An SVG document on a white ground."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width_px}" height="{height_px}" '
        f'viewBox="0 0 {width_px} {height_px}" font-family="system-ui, sans-serif" font-size="13">'
    )
    ground = f'<rect width="{width_px}" height="{height_px}" fill="#ffffff"/>'
    return "\n".join([head, ground, *shapes, "</svg>"]) + "\n"


def time_axis(scale: Scale, top: float, bottom: float, unit_x: float) -> Iterator[str]:
    """Vertical lines at round milliseconds, their numbers below, and the unit at `unit_x`."""
    for tick_ms in ticks(scale.end_s * 1e3):
        x = scale.x(tick_ms / 1e3)
        yield f'<path d="M{x:.1f} {top}V{bottom}" stroke="{GRID}"/>'
        yield text(x, bottom + 18, f"{tick_ms:g}", f'fill="{MUTED}" text-anchor="middle"')
    yield text(unit_x, bottom + 18, "ms", f'fill="{MUTED}" text-anchor="end"')


def legend(x: float, y: float, entries: Sequence[tuple[str, str]], step_px: float) -> Iterator[str]:
    """Fills and what they mean, side by side."""
    for index, (fill, meaning) in enumerate(entries):
        entry_x = x + index * step_px
        yield rect(entry_x, y - 11, 14, 12, fill)
        yield text(entry_x + 20, y, meaning, f'fill="{MUTED}"')


def rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    """A bar; the title shows where a pointer rests on it."""
    shape = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{fill}" rx="1"'
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def text(x: float, y: float, content: str, attributes: str = "") -> str:
    """A line of text."""
    fill = "" if "fill=" in attributes else f' fill="{TEXT}"'
    return f'<text x="{x:.1f}" y="{y}" {attributes}{fill}>{escape(content)}</text>'
