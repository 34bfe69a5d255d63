"""A bucket of KV chunks: keys, match, fetch, put."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from objectcache.arguments import (
    AUTO_ENCODINGS,
    checked_choice,
    checked_compute_s,
    checked_encoding,
    checked_encodings,
    checked_keys,
    checked_layers,
    checked_name,
    checked_parent,
    checked_rate,
    checked_seconds,
    checked_token_count,
    checked_tokens,
)
from objectcache.channel import requests
from objectcache.channel.responses import PutResult, parse_match
from objectcache.core import ClientCore, TransportChoice
from objectcache.deliveries.delivery import Delivery
from objectcache.deliveries.fetch_request import FetchRequest
from objectcache.deliveries.fetching import empty_delivery, fetch
from objectcache.deliveries.forced_path import checked_path, mode_of, transport_of
from objectcache.landing.targets import FabricTarget, Target
from objectcache.puts.put_request import PutRequest
from objectcache.puts.putting import LayerPut, put_chunks
from objectcache.puts.quantised_put import QuantisedLayerPut, quantised_chunks
from objectcache.routes.client_routes import ClientRoutes
from objectcache.routes.route_settings import AskedRoute
from objectcache_encodings.element_sizes import element_bytes_of
from objectcache_encodings.lossy.lossy_dtype import LossyDtype
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, OnMissing
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout


class KvBucket:
    """A bucket seen through one KV layout. Made by `Client.kv_bucket`; may be shared by threads.

    With `lossy`, `layout` is that of its chunks, and slices that are fetched and put are the
    model's own: they are quantised before they are put, and dequantised by whoever waits for a
    layer.
    """

    def __init__(
        self,
        core: ClientCore,
        name: str,
        layout: KvLayout,
        routes: ClientRoutes | None = None,
        lossy: LossyDtype | None = None,
    ) -> None:
        self._core = core
        self._routes = routes
        self._lossy = lossy
        self.name = name
        self.layout = layout

    @property
    def slice_bytes(self) -> int:
        """Bytes of a slice that is fetched or put."""
        return self._lossy.shape.slice_bytes if self._lossy else self.layout.per_layer_chunk_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk that is fetched or put."""
        return self.layout.num_layers * self.slice_bytes

    def chunk_keys(self, tokens: Sequence[int] | npt.NDArray[np.integer] | bytes) -> list[str]:
        """Keys of the whole chunks of `tokens`, as `KvLayout.chunk_keys` computes them.

        Raises `InvalidRequest` for text, and for anything but one dimension of token ids.
        """
        return self.layout.chunk_keys(checked_tokens(tokens))

    def match(self, chunk_keys: Sequence[str], *, timeout_s: float | None = None) -> int:
        """How many leading chunks are stored, in one round trip.

        0 in a bucket that holds other objects, or has no layout, too. `timeout_s` replaces the
        client's.
        """
        chunk_keys = checked_keys(chunk_keys)
        timeout_s = self._timeout_s(timeout_s)
        if not chunk_keys:
            return 0
        reply = self._core.channel.call(requests.match(self.name, chunk_keys), timeout_s)
        return parse_match(reply.body, len(chunk_keys))

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
    ) -> Delivery:
        """Begin to fetch a prefix; returns when the server has accepted it.

        `delivery` is auto, layerwise or chunkwise. `layers` [first, end) asks for some layers only.
        `on_missing` "truncate" delivers the longest stored prefix; "fail" raises `NotFound` with
        `details.missing_index`. `compute_window_s` is the time that the engine computes per layer,
        for the server's scheduler; 0 says that it computes nothing between layers, as a loop that
        only moves them on. Where it is not known, `model` names a compute profile that the server
        has, and `context_tokens` is the length of the whole prompt, of which the prefix is a part.
        `fingerprint` tells what model computes, on what: a profile of that name is used where there
        is one, and what is learned of one is not told to another. `computed_tokens` is all that the
        engine computes in the step that consumes this. `rate_bytes_per_s` is the most that is
        wanted. `path` forces one of the paper's paths: agg (layerwise), batch (chunkwise), and for
        one chunk into a target direct or buffer (by way of the gateway). `target` is memory to fill
        in place of the client's own; `transport`, `timeout_s`, `route` and `encodings` replace the
        client's. What comes encoded is decoded into the `target` by whoever waits for a layer. No
        keys make an empty delivery.

        Raises `InvalidRequest` for wrong arguments and a target that is too small, `Unavailable`
        when the server is out of reach or `timeout_s` passes without an answer, `Busy` when it (or
        the client's own memory, `target_bytes_max`) is at a limit.
        """
        started_s = time.monotonic()
        chunk_keys = checked_keys(chunk_keys)
        forced = checked_path(path)
        mode = mode_of(forced, checked_choice("delivery", DeliveryMode, delivery))
        missing = checked_choice("on_missing", OnMissing, on_missing)
        layers = checked_layers(layers, self.layout.num_layers)
        window_s = checked_compute_s("compute_window_s", compute_window_s)
        context_tokens = checked_token_count("context_tokens", context_tokens)
        model = checked_name("model", model)
        fingerprint = checked_name("fingerprint", fingerprint)
        computed_tokens = checked_token_count("computed_tokens", computed_tokens)
        rate_bytes_per_s = checked_rate("rate_bytes_per_s", rate_bytes_per_s)
        timeout_s = self._timeout_s(timeout_s)
        asked_route = self._route(route)
        if encodings is None:
            encodings = self._core.settings.encodings
        names = checked_encodings(encodings)
        is_auto = names == AUTO_ENCODINGS
        if not chunk_keys:
            all_layers = (0, self.layout.num_layers)
            return empty_delivery(layers or all_layers, self.slice_bytes)
        descriptor = Descriptor(
            chunk_keys,
            self.layout.num_layers,
            self.layout.chunk_tokens,
            self.layout.per_layer_chunk_bytes,
            mode,
            layers,
            missing,
            window_s,
            context_tokens=context_tokens,
            model=model,
            rate_bytes_per_s=rate_bytes_per_s,
            fingerprint=fingerprint,
            computed_tokens=computed_tokens,
            nic=self._core.settings.nic,
            nic_bytes_per_s=self._core.settings.nic_bytes_per_s,
            encodings=None if is_auto else names or None,
        )
        of_target = target.transport if isinstance(target, FabricTarget) else None
        choice = transport_of(forced, self._transport(transport), len(chunk_keys), of_target)
        return fetch(
            self._core,
            FetchRequest(
                self.name,
                descriptor,
                target,
                choice,
                timeout_s,
                started_s,
                forced,
                chooses_encodings=is_auto,
                lossy=self._lossy,
            ),
            self._routes,
            asked_route,
        )

    def put(
        self,
        chunk_keys: Sequence[str],
        chunks: Any,
        *,
        parent_key: str | None = None,
        transport: str | None = None,
        timeout_s: float | None = None,
        encoding: str | None = None,
    ) -> PutResult:
        """Store chunks: uint8[N, num_layers, slice_bytes], raw bytes of that length, or a list with
        one chunk a key.

        `parent_key` is the chunk before the first one in their prefix, whose tail they are: the
        store lays them beside it and evicts them before it. Chunks that lie in one run within a
        target of this client (`client.shared_memory_target(...).chunks(...)`, or a
        `fabric_target`'s) are put from there without a copy of ours: they must not change before
        the call returns, or what is stored of them may fail its checksum and read as missing. With
        transport nixl or verbs the server reads them over that fabric, out of such a target or of
        registered memory that they are copied to; an array of a GPU must lie in such a target.
        `transport`, `timeout_s` and `encoding` (for `put_encoding`) replace the client's. What is
        encoded is fewer bytes on the wire, in memory of its own; what is stored is the same.

        All become visible together, or none. Chunks that are stored already with the same bytes
        are counted as `existing`. Raises `Conflict` where other bytes are stored under a key,
        `StorageFull`, `InvalidRequest` where shape or size do not fit, or numbers that are to be
        quantised are not finite.
        """
        chunk_keys = checked_keys(chunk_keys)
        if not chunk_keys:
            return PutResult(stored=0, existing=0)
        put = self._put_request(
            chunk_keys, DeliveryMode.CHUNKWISE, parent_key, transport, timeout_s, encoding
        )
        if self._lossy is not None:
            chunks = quantised_chunks(chunks, put.shape, self._lossy)
        return put_chunks(self._core, put, chunks)

    def put_layers(
        self,
        chunk_keys: Sequence[str],
        *,
        parent_key: str | None = None,
        transport: str | None = None,
        timeout_s: float | None = None,
        encoding: str | None = None,
    ) -> LayerPut:
        """Store chunks layer by layer: `write_layer` num_layers times in a `with` block.

        Through registered memory the layers are laid there as they come and stored at the end; in a
        body they are sent as they come. Over plain HTTP to another host they are kept and sent at
        the end, because the request's signature covers its body there; and so they are wherever
        they are encoded. `parent_key`, `transport`, `timeout_s` and `encoding` as in `put`.
        """
        chunk_keys = checked_keys(chunk_keys)
        put = self._put_request(
            chunk_keys, DeliveryMode.LAYERWISE, parent_key, transport, timeout_s, encoding
        )
        if self._lossy is not None:
            return QuantisedLayerPut(self._core, put, self._lossy)
        return LayerPut(self._core, put)

    def delete(self, chunk_key: str) -> None:
        """Delete a chunk; one that is not stored is a success."""
        (key,) = checked_keys([chunk_key])
        self._core.channel.call(requests.delete_object(self.name, key))

    def _put_request(
        self,
        chunk_keys: tuple[str, ...],
        order: DeliveryMode,
        parent_key: str | None,
        transport: str | None,
        timeout_s: float | None,
        encoding: str | None,
    ) -> PutRequest:
        descriptor = Descriptor(
            chunk_keys,
            self.layout.num_layers,
            self.layout.chunk_tokens,
            self.layout.per_layer_chunk_bytes,
            order,
            parent_key=checked_parent(parent_key),
        )
        choice = self._transport(transport)
        if encoding is None:
            encoding = self._core.settings.put_encoding
        return PutRequest(
            self.name,
            descriptor,
            choice,
            self._timeout_s(timeout_s),
            checked_encoding("encoding", encoding),
            element_bytes_of(self.layout.dtype),
        )

    def _transport(self, transport: str | None) -> TransportChoice:
        if transport is None:
            return self._core.settings.transport
        return TransportChoice.parse(transport)

    def _route(self, route: str | None) -> AskedRoute | None:
        if route is None:
            return None
        asked = AskedRoute.parse(route)
        if self._routes is not None:
            return self._routes.checked(asked)
        if asked.word in ("relay", "split"):
            raise InvalidRequest(f"route {route!r} needs relays, and the client has none")
        return None

    def _timeout_s(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self._core.settings.timeout_s
        return checked_seconds("timeout_s", timeout_s)

    def __repr__(self) -> str:
        return f"<KvBucket {self.name} at {self._core.endpoint.url}, {self.layout!r}>"
