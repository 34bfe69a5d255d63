"""A commit whose record is made again, of other changes than the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from objectcache_schemas.errors import NotFound
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.stores.memory_store import MemoryStoreState
from tests.unit.storage_server.engines.shared.upkeep.upkept_servers import KV, UpkeptServer

T = TypeVar("T")


class _Undone(Exception):
    """The record that was begun is not made."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[UpkeptServer]:
    """With a bucket."""
    opened = UpkeptServer(MemoryStoreState(), tmp_path)
    opened.engine.create_bucket(KV)
    yield opened
    opened.close()


def test_a_commit_is_judged_again_behind_other_changes_of_the_same_number(
    server: UpkeptServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = server.engine.catalog
    with catalog.reading() as view:
        bucket = view.bucket(KV.name).number
    staged = server.staged(["key"])
    change_once = catalog.change

    def change_twice(act: Callable[[ReplayedChange], T], deadline_s: float) -> T:
        def behind_a_document(change: ReplayedChange) -> None:
            change.put_document("name", b"document")
            act(change)
            raise _Undone

        def behind_a_removal(change: ReplayedChange) -> T:
            change.remove_bucket(bucket)
            return act(change)

        with pytest.raises(_Undone):
            change_once(behind_a_document, deadline_s)
        return change_once(behind_a_removal, deadline_s)

    monkeypatch.setattr(catalog, "change", change_twice)
    with pytest.raises(NotFound):
        server.commit(staged)
    monkeypatch.undo()
    assert server.stored_keys() == []
