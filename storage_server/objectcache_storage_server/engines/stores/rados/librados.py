"""librados, Ceph's client library, by ctypes: the one module that calls it and knows its errors.

It needs Debian's `librados2` alone, and depends on no version of Python. What matters of the
library (16.2.15; <rados/librados.h> describes every call):

- A call through `CDLL` gives the interpreter lock away and takes it back, which beside a busy
  thread lasts up to 5 ms; one through `PyDLL` keeps it. So what returns at once goes through
  `Librados.quick`, and what waits, or copies megabytes, through `Librados.waiting`. A submit waits
  where more is in flight than `objecter_inflight_ops` and `_op_bytes` say: they are set far above
  what the store has under way.
- It waits for ever for an OSD that is gone. Every operation is given up at its deadline by
  `rados_aio_cancel`, which is what its own timeout does; `rados_osd_op_timeout` and
  `rados_mon_op_timeout` stand behind that, for the calls that cannot be cancelled.
- A read that was given up does not touch its landing any more, also when the OSD answers later; a
  write that was given up may be carried out, also later.
- A write of several steps is carried out whole or not at all, on one object. With FULL_TRY it is
  refused where there is no space; without, it would wait for space, and so would a removal.
- Buffers of a write are copied when it is built. Those of a read, and the places of its results,
  are written until it is complete.
- Its threads do not survive a fork.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from objectcache_schemas.errors import InvalidRequest, StorageFull, Unavailable
from objectcache_storage_server.engines.stores.shared_store import LostObject, StoreTimeout

FULL_TRY = 64  # LIBRADOS_OPERATION_FULL_TRY
_CREATE_EXCLUSIVE = 1  # LIBRADOS_CREATE_EXCLUSIVE
_COMPARE_EQUAL = 1  # LIBRADOS_CMPXATTR_OP_EQ
OK = 0
ABSENT, EXISTS, CANCELLED = -errno.ENOENT, -errno.EEXIST, -errno.ECANCELED
FAILED = -errno.EIO  # of a read: no OSD has a copy that can be read, after several tries
# What an OSD or the library says without having carried anything out, now or later.
REFUSALS = frozenset(
    -code
    for code in (
        errno.EPERM, errno.ENOENT, errno.EACCES, errno.EINVAL, errno.EFBIG, errno.ENOSPC,
        errno.EROFS, errno.EMSGSIZE, errno.EOPNOTSUPP, errno.EDQUOT,
    )
)  # fmt: skip
WATCH_CALLBACK = ctypes.CFUNCTYPE(None, c_void_p, c_uint64, c_uint64, c_uint64, c_void_p, c_size_t)
WATCH_ERROR_CALLBACK = ctypes.CFUNCTYPE(None, c_void_p, c_uint64, c_int)
_POOL_NAME_BYTES_MAX = 1024


class ListedObject(ctypes.Structure):
    """`rados_object_list_item`."""

    _fields_ = (
        ("name_bytes", c_size_t),
        ("name", c_void_p),
        ("namespace_bytes", c_size_t),
        ("namespace", c_void_p),
        ("locator_bytes", c_size_t),
        ("locator", c_void_p),
    )


_P, _S, _N, _I = c_void_p, c_char_p, c_size_t, c_int
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {  # less the prefix `rados_`
    # the cluster and its pools
    "create2": (_I, (POINTER(_P), _S, _S, c_uint64)),
    "conf_read_file": (_I, (_P, _S)),
    "conf_set": (_I, (_P, _S, _S)),
    "connect": (_I, (_P,)),
    "shutdown": (None, (_P,)),
    "ioctx_create": (_I, (_P, _S, POINTER(_P))),
    "ioctx_destroy": (None, (_P,)),
    "ioctx_set_namespace": (None, (_P, _S)),
    "ioctx_get_id": (c_int64, (_P,)),
    "ioctx_pool_requires_alignment2": (_I, (_P, POINTER(_I))),
    "ioctx_pool_required_alignment2": (_I, (_P, POINTER(c_uint64))),
    "pool_reverse_lookup": (_I, (_P, c_int64, _P, _N)),
    # completions
    "aio_create_completion2": (_I, (_P, _P, POINTER(_P))),
    "aio_is_complete": (_I, (_P,)),
    "aio_wait_for_complete": (_I, (_P,)),
    "aio_get_return_value": (_I, (_P,)),
    "aio_release": (None, (_P,)),
    "aio_cancel": (_I, (_P, _P)),
    # reads
    "create_read_op": (_P, ()),
    "release_read_op": (None, (_P,)),
    "read_op_read": (None, (_P, c_uint64, _N, _P, _P, _P)),
    "read_op_getxattrs": (None, (_P, POINTER(_P), _P)),
    "read_op_stat": (None, (_P, _P, _P, _P)),
    "getxattrs_next": (_I, (_P, POINTER(_S), POINTER(_P), POINTER(_N))),
    "getxattrs_end": (None, (_P,)),
    "aio_read_op_operate": (_I, (_P, _P, _P, _S, _I)),
    # writes
    "create_write_op": (_P, ()),
    "release_write_op": (None, (_P,)),
    "write_op_create": (None, (_P, _I, _S)),
    "write_op_assert_exists": (None, (_P,)),
    "write_op_cmpxattr": (None, (_P, _S, ctypes.c_uint8, _S, _N)),
    "write_op_setxattr": (None, (_P, _S, _S, _N)),
    "write_op_write": (None, (_P, _P, _N, c_uint64)),
    "write_op_write_full": (None, (_P, _P, _N)),
    "write_op_truncate": (None, (_P, c_uint64)),
    "write_op_remove": (None, (_P,)),
    "aio_write_op_operate": (_I, (_P, _P, _P, _S, _P, _I)),
    # listings
    "object_list_begin": (_P, (_P,)),
    "object_list_end": (_P, (_P,)),
    "object_list_is_end": (_I, (_P, _P)),
    "object_list_cursor_free": (None, (_P, _P)),
    "object_list": (_I, (_P, _P, _P, _N, _P, _N, POINTER(ListedObject), POINTER(_P))),
    "object_list_free": (None, (_N, POINTER(ListedObject))),
    # watching
    "aio_watch2": (
        _I,
        (_P, _S, _P, POINTER(c_uint64), WATCH_CALLBACK, WATCH_ERROR_CALLBACK, c_uint32, _P),
    ),
    "aio_unwatch": (_I, (_P, c_uint64, _P)),
    "watch_check": (_I, (_P, c_uint64)),
    "watch_flush": (_I, (_P,)),
    "notify_ack": (_I, (_P, _S, c_uint64, c_uint64, _S, _I)),
    "aio_notify": (_I, (_P, _S, _P, _S, _I, c_uint64, _P, _P)),
}


@dataclass(frozen=True, slots=True)
class Librados:
    """The library's calls, less their prefix; see the head of this module for which to use."""

    quick: Any
    waiting: Any


