"""vLLM's connector with `gpu_copies`, over an emulated GPU: what one engine stores another has in
its blocks, byte for byte; a load that fails writes nothing more; what does not fit is refused.

`python -m pytest tests/contract/test_devices.py` has the copier's part on CUDA where there is one.
"""

# ruff: noqa: F401, F811 (fixtures of another module)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from objectcache.connectors.device.engine_copier import EngineCopier
from objectcache.connectors.vllm import connector as connector_module
from objectcache.connectors.vllm.worker.beside_copies import (
    _BufferedLoad,
    _CopiedLoad,
    _DirectLoad,
)
from objectcache.gpu.copier import Copier
from objectcache.gpu.device import Way
from objectcache.gpu.links.checked_links import CheckedLinks
from objectcache_schemas.errors import InvalidRequest
from tests.engines.emulated_gpu import EmulatedGpu, emulated_copier, two_links
from tests.engines.test_vllm_connector import (
    StartEngine,
    configs,
    prompt,
    start,
    stored_by_another,
)
from tests.engines.test_vllm_failed_loads import (
    SHARED,
    assert_nothing_wrong_is_stored,
    fail_next_load,
    run_until_failed,
)
from tests.engines.vllm_engine import ORDERS, EngineConfigs
from tests.servers import RunningServer

MODES = ["layerwise", "before_schedule"]


class Copied:
    """Which loads a copier has begun, and its GPUs."""

    def __init__(self) -> None:
        self.loads: list[type[Any]] = []
        self.gpus: list[EmulatedGpu] = []
        self.way = Way.STAGED
        self.copiers: list[Copier] = []

    def copier(self, device: Any, settings: Any) -> EngineCopier | None:
        """In the place of `engine_copier_of`: for tensors of the CPU."""
        if settings.word == "off":
            return None
        gpu = EmulatedGpu()
        self.gpus.append(gpu)
        links = two_links(gpu) if settings.links == "checked" else settings.links
        engine = emulated_copier(gpu, self.way, links)
        self.copiers.append(engine.copier)
        return engine


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch, start: StartEngine) -> Iterator[Copied]:
    found = Copied()
    monkeypatch.setattr(connector_module, "engine_copier_of", found.copier)
    begun = _CopiedLoad.__init__

    def noted(self: _CopiedLoad, *arguments: Any) -> None:
        found.loads.append(type(self))
        begun(self, *arguments)

    monkeypatch.setattr(_CopiedLoad, "__init__", noted)
    yield found
    for gpu in found.gpus:
        gpu.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_of_any_order_are_stored_and_loaded(
    start: StartEngine, copied: Copied, order: str, mode: str
) -> None:
    """A block of another engine's order, copied in the old way, and back."""
    tokens = prompt(900 + 10 * MODES.index(mode) + sorted(ORDERS).index(order), 100)
    stored_by_another(start, tokens)
    second = start(order, gpu_copies="on", load_mode=mode)
    request = second.add("again", tokens)
    second.run()
    assert second.loaded_tokens == {"again": 96}
    assert second.computed_tokens == 4
    assert second.wrong_positions(request) == []
    assert second.failed_blocks == set()
    assert copied.loads == [_BufferedLoad]
    longer = tokens + prompt(930, 100)
    second.answer("more", longer)
    second.saved()
    third = start()
    request = third.add("third", longer)
    third.run()
    assert third.loaded_tokens == {"third": 192}
    assert third.wrong_positions(request) == []


@pytest.mark.parametrize("mode", MODES)
def test_latents_are_copied_straight_into_their_blocks(
    start: StartEngine, copied: Copied, mode: str
) -> None:
    tokens = prompt(940 + MODES.index(mode), 170)
    stored_by_another(start, tokens, latent=True, gpu_copies="on")
    second = start("BLNHC", latent=True, gpu_copies="on", load_mode=mode)
    request = second.add("again", tokens)
    second.run()
    assert second.loaded_tokens == {"again": 160}
    assert second.wrong_positions(request) == []
    assert copied.loads == [_DirectLoad]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("links", ["host", "checked"])
