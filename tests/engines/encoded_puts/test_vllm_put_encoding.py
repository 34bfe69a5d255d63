"""vLLM's connector that sends chunks as frames: others load the same bytes, plain and encoded, and
fewer came over the wire.
"""

# ruff: noqa: F401, F811 (fixtures of another module)

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.encoded_delivery.prefixes import ZSTD
from tests.engines.fetched.encoded_bucket import encoded_server
from tests.engines.test_vllm_connector import (
    BLOCK_BYTES,
    BUCKET,
    StartEngine,
    configs,
    prompt,
    start,
    stored_by_another,
)
from tests.engines.vllm_engine import Engine
from tests.integration.test_metrics import gateway_page, samples_of
from tests.servers import RunningServer, start_server

BLOCKS = 6  # whole ones of a prompt of 100 tokens


@pytest.fixture(scope="module", params=[ZSTD, None], ids=["stored encoded", "stored plain"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("puts") / "data"
    if request.param is None:
        with start_server(folder) as running:
            yield running
    else:
        with encoded_server(folder, BUCKET) as running:
            yield running


def put_bytes(server: RunningServer) -> float:
    """Of bodies of puts that the gateway has taken so far."""
    name = "objectcache_request_received_bytes_total"
    samples = samples_of(gateway_page(server))
    return samples.get((name, frozenset({("operation", "KvPut")})), 0.0)


def load(engine: Engine, tokens: list[int]) -> None:
    """A prompt's whole blocks are loaded, and every byte is right."""
    request = engine.add("again", tokens)
    engine.run()
    assert engine.loaded_tokens == {"again": 96}
    assert engine.wrong_positions(request) == []
    assert engine.failed_blocks == set()


@pytest.mark.parametrize("order", ["LBNHC", "BHLNC"])
@pytest.mark.parametrize("transport", ["body", "shared_memory"])
def test_what_is_saved_as_frames_is_loaded_plain_and_encoded(
    server: RunningServer, start: StartEngine, transport: str, order: str
) -> None:
    tokens = prompt(2000 + 2 * (transport == "body") + (order == "LBNHC"), 100)
    before = put_bytes(server)
    stored_by_another(start, tokens, order=order, transport=transport, put_encoding=ZSTD)
    sent_bytes = put_bytes(server) - before
    if transport == "body":
        assert BLOCKS * BLOCK_BYTES / 2 < sent_bytes < BLOCKS * BLOCK_BYTES
    else:
        assert 0 < sent_bytes < BLOCK_BYTES  # the descriptor alone
    load(start("BLNHC", load_mode="before_schedule"), tokens)
    load(start("BLNHC", encodings=ZSTD), tokens)


def test_what_is_saved_plain_has_all_its_bytes_on_the_wire(
    server: RunningServer, start: StartEngine
) -> None:
    """What the other test's count is of."""
    before = put_bytes(server)
    stored_by_another(start, prompt(2010, 100), transport="body")
    assert put_bytes(server) - before > BLOCKS * BLOCK_BYTES
