"""What all connections share: the engine, the dispatcher, memory, targets and the limits."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from objectcache_schemas.errors import Busy, InvalidRequest, Unavailable
from objectcache_schemas.messages import Health
from objectcache_schemas.settings import Settings
from objectcache_storage_server.buffers import BufferPool
from objectcache_storage_server.deliver import Dispatcher
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.targets import TargetRegistry
from objectcache_storage_server.tickets import TicketBook

P = ParamSpec("P")
T = TypeVar("T")

READER_THREADS_MAX = 8  # more threads only wait for each other's interpreter lock
ENGINE_THREADS = 16  # calls that write, flush or look up; each blocks on the device
CHECK_RETRY_AFTER_S = 60.0  # a check reads the whole store


class Service:
    """The storage server without its sockets."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        storage = settings.storage
        self.settings = settings
        self.storage = storage
        self.limits = settings.limits
        self.engine = engine
        self.pool = BufferPool(storage.fragment_bytes, storage.server_in_flight_bytes_max)
        self.registry = TargetRegistry(storage.targets_bytes_max)
        self.tickets = TicketBook()
        self.reader_threads = storage.reader_threads or min(READER_THREADS_MAX, os.cpu_count() or 1)
        self.dispatcher = Dispatcher(self.reader_threads)
        self.draining = False
        self.host_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._executor = ThreadPoolExecutor(ENGINE_THREADS, "engine")
        self._deliveries = 0
        self._puts = self._put_bytes = 0
        self._checking = False
        self._lock = threading.Lock()

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking engine call in a worker thread.

        If the caller is cancelled the call still runs to its end.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    # --- deliveries ---

    def admit_delivery(self) -> None:
        """Count a delivery in, or raise `Busy` or `Unavailable`; `end_delivery` counts it out."""
        if self.draining:
            raise Unavailable("the storage server is stopping")
        with self._lock:
            if self._deliveries >= self.storage.deliveries_max:
                raise Busy(
                    f"{self._deliveries} deliveries are running, "
                    f"storage.deliveries_max is {self.storage.deliveries_max}",
                    retry_after_s=1.0,
                )
            self._deliveries += 1

    def end_delivery(self) -> None:
        """Count a delivery out: it was not started, or let everything go. From any thread."""
        with self._lock:
            self._deliveries -= 1

    # --- puts ---

    def admit_put(self, staged_bytes: int) -> None:
        """Count a put in, or raise `Busy`; `end_put` counts it out."""
        if self.draining:
            raise Unavailable("the storage server is stopping")
        with self._lock:
            if self._puts >= self.storage.puts_max:
                raise Busy(
                    f"{self._puts} puts are running, storage.puts_max is {self.storage.puts_max}",
                    retry_after_s=1.0,
                )
            if staged_bytes > self.storage.put_staging_bytes_max:
                raise InvalidRequest(
                    f"the put has {staged_bytes} bytes, storage.put_staging_bytes_max is "
                    f"{self.storage.put_staging_bytes_max}",
                    code="EntityTooLarge",
                )
            if self._put_bytes + staged_bytes > self.storage.put_staging_bytes_max:
                raise Busy(
                    f"unfinished puts hold {self._put_bytes} bytes, storage.put_staging_bytes_max "
                    f"is {self.storage.put_staging_bytes_max}",
                    retry_after_s=1.0,
                )
            self._puts += 1
            self._put_bytes += staged_bytes

    def end_put(self, staged_bytes: int) -> None:
        """Count a put out."""
        with self._lock:
            self._puts -= 1
            self._put_bytes -= staged_bytes

    # --- checks ---

    def admit_check(self) -> None:
        """Begin a check, or raise `Busy` while another runs; `end_check` ends it."""
        if self.draining:
            raise Unavailable("the storage server is stopping")
        with self._lock:
            if self._checking:
                raise Busy(
                    "another check of this store is running", retry_after_s=CHECK_RETRY_AFTER_S
                )
            self._checking = True

    def end_check(self) -> None:
        """The check that was admitted is over."""
        with self._lock:
            self._checking = False

    # --- the whole ---

    def health(self) -> Health:
        """The state that health checks and the admin view show."""
        return Health(
            engine=self.engine.capabilities.name,
            deliveries_in_flight=self._deliveries,
            in_flight_bytes=self.pool.promised_bytes,
            damaged_count=self.engine.damaged_count,
            draining=self.draining,
        )

    def close(self) -> None:
        """Stop the threads and the engine; nothing may be running."""
        self.dispatcher.close()
        self._executor.shutdown()
        self.engine.close()
