"""A store in S3, any whose PUT has `If-None-Match`.

Keys below the prefix: `o/` and an object's name, `log/` and a record's number, `floor/` and the
number of the first record that is kept, `store` with the store's id. A process that opened a store
must not fork: obstore hangs in the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from operator import attrgetter

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout
from objectcache_storage_server.engines.stores.ended_waits import EndedWaits
from objectcache_storage_server.engines.stores.landing_batch import (
    DeadlineWatch,
    LandingBatch,
    joined_ranges,
)
from objectcache_storage_server.engines.stores.s3.s3_calls import MissingKey, RangeAtEnd, S3Calls
from objectcache_storage_server.engines.stores.s3.s3_log import KEPT_S, TOKEN_BYTES, S3Log
from objectcache_storage_server.engines.stores.s3.s3_objects import PAGE, S3Objects
from objectcache_storage_server.engines.stores.s3.s3_settings import S3Settings
from objectcache_storage_server.engines.stores.shared_store import (
    LostObject,
    ObjectRead,
    SharedStore,
    StoreCapabilities,
    StoredObject,
)
from objectcache_storage_server.engines.stores.store_calls import (
    check_append,
    check_deadline,
    check_name,
    check_put,
)

REQUESTS_MAX = 32  # ranges that are asked for at a time
READ_BYTES_MAX = 4 * MIB
OPEN_S = 30.0
OBJECTS = "o"


class S3Store(SharedStore):
    """Opens the store; `create` makes one where there is none, in a bucket that is there.

    `kept_s` is how long a trimmed record is there for sure, of all servers of the store. Raises
    `InvalidRequest` where the server has no conditional PUT or a setting is wrong, `Unavailable`.
    """

    capabilities = StoreCapabilities(
        "s3", queue_depth=16, put_depth=16, record_bytes_max=4 * MIB - TOKEN_BYTES
    )

    def __init__(
        self, settings: S3Settings, *, create: bool = False, kept_s: float = KEPT_S
    ) -> None:
        self._objects = S3Objects(settings)
        self._log = S3Log(self._objects, kept_s)
        self._calls = S3Calls()
        self._requests = asyncio.Semaphore(REQUESTS_MAX)
        self._waits = EndedWaits()
        self._watch = DeadlineWatch()
        try:
            deadline_s = time.monotonic() + OPEN_S
            self._calls.call("open", deadline_s, self._objects.open(create, deadline_s))
            self.was_made = self._objects.was_made
        except StoreTimeout as error:
            self.close()
            raise StoreTimeout(f"{settings.where()} does not answer: {error.message}") from error
        except Unavailable as error:
            self.close()
            if settings.where() in error.message:
                raise
            raise Unavailable(f"{settings.where()}: {error.message}") from error
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        where = self._objects.settings.where()
        return f"<S3Store {where} store {self._objects.store_id[:8]}>"

    # --- objects ---

    def put(self, name: str, parts: Sequence[memoryview], deadline_s: float) -> None:
        check_put(name, parts, self.capabilities, deadline_s)
        content = b"".join(parts)  # the parts are the caller's again when a timeout ends the call
        self._calls.call(
            "put an object", deadline_s, self._objects.put(_key(name), content, deadline_s)
        )

    def begin_reads(self, reads: Sequence[ObjectRead], deadline_s: float) -> Future[None]:
        ordered = sorted(reads, key=attrgetter("name", "offset_bytes"))
        groups = [
            group
            for _, of_object in itertools.groupby(ordered, attrgetter("name"))
            for group in joined_ranges(list(of_object), READ_BYTES_MAX)
        ]
        batch = LandingBatch(len(groups), deadline_s)
        try:
            check_deadline(deadline_s, "read objects")
        except StoreTimeout as error:
            batch.fail(error)
        else:
            self._calls.begin(self._read_batch(groups, batch))
            self._watch.watch(batch)
        return batch.future

    async def _read_batch(
        self, groups: Sequence[Sequence[ObjectRead]], batch: LandingBatch
    ) -> None:
        tasks = [asyncio.create_task(self._read_group(group, batch)) for group in groups]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            batch.fail(Unavailable("the store was closed"))
            raise
        except BaseException as error:  # whatever it is, whoever waits is told
            batch.fail(error)
        finally:
            for task in tasks:
                task.cancel()

    async def _read_group(self, group: Sequence[ObjectRead], batch: LandingBatch) -> None:
        begin_bytes = group[0].offset_bytes
        end_bytes = max(read.offset_bytes + read.landing.nbytes for read in group)
        key = _key(group[0].name)
        while not batch.has_ended:
            try:
                async with self._requests:
                    if batch.future.cancelled():
                        return
                    data = await self._objects.get_range(
                        key, begin_bytes, end_bytes, batch.deadline_s
                    )
            except MissingKey:
                raise await self._lost(group[0].name, batch.deadline_s) from None
            except RangeAtEnd:
                data = memoryview(b"")
            if len(data) == end_bytes - begin_bytes:
                if batch.land(group, data, begin_bytes):
                    batch.end_task()
                return
            await self._check_size(group[0].name, end_bytes, batch.deadline_s)

    async def _check_size(self, name: str, end_bytes: int, deadline_s: float) -> None:
        """Raise `LostObject` where an object is shorter, as an answer was."""
        try:
            size_bytes = await self._objects.size_bytes(_key(name), deadline_s)
        except MissingKey:
            raise await self._lost(name, deadline_s) from None
        if size_bytes < end_bytes:
            raise LostObject(name, f"it ends at byte {size_bytes}")

    def get(self, name: str, deadline_s: float) -> bytes:
        return self._calls.call("get an object", deadline_s, self._get(name, deadline_s))

    async def _get(self, name: str, deadline_s: float) -> bytes:
        try:
            return await self._objects.get(_key(name), deadline_s)
        except MissingKey:
            raise await self._lost(name, deadline_s) from None

    async def _lost(self, name: str, deadline_s: float) -> LostObject:
        """What is not there, where the store is. Raises `Unavailable`."""
        await self._objects.check_there(deadline_s)
        return LostObject(name, "it is not there")

    def list_objects(self, prefix: str, deadline_s: float) -> Iterator[StoredObject]:
        # S3's own prefix is of characters, obstore's of parts between slashes.
        folder = prefix[: prefix.rfind("/") + 1]
        after, has_found = "", False
        while True:
            page = self._calls.call(
                "list objects",
                deadline_s,
                self._objects.page(f"{OBJECTS}/{folder}", after, deadline_s),
            )
            for name, size_bytes in page:
                if (folder + name).startswith(prefix):
                    has_found = True
                    yield StoredObject(folder + name, size_bytes)
            if len(page) < PAGE:
                break
            after = page[-1][0]
        if not has_found:
            self._calls.call("list objects", deadline_s, self._objects.check_there(deadline_s))

    def delete(self, names: Iterable[str], deadline_s: float) -> None:
        keys = [_key(name) for name in names]
        if keys:
            self._calls.call("delete objects", deadline_s, self._objects.delete(keys, deadline_s))

    # --- the log ---

    def append(self, number: int, record: bytes, deadline_s: float) -> bool:
        check_append(number, record, self.capabilities, deadline_s)
        return self._calls.call(
            "append a record", deadline_s, self._log.append(number, record, deadline_s)
        )

    def read_log(self, first: int, size_bytes_max: int, deadline_s: float) -> list[bytes]:
        return self._calls.call(
            "read the log", deadline_s, self._log.read(first, size_bytes_max, deadline_s)
        )

    def log_end(self, known: int, deadline_s: float) -> int:
        return self._calls.call(
            "ask for the log's end", deadline_s, self._log.end(known, deadline_s)
        )

    def trim_log(self, first: int, deadline_s: float) -> None:
        self._calls.call("trim the log", deadline_s, self._log.trim(first, deadline_s))

    def wait_for_record(self, number: int, timeout_s: float) -> None:
        # S3 has no bell, and asking it costs a request each time: whoever follows asks.
        self._waits.wait(self._waits.round, timeout_s)

    def end_waits(self) -> None:
        self._waits.end_all()

    # --- the store itself ---

    def close(self) -> None:
        if not self._waits.is_closed:
            self._waits.close()
            with contextlib.suppress(RuntimeError):
                self._calls.close()
            self._watch.close()


def _key(name: str) -> str:
    return f"{OBJECTS}/{check_name(name)}"
