"""Added TTFT against load, a line for each policy. matplotlib comes with the extra `figures`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from objectcache_schemas.errors import InvalidRequest
from objectcache_storage_server.simulation.measures import Measures

SUFFIXES = (".svg", ".png")
INCHES = (9.0, 3.6)


def check_plot(file: Path) -> None:
    """Raises `InvalidRequest` where such a file cannot be drawn: before anything is simulated."""
    if file.suffix.lower() not in SUFFIXES:
        raise InvalidRequest(f"--plot must end in {' or '.join(SUFFIXES)}, got {file}")
    _figure_class()


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequest(
            '--plot needs matplotlib. Install it with: pip install "objectcache[figures]"'
        ) from error
    return Figure


def draw(measures: Sequence[Measures], title: str, file: Path) -> None:
    """Mean and 99th percentile, side by side. Raises `InvalidRequest` for a bad file."""
    figure = _figure_class()(figsize=INCHES, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, 2)
    policies = list(dict.fromkeys(one.policy for one in measures))
    for axes, name in zip(panels, ("mean", "p99"), strict=True):
        for policy in policies:
            points = sorted(
                (one.load, 1e3 * getattr(one, f"added_{name}_s"))
                for one in measures
                if one.policy == policy
            )
            axes.plot(*zip(*points, strict=True), marker="o", label=policy)
        axes.set(xlabel="load", ylabel=f"added TTFT, {name}, ms")
        axes.set_yscale("symlog", linthresh=1.0)
        axes.grid(visible=True, alpha=0.3)
    panels[0].legend(loc="upper left", fontsize="small")
    try:
        figure.savefig(file)
    except OSError as error:
        raise InvalidRequest(f"cannot write {file}: {error.strerror}") from error
