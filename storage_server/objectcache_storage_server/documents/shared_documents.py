"""Documents in the log of a store that several servers share.

A document is stored with its version, which is one more than the version before, in the record that
was judged against that version: so every server gives it the same number, and of two that change it
at once one is told to judge again.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

import msgspec

from objectcache_schemas.errors import Conflict, Unavailable
from objectcache_schemas.limits import MIB
from objectcache_storage_server.documents.documents import (
    DocumentChanged,
    DocumentKind,
    Documents,
    Kept,
    KeptDocument,
)
from objectcache_storage_server.documents.tell_changes import ChangeTeller
from objectcache_storage_server.engines.shared.index.apply_record import Touched
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.shared.shared_catalog import SharedChange, SharedView

CALL_S_MAX = 10.0
STORED_BYTES_MAX = 2 * MIB  # compressed; a record of the log has 4 MiB


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """What lies in the log."""

    version: int
    compressed: bytes


_decode = msgspec.msgpack.Decoder(_Stored).decode


class SharedDocuments(Documents):
    """Documents of a catalog. A thread tells what other servers have changed."""

    def __init__(self, catalog: LogCatalog) -> None:
        self._catalog = catalog
        self._teller = ChangeTeller("shared-documents")
        catalog.listen(self._note)

    def close(self) -> None:
        """Tell nobody any more; before the catalog is closed."""
        self._teller.close()

    def place(self, kind: DocumentKind) -> str:
        return f"the document {kind.name} of the shared store"

    def get(self, kind: DocumentKind) -> KeptDocument | None:
        with self._catalog.reading() as view:
            stored = _found(view, kind)
        return None if stored is None else _opened(stored, self.place(kind))

    def follow(self) -> bool:
        self._catalog.follow(time.monotonic() + CALL_S_MAX)
        return True

    def put(self, kind: DocumentKind, data: bytes, expected: int | None) -> Kept:
        compressed = zlib.compress(data)
        if len(compressed) > STORED_BYTES_MAX:
            raise Conflict(
                f"{kind.words} would have {len(compressed)} bytes, compressed, and a shared store "
                f"takes {STORED_BYTES_MAX}: remove some",
                code="LimitExceeded",
            )

        def act(change: SharedChange) -> int:
            before = _found(change, kind)
            if (None if before is None else before.version) != expected:
                raise DocumentChanged
            version = 1 if before is None else before.version + 1
            change.put_document(kind.name, msgspec.msgpack.encode(_Stored(version, compressed)))
            return version

        return Kept(self._catalog.change(act, time.monotonic() + CALL_S_MAX))

    def on_change(self, kind: DocumentKind, listener: Callable[[], None]) -> None:
        self._teller.listen(kind.name, listener)

    def _note(self, touched: Touched) -> None:
        """Records were applied; called by the thread that follows the log, which goes on."""
        self._teller.changed(None if touched.is_everything else touched.documents)

    def __repr__(self) -> str:
        return f"<SharedDocuments of {self._catalog!r}>"


def _found(view: SharedView, kind: DocumentKind) -> _Stored | None:
    raw = view.document(kind.name)
    return None if raw is None else _decode(raw)


def _opened(stored: _Stored, place: str) -> KeptDocument:
    try:
        return KeptDocument(stored.version, zlib.decompress(stored.compressed))
    except zlib.error as error:
        raise Unavailable(f"{place} cannot be read: {error}") from error
