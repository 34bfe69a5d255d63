"""Two servers of one store whose calls fail, against a dictionary."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from objectcache_schemas.errors import NotFound, ObjectCacheError, Unavailable
from objectcache_schemas.limits import KIB
from objectcache_schemas.records import Condition
from objectcache_storage_server.engines.base import BucketTotals, PrefixShape, StagedPut
from objectcache_storage_server.engines.shared.cache.cache_file import FILE_NAME
from objectcache_storage_server.engines.shared.engine import SharedEngine
from objectcache_storage_server.engines.stores.memory_store import MemoryStore, MemoryStoreState
from objectcache_storage_server.testing import FaultyStore
from tests.contract.engine_suite import BUCKET, content, put_batch, read, stored_keys
from tests.contract.opened_engines.shared_engines import open_server
from tests.unit.examples import examples

OBJECT_BYTES = 4 * KIB
CACHE_SLOTS = 6  # fewer than the objects of what is stored
CALL_S_MAX = 0.2  # after which what cannot be known is given up
KEYS = st.sampled_from(["a", "b", "c", "d"])
SERVERS = st.integers(0, 1)
CONTENTS = st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 100, 4096, 9000]))
Faults = tuple[list[tuple[str, bool]], str]
FAULTS: st.SearchStrategy[Faults] = st.tuples(
    st.lists(  # calls that time out, and whether they are carried out all the same
        st.tuples(
            st.sampled_from(["put", "append", "read_log", "log_end", "begin_reads", "delete"]),
            st.booleans(),
        ),
        max_size=2,
    ),
    st.sampled_from(["", "", "before", "after"]),
)
CONDITIONS = st.sampled_from([Condition(), Condition(absent=True), Condition(immutable=True)])
SHAPE = (3, 1024)  # layers, slice


class CutOffStore(FaultyStore):
    """May lose its server in the middle of an append, which is carried out all the same: at once,
    or when `release` ends it.
    """

    cut_off: str = ""  # "after" the next append, "before" it, or not at all

    def append(self, number: int, record: bytes, deadline_s: float) -> bool:
        cut_off, self.cut_off = self.cut_off, ""
        if cut_off == "after":
            self.inner.append(number, record, deadline_s)
        if cut_off:
            self.hold(keep_late_calls=True)
        return super().append(number, record, deadline_s)


class ServersAgree(RuleBasedStateMachine):
    """What is done by either server is what the dictionary says, or nothing, where it says that it
    is not known.
    """

    cache_slots = 0

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="objectcache-servers-")
        self.state = MemoryStoreState()
        self.stored: dict[str, bytes] = {}
        self.stores: list[CutOffStore] = []
        self.engines = [self.start(number) for number in range(2)]

    def start(self, number: int) -> SharedEngine:
        store = CutOffStore(MemoryStore(self.state))
        store.capabilities = replace(store.capabilities, object_bytes_max=OBJECT_BYTES)
        self.stores[number : number + 1] = [store]
        folder = Path(self.folder.name) / f"{number}"
        return open_server(store, folder, call_s_max=CALL_S_MAX, cache_slots=self.cache_slots)

    def teardown(self) -> None:
        for engine in self.engines:
            engine.close()
        self.folder.cleanup()

    @initialize()
    def create(self) -> None:
        self.engines[0].create_bucket(BUCKET)

    def change(
        self,
        server: int,
        faults: Faults,
        act: Callable[[SharedEngine], object],
        after: dict[str, bytes],
    ) -> None:
        """`act` leaves what is stored as it is, or as in `after`, where it succeeds."""
        engine, store = self.engines[server], self.stores[server]
        time_outs, store.cut_off = faults
        for operation, is_carried_out in time_outs:
            store.time_out(operation, is_carried_out=is_carried_out)
        try:
            act(engine)
            self.stored = after
        except Unavailable:
            store.release()
            # Another server's record settles what the log has.
            self.engines[1 - server].configure_bucket(
                BUCKET.name, self.engines[1 - server].bucket(BUCKET.name).configuration
            )
            found = self.contents(1 - server)
            assert found in (self.stored, after)
            self.stored = found
        except ObjectCacheError:
            pass
        finally:
            store.release()
            store.heal()
            store.cut_off = ""

    def contents(self, server: int) -> dict[str, bytes]:
        engine = self.engines[server]
        found = {key: read(engine, key) for key in stored_keys(engine)}
        return {key: data for key, data in found.items() if data is not None}

    @rule(
        server=SERVERS,
        faults=FAULTS,
        contents=st.dictionaries(KEYS, CONTENTS, min_size=1),
        condition=CONDITIONS,
    )
    def put(
        self,
        server: int,
        faults: Faults,
        contents: dict[str, tuple[int, int]],
        condition: Condition,
    ) -> None:
        objects = {key: content(*each) for key, each in contents.items()}
        self.change(
            server,
            faults,
            lambda engine: put_batch(engine, objects, condition),
            self.stored | objects,
        )

    @rule(
        server=SERVERS,
        faults=FAULTS,
        seeds=st.dictionaries(KEYS, st.integers(0, 1), min_size=1),
        layerwise=st.booleans(),
    )
    def put_prefix(
        self,
        server: int,
        faults: Faults,
        seeds: dict[str, int],
        layerwise: bool,
    ) -> None:
        shape = PrefixShape(list(seeds), *SHAPE, layerwise)
        chunks = [content(seed, shape.chunk_bytes) for seed in seeds.values()]
        payload = bytearray(shape.total_bytes)
        position = 0
        while position < len(payload):
            chunk, offset_bytes, room_bytes = shape.locate(position)
            payload[position : position + room_bytes] = chunks[chunk][offset_bytes:][:room_bytes]
            position += room_bytes

        def act(engine: SharedEngine) -> None:
            prefix = engine.stage_prefix(BUCKET.name, shape)
            try:
                for begin in range(0, len(payload), 2048):
                    prefix.write(begin, memoryview(payload)[begin : begin + 2048])
                engine.commit([StagedPut(each, "") for each in prefix.staged])
            finally:
                prefix.discard()

        self.change(server, faults, act, self.stored | dict(zip(seeds, chunks, strict=True)))

    @rule(server=SERVERS, faults=FAULTS, keys=st.lists(KEYS, min_size=1, unique=True))
    def delete(self, server: int, faults: Faults, keys: list[str]) -> None:
        after = {key: data for key, data in self.stored.items() if key not in keys}
        self.change(server, faults, lambda engine: engine.delete(BUCKET.name, keys), after)

    @rule(server=SERVERS, key=KEYS, is_carried_out=st.booleans())
    def read_while_it_fails(self, server: int, key: str, is_carried_out: bool) -> None:
        store = self.stores[server]
        store.time_out("begin_reads", is_carried_out=is_carried_out)
        try:
            assert read(self.engines[server], key) == self.stored.get(key)
        except Unavailable:
            assert key in self.stored
        finally:
            store.heal()

    @rule(server=SERVERS, key=KEYS)
    def read_what_is_wrong_once(self, server: int, key: str) -> None:
        with self.state.changed:
            names = [name for name in self.state.objects if name.startswith("data/")]
        for name in names:
            self.stores[server].flip(name, 0, read_count=1)
        assert read(self.engines[server], key) == self.stored.get(key)
        self.stores[server].heal()

    @rule(server=SERVERS)
    def restart(self, server: int) -> None:
        self.engines[server].close()
        self.engines[server] = self.start(server)

    @rule(server=SERVERS, key=KEYS)
    def stat(self, server: int, key: str) -> None:
        try:
            assert self.engines[server].stat(BUCKET.name, key).size_bytes == len(self.stored[key])
        except NotFound:
            assert key not in self.stored

    @invariant()
    def both_have_what_is_stored(self) -> None:
        if not self.engines[0].buckets():
            return
        totals = BucketTotals(len(self.stored), sum(map(len, self.stored.values())))
        for number, engine in enumerate(self.engines):
            assert self.contents(number) == self.stored
            assert engine.usage(BUCKET.name) == totals
            assert engine.damaged_count == 0


class CachedServersAgree(ServersAgree):
    """The same with a cache before each server's store, which rots."""

    cache_slots = CACHE_SLOTS

    @rule(server=SERVERS, byte=st.integers(0, CACHE_SLOTS * OBJECT_BYTES - 1))
    def rot(self, server: int, byte: int) -> None:
        path = Path(self.folder.name) / f"{server}-cache" / FILE_NAME
        with path.open("r+b") as file:
            file.seek(byte)
            (found,) = file.read(1)
            file.seek(byte)
            file.write(bytes([found ^ 1]))

    @invariant()
    def caches_are_on(self) -> None:
        for engine in self.engines:
            assert engine.cache is not None
            assert engine.cache.status().failure == ""


MODEL = settings(
    max_examples=examples(8),
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestServersAgree = ServersAgree.TestCase
TestServersAgree.settings = MODEL
TestCachedServersAgree = CachedServersAgree.TestCase
TestCachedServersAgree.settings = MODEL
