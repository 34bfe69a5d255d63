"""The files engine on a full device."""

from __future__ import annotations

import resource
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from objectcache_schemas.errors import StorageFull
from objectcache_schemas.limits import KIB, MIB
from objectcache_storage_server.engines.files.engine import FilesEngine
from tests.contract.engine_suite import (
    BUCKET,
    content,
    put,
    put_batch,
    read,
    staged_put,
    stored_keys,
)


@pytest.fixture
def small_device() -> Iterator[Path]:
    """A file system of 24 MiB, not below pytest's own folders, which pytest removes itself."""
    folder = Path(tempfile.mkdtemp(prefix="objectcache-small-device-"))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        folder.rmdir()
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


def fill(engine: FilesEngine, name: str, size_bytes: int) -> dict[str, bytes]:
    """Put objects until there is no room; returns those that were acknowledged."""
    stored: dict[str, bytes] = {}
    while True:
        key = f"{name} {len(stored):05}"
        data = content(key, size_bytes)
        try:
            put(engine, key, data)
        except StorageFull:
            return stored
        stored[key] = data


def test_a_full_device_refuses_puts_and_keeps_the_rest_working(small_device: Path) -> None:
    engine = FilesEngine(small_device / "data", 64)
    engine.create_bucket(BUCKET)
    stored = fill(engine, "large", 1 * MIB)
    assert 5 <= len(stored) <= 24
    batch = {f"batch {i}": content(i, 300 * KIB) for i in range(20)}
    with pytest.raises(StorageFull, match="delete objects or add space"):
        put_batch(engine, batch)
    stored |= fill(engine, "medium", 64 * KIB)
    stored |= fill(engine, "small", 10)
    assert stored_keys(engine) == sorted(stored)
    assert {key: read(engine, key) for key in stored} == stored

    gone = [key for key in stored if key.startswith("large")][:3]
    assert engine.delete(BUCKET.name, gone) == 3
    for key in gone:
        del stored[key]
    put(engine, "later", content("later", 1 * MIB))
    stored["later"] = content("later", 1 * MIB)
    engine.close()

    again = FilesEngine(small_device / "data", 64)
    assert again.damaged_count == 0
    assert {key: read(again, key) for key in stored_keys(again)} == stored
    again.close()


def test_space_of_a_failed_put_is_given_back(small_device: Path) -> None:
    engine = FilesEngine(small_device / "data", 64)
    engine.create_bucket(BUCKET)
    stored = fill(engine, "fits", 10 * MIB)
    for _ in range(5):
        with pytest.raises(StorageFull):
            staged_put(engine, "too large", content("too large", 10 * MIB))
    put(engine, "still fits", content("still fits", 2 * MIB))
    assert stored_keys(engine) == [*stored, "still fits"]
    engine.close()


def test_a_file_size_limit_is_a_full_device(tmp_path: Path) -> None:
    engine = FilesEngine(tmp_path, 64)
    engine.create_bucket(BUCKET)
    put(engine, "before", b"data")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 * MIB, hard))
    try:
        staged = engine.stage(BUCKET.name, "too large")
        with pytest.raises(StorageFull) as caught:
            staged.write_at(0, memoryview(content("too large", 2 * MIB)))
        assert str(tmp_path) not in str(caught.value)
        staged.discard()
        assert read(engine, "before") == b"data"
        put(engine, "small", b"fits")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert stored_keys(engine) == ["before", "small"]
    assert len(list((tmp_path / "objects").glob("*/*"))) == 2
    engine.close()
