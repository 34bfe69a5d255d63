"""Calibration: knees and thresholds of curves of which the answer is known, and how they show."""

from __future__ import annotations

import io
import math
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from objectcache_laboratory.calibration.calibrate import (
    RATE_FACTORS,
    Calibration,
    Curve,
    expected_s,
)
from objectcache_laboratory.calibration.curve_svg import curves_svg
from objectcache_laboratory.calibration.geometry import (
    DEFAULT_GEOMETRIES,
    DEFAULT_SCALE,
    GEOMETRIES_MAX,
    ModelGeometry,
    check_geometries,
    parse_geometries,
    parse_geometry,
)
from objectcache_laboratory.calibration.knee import (
    TOLERANCE,
    RateReading,
    Sample,
    find_stall_knee,
    find_ttft_knee,
    margin_bytes_per_s,
    plateau_rate,
    stalling,
)
from objectcache_laboratory.calibration.measure import prefill
from objectcache_laboratory.calibration.report import bar, document, report
from objectcache_laboratory.calibration.threshold import ModeReading, Threshold, find_threshold
from objectcache_operations.console.calibrate import (
    default_credentials,
    geometries_of,
    scale_of,
    settings_of,
)
from objectcache_runtime.amounts import gbps_text
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import BYTES_PER_GBIT
from tests.unit.storage_server.scheduling.windows.test_compute_profiles import TABLE_A8

LAYER_BYTES, WINDOW_S, LAYERS = 1_000_000, 0.01, 32
GEOMETRY = ModelGeometry("16K", LAYER_BYTES, WINDOW_S, LAYERS)


def overlapped(rate: float, layer_delay_s: float = 0.0, at_once: bool = False) -> Sample:
    """A delivery by the overlap model, in which every layer costs `layer_delay_s` beside its bytes.

    `at_once`: its first layer comes before the rate counts.
    """
    layer_s = LAYER_BYTES / rate + layer_delay_s
    first_s = 0.0 if at_once else layer_s
    return Sample(first_s + WINDOW_S + (LAYERS - 1) * max(WINDOW_S, layer_s), first_s)


def curve(
    layer_delay_s: float = 0.0, factors: Sequence[float] = RATE_FACTORS, at_once: bool = False
) -> list[RateReading]:
    rates = [factor * GEOMETRY.zero_stall_rate for factor in factors]
    return [RateReading(rate, (overlapped(rate, layer_delay_s, at_once),)) for rate in rates]


@given(st.floats(0.0, 0.005), st.booleans())
def test_the_knee_is_where_layers_begin_to_be_late(layer_delay_s: float, at_once: bool) -> None:
    knee = find_stall_knee(curve(layer_delay_s, at_once=at_once))
    true_rate = LAYER_BYTES / (WINDOW_S - layer_delay_s)
    assert knee.rate_bytes_per_s == pytest.approx(true_rate, rel=0.13)  # rates lie 10 to 33 % apart
    assert knee.remark == ""


def test_the_first_layers_transfer_is_no_stall() -> None:
    readings = curve()
    at_zero_stall = RATE_FACTORS.index(1.0)
    ttfts_s = [reading.ttft_s for reading in readings]
    assert ttfts_s[at_zero_stall] > 1.03 * min(ttfts_s)  # a layer of 32, by its own transfer
    assert stalling(readings)[at_zero_stall] == pytest.approx(0.0, abs=1e-4)


def test_a_curve_that_is_flat_has_no_knee() -> None:
    knee = find_stall_knee(curve(factors=(1.5, 2.0, 2.5, math.inf)))
    assert knee.rate_bytes_per_s is None
    assert knee.remark.startswith("flat")


def test_a_curve_that_falls_to_its_end_has_no_knee() -> None:
    knee = find_stall_knee(curve(factors=(0.1, 0.2, 0.3, math.inf)))
    assert knee.rate_bytes_per_s is None
    assert knee.remark.startswith("no knee")


def test_the_order_of_readings_does_not_matter() -> None:
    readings = curve(0.002)
    assert find_stall_knee(readings[::-1]) == find_stall_knee(readings)


@given(st.integers(0, 2**32))
def test_disturbances_of_single_deliveries_do_not_move_the_knee(seed: int) -> None:
    rng = random.Random(seed)
    noisy: list[RateReading] = []
    for reading in curve(0.002):
        (quiet,) = reading.samples
        disturbed = Sample(quiet.ttft_s * rng.uniform(1.0, 1.5), quiet.first_layer_s)
        noisy.append(RateReading(reading.rate_bytes_per_s, (disturbed, quiet)))
    assert find_stall_knee(noisy).rate_bytes_per_s == find_stall_knee(curve(0.002)).rate_bytes_per_s


