"""How much of a prefix is stored; its chunks opened: all of them, or the longest stored part."""

from __future__ import annotations

from collections.abc import Sequence

from objectcache_schemas.descriptor import Descriptor, OnMissing
from objectcache_schemas.errors import InvalidRequest, NotFound
from objectcache_schemas.messages.kv import KvGet, KvMatch, Matched
from objectcache_schemas.records import ObjectInfo
from objectcache_storage_server.deliveries.get_means import GetMeans
from objectcache_storage_server.engines.base import Engine, OpenObjects
from objectcache_storage_server.scheduling.windows.find_windows import Window


def match_prefix(engine: Engine, request: KvMatch) -> Matched:
    """`KvMatch`."""
    matched = engine.match(request.bucket, request.chunk_keys)
    layout = engine.bucket(request.bucket).layout
    return Matched(matched=matched, chunk_tokens=layout.chunk_tokens if layout else 0)


def open_prefix(
    means: GetMeans, request: KvGet, descriptor: Descriptor
) -> tuple[OpenObjects, Window]:
    """Open the chunks that will be delivered, and find how long a layer of them is computed.

    Raises for the first chunk that is missing or misfit.
    """
    layout = means.calls.engine.bucket(request.bucket).layout
    if layout is not None:
        descriptor.check_layout(layout)
    opened = _open_stored(means, request.bucket, descriptor)
    try:
        window = means.windows.find(
            descriptor,
            request.bucket,
            request.identity,
            layout.fingerprint if layout else "",
            len(opened.infos),
        )
    except BaseException:
        opened.close()
        raise
    return opened, window


def _open_stored(means: GetMeans, bucket: str, descriptor: Descriptor) -> OpenObjects:
    opened = means.calls.engine.open_many(bucket, descriptor.chunk_keys, are_prefix=True)
    try:
        stored = _stored_prefix(opened.infos)
        if stored == len(opened.infos):
            _check_sizes(opened.infos, descriptor)
            return opened
        if stored == 0 or descriptor.on_missing is OnMissing.FAIL:
            key = descriptor.chunk_keys[stored]
            raise NotFound(
                f"chunk_keys[{stored}] ({key!r}) is not stored", missing_index=stored, key=key
            )
    except BaseException:
        opened.close()
        raise
    opened.close()
    shorter = means.calls.engine.open_many(bucket, descriptor.chunk_keys[:stored], are_prefix=True)
    if _stored_prefix(shorter.infos) < stored:  # deleted in between
        shorter.close()
        raise NotFound(f"chunk_keys[{stored - 1}] is not stored", missing_index=stored - 1)
    try:
        _check_sizes(shorter.infos, descriptor)
    except BaseException:
        shorter.close()
        raise
    return shorter


def _stored_prefix(infos: Sequence[ObjectInfo | None]) -> int:
    return next((index for index, info in enumerate(infos) if info is None), len(infos))


def _check_sizes(infos: Sequence[ObjectInfo | None], descriptor: Descriptor) -> None:
    for index, info in enumerate(infos):
        if info is not None and info.size_bytes != descriptor.chunk_bytes:
            raise InvalidRequest(
                f"chunk_keys[{index}] ({info.key!r}) holds {info.size_bytes} bytes, num_layers x "
                f"per_layer_chunk_bytes is {descriptor.chunk_bytes}",
                code="DescriptorMismatch",
                key=info.key,
            )
