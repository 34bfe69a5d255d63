"""Reuse of stored prefixes by Hugging Face Transformers: a cache whose layers arrive one by one.

Run with transformers 5.23; docs/transformers.md has an example. A chunk is
`[layer][K, V][token][head][dim]` of one sequence.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from threading import Thread
from typing import Any

import numpy as np

from objectcache.connectors.identity.model_identity import identify
from objectcache.connectors.identity.namespace import KvNamespace
from objectcache.connectors.missing_engine import missing_engine
from objectcache.connectors.store.lossy_setting import lossy_dtype_of
from objectcache.connectors.transformers.layer_timings import LayerTimings
from objectcache.deliveries.delivery import Delivery
from objectcache.gpu.copier import BlockSave, Copier, wait_for_all
from objectcache.gpu.layer_load import LayerLoad
from objectcache.gpu.pieces import BlockPart, PagedBlocks
from objectcache.payload import Bytes
from objectcache_encodings.lossy import LossyDtype
from objectcache_schemas.errors import InvalidRequest, Unsupported
from objectcache_schemas.layout import KvLayout

try:
    import torch as _torch  # pyright: ignore[reportMissingImports]
    from transformers.cache_utils import DynamicCache as _DynamicCache  # pyright: ignore[reportMissingImports]
    from transformers.cache_utils import DynamicLayer as _DynamicLayer  # pyright: ignore[reportMissingImports]
except ImportError as error:
    _torch = missing_engine("torch", error)
    _DynamicCache = missing_engine("transformers", error)
    _DynamicLayer = missing_engine("transformers", error)

_LAYOUT = "transformers:l2thd"
_SAVES_AT_ONCE = 2  # layers on their way out, each of which is on the device a second time


def layout_of(
    config: Any,
    dtype: Any,
    *,
    chunk_tokens: int,
    weights_revision: str = "",
    environment: Mapping[str, str] | None = None,
) -> KvLayout:
    """The KV layout of a model's bucket, from its configuration and the dtype of its KV.

    `weights_revision` is whatever tells its weights from others under the same name; left out, it
    is the hub's commit or a digest of the files where the model was loaded from, and the log warns
    where there is neither (`model_identity.identify`). `environment` tells where the hub's cache
    is. Raises `InvalidRequest` where `dtype` is no torch.dtype, and `Unsupported` for a model with
    layers other than full attention, and for one that takes more than text. Adapters are not seen:
    they need a `weights_revision` of their own.
    """
    if not isinstance(getattr(dtype, "itemsize", None), int):
        raise InvalidRequest(f"dtype must be a torch.dtype, got {dtype!r}")
    text = config.get_text_config(decoder=True)
    if text is not config:
        raise Unsupported(
            f"{config.model_type} models are not supported: what they compute from images or sound "
            "is in no key; models of text alone are"
        )
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise Unsupported(f"layers of {sorted(kinds)} are not supported; full attention alone is")
    heads, width = _heads_of(text)
    name = str(dtype)
    identity = identify(
        getattr(config, "name_or_path", "") or config.model_type,
        weights_revision,
        os.environ if environment is None else environment,
        configuration=config,
    )
    namespace = KvNamespace(
        model=identity.model,
        weights_revision=identity.weights_revision,
        dtype=name,
        layout=f"{_LAYOUT}:h{heads}:d{width}",
        hashing="objectcache",
        configuration=identity.configuration,
    )
    return KvLayout(
        num_layers=text.num_hidden_layers,
        chunk_tokens=chunk_tokens,
        per_layer_chunk_bytes=2 * chunk_tokens * heads * width * dtype.itemsize,
        dtype=name,
        fingerprint=namespace.prefix,
    )


def lossy_of(config: Any, layout: KvLayout, word: str) -> LossyDtype | None:
    """What quantises a model's KV for `Client.kv_bucket(..., layout, lossy=...)`: `word` is the
    other connectors' setting `lossy`, which is q8, q6, q4 or bins; None where it is empty.

    `layout` is `layout_of` the same configuration. Raises `InvalidRequest` for another word, and
    where the model's numbers are none that can be quantised.
    """
    heads, width = _heads_of(config)
    return lossy_dtype_of(layout, word, heads, width)


def _heads_of(text: Any) -> tuple[int, int]:
    """Heads of keys and values, and how wide each is."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return heads, width


