"""Any sequence of changes by two servers leaves what a dictionary would hold, also after restarts,
checkpoints and trims; and an index that is made from the log is the same one.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from objectcache_schemas.records import ObjectAttributes
from objectcache_storage_server.engines.base import BucketTotals
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.log.keep_checkpoints import CheckpointRule
from objectcache_storage_server.engines.shared.versions import SharedVersion, SharedVersionName
from objectcache_storage_server.engines.stores.memory_store import MemoryStoreState
from tests.unit.examples import examples
from tests.unit.storage_server.engines.shared.catalogs import Server

RULE = CheckpointRule(records=10, records_kept=0)
KEYS = [f"key{n}" for n in range(12)] + ["long" * 200, "long" * 200 + "a", "long" * 130, "ü"]
STEPS = 120


class ModelledStore:
    """Two servers, and what their store is to hold."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.state = MemoryStoreState()
        self.servers = [
            Server(self.state, folder / name, checkpoint_rule=RULE) for name in ("one", "other")
        ]
        self.bucket = self.servers[0].make_bucket()
        self.etags: dict[str, str] = {}
        self.types: dict[str, str] = {}
        self.pinned: set[str] = set()
        self.count = 0

    def step(self) -> None:
        """Any change, by any of them."""
        server = self.random.choice(self.servers)
        acts = [self.put] * 4 + [self.delete] * 2 + [self.pin, self.tag, self.restart, self.keep]
        self.random.choice(acts)(server)

    def put(self, server: Server) -> None:
        self.count += 1
        keys = self.random.sample(KEYS, self.random.randint(1, 9))
        server.keys(self.bucket)
        server.new_writer()  # where it was fenced
        server.put(self.bucket, keys, byte=self.count)
        for key in keys:
            self.etags[key] = f"etag-{self.count}"
            self.types.pop(key, None)
        self.pinned -= set(keys)

    def names(self, server: Server) -> list[SharedVersionName]:
        server.keys(self.bucket)
        keys = self.random.sample(KEYS, self.random.randint(1, 6))
        with server.catalog.reading() as view:
            return [version.name for version in view.versions(self.bucket, keys).values()]

    def delete(self, server: Server) -> None:
        names = self.names(server)
        gone = server.change(lambda change: change.delete(names))
        assert [version.name for version in gone] == names
        for name in names:
            del self.etags[name.key]
            self.types.pop(name.key, None)
            self.pinned.discard(name.key)

    def pin(self, server: Server) -> None:
        names = self.names(server)
        pinned = self.random.random() < 0.7
        assert server.change(lambda change: change.set_pinned(names, pinned)) == len(names)
        keys = {name.key for name in names}
        self.pinned = self.pinned | keys if pinned else self.pinned - keys

    def tag(self, server: Server) -> None:
        for name in self.names(server)[:1]:
            self.count += 1
            content_type = f"type{self.count}"
            attributes = ObjectAttributes(content_type=content_type)
            server.change(lambda change: change.replace_attributes(name, attributes))  # noqa: B023
            self.types[name.key] = content_type

    def restart(self, server: Server) -> None:
        server.close()
        server.open()

    def keep(self, server: Server) -> None:
        def take(change: ReplayedChange) -> None:
            if change.state.upkeep_holder != change.writer:
                if change.state.upkeep_holder is not None:
                    change.fence(change.state.upkeep_holder)
                change.take_upkeep()

        server.change(take)
        server.catalog.keep_checkpoint(0.0)

    def check(self, server: Server) -> None:
        assert server.keys(self.bucket) == sorted(self.etags)
        with server.catalog.reading() as view:
            found = view.versions(self.bucket, KEYS)
            totals = view.totals(self.bucket)
            pinned = view.pinned(version.name for version in found.values())
            extents = dict(view.extents(None, 1 << 30))
            inside = {name: view.versions_in(name) for name in extents}
            buried = [each.name for each in view.graveyard(None, 1 << 30)]
        assert {key: version.info.etag for key, version in found.items()} == self.etags
        assert {
            key: version.info.attributes.content_type
            for key, version in found.items()
            if version.info.attributes.content_type
        } == self.types
        assert {name.key for name in pinned} == self.pinned
        assert totals == BucketTotals(len(self.etags), 16 * len(self.etags))
        by_extent: dict[object, list[SharedVersion]] = {}
        for version in sorted(found.values(), key=lambda version: version.serial):
            by_extent.setdefault(version.extents[0], []).append(version)
        assert inside == by_extent
        assert {name: row.live_count for name, row in extents.items()} == {
            name: len(versions) for name, versions in by_extent.items()
        }
        assert not set(buried) & set(extents)


@pytest.mark.parametrize("seed", range(examples(3)))
def test_two_servers_hold_what_a_dictionary_would(tmp_path: Path, seed: int) -> None:
    modelled = ModelledStore(tmp_path, seed)
    for step in range(STEPS):
        modelled.step()
        if step % 10 == 0:
            modelled.check(modelled.random.choice(modelled.servers))
    one, other = modelled.servers
    modelled.check(one)
    assert one.contents() == other.contents()
    fresh = Server(modelled.state, tmp_path / "fresh")
    assert fresh.contents()[1:7] == one.contents()[1:7]
    for server in (one, other, fresh):
        server.close()
