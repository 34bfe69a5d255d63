"""SGLang's linker with `gpu_copies`, over an emulated GPU: pages of every kind of pool, byte for
byte; a load that fails writes nothing more; what does not fit is refused.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from objectcache.connectors.device.engine_copier import EngineCopier
from objectcache.connectors.sglang.page_store import PageStaging
from objectcache.errors import InvalidRequest
from objectcache.gpu.copier import BlockSave
from objectcache.gpu.layer_load import LayerLoad
from objectcache.gpu.links.checked_links import CheckedLinks
from tests.engines.emulated_gpu import EmulatedGpu, emulated_copier, two_links
from tests.engines.test_sglang_linker import (
    LAYERS,
    contents,
    hashes,
    linker_of,
    offload,
    pool_of,
    same,
    slots,
    store,
    transfer,
)
from tests.servers import RunningServer, start_server, stop_whole


class Begun:
    """An emulated GPU, and the loads that its copier has begun."""

    def __init__(self) -> None:
        self.gpu = EmulatedGpu()
        self.loads: list[LayerLoad] = []
        self.saves: list[BlockSave] = []

    def copier(self, device: Any, settings: Any) -> EngineCopier | None:
        """In the place of `engine_copier_of`: for tensors of the CPU."""
        if settings.word == "off":
            return None
        links = two_links(self.gpu) if settings.links == "checked" else settings.links
        return emulated_copier(self.gpu, links=links)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begun]:
    from objectcache.connectors.sglang import linker as linker_module  # behind SGLang's own modules

    found = Begun()
    monkeypatch.setattr(linker_module, "engine_copier_of", found.copier)
    made = LayerLoad.__init__

    def noted(self: LayerLoad, *arguments: Any) -> None:
        found.loads.append(self)
        made(self, *arguments)

    monkeypatch.setattr(LayerLoad, "__init__", noted)
    save_made = BlockSave.__init__

    def save_noted(self: BlockSave, *arguments: Any) -> None:
        found.saves.append(self)
        save_made(self, *arguments)

    monkeypatch.setattr(BlockSave, "__init__", save_noted)
    yield found
    found.gpu.close()


def load(linker: Any, *loads: tuple[list[str], Any]) -> bool:
    for number, (keys, where) in enumerate(loads):
        assert linker.load(f"r{number}", transfer(keys, where))
    landed: bool = linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    return landed


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_are_stored_and_loaded(server: RunningServer, begun: Begun, kind: str) -> None:
    pool = pool_of(kind)
    linker = linker_of(server, pool, f"m/gpu-{kind}", gpu_copies="on")
    keys = hashes("a", 5)
    expected, beside = contents(pool, slots(1, 9, 4, 2, 3)), contents(pool, slots(0, 23, 30))
    assert offload(linker, keys, slots(1, 9, 4, 2, 3))
    assert len(begun.saves) == LAYERS
    where = slots(20, 31, 22, 12, 11)
    assert load(linker, (keys[:3], where[:24]), (keys[3:], where[24:]))
    assert same(contents(pool, where), expected)
    assert same(contents(pool, slots(0, 23, 30)), beside)
    assert len(begun.loads) == 2
    staging: PageStaging = linker._store._staging
    assert staging._target is not None
    assert linker._copier.reaches(staging._target.array)
    linker.close()
    linker.close()
    begun.loads.clear()
    begun.saves.clear()
    del linker, staging
    assert not begun.gpu._page_locked


@pytest.mark.parametrize("links", ["host", "checked"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_are_stored_and_loaded_over_the_links_that_are_set(
    server: RunningServer, begun: Begun, kind: str, links: str
) -> None:
    pool = pool_of(kind)
    chosen = {
        "gpu_copies": "on",
        "gpu_calibration": "gpu.json",  # which is read where there is a GPU
        "gpu_links": links,
    }
    linker = linker_of(server, pool, f"m/gpu-{kind}-{links}", **chosen)
    assert isinstance(linker._copier.copier.links, CheckedLinks) == (links == "checked")
    keys = hashes(f"e{links}", 5)
    expected, beside = contents(pool, slots(1, 9, 4, 2, 3)), contents(pool, slots(0, 23, 30))
    assert offload(linker, keys, slots(1, 9, 4, 2, 3))
    assert len(begun.saves) == LAYERS
    where = slots(20, 31, 22, 12, 11)
    assert load(linker, (keys[:3], where[:24]), (keys[3:], where[24:]))
    assert same(contents(pool, where), expected)
    assert same(contents(pool, slots(0, 23, 30)), beside)
    assert len(begun.loads) == 2
    linker.close()


def test_what_comes_in_bodies_is_copied_while_the_loader_waits(
    server: RunningServer, begun: Begun, caplog: pytest.LogCaptureFixture
) -> None:
    pool = pool_of("mha")
    linker = linker_of(server, pool, "m/gpu-body", gpu_copies="on", transport="body")
    keys = hashes("b", 3)
    expected = contents(pool, slots(1, 9, 4))
    assert offload(linker, keys, slots(1, 9, 4))
    assert load(linker, (keys, slots(20, 31, 22)))
    assert same(contents(pool, slots(20, 31, 22)), expected)
    assert begun.loads == []
    assert begun.saves == []
    assert "memory is copied while the engine waits" in caplog.text
    linker.close()


def test_a_gpu_that_fails_fails_the_batch(server: RunningServer, begun: Begun) -> None:
    pool = pool_of("mha")
    linker = linker_of(server, pool, "m/gpu-fails", gpu_copies="on")
    keys = hashes("c", 2)
    assert offload(linker, keys, slots(0, 1))
    before = contents(pool, slots(10, 11))
    begun.gpu.breaks.set()
    assert not offload(linker, hashes("f", 2), slots(2, 3))
    assert not load(linker, (keys, slots(10, 11)))
    assert same(contents(pool, slots(10, 11)), before)
    linker.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RunningServer]:
    with start_server(tmp_path / "data") as running:
        yield running


def test_a_server_that_stops_answering_fails_a_load_and_nothing_is_on_its_way_then(
    own_server: RunningServer, begun: Begun
) -> None:
    pool = pool_of("mha")
    keys = hashes("d", 1)
    store(own_server, pool, "m/gpu-stopped", keys, slots(0))
    linker = linker_of(own_server, pool, "m/gpu-stopped", timeout_s=1.0, gpu_copies="on")
    stop_whole(own_server.storage_pid)
    try:
        assert not load(linker, (keys, slots(10)))
    finally:
        os.kill(own_server.storage_pid, signal.SIGCONT)
    assert all(each._closed for each in begun.loads)
    linker.close()


def test_without_a_gpu_the_linker_does_not_start_and_says_why(server: RunningServer) -> None:
    with pytest.raises(InvalidRequest, match="'gpu_copies' is 'on', and the engine's KV cache is"):
        linker_of(server, pool_of("mha"), "m/gpu-none", gpu_copies="on")
    with pytest.raises(InvalidRequest, match="'gpu_copies' must be one of off, on, got 'yes'"):
        linker_of(server, pool_of("mha"), "m/gpu-none", gpu_copies="yes")
    with pytest.raises(InvalidRequest, match="'gpu_links' is 'checked', and 'gpu_calibration' nam"):
        linker_of(server, pool_of("mha"), "m/gpu-none", gpu_copies="on", gpu_links="checked")