class LayerwiseCache(_DynamicCache):
    """The KV of a stored prefix, to be passed to a model as `past_key_values`.

    It has the prefix's length from the start, and blocks where the model needs a layer that has not
    arrived. The delivery must stay open until the model has run. Raises what `Delivery.wait_layer`
    raises, out of the model: `DeliveryFailed` means to compute the prefix.
    """

    layers: list[Any]

    def __init__(
        self,
        config: Any,
        delivery: Delivery,
        layout: KvLayout,
        timings: LayerTimings | None = None,
        copier: Copier | None = None,
    ) -> None:
        """`layout` is `layout_of` the same configuration, whether chunks are lossy or not. With its
        model's `timings` the server hears how long each layer was computed; without, what its waits
        tell, and on a device, of which they tell nothing, not even that.

        With the `copier` of the model's device, layers are copied there as they arrive, beside what
        it computes; the delivery is then into a target whose pages the copier has locked
        (`Copier.lock_pages`). Without, each is copied while the model waits for it. Raises
        `InvalidRequest` where the delivery has not all of its layers.
        """
        super().__init__(config=config)
        if delivery.layers != range(layout.num_layers) or len(self.layers) != layout.num_layers:
            raise InvalidRequest(
                f"the delivery has the layers {delivery.layers}, the model {len(self.layers)}"
            )
        loads = _DeviceLoads(delivery, copier)
        self.layers = [
            _ArrivingLayer(delivery, index, layout.chunk_tokens, timings, loads)
            for index in range(layout.num_layers)
        ]


class _ArrivingLayer(_DynamicLayer):
    """One layer: the prefix's KV when it has come, and what the model adds to it."""

    def __init__(
        self,
        delivery: Delivery,
        layer: int,
        chunk_tokens: int,
        timings: LayerTimings | None,
        loads: _DeviceLoads,
    ) -> None:
        super().__init__()
        self._loads: _DeviceLoads | None = loads
        self._delivery: Delivery | None = delivery
        self._layer = layer
        self._chunk_tokens = chunk_tokens
        self._timings = timings

    def get_seq_length(self) -> int:
        if self._delivery is not None:
            return self._delivery.chunk_count * self._chunk_tokens
        length: int = super().get_seq_length()
        return length

    def update(
        self, key_states: Any, value_states: Any, *arguments: Any, **more: Any
    ) -> tuple[Any, Any]:
        delivery, self._delivery = self._delivery, None
        timings, self._timings = self._timings, None
        loads, self._loads = self._loads, None
        if delivery is not None and self._layer == delivery.layers.start:
            self._begin(delivery, timings, key_states)
        if timings is not None:
            timings.wait_begins()
        if delivery is not None and delivery.chunk_count and loads is not None:
            self._join(delivery, loads, key_states, value_states)
        else:
            super().update(key_states, value_states, *arguments, **more)
        if delivery is not None and timings is not None:
            timings.wait_ended(self._layer, is_last=self._layer == delivery.layers.stop - 1)
        return self.keys, self.values

    def _begin(self, delivery: Delivery, timings: LayerTimings | None, key_states: Any) -> None:
        if timings is not None:
            before = delivery.chunk_count * self._chunk_tokens
            timings.prefill_begins(delivery, key_states.shape[-2], before)
        elif key_states.device.type != "cpu":
            delivery.report_explicitly()  # the calls run ahead of the device

    def _join(
        self, delivery: Delivery, loads: _DeviceLoads, key_states: Any, value_states: Any
    ) -> None:
        batch, heads, _, width = key_states.shape
        if batch != 1:
            raise InvalidRequest(f"a stored prefix is one sequence, the model was given {batch}")
        payload = loads.layer(self._layer, key_states.device)
        shape = (delivery.chunk_count, 2, self._chunk_tokens, heads, width)
        stored = payload.view(key_states.dtype).view(shape).transpose(2, 3)
        self.lazy_initialization(key_states, value_states)
        self.keys = _joined(stored[:, 0], key_states)
        self.values = _joined(stored[:, 1], value_states)

    def reset(self) -> None:
        self._delivery = self._timings = self._loads = None
        super().reset()


class _DeviceLoads:
    """A delivery's layers where the model computes: uint8[chunk_count, per_layer_chunk_bytes]."""

    def __init__(self, delivery: Delivery, copier: Copier | None) -> None:
        self._delivery = delivery
        self._copier = copier
        self._load: LayerLoad | None = None
        self._payloads: dict[int, Any] = {}  # on the device, until the model has them

    def layer(self, layer: int, device: Any) -> Any:
        """A layer that the current stream may read. Raises what `Delivery.wait_layer` raises."""
        if self._copier is None or device.type == "cpu":
            return _torch.from_numpy(self._delivery.wait_layer(layer)).to(device)
        stream = _torch.cuda.current_stream(device).cuda_stream
        if self._load is None:
            self._load = self._begun(self._copier, device, stream)
        self._load.wait(layer, stream)
        if layer == self._delivery.layers.stop - 1:
            self._load.close()  # the delivery's memory may be another's when the model has run
            self._load = None
        return self._payloads.pop(layer)

    def __del__(self) -> None:
        # A model that raised leaves layers behind. Their memory goes when nothing writes to it any
        # more; whoever collects this, which may be the copier's own thread, does not wait for it.
        if self._load is not None:
            left = (self._load, self._payloads)
            Thread(target=_let_go, args=left, name="objectcache-let-go", daemon=True).start()

    def _begun(self, copier: Copier, device: Any, stream: int) -> LayerLoad:
        slice_bytes = self._delivery.slice_bytes
        shape = (self._delivery.chunk_count, slice_bytes)
        for layer in self._delivery.layers:
            self._payloads[layer] = _torch.empty(shape, dtype=_torch.uint8, device=device)
        blocks = {
            layer: PagedBlocks([BlockPart(each.data_ptr(), slice_bytes, slice_bytes)], shape[0])
            for layer, each in self._payloads.items()
        }
        ids = range(shape[0])
        # The allocator gives memory that the stream may still use: copies come behind that.
        return copier.load(self._delivery, lambda layer, s: blocks[layer].pieces(ids, s), stream)


