"""First and last layers of every prefix in one table, beside the peer that delivers by layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from benchmarks.compare.rows import Row
from benchmarks.compare.table import ms
from benchmarks.compare.ways import BODY, MOONCAKE_LAYERS, NIXL, SHARED_MEMORY, Way

COLUMNS = {
    SHARED_MEMORY: "shared memory",
    BODY: "body",
    NIXL: "NIXL",
    MOONCAKE_LAYERS: "Mooncake",
}
PEER = MOONCAKE_LAYERS
NOT_MEASURED = "-"


def grid_lines(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each prefix: first layers, with our ratio to the peer's in brackets, then last
    layers.
    """
    heads = [
        f"{which} layer ms: {name}" for which in ("first", "last") for name in COLUMNS.values()
    ]
    yield f"| prefix | chunks | {' | '.join(heads)} |"
    yield "| --- |" + " ---: |" * (1 + len(heads))
    for cell, members in itertools.groupby(rows, key=lambda row: row.cell):
        by_way = {row.way: row for row in members}
        first = [_first(by_way, way) for way in COLUMNS]
        last = [_last(by_way.get(way)) for way in COLUMNS]
        figures = (str(cell), str(cell.geometry.chunk_count), *first, *last)
        yield f"| {' | '.join(figures)} |"


def _first(by_way: dict[Way, Row], way: Way) -> str:
    row, peer = by_way.get(way), by_way.get(PEER)
    if row is None or not row.samples:
        return NOT_MEASURED
    shown = ms(row.first_layer_s)
    if way == PEER or peer is None or not peer.samples:
        return shown
    return f"{shown} ({row.first_layer_s / peer.first_layer_s:.2f})"


def _last(row: Row | None) -> str:
    return ms(row.last_layer_s) if row is not None and row.samples else NOT_MEASURED
