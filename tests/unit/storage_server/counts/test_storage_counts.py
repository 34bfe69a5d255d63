"""What a storage server counts of deliveries, stalls and its engine's calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from objectcache_runtime.settings import load_settings
from objectcache_schemas.errors import DeliveryFailed, NotFound
from objectcache_schemas.records import BucketInfo
from objectcache_storage_server.counts.engine_times import EngineTimes, TimedEngine
from objectcache_storage_server.counts.storage_counts import (
    BUCKETS_IN_METRICS_MAX,
    DeliveryKind,
    StorageCounts,
)
from objectcache_storage_server.engines.base import StagedPut
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.engines.open_engine import open_engine
from objectcache_storage_server.tracing.recorder import DeliveryRecorder

CODES = ("", DeliveryFailed.default_code)  # of a success, and of a failure


def recorder(
    counts: StorageCounts,
    tenant: str = "alice",
    rate_bytes_per_s: float | None = None,
    decoded_bytes: int | None = None,
) -> DeliveryRecorder:
    """Accepted at 2 s after its arrival, of which it waited 1.5 s for its turn."""
    record = DeliveryRecorder(
        "id", "bucket", tenant, started_s=10.0, started_unix_s=0.0, reads=counts.engine.reads
    )
    record.queued(1.5)
    record.accepted(
        path="agg",
        transport="tcp",
        delivery="layerwise",
        policy="stall_opt",
        chunk_count=3,
        payload_bytes=2000,
        first_layer=0,
        end_layer=2,
        compute_window_s=None,
        window_source="none",
        rate_bytes_per_s=rate_bytes_per_s,
        now_s=12.0,
        decoded_bytes=decoded_bytes,
    )
    return record


def read_whole(record: DeliveryRecorder) -> None:
    """Two layers in two seconds: 1,000 bytes a second."""
    for layer in (0, 1):
        record.fragment_begun(layer, 12.0 + layer)
        record.fragment_read(layer, 1000, 0.25, 13.0 + layer)
        record.layers_ready(layer + 1, 13.0 + layer)


def test_a_delivery_is_counted_with_its_bytes_times_and_rate() -> None:
    counts = StorageCounts(10)
    record = recorder(counts, rate_bytes_per_s=2000.0)
    read_whole(record)
    record.ended(14.0, None)
    counts.delivery_ended(record)
    cell = counts.deliveries[DeliveryKind("layerwise", "agg", "tcp", "")]
    assert (cell.count, cell.read_bytes, cell.chunks) == (1, 2000, 3)
    assert cell.phases_s == [0.0, 0.5, 1.5, 2.0, 0.0]
    assert counts.delivery_seconds["agg"].buckets()[1] == 4.0
    assert counts.first_layer_seconds["agg"].buckets()[1] == 3.0
    assert counts.queue_seconds.buckets()[1] == 1.5
    assert counts.rate_ratios["stall_opt"].buckets()[1] == 0.5
    assert counts.tenants["alice"].delivered_bytes == 2000
    assert counts.engine.reads.buckets()[1] == 0.5


def test_what_an_encoded_payload_spared_is_counted_where_it_came_whole() -> None:
    counts = StorageCounts(10)
    for error in (None, DeliveryFailed("gone").to_wire()):
        record = recorder(counts, decoded_bytes=2900)
        read_whole(record)
        record.ended(14.0, error)
        assert (record.trace().payload_bytes, record.trace().decoded_bytes) == (2000, 2900)
        counts.delivery_ended(record)
    cells = [counts.deliveries[DeliveryKind("layerwise", "agg", "tcp", code)] for code in CODES]
    assert [(cell.read_bytes, cell.spared_bytes) for cell in cells] == [(2000, 900), (2000, 0)]


def test_a_plain_payload_has_what_it_has_decoded_and_spares_nothing() -> None:
    record = recorder(StorageCounts(10))
    record.ended(14.0, None)
    assert record.trace().decoded_bytes == 2000
    assert record.summary().spared_bytes == 0


def test_a_delivery_that_fails_has_an_outcome_and_no_rate() -> None:
    counts = StorageCounts(10)
    record = recorder(counts, rate_bytes_per_s=2000.0)
    read_whole(record)
    record.ended(14.0, DeliveryFailed("gone").to_wire())
    counts.delivery_ended(record)
    assert counts.deliveries[DeliveryKind("layerwise", "agg", "tcp", "DeliveryFailed")].count == 1
    assert list(counts.rate_ratios.items()) == []


def test_a_request_that_was_refused_is_counted_without_times() -> None:
    counts = StorageCounts(10)
    record = DeliveryRecorder("id", "b", "alice", started_s=0.0, started_unix_s=0.0, path="")
    record.ended(1.0, NotFound("not there").to_wire())
    counts.delivery_ended(record)
    assert counts.deliveries[DeliveryKind("", "", "", "NoSuchKey")].count == 1
    assert list(counts.delivery_seconds.items()) == []


def test_consumed_layers_add_compute_and_stalls_that_are_longer_than_asking() -> None:
    counts = StorageCounts(1)
    counts.layers_consumed("alice", 2, 0.5, 0.25)
    counts.layers_consumed("alice", 1, 0.5, 0.00001)
    counts.layers_consumed("alice", 1, 0.5, None)
    counts.layers_consumed("alice", 0, 9.0, 9.0)
    counts.layers_consumed("alice", -1, 9.0, 9.0)
    counts.layers_consumed("bob", 1, 1.0, 1.0)
    cell = counts.tenants["alice"]
    assert (cell.consumed_layers, cell.compute_s, cell.stall_s, cell.stalls) == (4, 2.0, 0.25, 1)
    assert counts.tenants["other"].stall_s == 1.0


def test_an_engines_calls_are_timed_and_its_errors_go_through() -> None:
    times = EngineTimes()
    engine = TimedEngine(MemoryEngine(), times)
    engine.create_bucket(BucketInfo(name="b", owner="o", region="r", created_s=0.0))
    assert engine.match("b", ["x"]) == 0
    for _ in range(2):
        with pytest.raises(NotFound, match="'x'"):
            engine.stat("b", "x")
    assert (times.seconds["stat"].count, times.failures["stat"]) == (2, 2)
    assert (times.seconds["match"].count, times.failures["match"]) == (1, 0)


def test_an_engines_totals_leave_out_only_what_is_counted_extent_by_extent(tmp_path: Path) -> None:
    flags = [f"server.data_dir={tmp_path}", "storage.capacity_bytes=67108864"]
    engine = open_engine(load_settings(None, {}, flags))
    try:
        engine.create_bucket(BucketInfo(name="b", owner="o", region="r", created_s=0.0))
        staged = engine.stage("b", "k")
        staged.write_at(0, memoryview(b"x" * 5000))
        engine.commit([StagedPut(staged, "etag")])
        status, totals = engine.status(), engine.totals()
        assert (status.objects, status.live_bytes, len(status.extents)) == (1, 5000, 1)
        paths = tuple(replace(path, extents=0, extent_bytes=0) for path in status.paths)
        assert totals == replace(status, extents=(), paths=paths)
    finally:
        engine.close()


def test_as_many_buckets_have_a_name_as_there_is_room_for() -> None:
    counts = StorageCounts(10)
    names = [counts.buckets[f"bucket-{number}"] for number in range(BUCKETS_IN_METRICS_MAX + 5)]
    assert names[-6:] == [f"bucket-{BUCKETS_IN_METRICS_MAX - 1}", *["other"] * 5]
    assert counts.buckets["bucket-0"] == "bucket-0"
