"""vLLM's connector on a bucket that is stored encoded: a fetcher's workers decode what it loads,
and without one the same bytes come plain, or are decoded in its process where `encodings` says so;
and the tier, which takes whole chunks.
"""

# ruff: noqa: F401, F811 (fixtures of another module)

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from objectcache.connectors.vllm.plans import LoadPlan
from objectcache.connectors.vllm.worker.beside_copies import _BufferedLoad
from objectcache.deliveries.delivery import Delivery
from objectcache_schemas.errors import InvalidRequest
from tests.encoded_delivery.prefixes import ZSTD
from tests.engines.fetched.encoded_bucket import NO_FETCHER, Decoded, encoded_server
from tests.engines.test_vllm_connector import (
    BLOCK_BYTES,
    BUCKET,
    StartEngine,
    configs,
    prompt,
    start,
    stored_by_another,
)
from tests.engines.test_vllm_gpu_copies import Copied, copied
from tests.engines.test_vllm_tier import CHUNK_BYTES, StartTier, keys_of, primary, transfer
from tests.engines.test_vllm_tier import start as start_tier
from tests.engines.vllm_engine import BLOCK_TOKENS, LATENT_WIDTH, LAYERS, Engine
from tests.fetcher.fetchers import RunningFetcher
from tests.fetcher.payloads import bfloat16s
from tests.servers import RunningServer

MODES = ["layerwise", "before_schedule", "per_request"]
LATENT_BYTES = LAYERS * BLOCK_TOKENS * LATENT_WIDTH * 2  # of a block
SLOW_GBPS = 0.001  # a prompt of 1,000 tokens takes seconds
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with encoded_server(tmp_path_factory.mktemp("encoded") / "data", BUCKET) as running:
        yield running


@pytest.fixture(scope="module")
def fetcher(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningFetcher]:
    log = tmp_path_factory.mktemp("fetcher") / "fetcher.log"
    with RunningFetcher(server, log) as running:
        yield running


def deliveries_of(engine: Engine) -> list[Delivery]:
    """Those of its first rank's loads, from now on, whichever way they are asked for."""
    begun: list[Delivery] = []
    worker = engine.worker._worker
    for loads in (worker.loads, worker.parked):
        fetch = loads._fetch

        def noted(plan: LoadPlan, fetch: Any = fetch) -> Delivery:
            delivery: Delivery = fetch(plan)
            begun.append(delivery)
            return delivery

        loads._fetch = noted
    return begun


def loads_right(engine: Engine, tokens: list[int]) -> bool:
    """Whether all of a prompt but the last, part block is loaded, and every byte is right."""
    request = engine.add("again", tokens)
    engine.run()
    assert engine.wrong_positions(request) == []
    assert engine.failed_blocks == set()
    return engine.loaded_tokens == {"again": len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["LBNHC", "BHLNC"])
def test_what_is_loaded_is_decoded_by_the_fetchers_workers(
    start: StartEngine, fetcher: RunningFetcher, mode: str, order: str
) -> None:
    tokens = prompt(1000 + 2 * MODES.index(mode) + (order == "LBNHC"), 100)
    stored_by_another(start, tokens)
    decoded = Decoded(fetcher)
    second = start(order, fetcher=fetcher.endpoint, load_mode=mode)
    begun = deliveries_of(second)
    assert loads_right(second, tokens)
    assert decoded.decoded_bytes == {ZSTD: 6 * BLOCK_BYTES}
    assert [(one.route, one.transport) for one in begun] == [("relay:fetcher", "shared_memory")]
    assert not begun[0].is_encoded, "nothing is left for the engine to decode"


def test_latents_are_decoded_by_the_fetchers_workers(
    start: StartEngine, fetcher: RunningFetcher
) -> None:
    tokens = prompt(1100, 70)
    stored_by_another(start, tokens, latent=True)
    decoded = Decoded(fetcher)
    assert loads_right(start("BLNHC", latent=True, fetcher=fetcher.endpoint), tokens)
    assert decoded.decoded_bytes == {ZSTD: 4 * LATENT_BYTES}


def test_every_rank_loads_over_the_fetcher_that_the_environment_names(
    start: StartEngine, fetcher: RunningFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(1110, 100)
    stored_by_another(start, tokens, ranks=2)
    monkeypatch.setenv("OBJECTCACHE_FETCHER", fetcher.endpoint)
    decoded = Decoded(fetcher)
    assert loads_right(start("BLNHC", ranks=2), tokens)
    assert decoded.decoded_bytes == {ZSTD: 2 * 6 * BLOCK_BYTES}


@pytest.mark.parametrize("mode", MODES[:2])
def test_what_the_workers_decode_lies_where_a_copier_reaches_it(
    start: StartEngine, copied: Copied, fetcher: RunningFetcher, mode: str
) -> None:
    tokens = prompt(1112 + MODES.index(mode), 100)
    stored_by_another(start, tokens)
    decoded = Decoded(fetcher)
    second = start("BHLNC", fetcher=fetcher.endpoint, gpu_copies="on", load_mode=mode)
    assert loads_right(second, tokens)
    assert decoded.decoded_bytes == {ZSTD: 6 * BLOCK_BYTES}
    assert copied.loads == [_BufferedLoad]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("url", "encodings"),
    [("", ""), (NO_FETCHER, ""), (NO_FETCHER, ZSTD)],
    ids=["none", "away", "away and encodings"],
)
def test_without_a_fetcher_the_same_bytes_come_plain(
    start: StartEngine, mode: str, url: str, encodings: str
) -> None:
    """What a fetcher should have brought, too, until it is left alone."""
    tokens = prompt(1120 + 3 * MODES.index(mode) + bool(url) + bool(encodings), 100)
    stored_by_another(start, tokens)
    second = start("BHLNC", fetcher=url, encodings=encodings, load_mode=mode)
    begun = deliveries_of(second)
    assert loads_right(second, tokens)
    (delivery,) = begun
    assert not delivery.is_encoded
    assert delivery.wire_bytes == delivery.delivered_bytes == 6 * BLOCK_BYTES
    assert delivery.route == "direct"