def _let_go(load: LayerLoad, payloads: dict[int, Any]) -> None:
    load.close()
    payloads.clear()


def _joined(chunks: Any, more: Any) -> Any:
    """(chunk, head, token, dim) and then (1, head, token, dim), in new memory: one copy each."""
    count, heads, tokens, width = chunks.shape
    prefix_tokens = count * tokens
    joined = more.new_empty((1, heads, prefix_tokens + more.shape[-2], width))
    prefix = joined[0, :, :prefix_tokens].unflatten(1, (count, tokens))
    _copy(prefix, chunks.transpose(0, 1))
    joined[:, :, prefix_tokens:].copy_(more)
    return joined


def _copy(target: Any, source: Any) -> None:
    """Copy elements; in memory of the CPU as rows of bytes, which torch does more slowly."""
    if target.device.type == source.device.type == "cpu":
        rows = [tensor.detach().view(_torch.uint8).numpy() for tensor in (target, source)]
        np.copyto(*rows)
    else:
        target.copy_(source)


def chunks_of(
    cache: Any,
    chunk_count: int,
    layout: KvLayout,
    *,
    into: Bytes | None = None,
    copier: Copier | None = None,
) -> Bytes:
    """The first chunks of a cache of one sequence, for `KvBucket.put`: uint8[chunk_count,
    num_layers, per_layer_chunk_bytes], in memory of their own or `into` memory of that shape.

    With the `copier` of the cache's device a layer is put in order there and copied out while the
    next one is; `into` is then memory whose pages the copier has locked, of a target. Raises
    `InvalidRequest` where the cache holds fewer tokens, for memory of another shape, and memory
    that the copier does not reach.
    """
    tokens = chunk_count * layout.chunk_tokens
    if cache.get_seq_length() < tokens:
        raise InvalidRequest(f"the cache holds {cache.get_seq_length()} tokens, not {tokens}")
    shape = (chunk_count, layout.num_layers, layout.per_layer_chunk_bytes)
    chunks = np.empty(shape, np.uint8) if into is None else into
    if chunks.shape != shape:
        raise InvalidRequest(f"chunks have the shape {shape}, the memory {chunks.shape}")
    if copier is not None:
        _save(cache, chunks, layout, copier)
        return chunks
    out = _torch.from_numpy(chunks)
    for index, layer in enumerate(cache.layers):
        _put_in_order(layer, out[:, index], layout)
    return chunks


def _put_in_order(layer: Any, out: Any, layout: KvLayout) -> None:
    """A layer's first tokens into uint8[chunk_count, per_layer_chunk_bytes]."""
    count = len(out)
    tokens = count * layout.chunk_tokens
    for part, states in enumerate((layer.keys, layer.values)):
        _, heads, _, width = states.shape
        place = out.view(states.dtype).view(count, 2, -1, heads, width)
        kept = states[0, :, :tokens].unflatten(1, (count, layout.chunk_tokens))
        _copy(place[:, part], kept.permute(1, 2, 0, 3))


def _save(cache: Any, chunks: Bytes, layout: KvLayout, copier: Copier) -> None:
    """Return when all is in `chunks`; where something has failed, when nothing is on its way."""
    under_way: deque[tuple[BlockSave, Any]] = deque()  # each with its layer in order, on the device
    try:
        for index, layer in enumerate(cache.layers):
            if len(under_way) == _SAVES_AT_ONCE:
                under_way[0][0].wait()
                under_way.popleft()
            device = layer.keys.device
            shape = (len(chunks), layout.per_layer_chunk_bytes)
            ordered = _torch.empty(shape, dtype=_torch.uint8, device=device)
            _put_in_order(layer, ordered, layout)
            part = BlockPart(ordered.data_ptr(), shape[1], shape[1])
            pieces = PagedBlocks([part], len(chunks)).pieces(range(len(chunks)), chunks[:, index])
            under_way.append((copier.save(pieces, _stream_of(device)), ordered))
    finally:
        wait_for_all(save for save, _ in under_way)


def _stream_of(device: Any) -> int | None:
    """The current one; None of a device whose calls return when they are through."""
    if device.type == "cpu":
        return None
    return int(_torch.cuda.current_stream(device).cuda_stream)
