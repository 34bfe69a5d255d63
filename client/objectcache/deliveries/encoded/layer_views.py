"""What a delivery gives of a layer: a view of where it landed, decoded where it came encoded, and
dequantised where it is lossy.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from objectcache.deliveries.encoded.wire_payload import WirePayload
from objectcache.landing.regions import Landing, nothing
from objectcache.payload import Bytes, PayloadShape
from objectcache_encodings.decoder import SliceDecoder
from objectcache_encodings.lossy.lossy_dtype import LossyDtype
from objectcache_schemas.errors import DamagedData, DeliveryFailed

FoundDamage = Callable[[int, str], None]  # in a layer, of the chunk with this key


class LayerViews(ABC):
    """The layers of one delivery. `wire` is its payload as it was sent, None where that is plain;
    `works` says whether giving a layer takes a while.
    """

    wire: WirePayload | None = None
    works = False

    def __init__(self, stored_bytes: int) -> None:
        """`stored_bytes` are those of all layers as they are stored, not encoded."""
        self.stored_bytes = stored_bytes

    @property
    def wire_bytes(self) -> int | None:
        """Bytes of the payload as it is sent; None while its directory is not looked into."""
        return self.stored_bytes if self.wire is None else self.wire.payload_bytes

    @property
    def decode_s(self) -> float | None:
        """Seconds that decoding took; None where not all that came encoded is decoded."""
        return 0.0 if self.wire is None else None

    @abstractmethod
    def layer(self, layer: int, is_ready: bool) -> Bytes:
        """The view of a layer; one that is not ready is not looked into. Raises `DeliveryFailed`
        where its bytes are not those that were stored.
        """

    @abstractmethod
    def whole(self) -> Bytes:
        """All layers, which are usable."""

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """The delivery is closed. Layers that were given stay as they are."""


class PlainLayers(LayerViews):
    """Layers as they landed, which is as they were stored, or as a fetcher dequantised them."""

    def __init__(self, shape: PayloadShape, memory: Bytes, stored_bytes: int | None = None) -> None:
        super().__init__(shape.payload_bytes if stored_bytes is None else stored_bytes)
        self._first_layer = shape.first_layer
        self._payload = shape.payload(memory)

    def layer(self, layer: int, is_ready: bool) -> Bytes:
        view: Bytes = self._payload[layer - self._first_layer]
        return view

    def whole(self) -> Bytes:
        return self._payload


class WireLayers(LayerViews):
    """Layers as they were sent, for whoever decodes them: each uint8[bytes]."""

    def __init__(self, wire: WirePayload) -> None:
        super().__init__(wire.shape.payload_bytes)
        self.wire = wire

    def layer(self, layer: int, is_ready: bool) -> Bytes:
        assert is_ready, "only the directory says where it lies"
        assert self.wire is not None
        try:
            return self.wire.layer(layer)
        except DamagedData as error:
            raise DeliveryFailed(f"layer {layer}: {error.message}", layer=layer) from error

    def whole(self) -> Bytes:
        assert self.wire is not None
        return self.wire.whole()


class MadeLayers(LayerViews):
    """Layers that are made of what landed elsewhere, each once, by whoever asks for it first: in
    memory of its own, or in a target of the caller's. Thread-safe.
    """

    works = True

    def __init__(
        self,
        shape: PayloadShape,
        landing: Landing,
        is_target: bool,
        make: Callable[[int, Bytes], None],
        let_go: Callable[[], None],
        stored_bytes: int,
        wire: WirePayload | None = None,
        damaged: FoundDamage | None = None,
    ) -> None:
        """`make` fills a layer, and raises `DamagedData`, which `damaged` is told of, or
        `DeliveryFailed`; `let_go` is called when all are made. The landing is settled by then, or
        with the close. `is_target`: it is the caller's, so nothing is made in it from then on.
        `shape` is that of what is made.
        """
        super().__init__(stored_bytes)
        self.wire = wire
        self._shape = shape
        self._landing = landing
        self._is_target = is_target
        self._payload = shape.payload(landing.array)
        self._make = make
        self._damaged = damaged
        self._let_go = let_go
        self._missing = set(range(shape.first_layer, shape.end_layer))
        self._failure: DeliveryFailed | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def decode_s(self) -> float | None:
        if self.wire is None:
            return 0.0
        return None if self._missing else self.wire.decode_s

    def layer(self, layer: int, is_ready: bool) -> Bytes:
        view: Bytes = self._payload[layer - self._shape.first_layer]
        if is_ready:
            with self._lock:
                if layer in self._missing:
                    self._make_layer(layer, view)
        return view

    def _make_layer(self, layer: int, view: Bytes) -> None:
        if self._is_closed:
            raise DeliveryFailed(f"layer {layer} was not asked for before the close", layer=layer)
        if self._failure is None:
            try:
                self._make(layer, view)
            except DamagedData as error:
                self._failure = DeliveryFailed(
                    f"layer {layer} is damaged: {error.message}", layer=layer, key=error.details.key
                )
                self._failure.__cause__ = error
                if self._damaged is not None and error.details.key is not None:
                    self._damaged(layer, error.details.key)
            except DeliveryFailed as error:
                self._failure = error
        if self._failure is not None:
            failure = DeliveryFailed(self._failure.message)
            failure.details = self._failure.details
            raise failure from self._failure.__cause__
        self._missing.discard(layer)
        if not self._missing:
            self._let_go()
            self._landing.settle()

    def whole(self) -> Bytes:
        for layer in range(self._shape.first_layer, self._shape.end_layer):
            self.layer(layer, True)
        return self._payload

    def close(self) -> None:
        with self._lock:
            self._is_closed = self._is_target
        self._landing.settle()


class _Decoders(threading.local):
    def __init__(self) -> None:
        self.decoder = SliceDecoder()


_decoders = _Decoders()


def decoded_layers(
    wire: WirePayload,
    shape: PayloadShape,
    target: Landing | None,
    keys: Sequence[str],
    damaged: FoundDamage,
) -> LayerViews:
    """The layers of an encoded payload, decoded into the caller's target, or memory of their own;
    `keys` are its chunks'. `damaged` is told of the first that cannot be.
    """

    def decode(layer: int, out: Bytes) -> None:
        wire.decode(layer, out, _decoders.decoder, keys)

    return _made(shape, target, decode, wire.let_go, shape.payload_bytes, wire, damaged)


def copied_layers(
    memory: Bytes, shape: PayloadShape, target: Landing, stored_bytes: int | None = None
) -> LayerViews:
    """The layers of a plain payload that landed in `memory`, copied to the caller's target."""
    landed = [shape.payload(memory)]

    def copy(layer: int, out: Bytes) -> None:
        out[...] = landed[0][layer - shape.first_layer]

    return _made(shape, target, copy, landed.clear, stored_bytes or shape.payload_bytes)


