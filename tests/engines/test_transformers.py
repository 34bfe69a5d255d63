"""Layerwise reuse by a Llama with random weights: its logits are those of local reuse."""

from __future__ import annotations

import copy
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LlavaConfig

from examples import transformers_prefix_reuse
from objectcache.client import Client
from objectcache.connectors.transformers.layer_timings import LayerTimings
from objectcache.connectors.transformers.layerwise_cache import (
    LayerwiseCache,
    _DeviceLoads,
    chunks_of,
    layout_of,
)
from objectcache.errors import DeliveryFailed, InvalidRequest, Unavailable, Unsupported
from objectcache.gpu.copier import Copier
from objectcache.gpu.cuda_device import CudaDevice
from objectcache.gpu.device import Device, Way
from objectcache.gpu.line import LineSettings
from objectcache.gpu.pieces import Pieces
from objectcache.kv_bucket import KvBucket
from tests.emulated_device import EmulatedDevice
from tests.engines.delivery_traces import NewTraces
from tests.engines.virtual_clock import VirtualClock
from tests.integration.served import wait_until
from tests.servers import RunningServer, start_server

CHUNK_TOKENS = 16
PREFIX_TOKENS = 384
LAYERS = 6
HAS_GPU = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_GPU, reason="no GPU"))]


def client_of(server: RunningServer, **changes: Any) -> Client:
    key = server.credentials
    return Client(server.endpoint, access_key=key.access_key, secret_key=key.secret_key, **changes)