@functools.cache
def load_librados() -> Librados:
    """Load the library. Raises `Unavailable` where it is not installed."""
    try:
        return Librados(_Calls(ctypes.PyDLL), _Calls(ctypes.CDLL))
    except (OSError, AttributeError) as error:
        raise Unavailable(f"librados is needed; install librados2 (Debian's name): {error}") from (
            error
        )


class _Calls:
    def __init__(self, load: Any) -> None:
        library = load("librados.so.2")
        for name, (result, arguments) in _SIGNATURES.items():
            call = getattr(library, f"rados_{name}")
            call.restype, call.argtypes = result, arguments
            setattr(self, name, call)


class Cluster:
    """A connection to a cluster. A process has one, made after its last fork."""

    def __init__(self, client: str, conf: str, options: Mapping[str, str]) -> None:
        """Connect as `client` (`client.admin`), by the configuration file `conf`, or Ceph's own
        search for one where it is empty. Raises `Unavailable`, `InvalidRequest`.
        """
        self.calls = load_librados()
        self.handle = c_void_p()
        made = self.calls.waiting.create2(byref(self.handle), b"ceph", client.encode(), 0)
        if made != OK:
            raise InvalidRequest(f"Ceph client {client!r} cannot be: {text(made)}")
        try:
            read = self.calls.waiting.conf_read_file(self.handle, conf.encode() or None)
            if read != OK:
                raise InvalidRequest(f"Ceph configuration {conf!r} cannot be read: {text(read)}")
            for name, value in options.items():
                code = self.calls.waiting.conf_set(self.handle, name.encode(), value.encode())
                assert code == OK, (name, value, code)
            connected = self.calls.waiting.connect(self.handle)
            if connected != OK:
                raise Unavailable(
                    f"Ceph of {conf or 'the default configuration'} as {client} cannot be reached: "
                    + text(connected)
                )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect, once nothing is under way and every `RadosPool` is closed."""
        handle, self.handle = self.handle, c_void_p()
        if handle:
            self.calls.waiting.shutdown(handle)


class RadosPool:
    """A namespace of a pool (`rados_ioctx_t`)."""

    def __init__(self, cluster: Cluster, name: str, namespace: str) -> None:
        """Raises `Unavailable` where there is no such pool."""
        self.calls, self.name, self._cluster = cluster.calls, name, cluster
        self.handle = c_void_p()
        code = self.calls.waiting.ioctx_create(cluster.handle, name.encode(), byref(self.handle))
        if code == ABSENT:
            raise Unavailable(f"there is no pool {name}: create it (ceph osd pool create {name})")
        if code != OK:
            raise Unavailable(f"pool {name} cannot be opened: {text(code)}")
        self.calls.quick.ioctx_set_namespace(self.handle, namespace.encode())
        self._id = self.calls.quick.ioctx_get_id(self.handle)

    def alignment_bytes(self) -> int:
        """What the offset of a write must be a multiple of; 1 where it need not. Only pools that
        are erasure coded ask for it.
        """
        is_needed, found = c_int(), c_uint64()
        code = self.calls.waiting.ioctx_pool_requires_alignment2(self.handle, byref(is_needed))
        if code == OK and is_needed.value:
            code = self.calls.waiting.ioctx_pool_required_alignment2(self.handle, byref(found))
        self.check(code, "its alignment")
        return found.value or 1

    def is_there(self) -> bool:
        """Whether the cluster's map, as far as it is known here, still has the pool."""
        name = ctypes.create_string_buffer(_POOL_NAME_BYTES_MAX)
        found = self.calls.waiting.pool_reverse_lookup(
            self._cluster.handle, self._id, name, len(name)
        )
        return bool(found != ABSENT)

    def check(self, code: int, name: str) -> None:
        """Raise the error that an answer about object `name` means, if any."""
        if code >= 0:
            return
        what = f"{name} in pool {self.name}"
        if code == ABSENT:
            if self.is_there():
                raise LostObject(name, f"pool {self.name} has no such object")
            raise Unavailable(f"pool {self.name} is not there any more")
        if code == FAILED:
            raise LostObject(name, f"the OSDs of pool {self.name} cannot read it")
        if code in (-errno.ETIMEDOUT, CANCELLED):
            raise StoreTimeout(f"{what}: Ceph did not answer in time")
        if code == -errno.EDQUOT:
            raise StorageFull(f"{what}: the pool's quota is reached; raise it or evict")
        if code == -errno.ENOSPC:
            raise StorageFull(f"{what}: an OSD is full; add OSDs or evict")
        if code == -errno.ESHUTDOWN:
            raise Unavailable(
                f"{what}: the cluster has blocklisted this client; restart the server"
            )
        raise Unavailable(f"{what}: {text(code)}")

    def close(self) -> None:
        handle, self.handle = self.handle, c_void_p()
        if handle:
            self.calls.waiting.ioctx_destroy(handle)


