"""What the engines' tests share: how to put and read objects, and bytes that follow from a seed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.records import BucketInfo, Condition, ObjectAttributes
from objectcache_storage_server.engines.base import (
    ALWAYS,
    CHECKSUM_BLOCK_BYTES,
    NO_ATTRIBUTES,
    Committed,
    Engine,
    OpenObjects,
    StagedPut,
)

BUCKET = BucketInfo(name="bucket", owner="root", region="us-east-1", created_s=1_700_000_000.0)
LAYOUT = KvLayout(
    num_layers=4, chunk_tokens=16, per_layer_chunk_bytes=1024, dtype="bf16", fingerprint="test"
)
FEW_VALUES = bytes(byte & 15 for byte in range(256))
ODD_KEYS = (
    "a//b",
    "..",
    "../../etc/passwd",
    "/",
    "%2F",
    " leading and trailing ",
    "a\\b'\"; DROP TABLE objects; --",
    "*?[a-z]",
    "tab\tand\nnewline\r",
    "\u00e9",  # composed
    "e\u0301",  # decomposed: another key
    "\U0001f9ca",
    "\ud7ff",  # last before the surrogates
    "\ue000",  # first after them
    "\uffff",
    "\U0010ffff",
    "\U0010ffff\U0010ffff",
    "\x7f",
    "A",
    "a",
    "k" * 1024,
    "\U0001f9ca" * 256,
)


@contextmanager
def opened_engine(open_engine: Callable[[Path], Engine], folder: Path) -> Generator[Engine]:
    """A new store below `folder` with `BUCKET` in it. Its files are gone afterwards; its folders
    are there for the next one, because an engine may make hundreds when it has none.
    """
    try:
        engine = open_engine(folder)
        try:
            engine.create_bucket(BUCKET)
            yield engine
        finally:
            engine.close()
    finally:
        for path, _, files in os.walk(folder):
            for name in files:
                os.unlink(os.path.join(path, name))


def content(seed: object, size_bytes: int) -> bytes:
    """Bytes that follow from the seed: of half of the seeds, numbers of two bytes whose higher one
    has few values, so that their slices can be encoded.
    """
    data = bytearray(random.Random(repr(seed)).randbytes(size_bytes))
    if data and data[0] % 2:
        data[1::2] = data[1::2].translate(FEW_VALUES)
    return bytes(data)


def staged_put(
    engine: Engine,
    key: str,
    data: bytes,
    *,
    bucket: str = BUCKET.name,
    block_bytes: int = CHECKSUM_BLOCK_BYTES,
    etag: str = "etag",
    attributes: ObjectAttributes = NO_ATTRIBUTES,
) -> StagedPut:
    """Stage `data` in one write; what cannot be written is discarded."""
    staged = engine.stage(bucket, key, block_bytes)
    try:
        staged.write_at(0, memoryview(data))
    except ObjectCacheError:
        staged.discard()
        raise
    return StagedPut(staged, etag, attributes)


def put(
    engine: Engine,
    key: str,
    data: bytes,
    condition: Condition = ALWAYS,
    *,
    bucket: str = BUCKET.name,
    block_bytes: int = CHECKSUM_BLOCK_BYTES,
    etag: str = "etag",
    attributes: ObjectAttributes = NO_ATTRIBUTES,
) -> Committed:
    """Store one object."""
    staged = staged_put(
        engine,
        key,
        data,
        bucket=bucket,
        block_bytes=block_bytes,
        etag=etag,
        attributes=attributes,
    )
    (committed,) = engine.commit([staged], condition)
    return committed


def put_batch(
    engine: Engine, objects: Mapping[str, bytes], condition: Condition = ALWAYS
) -> list[Committed]:
    """Store several objects in one commit."""
    puts = [staged_put(engine, key, data) for key, data in objects.items()]
    return engine.commit(puts, condition)


def read_range(opened: OpenObjects, index: int, offset_bytes: int, length_bytes: int) -> bytes:
    """A range of an open object."""
    buffer = bytearray(length_bytes)
    opened.read_into(index, offset_bytes, memoryview(buffer))
    return bytes(buffer)


def read(engine: Engine, key: str, bucket: str = BUCKET.name) -> bytes | None:
    """A whole object, None where nothing is stored."""
    with engine.open_many(bucket, [key]) as opened:
        info = opened.infos[0]
        return None if info is None else read_range(opened, 0, 0, info.size_bytes)


def stored_keys(engine: Engine, bucket: str = BUCKET.name) -> list[str]:
    """All keys, as a scan lists them in pages of 7."""
    keys: list[str] = []
    while page := engine.scan(bucket, "", keys[-1] if keys else "", 7):
        keys.extend(info.key for info in page)
    return keys
