"""Loads of SGLang's linker onto a device: what is queued on its stream when one of them fails."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from objectcache.connectors.sglang.batch_timings import (
    BATCHES_MAX,
    LOOKUPS_MAX,
    BatchTimings,
)
from objectcache.connectors.sglang.linked_loads import BEGIN_THREADS_MAX, LinkedLoad, load_layers
from objectcache.connectors.timing.compute_windows import BatchShape
from objectcache.connectors.timing.moments import HostClock
from objectcache.connectors.timing.step_windows import Step, StepTiming
from objectcache.deliveries.consumption import no_reports
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache_schemas.errors import Busy, DeliveryFailed

LAYERS, PAGE = 3, 8
TIMING = StepTiming("llama", 0.25, 100, Step(BatchShape(100, 5000.0)))


class CopyStream:
    """A stream of a device: what is queued on it, and whether anything may still run."""

    def __init__(self) -> None:
        self.queued: list[tuple[int, str]] = []
        self.running = 0

    def queue(self, layer: int, pages: str) -> None:
        self.queued.append((layer, pages))
        self.running += 1

    def synchronize(self) -> None:
        self.running = 0


class DeviceModule:
    """Torch's module for a device, of which there is one stream."""

    def __init__(self) -> None:
        self.made: list[CopyStream] = []
        self.current: CopyStream | None = None

    def Stream(self, device: Any) -> CopyStream:
        self.made.append(CopyStream())
        return self.made[-1]

    @contextmanager
    def stream(self, stream: CopyStream) -> Generator[None]:
        self.current = stream
        try:
            yield
        finally:
            self.current = None


class Pool:
    """A pool on a device, whose copies are queued on the current stream."""

    num_layers = LAYERS

    def __init__(self, device: str, module: DeviceModule) -> None:
        self.device = SimpleNamespace(type=device)
        self._module = module
        self.written: list[tuple[int, str]] = []

    def pages(self, slots: Any) -> str:
        return f"pages of {slots}"

    def write_layer(self, layer: int, pages: str, payload: Any) -> None:
        self.written.append((layer, pages))
        if self._module.current is not None:
            self._module.current.queue(layer, pages)


class Delivery:
    """A delivery whose layers come until one does not."""

    def __init__(self, fails_at: int) -> None:
        self._fails_at = fails_at
        self.closed = False

    reports = no_reports(LayerProgress(0, LAYERS))

    def wait_layer(self, layer: int, timeout_s: float) -> str:
        assert not self.closed
        assert 0 <= timeout_s <= 3.0 * BEGIN_THREADS_MAX
        if layer == self._fails_at:
            raise DeliveryFailed("cut", layer=layer)
        return "payload"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


class Store:
    """A store whose server answers a fetch when `together` of them have been asked for."""

    def __init__(self, together: int = 1, fails: dict[str, int] | None = None) -> None:
        self._barrier = threading.Barrier(together)
        self._fails = fails or {}
        self.deliveries: list[Delivery] = []
        self.namespace = SimpleNamespace(keys=lambda hashes: hashes)
        layout = SimpleNamespace(chunk_tokens=PAGE)
        self.bucket = SimpleNamespace(fetch=self._fetch, layout=layout)
        self.told: list[dict[str, Any]] = []

    def patience_s(self, page_count: int) -> float:
        return float(page_count)

    def _fetch(self, keys: list[str], *, delivery: str, **told: Any) -> Delivery:
        assert delivery == "layerwise"
        self.told.append(told)
        self._barrier.wait(timeout=30)
        fails_at = self._fails.get(keys[0], LAYERS)
        if fails_at < 0:
            raise Busy("no room")
        self.deliveries.append(Delivery(fails_at))
        return self.deliveries[-1]


def loads(*names: str) -> list[LinkedLoad]:
    return [LinkedLoad([name, "b", "c"], name) for name in names]


def load(store: Store, pool: Pool, module: DeviceModule, *names: str) -> list[int]:
    done: list[int] = []
    load_layers(cast(Any, store), cast(Any, pool), loads(*names), done.append, module, TIMING)
    return done


def test_each_layer_of_all_loads_is_in_place_before_it_is_told_of() -> None:
    module = DeviceModule()
    pool, store = Pool("cuda", module), Store()
    running: list[int] = []
    load_layers(
        cast(Any, store),
        cast(Any, pool),
        loads("x", "y"),
        lambda _: running.append(module.made[0].running),
        module,
        TIMING,
    )
    (stream,) = module.made
    assert running == [0] * LAYERS
    assert stream.queued == [
        (layer, f"pages of {name}") for layer in range(LAYERS) for name in ("x", "y")
    ]
    assert all(delivery.closed for delivery in store.deliveries)


