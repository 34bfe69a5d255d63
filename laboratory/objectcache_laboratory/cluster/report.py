"""Runs beside each other: a table to read, JSON, CSV, and bars as SVG."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import msgspec
from rich.table import Table

from objectcache_laboratory.cluster.measures import ClusterMeasures
from objectcache_laboratory.cluster.placement import PLACINGS
from objectcache_laboratory.drawing.svg import ARRIVAL_FILLS, MUTED, document, rect, text

COLUMNS = (
    "routes",
    "requests",
    "JCT, s",
    "speed-up",
    "TTFT mean / p99, s",
    "TTST, s",
    "TPOT, ms",
    "NIC max/mean",
    "NICs busy",
    "GPUs busy",
)
LABEL_PX, BAR_PX, ROW_PX = 210, 420, 28


def title_of(measures: ClusterMeasures) -> str:
    """Of a run's routes; an Oracle has its own."""
    placing = PLACINGS.get(measures.routes)
    return measures.routes if placing is None else placing.title


def report_rows(runs: Sequence[ClusterMeasures]) -> list[tuple[str, ...]]:
    """A row a run, as `COLUMNS`; the speed-up is the first run's JCT over this one's."""
    first_s = runs[0].jct_s
    return [
        (
            title_of(run),
            f"{run.requests:,}",
            f"{run.jct_s:,.0f}",
            f"{first_s / run.jct_s:.2f}" if run.jct_s else "-",
            f"{run.ttft_s.mean:.3f} / {run.ttft_s.p99:.3f}",
            f"{run.ttst_s.mean:.3f}",
            f"{run.tpot_s.mean * 1e3:.1f}",
            f"{run.nic_max_over_mean:.2f}",
            f"{run.nic_share:.0%}",
            f"{run.gpu_share:.0%}",
        )
        for run in runs
    ]


def report_table(runs: Sequence[ClusterMeasures], title: str) -> Table:
    """For a terminal."""
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if place else "left")
    for row in report_rows(runs):
        table.add_row(*row)
    return table


def as_json(runs: Sequence[ClusterMeasures], options: object) -> bytes:
    """What was asked for, and every measure."""
    return msgspec.json.format(msgspec.json.encode({"options": options, "runs": runs}), indent=2)


def as_csv(runs: Sequence[ClusterMeasures]) -> str:
    """A line a run; a spread has a column for each of its figures."""
    rows = [_flat(run) for run in runs]
    written = io.StringIO()
    writer = csv.DictWriter(written, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue()


def as_svg(runs: Sequence[ClusterMeasures], title: str) -> str:
    """A bar of its JCT for each run."""
    longest_s = max(max(run.jct_s for run in runs), 1e-9)
    shapes = [text(16, 26, title, 'font-weight="600"')]
    for place, run in enumerate(runs):
        y = 44 + place * ROW_PX
        width = run.jct_s / longest_s * BAR_PX
        label = f"{run.jct_s:,.0f} s"
        shapes.append(text(16, y + 15, title_of(run)))
        shapes.append(rect(LABEL_PX, y, width, ROW_PX - 8, ARRIVAL_FILLS[place % 2], label))
        shapes.append(text(LABEL_PX + width + 8, y + 15, label, f'fill="{MUTED}"'))
    return document(LABEL_PX + BAR_PX + 110, 56 + len(runs) * ROW_PX, shapes)


def _flat(run: ClusterMeasures) -> dict[str, object]:
    flat = dict[str, object]()
    for name, value in msgspec.to_builtins(run).items():
        if isinstance(value, dict):
            flat |= {f"{name}_{figure}": each for figure, each in value.items()}
        else:
            flat[name] = value
    return flat
