"""A calibration as tables, and as a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from objectcache_laboratory.calibration.calibrate import Calibration, Curve
from objectcache_laboratory.calibration.knee import Knee
from objectcache_runtime.amounts import duration_text, gbps_text, size_text
from objectcache_schemas.limits import BYTES_PER_GBIT

BAR_CELLS = 16
EIGHTHS = " ▏▎▍▌▋▊▉█"
KNEE_USED = (
    "It goes by the knee without the first layer's own transfer: that transfer is paid once at any "
    "rate, no overlap hides it, and rate spent on it is taken from others' stalls."
)


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
            gbps_text(rate / BYTES_PER_GBIT) if is_bound else "no bound",
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
        "scale": calibration.scale,
        "measured_margin_gbps": calibration.measured_margin_gbps,
        "margin_gbps": calibration.margin_gbps,
        "layerwise_threshold_bytes": calibration.threshold.payload_bytes,
        "threshold_remark": calibration.threshold.remark,
        "applied": is_applied,
    }


def _curve_document(curve: Curve) -> dict[str, Any]:
    return {
        "geometry": curve.geometry,
        "zero_stall_bytes_per_s": curve.geometry.zero_stall_rate,
        "ttft_knee_bytes_per_s": curve.ttft_knee.rate_bytes_per_s,
        "ttft_knee_remark": curve.ttft_knee.remark,
        "stall_knee_bytes_per_s": curve.stall_knee.rate_bytes_per_s,
        "stall_knee_remark": curve.stall_knee.remark,
        "plateau_bytes_per_s": curve.plateau_rate,
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
    lines = [
        f"r* {gbps_text(zero_stall / BYTES_PER_GBIT)}",
        f"knee of TTFT: {_knee(curve.ttft_knee, zero_stall)}",
        f"knee without the first layer's own transfer: {_knee(curve.stall_knee, zero_stall)}",
    ]
    if curve.plateau_rate is not None:
        lines.append(f"measured on the plateau from {_rate(curve.plateau_rate, zero_stall)}")
    return "\n".join(lines)


def _knee(knee: Knee, zero_stall: float) -> str:
    if knee.rate_bytes_per_s is None:
        return knee.remark
    found = _rate(knee.rate_bytes_per_s, zero_stall)
    return f"{found}; {knee.remark}" if knee.remark else found


def _rate(rate_bytes_per_s: float, zero_stall: float) -> str:
    part = rate_bytes_per_s / zero_stall
    return f"{gbps_text(rate_bytes_per_s / BYTES_PER_GBIT)} ({part:.2f} r*)"


def _margin_text(calibration: Calibration) -> str:
    measured, proposed = calibration.measured_margin_gbps, calibration.margin_gbps
    if measured is None or proposed is None:
        return "margin: none is proposed, no geometry has a plateau above r* within the sweep"
    found = sum(curve.plateau_rate is not None for curve in calibration.curves)
    scaled = (
        f" for real sizes ({gbps_text(measured)} as measured, times the scale of "
        f"{calibration.scale:g})"
        if calibration.scale != 1
        else ""
    )
    return (
        f"margin: {gbps_text(proposed)}{scaled}, the most that the lowest rate measured on the "
        f"plateau lies above r*, in {found} of {len(calibration.curves)} geometries\n{KNEE_USED}"
    )


def _threshold_text(calibration: Calibration) -> str:
    threshold = calibration.threshold
    if threshold.payload_bytes is None:
        return f"threshold: none is proposed, {threshold.remark}"
    remark = f"; {threshold.remark}" if threshold.remark else ""
    return f"threshold: layerwise from {size_text(threshold.payload_bytes)} up{remark}"
