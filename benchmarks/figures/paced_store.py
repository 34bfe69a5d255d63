"""Deliveries of a store in this process, with a stamp for every fragment: the engine, the
scheduler and the readers alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.basis.prefix import fill_chunks
from benchmarks.basis.store import BUCKET, Passing, Store
from benchmarks.figures.rates import Stamp, at_once
from benchmarks.figures.scaled import ScaledRequest
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.operators.schedule import ScheduleConfiguration
from objectcache_storage_server.deliveries.delivery import ServedDelivery
from objectcache_storage_server.deliveries.plan import plan_chunks, target_fragment_bytes
from objectcache_storage_server.tracing.recorder import DeliveryRecorder


@dataclass(frozen=True, slots=True)
class Paced:
    """One delivery."""

    name: str
    rate_bytes_per_s: float | None
    stamps: list[Stamp]
    fragment_bytes: int | None = None


class _Stamping(Passing):
    """Notes when each piece was complete."""

    def __init__(self, fragment_bytes: int) -> None:
        super().__init__(fragment_bytes)
        self.stamps: list[Stamp] = []

    def written(self, offset_bytes: int, length_bytes: int) -> None:
        self.stamps.append(at_once(time.monotonic(), length_bytes))


class PacedStore:
    """Deliveries of a store in this process, all at once."""

    def __init__(self, store: Store, requests: Sequence[ScaledRequest]) -> None:
        """Puts a prefix for each request."""
        self._store = store
        self._requests = requests
        for series, request in enumerate(requests):
            geometry = request.geometry
            keys = geometry.keys(series)
            shape = (geometry.chunk_count, geometry.num_layers, geometry.slice_bytes)
            chunks = np.empty(shape, np.uint8)
            fill_chunks(chunks, geometry, keys)
            store.put(geometry, keys, chunks.reshape(-1).data)

    def run(self, configuration: ScheduleConfiguration) -> list[Paced]:
        """Once under the schedule, from start to end."""
        service = self._store.service
        service.schedule.dispatcher.with_scheduler(
            lambda scheduler: scheduler.configure(configuration, time.monotonic())
        )
        running = [
            _Running(self._store, series, request) for series, request in enumerate(self._requests)
        ]
        for one in running:
            service.schedule.dispatcher.add(one.delivery, one.request.demand, pooled=True)
        for one in running:
            one.ended.wait()
        return [one.paced() for one in running]


class _Running:
    """One delivery of a store in this process."""

    def __init__(self, store: Store, series: int, request: ScaledRequest) -> None:
        self.request = request
        self.ended = threading.Event()
        self._service = store.service
        self._rate: float | None = None
        keys = request.geometry.keys(series)
        opened = store.engine.open_many(BUCKET, keys, are_prefix=True)
        fragment_bytes = self._fragment_bytes()
        descriptor = _descriptor(request, keys)
        plan = plan_chunks(descriptor, opened.placements(), descriptor.delivery, fragment_bytes)
        self._longest_bytes = max(fragment.length_bytes for fragment in plan.fragments())
        self._transport = _Stamping(fragment_bytes)
        recorder = DeliveryRecorder(
            "", BUCKET, "", started_s=time.monotonic(), started_unix_s=time.time()
        )
        self.delivery = ServedDelivery(
            plan, opened, self._transport, self._on_end, recorder, self._on_admitted
        )

    def _fragment_bytes(self) -> int:
        """As the server chooses it."""
        service = self._service
        wanted_bytes = target_fragment_bytes(
            self.request.layer_bytes,
            service.schedule.reader_threads,
            service.settings.storage.fragment_bytes,
            service.settings.storage.target_fragment_bytes_max,
        )
        return service.schedule.fragment_bytes(wanted_bytes, self.request.geometry.slice_bytes)

    def _on_admitted(self, rate_bytes_per_s: float | None) -> None:
        self._rate = rate_bytes_per_s

    def _on_end(self, delivery: ServedDelivery) -> None:
        self._service.schedule.dispatcher.remove(delivery)
        self.ended.set()

    def paced(self) -> Paced:
        """What it came to; raises what it ended with."""
        if self.delivery.error is not None:
            raise self.delivery.error
        stamps = self._transport.stamps
        return Paced(self.request.paper.name, self._rate, stamps, self._longest_bytes)


def _descriptor(request: ScaledRequest, keys: Sequence[str]) -> Descriptor:
    geometry = request.geometry
    return Descriptor(
        tuple(keys),
        geometry.num_layers,
        geometry.chunk_tokens,
        geometry.slice_bytes,
        DeliveryMode.LAYERWISE,
    )
