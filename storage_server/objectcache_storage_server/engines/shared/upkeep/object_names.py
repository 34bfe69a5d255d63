"""Names of the store's objects, taken apart: the other way round than `ExtentName.object_name`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from objectcache_storage_server.engines.shared.versions import ExtentName, ExtentShape
from objectcache_storage_server.engines.stores.shared_store import StoredObject

DATA_PREFIX = "data/"
PAGE_OBJECTS = 1000  # of a listing, compared with one moment of the index
_NAME = re.compile(r"data/([0-9a-f]{16})/([0-9a-f]+)\.([0-9a-f]+)")


class DataObject(NamedTuple):
    """An object of a listing that holds a piece of an extent."""

    name: str
    size_bytes: int
    extent: ExtentName
    piece: int


def data_object(stored: StoredObject) -> DataObject | None:
    """What an object of a listing holds; None where the name is none of ours."""
    found = _NAME.fullmatch(stored.name)
    if found is None:
        return None
    writer, number, piece = (int(part, 16) for part in found.groups())
    return DataObject(*stored, ExtentName(writer, number), piece)


def piece_bytes(shape: ExtentShape, piece: int) -> int:
    """Bytes of one of an extent's objects; 0 where it has none of this number."""
    begin_bytes = piece * shape.object_bytes
    return max(0, min(shape.object_bytes, shape.size_bytes - begin_bytes))


def pages(objects: Iterable[DataObject]) -> Iterator[list[DataObject]]:
    """The objects, some at a time."""
    each = iter(objects)
    while page := list(itertools.islice(each, PAGE_OBJECTS)):
        yield page
