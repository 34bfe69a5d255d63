"""A server that stores keys in a shared folder and is killed on the way; run as a program with the
store's folder, the index's, a moment and a record's number. It ends `before` or `after` the append
of that record, or `never`, and prints each key that was acknowledged.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.index.version_rows import new_rows
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.shared.versions import ExtentName, SharedVersion
from objectcache_storage_server.engines.stores.folder.folder_store import FolderStore
from objectcache_storage_server.engines.stores.shared_store import SharedStore
from objectcache_storage_server.testing import PassingStore
from tests.unit.storage_server.engines.shared.catalogs import SHAPE, soon, version_of


class KillingStore(PassingStore):
    """Ends the process around an append."""

    def __init__(self, inner: SharedStore, moment: str, number: int) -> None:
        super().__init__(inner)
        self.moment = moment
        self.number = number

    def append(self, number: int, record: bytes, deadline_s: float) -> bool:
        if (self.moment, self.number) == ("before", number):
            os._exit(9)
        is_ours = super().append(number, record, deadline_s)
        if (self.moment, self.number) == ("after", number):
            os._exit(9)
        return is_ours


def store_keys(catalog: LogCatalog) -> None:
    """Store one key after the other until the process ends."""
    with catalog.reading() as view:
        bucket = view.bucket("bucket").number
    number = 0
    while True:
        number += 1
        extent = ExtentName(catalog.writer, number)
        version = version_of(bucket, f"{catalog.writer:016x}-{number:05}", extent, 0)
        catalog.change(partial(add, version), soon())
        print(version.info.key, flush=True)


def add(version: SharedVersion, change: ReplayedChange) -> None:
    """Add it, in an extent of its own."""
    change.add(new_rows([version]), {version.extents[0]: SHAPE})


if __name__ == "__main__":
    store, index, moment, number = sys.argv[1:]
    killing = KillingStore(FolderStore(Path(store)), moment, int(number))
    store_keys(LogCatalog(killing, Path(index), index_bytes_max=1 << 28))
