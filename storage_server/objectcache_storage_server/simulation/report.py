"""Measures for people and for programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from objectcache_storage_server.simulation.measures import Measures

CAPTION = (
    "added: to each request alone on the idle link; offered: bytes asked for, of what it carries\n"
    "No lower bound is stated for arrivals over time; `objectcache schedule` has one for up to 8 "
    "requests that begin at once."
)


def table(measures: Sequence[Measures], title: str) -> Table:
    """A row for each policy at each load."""
    shown = Table(
        box=box.SIMPLE,
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
    )
    shown.add_column("load", justify="right")
    shown.add_column("policy", min_width=max(len(one.policy) for one in measures))
    columns = ["requests", "served", "SlowDown", "added TTFT mean ms", "p50", "p99", "stalled"]
    columns += ["offered", "link used"]
    has_tenants = any(one.fairness for one in measures)
    if has_tenants:
        columns += ["Jain", "worst tenant, mean ms"]
    columns += [f"{one.tenant}, mean ms" for one in measures[0].tenants]
    for column in columns:
        shown.add_column(column, justify="right")
    load = None
    for one in measures:
        if load is not None and one.load != load:
            shown.add_section()
        load = one.load
        shown.add_row(*_cells(one, has_tenants))
    shown.caption = CAPTION
    return shown


def _cells(one: Measures, has_tenants: bool) -> list[str]:
    cells = [
        f"x{one.load:g}",
        one.policy,
        f"{one.requests:,}",
        f"{one.served:,}",
        f"{one.slow_downs:,}",
        _ms(one.added_mean_s),
        _ms(one.added_p50_s),
        _ms(one.added_p99_s),
        f"{one.stalled:.1%}",
        "-" if one.offered_utilisation is None else f"{one.offered_utilisation:.1%}",
        f"{one.link_utilisation:.1%}",
    ]
    if has_tenants:
        fairness = one.fairness
        cells += (
            [f"{fairness.jain:.3f}", _ms(fairness.worst_mean_added_s)] if fairness else ["", ""]
        )
    return cells + [_ms(tenant.added_mean_s) for tenant in one.tenants]


def as_json(measures: Sequence[Measures]) -> str:
    """A list of objects; figures are not rounded."""
    return json.dumps([asdict(one) for one in measures], indent=2, allow_nan=False)


def as_csv(measures: Sequence[Measures]) -> str:
    """A header, and a row for each policy at each load."""
    rows = [_flat(one) for one in measures]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _flat(one: Measures) -> dict[str, Any]:
    row = asdict(one)
    fairness = row.pop("fairness") or {}
    del row["tenants"]  # a column each, at the end
    names = ("tenants", "jain", "worst_tenant", "worst_mean_added_s")
    own = {f"{each.tenant}_added_mean_s": each.added_mean_s for each in one.tenants}
    return {**row, **{name: fairness.get(name, "") for name in names}, **own}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"
