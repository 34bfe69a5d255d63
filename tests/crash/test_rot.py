"""Bytes that rot on the device are found when they are read, and never delivered."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from objectcache_schemas.errors import DamagedData
from objectcache_schemas.limits import GIB, KIB
from objectcache_storage_server.engines.base import PrefixShape, StagedPut
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.records import Version
from objectcache_storage_server.engines.local.space.extent_geometry import EncodedRows, Geometry
from tests.contract.engine_suite import BUCKET, content, put, read, stored_keys
from tests.contract.opened_engines.local_engines import EncodingLocalEngine
from tests.crash.settings import SEED, TIMES
from tests.crash.stores import SMALL_LOCAL, StoreKind, settings_of

ROUNDS = 24 * TIMES
RESIDENCIES = {
    name: StoreKind(
        settings_of(
            SMALL_LOCAL | {"page_cache_bytes": page_cache_bytes, "compaction_bytes_per_s": 0}
        ),
        engine=engine,
    )
    for name, page_cache_bytes, engine in (
        ("page cache", 1 * GIB, LocalEngine),
        ("direct", 0, LocalEngine),
        ("encoded, page cache", 1 * GIB, EncodingLocalEngine),
        ("encoded, direct", 0, EncodingLocalEngine),
    )
}
# Layers and slice bytes of chunks; of the last each has an extent of its own.
SHAPES = [(2, 1000), (3, 18 * KIB), (2, 4 * KIB), (2, 33 * KIB)]
CHUNKS = 5
SIZES = [1, 5000, 65_537, 1_500_000]  # of plain objects; the last lies in several runs
Ranges = list[tuple[int, int]]  # (begin, end) in the volume


def open_store(folder: Path, residency: str) -> LocalEngine:
    return cast(LocalEngine, RESIDENCIES[residency].open(folder))


def fill(engine: LocalEngine) -> dict[str, bytes]:
    """Put what is not stored; returns everything."""
    stored: dict[str, bytes] = {}
    for size_bytes in SIZES:
        key = f"object {size_bytes}"
        stored[key] = content(key, size_bytes)
        if read(engine, key) is None:
            put(engine, key, stored[key])
    for num_layers, slice_bytes in SHAPES:
        keys = [f"chunk {slice_bytes} {number}" for number in range(CHUNKS)]
        shape = PrefixShape(keys, num_layers, slice_bytes, layerwise=False)
        chunks = {key: content(key, shape.chunk_bytes) for key in keys}
        stored |= chunks
        if engine.match(BUCKET.name, keys) < len(keys):
            prefix = engine.stage_prefix(BUCKET.name, shape)
            prefix.write(0, memoryview(b"".join(chunks.values())))
            engine.commit([StagedPut(staged, "etag") for staged in prefix.staged])
    return stored


def live_ranges(engine: LocalEngine) -> dict[str, Ranges]:
    """Where each object's bytes lie in the volume."""
    with engine.index.reading() as view:
        versions = view.every_version(None, 10_000)
    rows = engine.holdings.extents.rows
    pitches = engine.holdings.pitches
    return {
        version.info.key: list(
            _ranges(
                version,
                [rows[number] for number in version.extents],
                pitches.get(version.extents[0]),
            )
        )
        for version in versions
    }


def _ranges(
    version: Version, extents: list[np.void], pitches: tuple[int, ...] | None
) -> Iterator[tuple[int, int]]:
    first = extents[0]
    if pitches is not None:
        frames = EncodedRows.of(int(first["slots"]), pitches)
        for layer, pitch in enumerate(pitches):
            begin = int(first["offset_bytes"]) + frames.row_offset_bytes(layer)
            yield begin + version.slot * pitch, begin + (version.slot + 1) * pitch
        return
    if first["slots"] > 1:
        geometry = Geometry(*(int(first[name]) for name in ("slots", "num_layers", "slice_bytes")))
        for layer in range(geometry.num_layers):
            begin = int(first["offset_bytes"]) + geometry.slice_offset_bytes(version.slot, layer)
            yield begin, begin + geometry.slice_bytes
        return
    left_bytes = version.info.size_bytes
    for extent in extents:
        begin, length_bytes = int(extent["offset_bytes"]), int(extent["length_bytes"])
        usable_bytes = length_bytes - length_bytes % version.block_bytes
        taken_bytes = left_bytes if extent is extents[-1] else usable_bytes
        yield begin, begin + taken_bytes
        left_bytes -= taken_bytes


