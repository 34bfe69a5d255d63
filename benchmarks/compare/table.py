"""The comparison as markdown and as JSON."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.compare.cells import Cell
from benchmarks.compare.limits import Limits
from benchmarks.compare.rows import GB, Judgement, Row
from objectcache_schemas.limits import MIB

HEADER = (
    "| path | first layer ms (p99) | last layer ms (p99) | GB/s | TTFT ms | client CPU s/GB "
    "| server CPU s/GB | copies | by layers | persists |"
)
RULE = "| --- " + "| ---: " * 7 + "| --- | --- |"
NOTES = (
    "Everything is warm: stored, then read once, then measured, so bytes come out of the page "
    "cache or the server's memory. The paths take turns, each client in a process of its own that "
    "keeps its target memory; bytes are checked after every fetch, outside of its time.",
    "A path that cannot deliver by layers has its first layer when the last chunk is there. TTFT "
    "is emulated: a layer is computed once it is there and the one before is computed, in the "
    "window of the row of Table A8 named above each table.",
    "CPU is processor seconds for 10^9 payload bytes: the client's process, and all processes of "
    "the server. Copies are of a payload byte between the server's memory and the client's "
    "target, counted from the design, not measured.",
    "LMCache's connector and NIXL OBJ know beforehand that the objects are there (no HEAD is "
    "counted), and LMCache's chunks stay in the connector's memory objects. Redis runs with its "
    "append-only file, flushed each second, which counts as persisting.",
)


def markdown(rows: Sequence[Row], limits: Mapping[Cell, Limits], verdicts: Sequence[str]) -> str:
    """A table for each cell, then what was judged, then how to read it."""
    lines: list[str] = []
    for cell, members in itertools.groupby(rows, key=lambda row: row.cell):
        lines += _cell_lines(cell, list(members), limits[cell])
    copies = {row.way.name: row.way.copies_why for row in rows}
    lines += ["**Judged**", "", *(f"- {verdict}" for verdict in verdicts), ""]
    lines += ["**Copies**", "", *(f"- {name}: {why}" for name, why in copies.items()), ""]
    lines += [line for note in NOTES for line in (note, "")]
    return "\n".join(lines)


def _cell_lines(cell: Cell, rows: Sequence[Row], limits: Limits) -> Iterator[str]:
    payload = f"{cell.payload_bytes / MIB:,.0f} MiB in {cell.geometry.chunk_count} chunks"
    window = f"{1000 * cell.compute_window_s:.2f} ms a layer ({cell.paper_request.name})"
    yield from (f"**{cell}**: {payload}, window {window}", "")
    yield (
        f"Limits in the same run: one loopback TCP stream {limits.loopback / GB:.2f} GB/s, "
        f"one thread's memory copy {limits.copy / GB:.2f} GB/s."
    )
    yield from ("", HEADER, RULE)
    for row in rows:
        yield _line(row)
    yield ""


def _line(row: Row) -> str:
    way = row.way
    if not row.samples:
        return f"| {way.name} | not measured: {row.missing} |" + " |" * 8
    cells = (
        way.name,
        f"{ms(row.first_layer_s)} ({ms(row.first_layer_p99_s)})",
        f"{ms(row.last_layer_s)} ({ms(row.last_layer_p99_s)})",
        f"{row.rate_bytes_per_s / GB:.2f}",
        ms(row.ttft_s),
        f"{row.client_s_per_gb:.2f}",
        f"{row.server_s_per_gb:.2f}",
        str(way.copies),
        "yes" if way.layerwise else "no",
        "yes" if way.persists else "no",
    )
    return f"| {' | '.join(cells)} |"


def ms(seconds: float) -> str:
    """Milliseconds, with the decimals that they are worth."""
    figure = 1000 * seconds
    decimals = 2 if figure < 10 else 1 if figure < 100 else 0
    return f"{figure:,.{decimals}f}"


def write_json(
    file: Path,
    run: Mapping[str, object],
    rows: Sequence[Row],
    limits: Mapping[Cell, Limits],
    judgements: Sequence[Judgement],
) -> None:
    """Write every sample, with the sizes and the machine's limits of each cell."""
    content = {
        **run,
        "limits": [
            {"cell": str(cell), "payload_bytes": cell.payload_bytes, "bytes_per_s": limit}
            for cell, limit in limits.items()
        ],
        "rows": [_row_dict(row) for row in rows],
        "judged": [{"judgement": each, "is_met": each.is_met} for each in judgements],
    }
    file.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))


def _row_dict(row: Row) -> dict[str, object]:
    figures: dict[str, object] = {}
    if row.samples:
        figures = {
            "first_layer_s": row.first_layer_s,
            "last_layer_s": row.last_layer_s,
            "ttft_s": row.ttft_s,
            "rate_bytes_per_s": row.rate_bytes_per_s,
            "client_s_per_gb": row.client_s_per_gb,
            "server_s_per_gb": row.server_s_per_gb,
        }
    return {
        "cell": row.cell,
        "payload_bytes": row.cell.payload_bytes,
        "compute_window_s": row.cell.compute_window_s,
        "way": row.way,
        "missing": row.missing,
        **figures,
        "samples": row.samples,
    }