def dequantised_layers(
    wire: WirePayload | None,
    memory: Bytes,
    shape: PayloadShape,
    target: Landing | None,
    keys: Sequence[str],
    lossy: LossyDtype,
    damaged: FoundDamage,
) -> LayerViews:
    """The layers of a lossy payload of `shape`, encoded or not, as numbers that the model computes
    with: in the caller's target, or memory of their own. `damaged` is told of the first that cannot
    be decoded; not of one that cannot be dequantised, which is whole as it is stored.
    """
    landed = [shape.payload(memory)] if wire is None else []

    def stored(layer: int) -> Bytes:
        if wire is None:
            view: Bytes = landed[0][layer - shape.first_layer]
            return view
        decoded = np.empty((shape.chunk_count, shape.slice_bytes), np.uint8)
        wire.decode(layer, decoded, _decoders.decoder, keys)
        return decoded

    def dequantise(layer: int, out: Bytes) -> None:
        slices = stored(layer)
        try:
            lossy.dequantise(slices, layer, out)
        except DamagedData:
            _fail_with_key(lossy, slices, layer, out, keys)
            raise

    let_go = landed.clear if wire is None else wire.let_go
    made = dequantised_shape(shape, lossy)
    return _made(made, target, dequantise, let_go, shape.payload_bytes, wire, damaged)


def _fail_with_key(
    lossy: LossyDtype, slices: Bytes, layer: int, out: Bytes, keys: Sequence[str]
) -> None:
    """Raise `DeliveryFailed` for the first slice that cannot be dequantised."""
    for chunk, key in enumerate(keys[: len(slices)]):
        part = slice(chunk, chunk + 1)
        try:
            lossy.dequantise(slices[part], layer, out[part])
        except DamagedData as error:
            raise DeliveryFailed(
                f"layer {layer}, chunk {chunk} ({key}): {error.message}", layer=layer, key=key
            ) from error


def dequantised_shape(shape: PayloadShape, lossy: LossyDtype) -> PayloadShape:
    """The shape of what is made of a lossy payload."""
    return replace(shape, slice_bytes=lossy.shape.slice_bytes)


def _made(
    shape: PayloadShape,
    target: Landing | None,
    make: Callable[[int, Bytes], None],
    let_go: Callable[[], None],
    stored_bytes: int,
    wire: WirePayload | None = None,
    damaged: FoundDamage | None = None,
) -> LayerViews:
    landing = target or Landing(np.empty(shape.payload_bytes, np.uint8), None, nothing)
    is_target = target is not None
    return MadeLayers(shape, landing, is_target, make, let_go, stored_bytes, wire, damaged)
