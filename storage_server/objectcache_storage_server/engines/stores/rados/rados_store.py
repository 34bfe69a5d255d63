"""The shared store in RADOS, Ceph's own object store: no gateway in between.

Objects lie in a namespace of a pool, which may be erasure coded; the log lies in the namespace
`<namespace>.log` of a replicated one. The modules below: `librados` has the calls, `operations`
what is under way and its deadlines, `read_batches` many reads at once, `rados_log` the log,
`rados_bell` what wakes followers.

Listings go through a whole namespace, and the OSDs through the whole pool for it: RADOS has its
objects in order of a hash. What lies in other namespaces stays on the OSDs.
"""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.stores.rados.librados import (
    Cluster,
    RadosPool,
    WriteOperation,
)
from objectcache_storage_server.engines.stores.rados.log_frames import RECORD_BYTES_MAX
from objectcache_storage_server.engines.stores.rados.log_objects import HEAD
from objectcache_storage_server.engines.stores.rados.object_listing import ObjectListing
from objectcache_storage_server.engines.stores.rados.operations import (
    Deadlines,
    Range,
    ReadAnswer,
    WriteAnswer,
    remove_objects,
)
from objectcache_storage_server.engines.stores.rados.rados_bell import RadosBell
from objectcache_storage_server.engines.stores.rados.rados_log import RadosLog
from objectcache_storage_server.engines.stores.rados.rados_settings import RadosSettings
from objectcache_storage_server.engines.stores.rados.read_batches import (
    BATCH_BYTES_MAX,
    BATCH_OPERATIONS_MAX,
    BatchThreads,
    RadosBatch,
)
from objectcache_storage_server.engines.stores.shared_store import (
    ObjectRead,
    SharedStore,
    StoreCapabilities,
    StoredObject,
)
from objectcache_storage_server.engines.stores.store_calls import (
    check_append,
    check_deadline,
    check_put,
)

OBJECT_BYTES_MAX = 4 * MIB
QUEUE_DEPTH = 16  # reads of 4 MiB: 8 fill a link of 3 GiB/s, of 1 MiB it takes 16
PUT_DEPTH = 8
CONNECT_TIMEOUT_S = 15.0
OSD_TIMEOUT_S = 60  # for what cannot be given up at its deadline; no call lasts longer


