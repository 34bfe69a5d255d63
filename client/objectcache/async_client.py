"""The asynchronous client: the synchronous one's calls in threads, its layer events on the loop.

A call blocks a thread of the client's own executor for one round trip. Waiting for layers blocks
none: the thread that receives a delivery tells the event loop.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from objectcache.channel.responses import PutResult
from objectcache.client import CONNECTIONS_MAX, DEFAULT_REGION, TARGET_BYTES_MAX, TIMEOUT_S, Client
from objectcache.deliveries.delivery import Delivery
from objectcache.deliveries.delivery_facts import DeliveryFacts
from objectcache.kv_bucket import KvBucket
from objectcache.landing.targets import FabricTarget, SharedMemoryTarget, Target
from objectcache.payload import Bytes
from objectcache.puts.putting import LayerPut
from objectcache.routes.route_settings import ROUTE_BYTES_MIN
from objectcache.sessions.fabric_joining import FabricSettings
from objectcache_encodings.lossy import LossyDtype
from objectcache_schemas.errors import DeliveryFailed
from objectcache_schemas.layout import KvLayout

T = TypeVar("T")


class BlockingCalls:
    """Runs blocking calls in a bounded number of threads."""

    def __init__(self, threads_max: int) -> None:
        self._executor = ThreadPoolExecutor(threads_max, "objectcache-async")

    async def run(self, call: Callable[[], T], discard: Callable[[T], object] | None = None) -> T:
        """Await a call. When the awaiting task is cancelled, a call that has begun runs to its end,
        and `discard` gets its result. The call sees the task's context variables: its span, say.
        """
        future = self._executor.submit(copy_context().run, call)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if discard is not None:
                future.add_done_callback(partial(self._discard, discard))
            raise

    def _discard(self, discard: Callable[[T], object], future: Future[T]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._executor.submit(discard, future.result())

    async def finish(self, call: Callable[[], T]) -> T:
        """Await a call that runs to its end even if the awaiting task is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self._executor.submit(call)))

    def close(self, wait: bool = False) -> None:
        """Take no more calls; those that have begun run to their end, for which `wait` waits."""
        self._executor.shutdown(wait=wait)


