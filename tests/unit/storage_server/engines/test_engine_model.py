"""Engines that keep objects agree with the memory engine, whatever is done to both."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar, cast
from unittest import mock

import msgspec
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from objectcache_runtime.settings import StorageSettings
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.operators.engine_status import CheckReport
from objectcache_schemas.records import (
    BucketInfo,
    BucketPolicy,
    Condition,
    Durability,
    ObjectAttributes,
)
from objectcache_storage_server.engines.base import Engine, OpenObjects, PrefixShape, StagedPut
from objectcache_storage_server.engines.files.engine import FilesEngine
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.upkeep import upkeep_thread
from objectcache_storage_server.engines.local.volumes.volume import IoPath
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.engines.open_engine import open_volume
from objectcache_storage_server.testing import MeteredEngine
from tests.contract.engine_suite import BUCKET, content, read_range, staged_put
from tests.contract.opened_engines.blob_engines import delayed, files_over
from tests.contract.opened_engines.shared_engines import ByTurns, in_memory, two_servers
from tests.unit.examples import examples

T = TypeVar("T")

LONG = "long/" * 204  # with what follows about as long as a key may be
KEYS = st.sampled_from(
    [
        *["a", "a/", "a/b", "b", "\ud7ff", "\ue000", "\U0010ffff", "..", "%2F"],
        *[LONG, LONG + "a", LONG + "a/b", LONG[:511], LONG[:512]],
    ]
)
LAYOUTS = [
    KvLayout(
        num_layers=2, chunk_tokens=16, per_layer_chunk_bytes=size, dtype="bf16", fingerprint="m"
    )
    for size in (50, 60)
]
SIZES = st.sampled_from([0, 1, 99, 100, 101, 120, 1000, 4096, 70_000, 150_001])
SHAPES = st.sampled_from([(1, 100), (2, 50), (2, 60), (3, 1000), (2, 4096), (3, 7000)])
CONTENTS = st.tuples(st.integers(0, 1), SIZES)
BLOCKS = st.sampled_from([1, 10, 64, 100, 65_536])
ETAGS = st.sampled_from(["1", "2", "3"])
CONDITIONS = st.one_of(
    st.just(Condition()),
    st.just(Condition(absent=True)),
    st.just(Condition(immutable=True)),
    st.builds(lambda etag: Condition(etag=etag), st.one_of(ETAGS, st.just("*"))),
)


class EnginesAgree(RuleBasedStateMachine):
    """Each rule does the same to both engines and compares what comes back."""

    parent: str | None = None  # of the store's folder

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="objectcache-model-", dir=self.parent)
        self.now_s = 0.0
        self.model = MemoryEngine(self.clock)
        self.engine = self.open_engine()
        self.opened: list[tuple[OpenObjects, OpenObjects]] = []

    def open_engine(self) -> Engine:
        """Open the engine that is compared with the model, on `folder` with `clock`."""
        raise NotImplementedError

    def clock(self) -> float:
        return self.now_s

    def teardown(self) -> None:
        self.close_opened()
        self.engine.close()
        self.folder.cleanup()

    def both(self, action: Callable[[Engine], T]) -> T | str:
        """What both answer, which must be the same; an error is its code."""
        self.now_s += 1
        expected, found = (outcome(action, engine) for engine in (self.model, self.engine))
        assert found == expected
        return found

    @initialize()
    def create(self) -> None:
        self.both(lambda engine: engine.create_bucket(BUCKET))

    @rule(create_again=st.sampled_from([True, True, True, False]))
    def delete_bucket(self, create_again: bool) -> None:
        self.both(lambda engine: engine.delete_bucket(BUCKET.name))
        if create_again:
            self.both(lambda engine: engine.create_bucket(BUCKET))

    @rule(layout=st.sampled_from(LAYOUTS))
    def set_layout(self, layout: KvLayout) -> None:
        self.both(lambda engine: engine.set_layout(BUCKET.name, layout))
        self.both(bucket_but_for_its_policy)

    @rule(
        contents=st.dictionaries(KEYS, CONTENTS, min_size=1, max_size=4),
        block_bytes=BLOCKS,
        condition=CONDITIONS,
        etag=st.one_of(ETAGS, st.just("")),  # empty: made from the content
        named=st.booleans(),
    )
    def put(
        self,
        contents: dict[str, tuple[int, int]],
        block_bytes: int,
        condition: Condition,
        etag: str,
        named: bool,
    ) -> None:
        attributes = ObjectAttributes(user_metadata={"name": etag} if named else {})

        def act(engine: Engine) -> object:
            puts = [
                staged_put(
                    engine,
                    key,
                    content(seed, size_bytes),
                    block_bytes=block_bytes,
                    etag=etag,
                    attributes=attributes,
                )
                for key, (seed, size_bytes) in contents.items()
            ]
            return engine.commit(puts, condition)

        self.both(act)

    @rule(
        contents=st.dictionaries(KEYS, st.integers(0, 1), min_size=1, max_size=9),
        shape=SHAPES,
        layerwise=st.booleans(),
        slices_a_piece=st.integers(1, 5),
        parent_key=st.one_of(st.none(), KEYS),
        condition=st.sampled_from([Condition(), Condition(immutable=True)]),
    )
    def put_prefix(
        self,
        contents: dict[str, int],
        shape: tuple[int, int],
        layerwise: bool,
        slices_a_piece: int,
        parent_key: str | None,
        condition: Condition,
    ) -> None:
        prefix = PrefixShape(list(contents), *shape, layerwise, parent_key)
        payload = payload_of(prefix, list(contents.values()))

        def act(engine: Engine) -> object:
            staged = engine.stage_prefix(BUCKET.name, prefix)
            step_bytes = slices_a_piece * prefix.slice_bytes
            for position in range(0, len(payload), step_bytes):
                staged.write(position, memoryview(payload)[position : position + step_bytes])
            return engine.commit([StagedPut(each, "") for each in staged.staged], condition)

        self.both(act)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=3, unique=True), shape=SHAPES)
    def stage_prefix_and_discard(self, keys: list[str], shape: tuple[int, int]) -> None:
        prefix = PrefixShape(keys, *shape, layerwise=True)

        def act(engine: Engine) -> None:
            staged = engine.stage_prefix(BUCKET.name, prefix)
            staged.write(0, memoryview(bytes(prefix.slice_bytes)))
            staged.discard()

        self.both(act)

    @rule(source=KEYS, goal=KEYS, block_bytes=BLOCKS, edges=st.tuples(SIZES, SIZES))
    def copy(self, source: str, goal: str, block_bytes: int, edges: tuple[int, int]) -> None:
        def act(engine: Engine) -> object:
            size_bytes = engine.stat(BUCKET.name, source).size_bytes
            begin, end = (min(edge, size_bytes) for edge in sorted(edges))
            staged = engine.stage(BUCKET.name, goal, block_bytes)
            try:
                copied = engine.copy(BUCKET.name, source, staged, begin, end - begin)
                return copied, engine.commit([StagedPut(staged, "copy")])
            finally:
                staged.discard()

        self.both(act)

    @rule(key=KEYS)
    def stage_and_discard(self, key: str) -> None:
        self.both(lambda engine: staged_put(engine, key, b"discarded").staged.discard())

    @rule(keys=st.lists(KEYS, max_size=4))
    def delete(self, keys: list[str]) -> None:
        self.both(lambda engine: engine.delete(BUCKET.name, keys))

    @rule(keys=st.lists(KEYS, max_size=6))
    def match(self, keys: list[str]) -> None:
        self.both(lambda engine: engine.match(BUCKET.name, keys))

    @rule(prefix=st.one_of(st.just(""), KEYS), after=st.one_of(st.just(""), KEYS))
    def scan(self, prefix: str, after: str) -> None:
        self.both(lambda engine: engine.scan(BUCKET.name, prefix, after, 2))
        self.both(lambda engine: engine.scan(BUCKET.name, prefix, after, 100))

    @rule(key=KEYS)
    def stat(self, key: str) -> None:
        self.both(lambda engine: engine.stat(BUCKET.name, key))

    @rule(keys=st.lists(KEYS, min_size=1, max_size=6), edges=st.tuples(SIZES, SIZES))
    def read(self, keys: list[str], edges: tuple[int, int]) -> None:
        def act(engine: Engine) -> object:
            with engine.open_many(BUCKET.name, keys) as opened:
                stored = [info.key for info in opened.infos if info]
            with engine.open_many(BUCKET.name, stored) as opened:
                return stored, ranges(opened, *sorted(edges))

        self.both(act)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=3))
    def pin(self, keys: list[str]) -> None:
        stored = [key for key in keys if self.both(partial(is_stored, key)) is True]
        if stored:
            pair = [engine.open_many(BUCKET.name, stored) for engine in (self.model, self.engine)]
            self.opened.append((pair[0], pair[1]))

    @precondition(lambda self: self.opened)
    @rule()
    def read_pinned(self) -> None:
        for expected, found in self.opened:
            assert ranges(found, 0, 200_000) == ranges(expected, 0, 200_000)

    @rule()
    def close_opened(self) -> None:
        for pair in self.opened:
            for opened in pair:
                opened.close()
        self.opened = []

    @rule()
    def reopen(self) -> None:
        self.close_opened()  # what is open does not outlive its engine
        self.engine.close()
        self.engine = self.open_engine()

    @invariant()
    def nothing_is_damaged(self) -> None:
        assert self.engine.damaged_count == 0


class FilesAgree(EnginesAgree):
    # In memory where that can be: it makes hundreds of folders for every example.
    parent: str | None = "/dev/shm" if Path("/dev/shm").is_dir() else None

    def open_engine(self) -> Engine:
        return FilesEngine(Path(self.folder.name), 3, self.clock)


class WrappedFilesAgree(FilesAgree):
    """The same parts, passed through by a wrapper, over a store whose reads end later."""

    def open_engine(self) -> Engine:
        return MeteredEngine(files_over(delayed, Path(self.folder.name), self.clock))


class LocalAgrees(EnginesAgree):
    """Extents of a few slots with padded rows, moved about and read over both paths."""

    def __init__(self) -> None:
        self.quiet_upkeep = mock.patch.object(upkeep_thread, "ROUND_S", 3600.0)
        self.quiet_upkeep.start()
        self.compaction_s = 0.0
        super().__init__()

    def open_engine(self) -> Engine:
        settings = StorageSettings(
            data_file_bytes=256 * KIB,
            capacity_bytes=64 * MIB,
            capacity_reserve_bytes=0,
            extent_row_bytes=4 * KIB,
            extent_bytes_max=64 * KIB,
            index_bytes_max=64 * MIB,
            compaction_idle_s=0.0,
        )
        return LocalEngine(Path(self.folder.name), settings, open_volume, self.clock)

    @property
    def local(self) -> LocalEngine:
        return cast(LocalEngine, self.engine)

    def teardown(self) -> None:
        self.check()
        super().teardown()
        self.quiet_upkeep.stop()

    @rule()
    def move_chunks_together(self) -> None:
        for _ in range(3):
            self.compaction_s += 10.0
            self.local.upkeep.compactor.round(self.compaction_s)

    @rule(path=st.sampled_from(IoPath), part=st.integers(1, 3))
    def change_the_path(self, path: IoPath, part: int) -> None:
        if path in self.local.volume.paths:
            extents = self.local.holdings.extents.used
            numbers = np.flatnonzero(extents["is_used"])[::part].tolist()
            for changed in self.local.holdings.set_paths(numbers, path):
                self.local.volume.drop_cache(*changed)

    @rule(durability=st.sampled_from(Durability))
    def change_the_policy(self, durability: Durability) -> None:
        policy = BucketPolicy(durability=durability)
        if isinstance(outcome(lambda e: e.set_policy(BUCKET.name, policy), self.local), str):
            assert outcome(lambda e: e.bucket(BUCKET.name), self.model) == "NoSuchBucket"

    @rule()
    def check(self) -> None:
        report = self.local.check(False, lambda _: True)
        assert report == CheckReport(objects=report.objects, bytes=report.bytes)


class SharedAgrees(EnginesAgree):
    """Two servers of one store by turns, whose objects are shorter than many a chunk."""

    def __init__(self) -> None:
        self.open_handle = in_memory(object_bytes_max=4 * KIB)
        super().__init__()

    def open_engine(self) -> Engine:
        return two_servers(ByTurns, self.open_handle, Path(self.folder.name), self.clock)


def bucket_but_for_its_policy(engine: Engine) -> BucketInfo:
    return msgspec.structs.replace(engine.bucket(BUCKET.name), policy=BucketPolicy())


def payload_of(shape: PrefixShape, seeds: list[int]) -> bytes:
    """The chunks of a put in the order in which they arrive."""
    payload = bytearray(shape.total_bytes)
    chunks = [content(seed, shape.chunk_bytes) for seed in seeds]
    position = 0
    while position < len(payload):
        chunk, offset_bytes, room_bytes = shape.locate(position)
        payload[position : position + room_bytes] = chunks[chunk][offset_bytes:][:room_bytes]
        position += room_bytes
    return bytes(payload)


def is_stored(key: str, engine: Engine) -> bool:
    with engine.open_many(BUCKET.name, [key]) as opened:
        return opened.infos[0] is not None


def outcome(action: Callable[[Engine], T], engine: Engine) -> T | str:
    try:
        return action(engine)
    except ObjectCacheError as error:
        return error.code


def ranges(opened: OpenObjects, begin: int, end: int) -> list[object]:
    """Infos, and of each object the bytes from `begin` to `end` that it has."""
    return [
        (info, clipped_range(opened, index, info.size_bytes, begin, end))
        for index, info in enumerate(opened.infos)
        if info
    ]


def clipped_range(opened: OpenObjects, index: int, size_bytes: int, begin: int, end: int) -> bytes:
    first, last = min(begin, size_bytes), min(end, size_bytes)
    return read_range(opened, index, first, last - first)


SETTINGS = settings(
    max_examples=examples(10),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestFilesAgree = FilesAgree.TestCase
TestFilesAgree.settings = SETTINGS
TestWrappedFilesAgree = WrappedFilesAgree.TestCase
TestWrappedFilesAgree.settings = SETTINGS
TestLocalAgrees = LocalAgrees.TestCase
TestLocalAgrees.settings = SETTINGS
TestSharedAgrees = SharedAgrees.TestCase
TestSharedAgrees.settings = SETTINGS
