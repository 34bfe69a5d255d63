"""LMCache's multiprocess mode through the L2 adapter, made by LMCache's own factory."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.storage_manager import StorageManager

from objectcache import Client, InvalidRequest
from objectcache.connectors.store.configuration import LOOKUP_TIMEOUT_S
from tests.engines.delivery_traces import NewTraces
from tests.engines.lmcache_parts import EngineSide, contents, engine_side, release
from tests.servers import RunningServer, start_server, stop_whole

BUCKET = "lmcache-l2"
MODEL = "meta-llama/Llama-3.1-8B"
TASK_TIMEOUT_S = 60.0
SHAPE = (4, 2, 16, 2, 8)
BIG = (64, 2, 64, 8, 64)  # 8 MiB a chunk
T = TypeVar("T")


@pytest.fixture(scope="module")
def bucket(server: RunningServer) -> RunningServer:
    make_bucket(server)
    return server


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineSide]:
    with engine_side({}, shape=SHAPE) as side:
        yield side


def make_bucket(server: RunningServer) -> None:
    credentials = server.credentials
    with Client(
        server.endpoint, access_key=credentials.access_key, secret_key=credentials.secret_key
    ) as client:
        client.create_bucket(BUCKET)


def config_of(server: RunningServer, **params: Any) -> Any:
    """What LMCache's server makes of its command line."""
    adapter = {
        "type": "plugin",
        "module_path": "objectcache.connectors.lmcache_l2",
        "class_name": "ObjectCacheL2Adapter",
        "adapter_params": {
            "endpoint": server.endpoint,
            "bucket": BUCKET,
            "credentials_file": str(server.credentials_file),
            "lookup_timeout_s": 20.0,  # above any wait that a busy machine causes
            **params,
        },
    }
    flags = ["--l1-size-gb", "0.1", "--no-l1-use-lazy", "--eviction-policy", "LRU"]
    return parse_args([*flags, "--l2-adapter", json.dumps(adapter)])


@contextmanager
def adapter_of(server: RunningServer, **params: Any) -> Iterator[Any]:
    made = create_l2_adapter(config_of(server, **params).l2_adapter_config.adapters[0])
    try:
        yield made
    finally:
        made.close()


def object_keys(
    count: int, first: int, rank: int = 0, world_size: int = 1, salt: str = "", group: int = 0
) -> list[ObjectKey]:
    kv_rank = ObjectKey.ComputeKVRank(world_size, rank, world_size, rank)
    return [
        ObjectKey((first * 1000 + n).to_bytes(32, "big"), MODEL, kv_rank, group, salt)
        for n in range(count)
    ]


def layout_of(engine: EngineSide) -> dict[int, MemoryLayoutDesc]:
    return {0: MemoryLayoutDesc(engine.metadata.get_shapes(), engine.metadata.get_dtypes())}


def awaited(event_fd: int, query: Callable[[], T | None]) -> T:
    """A task's result, asked for when the event says so."""
    deadline_s = time.monotonic() + TASK_TIMEOUT_S
    poller = select.poll()
    poller.register(event_fd, select.POLLIN)
    while (result := query()) is None:
        assert time.monotonic() < deadline_s
        if poller.poll(1000):
            os.read(event_fd, 8)
    return result


def stored(adapter: Any, keys: list[ObjectKey], memory_objs: list[Any]) -> Any:
    task = adapter.submit_store_task(keys, memory_objs)
    done = awaited(
        adapter.get_store_event_fd(), lambda: adapter.pop_completed_store_tasks() or None
    )
    return done[task]


def looked_up(adapter: Any, keys: list[ObjectKey], layouts: dict[int, Any]) -> list[int]:
    task = adapter.submit_lookup_and_lock_task(keys, layouts)
    bitmap = awaited(
        adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task)
    )
    assert bitmap.size() == len(keys)
    assert adapter.query_lookup_and_lock_result(task) is None
    return sorted(bitmap.get_indices_list())


