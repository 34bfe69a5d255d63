"""What LMCache does with a layer that does not come: why its layerwise mode is not served.

These tests are about LMCache alone. One that fails after LMCache was raised says that
docs/lmcache.md, "Layerwise", and the refusal of `use_layerwise` are to be looked at again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1 import cache_engine
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

LAYERS = 3
CHUNK_TOKENS = 4
CHUNKS = 2


class Layer:
    """A layer's part of a chunk in LMCache's memory, as far as its engine looks at it."""

    is_pinned = False

    def ref_count_down(self) -> None:
        """It is no more needed."""


class LayerwiseEngine:
    """The parts of LMCache's engine that `retrieve_layer` uses, with a store whose second layer
    is what `second_layer` makes of the future for it.
    """

    num_layers = LAYERS
    retrieve_locations = None

    def __init__(self, second_layer: Any) -> None:
        self._second_layer = second_layer
        self.copied: list[int] = []  # chunks of each layer that reached the GPU
        self.storage_manager = SimpleNamespace(
            contains=lambda key, locations: "ObjectCache",
            layerwise_batched_get=self._layers,
        )
        self.gpu_connector = SimpleNamespace(batched_to_gpu=self._to_gpu)
        self.token_database = SimpleNamespace(process_tokens=self._chunks)
        self.stats_monitor = SimpleNamespace(
            on_retrieve_request=lambda tokens: 0, on_retrieve_finished=lambda *given: None
        )

    def is_healthy(self) -> bool:
        return True

    def _is_passive(self) -> bool:
        return True

    def _get_req_id(self, given: Any) -> str:
        return "request"

    def _chunks(self, **given: Any) -> Iterator[tuple[int, int, CacheEngineKey]]:
        for number in range(CHUNKS):
            key = CacheEngineKey("model", 1, 0, number, torch.bfloat16)
            yield number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS, key

    def _layers(
        self, keys: list[list[Any]], location: str
    ) -> Generator[Future[list[Layer]], None, None]:
        for layer, of_chunks in enumerate(keys):
            coming: Future[list[Layer]] = Future()
            if layer == 1:
                self._second_layer(coming)
            else:
                coming.set_result([Layer() for _ in of_chunks])
            yield coming

    def _to_gpu(
        self, starts: list[int], ends: list[int], **given: Any
    ) -> Generator[None, list[Layer], None]:
        for _ in range(LAYERS):
            layer = yield
            self.copied.append(len(layer))
        yield
        yield

    def retrieved(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """The mask of tokens that LMCache says are there, after all layers."""
        monkeypatch.setattr(cache_engine, "assert_layerwise_gpu_connector", lambda connector: None)
        tokens = list(range(CHUNKS * CHUNK_TOKENS))
        steps = list(cache_engine.LMCacheEngine.retrieve_layer(self, tokens))
        return steps[-1]


def test_a_layer_that_a_remote_store_cannot_deliver_becomes_an_empty_list() -> None:
    async def fails(lookup_id: str, keys: list[Any]) -> list[Any]:
        raise ConnectionError("the store has gone")

    backend = SimpleNamespace(
        local_cpu_backend=object(),
        connection=SimpleNamespace(batched_get_non_blocking=fails),
        config=SimpleNamespace(blocking_timeout_secs=1),
    )
    assert asyncio.run(RemoteBackend.batched_get_non_blocking(backend, "id", ["key"])) == []


def test_tokens_of_a_layer_that_did_not_come_count_as_retrieved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = LayerwiseEngine(lambda coming: coming.set_result([]))
    assert engine.retrieved(monkeypatch).all()
    assert engine.copied == [CHUNKS, 0, CHUNKS]


def test_an_error_of_a_storage_plugin_leaves_through_the_models_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = LayerwiseEngine(lambda coming: coming.set_exception(ConnectionError("gone")))
    with pytest.raises(ConnectionError, match="gone"):
        engine.retrieved(monkeypatch)
