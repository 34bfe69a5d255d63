"""Extents as arithmetic: how many slots one has, and which objects it is cut into. Pure."""

from __future__ import annotations

from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.base import PrefixShape
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.engines.shared.versions import ExtentShape

SLOTS_MAX = 64  # of one extent, whose space comes free when its last chunk goes
EXTENT_BYTES_MAX = 128 * MIB  # of several slots, of a put that comes chunkwise
LAYERS_BYTES_MAX = 64 * MIB  # that a put gathers where objects hold several layers


def cut_prefix(
    shape: PrefixShape, object_bytes_max: int, buffer_bytes_max: int
) -> list[ExtentShape]:
    """Extents for the chunks of one put, in prefix order: full ones, and one for the rest.

    `buffer_bytes_max` is what the put may have of memory.
    """
    slots = min(SLOTS_MAX, max(1, object_bytes_max // shape.slice_bytes), len(shape.keys))
    if not shape.layerwise:  # an extent is gathered as a whole
        fitting = min(EXTENT_BYTES_MAX, buffer_bytes_max) // shape.chunk_bytes
        slots = min(slots, max(1, fitting))
    whole, rest = divmod(len(shape.keys), slots)
    extent_count = whole + (rest > 0)
    layers_bytes_max = object_bytes_max
    if shape.layerwise and extent_count > 1:  # one object of each is gathered at a time
        layers_bytes_max = min(LAYERS_BYTES_MAX, buffer_bytes_max) // (extent_count + 1)
    return [
        _shape(each, shape, object_bytes_max, layers_bytes_max)
        for each in [slots] * whole + [rest] * (rest > 0)
    ]


def _shape(
    slots: int, shape: PrefixShape, object_bytes_max: int, layers_bytes_max: int
) -> ExtentShape:
    row_bytes = slots * shape.slice_bytes
    if row_bytes > object_bytes_max:
        object_bytes = cut_object(slice_block_bytes(shape.slice_bytes), object_bytes_max)
    else:
        layers = max(1, min(object_bytes_max, layers_bytes_max) // row_bytes)
        object_bytes = min(layers, shape.num_layers) * row_bytes
    return ExtentShape(slots, shape.num_layers, shape.slice_bytes, object_bytes)


def cut_object(block_bytes: int, object_bytes_max: int) -> int:
    """Bytes of the store's objects for an object on its own: whole blocks, where one fits."""
    return object_bytes_max // block_bytes * block_bytes or object_bytes_max
