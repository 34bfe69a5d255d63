"""Loads of SGLang's linker onto a device: what is queued on its stream when one of them fails."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from objectcache.connectors.sglang.linked_loads import BEGIN_THREADS_MAX, Load, load_layers
from objectcache_schemas.errors import Busy, DeliveryFailed

LAYERS = 3


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

    def report_explicitly(self) -> None:
        pass

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
        self.bucket = SimpleNamespace(fetch=self._fetch)

    def patience_s(self, page_count: int) -> float:
        return float(page_count)

    def _fetch(self, keys: list[str], *, delivery: str) -> Delivery:
        assert delivery == "layerwise"
        self._barrier.wait(timeout=30)
        fails_at = self._fails.get(keys[0], LAYERS)
        if fails_at < 0:
            raise Busy("no room")
        self.deliveries.append(Delivery(fails_at))
        return self.deliveries[-1]


def loads(*names: str) -> list[Load]:
    return [Load([name, "b", "c"], name) for name in names]


def load(store: Store, pool: Pool, module: DeviceModule, *names: str) -> list[int]:
    done: list[int] = []
    load_layers(cast(Any, store), cast(Any, pool), loads(*names), done.append, module)
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
