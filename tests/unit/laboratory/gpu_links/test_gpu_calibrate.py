"""What `objectcache gpu calibrate` chooses and writes, and a copier is made of."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from objectcache.gpu.calibrated_lines import read_lines, read_links, write_lines, write_links
from objectcache.gpu.copier import Copier
from objectcache.gpu.cuda_device import CudaDevice
from objectcache.gpu.device import Direction, Way
from objectcache.gpu.line import LineSettings
from objectcache.gpu.links import relay_check
from objectcache.gpu.links.checked_links import CheckedLinks
from objectcache.gpu.links.link_rates import LinkRates
from objectcache.gpu.links.pull_settings import PullSettings
from objectcache.gpu.pieces import Pieces
from objectcache_laboratory.gpu_links.line_trials import (
    DEPTHS,
    PIECES_BYTES,
    TASKS_BYTES,
    WAYS,
    LineTrial,
    best_lines,
    trials,
    with_ways,
)
from objectcache_laboratory.gpu_links.link_trials import BesideOneCopy, pays_from, try_links
from objectcache_operations.console.app import app
from objectcache_operations.console.gpu_calibrate import calibrate
from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_schemas.limits import KIB, MIB
from tests.emulated_device import EmulatedDevice

LINES = {
    Direction.LOAD: LineSettings(Way.STAGED, 8 * MIB, 2),
    Direction.SAVE: LineSettings(Way.EACH, 32 * MIB, 8, ways=((4096, Way.STAGED),)),
}
TRIES = 10


def test_every_setting_is_tried_in_both_directions() -> None:
    tried = list(trials(EmulatedDevice(), MIB, 32 * KIB))
    assert len(tried) == len(WAYS) * len(TASKS_BYTES) * len(DEPTHS) * len(Direction)
    assert len({(trial.direction, trial.settings) for trial in tried}) == len(tried)
    assert Way.MAPPED not in {trial.settings.way for trial in tried}


def test_of_what_is_about_as_quick_the_one_with_the_fewest_bytes_on_the_way_is_best() -> None:
    def trial(direction: Direction, task_mib: int, depth: int, rate: float) -> LineTrial:
        return LineTrial(direction, LineSettings(Way.EACH, task_mib * MIB, depth), rate)

    load, save = Direction.LOAD, Direction.SAVE
    tried = [
        trial(load, 32, 8, 100.0),
        trial(load, 16, 4, 98.5),
        trial(load, 8, 4, 97.0),
        trial(save, 4, 2, 10.0),
        trial(save, 8, 2, 50.0),
    ]
    best = best_lines(tried)
    assert best == {load: tried[1], save: tried[4]}


def test_what_is_best_is_written_and_a_copier_is_made_of_it(tmp_path: Path) -> None:
    device, file, out = EmulatedDevice(), tmp_path / "gpu.json", io.StringIO()
    calibrate(device, MIB, 32 * KIB, file, Console(file=out, width=200))
    lines = read_lines(file, device)
    with Copier(device, loads=lines[Direction.LOAD], saves=lines[Direction.SAVE]):
        pass
    assert out.getvalue().count("*") == len(Direction)
    assert str(file) in out.getvalue()


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    device, file = EmulatedDevice(), tmp_path / "gpu.json"
    write_lines(file, device, 32 * KIB, LINES)
    assert read_lines(file, device) == LINES
    with pytest.raises(InvalidRequest, match=f"no device at .*, only at {device.place}: measure"):
        read_lines(file, EmulatedDevice())
    assert read_links(file, device, []) is None
    device.kind = "another card in the same slot"
    with pytest.raises(InvalidRequest, match=r"was measured on emulated; at .* another card"):
        read_lines(file, device)


def test_ranks_with_a_gpu_each_share_a_file(tmp_path: Path, any_rate: None) -> None:
    file = tmp_path / "gpu.json"
    devices = [EmulatedDevice()]
    devices.append(EmulatedDevice(beside=devices[0]))
    lines = [LINES, {each: LineSettings(Way.BATCH, MIB, 3) for each in Direction}]
    rates = [5e9, 3e9]
    for device, other, own, rate in zip(devices, devices[::-1], lines, rates, strict=True):
        known = {each: LinkRates(1e9, {(0, 0): rate, (1, 0): rate / 2}) for each in Direction}
        links = CheckedLinks(device, (other,), {}, PullSettings(), known)
        write_lines(file, device, 32 * KIB, own, links)
    for device, other, own, rate in zip(devices, devices[::-1], lines, rates, strict=True):
        assert read_lines(file, device) == own
        read = read_links(file, device, [other])
        assert read is not None
        assert read.relays == (other,)
        assert read.rates[Direction.LOAD].known == pytest.approx({(0, 0): rate, (1, 0): rate / 2})
    first = read_links(file, devices[0], [devices[1]])
    assert first is not None
    write_links(file, first)
    assert read_lines(file, devices[1]) == lines[1]


@pytest.fixture
def any_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_check, "RATE_MIN", 0.0)


def test_links_are_read_as_they_were_written_and_as_they_were_learned(
    tmp_path: Path, any_rate: None
) -> None:
    device, file = EmulatedDevice(), tmp_path / "gpu.json"
    other, unused = (EmulatedDevice(beside=device) for _ in range(2))
    found = PullSettings(chunk_bytes=MIB, depth=3, fallback_bytes=3 * MIB)
    rates = {each: LinkRates(1e9, {(0, 0): 5e9, (1, 0): 3e9}) for each in Direction}
    links = CheckedLinks(device, (other,), {}, found, rates)
    write_lines(file, device, 32 * KIB, LINES, links)
    read = read_links(file, device, [unused, other])
    assert read is not None
    assert (read.device, read.relays, read.settings) == (device, (other,), found)
    for direction in Direction:
        assert read.rates[direction].known == pytest.approx(rates[direction].known)
    read.rates[Direction.SAVE].learn(1, 0, MIB, 1.0, 0.0)
    write_links(file, read)
    again = read_links(file, device, [other, unused])
    assert again is not None
    assert again.rates[Direction.SAVE].known == read.rates[Direction.SAVE].known
    assert again.rates[Direction.SAVE].known != rates[Direction.SAVE].known
    assert read_lines(file, device) == LINES
    with pytest.raises(InvalidRequest, match="which are not there"):
        read_links(file, device, [unused])
    bad = json.loads(file.read_text())
    bad["gpus"][device.place]["links"]["bytes_per_s"]["load"][other.place] = 0
    file.write_text(json.dumps(bad))
    with pytest.raises(InvalidRequest, match="bytes_per_s"):
        read_links(file, device, [other])


def test_the_report_says_which_links_are_off(tmp_path: Path, any_rate: None) -> None:
    device, file, out = EmulatedDevice(), tmp_path / "gpu.json", io.StringIO()
    other, alone = EmulatedDevice(beside=device), EmulatedDevice()
    calibrate(device, 2 * MIB, 32 * KIB, file, Console(file=out, width=200), [other, alone])
    text = out.getvalue()
    assert "cannot reach" in text
    # How quick they are this test does not judge.
    found = read_links(file, device, [other])
    assert ("The own link alone" if found is None else "2 links, from") in text


def test_links_that_pay_are_written_and_a_copier_is_made_of_them(
    tmp_path: Path, any_rate: None
) -> None:
    """Links of 50 MiB/s, of which two are twice one whatever else the machine does; now and then
    not, if it does much.
    """
    device, file = EmulatedDevice(50 * MIB), tmp_path / "gpu.json"
    other = EmulatedDevice(50 * MIB, beside=device)
    for _ in range(TRIES):
        found = try_links(device, [other], 4 * MIB, 256 * KIB)
        if found.pays:
            break
    assert {trial.links for trial in found.tried} == {1, 2}
    assert found.links.relays == (other,)
    assert found.links.settings.fallback_bytes <= 4 * MIB
    write_lines(file, device, 256 * KIB, LINES, found.links)
    links = read_links(file, device, [other])
    assert links is not None
    assert links.settings == found.links.settings
    for rates in links.rates.values():
        assert rates.known.keys() == {(0, 0), (1, 0)}
    with Copier(device, links=links):
        pass


SIZES = st.lists(st.integers(1, 10**9), min_size=1, max_size=6, unique=True)


@given(SIZES, st.data())
def test_links_pay_from_where_they_are_quicker_at_every_size(
    sizes: list[int], data: st.DataObject
) -> None:
    tried = [BesideOneCopy(size, data.draw(st.sampled_from([1.0, 3.0])), 2.0) for size in sizes]
    least = pays_from(tried)
    is_quicker = {each.size_bytes: each.linked_bytes_per_s > 2.0 for each in tried}
    assert all(quicker for size, quicker in is_quicker.items() if size >= least)
    below = [size for size in sizes if size < least]
    assert not below or not is_quicker[max(below)]


@given(
    st.dictionaries(
        st.sampled_from(PIECES_BYTES),
        st.lists(st.floats(1.0, 100.0), min_size=len(WAYS), max_size=len(WAYS)),
        min_size=1,
    )
)
def test_pieces_of_every_length_go_by_a_way_that_is_about_the_quickest_for_them(
    rates: dict[int, list[float]],
) -> None:
    line = LINES[Direction.LOAD]
    tried = [
        LineTrial(Direction.LOAD, replace(line, way=way), rate, piece_bytes)
        for piece_bytes, by_way in rates.items()
        for way, rate in zip(WAYS, by_way, strict=True)
    ]
    chosen = with_ways(line, tried)
    assert (chosen.task_bytes, chosen.depth) == (line.task_bytes, line.depth)
    for piece_bytes, by_way in rates.items():
        way = chosen.way_of(Pieces.of([(0, 0, piece_bytes)] * 2))
        assert by_way[WAYS.index(way)] >= 0.98 * max(by_way)


def test_ways_go_by_the_length_of_pieces_and_one_piece_by_a_copy() -> None:
    line = LineSettings(Way.EACH, ways=((10, Way.STAGED), (20, Way.BATCH)))
    assert [line.way_of(Pieces.of([(0, 0, size)] * 3)) for size in (1, 10, 11, 20, 21)] == [
        *(Way.STAGED, Way.STAGED, Way.BATCH, Way.BATCH, Way.EACH)
    ]
    assert line.way_of(Pieces.of([(0, 0, 5)])) is Way.EACH
    assert line.takes_kernels
    assert not replace(line, ways=((20, Way.BATCH),)).takes_kernels
    for ways in (((10, Way.EACH), (10, Way.BATCH)), ((0, Way.EACH),)):
        with pytest.raises(InvalidRequest, match="rising sizes"):
            LineSettings(ways=ways)


def test_a_file_that_says_something_else_is_refused(tmp_path: Path) -> None:
    device, file = EmulatedDevice(), tmp_path / "gpu.json"
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_lines(file, device)
    with pytest.raises(InvalidRequest, match="cannot be written"):
        write_lines(tmp_path / "nowhere" / "gpu.json", device, 1, LINES)
    write_lines(file, device, 32 * KIB, LINES)
    good = json.loads(file.read_text())
    gpu = good["gpus"][device.place]
    line = gpu["lines"]["load"]

    def with_lines(lines: dict[str, object]) -> dict[str, object]:
        gpus: dict[str, object] = {device.place: gpu | {"lines": lines}}
        return {"version": good["version"], "gpus": gpus}

    for bad, words in (
        ({"version": 1, "device": "<CudaDevice 0>"}, "version 1, not 2: measure again"),
        (good | {"more": 1}, "no calibration"),
        ([1], "no calibration"),
        (with_lines({"load": line}), "no line for save"),
        (with_lines(gpu["lines"] | {"load": line | {"way": "swim"}}), "no calibration"),
        (with_lines(gpu["lines"] | {"load": line | {"depth": 0}}), "depth"),
    ):
        file.write_text(json.dumps(bad))
        with pytest.raises(InvalidRequest, match=words):
            read_lines(file, device)


def test_pieces_that_do_not_fit_are_refused() -> None:
    for piece_bytes in (0, MIB + 1):
        with pytest.raises(InvalidRequest, match="pieces of"):
            next(trials(EmulatedDevice(), MIB, piece_bytes))


def test_without_a_gpu_the_command_says_so_and_writes_nothing(tmp_path: Path) -> None:
    try:
        CudaDevice()
    except Unavailable:
        pass
    else:
        pytest.skip("there is a GPU")
    file = tmp_path / "gpu.json"
    result = CliRunner().invoke(app, ["gpu", "calibrate", "--write", str(file)])
    assert result.exit_code == 1
    assert "The GPU cannot be measured here" in result.output
    assert not file.exists()
