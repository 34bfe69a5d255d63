"""Two servers on one store in RADOS, also while no OSD answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from objectcache_schemas.errors import DamagedData, Unavailable
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.records import Condition
from objectcache_storage_server.engines.base import PrefixShape, Read, StagedPut
from objectcache_storage_server.engines.shared.engine import SharedEngine
from tests.ceph import CephCluster
from tests.contract.engine_suite import BUCKET, content, put, read, read_range
from tests.contract.opened_engines.shared_engines import open_server
from tests.rados.conftest import Open, within

HURRIED_S = 0.5  # for a call that nobody answers
SHAPE = PrefixShape([f"{i}" for i in range(80)], 4, 64 * KIB, layerwise=True)


@pytest.fixture
def two(open_store: Open, tmp_path: Path) -> Iterator[tuple[SharedEngine, SharedEngine]]:
    with (
        closing(open_server(open_store(), tmp_path / "a")) as first,
        closing(open_server(open_store(), tmp_path / "b")) as second,
    ):
        first.create_bucket(BUCKET)
        yield first, second


def put_prefix(engine: SharedEngine) -> bytes:
    """Store the chunks of `SHAPE`; returns the payload, layer after layer."""
    payload = content("payload", SHAPE.total_bytes)
    prefix = engine.stage_prefix(BUCKET.name, SHAPE)
    for begin in range(0, len(payload), 2 * MIB):
        prefix.write(begin, memoryview(payload)[begin : begin + 2 * MIB])
    engine.commit([StagedPut(staged, "") for staged in prefix.staged], Condition(immutable=True))
    return payload


def test_a_prefix_that_one_server_stored_is_delivered_by_the_other(
    two: tuple[SharedEngine, SharedEngine],
) -> None:
    first, second = two
    payload = put_prefix(first)
    row_bytes = 64 * SHAPE.slice_bytes  # a full extent's, which is an object of the store
    rest_bytes = 16 * SHAPE.slice_bytes
    layer_bytes = row_bytes + rest_bytes
    landing = memoryview(bytearray(layer_bytes))
    with second.open_many(BUCKET.name, SHAPE.keys, are_prefix=True) as opened:
        for layer in range(SHAPE.num_layers):
            reads = [
                Read(0, layer * row_bytes, row_bytes, 0),
                Read(1, layer * rest_bytes, rest_bytes, row_bytes),
            ]
            opened.begin_reads(reads, landing).finish()
            assert landing == payload[layer * layer_bytes : (layer + 1) * layer_bytes]


def test_objects_are_put_joined_and_deleted_over_servers(
    two: tuple[SharedEngine, SharedEngine],
) -> None:
    first, second = two
    parts = [content(number, size) for number, size in enumerate((9 * MIB, 64 * KIB, 1000))]
    infos = [put(first, f"{number}", data).info for number, data in enumerate(parts)]
    joined = second.stage_joined(BUCKET.name, "whole", BUCKET.name, infos)
    assert joined is not None
    second.commit([StagedPut(joined, "etag")])
    assert read(first, "whole") == b"".join(parts)
    assert read(first, "0") is None
    assert second.delete(BUCKET.name, ["whole"]) == 1
    assert read(first, "whole") is None


def test_an_object_of_the_pool_that_is_gone_is_damage(
    two: tuple[SharedEngine, SharedEngine],
) -> None:
    first, second = two
    put(first, "key", b"data")
    first.store.delete(
        [each.name for each in first.store.list_objects("data/", within())], within()
    )
    with pytest.raises(DamagedData):
        read(second, "key")
    assert read(first, "key") is None


def test_while_no_osd_answers_calls_end_and_afterwards_all_goes_on(
    two: tuple[SharedEngine, SharedEngine], cluster: CephCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    put(first, "key", b"data")
    opened = second.open_many(BUCKET.name, ["key"])
    with cluster.paused_osds(), monkeypatch.context() as hurried:
        for engine in two:
            hurried.setattr(engine._writer, "call_s_max", HURRIED_S)
        for call in (
            lambda: read_range(opened, 0, 0, 4),
            lambda: read(second, "key"),
            lambda: put(first, "other", b"data"),
            lambda: first.delete(BUCKET.name, ["key"]),
        ):
            with pytest.raises(Unavailable):
                call()
    # What was asked for may have been carried out, or not; nothing was taken for damage.
    assert read_range(opened, 0, 0, 4) == b"data"
    put(second, "after", b"data")
    for engine in two:
        assert engine.damaged_count == 0
        assert read(engine, "after") == b"data"
        assert read(engine, "key") in (None, b"data")
        assert read(engine, "other") in (None, b"data")
