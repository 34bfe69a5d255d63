"""The files engine agrees with the memory engine, whatever is done to both."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.messages import Condition, ObjectAttributes
from objectcache_storage_server.engines.base import Engine, OpenObjects
from objectcache_storage_server.engines.files import FilesEngine
from objectcache_storage_server.engines.memory import MemoryEngine
from tests.contract.engine_suite import BUCKET, content, read_range, staged_put

T = TypeVar("T")

KEYS = st.sampled_from(["a", "a/", "a/b", "b", "\ud7ff", "\ue000", "\U0010ffff", "..", "%2F"])
LAYOUTS = [
    KvLayout(
        num_layers=2, chunk_tokens=16, per_layer_chunk_bytes=size, dtype="bf16", fingerprint="m"
    )
    for size in (50, 60)
]
SIZES = st.sampled_from([0, 1, 99, 100, 101, 120, 1000])
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

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="objectcache-model-")
        self.now_s = 0.0
        self.model = MemoryEngine(lambda: self.now_s)
        self.engine = self.open_files_engine()
        self.opened: list[tuple[OpenObjects, OpenObjects]] = []

    def open_files_engine(self) -> FilesEngine:
        return FilesEngine(Path(self.folder.name), 3, lambda: self.now_s)

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
        self.both(lambda engine: engine.bucket(BUCKET.name))

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
            assert ranges(found, 0, 2000) == ranges(expected, 0, 2000)

    @rule()
    def close_opened(self) -> None:
        for pair in self.opened:
            for opened in pair:
                opened.close()
        self.opened = []

    @rule()
    def reopen(self) -> None:
        self.engine.close()
        self.engine = self.open_files_engine()

    @invariant()
    def nothing_is_damaged(self) -> None:
        assert self.engine.damaged_count == 0


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


TestEnginesAgree = EnginesAgree.TestCase
TestEnginesAgree.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
