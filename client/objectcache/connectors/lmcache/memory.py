"""LMCache's memory objects as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from objectcache.connectors.lmcache.geometry import ChunkGeometry
from objectcache.payload import Bytes


def bytes_of(memory_obj: Any) -> Bytes:
    """The object's memory, without a copy: uint8[logical size]. The object keeps it."""
    return np.frombuffer(memory_obj.byte_array, np.uint8)


def geometry_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> ChunkGeometry:
    """The geometry of chunks whose groups of layers have these shapes and torch dtypes."""
    return ChunkGeometry.of(shapes, [dtype.itemsize for dtype in dtypes])


def geometry_of_object(memory_obj: Any) -> ChunkGeometry:
    """The geometry of the chunk that an object holds."""
    meta = memory_obj.metadata
    if meta.shapes and meta.dtypes:
        return geometry_of(meta.shapes, meta.dtypes)
    return geometry_of([meta.shape], [meta.dtype])


def dtypes_name(dtypes: Sequence[Any]) -> str:
    """How keys name the dtypes of a chunk's groups."""
    return ",".join(str(dtype) for dtype in dtypes)


def dtypes_name_of_object(memory_obj: Any) -> str:
    """How keys name the dtypes of the chunk that an object holds."""
    meta = memory_obj.metadata
    return dtypes_name(meta.dtypes or [meta.dtype])