def test_a_load_that_fails_leaves_no_copies_that_still_run() -> None:
    module = DeviceModule()
    pool, store = Pool("cuda", module), Store(fails={"y": 1})
    with pytest.raises(DeliveryFailed):
        load(store, pool, module, "x", "y")
    (stream,) = module.made
    assert stream.queued[-1] == (1, "pages of x"), "the copy that was queued when y failed"
    assert stream.running == 0
    assert all(delivery.closed for delivery in store.deliveries)


def test_in_memory_of_the_cpu_there_is_no_stream() -> None:
    module = DeviceModule()
    pool, store = Pool("cpu", module), Store()
    assert load(store, pool, module, "x") == list(range(LAYERS))
    assert not module.made


def test_all_deliveries_are_asked_for_before_the_first_is_accepted() -> None:
    names = [f"r{index}" for index in range(BEGIN_THREADS_MAX)]
    module = DeviceModule()
    pool = Pool("cpu", module)
    # One after the other they would wait for each other until the barrier breaks.
    assert load(Store(together=len(names)), pool, module, *names) == list(range(LAYERS))
    first = [pages for layer, pages in pool.written if layer == 0]
    assert first == [f"pages of {name}" for name in names]


def test_where_one_is_refused_the_accepted_ones_end_and_nothing_is_written() -> None:
    module = DeviceModule()
    pool, store = Pool("cuda", module), Store(fails={"y": -1})
    with pytest.raises(Busy):
        load(store, pool, module, "x", "y", "z")
    assert len(store.deliveries) == 2
    assert all(delivery.closed for delivery in store.deliveries)
    assert not pool.written


def test_the_server_is_told_who_computes_how_much_and_for_how_long() -> None:
    module = DeviceModule()
    store = Store()
    load(store, Pool("cpu", module), module, "x")
    (told,) = store.told
    assert told == {
        "compute_window_s": 0.25,
        "context_tokens": 3 * PAGE + 100,
        "fingerprint": "llama",
        "computed_tokens": 100,
    }


# --- timings ---


class ManualClock(HostClock):
    """A host's clock that a test moves."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s


class Forward:
    """SGLang's forwards: each asks for K and for V of every layer, and computes on it."""

    def __init__(self, step_tokens_max: int | None = None) -> None:
        self.clock = ManualClock()
        self.timings = BatchTimings(
            self.clock,
            "llama",
            num_layers=LAYERS,
            page_tokens=PAGE,
            step_tokens_max=step_tokens_max,
        )
        self.index = 0

    def run(self, layer_s: float, *loads: tuple[str, int]) -> StepTiming:
        """One forward that loads so many pages of these requests; what its fetches say."""
        self.index += 1
        timing = self.timings.batch_begins(self.index, loads)
        self.compute(self.index, layer_s)
        return timing

    def compute(self, index: int, layer_s: float) -> None:
        self.timings.forward_begins(index)
        for layer in range(LAYERS):
            self.timings.wait_begins(layer)
            self.clock.time_s += 5.0  # until it is there
            self.timings.wait_ended(layer)
            self.timings.wait_begins(layer)  # V, which is there with K
            self.timings.wait_ended(layer)
            self.clock.time_s += layer_s
        self.clock.time_s += 9.0  # logits and sampling


def test_a_batch_of_a_shape_that_was_seen_says_how_long_its_layers_compute() -> None:
    forward = Forward()
    said: list[float | None] = []
    for number in range(4):
        forward.timings.looked_up(f"r{number}", 20)
        timing = forward.run(0.125, (f"r{number}", 8))
        assert timing.computed_tokens == 12 * PAGE + PAGE // 2
        said.append(timing.window_s)
    assert said[:2] == [None, None]
    assert said[2:] == [pytest.approx(0.125)] * 2


def test_forwards_that_load_nothing_are_not_taken_for_those_that_do() -> None:
    forward = Forward()
    for number in range(3):
        forward.timings.looked_up(f"r{number}", 20)
        timing = forward.run(0.125, (f"r{number}", 8))
        forward.compute(-1, 0.001)
    assert timing.window_s == pytest.approx(0.125)


def test_of_a_long_prompt_one_forward_computes_no_more_than_its_chunk() -> None:
    forward = Forward(step_tokens_max=64)
    forward.timings.looked_up("r", 100)
    assert forward.run(0.125, ("r", 8)).computed_tokens == 64


def test_a_batch_whose_loads_were_not_looked_up_computes_the_rest_of_a_page() -> None:
    assert Forward().run(0.125, ("r", 8), ("s", 2)).computed_tokens == 2 * (PAGE // 2)


def test_lookups_and_batches_that_lead_to_nothing_are_forgotten() -> None:
    forward = Forward()
    for number in range(LOOKUPS_MAX + 1):
        forward.timings.looked_up(f"r{number}", 20)
    assert len(forward.timings._tail_pages) == LOOKUPS_MAX
    for index in range(BATCHES_MAX + 1):
        forward.timings.batch_begins(index, [("r1", 1)])
    assert len(forward.timings._batches) == BATCHES_MAX
    forward.timings.reset()
    assert not forward.timings._tail_pages
