"""What an engine's process computes, step after step, while prefixes come to it."""

from __future__ import annotations

import enum
import os
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.shadow.contents import LOSSLESS
from benchmarks.shadow.engine_process import EngineSide
from objectcache import Client

PYTHON_STEP_S, MATMUL_STEP_S = 0.25e-3, 2e-3
STREAM_BYTES = 16 << 20  # more than a cache holds
PAUSE_S = 0.02  # in which nothing is computed or fetched, before a window
BEGINS_S = 60.0


class Loop(enum.Enum):
    """The kinds of steps."""

    PYTHON = "Python, 0.25 ms"
    MATMUL = "matmul, 2 ms"
    STREAM = "memory stream, 16 MiB copied"


@dataclass(frozen=True, slots=True)
class Window:
    """Steps, in seconds each, what came meanwhile, and what the process's other threads took."""

    steps_s: tuple[float, ...]
    delivered_bytes_per_s: float
    delivered_layers: int = 0
    beside_cpu_s: float = 0.0
    beside_waits: int = 0  # for something: each wakes a thread again


def make_step(loop: Loop) -> Callable[[], object]:
    """A step of this kind, as long as it is to be when nothing else runs."""
    if loop is Loop.PYTHON:
        count = _scaled(_count_to, 5_000, PYTHON_STEP_S)
        return lambda: _count_to(count)
    if loop is Loop.STREAM:
        source, target = np.ones(STREAM_BYTES, np.uint8), np.ones(STREAM_BYTES, np.uint8)
        return lambda: np.copyto(target, source)
    rows = _scaled(lambda count: _matmul(count)(), 64, MATMUL_STEP_S)
    return _matmul(rows)


def _count_to(count: int) -> None:
    for _ in range(count):
        pass


def _matmul(rows: int) -> Callable[[], object]:
    left, right = (np.ones(shape, np.float32) for shape in ((rows, 512), (512, 512)))
    out = np.empty((rows, 512), np.float32)
    return lambda: np.matmul(left, right, out=out)


def _scaled(work: Callable[[int], object], count: int, step_s: float) -> int:
    """How much of it takes `step_s`, by the fastest of several tries of something shorter."""
    took_s = []
    for _ in range(50):
        begun_s = time.perf_counter()
        work(count)
        took_s.append(time.perf_counter() - begun_s)
    return max(1, round(count * step_s / min(took_s)))


class Background:
    """Prefixes that come one after the other, in a thread of the engine's process.

    Nobody computes with them. `processors` are those that the thread, and what it starts, may use.
    It waits for one layer after the other, or for the whole.
    """

    def __init__(
        self, side: EngineSide, client: Client, processors: set[int], *, waits_for_whole: bool
    ) -> None:
        self._waits_for_whole = waits_for_whole
        volume = side.reached.volume
        self._bucket = client.kv_bucket(LOSSLESS.bucket, LOSSLESS.layout(volume))
        self._keys = LOSSLESS.keys(volume)
        self._layer_bytes = volume.delivered_bytes // volume.layers
        self._processors = processors
        self._stops = threading.Event()
        self._has_begun = threading.Event()
        self._layers = 0
        self._thread = threading.Thread(target=self._fetch, daemon=True)

    def begin(self) -> None:
        """Return when layers come."""
        self._thread.start()
        if not self._has_begun.wait(BEGINS_S):
            raise SystemExit("nothing came of a delivery")

    @property
    def delivered_layers(self) -> int:
        """So far."""
        return self._layers

    def bytes_of(self, layers: int) -> int:
        """Decoded."""
        return layers * self._layer_bytes

    def end(self) -> None:
        """Return when nothing comes any more."""
        self._stops.set()
        self._thread.join()

    def _fetch(self) -> None:
        os.sched_setaffinity(0, self._processors)  # of this thread
        while not self._stops.is_set():
            with self._bucket.fetch(
                self._keys, delivery="layerwise", encodings=["planes-zstd"]
            ) as delivery:
                if self._waits_for_whole:
                    self._layers += len(delivery.wait())
                    self._has_begun.set()
                    continue
                for _ in delivery:
                    self._layers += 1
                    self._has_begun.set()
                    if self._stops.is_set():
                        break


_steps: dict[Loop, Callable[[], object]] = {}
_clients: dict[str, Client] = {}


def run_window(
    side: EngineSide,
    loop: Loop,
    fetcher: str | None,
    processors: set[int],
    window_s: float,
    waits_for_whole: bool = False,
) -> Window:
    """Steps for so long. `processors` are for a thread by which prefixes come, by the `fetcher` of
    this name, or, where it is None, decoded by the thread; without any nothing comes.
    """
    if loop not in _steps:
        _steps[loop] = make_step(loop)
    step = _steps[loop]
    time.sleep(PAUSE_S)
    background = None
    if processors:
        name = fetcher or "direct"
        if name not in _clients:  # whose threads are to run where the background's may
            url = side.reached.fetchers.get(name, side.reached.endpoint)
            _clients[name] = side.client(url, "shared_memory" if fetcher else "body")
        background = Background(side, _clients[name], processors, waits_for_whole=waits_for_whole)
        background.begin()
    layers_before = background.delivered_layers if background else 0
    cpu_before_s, waits_before = _beside()
    steps_s = []
    begun_s = now_s = time.perf_counter()
    while now_s - begun_s < window_s:
        step()
        ended_s = time.perf_counter()
        steps_s.append(ended_s - now_s)
        now_s = ended_s
    cpu_s, waits = _beside()
    layers = (background.delivered_layers if background else 0) - layers_before
    delivered_bytes = background.bytes_of(layers) if background else 0
    if background:
        background.end()
    return Window(
        tuple(steps_s),
        delivered_bytes / (now_s - begun_s),
        layers,
        cpu_s - cpu_before_s,
        waits - waits_before,
    )


def _beside() -> tuple[float, int]:
    """Processor seconds and waits of the process so far, without the calling thread's."""
    process, own = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_THREAD)
    )
    cpu_s = time.process_time() - time.thread_time()
    return cpu_s, process.ru_nvcsw - own.ru_nvcsw
