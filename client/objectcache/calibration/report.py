"""A calibration as tables, and as a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from objectcache.calibration.calibrate import BYTES_PER_S_PER_GBPS, Calibration, Curve
from objectcache.cli.admin.amounts import duration_text, gbps_text, size_text

BAR_CELLS = 16
EIGHTHS = " ▏▎▍▌▋▊▉█"


def report(calibration: Calibration) -> Iterator[RenderableType]:
    """What was measured, then what is proposed."""
    for curve in calibration.curves:
        yield curve_table(curve)
    yield _modes_table(calibration)
    yield Text(_margin_text(calibration))
    yield Text(_threshold_text(calibration))


def curve_table(curve: Curve) -> Table:
    """One row a rate; the bars are TTFTs."""
    geometry = curve.geometry
    table = Table(
        title=f"{geometry.name}: {size_text(geometry.delivered_layer_bytes)} a layer, "
        f"{duration_text(geometry.compute_window_s)}, {geometry.num_layers} layers",
        caption=_knee_text(curve),
        title_justify="left",
        caption_justify="left",
    )
    for name in ("rate", "of r*", "TTFT", "above best", "stalls"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    slowest_s = max(reading.ttft_s for reading in curve.readings)
    for reading, stalls in zip(curve.readings, curve.stalling, strict=True):
        rate = reading.rate_bytes_per_s
        is_bound = rate < float("inf")
        table.add_row(
            gbps_text(rate / BYTES_PER_S_PER_GBPS) if is_bound else "no bound",
            f"{rate / geometry.zero_stall_rate:.2f}" if is_bound else "",
            f"{1e3 * reading.ttft_s:,.1f} ms",
            f"{100 * (reading.ttft_s / curve.best_ttft_s - 1):.1f} %",
            f"{100 * stalls:.1f} %",
            bar(reading.ttft_s / slowest_s),
        )
    return table


def bar(part: float, cells: int = BAR_CELLS) -> str:
    """A bar of `part` of the cells, to an eighth of one."""
    eighths = round(max(0.0, min(1.0, part)) * cells * 8)
    return (EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()


def document(calibration: Calibration, is_applied: bool) -> dict[str, Any]:
    """The same for programs; rates in bytes per second, None for no bound."""
    return {
        "curves": [_curve_document(curve) for curve in calibration.curves],
        "modes": list(calibration.modes),
        "margin_gbps": calibration.margin_gbps,
        "layerwise_threshold_bytes": calibration.threshold.payload_bytes,
        "threshold_remark": calibration.threshold.remark,
        "applied": is_applied,
    }


def _curve_document(curve: Curve) -> dict[str, Any]:
    return {
        "geometry": curve.geometry,
        "zero_stall_bytes_per_s": curve.geometry.zero_stall_rate,
        "knee_bytes_per_s": curve.knee.rate_bytes_per_s,
        "remark": curve.knee.remark,
        "readings": [
            {
                "rate_bytes_per_s": _finite(reading.rate_bytes_per_s),
                "ttfts_s": [sample.ttft_s for sample in reading.samples],
                "first_layers_s": [sample.first_layer_s for sample in reading.samples],
                "stalling": stalls,
            }
            for reading, stalls in zip(curve.readings, curve.stalling, strict=True)
        ],
    }


def _finite(number: float) -> float | None:
    return number if number < float("inf") else None


def _modes_table(calibration: Calibration) -> Table:
    table = Table(title="modes", title_justify="left")
    for name in ("payload", "chunkwise", "layerwise", "layerwise saves"):
        table.add_column(name, justify="right", no_wrap=True)
    for reading in calibration.modes:
        table.add_row(
            size_text(reading.payload_bytes),
            f"{1e3 * reading.chunkwise_s:,.1f} ms",
            f"{1e3 * reading.layerwise_s:,.1f} ms",
            f"{100 * reading.gain:.1f} %",
        )
    return table


def _knee_text(curve: Curve) -> str:
    zero_stall = curve.geometry.zero_stall_rate
    theory = f"r* {gbps_text(zero_stall / BYTES_PER_S_PER_GBPS)}"
    knee = curve.knee.rate_bytes_per_s
    if knee is None:
        return f"{theory}; {curve.knee.remark}"
    found = f"{theory}, knee {gbps_text(knee / BYTES_PER_S_PER_GBPS)}"
    found += f" ({knee / zero_stall:.2f} r*)"
    return f"{found}; {curve.knee.remark}" if curve.knee.remark else found


def _margin_text(calibration: Calibration) -> str:
    margin_gbps = calibration.margin_gbps
    if margin_gbps is None:
        return "margin: no geometry shows a knee, so none is proposed"
    if margin_gbps == 0:
        return "margin: none is needed, no knee lies above its r*"
    return f"margin: {gbps_text(margin_gbps)}, the most that a knee lies above its r*"


def _threshold_text(calibration: Calibration) -> str:
    threshold = calibration.threshold
    if threshold.payload_bytes is None:
        return f"threshold: none is proposed, {threshold.remark}"
    remark = f"; {threshold.remark}" if threshold.remark else ""
    return f"threshold: layerwise from {size_text(threshold.payload_bytes)} up{remark}"