def test_repetitions_far_apart_are_remarked() -> None:
    noisy = [
        RateReading(reading.rate_bytes_per_s, (*reading.samples, Sample(reading.ttft_s * 1.2, 0.0)))
        for reading in curve(0.002)
    ]
    knee = find_stall_knee(noisy)
    assert knee.rate_bytes_per_s is not None
    assert knee.remark == "noisy: repetitions lie 20 % apart"


def test_a_wider_tolerance_finds_a_lower_knee() -> None:
    strict, lenient = (find_stall_knee(curve(), part).rate_bytes_per_s for part in (TOLERANCE, 0.2))
    assert strict is not None
    assert lenient is not None
    assert lenient < strict


def test_the_knee_of_ttft_counts_the_first_layer_and_the_stall_knee_does_not() -> None:
    ttft, stall = find_ttft_knee(curve()), find_stall_knee(curve())
    # s/r = 2 % of the best, 32 windows
    assert ttft.rate_bytes_per_s == pytest.approx(GEOMETRY.zero_stall_rate / 0.64, rel=0.1)
    assert stall.rate_bytes_per_s == pytest.approx(GEOMETRY.zero_stall_rate, rel=0.1)
    fast = (10.0, 20.0, math.inf)
    assert find_ttft_knee(curve(factors=fast)).remark.startswith("flat: TTFT")
    assert find_ttft_knee(curve(factors=(0.1, 0.2, math.inf))).remark.startswith("no knee: TTFT")


def plateau_factor(readings: Sequence[RateReading]) -> float | None:
    rate = plateau_rate(readings, GEOMETRY.zero_stall_rate)
    return None if rate is None else rate / GEOMETRY.zero_stall_rate


def test_a_knee_at_the_zero_stall_rate_takes_the_next_rate_that_was_measured_above_it() -> None:
    assert plateau_factor(curve()) == pytest.approx(1.05)
    assert plateau_factor(curve(factors=(0.5, 1.0, 1.4, 2.0, math.inf))) == pytest.approx(1.4)


@given(st.floats(0.0, 0.005))
def test_a_plateau_was_measured_above_the_knee_and_the_zero_stall_rate(delay_s: float) -> None:
    factor = plateau_factor(curve(delay_s))
    knee = find_stall_knee(curve(delay_s)).rate_bytes_per_s
    assert factor is not None
    assert knee is not None
    assert any(factor == pytest.approx(measured) for measured in RATE_FACTORS)
    assert factor > 1.0
    assert factor * GEOMETRY.zero_stall_rate >= knee * (1 - 1e-9)


def test_a_curve_without_a_knee_within_the_sweep_has_no_plateau() -> None:
    assert plateau_factor(curve(factors=(1.5, 2.0, math.inf))) is None  # flat
    assert plateau_factor(curve(factors=(0.2, 0.3, math.inf))) is None  # steep
    assert plateau_factor(curve(factors=(0.5, 0.9, 1.0, math.inf))) is None  # nothing above r*


def test_the_margin_is_the_most_that_any_geometry_needs_and_never_0() -> None:
    assert margin_bytes_per_s([(120.0, 100.0), (1030.0, 1000.0), (None, 1.0)]) == 30.0
    assert margin_bytes_per_s([(None, 1.0)]) is None


def modes(*gains: float) -> list[ModeReading]:
    """Readings of 1, 2, 4, ... bytes."""
    return [ModeReading(1 << power, 1.0, 1.0 - gain) for power, gain in enumerate(gains)]


@pytest.mark.parametrize(
    ("gains", "threshold"),
    [
        ((-0.1, 0.0, 0.005, 0.02, 0.3), Threshold(8)),
        ((0.02, 0.02, 0.0, 0.02, 0.3), Threshold(8)),  # a win below a loss does not count
        ((0.2, 0.3), Threshold(1, "layerwise wins at every payload that was measured")),
        ((-0.1, 0.2, 0.005), Threshold(None, "layerwise does not win at the largest payload")),
    ],
)
def test_the_threshold_is_where_layerwise_wins_for_good(
    gains: tuple[float, ...], threshold: Threshold
) -> None:
    assert find_threshold(modes(*gains)) == threshold
    assert find_threshold(modes(*gains)[::-1]) == threshold


