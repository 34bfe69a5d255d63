"""How the figures look. matplotlib comes with the extra `figures`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
PANEL_INCHES = (4.2, 3.2)
CONDITIONS_CHARS_PER_INCH = 22
BAR_GROUP = 0.8  # of the distance between groups


def panels(rows: int, columns: int) -> tuple[Figure, list[Axes]]:
    """An empty figure and its panels, row after row. Raises `SystemExit` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(
            "matplotlib is not installed; make figures does it, or pip install -e '.[figures]'"
        ) from error
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    return figure, list(grid.flat)


def grouped_bars(
    axes: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]
) -> None:
    """Bars of each series beside each other in each group; None leaves a gap."""
    width = BAR_GROUP / len(series)
    for number, (name, values) in enumerate(series.items()):
        offset = (number + 0.5) * width - BAR_GROUP / 2
        axes.bar(
            [place + offset for place in range(len(groups))],
            [value or 0.0 for value in values],
            width,
            label=name,
            color=COLORS[number % len(COLORS)],
        )
    axes.set_xticks(range(len(groups)), groups)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.grid(axis="y", alpha=0.3)


def lines(axes: Axes, series: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """A line with markers for each series of x and y."""
    for number, (name, (x, y)) in enumerate(series.items()):
        axes.plot(x, y, marker="o", markersize=3, label=name, color=COLORS[number % len(COLORS)])
    axes.grid(alpha=0.3)


def heatmap(
    axes: Axes,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
) -> None:
    """A field for each value, with the value in it; None leaves it empty."""
    shown = [[math.nan if value is None else value for value in row] for row in values]
    axes.imshow(shown, cmap="YlOrRd", aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(labelsize=6)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value is not None:
                axes.text(x, y, f"{value:.3g}", ha="center", va="center", fontsize=6)


def legend_above(figure: Figure, axes: Axes) -> None:
    """The names of the series of `axes` above all panels, each on a line of its own: they are long,
    and would take the room of what they name.
    """
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", fontsize=6)


def state_conditions(figure: Figure, conditions: str) -> None:
    """Write below a figure what is scaled, and what carried the bytes."""
    words = textwrap.fill(conditions, int(figure.get_figwidth() * CONDITIONS_CHARS_PER_INCH))
    figure.supxlabel(words, fontsize=6)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write FOLDER/NAME.svg and .png."""
    files = [folder / f"{name}.{kind}" for kind in ("svg", "png")]
    for file in files:
        figure.savefig(file, dpi=150)
    return files
