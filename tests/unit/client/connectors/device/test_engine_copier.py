"""What an engine's configuration asks of copies beside its GPU, and what that can have."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from objectcache.connectors.device.engine_copier import (
    EngineCopier,
    GpuCopies,
    _copier_of,
    engine_copier_of,
)
from objectcache.connectors.vllm.settings import VllmSettings
from objectcache.gpu.calibrated_lines import write_lines
from objectcache.gpu.copier import Copier
from objectcache.gpu.device import Direction, Way
from objectcache.gpu.line import LineSettings
from objectcache.gpu.links import relay_check
from objectcache.gpu.links.checked_links import CheckedLinks
from objectcache.gpu.links.link_rates import LinkRates
from objectcache.gpu.links.pull_settings import OURS
from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_schemas.limits import MIB
from tests.emulated_device import EmulatedDevice


class WithoutPages(EmulatedDevice):
    """A device that has no more host memory to lock."""

    def lock_pages(self, address: int, length_bytes: int) -> None:
        raise Unavailable("cudaHostRegister: out of memory")


def test_copies_are_off_unless_they_are_asked_for() -> None:
    assert VllmSettings().gpu_copies == "off"
    assert engine_copier_of(SimpleNamespace(type="cpu"), GpuCopies()) is None
    assert engine_copier_of(SimpleNamespace(type="cuda", index=0), GpuCopies()) is None


@pytest.mark.parametrize("wrong", ["yes", True, 1, None])
def test_another_word_is_refused_by_the_settings_name(wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="'gpu_copies' must be one of off, on, got"):
        VllmSettings(gpu_copies=wrong)  # type: ignore[arg-type]


def test_a_calibration_that_is_no_name_is_refused_by_the_settings_name() -> None:
    with pytest.raises(InvalidRequest, match="'gpu_calibration' must be a file's name, got 3"):
        VllmSettings(gpu_calibration=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cpu", "xpu"])
def test_a_device_that_is_no_gpu_is_refused_with_the_remedy(kind: str) -> None:
    with pytest.raises(InvalidRequest, match=f"KV cache is on '{kind}': .*; set it to 'off'"):
        engine_copier_of(SimpleNamespace(type=kind), GpuCopies("on"))


def test_a_calibration_says_how_is_copied(tmp_path: Path) -> None:
    device = EmulatedDevice()
    file = tmp_path / "gpu.json"
    lines = {
        Direction.LOAD: LineSettings(Way.ROWS, 3 * MIB, 2),
        Direction.SAVE: LineSettings(Way.EACH, 5 * MIB, 3),
    }
    write_lines(file, device, 4096, lines)
    with _copier_of(device, GpuCopies("on", str(file)), list) as copier:
        assert copier._loads.settings == lines[Direction.LOAD]
        assert copier._saves.settings == lines[Direction.SAVE]
    with _copier_of(device, GpuCopies("on"), list) as copier:
        assert copier._loads.settings == LineSettings.best_of(device)


def test_a_calibration_that_is_none_is_refused_by_the_settings_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"'gpu_calibration': .*missing.json cannot be read"):
        _copier_of(EmulatedDevice(), GpuCopies("on", str(tmp_path / "missing.json")), list)


# --- over which links ---

LINES = {each: LineSettings(Way.ROWS, 3 * MIB, 2) for each in Direction}


@pytest.fixture
def any_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_check, "RATE_MIN", 0.0)


def calibrated(file: Path, device: EmulatedDevice, *relays: EmulatedDevice) -> GpuCopies:
    """The settings of who asks for the links of a file, which has the device's and these."""
    rates = {
        each: LinkRates(1e9, {(number, 0): 5e9 for number in range(1 + len(relays))})
        for each in Direction
    }
    links = CheckedLinks(device, relays, {}, OURS, rates) if relays else None
    write_lines(file, device, 4096, LINES, links)
    return GpuCopies("on", str(file), "checked")


def test_copies_go_over_the_gpus_own_link_unless_others_are_asked_for(tmp_path: Path) -> None:
    assert VllmSettings().gpu_links == "direct"
    device, other = EmulatedDevice(), EmulatedDevice()
    file = tmp_path / "gpu.json"
    calibrated(file, device, other)
    for chosen in (GpuCopies("on"), GpuCopies("on", str(file))):
        with _copier_of(device, chosen, lambda: [other]) as copier:
            assert copier.links == "direct"
    with _copier_of(device, GpuCopies("on", links="host"), list) as copier:
        assert copier.links == "host"


