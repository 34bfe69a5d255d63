"""The tables of the replayed index, and the keys of their rows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import lmdb
import numpy as np

from objectcache_storage_server.engines.lmdb_spaces.seals import unseal

FORMAT_VERSION = 1  # of the tables; an index of another one is made again
NUMBER_BYTES = 8  # of a number as a key, big-endian
TABLES_MAX = 16


class IndexDamage(Exception):
    """The index is not what was stored in it, or not what the records say: it is made again."""


@dataclass(frozen=True, slots=True)
class IndexTables:
    """Handles of LMDB's named databases, whose type has no public name."""

    buckets: Any  # name: number and info
    objects: Any  # see `object_spaces`; the version's serial
    versions: Any  # serial: see `version_rows`
    extents: Any  # extent that some version names: see `extent_rows`
    graveyard: Any  # extent that no version names any more, but whose objects may be there
    documents: Any  # name: bytes
    writers: Any  # see `writer_rows`
    totals: Any  # bucket number: objects and bytes
    meta: Any  # see `index_state`

    @classmethod
    def opened(cls, environment: lmdb.Environment) -> IndexTables:
        """Create or open all of them."""
        names = [field.name for field in dataclasses.fields(cls)]
        with environment.begin(write=True) as txn:
            return cls(**{name: environment.open_db(name.encode(), txn) for name in names})


def raw_number(number: int) -> bytes:
    """A number as a key, in order."""
    return number.to_bytes(NUMBER_BYTES, "big")


def raw_numbers(first: int, count: int) -> list[bytes]:
    """Numbers that follow each other, as keys."""
    raw = np.arange(first, first + count, dtype=">u8").tobytes()
    return [raw[begin : begin + NUMBER_BYTES] for begin in range(0, len(raw), NUMBER_BYTES)]


def opened_row(stored: bytes, owner: int, what: str) -> bytes:
    """The body of a row; raises `IndexDamage`."""
    body = unseal(stored, owner)
    if body is None:
        raise IndexDamage(f"{what} does not match its checksum")
    return body
