"""The books of a storage server: who there is, who may have how much, and who has it."""

from __future__ import annotations

from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.accounts.directory import AccountDirectory
from objectcache_storage_server.accounts.read_passes import Versions
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.quotas.in_flight import InFlight
from objectcache_storage_server.quotas.quota_book import QuotaBook
from objectcache_storage_server.quotas.request_tokens import RequestTokens
from objectcache_storage_server.quotas.stored_ledger import StoredLedger


class Books:
    """All of them, over one engine."""

    def __init__(self, engine: Engine, accounts: AccountBook) -> None:
        self.accounts = accounts
        self.directory = AccountDirectory(accounts)
        self.quotas = QuotaBook(engine, accounts, self.directory)
        self.stored = StoredLedger(self.quotas, engine.usage, engine.each_bucket())
        self.in_flight = InFlight(self.quotas)
        self.request_tokens = RequestTokens()

    @property
    def versions(self) -> Versions:
        """Of the accounts and the buckets: others after any change."""
        return Versions(self.accounts.version, self.directory.buckets_version)
