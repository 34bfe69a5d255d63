"""The comparison as bars: first layer and last layer of each path, a pair of panels a cell."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.compare.cells import Cell
from benchmarks.compare.rows import Row
from benchmarks.figures.plots import COLORS, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot(rows: Sequence[Row]) -> Figure:
    """One panel a cell, on a logarithmic scale: the whole bar is the last layer, its dark part the
    first layer, the dot the emulated time to the first token.
    """
    cells = [
        (cell, [row for row in members if row.samples])
        for cell, members in itertools.groupby(rows, key=lambda row: row.cell)
    ]
    columns = min(2, len(cells))
    figure, axes = panels(-(-len(cells) // columns), columns)
    figure.set_size_inches(7.5 * columns, 4.0 * -(-len(cells) // columns))
    for panel, (cell, members) in zip(axes, cells, strict=False):
        _draw(panel, cell, members)
    for panel in axes[len(cells) :]:
        panel.set_axis_off()
    axes[0].legend(loc="upper left", fontsize=7)
    return figure


def _draw(axes: Axes, cell: Cell, rows: Sequence[Row]) -> None:
    places = range(len(rows))
    last_ms = [1000 * row.last_layer_s for row in rows]
    first_ms = [1000 * row.first_layer_s for row in rows]
    axes.barh(places, last_ms, color=COLORS[4], label="last layer")
    axes.barh(places, first_ms, color=COLORS[0], label="first layer")
    axes.plot([1000 * row.ttft_s for row in rows], places, "o", color=COLORS[1], label="TTFT")
    axes.set_yticks(places, [row.way.name for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    axes.set_title(str(cell), fontsize=9)
    axes.grid(axis="x", alpha=0.3)
