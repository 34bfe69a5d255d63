"""A vLLM engine in a process of its own: the real scheduler and connector, and a model that sleeps
for as long as a layer of the request computes. So the processor is free for the server, as a GPU's
host is.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared_link.requests import LinkRequest

BUCKET = "shared-link"
START_S, RUN_S = 500.0, 300.0  # how long an engine may take to start, and to answer
EMPTY_STEP_S = 0.001  # that vLLM's loop sleeps where nothing is scheduled


@dataclass(frozen=True, slots=True)
class Place:
    """Where the server is, and where engines keep their configuration."""

    endpoint: str
    credentials_file: Path
    directory: Path
    layers: int


class EngineProcess:
    """One engine, from the parent's side."""

    def __init__(self, place: Place, request: LinkRequest, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.request = request
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, place, request, number), daemon=True
        )
        self._process.start()
        theirs.close()

    def wait_ready(self) -> None:
        """Return when its prefix is stored. Raises `RuntimeError` where it did not come up."""
        self._receive(START_S)

    def begin(self, at_s: float) -> None:
        """Have its request arrive at a moment of time.monotonic, which all processes share."""
        self._pipe.send(at_s)

    def ttft_s(self) -> float:
        """From the arrival of the request until its first token."""
        return float(self._receive(RUN_S))

    def _receive(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise RuntimeError(f"the engine of {self.request.name} does not answer")
        try:
            return self._pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"the engine of {self.request.name} has ended") from error

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()


@contextlib.contextmanager
def engines(place: Place, requests: tuple[LinkRequest, ...]) -> Generator[list[EngineProcess]]:
    """An engine for each request, whose prefixes are stored."""
    started: list[EngineProcess] = []
    try:
        started += [EngineProcess(place, request, n) for n, request in enumerate(requests)]
        for engine in started:
            engine.wait_ready()
        yield started
    finally:
        for engine in started:
            engine.close()


def serve(pipe: Connection, place: Place, request: LinkRequest, number: int) -> None:
    """The process: store the prefix, then answer whenever it is told to, until it is told None."""
    directory = place.directory / f"engine-{number}"
    directory.mkdir()
    random = np.random.default_rng(number)
    prefix = random.integers(10, 900, request.cached_tokens).tolist()
    # vLLM's own lines are of no use here.
    with (place.directory / f"engine-{number}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        made = _Engines(place, directory, request)
        made.store(prefix)
        engine = made.reader()
        pipe.send("ready")
        count = 0
        while (at_s := pipe.recv()) is not None:
            count += 1
            engine.scheduler.reset_prefix_cache()
            rest = random.integers(10, 900, request.computed_tokens).tolist()
            time.sleep(max(0.0, at_s - time.monotonic()))
            pipe.send(_answer_s(engine, str(count), prefix + rest))
        engine.close()


class _Engines:
    """The engines of one process, which share what vLLM takes seconds to read."""

    def __init__(self, place: Place, directory: Path, request: LinkRequest) -> None:
        from tests.engines import vllm_engine

        self._vllm = vllm_engine
        self._place = place
        self._request = request
        self._blocks = request.tokens // vllm_engine.BLOCK_TOKENS + 64
        model = vllm_engine.model_directory(directory, place.layers)
        self._configs = vllm_engine.EngineConfigs(model, request.tokens + 64, 8192)

    def _engine(self, role: str) -> Any:
        extra = {
            "endpoint": self._place.endpoint,
            "bucket": BUCKET,
            "credentials_file": str(self._place.credentials_file),
            "weights_revision": "r1",
            "lookup_timeout_s": 20.0,
            "load_timeout_s": 60.0,
            "load_mode": "layerwise",  # no load fails here, and this scheduler undoes it rightly
        }
        return self._vllm.Engine(
            self._configs.vllm_config(extra, kv_role=role),
            self._vllm.paged_tensors(blocks=self._blocks, layers=self._place.layers),
            computes=False,
        )

    def store(self, prefix: list[int]) -> None:
        """Compute a prompt in no time, and store it."""
        writer = self._engine("kv_producer")
        writer.answer("stored", prefix)
        writer.saved()
        writer.close()

    def reader(self) -> Any:
        """An engine that stores nothing, and computes what the request is about in its time."""
        engine = self._engine("kv_consumer")
        engine.layer_s = self._layer_s
        return engine

    def _layer_s(self, output: Any) -> float:
        return self._request.window_s if output.total_num_scheduled_tokens else 0.0


def _answer_s(engine: Any, name: str, tokens: list[int]) -> float:
    """Run one request as vLLM's loop does; how long its first token took."""
    request = engine.request(name, tokens)
    begun_s = time.monotonic()
    engine.scheduler.add_request(request)
    while engine.scheduler.has_requests():
        output = engine.scheduler.schedule()
        engine.carry_out(output)
        if not output.total_num_scheduled_tokens:
            time.sleep(EMPTY_STEP_S)
    ttft_s = time.monotonic() - begun_s
    assert engine.loaded_tokens[name] > 0, "nothing was loaded"
    assert not engine.failed_blocks, "a load failed"
    engine.step()  # the worker hears of the end
    return ttft_s