@pytest.mark.parametrize(
    ("text", "geometry"),
    [
        ("16K=1000000,0.01,32", GEOMETRY),
        (" 16K = 1MB , 10ms , 32 ", GEOMETRY),
        ("a=b=1KiB,1s,1", None),
        ("x=56MiB,8.8ms,32", ModelGeometry("x", 56 << 20, 0.0088, 32)),
    ],
)
def test_geometries_are_read(text: str, geometry: ModelGeometry | None) -> None:
    if geometry is None:
        with pytest.raises(InvalidRequest):
            parse_geometry(text)
    else:
        assert parse_geometry(text) == geometry


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("16K", "is not NAME=BYTES_PER_LAYER"),
        ("=1MiB,1ms,32", "is not NAME=BYTES_PER_LAYER"),
        ("a=1MiB,1ms", "is not NAME=BYTES_PER_LAYER"),
        ("a=1MiB,1ms,many", "many"),
        ("a=1MiB,1 hour,32", "unknown unit 'hour'"),
        ("a=1MiB,0,32", "not an amount above 0"),
        ("a=1MiB,1000s,32", "compute window must be above 0 and at most 60 s"),
        ("a=1MiB,1ms,0", "num_layers"),
    ],
)
def test_a_wrong_geometry_is_refused_and_named(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        parse_geometry(text)
    assert text in caught.value.message


def test_the_rows_of_a_profile_are_geometries_of_the_paper() -> None:
    geometries = parse_geometries(TABLE_A8)
    assert [geometry.name for geometry in geometries][:2] == ["4K, 50%", "4K, 87.5%"]
    for geometry, default in zip(geometries[:2:2], DEFAULT_GEOMETRIES, strict=False):
        assert geometry.num_layers == 32
        assert geometry.layer_bytes == pytest.approx(default.layer_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("profile", "problem"),
    [
        ("", "holds no row"),
        ("context\n4K\n", "no column t_layer_ms"),
        (TABLE_A8 + "4K,x,1,1,1,1\n", "line 10: could not convert"),
        (TABLE_A8 + "4K,0.5,1,1,0,1\n", "line 10: "),
        (TABLE_A8 + "4K\n", "line 10: "),
    ],
)
def test_a_broken_profile_is_refused_with_its_line(profile: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        parse_geometries(profile)


def test_names_are_told_apart_and_bounded() -> None:
    with pytest.raises(InvalidRequest, match="two geometries are called '16K'"):
        check_geometries([GEOMETRY, GEOMETRY])
    many = [ModelGeometry(str(number), 1, 0.1, 1) for number in range(GEOMETRIES_MAX + 1)]
    with pytest.raises(InvalidRequest, match=f"at most {GEOMETRIES_MAX}"):
        check_geometries(many)


@given(st.integers(1, 1 << 33), st.integers(1, 128))
def test_a_geometry_delivers_its_bytes_in_slices_of_a_usual_size(
    layer_bytes: int, num_layers: int
) -> None:
    geometry = ModelGeometry("any", layer_bytes, 0.01, num_layers)
    assert 0 <= layer_bytes - geometry.delivered_layer_bytes < geometry.chunk_count
    assert geometry.layout.per_layer_chunk_bytes <= 2 * (64 << 10)


def test_scaling_divides_bytes_and_leaves_times() -> None:
    scaled = GEOMETRY.scaled(10)
    assert (scaled.layer_bytes, scaled.compute_window_s) == (100_000, WINDOW_S)
    assert scale_of(None, has_geometries=False) == DEFAULT_SCALE
    assert scale_of(None, has_geometries=True) == 1.0
    assert scale_of(4.0, has_geometries=False) == 4.0


def test_the_default_takes_less_than_two_minutes() -> None:
    assert expected_s(DEFAULT_GEOMETRIES, repeats=2) < 110


def test_flags_are_checked_before_anything_runs(tmp_path: Path) -> None:
    profile = tmp_path / "a8.csv"
    with pytest.raises(InvalidRequest, match="not both"):
        geometries_of(["a=1,1,1"], profile)
    with pytest.raises(InvalidRequest, match=f"--profile {profile}: No such file"):
        geometries_of([], profile)
    profile.write_text(TABLE_A8)
    assert len(geometries_of([], profile)) == 8
    assert geometries_of([], None) == DEFAULT_GEOMETRIES
    with pytest.raises(InvalidRequest, match="give --data-dir"):
        settings_of(None, None, None, is_needed=True)
    assert settings_of(None, None, None, is_needed=False) is None
    assert settings_of(None, str(tmp_path), None, is_needed=True) is not None


def test_credentials_are_found_beside_the_data(tmp_path: Path) -> None:
    assert default_credentials(None) is None
    assert default_credentials(str(tmp_path)) is None
    (tmp_path / "root-credentials").touch()
    assert default_credentials(str(tmp_path)) == tmp_path / "root-credentials"


def test_an_emulated_gpu_waits_for_layers_and_computes_each_in_turn() -> None:
    waited: list[int] = []
    sample = prefill(waited.append, 3, 0.001, started_s=0.0)
    assert waited == [0, 1, 2]
    assert sample.after_first_s >= 0.003 - 1e-9  # each computes for its window; later where we are


CALIBRATION = Calibration(
    (
        Curve(GEOMETRY, tuple(curve(0.002))),
        Curve(GEOMETRY, tuple(curve(factors=(2.0, math.inf)))),
    ),
    tuple(modes(0.0, 0.02)),
    Threshold(2 << 20, ""),
)


def test_what_is_proposed_can_be_written_to_the_schedule() -> None:
    changes = CALIBRATION.changes
    assert changes.margin_gbps == pytest.approx(25e6 / BYTES_PER_GBIT, rel=0.01)
    assert changes.layerwise_threshold_bytes == 2 << 20
    assert changes.policy is None
    nothing = Calibration(CALIBRATION.curves[1:], (), Threshold(None, "none"))
    assert nothing.changes.margin_gbps is None
    assert nothing.changes.layerwise_threshold_bytes is None


def test_the_margin_is_proposed_for_real_sizes_and_shown_for_both() -> None:
    scaled = Calibration(CALIBRATION.curves, (), Threshold(None, "none"), scale=32)
    measured = CALIBRATION.margin_gbps
    assert measured is not None
    assert measured == CALIBRATION.measured_margin_gbps
    assert scaled.measured_margin_gbps == measured
    assert scaled.changes.margin_gbps == pytest.approx(32 * measured)
    content = document(scaled, is_applied=False)
    assert (content["scale"], content["measured_margin_gbps"]) == (32, measured)
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(*report(scaled), sep="\n")
    text = console.export_text()
    assert f"margin: {gbps_text(32 * measured)} for real sizes" in text
    assert f"({gbps_text(measured)} as measured, times the scale of 32)" in text


def test_the_report_shows_every_rate_the_knees_and_what_is_proposed() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*report(CALIBRATION), sep="\n")
    text = console.export_text()
    for shown in (
        "16K: 976.6 KiB a layer, 10ms, 32 layers",
        "no bound",
        "flat",
        "1.25",
        "margin: ",
        "knee of TTFT: ",
        "knee without the first layer's own transfer: ",
        "in 1 of 2 geometries",
        "It goes by the knee without the first layer's own transfer",
    ):
        assert shown in text
    assert "threshold: layerwise from 2.0 MiB up" in text
    none = Calibration(CALIBRATION.curves[1:], (), Threshold(None, "why not"))
    console.print(*report(none), sep="\n")
    text = console.export_text()
    assert "none is proposed" in text
    assert "why not" in text


def test_the_document_says_no_bound_as_null() -> None:
    content = msgspec.json.decode(msgspec.json.encode(document(CALIBRATION, is_applied=True)))
    assert content["applied"] is True
    assert content["curves"][0]["readings"][-1]["rate_bytes_per_s"] is None
    assert content["curves"][1]["stall_knee_bytes_per_s"] is None
    assert content["curves"][0]["ttft_knee_bytes_per_s"] is not None
    assert content["margin_gbps"] == CALIBRATION.margin_gbps


def test_the_picture_has_a_panel_and_a_line_for_each_geometry() -> None:
    root = ElementTree.fromstring(curves_svg(CALIBRATION))
    namespace = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{namespace}g")) == 2
    lines = root.findall(f".//{namespace}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [len(RATE_FACTORS) - 1, 1]


@pytest.mark.parametrize(
    ("part", "shown"), [(0.0, ""), (0.5, "█"), (1.0, "██"), (0.3125, "▋"), (9, "██")]
)
def test_bars_are_drawn_to_an_eighth_of_a_cell(part: float, shown: str) -> None:
    assert bar(part, cells=2) == shown
