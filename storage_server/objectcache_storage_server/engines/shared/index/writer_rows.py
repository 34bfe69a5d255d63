"""Writers as the index stores them, under their numbers."""

from __future__ import annotations

import msgspec

from objectcache_storage_server.engines.lmdb_spaces.seals import seal
from objectcache_storage_server.engines.shared.index.index_tables import opened_row


class WriterRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the log says of a writer."""

    last_record: int  # number of the newest record of it
    sequence: int  # that this record carries
    document: bytes = b""  # what other servers are to know of it
    fenced_by: int | None = None  # number of the record that says that it is dead

    def pack(self, writer: int) -> bytes:
        """The row of a writer."""
        return seal(_encode(self), writer)

    @classmethod
    def unpack(cls, writer: int, stored: bytes) -> WriterRow:
        """The row of a writer; raises `IndexDamage`."""
        return _decode(opened_row(stored, writer, f"the row of writer {writer:x}"))


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(WriterRow).decode
