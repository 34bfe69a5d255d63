"""How far an index has come, in one row that is changed with every record."""

from __future__ import annotations

from typing import Any

import lmdb
import msgspec

from objectcache_storage_server.engines.lmdb_spaces.seals import seal
from objectcache_storage_server.engines.shared.index.index_tables import IndexDamage, opened_row

_KEY = b"state"


class IndexState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the records up to one add up to, beside the tables."""

    store_id: bytes
    end: int = 0  # number of the next record
    checksum: int = 0  # of the newest record
    log_bytes: int = 0  # of all records so far
    bucket_count: int = 0  # ever made, which numbers the next
    segment_count: int = 0  # see `long_keys`
    upkeep_holder: int | None = None  # writer
    checkpoint: int | None = None  # number of the newest one
    checkpoint_before: int | None = None
    checkpoint_log_bytes: int = 0  # `log_bytes` when the newest one was named
    extent_count: int = 0  # that some version names
    extent_bytes: int = 0
    buried_count: int = 0  # extents in the graveyard
    buried_bytes: int = 0

    @property
    def allocated_bytes(self) -> int:
        """That extents take in the store, those in the graveyard too."""
        return self.extent_bytes + self.buried_bytes

    def put(self, txn: lmdb.Transaction[bytes], meta: Any) -> None:
        """Store it."""
        txn.put(_KEY, seal(_encode(self), 0), db=meta)

    @classmethod
    def get(cls, txn: lmdb.Transaction[bytes], meta: Any) -> IndexState:
        """What is stored; raises `IndexDamage`."""
        stored = txn.get(_KEY, db=meta)
        if stored is None:
            raise IndexDamage("the index does not say how far it has come")
        return _decode(opened_row(stored, 0, "the index's state"))


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(IndexState).decode
