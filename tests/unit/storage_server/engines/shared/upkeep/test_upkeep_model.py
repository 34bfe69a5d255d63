"""Two servers whose stores fail now and then, that take each other for dead, and evict: what was
acknowledged is there with the right bytes, and in the end nothing is left over.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from objectcache_schemas.errors import NotFound, ObjectCacheError
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.upkeep.upkeep_rules import UpkeepRules
from objectcache_storage_server.engines.stores.memory_store import MemoryStoreState
from tests.contract.engine_suite import BUCKET, content, put, read
from tests.unit.storage_server.engines.shared.upkeep.upkept_servers import (
    CHUNK_BYTES,
    GRACE_S,
    KV,
    UpkeptServer,
    chunk,
    object_names,
    soon,
    until,
)

Start = Callable[..., UpkeptServer]
RULES = UpkeepRules(
    capacity_bytes=64 * CHUNK_BYTES,
    high_watermark=0.5,
    low_watermark=0.25,
    grace_s=GRACE_S,
    writer_lease_s=3600.0,
)
STEPS = 150


class Story:
    """What was done, and what may be stored because of it."""

    def __init__(self, servers: list[UpkeptServer], seed: int) -> None:
        self.random = random.Random(seed)
        self.servers = servers
        self.now_s = 0.0
        self.possible: dict[str, set[bytes | None]] = {}  # of ordinary objects, None is none

    def step(self, number: int) -> None:
        server = self.random.choice(self.servers)
        key = f"{self.random.randrange(6)}"
        action = self.random.choice(
            (self.put_plain, self.delete_plain, self.put_chunk, self.read, self.round, self.bury)
        )
        action(server, key, number)

    def put_plain(self, server: UpkeptServer, key: str, number: int) -> None:
        data = content((key, number), 5000)
        self._change(key, data, lambda: put(server.engine, key, data))

    def delete_plain(self, server: UpkeptServer, key: str, number: int) -> None:
        self._change(key, None, lambda: server.engine.delete(BUCKET.name, [key]))

    def _change(self, key: str, data: bytes | None, act: Callable[[], object]) -> None:
        before = self.possible.get(key, {None})
        try:
            act()
        except ObjectCacheError:
            self.possible[key] = before | {data}
        else:
            self.possible[key] = {data}

    def put_chunk(self, server: UpkeptServer, key: str, number: int) -> None:
        try:
            server.put([f"{number}-a", f"{number}-b"])
        except ObjectCacheError:
            return

    def read(self, server: UpkeptServer, key: str, number: int) -> None:
        found: bytes | None
        try:
            found = read(server.engine, key)
        except NotFound:
            found = None
        except ObjectCacheError:
            return
        assert found in self.possible.get(key, {None}), key
        self.possible[key] = {found}

    def round(self, server: UpkeptServer, key: str, number: int) -> None:
        self.now_s += self.random.choice((1.0, 40.0, GRACE_S))
        server.engine.upkeep.round(server.begun_s + self.now_s)

    def bury(self, server: UpkeptServer, key: str, number: int) -> None:
        if self.random.random() > 0.2:
            return
        other = self.servers[server is self.servers[0]]
        try:
            writer = other.engine.catalog.writer
            server.engine.catalog.change(lambda change: change.fence(writer), soon())
        except ObjectCacheError:
            return


@pytest.mark.parametrize("seed", range(6))
def test_nothing_acknowledged_is_lost_and_nothing_is_left_over(
    state: MemoryStoreState, start: Start, seed: int
) -> None:
    servers = [start(rules=RULES), start(rules=RULES)]
    servers[0].engine.create_bucket(KV)
    servers[0].engine.create_bucket(BUCKET)
    story = Story(servers, seed)
    for server in servers:
        server.store.fault_rate = 0.02
    for number in range(STEPS):
        story.step(number)
    for server in servers:
        server.store.fault_rate = 0.0
    for server in servers:
        for key in list(story.possible):
            story.read(server, key, STEPS)
        for key in server.stored_keys():
            assert server.read(key) == chunk(key)
    assert servers[0].engine.damaged_count == servers[1].engine.damaged_count == 0
    last = start(rules=RULES)
    for server in servers:  # dead, with all that they could not remove
        last.fence(server)
        server.close()
    _fence_all_but(last)
    for rounds in range(6):
        last.round(rounds * (GRACE_S + 100))
    with last.engine.catalog.reading() as view:
        assert view.state.buried_count == 0
        assert list(view.writers()) == [last.writer()]
        extents = view.extents(None, 1 << 20)
    named = {
        name.object_name(piece) for name, row in extents for piece in range(row.shape.object_count)
    }
    until(lambda: object_names(state) == named)
    report = last.check()
    assert (report.damaged, report.misplaced, report.leaked_bytes) == (0, 0, 0)


def _fence_all_but(last: UpkeptServer) -> None:
    own = last.writer()
    last.engine.catalog.follow(soon())
    with last.engine.catalog.reading() as view:
        others = [
            writer
            for writer, row in view.writers().items()
            if row.fenced_by is None and writer != own
        ]
    for writer in others:
        last.engine.catalog.change(partial(ReplayedChange.fence, writer=writer), soon())
