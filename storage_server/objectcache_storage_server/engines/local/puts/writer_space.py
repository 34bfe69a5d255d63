"""Where writers get extents and memory from; makes room where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from objectcache_schemas.errors import StorageFull
from objectcache_schemas.limits import KIB
from objectcache_storage_server.engines.disk.system_errors import translated
from objectcache_storage_server.engines.local.puts.staged_runs import ExtentSource
from objectcache_storage_server.engines.local.puts.write_paths import WritePaths
from objectcache_storage_server.engines.local.residency.planner import admits
from objectcache_storage_server.engines.local.space.extent_geometry import Geometry, round_up
from objectcache_storage_server.engines.local.space.holdings import Holdings
from objectcache_storage_server.engines.local.volumes.volume import IoPath, Transfer
from objectcache_storage_server.engines.puts.put_buffers import Bytes, PutBuffers, no_put_memory

ROOM_ATTEMPTS = 6  # each evicts twice as much; free space may lie in pieces
RUN_BYTES_MIN = 512 * KIB  # of an object: before shorter runs are taken, others are evicted


class WriterSpace(ExtentSource):
    """Extents of the holdings, evicting for them where that is allowed."""

    def __init__(
        self,
        holdings: Holdings,
        evict: Callable[[int], int],
        buffers: PutBuffers,
        writers: ThreadPoolExecutor,
        write_paths: WritePaths,
        note_write: Callable[[], None],
    ) -> None:
        """`evict` takes the bytes of extents that are wanted, and returns those that came free.
        `note_write` is called in any thread, before each write and after it.
        """
        self.volume = holdings.volume
        self._holdings = holdings
        self._evict = evict
        self._buffers = buffers
        self._writers = writers
        self._write_paths = write_paths
        self._note_write = note_write

    def allocate(self, length_bytes: int, geometry: Geometry | None) -> int:
        """See `ExtentSource.allocate`."""
        wanted_bytes = round_up(length_bytes)
        may_evict = True
        for attempts_left in reversed(range(ROOM_ATTEMPTS + 1)):
            path = self._path_for(length_bytes)
            with translated("make room in the data files", "the volume"):
                number = self._holdings.allocate(length_bytes, path, geometry)
            if number is not None:
                if path is IoPath.PAGE_CACHE:
                    self._settle_path(number, length_bytes)
                return number
            if not may_evict:
                break
            # Where there was nothing to evict, somebody else may just have done so: look once more.
            may_evict = self._evict(wanted_bytes) > 0 and attempts_left > 1
            wanted_bytes *= 2
        raise StorageFull(
            f"no room for {length_bytes} bytes in one run: {self._holdings.describe_room()}; "
            f"delete objects, or {self.volume.growth_remedy()}"
        )

    def _settle_path(self, number: int, length_bytes: int) -> None:
        """Of an extent that the budget admits: written past the page cache, where that is too slow
        in taking what is new to it.
        """
        path = self._write_paths.of_admitted(self.place(number), length_bytes)
        if path is not IoPath.PAGE_CACHE:
            self._holdings.set_paths([number], path)

    def allocate_run(self, length_bytes: int, least_bytes: int) -> tuple[int, int]:
        """See `ExtentSource.allocate_run`."""
        found = self._free_run(length_bytes, max(least_bytes, RUN_BYTES_MIN))
        if found is not None:
            return found
        try:
            return self.allocate(length_bytes, None), length_bytes
        except StorageFull:
            found = self._free_run(length_bytes, least_bytes)
            if found is None:
                raise
            return found

    def _free_run(self, length_bytes: int, least_bytes: int) -> tuple[int, int] | None:
        """Half as long and half as long again until one is free."""
        while length_bytes >= least_bytes:
            with translated("make room in the data files", "the volume"):
                path = self._path_for(length_bytes)
                number = self._holdings.allocate(length_bytes, path, None)
            if number is not None:
                if path is IoPath.PAGE_CACHE:
                    self._settle_path(number, length_bytes)
                return number, length_bytes
            if length_bytes == least_bytes:
                return None
            length_bytes = max(round_up(length_bytes // 2), least_bytes)
        return None

    def _path_for(self, length_bytes: int) -> IoPath:
        paths = self.volume.paths
        resident_bytes = self._holdings.resident_bytes
        wants_cache = admits(resident_bytes, length_bytes, self._holdings.page_cache_budget_bytes)
        if IoPath.DIRECT not in paths or (wants_cache and IoPath.PAGE_CACHE in paths):
            return IoPath.PAGE_CACHE
        return IoPath.DIRECT

    def place(self, number: int) -> int:
        """See `ExtentSource.place`."""
        with self._holdings.lock:
            return int(self._holdings.extents.rows["offset_bytes"][number])

    def path(self, number: int) -> IoPath:
        """See `ExtentSource.path`."""
        with self._holdings.lock:
            return IoPath(int(self._holdings.extents.rows["path"][number]))

    def shrink(self, number: int, length_bytes: int) -> None:
        """See `ExtentSource.shrink`."""
        self._holdings.shrink(number, length_bytes)

    def end_rows(
        self, number: int, pitches: tuple[int, ...], codec: int, length_bytes: int
    ) -> None:
        """See `ExtentSource.end_rows`."""
        self._holdings.shrink(number, length_bytes)
        self._holdings.set_pitches(number, pitches, codec)

    def end_writing(self, number: int, *, keep: bool) -> None:
        """See `ExtentSource.end_writing`."""
        self._holdings.end_writing(number, keep=keep)

    def write(self, transfers: Sequence[Transfer], path: IoPath) -> None:
        """See `ExtentSource.write`."""
        self._note_write()
        with translated("write to the data files", "the volume"):
            self._write_paths.write(transfers, path)
        self._note_write()

    def begin_write(self, transfers: Sequence[Transfer], path: IoPath) -> Future[None]:
        """See `ExtentSource.begin_write`."""
        return self._writers.submit(self.write, transfers, path)

    def begin(self, work: Callable[[], None]) -> Future[None]:
        """See `ExtentSource.begin`."""
        return self._writers.submit(work)

    def take_buffer(self, length_bytes: int) -> Bytes | None:
        """See `ExtentSource.take_buffer`. Raises `Busy` where the device can only be written from
        such memory.
        """
        with translated("take memory for a put", "memory"):
            buffer = self._buffers.take(length_bytes)
        if buffer is None and IoPath.PAGE_CACHE not in self.volume.paths:
            raise no_put_memory()
        return buffer

    def return_buffer(self, buffer: Bytes) -> None:
        """See `ExtentSource.return_buffer`."""
        self._buffers.put(buffer)
