"""The shared store in DAOS: a container of its own, `daos://POOL/CONTAINER`.

By libdaos, not by `pydaos`: that overwrites without a condition, reads and writes whole values
only, and holds the interpreter lock meanwhile. What was run, and what was not, is in
docs/shared_engine.md. The modules below: `libdaos` has the calls, `daos_client` the thread that
makes them, `daos_objects` and `daos_log` what lies in the container.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.blobs.blob_store import DONE
from objectcache_storage_server.engines.stores.daos.daos_client import DaosClient
from objectcache_storage_server.engines.stores.daos.daos_log import DaosLog
from objectcache_storage_server.engines.stores.daos.daos_objects import DaosObjects
from objectcache_storage_server.engines.stores.daos.libdaos import Libdaos, load_libdaos
from objectcache_storage_server.engines.stores.ended_waits import EndedWaits
from objectcache_storage_server.engines.stores.landing_batch import DeadlineWatch, LandingBatch
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

CONNECT_TIMEOUT_S = 30.0
LOOK_S = 0.1  # between looks for the next record
LOOK_TIMEOUT_S = 1.0


class DaosStore(SharedStore):
    """See the module's docstring."""

    capabilities = StoreCapabilities("daos", queue_depth=16, put_depth=8, record_bytes_max=1 * MIB)

    def __init__(
        self,
        pool: str,
        container: str,
        *,
        create: bool = False,
        first_object: int = 1,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        calls: Libdaos | None = None,
    ) -> None:
        """Connect to a pool and a container by their labels. `create` makes a store where there is
        none; without, there must be one. It has two DAOS objects, `first_object` and the next.

        Raises `Unavailable`.
        """
        deadline_s = time.monotonic() + connect_timeout_s
        self._client = DaosClient(calls or load_libdaos(), pool, container, connect_timeout_s)
        try:
            self._objects = DaosObjects(self._client, first_object, deadline_s)
            self._log = DaosLog(self._client, first_object + 1, deadline_s, create=create)
            self.was_made = self._log.was_made
        except BaseException:
            self._client.close()
            raise
        self._watch = DeadlineWatch()
        self._waits = EndedWaits()

    def __repr__(self) -> str:
        return f"<DaosStore daos://{self._client.pool}/{self._client.container}>"

    # --- objects ---

    def put(self, name: str, parts: Sequence[memoryview], deadline_s: float) -> None:
        check_put(name, parts, self.capabilities, deadline_s)
        self._objects.put(name, parts, deadline_s)

    def begin_reads(self, reads: Sequence[ObjectRead], deadline_s: float) -> Future[None]:
        batch = LandingBatch(len({read.name for read in reads}), deadline_s)
        if not reads:
            return DONE
        try:
            check_deadline(deadline_s, "read objects")
            self._objects.begin_reads(reads, batch)
        except Unavailable as error:
            batch.fail(error)
            return batch.future
        self._watch.watch(batch)
        return batch.future

    def get(self, name: str, deadline_s: float) -> bytes:
        check_deadline(deadline_s, f"get {name}")
        landing = bytearray(self._objects.size_bytes(name, deadline_s))
        self.begin_reads([ObjectRead(name, 0, memoryview(landing))], deadline_s).result()
        return bytes(landing)

    def list_objects(self, prefix: str, deadline_s: float) -> Iterator[StoredObject]:
        return self._objects.list(prefix, deadline_s)

    def delete(self, names: Iterable[str], deadline_s: float) -> None:
        check_deadline(deadline_s, "delete objects")
        self._objects.remove(names, deadline_s)

    # --- the log ---

    def append(self, number: int, record: bytes, deadline_s: float) -> bool:
        check_append(number, record, self.capabilities, deadline_s)
        return self._log.append(number, record, deadline_s)

    def read_log(self, first: int, size_bytes_max: int, deadline_s: float) -> list[bytes]:
        check_deadline(deadline_s, "read the log")
        return self._log.read(first, size_bytes_max, deadline_s)

    def log_end(self, known: int, deadline_s: float) -> int:
        check_deadline(deadline_s, "ask for the log's end")
        return self._log.end(known, deadline_s)

    def trim_log(self, first: int, deadline_s: float) -> None:
        check_deadline(deadline_s, "trim the log")
        self._log.trim(first, deadline_s)

    def wait_for_record(self, number: int, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        begun_in = self._waits.round
        while not self._waits.is_closed:
            deadline_s = min(time.monotonic() + LOOK_TIMEOUT_S, end_s)
            with suppress(Unavailable):  # whoever asks for the log is told
                if self._log.has(number, deadline_s):
                    return
            left_s = end_s - time.monotonic()
            if left_s <= 0 or self._waits.wait(begun_in, min(left_s, LOOK_S)):
                return

    def end_waits(self) -> None:
        self._waits.end_all()

    # --- the store itself ---

    def close(self) -> None:
        if not self._waits.is_closed:
            self._waits.close()
            self._watch.close()
            self._client.close()
