"""Checkpoints: copies of an index as objects of the store.

    checkpoint/<number>-<drawn>/<piece>     of the copy, in order, each as large as the store likes
    checkpoint/<number>-<drawn>/manifest    written last, so that it is there only for a whole one

Numbers in hex; `number` is that of the first record which is not in the copy, and what is drawn
tells tries of one number apart.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from objectcache_schemas.errors import ObjectCacheError, Unavailable
from objectcache_storage_server.engines.disk.system_errors import translated
from objectcache_storage_server.engines.lmdb_spaces.seals import seal, unseal
from objectcache_storage_server.engines.shared.index.index_tables import IndexDamage
from objectcache_storage_server.engines.shared.index.replayed_index import (
    DATA_NAME,
    ReplayedIndex,
)
from objectcache_storage_server.engines.shared.log.writers.own_writer import random_bits
from objectcache_storage_server.engines.stores.shared_store import (
    ObjectRead,
    SharedStore,
    StoredObject,
)

PREFIX = "checkpoint/"
CALL_S = 30.0  # that a put or a read of one piece may take
PIECES_AT_ONCE = 4
_FORMAT_VERSION = 1
_MANIFEST = re.compile(r"checkpoint/([0-9a-f]{16})-[0-9a-f]{16}/manifest")
_PIECE_OF = re.compile(r"(checkpoint/([0-9a-f]{16})-[0-9a-f]{16}/)")


log = logging.getLogger("objectcache.storage_server.engines.shared")


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be used; an older one, or the log, may do."""


class CheckpointManifest(msgspec.Struct, frozen=True):
    """What a checkpoint consists of."""

    format_version: int
    store_id: bytes
    number: int  # of the first record that is not in it
    pieces: list[tuple[int, int]]  # bytes and xxh3_64 of each

    @property
    def size_bytes(self) -> int:
        """Of the whole copy."""
        return sum(size_bytes for size_bytes, _ in self.pieces)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(CheckpointManifest).decode


def manifest_names(store: SharedStore, deadline_s: float) -> list[str]:
    """The manifests that are there, newest first. Raises `StoreTimeout`, `Unavailable`."""
    names = [each.name for each in store.list_objects(PREFIX, deadline_s)]
    return sorted((name for name in names if _MANIFEST.fullmatch(name)), reverse=True)


def checkpoint_number(name: str) -> int:
    """Of a manifest: the number of the first record that is not in the checkpoint."""
    found = _MANIFEST.fullmatch(name)
    assert found, name
    return int(found[1], 16)


def objects_before(
    store: SharedStore, number: int, newest: int, deadline_s: float
) -> list[StoredObject]:
    """Objects of checkpoints that are older than this number; of those without a manifest, that are
    older than the newest one: a later one may be on its way, by who holds the lease by now.
    """
    there = list(store.list_objects(PREFIX, deadline_s))
    manifests = [each.name for each in there if _MANIFEST.fullmatch(each.name)]
    whole = {name.removesuffix("manifest") for name in manifests}
    old: list[StoredObject] = []
    for each in there:
        found = _PIECE_OF.match(each.name)
        if found and int(found[2], 16) < (number if found[1] in whole else newest):
            old.append(each)
    return sorted(old, key=lambda each: not each.name.endswith("/manifest"))  # manifests go first


def write_checkpoint(
    store: SharedStore, index: ReplayedIndex, *, is_reserved: bool = False
) -> tuple[CheckpointManifest, list[str]]:
    """Copy the index into the store; returns what the checkpoint consists of, and the names of its
    objects. `is_reserved`: it may take of the space that is held back for records.

    Raises `IndexDamage`, `StorageFull`, `StoreTimeout`, `Unavailable`; what was put is then removed
    as far as the store allows.
    """
    with index.reading() as view:
        view.check_versions()  # damage is not to be copied to other servers
    put_one = store.put_from_reserve if is_reserved else store.put
    names: list[str] = []

    def put(name: str, piece: bytes) -> None:
        put_one(name, [memoryview(piece)], time.monotonic() + CALL_S)

    try:
        with index.copying(store.capabilities.object_bytes_max) as (state, pieces):
            head = f"{PREFIX}{state.end:016x}-{random_bits(64):016x}/"
            described: list[tuple[int, int]] = []
            with _SomeAtOnce(min(PIECES_AT_ONCE, store.capabilities.put_depth)) as puts:
                for place, piece in enumerate(pieces):
                    described.append((len(piece), xxhash.xxh3_64_intdigest(piece)))
                    names.append(f"{head}{place:x}")
                    puts.submit(put, names[-1], piece)
        manifest = CheckpointManifest(_FORMAT_VERSION, state.store_id, state.end, described)
        names.append(f"{head}manifest")
        put(names[-1], seal(_encode(manifest), state.end))
    except BaseException:
        remove_copy(store, names)
        raise
    return manifest, names