def test_the_links_of_a_calibration_are_copied_over(tmp_path: Path, any_rate: None) -> None:
    device = EmulatedDevice()
    other, unused = (EmulatedDevice(beside=device) for _ in range(2))
    chosen = calibrated(tmp_path / "gpu.json", device, other)
    with _copier_of(device, chosen, lambda: [unused, other]) as copier:
        assert isinstance(copier.links, CheckedLinks)
        assert copier.links.relays == (other,)


def test_a_link_that_reaches_nobody_any_more_is_left_out_and_named(
    tmp_path: Path, any_rate: None, caplog: pytest.LogCaptureFixture
) -> None:
    device, alone = EmulatedDevice(), EmulatedDevice()
    chosen = calibrated(tmp_path / "gpu.json", device, alone)
    with (
        caplog.at_level(logging.WARNING, "objectcache.connectors"),
        _copier_of(device, chosen, lambda: [alone]) as copier,
    ):
        assert copier.links == "direct"
    (line,) = caplog.messages
    assert f"the link of {alone!r} is left out: " in line


def test_a_calibration_without_links_leaves_the_gpus_own(tmp_path: Path) -> None:
    device = EmulatedDevice()
    chosen = calibrated(tmp_path / "gpu.json", device)
    with _copier_of(device, chosen, list) as copier:
        assert copier.links == "direct"
        assert copier._loads.settings == LINES[Direction.LOAD]


def test_links_of_gpus_that_are_not_there_are_refused_by_the_settings_name(tmp_path: Path) -> None:
    device = EmulatedDevice()
    chosen = calibrated(tmp_path / "gpu.json", device, EmulatedDevice(beside=device))
    with pytest.raises(InvalidRequest, match=r"'gpu_calibration': .* which are not there"):
        _copier_of(device, chosen, list)


@pytest.mark.parametrize(
    ("links", "named"),
    [
        ("all", "'gpu_links' must be one of direct, host, checked, got 'all'"),
        (None, "'gpu_links' must be one of direct, host, checked, got None"),
        ("checked", "'gpu_links' is 'checked', and 'gpu_calibration' names no file"),
    ],
)
def test_links_that_are_none_or_unknown_are_refused(links: object, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        VllmSettings(gpu_copies="on", gpu_links=links)  # type: ignore[arg-type]


def test_settings_that_would_change_nothing_are_refused_with_the_one_that_is_off() -> None:
    for others, named in (
        ({"gpu_links": "host"}, "'gpu_links' would"),
        ({"gpu_calibration": "gpu.json"}, "'gpu_calibration' would"),
        ({"gpu_calibration": "gpu.json", "gpu_links": "checked"}, "'gpu_calibration' and 'gpu_li"),
    ):
        with pytest.raises(InvalidRequest, match=f"'gpu_copies' is 'off', and {named}"):
            GpuCopies.from_settings(dict(others))


def test_settings_are_taken_out_of_those_of_a_connector_by_their_names() -> None:
    settings = {"gpu_copies": "on", "gpu_calibration": "gpu.json", "gpu_links": "checked", "a": 1}
    assert GpuCopies.from_settings(settings) == GpuCopies("on", "gpu.json", "checked")
    assert settings == {"a": 1}
    assert GpuCopies.from_settings(settings) == GpuCopies()


def test_memory_for_deliveries_is_page_locked_until_it_goes() -> None:
    device = EmulatedDevice()
    engine = EngineCopier(Copier(device), lambda: 0)
    region = engine.region(MIB)
    assert engine.reaches(region.array())
    del region
    assert not device._page_locked
    engine.close()


def test_where_no_memory_can_be_page_locked_deliveries_have_plain_memory_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = EngineCopier(Copier(WithoutPages()), lambda: 0)
    with caplog.at_level(logging.WARNING, "objectcache.connectors"):
        regions = [engine.region(MIB) for _ in range(3)]
        assert not engine.reaches(regions[0].array())
        assert not engine.reaches(np.zeros(8, np.uint8))
    (line,) = caplog.messages
    assert "copied while the engine waits: cudaHostRegister: out of memory" in line
    engine.close()


@pytest.mark.parametrize("encodings", [("auto",), ("planes-zstd",)])
def test_a_copier_and_decoding_in_the_engines_process_are_refused_with_the_way_out(
    encodings: tuple[str, ...],
) -> None:
    with pytest.raises(InvalidRequest, match="'encodings' must be empty where 'gpu_copies' is"):
        GpuCopies("on").check_layers(encodings, "")
    GpuCopies("on").check_layers((), "")
    GpuCopies("off").check_layers(encodings, "q8")


def test_a_copier_and_dequantising_in_the_engines_process_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"'lossy' is 'q8'.*gpu_copies"):
        GpuCopies("on").check_layers((), "q8")