def loaded(adapter: Any, keys: list[ObjectKey], memory_objs: list[Any]) -> list[int]:
    task = adapter.submit_load_task(keys, memory_objs)
    bitmap = awaited(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    assert adapter.query_load_result(task) is None
    return sorted(bitmap.get_indices_list())


def test_what_is_stored_is_found_and_loaded_byte_for_byte_up_to_the_first_missing_chunk(
    bucket: RunningServer, engine: EngineSide
) -> None:
    keys = object_keys(6, first=1)
    memory_objs = engine.chunks(4)
    with adapter_of(bucket) as adapter:
        fds = {
            adapter.get_store_event_fd(),
            adapter.get_lookup_and_lock_event_fd(),
            adapter.get_load_event_fd(),
        }
        assert len(fds) == 3
        result = stored(adapter, keys[:4], memory_objs)
        assert result.is_successful()
        assert result.bytes_transferred() == sum(len(chunk) for chunk in contents(memory_objs))
        assert looked_up(adapter, keys, layout_of(engine)) == [0, 1, 2, 3]
        into = engine.chunks(6)
        assert loaded(adapter, keys, into) == [0, 1, 2, 3]
        assert contents(into[:4]) == contents(memory_objs)
        adapter.submit_unlock(keys)
        assert adapter.get_usage().total_bytes_used == result.bytes_transferred()
    release([*memory_objs, *into])


def test_a_load_of_chunks_is_never_taken_for_a_paced_one(
    bucket: RunningServer, engine: EngineSide
) -> None:
    keys = object_keys(3, first=900)
    traces = NewTraces(bucket, BUCKET)
    with adapter_of(bucket) as adapter:
        assert stored(adapter, keys, engine.chunks(3)).is_successful()
        for _ in range(3):
            assert loaded(adapter, keys, engine.chunks(3)) == [0, 1, 2]
    for trace in traces.all_ended(3):
        assert (trace.window_source, trace.reported_window_s) == ("whole", None)


def test_a_lookup_over_ranks_finds_what_each_rank_has_in_prefix_order(
    bucket: RunningServer, engine: EngineSide
) -> None:
    """LMCache gives the keys of one rank after those of another."""
    first, second = (object_keys(4, first=2, rank=rank, world_size=2) for rank in (0, 1))
    memory_objs = engine.chunks(7)
    with adapter_of(bucket) as adapter:
        assert stored(adapter, [*first[:3], *second], memory_objs).is_successful()
        assert looked_up(adapter, [*first, *second], layout_of(engine)) == [0, 1, 2, 4, 5, 6]
        into = engine.chunks(6)
        assert loaded(adapter, [*first[:3], *second[:3]], into) == [0, 1, 2, 3, 4, 5]
        assert contents(into) == contents([*memory_objs[:3], *memory_objs[3:6]])
    release([*memory_objs, *into])


@pytest.mark.parametrize("other", ["salt", "rank", "group", "weights", "geometry", "dtype"])
def test_what_makes_kv_differ_is_part_of_the_key(
    bucket: RunningServer, engine: EngineSide, other: str
) -> None:
    keys = object_keys(2, first=3)
    memory_objs = engine.chunks(2)
    layouts = layout_of(engine)
    params: dict[str, str] = {}
    with adapter_of(bucket) as adapter:
        assert stored(adapter, keys, memory_objs).is_successful()
        assert looked_up(adapter, keys, layouts) == [0, 1]
    if other == "salt":
        keys = object_keys(2, first=3, salt="another user")
    elif other == "rank":
        keys = object_keys(2, first=3, rank=1, world_size=2)
    elif other == "group":
        keys = object_keys(2, first=3, group=1)
        layouts = {1: layouts[0]}
    elif other == "weights":
        params = {"weights_revision": "2"}
    elif other == "geometry":
        layouts = {0: MemoryLayoutDesc([torch.Size([2, 2, 16, 32])], [torch.bfloat16])}
    else:
        layouts = {0: MemoryLayoutDesc(layouts[0].shapes, [torch.float16])}
    with adapter_of(bucket, **params) as adapter:
        assert looked_up(adapter, keys, layouts) == []
    release(memory_objs)


def test_chunks_of_two_groups_of_layers_travel_in_one_task(
    bucket: RunningServer, engine: EngineSide
) -> None:
    keys = [*object_keys(2, first=4), *object_keys(2, first=4, group=1)]
    with engine_side({}, shape=(2, 1, 16, 1, 24), use_mla=True) as latent:
        memory_objs = [*engine.chunks(2), *latent.chunks(2)]
        layouts = {0: layout_of(engine)[0], 1: layout_of(latent)[0]}
        with adapter_of(bucket) as adapter:
            assert stored(adapter, keys, memory_objs).is_successful()
            assert looked_up(adapter, keys, layouts) == [0, 1, 2, 3]
            assert looked_up(adapter, keys, {0: layouts[0]}) == [0, 1]
            into = [*engine.chunks(2), *latent.chunks(2)]
            assert loaded(adapter, keys, into) == [0, 1, 2, 3]
            assert contents(into) == contents(memory_objs)
        release([*memory_objs, *into])


def test_deleted_chunks_are_gone_and_no_longer_counted(
    bucket: RunningServer, engine: EngineSide
) -> None:
    keys = object_keys(3, first=5)
    memory_objs = engine.chunks(3)
    with adapter_of(bucket) as adapter:
        assert stored(adapter, keys, memory_objs).is_successful()
        adapter.delete(keys[1:])
        assert looked_up(adapter, keys, layout_of(engine)) == [0]
        assert adapter.get_usage().total_bytes_used == len(contents(memory_objs)[0])
    release(memory_objs)


def test_lmcaches_storage_manager_stores_to_us_and_prefetches_from_us(
    bucket: RunningServer,
) -> None:
    layout = MemoryLayoutDesc([torch.Size([2, 4, 16, 16])], [torch.bfloat16])
    keys = object_keys(5, first=6)
    random = np.random.default_rng(1)
    manager = StorageManager(config_of(bucket))
    try:
        objects = manager.reserve_write(keys, layout)
        for memory_obj in objects.values():
            view = np.frombuffer(memory_obj.byte_array, np.uint8)
            view[:] = random.integers(0, 256, len(view), np.uint8)
        expected = contents([objects[key] for key in keys])
        manager.finish_write(keys)
        (_, adapter), *_ = manager.l2_adapters()
        wait_until(lambda: adapter.get_usage().total_bytes_used == sum(map(len, expected)))
        wait_until(lambda: manager.delete_l1_keys(keys)[1] == 0)

        asked = [*keys, *object_keys(1, first=7)]
        handle = manager.submit_prefetch_task(
            PrefetchTaskSpec([GroupedObjectKeys(asked, 0, layout)])
        )
        assert manager.wait_prefetch_status(handle, TASK_TIMEOUT_S)
        status = manager.query_prefetch_status(handle)
        assert status.l2_hit_count == 5
        assert status.l1_hit_count == 0
        with manager.read_prefetched_results(keys) as found:
            assert contents(found) == expected
        manager.finish_read_prefetched(keys)
    finally:
        manager.close()


def wait_until(condition: Callable[[], bool]) -> None:
    """LMCache tells nobody when its controllers are through."""
    deadline_s = time.monotonic() + TASK_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


# --- failures ---


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"buckt": "x"}, "'buckt' is unknown"),
        ({"bucket": ""}, "'bucket' is missing"),
        ({"timeout_s": -1}, "'timeout_s' must be seconds"),
    ],
)
def test_wrong_parameters_are_told_when_the_adapter_is_made(
    bucket: RunningServer, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        create_l2_adapter(config_of(bucket, **params).l2_adapter_config.adapters[0])


def test_when_the_server_dies_every_task_fails_within_the_timeout_and_close_returns(
    tmp_path: Path,
) -> None:
    keys = object_keys(16, first=8)
    with engine_side({}, shape=BIG) as engine, start_server(tmp_path / "data") as mortal:
        make_bucket(mortal)
        memory_objs = engine.chunks(16)
        with adapter_of(mortal) as adapter:
            assert stored(adapter, keys, memory_objs).is_successful()
        with adapter_of(mortal, timeout_s=5) as adapter:
            task = adapter.submit_load_task(keys, memory_objs)
            mortal.kill_storage()
            mortal.kill_gateway()
            bitmap = awaited(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
            assert bitmap.popcount() in (0, len(keys))
            assert looked_up(adapter, keys, layout_of(engine)) == []
            assert loaded(adapter, keys, memory_objs) == []
            assert not stored(adapter, object_keys(2, first=9), memory_objs[:2]).is_successful()
            assert adapter.report_status()["failed_tasks"] >= 3
        release(memory_objs)


def test_a_server_that_is_stopped_fails_lookups_in_a_moment_and_then_at_once(
    tmp_path: Path,
) -> None:
    keys = object_keys(2, first=11)
    with (
        engine_side({}, shape=SHAPE) as engine,
        start_server(tmp_path / "data") as running,
        # With a timeout_s of a minute.
        adapter_of(running, lookup_timeout_s=LOOKUP_TIMEOUT_S) as adapter,
    ):
        memory_objs = engine.chunks(2)
        assert stored(adapter, keys, memory_objs).is_successful()
        stop_whole(running.storage_pid)
        try:
            for _ in range(100):
                assert looked_up(adapter, keys, layout_of(engine)) == []
            assert loaded(adapter, keys, memory_objs) == []
            assert adapter.report_status()["failed_tasks"] == 101
            assert adapter._store._outage.failure_count <= 3
        finally:
            os.kill(running.storage_pid, signal.SIGCONT)
        release(memory_objs)


def test_close_ends_tasks_that_run_and_those_that_wait(bucket: RunningServer) -> None:
    keys = object_keys(8, first=10)
    with engine_side({}, shape=BIG) as engine:
        memory_objs = engine.chunks(8)
        with adapter_of(bucket) as adapter:
            assert stored(adapter, keys, memory_objs).is_successful()
            tasks = [adapter.submit_load_task(keys, memory_objs) for _ in range(20)]
            adapter.close()
            bitmaps = [adapter.query_load_result(task) for task in tasks]
            assert None not in bitmaps
            threads = [thread.name for thread in threading.enumerate()]
            assert not any(name.startswith("objectcache-load") for name in threads)
            adapter.close()
        release(memory_objs)
