"""`objectcache gpu calibrate`: how a GPU's copies are best cut, measured and written down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from objectcache.gpu.calibrated_lines import write_lines
from objectcache.gpu.device import Device
from objectcache_laboratory.gpu_links.line_trials import (
    best_lines,
    trials,
    way_trials,
    with_ways,
)
from objectcache_laboratory.gpu_links.link_trials import LinksFound, try_links
from objectcache_schemas.limits import KIB, MIB

_GB = 1e9


def calibrate(
    device: Device,
    size_bytes: int,
    piece_bytes: int,
    file: Path | None,
    console: Console,
    neighbours: Sequence[Device] = (),
) -> None:
    """Print what was measured and what is best of it, and write that: how one link is copied over,
    and, where the links of `neighbours` are worth using, how they are. Raises `InvalidRequest` and
    `Unavailable`.
    """
    tried = list(trials(device, size_bytes, piece_bytes))
    best = best_lines(tried)
    table = Table("direction", "way", "micro-tasks, MiB", "depth", "GB/s", "best")
    for trial in sorted(tried, key=lambda each: (each.direction.value, -each.bytes_per_s)):
        settings = trial.settings
        table.add_row(
            trial.direction.value,
            settings.way.value,
            f"{settings.task_bytes / MIB:g}",
            str(settings.depth),
            f"{trial.bytes_per_s / _GB:.2f}",
            "*" if trial is best[trial.direction] else "",
        )
    console.print(table)
    lines = {direction: trial.settings for direction, trial in best.items()}
    by_piece = list(way_trials(device, size_bytes, lines))
    table = Table("direction", "pieces, KiB", "way", "GB/s")
    for trial in by_piece:
        table.add_row(
            trial.direction.value,
            f"{trial.piece_bytes / KIB:g}",
            trial.settings.way.value,
            f"{trial.bytes_per_s / _GB:.2f}",
        )
    console.print(table)
    for direction in lines:
        mine = [trial for trial in by_piece if trial.direction is direction]
        lines[direction] = with_ways(lines[direction], mine)
        steps = [f"{way.value} to {most / KIB:g} KiB" for most, way in lines[direction].ways]
        console.print(f"{direction.value}: {', '.join([*steps, lines[direction].way.value])}")
    found = None
    if neighbours:
        found = try_links(device, neighbours, size_bytes, piece_bytes)
        _print_links(found, console)
    if file is not None:
        links = found.links if found is not None and found.pays else None
        write_lines(file, device, piece_bytes, lines, links)
        console.print(f"{file}: for Copier, by objectcache.gpu.calibrated_lines.read_lines")


def _print_links(found: LinksFound, console: Console) -> None:
    table = Table("links", "micro-tasks, MiB", "depth", "cut from, MiB", "GB/s")
    for trial in found.tried:
        table.add_row(
            str(trial.links),
            f"{trial.settings.chunk_bytes / MIB:.1f}",
            str(trial.settings.depth),
            f"{trial.settings.fallback_bytes / MIB:.1f}",
            f"{trial.bytes_per_s / _GB:.2f}",
        )
    console.print(table)
    for device, why_not in found.links.refused.items():
        console.print(f"{device!r}: off, {why_not}")
    if found.pays:
        settings = found.links.settings
        console.print(
            f"{1 + len(found.links.relays)} links, from {settings.fallback_bytes / MIB:g} MiB on"
        )
    else:
        console.print("The own link alone: others add nothing.")
