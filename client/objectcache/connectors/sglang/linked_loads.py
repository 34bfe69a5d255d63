"""Loads of the linker: one layerwise delivery a request, layers put into the device's pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from objectcache.connectors.device.engine_copier import EngineCopier
from objectcache.connectors.sglang.device_pool import DevicePool
from objectcache.connectors.sglang.page_store import PageStore
from objectcache.connectors.timing.step_windows import StepTiming
from objectcache.deliveries.delivery import Delivery
from objectcache.gpu.pieces import Pieces
from objectcache.payload import Bytes

BEGIN_THREADS_MAX = 8


@dataclass(frozen=True, slots=True)
class LinkedLoad:
    """Pages of one request: their hashes, and where they go."""

    hashes: list[str]
    slots: Any


def load_layers(
    store: PageStore,
    pool: DevicePool,
    loads: Sequence[LinkedLoad],
    complete: Callable[[int], None],
    device_module: Any,
    timing: StepTiming,
    copier: EngineCopier | None = None,
) -> None:
    """Bring every layer of every load into place; `complete` hears of each when it is there.

    The deliveries of all loads begin at once, before the first layer is waited for. `device_module`
    is torch's module for the pool's device (`torch.cuda`, say). Raises what the store has against
    one of them, `DeliveryFailed` where one ends early or all take longer than a server that works
    would, and nothing is written to the device afterwards.

    The server is told the batch's `timing`. With a `copier` layers are copied as they arrive,
    whichever is waited for, where it reaches their memory.
    """
    page_count = sum(len(load.hashes) for load in loads)
    on_cpu = pool.device.type == "cpu"
    stream = None if on_cpu else device_module.Stream(pool.device)
    pages = [pool.pages(load.slots) for load in loads]
    if copier is not None:
        copier.enter_thread()
    with ExitStack() as stack:
        deliveries = _begun(store, loads, timing, stack)
        arrivals = [
            _beside(pool, load, delivery, copier, stack)
            if copier is not None and copier.reaches(delivery.ready_layer(0))
            else _waited(pool, each, delivery)
            for load, each, delivery in zip(loads, pages, deliveries, strict=True)
        ]
        deadline_s = time.monotonic() + store.patience_s(page_count)
        for layer in range(pool.num_layers):
            with _in_place(stream, device_module):
                for arrive in arrivals:
                    arrive(layer, max(0.0, deadline_s - time.monotonic()))
            complete(layer)


def _waited(pool: DevicePool, pages: Any, delivery: Delivery) -> Callable[[int, float], None]:
    """What waits so long for a layer, and queues its copies on the current stream."""
    return lambda layer, left_s: pool.write_layer(layer, pages, delivery.wait_layer(layer, left_s))


def _beside(
    pool: DevicePool,
    load: LinkedLoad,
    delivery: Delivery,
    copier: EngineCopier,
    stack: ExitStack,
) -> Callable[[int, float], None]:
    """The same for layers that are copied already: the current stream waits for their copies.

    They have ended when `stack` has, before the delivery does.
    """

    pages = pool.page_ids(load.slots)

    def places(layer: int, slices: Bytes) -> Pieces:
        return pool.places[layer].pieces(pages, slices)

    copied = stack.enter_context(copier.copier.load(delivery, places))
    return lambda layer, left_s: copied.wait(layer, copier.current_stream(), left_s)


def _begun(
    store: PageStore, loads: Sequence[LinkedLoad], timing: StepTiming, stack: ExitStack
) -> list[Delivery]:
    """The deliveries of all loads, which end with `stack`; raises what one of them was refused for.

    A fetch returns when the server has accepted it, so they are asked for side by side.
    """
    with ThreadPoolExecutor(min(len(loads), BEGIN_THREADS_MAX), "objectcache-begin") as threads:
        asked = [threads.submit(partial(_begin, store, load, timing)) for load in loads]
    refusals = [error for answer in asked if (error := answer.exception()) is not None]
    accepted = [answer.result() for answer in asked if answer.exception() is None]
    for delivery in accepted:
        stack.enter_context(delivery)
    if refusals:
        raise refusals[0]
    return accepted


def _begin(store: PageStore, load: LinkedLoad, timing: StepTiming) -> Delivery:
    """The forward tells what it consumes: copying a layer says nothing about that."""
    cached_tokens = len(load.hashes) * store.bucket.layout.chunk_tokens
    delivery = store.bucket.fetch(
        store.namespace.keys(load.hashes),
        delivery="layerwise",
        compute_window_s=timing.window_s,
        context_tokens=cached_tokens + (timing.computed_tokens or 0),
        fingerprint=timing.fingerprint,
        computed_tokens=timing.computed_tokens,
    )
    timing.begun(delivery)
    return delivery


@contextmanager
def _in_place(stream: Any, device_module: Any) -> Generator[None]:
    """A block whose copies are over when it ends, however it ends: SGLang may free the pages then,
    and the deliveries their memory.
    """
    if stream is None:
        yield
        return
    try:
        with device_module.stream(stream):
            yield
    finally:
        stream.synchronize()
