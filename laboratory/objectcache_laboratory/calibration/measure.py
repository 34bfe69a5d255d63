"""TTFTs of one delivery at a time from a running server, by rate and by mode."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from objectcache.client import Client
from objectcache.kv_bucket import KvBucket
from objectcache_laboratory.calibration.geometry import ModelGeometry
from objectcache_laboratory.calibration.knee import RateReading, Sample
from objectcache_schemas.limits import MIB

PUT_BYTES_MAX = 64 * MIB
UNBOUND = math.inf


@dataclass(frozen=True, slots=True)
class StoredGeometry:
    """A geometry whose chunks are in the bucket."""

    geometry: ModelGeometry
    bucket: KvBucket
    keys: list[str]


class Measurement:
    """Deliveries from a bucket of its own. Other traffic goes on beside them."""

    def __init__(self, client: Client, bucket: str, *, tells_window: bool = False) -> None:
        """With `tells_window` deliveries join the pool that the server's policy divides; without,
        they take fair turns, at no more than their own rate.
        """
        self._client = client
        self._bucket = bucket
        self._rng = np.random.default_rng()
        self._stored_count = 0
        self._tells_window = tells_window

    def store(self, geometry: ModelGeometry) -> StoredGeometry:
        """Put random chunks of a geometry, and fetch them once so that they are warm."""
        layout = geometry.layout
        bucket = self._client.kv_bucket(self._bucket, layout)
        self._stored_count += 1
        keys = [f"{self._stored_count:04}-{index:08}" for index in range(geometry.chunk_count)]
        batch = max(1, PUT_BYTES_MAX // layout.chunk_bytes)
        for first in range(0, len(keys), batch):
            some = keys[first : first + batch]
            shape = len(some), layout.num_layers, layout.per_layer_chunk_bytes
            chunks = self._rng.integers(0, 256, shape, np.uint8)
            bucket.put(some, chunks, parent_key=keys[first - 1] if first else None)
        stored = StoredGeometry(geometry, bucket, keys)
        for mode in ("layerwise", "chunkwise"):
            with bucket.fetch(keys, delivery=mode) as delivery:
                delivery.wait()
        return stored

    def layerwise(self, stored: StoredGeometry, rate_bytes_per_s: float = UNBOUND) -> Sample:
        """Layer by layer, at a rate of at most so much."""
        return self._sample(stored, "layerwise", rate_bytes_per_s)

    def chunkwise(self, stored: StoredGeometry) -> Sample:
        """All chunks, then all of the computing."""
        return self._sample(stored, "chunkwise", UNBOUND)

    def readings(
        self, stored: StoredGeometry, rates: Sequence[float], repeats: int
    ) -> list[RateReading]:
        """One a rate. Every round goes through all rates, so that what disturbs for a while does
        not fall on one of them.
        """
        rounds = [[self.layerwise(stored, rate) for rate in rates] for _ in range(repeats)]
        return [
            RateReading(rate, samples)
            for rate, samples in zip(rates, zip(*rounds, strict=True), strict=True)
        ]

    def _sample(self, stored: StoredGeometry, mode: str, rate_bytes_per_s: float) -> Sample:
        geometry = stored.geometry
        started_s = time.monotonic()
        with stored.bucket.fetch(
            stored.keys,
            delivery=mode,
            compute_window_s=geometry.compute_window_s if self._tells_window else None,
            rate_bytes_per_s=None if rate_bytes_per_s == UNBOUND else rate_bytes_per_s,
        ) as delivery:
            delivery.report_explicitly()  # or the server would learn a window
            return prefill(
                delivery.wait_layer, geometry.num_layers, geometry.compute_window_s, started_s
            )


def prefill(
    wait_layer: Callable[[int], object], num_layers: int, window_s: float, started_s: float
) -> Sample:
    """Seconds from `started_s`, by time.monotonic, to the end of the last layer's computing.

    A layer is computed once it is there and the one before it is through; while it is computed the
    next one is waited for (paper, section 3.5). What computes is the clock, so a thread that wakes
    late loses nothing.
    """
    computed_s, first_layer_s = started_s, 0.0
    for layer in range(num_layers):
        wait_layer(layer)
        begun_s = max(computed_s, time.monotonic())
        if layer == 0:
            first_layer_s = begun_s - started_s
        computed_s = begun_s + window_s
        _sleep_until(begun_s)
    _sleep_until(computed_s)
    return Sample(computed_s - started_s, first_layer_s)


def _sleep_until(at_s: float) -> None:
    left_s = at_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
