"""The storage server without its sockets: its parts, made and let go together."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from objectcache_runtime.settings import Settings
from objectcache_schemas.descriptor import SERVER_ID_BYTES
from objectcache_schemas.operators.server_state import Health
from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.admission.gates import Gates
from objectcache_storage_server.conversations.sessions import SessionServer
from objectcache_storage_server.conversations.tickets import TicketBook
from objectcache_storage_server.counts.engine_times import TimedEngine
from objectcache_storage_server.counts.storage_counts import StorageCounts
from objectcache_storage_server.deliveries.get_means import GetMeans
from objectcache_storage_server.deliveries.schedule import Schedule
from objectcache_storage_server.documents.documents import Documents
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.engine_calls import EngineCalls
from objectcache_storage_server.fleet.own_state import OwnState, no_log
from objectcache_storage_server.fleet.server_directory import AloneDirectory
from objectcache_storage_server.fleet.shared_parts import SharedParts
from objectcache_storage_server.operators.account_requests import AccountMeans
from objectcache_storage_server.operators.run_checks import Checks
from objectcache_storage_server.puts.put_means import PutMeans
from objectcache_storage_server.quotas.books import Books, StoreCompany
from objectcache_storage_server.s3.bucket_requests import BucketMeans
from objectcache_storage_server.s3.lifecycle import LifecycleCounts, LifecycleSweeper
from objectcache_storage_server.s3.upload_requests import UploadMeans
from objectcache_storage_server.scheduling.schedule_book import ScheduleBook
from objectcache_storage_server.scheduling.windows.find_windows import WindowFinder
from objectcache_storage_server.tracing.recorder import DeliveryRecorder
from objectcache_storage_server.tracing.trace_book import TraceBook
from objectcache_storage_server.transports.fabrics import Fabrics
from objectcache_storage_server.transports.targets import TargetRegistry

if TYPE_CHECKING:
    from objectcache_runtime.metrics.metric_families import MetricsPage

READER_THREADS_MAX = 8  # more threads only wait for each other's interpreter lock


class Service:
    """What a message's handler is given is a part of it, such as `gets` or `puts`."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        export: Callable[[DeliveryRecorder], None] | None = None,
        accounts: AccountBook | None = None,
        shared: SharedParts | None = None,
        documents: Documents | None = None,
    ) -> None:
        """`export` is called with the record of each delivery that has ended. Without `accounts`
        they are kept in memory; without `documents` the schedule is kept where the settings say.
        Without `shared` the store is this server's alone.
        """
        storage = settings.storage
        self.settings = settings
        self.counts = counts = StorageCounts(settings.admin.tenants_in_metrics_max)
        engine = TimedEngine(engine, counts.engine)
        self.calls = calls = EngineCalls(engine)
        directory = shared.directory if shared is not None else AloneDirectory()
        company = None
        if shared is not None:
            company = StoreCompany(lambda: directory.serving, lambda: not shared.store_failure())
        self.books = books = Books(engine, accounts or AccountBook(), company)
        server_id = secrets.token_bytes(SERVER_ID_BYTES)
        self.targets = targets = TargetRegistry(storage.targets_bytes_max, server_id)
        self.fabrics = Fabrics(storage)
        staging = self.fabrics.staging
        book = ScheduleBook(settings, documents)
        self.gates = gates = Gates(
            settings, book.configuration.tenants, books.in_flight, books.stored, staging, calls.call
        )
        log = shared.log_state if shared is not None else no_log
        self.own = OwnState(
            settings,
            server_id,
            gates,
            directory,
            log,
            lambda: self.sessions.open_count,
            shared.store_failure if shared is not None else lambda: "",
        )
        if shared is not None:
            shared.on_buckets(books.buckets_changed_elsewhere)
            books.buckets_changed_elsewhere()  # what was changed since the books were read
        reader_threads = storage.reader_threads or min(READER_THREADS_MAX, os.cpu_count() or 1)
        self.schedule = schedule = Schedule(
            book, gates, reader_threads, engine.capabilities.queue_depth
        )
        self._export = export
        self._shared = shared
        self.traces = TraceBook(settings.scheduler.traces_kept, self._delivery_ended)
        windows = WindowFinder(settings.profiles_dir)
        self.gets = GetMeans(
            settings, calls, books, gates, schedule, windows, targets, staging, counts, self.traces
        )
        self.puts = PutMeans(settings, calls, gates, targets, staging, counts)
        self.uploads = UploadMeans(self.puts, books.stored)
        self.buckets = BucketMeans(calls, books, storage.buckets_per_user_max)
        self.accounts = AccountMeans(calls, books, gates.entrance.closed)
        self.checks = Checks(calls, gates, storage.send_stall_timeout_s)
        self.tickets = TicketBook()
        self.sessions = SessionServer(targets, self.fabrics, self.tickets, storage)
        self.lifecycle = LifecycleCounts()
        self._sweeper: LifecycleSweeper | None = None
        self._metrics_page: MetricsPage | None = None

    @property
    def engine(self) -> Engine:
        """Where objects live."""
        return self.calls.engine

    def start_lifecycle(self) -> None:
        """Carry out the buckets' lifecycle rules from now on, until `close`."""
        storage = self.settings.storage
        self._sweeper = LifecycleSweeper(
            self.engine,
            self.lifecycle,
            storage.lifecycle_interval_s,
            storage.lifecycle_day_s,
            self.books.stored.upload_ended,
            is_due_here=self.own.is_first,
        )

    def _delivery_ended(self, recorder: DeliveryRecorder) -> None:
        self.counts.delivery_ended(recorder)
        if self._export is not None:
            self._export(recorder)

    def health(self) -> Health:
        """The state that health checks and the admin view show."""
        return Health(
            engine=self.engine.capabilities.name,
            deliveries_in_flight=self.gates.entrance.running,
            in_flight_bytes=self.gates.pool.promised_bytes,
            damaged_count=self.engine.damaged_count,
            draining=self.gates.takes_no_work,
            flush_failure=self.engine.flush_failure,
            degraded=self._degraded(time.monotonic()),
        )

    def _degraded(self, now_s: float) -> str:
        """What fails while the server serves others, in words; empty while all is well."""
        counts = {
            "requests refused because the store or its device is full (StorageFull)": (
                self.counts.full_lately
            ),
            "bodies cut for slow clients": self.gates.slow_bodies.cut_lately,
            "puts cut for slow clients": self.gates.slow_puts.cut_lately,
        }
        told = [f"{count:,} {what}" for what, one in counts.items() if (count := one.at(now_s))]
        lately = f"lately: {', '.join(told)}" if told else ""
        return "; ".join(filter(None, (self.engine.store_failure, lately)))

    def metrics_text(self) -> bytes:
        """The metrics as `MetricsPage.text` has them. What renders them is loaded at the first."""
        if self._metrics_page is None:
            from objectcache_storage_server.metrics.families import storage_page

            self._metrics_page = storage_page(self.gets, self.lifecycle)
        return self._metrics_page.text()

    def close(self) -> None:
        """Stop the threads and the engine; nothing may be running."""
        if self._sweeper is not None:
            self._sweeper.close()
        self.gates.entrance.close()
        self.schedule.dispatcher.close()
        self.fabrics.close()
        if self._shared is not None:
            self._shared.close()
        self.calls.close()