@pytest.mark.parametrize("latent", [False, True], ids=["buffered", "straight"])
def test_blocks_are_stored_and_loaded_over_the_links_that_are_set(
    start: StartEngine, copied: Copied, latent: bool, links: str, mode: str
) -> None:
    tokens = prompt(970 + 4 * latent + 2 * (links == "host") + MODES.index(mode), 100)
    chosen = {
        "latent": latent,
        "gpu_copies": "on",
        "gpu_calibration": "gpu.json",  # which is read where there is a GPU
        "gpu_links": links,
        "load_mode": mode,
    }
    stored_by_another(start, tokens, **chosen)
    second = start(**chosen)
    request = second.add("again", tokens)
    second.run()
    assert second.loaded_tokens == {"again": 96}
    assert second.computed_tokens == 4
    assert second.wrong_positions(request) == []
    assert second.failed_blocks == set()
    assert copied.loads == [_DirectLoad if latent else _BufferedLoad]
    for copier in copied.copiers:
        assert isinstance(copier.links, CheckedLinks) == (links == "checked")


def test_several_requests_of_a_step_are_copied_together(start: StartEngine, copied: Copied) -> None:
    prompts = {f"r{number}": prompt(945 + number, 100 + 16 * number) for number in range(4)}
    first = start(gpu_copies="on")
    for name, tokens in prompts.items():
        first.add(name, tokens)
    first.run()
    first.saved()
    second = start(gpu_copies="on")
    requests = [second.add(name, tokens) for name, tokens in prompts.items()]
    second.run()
    assert sum(second.loaded_tokens.values()) == 96 + 112 + 128 + 144
    assert [second.wrong_positions(request) for request in requests] == [[], [], [], []]


def test_memory_is_page_locked_for_as_long_as_the_engine_runs(
    start: StartEngine, copied: Copied
) -> None:
    engine = stored_by_another(start, prompt(950, 100), gpu_copies="on")
    (gpu,) = copied.gpus
    assert gpu._page_locked
    engine.worker.shutdown()
    assert not gpu._page_locked


@pytest.mark.parametrize("mode", MODES)
def test_after_a_failed_load_everything_is_computed_and_nothing_wrong_is_stored(
    start: StartEngine, copied: Copied, mode: str
) -> None:
    tokens = prompt(951 + MODES.index(mode), SHARED)
    stored_by_another(start, tokens)
    second = start(gpu_copies="on", load_mode=mode)
    fail_next_load(second)
    longer = tokens + prompt(955, 50)
    request = second.add("victim", longer)
    run_until_failed(second)
    second.run()
    assert second.wrong_positions(request) == []
    second.saved()
    assert_nothing_wrong_is_stored(start, longer)


@pytest.mark.parametrize("mode", MODES)
def test_a_gpu_that_fails_costs_the_loads_and_the_saves(
    start: StartEngine, copied: Copied, mode: str
) -> None:
    """As far as the connector is concerned; an engine would not go on."""
    tokens = prompt(957 + MODES.index(mode), 100)
    stored_by_another(start, tokens)
    second = start(gpu_copies="on", load_mode=mode)
    copied.gpus[-1].breaks.set()
    request = second.add("again", tokens + prompt(959, 50))
    second.run()
    assert second.wrong_positions(request) == []
    assert len(second.failed_blocks) == 6
    second.saved()
    worker = second.worker._worker
    assert worker.saves.failures > 0
    assert worker.saves.saved_blocks == 0


def test_what_does_not_come_into_shared_memory_is_copied_while_the_engine_waits(
    start: StartEngine, copied: Copied, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = prompt(960, 100)
    stored_by_another(start, tokens, gpu_copies="on", transport="body")
    second = start(gpu_copies="on", transport="body")
    request = second.add("again", tokens)
    second.run()
    assert second.loaded_tokens == {"again": 96}
    assert second.wrong_positions(request) == []
    assert copied.loads == []
    assert "gpu_copies is on, and memory is copied while the engine waits" in caplog.text


def test_without_a_gpu_the_engine_does_not_start_and_says_why(
    start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidRequest, match="'gpu_copies' is 'on', and the engine's KV cache is"):
        start(gpu_copies="on")
    assert "ObjectCacheConnector cannot start: " in caplog.text
