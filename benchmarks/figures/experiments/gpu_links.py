"""MMA's figures 7 to 9, 11, 13 to 15 and table 2: copies to a GPU over several links, modelled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.plots import grouped_bars, legend_above, panels
from objectcache_laboratory.gpu_links.figures import LinksRow
from objectcache_laboratory.gpu_links.figures import rows as links_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = {"8": "MMA, figure 8: bandwidth by size", "9": "MMA, figure 9: 1 GB by links"}
PAPERS, OURS = "the paper's policy", "by finish time"


class GpuLinksExperiment(Experiment[LinksRow]):
    """The copier's policy on the paper's machine, and the paper's own policy beside it."""

    name: ClassVar[str] = "gpu_links"
    title: ClassVar[str] = "MMA: copies to a GPU over several links, modelled"
    conditions: ClassVar[str] = (
        "Virtual time, nothing is copied and nothing scaled: 8 links of 53 GB/s, 4 a node, 33 GB/s "
        "between nodes, NVLink 368, 60 us a copy, 6 us a copy of a micro-task, 25 us until one is "
        "known to be done."
    )

    def run(self, context: Context) -> list[LinksRow]:
        context.say("in virtual time")
        return list(links_rows())

    def plot(self, rows: Sequence[LinksRow]) -> Figure:
        figure, axes = panels(1, len(DRAWN))
        for (number, title), panel in zip(DRAWN.items(), axes, strict=True):
            mine = [row for row in rows if row.figure == number]
            series = {
                PAPERS: [row.papers_policy for row in mine],
                OURS: [row.ours for row in mine],
            }
            grouped_bars(panel, [row.what.replace(" over ", "\n") for row in mine], series)
            panel.set_title(title)
            panel.set_ylabel("GB/s")
            panel.tick_params(axis="x", labelsize=6)
        legend_above(figure, axes[0])
        return figure