class RadosStore(SharedStore):
    """See the module's docstring."""

    capabilities = StoreCapabilities(
        "rados",
        QUEUE_DEPTH,
        PUT_DEPTH,
        OBJECT_BYTES_MAX,
        record_bytes_max=RECORD_BYTES_MAX,
        has_bell=True,
    )

    def __init__(
        self,
        settings: RadosSettings,
        *,
        create: bool = False,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """Connect. `create` makes an empty log where there is none; without, there must be one.

        Raises `InvalidRequest`, `Unavailable`.
        """
        with ExitStack() as opened:
            cluster = Cluster(
                f"client.{settings.client}", settings.conf, library_options(connect_timeout_s)
            )
            opened.callback(cluster.close)
            self._pool = RadosPool(cluster, settings.pool, settings.namespace)
            opened.callback(self._pool.close)
            log_pool = RadosPool(
                cluster, settings.log_pool or settings.pool, f"{settings.namespace}.log"
            )
            opened.callback(log_pool.close)
            require_replicated(log_pool)
            self._alignment_bytes = self._pool.alignment_bytes()
            self._deadlines = Deadlines(cluster.calls)
            opened.callback(self._deadlines.close)
            self._log = RadosLog(self._deadlines, log_pool)
            deadline_s = time.monotonic() + connect_timeout_s
            if create:
                self.was_made = self._log.create(deadline_s)
            self._log.end(deadline_s)
            self._listing = ObjectListing(self._deadlines, self._pool)
            opened.callback(self._listing.close)
            self._threads = BatchThreads(QUEUE_DEPTH)
            opened.callback(self._threads.close)
            self._bell = RadosBell(log_pool, cluster.handle, HEAD)
            opened.callback(self._bell.close)
            # Callbacks of the library must not come into an interpreter that ends.
            atexit.register(self.close)
            self._opened = opened.pop_all()

    # --- objects ---

    def put(self, name: str, parts: Sequence[memoryview], deadline_s: float) -> None:
        check_put(name, parts, self.capabilities, deadline_s)
        with WriteOperation(self._pool.calls) as steps:
            offset_bytes = 0
            for part in self._writable(parts):
                if offset_bytes == 0:
                    steps.write_full(part)
                else:
                    steps.write(part, offset_bytes)
                offset_bytes += len(part)
            WriteAnswer(self._deadlines, self._pool, name, steps, deadline_s).end()

    def begin_reads(self, reads: Sequence[ObjectRead], deadline_s: float) -> Future[None]:
        batch = RadosBatch(self._deadlines, self._pool, reads, deadline_s)
        self._threads.add(batch)
        return batch.future

    def get(self, name: str, deadline_s: float) -> bytes:
        check_deadline(deadline_s, f"get {name}")
        landing = memoryview(bytearray(OBJECT_BYTES_MAX))
        ranges = [Range.into(landing, 0)]
        [size_bytes] = ReadAnswer(self._deadlines, self._pool, name, ranges, deadline_s).end()
        return bytes(landing[:size_bytes])

    def list_objects(self, prefix: str, deadline_s: float) -> Iterator[StoredObject]:
        return self._listing.objects(prefix, deadline_s)

    def delete(self, names: Iterable[str], deadline_s: float) -> None:
        check_deadline(deadline_s, "delete objects")
        remove_objects(self._deadlines, self._pool, names, deadline_s)

    # --- the log ---

    def append(self, number: int, record: bytes, deadline_s: float) -> bool:
        check_append(number, record, self.capabilities, deadline_s)
        is_ours = self._log.append(number, record, deadline_s)
        if is_ours:
            self._bell.ring(number + 1)
        return is_ours

    def read_log(self, first: int, size_bytes_max: int, deadline_s: float) -> list[bytes]:
        check_deadline(deadline_s, "read the log")
        return self._log.read(first, size_bytes_max, deadline_s)

    def log_end(self, known: int, deadline_s: float) -> int:
        check_deadline(deadline_s, "ask for the log's end")
        return self._log.end(deadline_s)

    def trim_log(self, first: int, deadline_s: float) -> None:
        check_deadline(deadline_s, "trim the log")
        self._log.trim(first, deadline_s)

    def wait_for_record(self, number: int, timeout_s: float) -> None:
        self._bell.wait(number, timeout_s)

    def end_waits(self) -> None:
        self._bell.end_waits()

    # --- the store itself ---

    def close(self) -> None:
        atexit.unregister(self.close)
        self._opened.pop_all().close()

    def _writable(self, parts: Sequence[memoryview]) -> Sequence[memoryview | bytes]:
        """The parts as they may be written one after the other: where the pool is erasure coded
        each must begin at a multiple of its stripes, or they are joined.
        """
        offset_bytes = 0
        for part in parts:
            if offset_bytes % self._alignment_bytes:
                return [b"".join(parts)]
            offset_bytes += len(part)
        return [part for part in parts if len(part)]


def library_options(connect_timeout_s: float) -> dict[str, str]:
    """Options of librados, over what ceph.conf says."""
    in_flight = QUEUE_DEPTH * 2 + 1  # batches: begun by callers, and by the threads
    return {
        "client_mount_timeout": str(math.ceil(connect_timeout_s)),
        "rados_mon_op_timeout": str(math.ceil(connect_timeout_s)),
        "rados_osd_op_timeout": str(OSD_TIMEOUT_S),
        "objecter_inflight_ops": str(in_flight * BATCH_OPERATIONS_MAX * 4),
        "objecter_inflight_op_bytes": str(in_flight * BATCH_BYTES_MAX * 4),
    }


def require_replicated(log_pool: RadosPool) -> None:
    """Raises `InvalidRequest` where records cannot be written one after the other."""
    if log_pool.alignment_bytes() > 1:
        raise InvalidRequest(
            f"pool {log_pool.name} is erasure coded and cannot hold the log: name a replicated one "
            "by log_pool="
        )
