"""One operation of the workload, done to an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from objectcache_schemas.errors import DamagedData
from objectcache_schemas.records import Condition, ObjectInfo
from objectcache_storage_server.engines.base import (
    Engine,
    OpenObjects,
    Read,
    StagedPrefix,
    StagedPut,
)
from objectcache_storage_server.puts.encoded_payload import EncodedPayload
from tests.contract.engine_suite import read_range, staged_put
from tests.crash.workload import Delete, Get, Operation, Put, PutFrames, PutPrefix, Value
from tests.unit.encodings.put_payloads import put_payload_of

IMMUTABLE = Condition(immutable=True)
BLOCK_BYTES = 65_536


def act(engine: Engine, operation: Operation) -> list[str]:
    """Do it; returns what was read and is wrong. Raises the engine's errors."""
    match operation:
        case Put():
            _put(engine, operation)
        case PutPrefix():
            _put_prefix(engine, operation)
        case Delete():
            engine.delete(operation.bucket, operation.keys)
        case Get():
            return wrong_bytes(
                engine, operation.bucket, operation.keys, are_prefix=operation.are_prefix
            )
    return []


def _put(engine: Engine, put: Put) -> None:
    staged: list[StagedPut] = []
    try:
        for key, value in put.values.items():
            data = value.bytes_of(key)
            staged.append(staged_put(engine, key, data, bucket=put.bucket, etag=value.etag))
    except BaseException:
        for each in staged:
            each.staged.discard()
        raise
    engine.commit(staged)


def _put_prefix(engine: Engine, put: PutPrefix) -> None:
    prefix = engine.stage_prefix(put.bucket, put.shape)
    try:
        if isinstance(put, PutFrames):
            _write_frames(prefix, put)
        else:
            _write(prefix, put)
    except BaseException:
        prefix.discard()
        raise
    etags = [value.etag for value in put.values.values()]
    puts = [StagedPut(staged, etag) for staged, etag in zip(prefix.staged, etags, strict=True)]
    engine.commit(puts, IMMUTABLE)


def _write(prefix: StagedPrefix, put: PutPrefix) -> None:
    payload = memoryview(payload_of(put.values, put.num_layers, layerwise=put.layerwise))
    slice_count = len(payload) // put.slice_bytes
    piece_bytes = -(-slice_count // put.pieces) * put.slice_bytes
    for position in range(0, len(payload), piece_bytes):
        prefix.write(position, payload[position : position + piece_bytes])


def _write_frames(prefix: StagedPrefix, put: PutFrames) -> None:
    payload = memoryview(put_payload_of(np.ascontiguousarray(put.layers)))
    sink = EncodedPayload(prefix, replace(put.shape, encoded_bytes=len(payload)), copies=False)
    piece_bytes = -(-len(payload) // put.pieces)
    for position in range(0, len(payload), piece_bytes):
        sink.write(position, payload[position : position + piece_bytes])


def payload_of(values: Mapping[str, Value], num_layers: int, *, layerwise: bool) -> bytes:
    """The body of a put: chunk after chunk, or layer after layer."""
    chunkwise = b"".join(value.bytes_of(key) for key, value in values.items())
    if not layerwise:
        return chunkwise
    slices = np.frombuffer(chunkwise, np.uint8).reshape(len(values), num_layers, -1)
    return slices.swapaxes(0, 1).tobytes()


def wrong_bytes(
    engine: Engine, bucket: str, keys: Sequence[str], *, are_prefix: bool = False
) -> list[str]:
    """Read what is stored of `keys`; returns in words what is not as its ETag says."""
    while True:
        with engine.open_many(bucket, keys, are_prefix=are_prefix) as opened:
            stored = [info.key for info in opened.infos if info is not None]
            if len(stored) == len(keys):  # else others may be deleted before the next turn
                return _wrong_objects(opened, [info for info in opened.infos if info is not None])
        keys = stored


def _wrong_objects(opened: OpenObjects, infos: Sequence[ObjectInfo]) -> list[str]:
    """Read all of them together; each on its own, to say which one, where that goes wrong."""
    reads: list[Read] = []
    landing_bytes = 0
    for place, info in zip(opened.placements(), infos, strict=True):
        for begin_bytes, length_bytes in place.runs(0, info.size_bytes):
            reads.append(Read(place.source, begin_bytes, length_bytes, landing_bytes))
            landing_bytes += length_bytes
    buffer = bytearray(landing_bytes)
    together = "is not as the ETags say"
    try:
        opened.read_many(reads, memoryview(buffer))
        if buffer == b"".join(_bytes_of(info) for info in infos):
            return []
    except DamagedData as error:
        together = f"cannot be read: {error}"
    wrong = [
        wrong
        for index, info in enumerate(infos)
        for wrong in _wrong_object(opened, index, info.key, info)
    ]
    return wrong or [f"what {[info.key for info in infos]} hold, read together, {together}"]


def _bytes_of(info: ObjectInfo) -> bytes:
    return Value(info.etag, info.size_bytes).bytes_of(info.key)


def _wrong_object(opened: OpenObjects, index: int, key: str, info: ObjectInfo) -> list[str]:
    expected = _bytes_of(info)
    try:
        found = read_range(opened, index, 0, info.size_bytes)
    except DamagedData as error:
        return [f"{key!r} with ETag {info.etag} cannot be read: {error}"]
    if found == expected:
        return []
    first = next(at for at in range(len(found)) if found[at] != expected[at])
    return [f"{key!r} with ETag {info.etag} is wrong from byte {first} of {len(found)} on"]
