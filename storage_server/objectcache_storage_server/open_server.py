"""What a storage server keeps, opened in order: its documents, its engine, its accounts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from objectcache_runtime.settings import Settings
from objectcache_schemas.errors import InvalidRequest
from objectcache_storage_server.accounts import lost_accounts
from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.documents.documents import ACCOUNTS, Documents
from objectcache_storage_server.documents.open_documents import open_documents
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.open_engine import open_engine
from objectcache_storage_server.engines.shared.engine import SharedEngine
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.fleet.shared_parts import SharedParts


class OpenedServer(NamedTuple):
    """The engine, and what stands beside it. `shared` where the store has other servers, too."""

    engine: Engine
    documents: Documents
    accounts: AccountBook
    shared: SharedParts | None


def open_server(settings: Settings, environment: Mapping[str, str]) -> OpenedServer:
    """Open what the settings name. Raises `InvalidRequest`, `Unavailable`; then nothing is open."""
    if "://" in settings.storage.engine:
        return _open_shared(settings, environment)
    documents = open_documents(settings)
    accounts: AccountBook | None = None
    if not lost_accounts.are_absent(settings, documents):  # before the engine: errors are cheap
        accounts = AccountBook.open(settings, documents, environment)
    engine = open_engine(settings)
    try:
        return OpenedServer(
            engine, documents, accounts or _first(settings, documents, engine, environment), None
        )
    except BaseException:
        engine.close()
        raise


def _open_shared(settings: Settings, environment: Mapping[str, str]) -> OpenedServer:
    """Accounts and schedule lie in the store, too."""
    if not settings.server.data_dir:
        raise InvalidRequest("a shared store needs --data-dir DIR, for this server's index of it")
    engine = open_engine(settings)
    assert isinstance(engine, SharedEngine)
    catalog = engine.catalog
    assert isinstance(catalog, LogCatalog)
    shared = SharedParts(catalog)
    try:
        documents = shared.documents
        if documents.get(ACCOUNTS) is None:
            accounts = _first(settings, documents, engine, environment)
        else:
            accounts = AccountBook.open(settings, documents, environment)
        return OpenedServer(engine, documents, accounts, shared)
    except BaseException:
        shared.close()
        engine.close()
        raise


def _first(
    settings: Settings, documents: Documents, engine: Engine, environment: Mapping[str, str]
) -> AccountBook:
    """The accounts where there are none, if there is no bucket of a user."""
    owners = (bucket.owner for bucket in engine.each_bucket())
    lost_accounts.check_owners(settings, documents, owners)
    return AccountBook.open(settings, documents, environment)
