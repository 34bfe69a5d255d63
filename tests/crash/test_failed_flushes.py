"""A flush that fails, whichever it is, costs nothing that was acknowledged, and ends it.

Every flush of a short life is failed once, each in a store of its own, on a file system that loses
what that flush was to write and says so once. Then the store is opened again, or the power is cut
first, and everything that was acknowledged has to be there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from objectcache_schemas.errors import DamagedData, Unavailable
from objectcache_schemas.records import BucketInfo, BucketPolicy, Condition, Durability
from objectcache_storage_server.engines.base import Engine, StagedPut
from objectcache_storage_server.engines.disk.flush_latch import forget_cached
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.upkeep.upkeep_thread import Upkeep
from tests.contract.engine_suite import BUCKET, content, read, staged_put
from tests.crash.lossy_files import NOTHING
from tests.crash.lossy_fs import NO_FAILURE, LossyMount, lossy_mount, reason_to_skip
from tests.crash.settings import SEED
from tests.crash.stores import STORE_KINDS

pytestmark = [
    pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip()),
    pytest.mark.timeout(300),
]
KINDS = ("local", "files")
LATER = BucketInfo(
    name="later",
    owner=BUCKET.owner,
    region=BUCKET.region,
    created_s=BUCKET.created_s,
    policy=BucketPolicy(durability=Durability.ASYNC),
)
TOO_LATE = msgspec.structs.replace(BUCKET, name="too-late")
SIZES_BYTES = (0, 700, 5000, 70_000)
IMMUTABLE = Condition(immutable=True)
Name = tuple[str, str]  # bucket and key
Changes = Mapping[Name, bytes | None]


class Life:
    """A store, what it acknowledged, and what nobody knows of."""

    def __init__(self, kind: str, folder: Path, mount: LossyMount) -> None:
        self.acknowledged: dict[Name, bytes | None] = {}
        self.unknown: dict[Name, set[bytes | None]] = {}
        self._kind = kind
        self._folder = folder
        self._mount = mount
        self._is_refused = False
        self.engine = self._opened()

    def _opened(self) -> Engine:
        engine = STORE_KINDS[self._kind].open(self._folder)
        if isinstance(engine, LocalEngine):
            engine.upkeep.close()  # nothing is flushed that the test does not ask for
        return engine

    def live(self, seed: int) -> None:
        """Its flushes are the same, in the same order, for one seed."""
        rng = random.Random(f"{seed} life")
        self._create(BUCKET)
        self._put(rng, "plain")
        self._put(rng, "plain", "batch-1", "batch-2")
        if isinstance(self.engine, LocalEngine):
            self._create(LATER)
            self._put_while_another_waits(self.engine, rng)
            self._put_later(self.engine, rng)
        self._delete("batch-1")
        self._put(rng, "last")

    def has_ended(self) -> None:
        """After a flush has failed what was acknowledged is read, and nothing more is."""
        assert self._is_refused
        assert self._has_failed()
        assert self.engine.flush_failure
        with pytest.raises(Unavailable, match="restart the server"):
            self.engine.create_bucket(TOO_LATE)
        self.check()

    def close(self) -> None:
        """The server is stopped."""
        self.engine.close()

    def reopen(self) -> None:
        """And started again."""
        self.engine = self._opened()
        self._is_refused = False

    def put_again(self) -> None:
        """What is stored already is acknowledged without being written again."""
        for (bucket, key), value in self.acknowledged.items() | {
            (name, value) for name, values in self.unknown.items() for value in values
        }:
            if value is not None and self._is_there(bucket):
                stored = self._found(bucket, key)
                wanted = value if stored is None else stored
                self.engine.commit([staged_put(self.engine, key, wanted, bucket=bucket)], IMMUTABLE)
                self.acknowledged[bucket, key] = wanted
                self.unknown.pop((bucket, key), None)

    def check(self) -> None:
        """Whether everything that was acknowledged is there, byte for byte."""
        for name, value in self.acknowledged.items():
            bucket, key = name
            allowed = {value, *self.unknown.get(name, ())}
            assert self._found(bucket, key) in allowed, f"{name} is not as it was stored"

    def _found(self, bucket: str, key: str) -> bytes | None:
        """What is stored; nothing where the device has other bytes, as checksums tell."""
        try:
            return read(self.engine, key, bucket)
        except DamagedData:
            return None

    def _has_failed(self) -> bool:
        return self._mount.flushes_until_failure() <= 0

    def _is_there(self, bucket: str) -> bool:
        return bucket in [each.name for each in self.engine.buckets()]

    def _do(self, changes: Changes, action: Callable[[], object]) -> None:
        try:
            action()
        except Unavailable:
            self._is_refused = True
            for name, value in changes.items():
                self.unknown.setdefault(name, set()).add(value)
            return
        assert not self._is_refused, "acknowledged after a flush had failed"
        assert not self._has_failed(), "a flush failed and nobody noticed"
        self.acknowledged.update(changes)

    def _create(self, bucket: BucketInfo) -> None:
        self._do({}, lambda: self.engine.create_bucket(bucket))

    def _put(self, rng: random.Random, *keys: str, bucket: str = BUCKET.name) -> None:
        values = {key: content(rng.random(), rng.choice(SIZES_BYTES)) for key in keys}

        def put() -> None:
            puts: list[StagedPut] = []
            for key, value in values.items():
                puts.append(staged_put(self.engine, key, value, bucket=bucket))
            self.engine.commit(puts)

        if self._is_there(bucket):
            self._do({(bucket, key): value for key, value in values.items()}, put)

    def _delete(self, key: str) -> None:
        if self._is_there(BUCKET.name):
            self._do({(BUCKET.name, key): None}, lambda: self.engine.delete(BUCKET.name, [key]))

    def _put_while_another_waits(self, engine: LocalEngine, rng: random.Random) -> None:
        """One is named in the index, another is stored, and then the first asks for its flush."""
        sync = engine.index.sync

        def put_another_first() -> None:
            engine.index.sync = sync  # type: ignore[method-assign]
            self._put(rng, "another")
            sync()

        engine.index.sync = put_another_first  # type: ignore[method-assign]
        self._put(rng, "waiting")
        engine.index.sync = sync  # type: ignore[method-assign]

    def _put_later(self, engine: LocalEngine, rng: random.Random) -> None:
        """What is acknowledged before it is flushed may be lost until the flush has answered."""
        before = dict(self.acknowledged)
        self._put(rng, "later-1", bucket=LATER.name)
        self._put(rng, "later-2", bucket=LATER.name)
        put = {name: self.acknowledged[name] for name in self.acknowledged.keys() - before.keys()}
        for name, value in put.items():
            self.unknown.setdefault(name, set()).update((value, None))
        self._do(put, engine.stored.flusher.flush)
        if not self._is_refused:
            for name in put:
                del self.unknown[name]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[LossyMount]:
    folder = tmp_path / "stores"
    folder.mkdir()
    with lossy_mount(folder) as mounted:
        yield mounted


@pytest.fixture(autouse=True)
def no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upkeep does nothing by itself."""
    monkeypatch.setattr(Upkeep, "_run", lambda self: None)


