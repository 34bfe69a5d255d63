"""The quotas in force: users' from the accounts, buckets' from the engine, remembered."""

from __future__ import annotations

from dataclasses import dataclass, field

from objectcache_schemas.errors import NotFound
from objectcache_schemas.records import Quota
from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.accounts.directory import AccountDirectory
from objectcache_storage_server.engines.base import Engine

BUCKETS_MAX = 4096  # whose quota is remembered
NO_QUOTA = Quota()


@dataclass(slots=True)
class _Known:
    """What is remembered of buckets, for one version of them."""

    version: int
    quotas: dict[str, Quota] = field(default_factory=dict[str, Quota])


class QuotaBook:
    """Answers from any thread. What it remembers of buckets it forgets when one is changed."""

    def __init__(self, engine: Engine, book: AccountBook, directory: AccountDirectory) -> None:
        self._engine = engine
        self._book = book
        self._directory = directory
        self._known = _Known(directory.buckets_version)

    def of_user(self, name: str) -> Quota:
        """A user's quota; the root user has none."""
        user = self._book.user(name)
        return user.quota if user is not None else NO_QUOTA

    def known_of_bucket(self, name: str) -> Quota | None:
        """A bucket's quota where it is remembered; never blocks."""
        return self._current().quotas.get(name)

    def of_bucket(self, name: str) -> Quota:
        """A bucket's quota; blocks where it is not remembered. A bucket that is not there has none:
        whoever uses it will be told.
        """
        known = self._current()
        quota = known.quotas.get(name)
        if quota is None:
            try:
                quota = self._engine.bucket(name).configuration.quota
            except NotFound:
                return NO_QUOTA
            if len(known.quotas) < BUCKETS_MAX:
                known.quotas[name] = quota
        return quota

    def _current(self) -> _Known:
        """What is remembered; nothing once a bucket was changed.

        The version is read before the engine is, so what is put beside it is never older.
        """
        version = self._directory.buckets_version
        known = self._known
        if known.version != version:
            known = _Known(version)
            self._known = known
        return known

    def __repr__(self) -> str:
        return f"<QuotaBook {len(self._known.quotas)} buckets>"
