"""Rows of the tables as the index stores them: the columns that outlive the process, sealed.

An object's row is followed by its key, so that a number leads back to it. Little-endian. The layout
is the index's own: a column that the tables gain is not stored until it is named here, with another
`FORMAT_VERSION`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from objectcache_storage_server.engines.lmdb_spaces.seals import SEAL_BYTES, seal, unseal
from objectcache_storage_server.engines.local.space.dense_tables import UNKNOWN_CODEC, DenseTable

USES_ROWS = 4096  # objects in one stored block of uses

STORED_OBJECT = np.dtype(
    [
        ("is_evictable", "?"),
        ("is_pinned", "?"),
        ("bucket", "<u4"),
        ("extent", "<u4"),
        ("slot", "<u2"),
        ("own_hash", "<u8"),
        ("parent_hash", "<u8"),
        ("size_bytes", "<u8"),
        ("last_used", "<u8"),
        ("modified_s", "<f8"),
        ("serial", "<u8"),
    ]
)
STORED_EXTENT = np.dtype(
    [
        ("slots", "<u2"),
        ("num_layers", "<u4"),
        ("slice_bytes", "<u8"),
        ("offset_bytes", "<u8"),
        ("length_bytes", "<u8"),
    ]
)
STORED_PITCH = np.dtype("<u4")  # one a layer, behind the row of an extent with encoded slices
CODEC_BYTES = 1  # behind both, where slices were given to a codec, whether they got shorter or not
STORED_USE = np.dtype([("own_hash", "<u8"), ("last_used", "<u8"), ("parent_hash", "<u8")])

KEY_AT = SEAL_BYTES + STORED_OBJECT.itemsize  # of the key, in an object's sealed row

Rows = npt.NDArray[np.void]


def row_bodies(rows: Rows, stored: np.dtype[np.void]) -> list[bytes]:
    """The stored columns of each row."""
    kept = _columns(rows, stored).tobytes()
    size_bytes = stored.itemsize
    return [kept[begin : begin + size_bytes] for begin in range(0, len(kept), size_bytes)]


def rows_of_bodies(bodies: Iterable[bytes], stored: np.dtype[np.void]) -> Rows:
    """The rows of `row_bodies`."""
    return np.frombuffer(b"".join(bodies), stored)


def extent_bodies(rows: Rows, pitches: Sequence[Sequence[int]]) -> list[bytes]:
    """The stored columns of each extent's row, its pitches, none where slices are plain, and the
    codec that they were given to, if to any that is known.
    """
    codecs: list[int] = rows["codec"].tolist()
    return [
        body + np.array(each, STORED_PITCH).tobytes() + _codec_of_row(codec)
        for body, each, codec in zip(row_bodies(rows, STORED_EXTENT), pitches, codecs, strict=True)
    ]


def _codec_of_row(codec: int) -> bytes:
    return b"" if codec in (0, UNKNOWN_CODEC) else codec.to_bytes(CODEC_BYTES, "little")


def pitches_of_body(body: bytes) -> tuple[int, ...]:
    """The pitches of a body of `extent_bodies`."""
    count = (len(body) - STORED_EXTENT.itemsize) // STORED_PITCH.itemsize
    pitches: list[int] = np.frombuffer(body, STORED_PITCH, count, STORED_EXTENT.itemsize).tolist()
    return tuple(pitches)


def codec_of_body(body: bytes) -> int:
    """The codec of a body of `extent_bodies`; `UNKNOWN_CODEC` of frames without."""
    behind_bytes = len(body) - STORED_EXTENT.itemsize
    if behind_bytes % STORED_PITCH.itemsize == CODEC_BYTES:
        return body[-1]
    return UNKNOWN_CODEC if behind_bytes else 0


def fill_table(table: DenseTable, numbers: npt.NDArray[np.intp], rows: Rows) -> None:
    """Give the table these rows under these numbers, and take the numbers."""
    if len(numbers):
        table.add_at(int(numbers.max()))
        columns = table.rows
        columns["is_used"][numbers] = True
        for name in rows.dtype.names or ():
            columns[name][numbers] = rows[name]
    table.rebuild_free()


def pinned_row(stored: bytes, number: int, pinned: bool) -> bytes | None:
    """An object's sealed row with `is_pinned` changed; None where it is damaged."""
    body = unseal(stored, number)
    if body is None:
        return None
    row = np.frombuffer(body, STORED_OBJECT, count=1).copy()
    row["is_pinned"] = pinned
    return seal(row.tobytes() + body[STORED_OBJECT.itemsize :], number)


def bucket_of_row(stored: bytes) -> int:
    """The bucket number in an object's sealed row."""
    return int(np.frombuffer(stored, STORED_OBJECT, count=1, offset=SEAL_BYTES)["bucket"][0])


def uses_of(table: DenseTable, block: int) -> bytes:
    """The uses of a block of rows, from number block * USES_ROWS on, sealed."""
    rows = table.used[block * USES_ROWS : (block + 1) * USES_ROWS]
    uses = _columns(rows, STORED_USE)
    uses["own_hash"][~rows["is_used"]] = 0
    return seal(uses.tobytes(), block)


def overlay_uses(table: DenseTable, block: int, stored: bytes) -> None:
    """Give the rows of a block the uses that were stored of these very objects.

    A row that was stored after its block of uses is the later word on both columns. A damaged block
    is passed over: recency is a hint.
    """
    body = unseal(stored, block)
    if body is None:
        return
    rows = table.used[block * USES_ROWS : (block + 1) * USES_ROWS]
    uses = np.frombuffer(body, STORED_USE)[: len(rows)]
    rows = rows[: len(uses)]
    is_same = rows["is_used"] & (rows["own_hash"] == uses["own_hash"])
    is_later = is_same & (uses["last_used"] >= rows["last_used"])
    for name in ("last_used", "parent_hash"):
        rows[name][is_later] = uses[name][is_later]


def _columns(rows: Rows, stored: np.dtype[np.void]) -> Rows:
    kept = np.empty(len(rows), stored)
    for name in stored.names or ():
        kept[name] = rows[name]
    return kept
