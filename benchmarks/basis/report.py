"""Where and what was measured, as a table and as a JSON file."""

from __future__ import annotations

import datetime
import itertools
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
import psutil
from rich.table import Table

from benchmarks.basis.measure import Row
from objectcache_schemas.limits import GIB

REPOSITORY = Path(__file__).parents[2]


def machine() -> dict[str, object]:
    """Facts that a reader needs to compare figures."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def commit() -> str:
    """The commit that was measured; marked where the tree differs from it."""
    try:
        name = _git("rev-parse", "HEAD")
        return f"{name} with changes" if _git("status", "--porcelain") else name
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_json(folder: Path, run: dict[str, object], rows: Sequence[Row]) -> Path:
    """Write FOLDER/TIME.json with every sample."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    file = folder / f"{now:%Y%m%dT%H%M%SZ}.json"
    content = {"time": now, **run, "rows": [_as_dict(row) for row in rows]}
    file.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))
    return file


def write_markdown(folder: Path, run: dict[str, object], rows: Sequence[Row]) -> Path:
    """Write FOLDER/TIME.md: one table for each group, and which machine that was."""
    now = datetime.datetime.now(datetime.UTC)
    file = folder / f"{now:%Y%m%dT%H%M%SZ}.md"
    lines = [line for _, members in _grouped(rows) for line in _markdown(members)]
    state = f"commit {run['commit']}, {run['machine']}, load after {os.getloadavg()[0]:.1f}"
    file.write_text("\n".join([*lines, state, ""]))
    return file


def _markdown(rows: Sequence[Row]) -> Iterator[str]:
    yield f"**{rows[0].group}**"
    yield ""
    yield "| what | ratio | to | p50 | p99 |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        cells = (described(row), ratio_text(row), row.ratio_of, _written(row, row.median))
        yield f"| {' | '.join(cells)} | {_written(row, row.p99)} |"
    yield ""


def _written(row: Row, value: float) -> str:
    return f"{_figure(value)} {row.unit}"


def _grouped(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for group, members in itertools.groupby(rows, key=lambda row: row.group):
        yield group, list(members)


def _as_dict(row: Row) -> dict[str, object]:
    figures = {"p50": row.median, "p99": row.p99, "best": row.best, "worst": row.worst}
    return {**asdict(row), **figures}


def results_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """One table for each group, ratios first."""
    for group, members in _grouped(rows):
        table = Table(title=group, title_justify="left", title_style="bold", expand=True)
        table.add_column("ratio", justify="right", style="bold", no_wrap=True)
        table.add_column("goal", no_wrap=True)
        table.add_column("what", ratio=3)
        table.add_column("p50", justify="right", no_wrap=True)
        table.add_column("p99", justify="right", no_wrap=True)
        table.add_column("best to worst", justify="right", no_wrap=True)
        table.add_column("ratio to", ratio=2)
        table.add_column("by hand", ratio=2)
        for row in members:
            table.add_row(*_cells(row))
        yield table


def _cells(row: Row) -> tuple[str, ...]:
    return (
        ratio_text(row),
        row.goal,
        described(row),
        f"{_figure(row.median)} {row.unit}",
        _figure(row.p99),
        f"{_figure(row.best)} to {_figure(row.worst)}",
        row.ratio_of,
        row.by_hand,
    )


def ratio_text(row: Row) -> str:
    """The ratio, with its least and most where it is of several rounds."""
    if row.ratio is None:
        return ""
    spread = f" ({min(row.ratios):.2f} to {max(row.ratios):.2f})" if row.ratios else ""
    return f"{row.ratio:.3f}{spread}"


def described(row: Row) -> str:
    """What was measured, and under which settings."""
    return f"{row.name} [{row.settings}]" if row.settings else row.name


def _figure(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()
