"""What a store is put through: random operations that follow from a seed, and the bytes they store.

Every object's bytes follow from its key, its ETag and its size, so whoever reads it knows what it
must hold. Plain objects belong to one thread each and are overwritten and deleted; chunks are
immutable and all threads put them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import KIB
from objectcache_schemas.records import BucketInfo, BucketPolicy, Durability
from objectcache_storage_server.engines.base import PrefixShape
from tests.contract.engine_suite import content

THREADS = 3
KEYS_OF_THREAD = 10  # few, so that most puts overwrite
CHAIN_LENGTH = 40
CHAINS = 5
CHUNK_ETAG = "chunk"
SIZES = [0, 1, 511, 4096, 5000, 65_536, 65_537, 200_000]
PLAIN, LOOSE, LAID_OUT, ASYNC = "plain", "loose", "laid-out", "async"


class Value(NamedTuple):
    """What is stored under a key."""

    etag: str
    size_bytes: int

    def bytes_of(self, key: str) -> bytes:
        """The object itself."""
        return _bytes_of(key, self)


@functools.lru_cache(4096)
def _bytes_of(key: str, value: Value) -> bytes:
    return content((key, value.etag), value.size_bytes)


class Put(msgspec.Struct, frozen=True, tag=True):
    """Objects of one commit, each staged on its own."""

    bucket: str
    values: dict[str, Value]


class PutPrefix(msgspec.Struct, frozen=True, tag=True):
    """Chunks of one immutable put, through `Engine.stage_prefix`."""

    bucket: str
    values: dict[str, Value]
    num_layers: int
    slice_bytes: int
    layerwise: bool
    parent_key: str | None
    pieces: int  # about, in which the payload is written

    @property
    def shape(self) -> PrefixShape:
        """What the engine is told."""
        return PrefixShape(
            list(self.values), self.num_layers, self.slice_bytes, self.layerwise, self.parent_key
        )


class PutFrames(PutPrefix, frozen=True, tag=True):
    """Such a put whose layers come as frames, in pieces that end anywhere."""

    @property
    def layers(self) -> npt.NDArray[np.uint8]:
        """Its slices, uint8[num_layers, chunks, slice_bytes]."""
        chunks = b"".join(value.bytes_of(key) for key, value in self.values.items())
        slices = np.frombuffer(chunks, np.uint8)
        return slices.reshape(len(self.values), self.num_layers, -1).swapaxes(0, 1)


class Delete(msgspec.Struct, frozen=True, tag=True):
    """One call of `Engine.delete`."""

    bucket: str
    keys: list[str]


class Get(msgspec.Struct, frozen=True, tag=True):
    """Objects that are opened together and read."""

    bucket: str
    keys: list[str]
    are_prefix: bool


Operation = Put | PutPrefix | PutFrames | Delete | Get
WRITES = {"Put", "PutPrefix", "PutFrames", "Delete"}  # what an operation that changes a store is


class Chunks(NamedTuple):
    """Chunks of one geometry in one bucket."""

    bucket: str
    num_layers: int
    slice_bytes: int

    @property
    def layout(self) -> KvLayout:
        """The layout that the bucket may have."""
        return KvLayout(
            num_layers=self.num_layers,
            chunk_tokens=16,
            per_layer_chunk_bytes=self.slice_bytes,
            dtype="bf16",
            fingerprint=self.bucket,
        )

    def key(self, chain: int, position: int) -> str:
        """The chunk at a position of a chain."""
        return f"chain {self.slice_bytes} {chain}/{position:04}"

    @property
    def value(self) -> Value:
        """What every chunk is."""
        return Value(CHUNK_ETAG, self.num_layers * self.slice_bytes)


KINDS_OF_CHUNKS = [
    Chunks(LOOSE, 2, 1000),  # slices of no whole sectors
    Chunks(LOOSE, 3, 18 * KIB),  # several checksum blocks of no power of two
    Chunks(LAID_OUT, 3, 4 * KIB),
]


def parent_of(key: str) -> str | None:
    """The chunk before a chunk; None for a first one, and for what is no chunk."""
    chain, slash, position = key.rpartition("/")
    if not key.startswith("chain ") or not slash or int(position) == 0:
        return None
    return f"{chain}/{int(position) - 1:04}"


def is_chunk(key: str) -> bool:
    """Whether an engine may evict it."""
    return key.startswith("chain ")


def buckets(has_async: bool) -> list[BucketInfo]:
    """The buckets of a store."""
    laid_out = KINDS_OF_CHUNKS[-1]
    return [
        _bucket(PLAIN),
        _bucket(LOOSE),
        msgspec.structs.replace(_bucket(LAID_OUT), layout=laid_out.layout),
        *([_bucket(ASYNC, BucketPolicy(durability=Durability.ASYNC))] if has_async else []),
    ]


def _bucket(name: str, policy: BucketPolicy | None = None) -> BucketInfo:
    return BucketInfo(
        name=name, owner="root", region="", created_s=1.0, policy=policy or BucketPolicy()
    )


def operations(seed: int, thread: int, *, evicts: bool, has_async: bool) -> Iterator[Operation]:
    """An endless run of operations of one thread."""
    workload = _Workload(random.Random(f"{seed} {thread}"), f"{seed}.{thread}", thread)
    while True:
        yield workload.next_operation(evicts=evicts, has_async=has_async)


class _Workload:
    def __init__(self, rng: random.Random, name: str, thread: int) -> None:
        self._rng = rng
        self._name = name
        self._keys = [f"object {thread} {number}" for number in range(KEYS_OF_THREAD)]
        self._put_count = 0

    def next_operation(self, *, evicts: bool, has_async: bool) -> Operation:
        rng = self._rng
        plain = rng.choice([PLAIN, ASYNC]) if has_async else PLAIN
        turn = rng.random()
        if turn < 0.25:
            return self._put(plain)
        if turn < 0.6:
            return self._put_prefix(rng.choice(KINDS_OF_CHUNKS), from_start=evicts)
        if turn < 0.7:
            return Delete(plain, self._some_keys())
        if turn < 0.75 and not evicts:
            return self._delete_chunks(rng.choice(KINDS_OF_CHUNKS))
        if turn < 0.85:
            return Get(plain, self._some_keys(), are_prefix=False)
        return self._get_prefix(rng.choice(KINDS_OF_CHUNKS))

    def _some_keys(self) -> list[str]:
        return self._rng.sample(self._keys, self._rng.choice([1, 1, 2, 6]))

    def _put(self, bucket: str) -> Put:
        self._put_count += 1
        etag = f"{self._name}.{self._put_count}"
        return Put(bucket, {key: Value(etag, self._rng.choice(SIZES)) for key in self._some_keys()})

    def _range(self, chunks: Chunks, *, from_start: bool) -> tuple[list[str], str | None]:
        rng = self._rng
        chain = rng.randrange(CHAINS)
        begin = 0 if from_start or rng.random() < 0.5 else rng.randrange(CHAIN_LENGTH - 1)
        end = min(CHAIN_LENGTH, begin + rng.choice([1, 2, 5, 17, CHAIN_LENGTH]))
        parent_key = chunks.key(chain, begin - 1) if begin else None
        return [chunks.key(chain, position) for position in range(begin, end)], parent_key

    def _put_prefix(self, chunks: Chunks, *, from_start: bool) -> PutPrefix:
        keys, parent_key = self._range(chunks, from_start=from_start)
        kind = self._rng.choice([PutPrefix, PutPrefix, PutFrames])
        return kind(
            chunks.bucket,
            dict.fromkeys(keys, chunks.value),
            chunks.num_layers,
            chunks.slice_bytes,
            layerwise=kind is PutFrames or self._rng.random() < 0.5,
            parent_key=parent_key,
            pieces=self._rng.choice([1, 2, 7]),
        )

    def _delete_chunks(self, chunks: Chunks) -> Delete:
        keys, _ = self._range(chunks, from_start=False)
        return Delete(chunks.bucket, keys)

    def _get_prefix(self, chunks: Chunks) -> Get:
        keys, _ = self._range(chunks, from_start=True)
        return Get(chunks.bucket, keys, are_prefix=True)
