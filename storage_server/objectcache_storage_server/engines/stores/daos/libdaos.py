"""libdaos, the client library of DAOS, by ctypes: the one module that has its calls, structures and
errors. They are those of DAOS 2.9.100, described in its sources: `daos_obj.h`, `daos_api.h`,
`daos_event.h` and `daos_errno.h` in `src/include`.

- Every call is given an event, and ends when that has been polled out of its queue. A queue, and
  all calls that use it, belong to one thread.
- A transaction is closed when no call of it is under way: libdaos ends the process otherwise.
- What a call points to (keys, descriptors, buffers) stays alive until then. Nothing can be called
  back: a call that is not waited for any more may write to its buffers later.
- Names with a 2 at the end are those of the library; the headers have macros without.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint, c_uint16, c_uint32, c_uint64
from ctypes import c_void_p as _P
from typing import Any

from objectcache_schemas.errors import StorageFull, Unavailable
from objectcache_storage_server.engines.stores.shared_store import LostObject, StoreTimeout

OK = 0
NO_HANDLE, EXISTS, TOO_BIG, RESTART = -1002, -1004, -2013, -2025
# What the service says without having carried anything out, now or later. The library repeats a
# call that was not answered, and the service looks for the earlier attempt only after handle,
# permission and container: what it says of those (-1001, -1002, -1005) tells nothing of that one.
NO_SPACE = frozenset({-1007, -1046})
REFUSALS = NO_SPACE | {-1003, -1010, -2012, TOO_BIG}
_TIMEOUTS = frozenset({-1006, -1011, -1018, -1020, -2027})
_UNREADABLE = frozenset({-2001, -2021, -2026, -2042})
ERROR_NAMES = {
    -1001: "no permission", -1002: "invalid handle", -1003: "invalid parameters",
    -1004: "it exists", -1005: "it does not exist", -1006: "a node cannot be reached",
    -1007: "no space", -1010: "not implemented", -1011: "time out", -1015: "not initialized",
    -1018: "cancelled", -1020: "transport error", -1030: "the service is not attached",
    -1046: "quota", -2001: "input or output error", -2010: "read only", -2012: "key too large",
    -2013: "record too large", -2021: "checksum error", -2025: "the transaction must restart",
    -2026: "data is lost", -2027: "cancelled", -2034: "the agent does not answer",
    -2042: "NVMe error", -2050: "no such container", -2051: "the container is being destroyed",
}  # fmt: skip

POOL_READ_WRITE = 2  # DAOS_PC_RW
CONTAINER_READ_WRITE = 2  # DAOS_COO_RW
OBJECT_READ_WRITE = 4  # DAOS_OO_RW
HASHED_KEYS, UINT64_KEYS = 0, 2  # DAOS_OT_MULTI_HASHED, DAOS_OT_DKEY_UINT64
ONE_GROUP, ALL_TARGETS = 1 << 5, 1 << 9  # DAOS_OCH_SHD_TINY, DAOS_OCH_SHD_MAX
INSERT_KEY = 1 << 1  # DAOS_COND_DKEY_INSERT
SINGLE, ARRAY = 1, 2  # DAOS_IOD_SINGLE, DAOS_IOD_ARRAY
ANY_SIZE = 0  # DAOS_REC_ANY
ANCHOR_END = 3  # DAOS_ANCHOR_TYPE_EOF
NO_TRANSACTION = c_uint64(0)  # DAOS_TX_NONE


class Buffer(ctypes.Structure):
    """`d_iov_t`, and `daos_key_t`."""

    _fields_ = (("address", _P), ("size_bytes", c_size_t), ("used_bytes", c_size_t))


class BufferList(ctypes.Structure):
    """`d_sg_list_t`."""

    _fields_ = (("count", c_uint32), ("used_count", c_uint32), ("buffers", POINTER(Buffer)))


class Extent(ctypes.Structure):
    """`daos_recx_t`: records of an array."""

    _fields_ = (("first", c_uint64), ("count", c_uint64))


class Value(ctypes.Structure):
    """`daos_iod_t`: what is read or written below an attribute key."""

    _fields_ = (
        ("key", Buffer),
        ("kind", c_int),
        ("record_bytes", c_uint64),
        ("flags", c_uint64),
        ("extent_count", c_uint32),
        ("extents", POINTER(Extent)),
    )


class KeyDescription(ctypes.Structure):
    """`daos_key_desc_t`."""

    _fields_ = (("size_bytes", c_uint64), ("kind", c_uint32))


class Anchor(ctypes.Structure):
    """`daos_anchor_t`: how far a listing is."""

    _fields_ = (
        ("kind", c_uint16),
        ("shard", c_uint16),
        ("flags", c_uint32),
        ("sub_anchors", c_uint64),
        ("rest", ctypes.c_uint8 * 104),
    )


class ObjectId(ctypes.Structure):
    """`daos_obj_id_t`."""

    _fields_ = (("low", c_uint64), ("high", c_uint64))


class Event(ctypes.Structure):
    """`daos_event_t`."""

    _fields_ = (("error", c_int), ("rest", c_uint64 * 20), ("debug", c_uint64))


_H, _E = c_uint64, _P  # handles are structures of one uint64, which are passed like it
_SIGNATURES: dict[str, tuple[Any, ...]] = {  # less the prefix `daos_`; all return an int
    "init": (),
    "fini": (),
    "eq_create": (POINTER(_H),),
    "eq_destroy": (_H, c_int),
    "eq_poll": (_H, c_int, c_int64, c_uint, POINTER(POINTER(Event))),
    "event_init": (_P, _H, _P),
    "event_fini": (_P,),
    "pool_connect2": (c_char_p, c_char_p, c_uint, POINTER(_H), _P, _E),
    "pool_disconnect": (_H, _E),
    "cont_open2": (_H, c_char_p, c_uint, POINTER(_H), _P, _E),
    "cont_close": (_H, _E),
    "obj_generate_oid2": (_H, POINTER(ObjectId), c_int, c_uint32, c_uint16, c_uint32),
    "obj_open": (_H, ObjectId, c_uint, POINTER(_H), _E),
    "obj_close": (_H, _E),
    "obj_fetch": (_H, _H, c_uint64, _P, c_uint, _P, _P, _P, _E),
    "obj_update": (_H, _H, c_uint64, _P, c_uint, _P, _P, _E),
    "obj_punch_dkeys": (_H, _H, c_uint64, c_uint, _P, _E),
    "obj_list_dkey": (_H, _H, POINTER(c_uint32), _P, _P, _P, _E),
    "tx_open": (_H, POINTER(_H), c_uint64, _E),
    "tx_commit": (_H, _E),
    "tx_close": (_H, _E),
}


class Libdaos:
    """The calls, as attributes by their names less the prefix."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libdaos.so.2")
        for name, arguments in _SIGNATURES.items():
            call = getattr(library, f"daos_{name}")
            call.restype, call.argtypes = c_int, arguments
            setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@functools.cache
def load_libdaos() -> Libdaos:
    """Load the library. Raises `Unavailable` where it is not installed."""
    try:
        return Libdaos()
    except (OSError, AttributeError) as error:
        raise Unavailable(f"libdaos.so.2 is needed; install DAOS' client: {error}") from error


def check(code: int, what: str, name: str = "") -> None:
    """Raise the error that an answer means, if any; `name` is that of the object which is read."""
    if code >= 0:
        return
    said = f"{what}: DAOS says {ERROR_NAMES.get(code, 'an error')} ({code})"
    if code in NO_SPACE:
        raise StorageFull(f"{said}; extend the pool or evict")
    if code == NO_HANDLE:
        said += (
            "; this server was evicted from the pool, or the container destroyed: start it again"
        )
    if name and code in _UNREADABLE:
        raise LostObject(name, said)
    if code in _TIMEOUTS:
        raise StoreTimeout(said)
    raise Unavailable(said)