class WriteOperation:
    """The steps of one write of one object, which are carried out all or none."""

    def __init__(self, calls: Librados) -> None:
        self.calls = calls
        self.handle = c_void_p(calls.quick.create_write_op())

    def __enter__(self) -> WriteOperation:
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.quick.release_write_op(self.handle)

    def create(self) -> None:
        """The object must not be there, or the answer is `EXISTS`."""
        self.calls.quick.write_op_create(self.handle, _CREATE_EXCLUSIVE, None)

    def assert_exists(self) -> None:
        """The object must be there, or the answer is `ABSENT`."""
        self.calls.quick.write_op_assert_exists(self.handle)

    def compare_attribute(self, name: bytes, value: bytes) -> None:
        """The attribute must be this, or the answer is `CANCELLED`."""
        self.calls.quick.write_op_cmpxattr(self.handle, name, _COMPARE_EQUAL, value, len(value))

    def set_attribute(self, name: bytes, value: bytes) -> None:
        self.calls.quick.write_op_setxattr(self.handle, name, value, len(value))

    def write(self, data: memoryview | bytes, offset_bytes: int) -> None:
        address = address_of(data)
        self.calls.waiting.write_op_write(self.handle, address, len(data), offset_bytes)

    def write_full(self, data: memoryview | bytes) -> None:
        """The object is these bytes and no more."""
        self.calls.waiting.write_op_write_full(self.handle, address_of(data), len(data))

    def truncate(self, size_bytes: int) -> None:
        """Cut the object, or let it end later, with zeros that take no room on a device."""
        self.calls.quick.write_op_truncate(self.handle, size_bytes)

    def remove(self) -> None:
        self.calls.quick.write_op_remove(self.handle)


def address_of(data: memoryview | bytes) -> int:
    """Where bytes lie in memory, which the caller keeps alive."""
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def text(code: int) -> str:
    """An answer of the library for people."""
    return f"{os.strerror(-code)} ({code})"
