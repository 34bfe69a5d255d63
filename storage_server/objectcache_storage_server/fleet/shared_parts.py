"""What a server has besides its engine where its store is shared: the others, and documents."""

from __future__ import annotations

from collections.abc import Callable

from objectcache_storage_server.documents.shared_documents import SharedDocuments
from objectcache_storage_server.documents.tell_changes import ChangeTeller
from objectcache_storage_server.engines.shared.index.apply_record import Touched
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.fleet.shared_directory import SharedDirectory

_BUCKETS = "buckets"


class SharedParts:
    """Over the catalog of an engine, which is closed after them."""

    def __init__(self, catalog: LogCatalog) -> None:
        self._catalog = catalog
        self._buckets = ChangeTeller("shared-buckets")
        self.documents = SharedDocuments(catalog)
        self.directory = SharedDirectory(catalog)

    def log_state(self) -> tuple[int, int | None]:
        """The number under which this server writes, 0 before it is entered in the log, and how
        many records it has heard of and not replayed, None where that is not known.
        """
        return self._catalog.entered_writer, self._catalog.lag_records

    def store_failure(self) -> str:
        """Why this server should be asked for nothing, and for how long that is so; empty while it
        hears of what the others do. Never blocks.
        """
        return self._catalog.store_failure

    def on_buckets(self, changed: Callable[[], None]) -> None:
        """Have `changed` called, in a thread of its own, when buckets have changed, on whichever
        server, and again after a pause where it fails.
        """
        self._buckets.listen(_BUCKETS, changed)

        def note(touched: Touched) -> None:
            if touched.buckets or touched.is_everything:
                self._buckets.changed([_BUCKETS])

        self._catalog.listen(note)

    def close(self) -> None:
        """Let go of them, before the engine is closed."""
        self._buckets.close()
        self.documents.close()

    def __repr__(self) -> str:
        return f"<SharedParts of {self._catalog!r}>"
