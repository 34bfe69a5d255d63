"""`python -m benchmarks.gpu_ttft`: time to the first token on a GPU, fetched against computed.

A Llama of the shape of Llama-3.1-8B with half of its layers and random weights, a server on this
machine with everything in its page cache, one prompt. By turns: the prompt computed, its prefix
fetched with each layer copied while the model waits, and copied beside the model; and the prefix
reused from the GPU's own memory, which is the bound. Logits of a fetched prefix must be those of
local reuse. Runs unattended on a machine with torch, transformers and CUDA. `--model FOLDER` takes
a real model. `--emulated` runs it on the CPU with a small one, to see that it works: its figures
mean nothing.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.basis.missing_packages import or_say_what_to_install
from objectcache.client import Client
from objectcache.connectors.layer_timings import LayerTimings
from objectcache.gpu.copier import Copier
from objectcache.gpu.cuda_device import CudaDevice
from objectcache.gpu.device import Device, Way
from objectcache.gpu.line import LineSettings
from objectcache_schemas.limits import MIB
from tests.emulated_device import EmulatedDevice
from tests.servers import start_server

with or_say_what_to_install("python -m pip install torch transformers, on a machine with CUDA"):
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import (  # pyright: ignore[reportMissingImports]
        AutoModelForCausalLM,
        DynamicCache,
        LlamaConfig,
        LlamaForCausalLM,
    )

    from objectcache.connectors.transformers_cache import LayerwiseCache, chunks_of, layout_of

CHUNK_TOKENS = 64
SUFFIX_TOKENS = 64
ROUNDS = 5


def model_of(layers: int, device: str) -> Any:
    """Random weights, made on the device; on the CPU few of them."""
    is_small = device == "cpu"
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=256 if is_small else 4096,
        intermediate_size=512 if is_small else 14_336,
        num_hidden_layers=layers,
        num_attention_heads=4 if is_small else 32,
        num_key_value_heads=2 if is_small else 8,
        max_position_embeddings=131_072,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        return LlamaForCausalLM(config).eval()


def settle(device: str) -> None:
    """Wait for what was asked of the device."""
    if device == "cuda":
        torch.cuda.synchronize()


class Question:
    """One prompt, whose prefix is stored and is also kept on the GPU."""

    def __init__(self, model: Any, client: Client, copier: Copier, prefix_tokens: int) -> None:
        self.model = model
        self._copier = copier
        config = model.config
        self._device = model.device.type
        self._layout = layout_of(
            config, torch.bfloat16, chunk_tokens=CHUNK_TOKENS, weights_revision="measured"
        )
        self._bucket = client.kv_bucket(f"ttft-{prefix_tokens}", self._layout, create=True)
        count = prefix_tokens + SUFFIX_TOKENS
        self.prompt = torch.randint(0, config.vocab_size, (1, count), device=self._device)
        self._prefix_tokens = prefix_tokens
        self._keys = self._bucket.chunk_keys(self.prompt[0, :prefix_tokens].cpu().numpy())
        self._local = DynamicCache(config=config)
        self._logits(self.prompt[:, :prefix_tokens], self._local)
        chunks = chunks_of(self._local, len(self._keys), self._layout)
        self._bucket.put(self._keys, chunks)
        self.payload_bytes = chunks.nbytes
        self._target = client.shared_memory_target(chunks.nbytes)
        copier.lock_pages(self._target)
        self._timings = LayerTimings(model)

    def computed(self) -> tuple[float, Any]:
        """Seconds to the first token, and the logits."""
        return self._timed(lambda: (self.prompt, DynamicCache(config=self.model.config)))

    def local(self) -> tuple[float, Any]:
        """From a copy of the KV on the GPU, which is not timed."""
        cache = copy.deepcopy(self._local)
        return self._timed(lambda: (self.prompt[:, self._prefix_tokens :], cache))

    def fetched(self, beside: bool) -> tuple[float, Any]:
        """From the server; its layers are copied beside the model, or while it waits."""
        settle(self._device)
        begin_s = time.perf_counter()
        target = self._target if beside else None
        with self._timings.fetch(
            self._bucket, self._keys, self.prompt.shape[1], target=target
        ) as delivery:
            cache = LayerwiseCache(
                self.model.config,
                delivery,
                self._layout,
                self._timings,
                self._copier if beside else None,
            )
            logits = self._logits(self.prompt[:, self._prefix_tokens :], cache)
            logits.argmax(-1).cpu()
            took_s = time.perf_counter() - begin_s
            self.last_layer_s = delivery.arrivals_s[-1]
            self.transport = delivery.transport
        return took_s, logits

    def _timed(self, inputs: Callable[[], tuple[Any, Any]]) -> tuple[float, Any]:
        settle(self._device)
        begin_s = time.perf_counter()
        logits = self._logits(*inputs())
        logits.argmax(-1).cpu()
        return time.perf_counter() - begin_s, logits

    def _logits(self, tokens: Any, cache: Any) -> Any:
        with torch.no_grad():
            return self.model(tokens, past_key_values=cache, logits_to_keep=1).logits


def ask(question: Question) -> None:
    """All kinds by turns, after a round that does not count."""
    kinds: dict[str, Callable[[], tuple[float, Any]]] = {
        "computed": question.computed,
        "reused from the GPU's memory": question.local,
        "fetched, copied while the model waits": lambda: question.fetched(False),
        "fetched, copied beside the model": lambda: question.fetched(True),
    }
    samples: dict[str, list[float]] = {name: [] for name in kinds}
    last_s: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(ROUNDS + 1):
        logits: dict[str, Any] = {}
        for name, kind in kinds.items():
            took_s, logits[name] = kind()
            if number:
                samples[name].append(took_s)
                if name.startswith("fetched"):
                    last_s[name].append(question.last_layer_s or 0.0)
        names = list(kinds)
        for name in names[2:]:
            assert torch.equal(logits[name], logits[names[1]]), f"{name}: other logits"
    tokens, gigabytes = question.prompt.shape[1], question.payload_bytes / 1e9
    print(f"{tokens} tokens, {gigabytes:.2f} GB, {question.transport}; logits identical")
    for name, taken in samples.items():
        ratio = statistics.median(samples["computed"]) / statistics.median(taken)
        arrived = ""
        if last_s[name]:
            arrived = f", last layer after {statistics.median(last_s[name]) * 1e3:.1f} ms"
        middle, worst = statistics.median(taken) * 1e3, max(taken) * 1e3
        print(f"  {name:40} {middle:8.1f} ms (worst {worst:.1f}), {ratio:5.2f}x{arrived}")


def lengths_of(positions: int) -> list[int]:
    """Prefixes in whole chunks for a model of so many positions: the longest up to 32,768 tokens,
    and a quarter of it.
    """
    longest = min(32_768, positions - SUFFIX_TOKENS) // CHUNK_TOKENS * CHUNK_TOKENS
    return [longest // 4 // CHUNK_TOKENS * CHUNK_TOKENS, longest]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0 whatever the figures are."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_ttft", description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--model", type=Path, help="a folder that Transformers loads a model from")
    parser.add_argument("--emulated", action="store_true", help="on the CPU, to try it out")
    parser.add_argument("--prefix-tokens", type=int, action="append")
    parser.add_argument(
        "--way", choices=[way.value for way in Way], help="else a copier's defaults on this device"
    )
    parser.add_argument("--data-dir", type=Path, default=None)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    on = "cpu" if options.emulated else "cuda"
    name = "CPU" if options.emulated else torch.cuda.get_device_name()
    print(name, "torch", torch.__version__)
    if options.model is None:
        model = model_of(2 if options.emulated else options.layers, on)
        lengths = [256] if options.emulated else [8192, 32_768]
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
        model = model.to(on).eval()
        lengths = lengths_of(model.config.max_position_embeddings)
    device: Device = EmulatedDevice() if options.emulated else CudaDevice()
    settings = LineSettings.best_of(device)
    if options.way is not None:
        settings = LineSettings(Way(options.way), 4 * MIB)
    with (
        tempfile.TemporaryDirectory(prefix="objectcache-ttft-", dir=options.data_dir) as folder,
        start_server(Path(folder) / "data") as server,
        Client(
            server.endpoint,
            access_key=server.credentials.access_key,
            secret_key=server.credentials.secret_key,
        ) as client,
        Copier(device, loads=settings) as copier,
    ):
        for prefix_tokens in options.prefix_tokens or lengths:
            ask(Question(model, client, copier, prefix_tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