def lives(kind: str, mount: LossyMount) -> Iterator[Life]:
    """One for each flush that one life takes, in which this flush failed."""
    whole = Life(kind, mount.folder / "whole", mount)
    mount.fail_flush()
    with contextlib.closing(whole):
        whole.live(SEED)
        flush_count = NO_FAILURE - mount.flushes_until_failure()
    assert flush_count > 10
    for number in range(1, flush_count + 1):
        life = Life(kind, mount.folder / f"{number}", mount)
        mount.fail_flush(number)
        with contextlib.closing(life):
            life.live(SEED)
            life.has_ended()
        assert mount.flushes_until_failure() <= 0
        yield life


def test_what_a_file_had_in_memory_alone_is_forgotten(mount: LossyMount) -> None:
    file = mount.folder / "file"
    old, new = b"o" * mmap.PAGESIZE, b"n" * mmap.PAGESIZE
    with file.open("w+b", buffering=0) as opened:
        opened.write(old)
        os.fdatasync(opened.fileno())
        mount.fail_flush(1)
        os.pwrite(opened.fileno(), new, 0)
        with pytest.raises(OSError, match="Input/output error"):
            os.fdatasync(opened.fileno())
        os.fdatasync(opened.fileno())  # well again, and nothing was written
    assert file.read_bytes() == new, "the page cache has it"
    forget_cached(file)
    assert file.read_bytes() == old


@pytest.mark.parametrize("kind", KINDS)
def test_no_flush_that_fails_costs_what_was_acknowledged(mount: LossyMount, kind: str) -> None:
    seen = list(lives(kind, mount))
    mount.cut(SEED, NOTHING)
    for life in seen:
        life.reopen()
        life.check()
        life.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_failed_flush_left_in_memory_is_not_taken_for_stored(
    mount: LossyMount, kind: str
) -> None:
    seen = list(lives(kind, mount))
    for life in seen:
        life.reopen()
        life.check()
        life.put_again()
        life.close()
    mount.cut(SEED, NOTHING)
    for life in seen:
        life.reopen()
        life.check()
        life.close()
