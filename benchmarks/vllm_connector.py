"""What our connector costs vLLM's scheduler, and at what rate it converts vLLM's blocks.

    .venv-engines/bin/python -m benchmarks.vllm_connector

Both are measured beside what they are to be compared with, in the same run: one lookup's round trip
from the same process, and a plain copy of the same bytes.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.basis.missing_packages import or_say_what_to_install
from objectcache.connectors.identity.namespace import KvNamespace
from objectcache.connectors.vllm.scheduler.lookups import Lookups
from objectcache.connectors.vllm.worker.paged_layout import ContentShape, PagedLayer
from tests.servers import RunningServer, start_server

with or_say_what_to_install(
    "make .venv-engines/.installed, and run this with .venv-engines/bin/python"
):
    import torch

    from tests.engines.vllm_engine import (
        ORDERS,
        Engine,
        EngineConfigs,
        model_directory,
        paged_tensors,
    )

REQUESTS = 60
TOKENS = 4096
BLOCKS = 1024
EMPTY_STEP_S = 0.001
WARM_UP = 5
CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
)


class Spent:
    """CPU seconds of the scheduler's thread within the connector's calls, since the last reset."""

    def __init__(self, connector: Any) -> None:
        self.seconds = 0.0
        for name in CALLS:
            setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*arguments: Any) -> Any:
            begun_s = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self.seconds += time.thread_time() - begun_s

        return timed


def report(name: str, seconds: list[float]) -> None:
    """One line: median and 99th percentile in milliseconds."""
    p99 = statistics.quantiles(seconds, n=100)[98]
    print(f"{name:58} p50 {1e3 * statistics.median(seconds):7.3f} ms  p99 {1e3 * p99:7.3f} ms")


def scheduled_after_s(engine: Engine, name: str, tokens: list[int]) -> float:
    """Seconds from a request's arrival until the scheduler has scheduled it.

    Between steps that schedule nothing vLLM's loop sleeps for a millisecond, and so does this.
    """
    request = engine.request(name, tokens)
    begun_s = time.perf_counter()
    engine.scheduler.add_request(request)
    while not (output := engine.scheduler.schedule()).total_num_scheduled_tokens:
        time.sleep(EMPTY_STEP_S)
    waited_s = time.perf_counter() - begun_s
    engine.carry_out(output)
    engine.run()
    return waited_s


def measure_scheduler(server: RunningServer, directory: Path) -> None:
    """Requests for whose prompts nothing is stored, and for which everything is."""
    configs = EngineConfigs(model_directory(directory), 2 * TOKENS, 2 * TOKENS)
    extra = {
        "endpoint": server.endpoint,
        "bucket": "vllm-benchmark",
        "credentials_file": str(server.credentials_file),
        "lookup_timeout_s": 5.0,
        "load_mode": "layerwise",
    }
    random = np.random.default_rng(1)
    prompts = [random.integers(10, 900, TOKENS).tolist() for _ in range(REQUESTS)]
    for what, role, weights in (
        ("no answer awaited", "kv_producer", "r0"),
        ("not stored", "kv_both", "r1"),
        ("stored", "kv_both", "r1"),
    ):
        config = configs.vllm_config(extra | {"weights_revision": weights}, kv_role=role)
        measure_engine(Engine(config, paged_tensors(blocks=BLOCKS), computes=False), what, prompts)


def measure_engine(engine: Engine, what: str, prompts: list[list[int]]) -> None:
    """Requests one after the other, and a bare lookup of as many keys after each."""
    connector = engine.scheduler.connector
    spent = Spent(connector)
    inside_s, waited_s, round_trip_s = [], [], []
    keys = connector._scheduler._geometry.namespace.keys([bytes(32)] * (TOKENS // 16))
    for number, tokens in enumerate(prompts):
        spent.seconds = 0.0
        waited_s.append(scheduled_after_s(engine, str(number), tokens))
        inside_s.append(spent.seconds)
        engine.saved()
        begun_s = time.perf_counter()
        connector._store.bucket().match(keys)
        round_trip_s.append(time.perf_counter() - begun_s)
    report(f"{what}: CPU time of the connector's calls", inside_s[WARM_UP:])
    report(f"{what}: from arrival to scheduled", waited_s[WARM_UP:])
    report(f"{what}: a bare lookup's round trip", round_trip_s[WARM_UP:])
    print(f"{what}: {sum(engine.loaded_tokens.values())} of {TOKENS * len(prompts)} tokens loaded")
    engine.close()


def measure_ranks() -> None:
    """CPU time of the scheduler's thread for the lookup of a prompt of 128K tokens at 8 ranks."""
    names = [KvNamespace("m", "r", "bf16", "l", "sha256_cbor", rank, 8) for rank in range(8)]
    hashes = [number.to_bytes(32) for number in range(131_072 // 16)]
    seconds = []
    for _ in range(20):
        lookups = Lookups(len, 60.0)
        begun_s = time.thread_time()
        lookup = lookups.begin(names, hashes)
        seconds.append(time.thread_time() - begun_s)
        while lookup.result(time.monotonic()) is None:
            time.sleep(EMPTY_STEP_S)
        lookups.close()
    report("8192 blocks of 8 ranks: CPU time to begin a lookup", seconds[WARM_UP:])


def rate(copy: Callable[[], object], size_bytes: int) -> float:
    """GB/s of the best of some runs."""
    best_s = min(_seconds(copy) for _ in range(7))
    return size_bytes / best_s / 1e9


def _seconds(copy: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    copy()
    return time.perf_counter() - begun_s


def measure_copies() -> None:
    """One layer of Llama 3.1 8B: 8 heads of 128, blocks of 16 tokens, 256 blocks, one thread."""
    torch.set_num_threads(1)
    blocks, heads, tokens, width, chosen = 1024, 8, 16, 128, 256
    scattered = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))[:chosen]
    tables = {"one run": list(range(9, 9 + chosen)), "scattered": scattered.tolist()}
    slices = np.random.default_rng(1).integers(0, 256, (chosen, 65536), np.uint8)
    plain = torch.from_numpy(slices)
    other = torch.empty_like(plain)
    plain_rate = rate(lambda: other.copy_(plain), slices.nbytes)
    print(f"plain torch copy {plain_rate:6.2f} GB/s")
    for order in ("LBNHC", "LBHNC"):
        axes = ORDERS[order]
        shape = (1, blocks, heads, tokens, 2 * width)
        pool = torch.zeros([shape[axis] for axis in axes], dtype=torch.bfloat16)
        cache = pool.permute([axes.index(axis) for axis in range(5)])[0]
        layer = PagedLayer(cache, blocks, ContentShape(width, width))
        for name, table in tables.items():
            load = rate(functools.partial(layer.load, table, slices), slices.nbytes)
            store = rate(functools.partial(layer.store, table, slices), slices.nbytes)
            print(
                f"{order} {name:10} load {load:6.2f} GB/s ({load / plain_rate:.2f} of plain)  "
                f"store {store:6.2f} GB/s ({store / plain_rate:.2f})"
            )


def main() -> None:
    """Print both."""
    argparse.ArgumentParser("python -m benchmarks.vllm_connector", description=__doc__).parse_args()
    measure_copies()
    measure_ranks()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with start_server(directory / "data") as server:
            measure_scheduler(server, directory)


if __name__ == "__main__":
    main()