def model_of(dtype: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def prompt_of(tokens: int) -> Any:
    return torch.randint(0, 500, (1, tokens), generator=torch.Generator().manual_seed(1))


class Stored:
    """A prompt's prefix, computed once and stored."""

    def __init__(self, client: Client, dtype: Any, name: str, device: str = "cpu") -> None:
        self.model = model_of(dtype).to(device)
        self.prompt = prompt_of(PREFIX_TOKENS + 77).to(device)
        layout = layout_of(
            self.model.config, dtype, chunk_tokens=CHUNK_TOKENS, weights_revision="seed 0"
        )
        self.bucket: KvBucket = client.kv_bucket(name, layout, create=True)
        self.prefix, self.suffix = self.prompt[:, :PREFIX_TOKENS], self.prompt[:, PREFIX_TOKENS:]
        self.keys = self.bucket.chunk_keys(self.prefix[0].cpu().numpy())
        self.local = DynamicCache(config=self.model.config)
        self.run(self.prefix, self.local)
        chunks = chunks_of(self.local, len(self.keys), layout)
        self.bucket.put(self.keys, chunks)

    def run(self, tokens: Any, cache: Any) -> Any:
        with torch.no_grad():
            return self.model(tokens, past_key_values=cache).logits

    def reused(self, **fetch: Any) -> tuple[Any, Any]:
        with self.bucket.fetch(self.keys, **fetch) as delivery:
            cache = LayerwiseCache(self.model.config, delivery, self.bucket.layout)
            assert cache.get_seq_length() == PREFIX_TOKENS
            return self.run(self.suffix, cache), cache


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("delivery", ["layerwise", "chunkwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_logits_are_bit_identical_to_local_reuse(
    server: RunningServer, dtype: Any, delivery: str, device: str
) -> None:
    with client_of(server) as client:
        stored = Stored(client, dtype, f"t-{str(dtype)[6:]}-{delivery}-{device}", device)
        logits, cache = stored.reused(delivery=delivery)
        assert torch.equal(logits, stored.run(stored.suffix, copy.deepcopy(stored.local)))
        # What follows the prefill goes on as with any cache.
        following = logits[:, -1:].argmax(-1)
        local = copy.deepcopy(stored.local)
        stored.run(stored.suffix, local)
        assert torch.equal(stored.run(following, cache), stored.run(following, local))
        assert cache.get_seq_length() == PREFIX_TOKENS + 78


def device_of(kind: str) -> Device:
    return CudaDevice() if kind == "cuda" else EmulatedDevice()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("links", ["direct", "host"])
def test_chunks_are_saved_beside_the_model_into_a_target_and_put_from_there(
    server: RunningServer, links: Literal["direct", "host"], device: str
) -> None:
    settings = LineSettings(Way.EACH, 4 << 10, pieces_max=3)
    with (
        client_of(server) as client,
        Copier(device_of(device), saves=settings, links=links) as copier,
    ):
        stored = Stored(client, torch.bfloat16, f"t-saved-{links}-{device}", device)
        layout, count = stored.bucket.layout, len(stored.keys)
        target = client.shared_memory_target(count * layout.chunk_bytes)
        copier.lock_pages(target)
        into = target.chunks(count, layout)
        into[:] = 0
        chunks = chunks_of(stored.local, count, layout, into=into, copier=copier)
        assert chunks is into
        assert np.array_equal(chunks, chunks_of(stored.local, count, layout))
        assert stored.bucket.put(stored.keys, chunks).existing == count
        with pytest.raises(InvalidRequest, match="page-locked"):
            chunks_of(stored.local, count, layout, copier=copier)
        with pytest.raises(InvalidRequest, match="the memory"):
            chunks_of(stored.local, count - 1, layout, into=into, copier=copier)


def test_a_save_that_fails_ends_when_nothing_is_on_its_way(server: RunningServer) -> None:
    device = EmulatedDevice()
    with client_of(server) as client, Copier(device) as copier:
        stored = Stored(client, torch.bfloat16, "t-save-fails")
        layout, count = stored.bucket.layout, len(stored.keys)
        target = client.shared_memory_target(count * layout.chunk_bytes)
        copier.lock_pages(target)
        device.breaks.set()
        with pytest.raises(Unavailable):
            chunks_of(stored.local, count, layout, into=target.chunks(count, layout), copier=copier)


@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
@pytest.mark.parametrize("way", list(Way), ids=[way.value for way in Way])
def test_logits_are_bit_identical_where_layers_are_copied_beside_the_model(
    server: RunningServer, way: Way
) -> None:
    with (
        client_of(server) as client,
        Copier(CudaDevice(), loads=LineSettings(way, 64 << 10)) as copier,
    ):
        stored = Stored(client, torch.bfloat16, f"t-beside-{way.value}", "cuda")
        local = copy.deepcopy(stored.local)
        expected = stored.run(stored.suffix, local)
        layout = stored.bucket.layout
        target = client.shared_memory_target(len(stored.keys) * layout.chunk_bytes)
        copier.lock_pages(target)
        for _ in range(3):
            target.array[:] = 0
            with stored.bucket.fetch(stored.keys, delivery="layerwise", target=target) as delivery:
                cache = LayerwiseCache(stored.model.config, delivery, layout, copier=copier)
                logits = stored.run(stored.suffix, cache)
            target.array[:] = 255  # whoever has it next
            assert torch.equal(logits, expected)
            assert torch.equal(cache.layers[-1].keys, local.layers[-1].keys)


@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
def test_a_delivery_that_fails_while_it_is_copied_raises_out_of_the_model(
    own_server: RunningServer,
) -> None:
    with client_of(own_server, timeout_s=10.0) as client, Copier(CudaDevice()) as copier:
        stored = Stored(client, torch.bfloat16, "t-beside-dies", "cuda")
        layout = stored.bucket.layout
        payload_bytes = len(stored.keys) * layout.chunk_bytes
        target = client.shared_memory_target(payload_bytes)
        copier.lock_pages(target)

        def kill(*_: Any) -> None:
            own_server.kill_storage()

        hook = stored.model.model.layers[0].register_forward_hook(kill)
        rate = payload_bytes // 4
        with stored.bucket.fetch(
            stored.keys, delivery="layerwise", target=target, rate_bytes_per_s=rate
        ) as delivery:
            cache = LayerwiseCache(stored.model.config, delivery, layout, copier=copier)
            with pytest.raises(DeliveryFailed):
                stored.run(stored.suffix, cache)
        hook.remove()


def test_a_cache_that_is_dropped_halfway_lets_its_layers_go_when_nothing_writes_to_them(
    server: RunningServer,
) -> None:
    """As a model that raises does. On an emulated device."""
    with (
        client_of(server) as client,
        Copier(EmulatedDevice(), loads=LineSettings(Way.EACH)) as copier,
    ):
        stored = Stored(client, torch.bfloat16, "t-dropped")
        with stored.bucket.fetch(stored.keys) as delivery:
            loads = _DeviceLoads(delivery, copier)
            load = copier.load(delivery, lambda layer, slices: Pieces.of([]))
            payloads = {0: torch.zeros(1)}
            loads._load, loads._payloads = load, payloads
            load.finish()
            del loads
            wait_until(lambda: not payloads, "the layers to go")
            with pytest.raises(InvalidRequest, match="closed"):
                load.hold(0, 0)


def test_reuse_agrees_with_computing_everything(server: RunningServer) -> None:
    with client_of(server) as client:
        stored = Stored(client, torch.float32, "t-full")
        logits, _ = stored.reused()
        full = stored.run(stored.prompt, DynamicCache(config=stored.model.config))
        assert torch.allclose(logits, full[:, PREFIX_TOKENS:], atol=1e-4)
        assert torch.equal(logits.argmax(-1), full[:, PREFIX_TOKENS:].argmax(-1))


@pytest.mark.parametrize("transport", ["shared_memory", "body"])
def test_the_first_layer_is_computed_while_the_last_is_on_its_way(
    server: RunningServer, transport: str
) -> None:
    with client_of(server) as client:
        stored = Stored(client, torch.bfloat16, f"t-slow-{transport.replace('_', '-')}")
        payload_bytes = len(stored.keys) * stored.bucket.layout.chunk_bytes
        left_layer_s: list[float] = []
        hooks = [
            layer.register_forward_hook(lambda *_: left_layer_s.append(time.monotonic()))
            for layer in stored.model.model.layers
        ]
        started_s = time.monotonic()
        with stored.bucket.fetch(
            stored.keys,
            delivery="layerwise",
            rate_bytes_per_s=payload_bytes // 5,
            transport=transport,
        ) as delivery:
            cache = LayerwiseCache(stored.model.config, delivery, stored.bucket.layout)
            logits = stored.run(stored.suffix, cache)
            last_s = delivery.arrivals_s[-1]
        for hook in hooks:
            hook.remove()
        assert last_s is not None
        assert left_layer_s[0] - started_s < last_s
        assert torch.equal(logits, stored.run(stored.suffix, copy.deepcopy(stored.local)))


@pytest.mark.parametrize("transport", ["auto", "nixl"])
def test_a_prefix_comes_over_the_transport_that_is_chosen(
    server: RunningServer, transport: str
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl")
    with client_of(server, transport=transport) as client:
        stored = Stored(client, torch.bfloat16, f"t-over-{transport}")
        with stored.bucket.fetch(stored.keys) as delivery:
            assert delivery.transport == ("shared_memory" if transport == "auto" else transport)
            cache = LayerwiseCache(stored.model.config, delivery, stored.bucket.layout)
            logits = stored.run(stored.suffix, cache)
        assert torch.equal(logits, stored.run(stored.suffix, copy.deepcopy(stored.local)))


def test_a_fetch_has_the_window_of_its_prefill_and_reports_what_it_took(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefills of several lengths, the first ones without anything stored."""
    clock = VirtualClock(monkeypatch)
    with client_of(server) as client:
        stored = Stored(client, torch.float32, "t-timed")
        timings = LayerTimings(stored.model)
        traces = NewTraces(server, stored.bucket.name)
        took_s: list[float] = []
        tokens = prompt_of(300)
        shapes = ((0, 200), (0, 60), (12, 90), (24, 210), (16, 80), (24, 70))
        with slow_layers(stored.model, clock):
            for chunks, computed in shapes:
                prompt_tokens = chunks * CHUNK_TOKENS + computed
                with timings.fetch(stored.bucket, stored.keys[:chunks], prompt_tokens) as delivery:
                    layout = stored.bucket.layout
                    cache = LayerwiseCache(stored.model.config, delivery, layout, timings)
                    stored.run(tokens[:, :computed], cache)
                if chunks:
                    took_s.append(layer_s(computed))
        consumed = traces.all_consumed(len(took_s))
        for trace, measured_s in list(zip(consumed, took_s, strict=True))[1:]:
            assert trace.window_source == "descriptor"
            assert trace.compute_window_s == pytest.approx(measured_s, rel=0.05)
            assert trace.reported_window_s == pytest.approx(measured_s)
        with pytest.raises(InvalidRequest, match="leaves nothing to compute"):
            timings.fetch(stored.bucket, stored.keys[:2], 2 * CHUNK_TOKENS)


@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
def test_on_a_gpu_windows_are_what_events_around_its_layers_say(server: RunningServer) -> None:
    """Calls run ahead of the device, whose own times count: layers of a few milliseconds, which
    the same prefills from local KV are timed by beside it.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    layout = layout_of(config, torch.float32, chunk_tokens=CHUNK_TOKENS, weights_revision="seed 0")
    tokens = prompt_of(4096).cuda()
    local = DynamicCache(config=config)
    timings = LayerTimings(model)
    with client_of(server) as client, torch.no_grad():
        bucket = client.kv_bucket("t-gpu-timed", layout, create=True)
        keys = bucket.chunk_keys(tokens[0, :256].cpu().numpy())
        model(tokens[:, :256], past_key_values=local)
        bucket.put(keys, chunks_of(local, len(keys), layout))
        traces = NewTraces(server, bucket.name)
        shapes = ((0, 2000), (0, 2500), (0, 1500), (16, 2000), (8, 3000), (16, 1600), (16, 2600))
        took_s = []
        for chunks, computed in shapes:
            cached = chunks * CHUNK_TOKENS
            with timings.fetch(bucket, keys[:chunks], cached + computed) as delivery:
                cache = LayerwiseCache(config, delivery, layout, timings)
                model(tokens[:, cached : cached + computed], past_key_values=cache)
                torch.cuda.synchronize()
            if chunks:
                again = copy.deepcopy(local)
                if cached < 256:
                    again.crop(cached - 256)
                took_s.append(gpu_layer_s(model, tokens[:, cached : cached + computed], again))
        # What the device has computed is told when the engine comes by again.
        timings.prefill_begins(bucket.fetch([]), 1, 0)
        consumed = traces.all_consumed(len(took_s))
    for trace, measured_s in zip(consumed, took_s, strict=True):
        assert trace.window_source == "descriptor"
        assert trace.reported_window_s == pytest.approx(measured_s, rel=0.2)
    # What a layer takes grows with its tokens in steps; shapes like these were seen by then.
    for trace, measured_s in list(zip(consumed, took_s, strict=True))[1:]:
        assert trace.compute_window_s == pytest.approx(measured_s, rel=0.2)


def gpu_layer_s(model: Any, tokens: Any, cache: Any) -> float:
    """What a layer takes on the device, by events of the test's own around each layer."""
    events: list[Any] = []

    def note(*_: Any) -> None:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()

    hooks = [layer.register_forward_pre_hook(note) for layer in model.model.layers]
    hooks.append(model.model.layers[-1].register_forward_hook(note))
    model(tokens, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    events[-1].synchronize()
    pairs = itertools.pairwise(events)
    return statistics.median([float(begin.elapsed_time(end)) / 1e3 for begin, end in pairs])


def layer_s(tokens: int) -> float:
    """What a layer takes the model of `slow_layers`."""
    return 0.060 + 0.000_4 * tokens


@contextmanager
def slow_layers(model: Any, clock: VirtualClock) -> Iterator[None]:
    """Every layer takes a known time."""
    hooks = [
        layer.mlp.register_forward_pre_hook(
            lambda _, states: clock.sleep(layer_s(states[0].shape[1]))
        )
        for layer in model.model.layers
    ]
    yield
    for hook in hooks:
        hook.remove()


def test_a_cache_of_no_chunks_is_an_empty_cache(server: RunningServer) -> None:
    with client_of(server) as client:
        stored = Stored(client, torch.bfloat16, "t-empty")
        with stored.bucket.fetch([]) as delivery:
            cache = LayerwiseCache(stored.model.config, delivery, stored.bucket.layout)
            logits = stored.run(stored.prefix, cache)
        empty = DynamicCache(config=stored.model.config)
        assert torch.equal(logits, stored.run(stored.prefix, empty))
        assert torch.equal(cache.layers[-1].keys, stored.local.layers[-1].keys)


def test_what_does_not_fit_is_refused(server: RunningServer) -> None:
    with client_of(server) as client:
        stored = Stored(client, torch.bfloat16, "t-wrong")
        some = stored.bucket.fetch(stored.keys, layers=(0, 2))
        with some, pytest.raises(InvalidRequest, match="layers"):
            LayerwiseCache(stored.model.config, some, stored.bucket.layout)
        with stored.bucket.fetch(stored.keys) as delivery:
            cache = LayerwiseCache(stored.model.config, delivery, stored.bucket.layout)
            with pytest.raises(InvalidRequest, match="one sequence"):
                stored.run(stored.suffix.repeat(2, 1), cache)
        with pytest.raises(InvalidRequest, match="tokens"):
            chunks_of(stored.local, len(stored.keys) + 1, stored.bucket.layout)
    sliding = copy.deepcopy(stored.model.config)
    sliding.layer_types = ["sliding_attention"] * LAYERS
    with pytest.raises(Unsupported, match="sliding_attention"):
        layout_of(sliding, torch.bfloat16, chunk_tokens=16, weights_revision="r")


def test_a_model_that_sees_images_is_refused_because_no_key_holds_them() -> None:
    with pytest.raises(Unsupported, match="llava models are not supported"):
        layout_of(LlavaConfig(), torch.bfloat16, chunk_tokens=16, weights_revision="r")


def test_a_dtype_that_is_none_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidRequest, match=r"dtype must be a torch\.dtype, got 'bfloat16'"):
        layout_of(LlamaConfig(), "bfloat16", chunk_tokens=16, weights_revision="r")


def test_other_weights_and_other_dtypes_have_other_keys() -> None:
    config = model_of(torch.bfloat16).config
    layouts = [
        layout_of(config, dtype, chunk_tokens=16, weights_revision=revision)
        for dtype, revision in (
            (torch.bfloat16, "a"),
            (torch.bfloat16, "b"),
            (torch.float16, "a"),
        )
    ]
    keys = {layout.chunk_keys(list(range(16)))[0] for layout in layouts}
    assert len(keys) == 3


def fingerprint(config: Any, **more: Any) -> str:
    layout = layout_of(config, torch.bfloat16, chunk_tokens=16, **more)
    return layout.fingerprint


def test_models_without_a_name_differ_by_what_their_configuration_says_of_positions() -> None:
    config = model_of(torch.bfloat16).config
    scaled = copy.deepcopy(config)
    scaled.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    same = copy.deepcopy(config)
    prints = [fingerprint(each, weights_revision="a") for each in (config, scaled, same)]
    assert prints[0] == prints[2] != prints[1]


def test_a_models_directory_tells_its_weights_where_no_revision_is_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loaded() -> Any:
        return LlamaForCausalLM.from_pretrained(tmp_path).config

    model_of(torch.bfloat16).save_pretrained(tmp_path)
    first = fingerprint(loaded())
    assert fingerprint(loaded()) == first
    (weights,) = tmp_path.glob("*.safetensors")
    os.utime(weights, ns=(1, 1))  # as a fine-tuned model of the same sizes, written over it
    assert fingerprint(loaded()) != first
    assert "weights_revision" not in caplog.text
    fingerprint(model_of(torch.bfloat16).config)
    assert "weights_revision" in caplog.text


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RunningServer]:
    with start_server(tmp_path / "data") as running:
        yield running


def test_a_server_that_dies_between_two_layers_raises_out_of_the_model(
    own_server: RunningServer,
) -> None:
    with client_of(own_server, timeout_s=10.0) as client:
        stored = Stored(client, torch.bfloat16, "t-dies")
        payload_bytes = len(stored.keys) * stored.bucket.layout.chunk_bytes
        killed: list[int] = []

        def kill(*_: Any) -> None:
            killed.append(own_server.storage_pid)
            own_server.kill_storage()

        hook = stored.model.model.layers[0].register_forward_hook(kill)
        with pytest.raises(DeliveryFailed) as failure:
            stored.reused(delivery="layerwise", rate_bytes_per_s=payload_bytes // 8)
        hook.remove()
        assert killed
        assert failure.value.details.layer in range(1, LAYERS)


def test_the_example_reuses_the_document_for_its_second_question(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OBJECTCACHE_ENDPOINT", server.endpoint)
    monkeypatch.setenv("OBJECTCACHE_ACCESS_KEY", server.credentials.access_key)
    monkeypatch.setenv("OBJECTCACHE_SECRET_KEY", server.credentials.secret_key)
    transformers_prefix_reuse.main()
    first, second = capsys.readouterr().out.splitlines()
    assert "0 of 1064 tokens reused" in first
    assert "1024 of 1064 tokens reused" in second