@pytest.mark.parametrize("mode", MODES)
def test_with_encodings_and_without_a_fetcher_the_engines_process_decodes(
    start: StartEngine, mode: str
) -> None:
    tokens = prompt(1140 + MODES.index(mode), 100)
    stored_by_another(start, tokens)
    second = start("BHLNC", encodings=ZSTD, load_mode=mode)
    begun = deliveries_of(second)
    assert loads_right(second, tokens)
    (delivery,) = begun
    assert delivery.route == "direct"
    assert delivery.is_encoded
    assert delivery.wire_bytes is not None
    assert delivery.wire_bytes < delivery.delivered_bytes == 6 * BLOCK_BYTES


def test_with_encodings_the_fetcher_still_decodes(
    start: StartEngine, fetcher: RunningFetcher
) -> None:
    tokens = prompt(1150, 100)
    stored_by_another(start, tokens)
    decoded = Decoded(fetcher)
    second = start(fetcher=fetcher.endpoint, encodings=[ZSTD])
    begun = deliveries_of(second)
    assert loads_right(second, tokens)
    assert decoded.decoded_bytes == {ZSTD: 6 * BLOCK_BYTES}
    assert not begun[0].is_encoded


def test_left_to_the_client_the_first_load_comes_plain(start: StartEngine) -> None:
    tokens = prompt(1151, 100)
    stored_by_another(start, tokens)
    second = start(encodings="auto")
    begun = deliveries_of(second)
    assert loads_right(second, tokens)
    assert [one.is_encoded for one in begun] == [False]


def test_encodings_are_refused_beside_a_copier(start: StartEngine, copied: Copied) -> None:
    with pytest.raises(InvalidRequest, match="'encodings' must be empty where 'gpu_copies' is"):
        start(encodings=ZSTD, gpu_copies="on")


def test_a_fetcher_that_is_killed_in_the_middle_of_a_load_costs_no_block(
    tmp_path: Path, start: StartEngine
) -> None:
    tokens, later = prompt(1130, 1000), prompt(1131, 100)
    with (
        encoded_server(tmp_path / "data", BUCKET, f"scheduler.cap_gbps={SLOW_GBPS}") as own,
        RunningFetcher(own, tmp_path / "fetcher.log") as fetcher,
    ):
        stored_by_another(start, tokens, on=own)
        stored_by_another(start, later, on=own)
        second = start(on=own, fetcher=fetcher.endpoint, load_timeout_s=TIMEOUT_S)
        begun = deliveries_of(second)
        decoded: list[dict[str, float]] = []

        def kill_before_the_second_layer(layer: int) -> None:
            if layer == 1 and begun and not decoded:
                assert begun[0].route == "relay:fetcher", begun[0].route_reason
                decoded.append(fetcher.decoded_bytes)
                fetcher.process.kill()

        second.before_layer = kill_before_the_second_layer
        assert loads_right(second, tokens)
        (before,) = decoded
        assert 0 < before[ZSTD] < 62 * BLOCK_BYTES
        assert set(before) == {ZSTD}
        assert begun[0].route == "direct"
        third = start(on=own, fetcher=fetcher.endpoint, load_timeout_s=TIMEOUT_S)
        assert loads_right(third, later)


def test_the_tier_gets_what_is_stored_encoded_plain(start_tier: StartTier, tmp_path: Path) -> None:
    keys = keys_of("encoded", 3)
    with (
        encoded_server(tmp_path / "data", "vllm-tier") as own,
        RunningFetcher(own, tmp_path / "fetcher.log") as fetcher,
    ):
        memory, other = primary(), primary(fill=0)
        memory[...] = bfloat16s(*memory.shape)
        assert transfer(start_tier(memory, on=own), keys, [7, 1, 2], load=False).success
        second = start_tier(other, on=own, fetcher=fetcher.endpoint)
        assert transfer(second, keys, [4, 5, 9], load=True).success
        np.testing.assert_array_equal(other[[4, 5, 9]], memory[[7, 1, 2]])
        assert fetcher.decoded_bytes == {"plain": 3 * CHUNK_BYTES}
        second.shutdown()