class Harm:
    """Damages the data files of a store behind its back."""

    def __init__(self, data: Path, segment_bytes: int, rng: random.Random) -> None:
        self._data = data
        self._segment_bytes = segment_bytes
        self._rng = rng

    def at(self, offset_bytes: int) -> tuple[int, int]:
        """Damage the device somewhere around an address; returns the range that has changed."""
        kind = self._rng.choice(["bit", "sector", "page"])
        unit_bytes = {"bit": 1, "sector": 512, "page": 4096}[kind]
        begin = offset_bytes - offset_bytes % unit_bytes
        old = self._change(begin, unit_bytes, None)
        match kind:
            case "bit":
                new = bytes([old[0] ^ 1 << self._rng.randrange(8)])
            case "sector":
                new = self._rng.randbytes(unit_bytes)
            case _:
                new = bytes(unit_bytes)
        self._change(begin, unit_bytes, new)
        changed = [begin + at for at in range(unit_bytes) if old[at] != new[at]]
        return (changed[0], changed[-1] + 1) if changed else (begin, begin)

    def _change(self, begin: int, length_bytes: int, new: bytes | None) -> bytes:
        segment, offset = divmod(begin, self._segment_bytes)
        descriptor = os.open(self._data / f"{segment:06}", os.O_RDWR)
        try:
            old = os.pread(descriptor, length_bytes, offset)
            if new is not None:
                os.pwrite(descriptor, new, offset)
                os.fdatasync(descriptor)
            return old
        finally:
            os.close(descriptor)


def some_address(engine: LocalEngine, live: dict[str, Ranges], rng: random.Random) -> int:
    """In an object, behind the slices of an extent, or anywhere."""
    turn = rng.random()
    if turn < 0.6:
        return rng.randrange(*rng.choice(live[rng.choice(sorted(live))]))
    extents = engine.holdings.extents.used
    extent = rng.choice(extents[extents["is_used"]])
    end = int(extent["offset_bytes"] + extent["length_bytes"])
    if turn < 0.8:
        return end - 1 - rng.randrange(200)
    return rng.randrange(engine.volume.segment_bytes * len(engine.volume.segments()))


def overlaps(ranges: Ranges, changed: tuple[int, int]) -> bool:
    return any(begin < changed[1] and changed[0] < end for begin, end in ranges)


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_rot_is_found_when_it_is_read_and_changes_nothing_else(
    tmp_path: Path, residency: str, is_open: bool
) -> None:
    print(f"seed {SEED}")
    rng = random.Random(f"{SEED} {residency} {is_open}")
    engine = open_store(tmp_path, residency)
    engine.create_bucket(BUCKET)
    found_count = harmless_count = 0
    for round_number in range(ROUNDS):
        stored = fill(engine)
        assert {key: read(engine, key) for key in stored} == stored
        live = live_ranges(engine)
        where = some_address(engine, live, rng)
        if not is_open:
            engine.close()
        changed = Harm(tmp_path / "data", engine.volume.segment_bytes, rng).at(where)
        if not is_open:
            engine = open_store(tmp_path, residency)
        before = engine.damaged_count
        harmed = {key for key, ranges in live.items() if overlaps(ranges, changed)}
        for key in harmed:
            with pytest.raises(DamagedData):
                read(engine, key)
        expected = {key: None if key in harmed else data for key, data in stored.items()}
        assert {key: read(engine, key) for key in stored} == expected, round_number
        assert engine.damaged_count == before + len(harmed)
        found_count += len(harmed)
        harmless_count += not harmed
    engine.close()
    assert found_count > 2
    assert harmless_count > 2


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


@pytest.mark.parametrize("harm", [cut_short, Path.unlink], ids=["cut short", "missing"])
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_what_lay_in_a_lost_part_of_a_data_file_reads_as_missing(
    tmp_path: Path, residency: str, harm: Callable[[Path], None]
) -> None:
    engine = open_store(tmp_path, residency)
    engine.create_bucket(BUCKET)
    stored = fill(engine)
    large = {f"large {number}": content(number, 1_500_000) for number in range(6)}
    for key, data in large.items():
        put(engine, key, data)
    stored |= large
    live = live_ranges(engine)
    segment_bytes = engine.volume.segment_bytes
    engine.close()

    harm(tmp_path / "data" / "000000")
    first_lost = segment_bytes // 2 + 100 if harm is cut_short else 0
    lost = {key for key, ranges in live.items() if overlaps(ranges, (first_lost, segment_bytes))}
    assert 0 < len(lost) < len(stored)
    engine = open_store(tmp_path, residency)
    found = {key: read_or_none(engine, key) for key in stored}
    assert found == {key: None if key in lost else data for key, data in stored.items()}
    assert engine.damaged_count == len(lost)
    assert stored_keys(engine) == sorted(stored.keys() - lost)
    for key in lost:
        put(engine, key, stored[key])
    assert {key: read(engine, key) for key in stored} == stored
    engine.close()


def read_or_none(engine: LocalEngine, key: str) -> bytes | None:
    """What can be read; damage reads as missing."""
    try:
        return read(engine, key)
    except DamagedData:
        return None