class AsyncDelivery(DeliveryFacts):
    """A `Delivery` for one event loop. See there; here waiting is awaiting."""

    def __init__(self, delivery: Delivery, calls: BlockingCalls) -> None:
        super().__init__(
            delivery._progress,
            delivery._shape,
            delivery._head,
            delivery.transport,
            delivery._route,
            delivery._layers,
        )
        self._delivery = delivery
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        delivery.progress.listen(partial(_set_on_loop, self._loop, self._changed))

    async def wait_layer(self, layer: int, timeout_s: float | None = None) -> Bytes:
        """See `Delivery.wait_layer`."""
        self._delivery.wait_begins(layer)
        await self._ready(layer, timeout_s)
        ready = partial(self._delivery.ready_layer, layer)
        view = await self._calls.run(ready) if self._layers.works else ready()
        self._delivery.wait_ended(layer)
        return view

    async def _ready(self, layer: int, timeout_s: float | None) -> None:
        progress = self._delivery.progress
        deadline_s = None if timeout_s is None else self._loop.time() + timeout_s
        while True:
            # No await between the look and the wait, and only the loop sets the event: nothing
            # is missed, by however many tasks.
            self._changed.clear()
            if progress.is_ready(layer):
                return
            left_s = None if deadline_s is None else deadline_s - self._loop.time()
            if left_s is not None and left_s <= 0:
                raise DeliveryFailed(
                    f"layer {layer} did not arrive within {timeout_s} s", layer=progress.ready_end
                )
            bounds_s = [s for s in (left_s, progress.silence_left_s()) if s is not None]
            try:
                async with asyncio.timeout(min(bounds_s) if bounds_s else None):
                    await self._changed.wait()
            except TimeoutError:
                progress.fail_if_silent()

    async def wait(self, timeout_s: float | None = None) -> Bytes:
        """See `Delivery.wait`."""
        last = self.layers[-1]
        self._delivery.wait_begins(last)
        await self._ready(last, timeout_s)
        whole = partial(self._delivery.wait)
        return await self._calls.run(whole) if self._layers.works else whole()

    def consumed(self, layer: int, compute_s: float | None = None) -> None:
        """See `Delivery.consumed`."""
        self._delivery.consumed(layer, compute_s)

    def report_explicitly(self) -> None:
        """See `Delivery.report_explicitly`."""
        self._delivery.report_explicitly()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Bytes]]:
        """Layers in order, each as soon as it is usable."""
        for layer in self.layers:
            yield layer, await self.wait_layer(layer)

    async def close(self) -> None:
        """See `Delivery.close`; it happens even if the awaiting task is cancelled."""
        await self._calls.finish(self._delivery.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Async{repr(self._delivery)[1:]}"


def _set_on_loop(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set an event from any thread. Holds no delivery, whose memory would outlive its arrays."""
    with suppress(RuntimeError):  # the loop is closed, so nobody waits
        loop.call_soon_threadsafe(event.set)


class AsyncFetch(Awaitable[AsyncDelivery]):
    """A fetch that begins when it is awaited, or entered by `async with`."""

    def __init__(self, begin: Callable[[], Delivery], calls: BlockingCalls) -> None:
        self._begin = begin
        self._calls = calls
        self._delivery: AsyncDelivery | None = None

    def __await__(self) -> Generator[Any, None, AsyncDelivery]:
        return self._run().__await__()

    async def _run(self) -> AsyncDelivery:
        delivery = await self._calls.run(self._begin, Delivery.close)
        return AsyncDelivery(delivery, self._calls)

    async def __aenter__(self) -> AsyncDelivery:
        self._delivery = await self._run()
        return self._delivery

    async def __aexit__(self, *_: object) -> None:
        assert self._delivery is not None
        await self._delivery.close()


class AsyncLayerPut:
    """A `LayerPut` for one event loop. See there."""

    def __init__(self, put: LayerPut, calls: BlockingCalls) -> None:
        self._put = put
        self._calls = calls
        self._lock = threading.Lock()  # a cancelled write may still be running

    @property
    def result(self) -> PutResult | None:
        """What the put did, once the block was left."""
        return self._put.result

    async def write_layer(self, kv: Any) -> None:
        """See `LayerPut.write_layer`; after a cancelled one the put can only be abandoned."""
        await self._calls.run(partial(self._locked, partial(self._put.write_layer, kv)))

    def _locked(self, call: Callable[[], None]) -> None:
        with self._lock:
            call()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        end = self._put.close if kind is None else self._put.abandon
        await self._calls.finish(partial(self._locked, end))

    def __repr__(self) -> str:
        return f"<Async{repr(self._put)[1:]}"


class AsyncKvBucket:
    """A `KvBucket` for event loops. See there."""

    def __init__(self, bucket: KvBucket, calls: BlockingCalls) -> None:
        self._bucket = bucket
        self._calls = calls
        self.name = bucket.name
        self.layout = bucket.layout

    def chunk_keys(self, tokens: Sequence[int] | npt.NDArray[np.integer] | bytes) -> list[str]:
        """See `KvBucket.chunk_keys`; computed at once."""
        return self._bucket.chunk_keys(tokens)

    async def match(self, chunk_keys: Sequence[str], *, timeout_s: float | None = None) -> int:
        """See `KvBucket.match`."""
        return await self._calls.run(partial(self._bucket.match, chunk_keys, timeout_s=timeout_s))

    def fetch(
        self,
        chunk_keys: Sequence[str],
        *,
        delivery: str = "auto",
        layers: tuple[int, int] | None = None,
        on_missing: str = "fail",
        compute_window_s: float | None = None,
        context_tokens: int | None = None,
        model: str | None = None,
        fingerprint: str | None = None,
        computed_tokens: int | None = None,
        rate_bytes_per_s: float | None = None,
        path: str | None = None,
        target: Target | None = None,
        transport: str | None = None,
        timeout_s: float | None = None,
        route: str | None = None,
        encodings: Sequence[str] | None = None,
    ) -> AsyncFetch:
        """See `KvBucket.fetch`. Use it as `async with bucket.fetch(...) as delivery`, or await it
        and close the delivery. A fetch that is cancelled closes what it began.
        """
        begin = partial(
            self._bucket.fetch,
            chunk_keys,
            delivery=delivery,
            layers=layers,
            on_missing=on_missing,
            compute_window_s=compute_window_s,
            context_tokens=context_tokens,
            model=model,
            fingerprint=fingerprint,
            computed_tokens=computed_tokens,
            rate_bytes_per_s=rate_bytes_per_s,
            path=path,
            target=target,
            transport=transport,
            timeout_s=timeout_s,
            route=route,
            encodings=encodings,
        )
        return AsyncFetch(begin, self._calls)

    async def put(
        self,
        chunk_keys: Sequence[str],
        chunks: Any,
        *,
        parent_key: str | None = None,
        transport: str | None = None,
        timeout_s: float | None = None,
        encoding: str | None = None,
    ) -> PutResult:
        """See `KvBucket.put`. A put whose await is cancelled may still be carried out, and read
        the chunks meanwhile.
        """
        call = partial(
            self._bucket.put,
            chunk_keys,
            chunks,
            parent_key=parent_key,
            transport=transport,
            timeout_s=timeout_s,
            encoding=encoding,
        )
        return await self._calls.run(call)

    def put_layers(
        self,
        chunk_keys: Sequence[str],
        *,
        parent_key: str | None = None,
        transport: str | None = None,
        timeout_s: float | None = None,
        encoding: str | None = None,
    ) -> AsyncLayerPut:
        """See `KvBucket.put_layers`; for `async with`."""
        put = self._bucket.put_layers(
            chunk_keys,
            parent_key=parent_key,
            transport=transport,
            timeout_s=timeout_s,
            encoding=encoding,
        )
        return AsyncLayerPut(put, self._calls)

    async def delete(self, chunk_key: str) -> None:
        """See `KvBucket.delete`."""
        await self._calls.run(partial(self._bucket.delete, chunk_key))

    def __repr__(self) -> str:
        return f"<Async{repr(self._bucket)[1:]}"


class AsyncClient:
    """A `Client` for event loops. See there; at most `connections_max` calls run at once."""

    def __init__(
        self,
        endpoint: str,
        *,
        access_key: str,
        secret_key: str,
        session_token: str | None = None,
        region: str = DEFAULT_REGION,
        transport: str = "auto",
        timeout_s: float = TIMEOUT_S,
        connections_max: int = CONNECTIONS_MAX,
        target_bytes_max: int = TARGET_BYTES_MAX,
        learn_windows: bool = True,
        tls: ssl.SSLContext | None = None,
        fabric: FabricSettings | None = None,
        split_from_bytes: int = 0,
        relays: Sequence[str] = (),
        route: str = "auto",
        node: str = "",
        route_bytes_min: int = ROUTE_BYTES_MIN,
        relay_timeout_s: float | None = None,
        dispatch: str | Sequence[str] = "",
        dispatch_token: str | Path | Callable[[], str] | None = None,
        worker: str = "",
        nic: str | None = None,
        nic_bytes_per_s: float | None = None,
        encodings: Sequence[str] | None = (),
        put_encoding: str | None = "",
        fetcher: str = "",
    ) -> None:
        client = Client(
            endpoint,
            access_key=access_key,
            secret_key=secret_key,
            session_token=session_token,
            region=region,
            transport=transport,
            timeout_s=timeout_s,
            connections_max=connections_max,
            target_bytes_max=target_bytes_max,
            learn_windows=learn_windows,
            tls=tls,
            fabric=fabric,
            split_from_bytes=split_from_bytes,
            relays=relays,
            route=route,
            node=node,
            route_bytes_min=route_bytes_min,
            relay_timeout_s=relay_timeout_s,
            dispatch=dispatch,
            dispatch_token=dispatch_token,
            worker=worker,
            nic=nic,
            nic_bytes_per_s=nic_bytes_per_s,
            encodings=encodings,
            put_encoding=put_encoding,
            fetcher=fetcher,
        )
        self._wrap(client, connections_max)

    @classmethod
    def from_environment(
        cls,
        environment: Mapping[str, str] | None = None,
        *,
        region: str = DEFAULT_REGION,
        transport: str = "auto",
        timeout_s: float = TIMEOUT_S,
    ) -> AsyncClient:
        """See `Client.from_environment`."""
        wrapped = cls.__new__(cls)
        client = Client.from_environment(
            environment, region=region, transport=transport, timeout_s=timeout_s
        )
        wrapped._wrap(client, CONNECTIONS_MAX)
        return wrapped

    def _wrap(self, client: Client, threads_max: int) -> None:
        self._client = client
        self._calls = BlockingCalls(threads_max)

    async def create_bucket(self, name: str) -> None:
        """See `Client.create_bucket`."""
        await self._calls.run(partial(self._client.create_bucket, name))

    async def delete_bucket(self, name: str) -> None:
        """See `Client.delete_bucket`."""
        await self._calls.run(partial(self._client.delete_bucket, name))

    async def put_layout(self, bucket: str, layout: KvLayout) -> None:
        """See `Client.put_layout`."""
        await self._calls.run(partial(self._client.put_layout, bucket, layout))

    async def get_layout(self, bucket: str) -> KvLayout:
        """See `Client.get_layout`."""
        return await self._calls.run(partial(self._client.get_layout, bucket))

    async def kv_bucket(
        self,
        name: str,
        layout: KvLayout,
        *,
        create: bool = False,
        lossy: LossyDtype | None = None,
    ) -> AsyncKvBucket:
        """See `Client.kv_bucket`."""
        call = partial(self._client.kv_bucket, name, layout, create=create, lossy=lossy)
        return AsyncKvBucket(await self._calls.run(call), self._calls)

    async def shared_memory_target(self, length_bytes: int) -> SharedMemoryTarget:
        """See `Client.shared_memory_target`."""
        call = partial(self._client.shared_memory_target, length_bytes)
        return await self._calls.run(call, SharedMemoryTarget.close)

    async def fabric_target(
        self, length_bytes: int | None = None, *, buffer: Any = None, transport: str | None = None
    ) -> FabricTarget:
        """See `Client.fabric_target`."""
        call = partial(self._client.fabric_target, length_bytes, buffer=buffer, transport=transport)
        return await self._calls.run(call, FabricTarget.close)

    def route_counts(self) -> dict[tuple[str, str], int]:
        """See `Client.route_counts`."""
        return self._client.route_counts()

    async def close(self) -> None:
        """See `Client.close`."""
        await self._calls.finish(self._client.close)
        self._calls.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Async{repr(self._client)[1:]}"
