"""What servers of a shared store know of each other: documents, and who there is."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from objectcache_runtime.settings import Settings
from objectcache_schemas.accounts import PutUser, User
from objectcache_schemas.errors import Conflict, InvalidRequest
from objectcache_schemas.operators.schedule import ScheduleChanges
from objectcache_schemas.operators.server_list import ServerState
from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.accounts.sealing import KEY_BYTES, SecretSeal
from objectcache_storage_server.documents import shared_documents
from objectcache_storage_server.documents.documents import SCHEDULE, DocumentChanged
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.stores.memory_store import MemoryStore, MemoryStoreState
from objectcache_storage_server.fleet.shared_directory import SharedDirectory
from objectcache_storage_server.fleet.shared_parts import SharedParts
from objectcache_storage_server.quotas.books import Books, StoreCompany
from objectcache_storage_server.scheduling.schedule_book import ScheduleBook
from objectcache_storage_server.testing import FaultyStore
from tests.unit.storage_server.fleet.two_servers import two_servers

BOUND_S = 30.0


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + BOUND_S
    pause = threading.Event()
    while not is_so():
        assert time.monotonic() < until_s
        pause.wait(0.01)


def test_a_document_is_replaced_by_whoever_knows_its_version(tmp_path: Path) -> None:
    with two_servers(tmp_path) as (first, second):
        kept = first.documents.put(SCHEDULE, b"one", None)
        with pytest.raises(DocumentChanged):
            second.documents.put(SCHEDULE, b"two", None)
        again = second.documents.put(SCHEDULE, b"two", kept.version)
        found = second.documents.get(SCHEDULE)
        assert found == (again.version, b"two")
        with pytest.raises(DocumentChanged):
            first.documents.put(SCHEDULE, b"three", kept.version)


def test_a_user_made_at_one_server_is_in_force_at_the_other(tmp_path: Path) -> None:
    seal = SecretSeal(os.urandom(KEY_BYTES))
    with two_servers(tmp_path) as (first, second):
        books = [AccountBook(one.documents, seal) for one in (first, second)]
        told = threading.Event()
        books[1].on_change(told.set)
        user = User(name="alice", created_s=1.0)
        version = books[0].change(PutUser(user=user, create=True), lambda _: [])
        assert told.wait(BOUND_S)
        wait_until(lambda: books[1].version == version)
        assert books[1].accounts == books[0].accounts
        with pytest.raises(InvalidRequest, match="the document accounts of the shared store was"):
            AccountBook(second.documents, SecretSeal(os.urandom(KEY_BYTES)))


def test_a_schedule_changed_at_one_server_is_in_force_at_the_other(tmp_path: Path) -> None:
    with two_servers(tmp_path) as (first, second):
        books = [ScheduleBook(Settings(), one.documents) for one in (first, second)]
        told = threading.Event()
        books[1].on_change(told.set)
        books[0].change(ScheduleChanges(cap_gbps=5.0))
        assert told.wait(BOUND_S)
        wait_until(lambda: books[1].configuration.cap_gbps == 5.0)
        books[1].change(ScheduleChanges(margin_gbps=2.0))
        wait_until(lambda: books[0].changes == ScheduleChanges(cap_gbps=5.0, margin_gbps=2.0))


def test_a_document_that_no_record_could_carry_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_documents, "STORED_BYTES_MAX", 100)
    with two_servers(tmp_path) as (first, _):
        with pytest.raises(Conflict, match="would have"):
            first.documents.put(SCHEDULE, os.urandom(200), None)
        assert first.documents.get(SCHEDULE) is None


def state(name: str, *, draining: bool = False) -> ServerState:
    server_id = name.encode().ljust(8, b".")
    return ServerState(server_id=server_id, host_id=name, address=f"{name}:1", draining=draining)


def test_servers_tell_each_other_of_themselves_and_that_they_go(tmp_path: Path) -> None:
    with two_servers(tmp_path) as (first, second):
        first.directory.tell(state("first"))
        second.directory.tell(state("second"))
        wait_until(lambda: names(first.directory) == ["second:1"])
        wait_until(lambda: names(second.directory) == ["first:1"])
        assert first.directory.serving == second.directory.serving == 2
        second.directory.tell(state("second", draining=True))
        wait_until(lambda: first.directory.serving == 1)


def test_a_server_says_that_it_is_cut_off_from_its_store_and_that_it_is_back(
    tmp_path: Path,
) -> None:
    store = FaultyStore(MemoryStore(MemoryStoreState()))
    with (
        closing(store),
        closing(LogCatalog(store, tmp_path)) as catalog,
        closing(SharedParts(catalog)) as parts,
        closing(MemoryEngine()) as engine,
    ):
        company = StoreCompany(lambda: 1, lambda: not parts.store_failure())
        books = Books(engine, AccountBook(), company)
        assert not parts.store_failure()
        assert books.versions is not None
        store.hold()
        wait_until(lambda: bool(parts.store_failure()))
        assert books.versions is None
        store.release()
        wait_until(lambda: not parts.store_failure())
        assert books.versions is not None


def names(directory: SharedDirectory) -> list[str]:
    return [one.name for one in directory.others()]