def remove_copy(store: SharedStore, names: list[str]) -> None:
    """Remove the objects of a checkpoint that no record names, its manifest first. What the store
    does not remove is a leftover until another checkpoint counts.
    """
    try:
        store.delete(reversed(names), time.monotonic() + CALL_S)
    except ObjectCacheError as error:
        log.warning("a checkpoint that does not count was not removed: %s", error)


def read_manifest(store: SharedStore, name: str, store_id: bytes) -> CheckpointManifest:
    """Raises `DamagedCheckpoint`, `LostObject`, `StoreTimeout`, `Unavailable`."""
    number = checkpoint_number(name)
    body = unseal(store.get(name, time.monotonic() + CALL_S), number)
    if body is None:
        raise DamagedCheckpoint(f"{name} does not match its checksum")
    try:
        manifest = _decode(body)
    except msgspec.MsgspecError as error:
        raise DamagedCheckpoint(f"{name}: {error}") from error
    if manifest.format_version != _FORMAT_VERSION or manifest.number != number:
        raise DamagedCheckpoint(f"{name} has format {manifest.format_version}")
    if manifest.store_id != store_id:
        raise DamagedCheckpoint(f"{name} is of the store {manifest.store_id.hex()}")
    return manifest


def read_checkpoint(
    store: SharedStore, name: str, store_id: bytes, folder: Path, bytes_max: int
) -> ReplayedIndex:
    """Make an index in an empty folder of the checkpoint with this manifest.

    Raises `DamagedCheckpoint`, `LostObject`, `StorageFull`, `StoreTimeout`, `Unavailable`.
    """
    manifest = read_manifest(store, name, store_id)
    if manifest.size_bytes > bytes_max:
        raise Unavailable(
            f"the index has {manifest.size_bytes} bytes, and storage.index_bytes_max is "
            f"{bytes_max}: raise the setting"
        )
    _read_pieces(store, name.removesuffix("manifest"), manifest, folder / DATA_NAME)
    try:
        index = ReplayedIndex(folder, bytes_max)
    except IndexDamage as damage:
        raise DamagedCheckpoint(f"{name}: {damage}") from damage
    try:
        with index.reading() as view:
            if (view.state.store_id, view.state.end) != (store_id, manifest.number):
                raise DamagedCheckpoint(f"{name} is of another moment than its name says")
    except IndexDamage as damage:
        index.close()
        raise DamagedCheckpoint(f"{name}: {damage}") from damage
    except BaseException:
        index.close()
        raise
    index.origin = name
    return index


def _read_pieces(store: SharedStore, head: str, manifest: CheckpointManifest, path: Path) -> None:
    with translated("make an index of a checkpoint", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, manifest.size_bytes)
            mapped = mmap.mmap(descriptor, manifest.size_bytes)
        finally:
            os.close(descriptor)
    with mapped, memoryview(mapped) as memory, _SomeAtOnce(PIECES_AT_ONCE) as reads:
        begin = 0
        for place, (size_bytes, checksum) in enumerate(manifest.pieces):
            landing = memory[begin : begin + size_bytes]
            reads.submit(_read_piece, store, f"{head}{place:x}", landing, checksum)
            begin += size_bytes


def check_checkpoint(store: SharedStore, name: str, store_id: bytes) -> None:
    """Read a whole checkpoint. Raises `DamagedCheckpoint`, `LostObject`, `StoreTimeout`,
    `Unavailable`.
    """
    manifest = read_manifest(store, name, store_id)
    head = name.removesuffix("manifest")
    with _SomeAtOnce(PIECES_AT_ONCE) as reads:
        for place, (size_bytes, checksum) in enumerate(manifest.pieces):
            landing = memoryview(bytearray(size_bytes))
            reads.submit(_read_piece, store, f"{head}{place:x}", landing, checksum)


def _read_piece(store: SharedStore, name: str, landing: memoryview, checksum: int) -> None:
    with landing:
        store.begin_reads([ObjectRead(name, 0, landing)], time.monotonic() + CALL_S).result()
        if xxhash.xxh3_64_intdigest(landing) != checksum:
            raise DamagedCheckpoint(f"{name} does not match its checksum")


class _SomeAtOnce:
    """Runs calls in threads, a few at a time; whoever submits waits for room. What one raises is
    raised by the next `submit`, or at the block's end when all have ended.
    """

    def __init__(self, count: int) -> None:
        self._count = max(count, 1)
        self._executor = ThreadPoolExecutor(self._count, "checkpoint")
        self._under_way: deque[Future[None]] = deque()

    def __enter__(self) -> _SomeAtOnce:
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=error[0] is not None)
        if error[0] is None:
            for call in self._under_way:
                call.result()

    def submit(self, call: Callable[..., None], *arguments: object) -> None:
        while len(self._under_way) >= 2 * self._count:
            self._under_way.popleft().result()
        self._under_way.append(self._executor.submit(call, *arguments))
