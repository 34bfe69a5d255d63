"""What all connections share: the engine, the dispatcher, memory, targets and the limits."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from objectcache_runtime.buffers import BufferPool
from objectcache_runtime.settings import Settings
from objectcache_schemas.errors import Busy, Unavailable
from objectcache_schemas.limits import KIB
from objectcache_schemas.operators.schedule import ScheduleState, SetSchedule
from objectcache_schemas.operators.server_state import Health
from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.accounts.directory import AccountDirectory
from objectcache_storage_server.accounts.in_flight import InFlight
from objectcache_storage_server.accounts.quota_book import QuotaBook
from objectcache_storage_server.accounts.request_tokens import RequestTokens
from objectcache_storage_server.accounts.stored_ledger import StoredLedger
from objectcache_storage_server.admission.client_pace import SlowClients, watch
from objectcache_storage_server.admission.entrance import Entrance, Gone, drained
from objectcache_storage_server.admission.line_waits import LineWaits
from objectcache_storage_server.admission.memory_line import MemoryGrants
from objectcache_storage_server.admission.put_slots import PutSlots
from objectcache_storage_server.conversations.read_passes import Versions
from objectcache_storage_server.conversations.sessions import SessionServer
from objectcache_storage_server.conversations.tickets import TicketBook
from objectcache_storage_server.deliveries.dispatcher import Dispatcher
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.metrics.engine_times import TimedEngine
from objectcache_storage_server.metrics.storage_counts import StorageCounts
from objectcache_storage_server.operators.change_schedule import ScheduleBook
from objectcache_storage_server.operators.view_schedule import copy_schedule
from objectcache_storage_server.s3.lifecycle import LifecycleCounts, LifecycleSweeper
from objectcache_storage_server.scheduling.scheduler import Scheduler
from objectcache_storage_server.scheduling.windows.find_windows import WindowFinder
from objectcache_storage_server.tracing.recorder import DeliveryRecorder
from objectcache_storage_server.tracing.trace_book import TraceBook
from objectcache_storage_server.transports.fabrics import Fabrics
from objectcache_storage_server.transports.targets import TargetRegistry

if TYPE_CHECKING:
    from objectcache_runtime.metrics.metric_families import MetricsPage

P = ParamSpec("P")
T = TypeVar("T")

READER_THREADS_MAX = 8  # more threads only wait for each other's interpreter lock
ENGINE_THREADS = 16  # calls that write, flush or look up; each blocks on the device
FRAGMENT_BYTES_MIN = 64 * KIB
RATED_FRAGMENT_S = 0.25  # of a delivery at the rate that its client wants at most
CHECK_RETRY_AFTER_S = 60.0  # a check reads the whole store


class Service:
    """The storage server without its sockets."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        export: Callable[[DeliveryRecorder], None] | None = None,
        accounts: AccountBook | None = None,
    ) -> None:
        """`export` is called with the record of each delivery that has ended. Without `accounts`
        they are kept in memory.
        """
        storage = settings.storage
        self.settings = settings
        self.storage = storage
        self.limits = settings.limits
        self.counts = StorageCounts(settings.admin.tenants_in_metrics_max)
        self.engine = engine = TimedEngine(engine, self.counts.engine)
        self._metrics_page: MetricsPage | None = None
        self.pool = BufferPool(storage.fragment_bytes, storage.server_in_flight_bytes_max)
        self.registry = TargetRegistry(storage.targets_bytes_max)
        self.fabrics = Fabrics(storage)
        self.tickets = TicketBook()
        self.sessions = SessionServer(self.registry, self.fabrics, self.tickets, storage)
        self.reader_threads = storage.reader_threads or min(READER_THREADS_MAX, os.cpu_count() or 1)
        self.schedule_book = ScheduleBook(settings)
        self.entrance = Entrance(settings, self.schedule_book.configuration.tenants)
        self.memory = MemoryGrants(
            self.pool,
            settings.scheduler.queue_max,
            settings.scheduler.queue_timeout_s,
            self.entrance.closed,
        )
        self.staging_grants = MemoryGrants(
            self.fabrics.staging,
            settings.scheduler.queue_max,
            settings.scheduler.queue_timeout_s,
            self.entrance.closed,
        )
        rate_min = storage.client_rate_bytes_per_s_min
        self.slow_bodies = SlowClients("took a body", rate_min, self._holds_bodies_up)
        self.slow_puts = SlowClients("sent a put", rate_min, self._holds_puts_up)
        self.windows = WindowFinder(settings.profiles_dir)
        self._export = export
        self.traces = TraceBook(settings.scheduler.traces_kept, self._delivery_ended)
        self.dispatcher = Dispatcher(
            self.reader_threads, Scheduler(self.schedule_book.configuration, time.monotonic())
        )
        self.draining = False
        self.accounts = accounts or AccountBook()
        self.directory = AccountDirectory(self.accounts)
        self.quotas = QuotaBook(engine, self.accounts, self.directory)
        self.stored = StoredLedger(self.quotas, engine.usage, engine.each_bucket())
        self.lifecycle_counts = LifecycleCounts()
        self._sweeper: LifecycleSweeper | None = None
        self.in_flight = InFlight(self.quotas)
        self.request_tokens = RequestTokens()
        self.counting_parts = threading.Lock()  # no part is counted while another one is
        self.configuring = threading.Lock()  # between a look at a configuration and its change
        self.host_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._executor = ThreadPoolExecutor(ENGINE_THREADS, "engine")
        self._schedule_lock = threading.Lock()
        self._put_slots = PutSlots(storage)
        self.put_waits = LineWaits(
            self._put_slots,
            settings.scheduler.queue_max,
            settings.scheduler.queue_timeout_s,
            self.entrance.closed,
        )
        self._checking = False
        self._lock = threading.Lock()

    def start_lifecycle(self) -> None:
        """Carry out the buckets' lifecycle rules from now on, until `close`."""
        self._sweeper = LifecycleSweeper(
            self.engine,
            self.lifecycle_counts,
            self.storage.lifecycle_interval_s,
            self.storage.lifecycle_day_s,
            self.stored.upload_ended,
        )

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking engine call in a worker thread.

        If the caller is cancelled the call still runs to its end.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    async def call_to_open(self, open_: Callable[[], T], close: Callable[[T], None]) -> T:
        """The same, for a call whose result must be closed: also where the caller is cancelled."""
        opening = asyncio.ensure_future(self.call(open_))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(lambda done: _close_opened(done, close))
            raise

    @property
    def versions(self) -> Versions:
        """Of the accounts and the buckets: others after any change."""
        return Versions(self.accounts.version, self.directory.buckets_version)

    # --- the schedule ---

    @property
    def policy(self) -> str:
        """The policy in force."""
        return self.schedule_book.configuration.policy

    @property
    def layerwise_threshold_bytes(self) -> int:
        """The threshold in force (paper, equation 2)."""
        return self.schedule_book.configuration.layerwise_threshold_bytes

    def fragment_bytes(
        self, wanted_bytes: int, slice_bytes: int, rate_bytes_per_s: float = math.inf
    ) -> int:
        """The size of fragments: as wanted, or less where they would make the cap's rate uneven or
        the delivery has a rate of its own, but a slice at least, which is verified whole.
        """
        capped_bytes = self.dispatcher.with_scheduler(Scheduler.fragment_bytes_max)
        paced_bytes = min(capped_bytes, rate_bytes_per_s * RATED_FRAGMENT_S)
        least_bytes = min(wanted_bytes, max(slice_bytes, FRAGMENT_BYTES_MIN))
        return int(max(least_bytes, min(wanted_bytes, paced_bytes)))

    def change_schedule(self, request: SetSchedule) -> ScheduleState:
        """Keep an operator's changes, and put them in force for what runs and what comes."""
        with self._schedule_lock:
            configuration = self.schedule_book.change(request.changes, request.reset)
            self.dispatcher.with_scheduler(
                lambda scheduler: scheduler.configure(configuration, time.monotonic())
            )
            self.entrance.configure(configuration.tenants)
        return self.schedule_state()

    def schedule_state(self) -> ScheduleState:
        """The schedule in force, and what it does. The dispatcher is held up for a copy only."""
        now_s = time.monotonic()
        copied = self.dispatcher.with_scheduler(lambda scheduler: copy_schedule(scheduler, now_s))
        return copied.state(self.schedule_book.changes, self.entrance.waiting + self.memory.waiting)

    def _delivery_ended(self, recorder: DeliveryRecorder) -> None:
        self.counts.delivery_ended(recorder)
        if self._export is not None:
            self._export(recorder)

    # --- puts ---

    @property
    def puts_running(self) -> int:
        """Puts that were admitted and have not ended."""
        return self._put_slots.puts

    @property
    def put_staging_bytes(self) -> int:
        """Bytes that they may take."""
        return self._put_slots.staged_bytes

    @property
    def put_bytes_max(self) -> int:
        """Bytes that one put may be counted with."""
        return self._put_slots.put_bytes_max

    @asynccontextmanager
    async def put_admitted(
        self, staged_bytes: int, identity: str, gone: Gone | None = None
    ) -> AsyncGenerator[None]:
        """Have a put run for the length of the block; it waits for a slot before.

        Raises `InvalidRequest` as `PutSlots.check`, and as `LineWaits.take`.
        """
        self._check_put(staged_bytes)
        await self.put_waits.take(identity, staged_bytes, gone)
        try:
            yield
        finally:
            self.put_waits.give_back(identity, staged_bytes)

    @contextmanager
    def put_admitted_now(self, staged_bytes: int, identity: str) -> Generator[None]:
        """The same in a worker thread, which must not wait: raises `Busy` instead."""
        self._check_put(staged_bytes)
        self.put_waits.take_now(identity, staged_bytes)
        try:
            yield
        finally:
            self.put_waits.give_back(identity, staged_bytes)

    def _check_put(self, staged_bytes: int) -> None:
        if self.draining:
            raise Unavailable("the storage server is stopping")
        if self.entrance.drained:
            raise drained()
        self._put_slots.check(staged_bytes)

    # --- clients that are slow ---

    async def watch_slow_clients(self) -> None:
        """Cut those that hold others up, for as long as it is not cancelled."""
        await watch(
            {
                self.slow_bodies: lambda: self.memory.waiting + self.entrance.waiting,
                self.slow_puts: lambda: self.put_waits.waiting,
            }
        )

    def _holds_bodies_up(self, tenant: str) -> bool:
        return self.memory.is_held_from_others(tenant) or self.entrance.is_held_from_others(tenant)

    def _holds_puts_up(self, tenant: str) -> bool:
        return self.put_waits.is_held_from_others(tenant)

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
            deliveries_in_flight=self.entrance.running,
            in_flight_bytes=self.pool.promised_bytes,
            damaged_count=self.engine.damaged_count,
            draining=self.draining or self.entrance.drained,
            flush_failure=self.engine.flush_failure,
        )

    def metrics_text(self) -> bytes:
        """The metrics as `MetricsPage.text` has them. What renders them is loaded at the first."""
        if self._metrics_page is None:
            from objectcache_storage_server.metrics.families import storage_page

            self._metrics_page = storage_page(self)
        return self._metrics_page.text()

    def close(self) -> None:
        """Stop the threads and the engine; nothing may be running."""
        if self._sweeper is not None:
            self._sweeper.close()
        self.entrance.close()
        self.dispatcher.close()
        self.fabrics.close()
        self._executor.shutdown()
        self.engine.close()


def _close_opened(opened: asyncio.Future[T], close: Callable[[T], None]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        close(opened.result())
