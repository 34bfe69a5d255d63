"""The books of a storage server: who there is, who may have how much, and who has it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.accounts.directory import AccountDirectory
from objectcache_storage_server.accounts.read_passes import Versions
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.quotas.in_flight import InFlight
from objectcache_storage_server.quotas.quota_book import QuotaBook
from objectcache_storage_server.quotas.request_tokens import RequestTokens
from objectcache_storage_server.quotas.stored_ledger import StoredLedger


class StoreCompany(NamedTuple):
    """The other servers of a store."""

    serving: Callable[[], int]  # how many servers take work, this one among them
    is_current: Callable[[], bool] = lambda: True  # whether this one hears of what others change


class Books:
    """All of them, over one engine."""

    def __init__(
        self,
        engine: Engine,
        accounts: AccountBook,
        company: StoreCompany | None = None,
    ) -> None:
        """`company`: the other servers of a store that is not this server's alone."""
        self._engine = engine
        self.accounts = accounts
        digest = (lambda: buckets_digest(engine)) if company is not None else None
        self.directory = AccountDirectory(accounts, digest)
        self.quotas = QuotaBook(engine, accounts, self.directory)
        self.stored = StoredLedger(
            self.quotas, engine.usage, engine.each_bucket(), is_shared=company is not None
        )
        serving = company.serving if company is not None else _alone
        self.serving = serving
        self.is_current = company.is_current if company is not None else _always
        self.in_flight = InFlight(self.quotas, serving)
        self.request_tokens = RequestTokens()

    def buckets_changed_elsewhere(self) -> None:
        """Another server has made, changed or removed buckets."""
        self.stored.set_buckets(self._engine.each_bucket())
        self.directory.buckets_changed()

    @property
    def versions(self) -> Versions | None:
        """Of the accounts and the buckets: others after any change. None where changes of other
        servers are not heard of.
        """
        if not self.is_current():
            return None
        return Versions(self.accounts.version, self.directory.buckets_version)


def buckets_digest(engine: Engine) -> int:
    """All that gateways know of buckets, in 63 bits."""
    buckets = sorted(engine.each_bucket(), key=lambda bucket: bucket.name)
    digest = hashlib.blake2b(msgspec.msgpack.encode(buckets), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _alone() -> int:
    return 1


def _always() -> bool:
    return True
