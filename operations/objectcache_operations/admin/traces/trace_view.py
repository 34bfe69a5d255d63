"""Traces on a screen: the last deliveries in a table, or one of them in full."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from objectcache_operations.admin.printable import printable, window_source_text
from objectcache_operations.admin.tables import facts_of
from objectcache_operations.admin.traces.layer_times import LayerTimes, layer_times
from objectcache_runtime.amounts import duration_text, payload_text, rate_text, share_text
from objectcache_schemas.operators.traces import DeliveryTrace

BAR_CELLS = 40
NAME_CELLS = 13
LAYER_ROWS_MAX = 128


def list_view(traces: Sequence[DeliveryTrace]) -> RenderableType:
    """One row a delivery, the latest first."""
    if not traces:
        return Text("No delivery is traced; scheduler.traces_kept says how many are kept.")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("started", "request", "bucket", "path", "delivery"):
        table.add_column(name, no_wrap=True)
    for name in ("bytes", "rate", "duration", "most of it"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome")
    for trace in traces:
        table.add_row(*map(Text, _cells(trace)))
    return table


def _cells(trace: DeliveryTrace) -> Iterator[str]:
    yield f"{_moment(trace):%H:%M:%S.%f}"[:-3]
    yield printable(trace.request_id)
    yield printable(trace.bucket)
    yield trace.path or "-"
    yield trace.delivery or "-"
    yield payload_text(trace.payload_bytes, trace.decoded_bytes)
    yield rate_text(trace.achieved_bytes_per_s)
    yield "-" if trace.duration_s is None else _time(trace.duration_s)
    yield max(trace.phases, key=lambda phase: phase.seconds).name if trace.phases else "-"
    yield outcome_text(trace)


def outcome_text(trace: DeliveryTrace) -> str:
    """How it ended."""
    if trace.duration_s is None:
        return "under way"
    return printable(trace.error.code) if trace.error else "delivered"


def trace_view(trace: DeliveryTrace) -> RenderableType:
    """What it was, where its time went, and when each layer came."""
    facts, phases = (facts_of(rows(trace), NAME_CELLS) for rows in (_facts, _phases))
    parts: list[RenderableType] = [facts, Text(""), phases]
    if trace.layers:
        parts += [Text(""), _layers_table(trace)]
    return Group(*parts)


def _facts(trace: DeliveryTrace) -> Iterator[tuple[str, str]]:
    yield "request", printable(trace.request_id)
    yield "started", f"{_moment(trace):%Y-%m-%d %H:%M:%S}"
    yield "bucket", f"{printable(trace.bucket)}, of tenant {printable(trace.tenant)}"
    yield "outcome", _outcome(trace)
    if not trace.path:
        return  # it was never accepted
    yield "path", f"{trace.path} over {trace.transport}, {trace.delivery}, policy {trace.policy}"
    payload = payload_text(trace.payload_bytes, trace.decoded_bytes)
    yield "payload", f"{payload} of {trace.chunk_count:,} chunks"
    if trace.nic:
        yield "NIC", printable(trace.nic)
    yield "rate", _rates(trace)
    yield "compute", _window(trace)


def _window(trace: DeliveryTrace) -> str:
    """What the scheduler went by, and what the client reported afterwards."""
    window_s, reported_s = trace.compute_window_s, trace.reported_window_s
    known = "not known" if window_s is None else f"{_time(window_s)} a layer"
    reported = "" if reported_s is None else f", {_time(reported_s)} reported"
    return f"{known} ({window_source_text(trace.window_source)}){reported}"


def _outcome(trace: DeliveryTrace) -> str:
    reason = f": {printable(trace.error.message)}" if trace.error else ""
    taken = "" if trace.duration_s is None else f" in {_time(trace.duration_s)}"
    return f"{outcome_text(trace)}{taken}{reason}"


def _rates(trace: DeliveryTrace) -> str:
    assigned = rate_text(trace.rate_bytes_per_s) if trace.rate_bytes_per_s else "none"
    return f"{rate_text(trace.achieved_bytes_per_s)} achieved, {assigned} assigned"


def _phases(trace: DeliveryTrace) -> Iterator[tuple[str, str]]:
    """A bar for each phase, all of them as long as the whole."""
    whole_s = sum(phase.seconds for phase in trace.phases)
    for phase in trace.phases:
        cells = round(BAR_CELLS * phase.seconds / whole_s) if whole_s else 0
        share = share_text(phase.seconds, whole_s)
        yield phase.name, f"{'#' * cells:{BAR_CELLS}}  {_time(phase.seconds):>9}  {share:>5}"


def _layers_table(trace: DeliveryTrace) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("layer", "first read", "ready", "consumed", "GPU waited"):
        table.add_column(name, justify="right")
    times = list(layer_times(trace.layers))
    for layer in times[:LAYER_ROWS_MAX]:
        table.add_row(str(layer.layer), *map(_optional_time, _columns(layer)))
    hidden = len(times) - LAYER_ROWS_MAX
    return Group(table, Text(f"{hidden:,} more; --json has them")) if hidden > 0 else table


def _columns(layer: LayerTimes) -> tuple[float | None, ...]:
    return layer.first_read_s, layer.ready_s, layer.consumed_s, layer.wait_s


def _optional_time(time_s: float | None) -> str:
    return "-" if time_s is None else _time(time_s)


def _time(time_s: float) -> str:
    return "0" if time_s <= 0 else duration_text(time_s)


def _moment(trace: DeliveryTrace) -> datetime.datetime:
    """When it began, in the terminal's time zone."""
    return datetime.datetime.fromtimestamp(trace.started_unix_s).astimezone()
