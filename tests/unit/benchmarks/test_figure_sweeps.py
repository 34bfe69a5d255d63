"""The arithmetic of the figures on aggregation, rates and the kernel's cap."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from benchmarks.basis.prefix import Geometry
from benchmarks.figures.carriers import SHARED_MEMORY
from benchmarks.figures.experiment import NotPossible
from benchmarks.figures.experiments.aggregation import (
    CHUNK_TOKENS,
    QUICK_CHUNK_TOKENS,
    TCP,
    geometries,
    of_one_request,
    row_of,
)
from benchmarks.figures.experiments.rate_sweep import FACTORS, rows_of, scaled
from benchmarks.figures.paper_data import REQUESTS
from benchmarks.figures.shaped_link import (
    PREFIX,
    free_network,
    own_namespaces,
    shaped_link,
    stale,
)
from objectcache_laboratory.calibration.knee import RateReading, Sample
from objectcache_schemas.limits import MIB


@pytest.mark.parametrize("scale", [1, 16, 48, 1000])
@pytest.mark.parametrize("is_quick", [False, True])
def test_chunks_of_every_size_hold_the_same_bytes(scale: int, is_quick: bool) -> None:
    found = list(geometries(scale, is_quick))
    sizes = QUICK_CHUNK_TOKENS if is_quick else CHUNK_TOKENS
    assert tuple(geometry.chunk_tokens for geometry in found) == sizes
    assert len({geometry.payload_bytes for geometry in found}) == 1


def test_throughput_is_bytes_over_the_median_time() -> None:
    geometry = Geometry(16, 16)
    row = row_of(geometry, TCP, [0.1, 5.0, 0.2])
    assert (
        row.requests,
        row_of(geometry, of_one_request(SHARED_MEMORY, "layerwise"), [0.1]).requests,
    ) == (16, 1)
    assert row.payload_mib == geometry.payload_bytes / MIB
    assert row.gbytes_per_s == pytest.approx(geometry.payload_bytes / 0.2e9)
    assert row.gbps == pytest.approx(8 * row.gbytes_per_s)


def test_rates_and_margin_are_scaled_and_times_are_not() -> None:
    request = REQUESTS["16K, 87.5%"]
    geometry = scaled(request, 16, 32)
    assert geometry.compute_window_s == request.window_s
    readings = [
        RateReading(
            factor * geometry.zero_stall_rate, (Sample(0.3 + max(0.0, 1 / factor - 1), 0.01),)
        )
        for factor in FACTORS
    ]
    rows = rows_of(geometry, readings, 16)
    assert rows[0].zero_stall_gbps * 16 == pytest.approx(53.4, abs=0.1)  # 6.67 GB/s, table A8
    assert rows[0].margin_gbps * 16 == 5.0
    assert rows[0].of_zero_stall == pytest.approx(FACTORS[0])
    assert FACTORS[-1] == math.inf
    assert (rows[-1].rate_gbps, rows[-1].of_zero_stall) == (None, None)
    assert rows[0].increase_percent == pytest.approx(1000.0)
    assert rows[0].stall_knee_gbps == pytest.approx(rows[0].zero_stall_gbps, rel=0.03)


def test_only_namespaces_of_processes_that_are_gone_are_stale() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = [f"{PREFIX}{ended.pid}", f"{PREFIX}{ended.pid}-1", f"{PREFIX}{ended.pid}-store"]
    listed = ["other", f"{PREFIX}{os.getpid()} (id: 1)", *left, f"{PREFIX}x"]
    assert stale("\n".join(listed)) == left


def test_a_machine_without_the_means_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotPossible, match="root"), shaped_link():
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NotPossible, match="iproute2"), shaped_link():
        pass


def break_off_on_a_link() -> None:
    with shaped_link() as link, shaped_link(1) as second:
        assert sorted(own_namespaces()) == sorted([link.namespace, second.namespace])
        for rate in (1e6, 1e9, None, None):
            link.shape(rate)
            second.shape_inbound(rate)
        raise KeyError


def test_a_shaped_link_is_removed_whatever_happens_on_it() -> None:
    try:
        with pytest.raises(KeyError):
            break_off_on_a_link()
    except NotPossible as why:
        pytest.skip(f"no shaped link here: {why}")
    assert own_namespaces() == []


def test_links_of_two_processes_lie_in_networks_of_their_own() -> None:
    program = (
        "from benchmarks.figures.shaped_link import shaped_link\n"
        "with shaped_link() as link:\n"
        "    print(link.near_address, flush=True)\n"
        "    input()\n"
    )
    try:
        with shaped_link():
            pass
    except NotPossible as why:
        pytest.skip(f"no shaped link here: {why}")
    others = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    seen = set[str]()
    for other in others:
        assert other.stdout is not None
        seen.add(other.stdout.readline().rpartition(".")[0])
    assert len(seen) == 2
    for other in others:
        other.communicate("\n", timeout=60)
        assert other.returncode == 0


def test_a_network_that_another_process_has_is_left_alone() -> None:
    line = "3: oc7n0    inet 198.18.7.1/30 scope global oc7n0\\       valid_lft forever"
    assert free_network("", 7) == "198.18.7"
    assert free_network(line, 7) == "198.18.7"
    assert free_network(line, 7 + 512) == "198.18.8"
    assert free_network("", 511) == "198.19.255"
