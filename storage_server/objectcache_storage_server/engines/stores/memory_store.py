"""A store in memory: the model of the contract, and what simulations of several servers share.

Every server has a `MemoryStore` of its own on one `MemoryStoreState`. Nothing outlives the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future

from objectcache_schemas.errors import StorageFull, Unavailable
from objectcache_storage_server.engines.blobs.blob_store import DONE, failed
from objectcache_storage_server.engines.stores.shared_store import (
    LostObject,
    ObjectRead,
    SharedStore,
    StoreCapabilities,
    StoredObject,
    TrimmedLog,
)
from objectcache_storage_server.engines.stores.store_calls import (
    check_append,
    check_deadline,
    check_name,
    check_put,
)


class MemoryStoreState:
    """What the handles share. `capacity_bytes` bounds the objects; records have `reserve_bytes`
    besides. Without `exists` every call is answered as by a pool that is not there.
    """

    def __init__(self, capacity_bytes: int | None = None, reserve_bytes: int = 1 << 20) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserve_bytes = reserve_bytes
        self.exists = True
        self.objects: dict[str, bytes] = {}
        self.records: list[bytes] = []  # from `first_record` on
        self.first_record = 0
        self.changed = threading.Condition()  # and the lock of everything here
        self.object_bytes = 0
        self.record_bytes = 0

    def __repr__(self) -> str:
        with self.changed:
            end = self.first_record + len(self.records)
            log = f"records {self.first_record} to {end}"
            return f"<MemoryStoreState {len(self.objects)} objects, {log}>"

    @property
    def end(self) -> int:
        """The number of the next record."""
        return self.first_record + len(self.records)


class MemoryStore(SharedStore):
    """One server's handle."""

    capabilities = StoreCapabilities("memory", queue_depth=4, put_depth=4, has_bell=True)

    def __init__(self, state: MemoryStoreState) -> None:
        self.state = state
        self._is_closed = False
        self._waits_round = 0  # grows when waits are ended

    def __repr__(self) -> str:
        return f"<MemoryStore of {self.state!r}>"

    # --- objects ---

    def put(self, name: str, parts: Sequence[memoryview], deadline_s: float) -> None:
        self._put(name, parts, 0, deadline_s)

    def put_from_reserve(self, name: str, parts: Sequence[memoryview], deadline_s: float) -> None:
        self._put(name, parts, self.state.reserve_bytes, deadline_s)

    def is_short(self, deadline_s: float) -> bool:
        check_deadline(deadline_s, "look for space")
        with self.state.changed:
            self._check_there()
            return not self._has_room(0, 0)

    def _put(
        self, name: str, parts: Sequence[memoryview], reserve_bytes: int, deadline_s: float
    ) -> None:
        size_bytes = check_put(name, parts, self.capabilities, deadline_s)
        data = b"".join(parts)
        with self.state.changed:
            self._check_there()
            before_bytes = len(self.state.objects.get(name, b""))
            if not self._has_room(size_bytes - before_bytes, reserve_bytes):
                raise StorageFull("put an object: the store in memory is full; delete objects")
            self.state.object_bytes += size_bytes - before_bytes
            self.state.objects[name] = data

    def begin_reads(self, reads: Sequence[ObjectRead], deadline_s: float) -> Future[None]:
        try:
            check_deadline(deadline_s, "read objects")
            for name, offset_bytes, landing in reads:
                with self.state.changed:
                    data = self._object(name)
                if offset_bytes + landing.nbytes > len(data):
                    raise LostObject(name, f"it ends at byte {len(data)}")
                landing[:] = memoryview(data)[offset_bytes : offset_bytes + landing.nbytes]
        except (LostObject, Unavailable) as error:
            return failed(error)
        return DONE

    def get(self, name: str, deadline_s: float) -> bytes:
        check_deadline(deadline_s, "get an object")
        with self.state.changed:
            return self._object(name)

    def list_objects(self, prefix: str, deadline_s: float) -> Iterator[StoredObject]:
        check_deadline(deadline_s, "list objects")
        with self.state.changed:
            self._check_there()
            found = [
                StoredObject(name, len(data))
                for name, data in self.state.objects.items()
                if name.startswith(prefix)
            ]
        return iter(found)

    def delete(self, names: Iterable[str], deadline_s: float) -> None:
        for name in names:
            check_deadline(deadline_s, "delete objects")
            with self.state.changed:
                self._check_there()
                self.state.object_bytes -= len(self.state.objects.pop(check_name(name), b""))

    # --- the log ---

    def append(self, number: int, record: bytes, deadline_s: float) -> bool:
        check_append(number, record, self.capabilities, deadline_s)
        state = self.state
        with state.changed:
            self._check_there()
            if number < state.end:
                return False
            if number > state.end:
                raise Unavailable(f"the log has no record {number - 1} for {number} to follow")
            if not self._has_room(len(record), state.reserve_bytes):
                raise StorageFull("append a record: the store in memory is full, and its reserve")
            state.records.append(bytes(record))
            state.record_bytes += len(record)
            state.changed.notify_all()
            return True

    def read_log(self, first: int, size_bytes_max: int, deadline_s: float) -> list[bytes]:
        check_deadline(deadline_s, "read the log")
        with self.state.changed:
            self._check_there()
            if first < self.state.first_record:
                raise TrimmedLog(self.state.first_record)
            found: list[bytes] = []
            for record in self.state.records[first - self.state.first_record :]:
                size_bytes_max -= len(record)
                if found and size_bytes_max < 0:
                    break
                found.append(record)
            return found

    def log_end(self, known: int, deadline_s: float) -> int:
        check_deadline(deadline_s, "ask for the log's end")
        with self.state.changed:
            self._check_there()
            return self.state.end

    def trim_log(self, first: int, deadline_s: float) -> None:
        check_deadline(deadline_s, "trim the log")
        state = self.state
        with state.changed:
            self._check_there()
            count = min(max(first - state.first_record, 0), len(state.records))
            state.record_bytes -= sum(map(len, state.records[:count]))
            del state.records[:count]
            state.first_record += count

    def wait_for_record(self, number: int, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        with self.state.changed:
            begun_in = self._waits_round
            while not self._is_closed and self.state.end <= number:
                if self._waits_round != begun_in:
                    return
                if not self.state.changed.wait(end_s - time.monotonic()):
                    return

    def end_waits(self) -> None:
        with self.state.changed:
            self._waits_round += 1
            self.state.changed.notify_all()

    # --- the store itself ---

    def close(self) -> None:
        with self.state.changed:
            self._is_closed = True
            self.state.changed.notify_all()

    def _object(self, name: str) -> bytes:
        self._check_there()
        data = self.state.objects.get(check_name(name))
        if data is None:
            raise LostObject(name, "it is not there")
        return data

    def _check_there(self) -> None:
        if not self.state.exists:
            raise Unavailable("the store in memory is not there")

    def _has_room(self, more_bytes: int, reserve_bytes: int) -> bool:
        if self.state.capacity_bytes is None:
            return True
        used_bytes = self.state.object_bytes + self.state.record_bytes
        return used_bytes + more_bytes <= self.state.capacity_bytes + reserve_bytes
