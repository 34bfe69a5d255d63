"""A store in a folder that several hosts have mounted.

What is asked of the file system, by any of its mounts: `link` and `rename` are atomic and seen by
all; what was flushed is read by whoever opens the file later. docs/shared_engine.md says how NFS is
mounted, which remembers for a while that a name is not there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.stores.ended_waits import EndedWaits
from objectcache_storage_server.engines.stores.folder.folder_log import FolderLog, check_links
from objectcache_storage_server.engines.stores.folder.folder_objects import (
    PutClaim,
    delete_objects,
    get_object,
    list_folder,
    put_object,
    read_object,
)
from objectcache_storage_server.engines.stores.folder.folder_reserve import (
    FolderReserve,
)
from objectcache_storage_server.engines.stores.folder.mounted_folder import FOLDERS, MountedFolder
from objectcache_storage_server.engines.stores.landing_batch import DeadlineWatch, LandingBatch
from objectcache_storage_server.engines.stores.shared_store import (
    LostObject,
    ObjectRead,
    SharedStore,
    StoreCapabilities,
    StoredObject,
    StoreTimeout,
    TrimmedLog,
)
from objectcache_storage_server.engines.stores.store_calls import (
    check_append,
    check_deadline,
    check_put,
)
from objectcache_storage_server.engines.stores.waiting_threads import WaitingThreads

T = TypeVar("T")

THREADS = 16
READ_TASKS = 8  # threads that one batch of reads takes
DELETES_AT_ONCE = 32  # names that a thread takes at a time
RECORDS_AHEAD = 16  # files of the log that are read at a time
BELL_S = 0.1  # between looks for the next record
BELL_DEADLINE_S = 1.0


class FolderStore(SharedStore):
    """Opens the store in `root`; `create` makes one where there is none.

    Raises `Unavailable` where there is none, or the file system has no hard links.
    """

    capabilities = StoreCapabilities("folder", queue_depth=8, put_depth=4)

    def __init__(self, root: Path, *, create: bool = False) -> None:
        self._folder = MountedFolder(root, create)
        self.was_made = self._folder.was_made
        self._reserve = FolderReserve()
        self._log = FolderLog(self._folder, self._reserve)
        self._threads = WaitingThreads(THREADS, "shared-folder")
        self._watch = DeadlineWatch()
        self._waits = EndedWaits()
        try:
            self._folder.run("hold space back in the shared folder", self._reserve.take)
            self._folder.run(
                "look what the file system of the shared folder can do",
                lambda at: check_links(at, self._reserve),
            )
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<FolderStore {self._folder!r}>"

    # --- objects ---

    def put(self, name: str, parts: Sequence[memoryview], deadline_s: float) -> None:
        self._put(name, parts, self._put_object, deadline_s)

    def put_from_reserve(self, name: str, parts: Sequence[memoryview], deadline_s: float) -> None:
        self._put(name, parts, self._put_from_reserve, deadline_s)

    def is_short(self, deadline_s: float) -> bool:
        return self._call("look for space", deadline_s, self._reserve.is_short)

    def _put(
        self,
        name: str,
        parts: Sequence[memoryview],
        put: Callable[[str, Sequence[memoryview], PutClaim, int], None],
        deadline_s: float,
    ) -> None:
        check_put(name, parts, self.capabilities, deadline_s)
        claim = PutClaim()
        writing = self._begin("put an object", partial(put, name, parts, claim))
        try:
            self._threads.result(writing, "put an object", deadline_s)
        except StoreTimeout:
            claim.take()  # the parts are the caller's from here on
            raise

    def _put_object(
        self, name: str, parts: Sequence[memoryview], claim: PutClaim, folder: int
    ) -> None:
        """A put that ran beside a record which found no space may have had what was given up for
        that: it gives it back.
        """
        have_reserve = partial(self._reserve.have_whole, folder)
        have_reserve()
        put_object(folder, name, parts, claim, have_reserve)

    def _put_from_reserve(
        self, name: str, parts: Sequence[memoryview], claim: PutClaim, folder: int
    ) -> None:
        size_bytes = sum(part.nbytes for part in parts)
        use = partial(self._reserve.use_once, folder, size_bytes=size_bytes)
        put_object(folder, name, parts, claim, lambda: None, use)

    def begin_reads(self, reads: Sequence[ObjectRead], deadline_s: float) -> Future[None]:
        ordered = sorted(reads, key=attrgetter("name", "offset_bytes"))
        objects = [list(of) for _, of in itertools.groupby(ordered, attrgetter("name"))]
        task_count = min(len(objects), READ_TASKS)
        batch = LandingBatch(task_count, deadline_s)
        try:
            check_deadline(deadline_s, "read objects")
            for task in range(task_count):
                begun = self._threads.begin(self._read_task(objects[task::task_count], batch))
                batch.future.add_done_callback(partial(_give_up, begun))
        except Unavailable as error:
            batch.fail(error)
            return batch.future
        self._watch.watch(batch)
        return batch.future

    def _read_task(
        self, objects: Sequence[Sequence[ObjectRead]], batch: LandingBatch
    ) -> Callable[[], None]:
        def read() -> None:
            try:
                for reads in objects:
                    if batch.has_ended:
                        return
                    one = partial(read_object, reads=reads, batch=batch, mounted=self._folder)
                    self._folder.run("read an object", one)
                batch.end_task()
            except (LostObject, Unavailable) as error:
                batch.fail(error)

        return read

    def get(self, name: str, deadline_s: float) -> bytes:
        return self._call(
            "get an object", deadline_s, lambda at: get_object(at, name, self._folder)
        )

    def list_objects(self, prefix: str, deadline_s: float) -> Iterator[StoredObject]:
        for path in FOLDERS:
            one = partial(list_folder, path=path, prefix=prefix)
            yield from self._call("list objects", deadline_s, one)

    def delete(self, names: Iterable[str], deadline_s: float) -> None:
        names = iter(names)
        tasks: list[Future[None]] = []
        while some := list(itertools.islice(names, DELETES_AT_ONCE)):
            check_deadline(deadline_s, "delete objects")
            if len(tasks) >= THREADS:
                self._threads.result(tasks.pop(0), "delete objects", deadline_s)
            one = partial(delete_objects, names=some, mounted=self._folder)
            tasks.append(self._begin("delete objects", one))
        for task in tasks:
            self._threads.result(task, "delete objects", deadline_s)
        if tasks:
            self._call("hold space back", deadline_s, self._reserve.take)

    # --- the log ---

    def append(self, number: int, record: bytes, deadline_s: float) -> bool:
        check_append(number, record, self.capabilities, deadline_s)
        return self._call(
            "append a record", deadline_s, lambda at: self._log.append(at, number, record)
        )

    def read_log(self, first: int, size_bytes_max: int, deadline_s: float) -> list[bytes]:
        check_deadline(deadline_s, "read the log")
        found = self._records(first, size_bytes_max, deadline_s)
        # After the records: whoever stood still may link a number anew that was trimmed.
        floor = self._call("read the log", deadline_s, self._log.floor)
        if floor > first:
            raise TrimmedLog(floor)
        return found

    def _records(self, first: int, size_bytes_max: int, deadline_s: float) -> list[bytes]:
        """What files there are from `first` on, up to the limit, but one if there is one."""
        found: list[bytes] = []
        ahead = 1  # most reads are of the one record that is new
        while True:
            number = first + len(found)
            begun = [
                self._begin("read the log", partial(self._log.record, number=each))
                for each in range(number, number + ahead)
            ]
            for reading in begun:
                record = self._threads.result(reading, "read the log", deadline_s)
                if record is None:
                    return found
                size_bytes_max -= len(record)
                if found and size_bytes_max < 0:
                    return found
                found.append(record)
            ahead = min(ahead * 2, RECORDS_AHEAD)

    def log_end(self, known: int, deadline_s: float) -> int:
        return self._call("ask for the log's end", deadline_s, lambda at: self._log.end(at, known))

    def trim_log(self, first: int, deadline_s: float) -> None:
        self._call("trim the log", deadline_s, lambda at: self._log.trim(at, first))
        self._call("hold space back", deadline_s, self._reserve.take)

    def wait_for_record(self, number: int, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        begun_in = self._waits.round
        while not self._waits.is_closed:
            try:
                deadline_s = min(time.monotonic() + BELL_DEADLINE_S, end_s)
                if self._call(
                    "wait for a record", deadline_s, lambda at: self._log.has(at, number)
                ):
                    return
            except Unavailable:
                pass  # the bell is silent; whoever asks for the log is told
            left_s = end_s - time.monotonic()
            if left_s <= 0 or self._waits.wait(begun_in, min(left_s, BELL_S)):
                return

    def end_waits(self) -> None:
        self._waits.end_all()

    # --- the store itself ---

    def close(self) -> None:
        if not self._waits.is_closed:
            self._waits.close()
            self._threads.close()
            self._watch.close()
            self._folder.close()

    def _begin(self, operation: str, action: Callable[[int], T]) -> Future[T]:
        return self._threads.begin(lambda: self._folder.run(operation, action))

    def _call(self, operation: str, deadline_s: float, action: Callable[[int], T]) -> T:
        return self._threads.call(
            operation, deadline_s, lambda: self._folder.run(operation, action)
        )


def _give_up(begun: Future[None], _: Future[None]) -> None:
    """A task of a batch that has ended need not begin, and lets go of its landings."""
    begun.cancel()
