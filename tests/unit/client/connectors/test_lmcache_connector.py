"""What LMCache's connectors decide, without LMCache: geometry, keys, settings, tasks."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from objectcache.connectors.identity.model_identity import ModelIdentity
from objectcache.connectors.lmcache import ObjectCacheConnectorAdapter
from objectcache.connectors.lmcache.geometry import ChunkGeometry
from objectcache.connectors.lmcache.identities import Identities
from objectcache.connectors.lmcache.l2_adapter import ObjectCacheL2Adapter
from objectcache.connectors.lmcache.names import (
    IdentityOf,
    interleaved,
    key_of_object_key,
    keys_of_engine_keys,
)
from objectcache.connectors.lmcache.settings import store_configuration
from objectcache.connectors.lmcache.task_queue import TaskQueue
from objectcache_schemas.errors import Busy, InvalidRequest, Unavailable

# --- geometry ---


@pytest.mark.parametrize(("parts", "layers"), [(2, 3), (1, 5)])
def test_a_chunk_that_is_read_row_by_row_is_layer_major(parts: int, layers: int) -> None:
    tokens, width = 4, 6
    geometry = ChunkGeometry.of([(parts, layers, tokens, width)], [2])
    chunk = np.random.default_rng(1).integers(0, 256, (parts, layers, tokens * width * 2), np.uint8)
    flat = chunk.reshape(-1)
    stored = np.concatenate([geometry.row(flat, row) for row in range(geometry.row_count)])
    assert np.array_equal(stored.reshape(layers, parts, -1), chunk.transpose(1, 0, 2))
    assert geometry.layout.chunk_bytes == geometry.chunk_bytes == flat.size
    assert geometry.layout.num_layers == parts * layers
    assert geometry.chunk_tokens == tokens


def test_rows_are_views_of_the_chunk() -> None:
    geometry = ChunkGeometry.of([(2, 3, 4, 6)], [2])
    chunk = np.zeros(geometry.chunk_bytes, np.uint8)
    geometry.row(chunk, 1)[:] = 7  # layer 0's values
    assert chunk.reshape(2, 3, -1)[1, 0].all()
    assert chunk.sum() == 7 * geometry.row_bytes


@pytest.mark.parametrize(
    ("shapes", "itemsizes"),
    [
        ([(2, 3, 4, 6), (1, 2, 4, 8)], [2, 1]),
        ([(48,)], [1]),
        ([(4, 2, 6)], [2]),
        ([(5, 2, 2, 2)], [1]),
    ],
)
def test_chunks_of_several_groups_or_of_another_shape_stay_as_they_are(
    shapes: list[tuple[int, ...]], itemsizes: list[int]
) -> None:
    geometry = ChunkGeometry.of(shapes, itemsizes)
    chunk = np.arange(geometry.chunk_bytes).astype(np.uint8)
    assert geometry.row_count == 1
    assert np.array_equal(geometry.row(chunk, 0), chunk)


def test_geometries_of_the_same_size_have_other_names() -> None:
    shapes = [(2, 4, 16, 16), (2, 2, 16, 32), (1, 8, 16, 16), (2, 4, 32, 8)]
    geometries = [ChunkGeometry.of([shape], [2]) for shape in shapes]
    assert len({geometry.chunk_bytes for geometry in geometries}) == 1
    assert len({geometry.name for geometry in geometries}) == len(shapes)


def test_a_chunk_without_bytes_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="holds no bytes"):
        ChunkGeometry.of([(2, 0, 4, 6)], [2])


# --- keys ---


@dataclass
class EngineKey:
    """The parts of LMCache's `CacheEngineKey` that are looked at."""

    model_name: str = "a/model"
    dtype: str = "torch.bfloat16"
    worker_id: int = 0
    world_size: int = 2
    chunk_hash_hex: str = "abc"
    tags: tuple[tuple[str, str], ...] | None = None


GEOMETRY = ChunkGeometry.of([(2, 4, 16, 16)], [2])


def identity_of(revision: str = "1", configuration: str = "") -> IdentityOf:
    return lambda model: ModelIdentity(model, revision, configuration)


def name_of(key: EngineKey, **other: Any) -> str:
    arguments = {"geometry": GEOMETRY, "identity_of": identity_of(), "hashing": "builtin", **other}
    (name,) = keys_of_engine_keys([key], **arguments)
    return name


def test_keys_differ_in_everything_that_makes_kv_differ_and_in_nothing_else() -> None:
    names = [
        name_of(EngineKey()),
        name_of(EngineKey(model_name="b/model")),
        name_of(EngineKey(dtype="torch.float16")),
        name_of(EngineKey(worker_id=1)),
        name_of(EngineKey(world_size=4)),
        name_of(EngineKey(chunk_hash_hex="abd")),
        name_of(EngineKey(tags=(("user", "x"),))),
        name_of(EngineKey(), geometry=ChunkGeometry.of([(2, 2, 16, 32)], [2])),
        name_of(EngineKey(), identity_of=identity_of("2")),
        name_of(EngineKey(), identity_of=identity_of(configuration="rope scaled")),
        name_of(EngineKey(), hashing="sha256_cbor"),
    ]
    assert len(set(names)) == len(names)
    assert name_of(EngineKey()) == names[0]
    assert name_of(EngineKey(tags=())) == names[0]
    in_other_order = [(("a", "1"), ("b", "2")), (("b", "2"), ("a", "1"))]
    assert len({name_of(EngineKey(tags=tags)) for tags in in_other_order}) == 1


@dataclass
class ObjectKey:
    """The parts of LMCache's `ObjectKey` that are looked at."""

    kv_rank: int = 2 << 24 | 1 << 16 | 2 << 8 | 1
    object_group_id: int = 0
    cache_salt: str = ""
    model_name: str = "a/model"
    chunk_hash: bytes = b"\x01\xff"


def test_keys_of_the_multiprocess_mode_have_the_rank_and_differ_in_salt_and_group() -> None:
    keys = [
        ObjectKey(),
        ObjectKey(kv_rank=2 << 24 | 2 << 8),
        ObjectKey(kv_rank=2 << 24 | 1 << 16 | 1 << 8),  # the same rank on a host of its own
        ObjectKey(object_group_id=1),
        ObjectKey(cache_salt="x"),
        ObjectKey(chunk_hash=b"\x01\xfe"),
    ]
    names = [key_of_object_key(key, GEOMETRY, identity_of(), "torch.bfloat16") for key in keys]
    assert len(set(names)) == len(names)
    assert names[0].endswith("/1/01ff")
    assert names[1].endswith("/0/01ff")


def test_of_several_versions_in_the_hubs_cache_lmcache_tells_none_and_the_log_asks_for_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = tmp_path / "models--org--model"
    environment = {"HF_HUB_CACHE": str(tmp_path)}
    (stored / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("a" * 40)
    only = Identities("", environment).of("org/model")
    assert only.weights_revision == "commit " + "a" * 40
    (stored / "snapshots" / ("b" * 40)).mkdir()  # an engine may have been given this revision
    assert caplog.text == ""
    assert Identities("", environment).of("org/model").weights_revision == "unresolved"
    assert "weights_revision" in caplog.text


def test_a_model_is_looked_at_once_so_that_its_identity_is_that_of_the_loaded_weights(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"a")
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    identities = Identities("", {})
    loaded = identities.of(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"bb")
    (tmp_path / "config.json").write_text('{"rope_theta": 2}')
    assert identities.of(str(tmp_path)) == loaded
    restarted = Identities("", {}).of(str(tmp_path))
    assert restarted.weights_revision != loaded.weights_revision
    assert restarted.configuration != loaded.configuration


def test_what_several_ranks_have_is_asked_for_in_prefix_order() -> None:
    assert interleaved(["a", "a", "a", "b", "b", "b"]) == [0, 3, 1, 4, 2, 5]
    assert interleaved(["a", "b", "a", "b"]) == [0, 1, 2, 3]
    assert interleaved([]) == []


# --- settings ---


@dataclass
class Config:
    """The parts of LMCache's configuration that are looked at."""

    extra_config: dict[str, Any] | None = field(default_factory=dict)
    use_layerwise: bool = False
    remote_serde: str | None = "naive"


ENVIRONMENT = {
    "OBJECTCACHE_ENDPOINT": "http://127.0.0.1:9000",
    "OBJECTCACHE_BUCKET": "kv-cache",
    "OBJECTCACHE_ACCESS_KEY": "access",
    "OBJECTCACHE_SECRET_KEY": "secret",
}


def test_settings_of_one_plug_in_are_taken_and_those_of_others_left() -> None:
    prefix = "remote_storage_plugin."
    config = Config(
        {
            f"{prefix}objectcache.a.module_path": "m",
            f"{prefix}objectcache.a.class_name": "C",
            f"{prefix}objectcache.a.bucket": "mine",
            f"{prefix}objectcache.b.bucket": "its",
            "something": "else",
        }
    )
    configuration = store_configuration(config, "objectcache.a", ENVIRONMENT)
    assert configuration.bucket == "mine"
    assert configuration.endpoint == "http://127.0.0.1:9000"
    assert store_configuration(Config(None), "objectcache", ENVIRONMENT).bucket == "kv-cache"
    assert "secret" not in repr(configuration)


def test_modes_of_lmcache_that_cannot_be_served_are_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidRequest, match=r"use objectcache\.connectors\.vllm"):
        store_configuration(Config(use_layerwise=True), "objectcache", ENVIRONMENT)
    with pytest.raises(InvalidRequest, match="Set it to naive"):
        store_configuration(Config(remote_serde="kivi"), "objectcache", ENVIRONMENT)


def test_without_lmcache_a_connector_can_be_imported_and_says_what_is_missing() -> None:
    with pytest.raises(Unavailable, match="needs LMCache"):
        ObjectCacheConnectorAdapter()
    with pytest.raises(Unavailable, match="needs LMCache"):
        ObjectCacheL2Adapter({})


# --- tasks ---


def drained(queue: TaskQueue[Any], signals: threading.Semaphore, count: int) -> dict[int, Any]:
    for _ in range(count):
        assert signals.acquire(timeout=10)
    return queue.pop_all()


def test_every_task_gets_one_result_and_one_signal_whatever_its_work_does() -> None:
    signals = threading.Semaphore(0)
    queue: TaskQueue[str] = TaskQueue("load", 2, 8, signals.release)

    def busy() -> str:
        raise Busy("later")

    def broken() -> str:
        raise ValueError("a bug")

    good = queue.submit(lambda: "done", "failed")
    bad = [queue.submit(work, "failed") for work in (busy, broken)]
    assert drained(queue, signals, 3) == {good: "done", bad[0]: "failed", bad[1]: "failed"}
    assert queue.pop(good) is None
    assert queue.failure_count == 2
    queue.close()


def test_a_task_over_the_limit_fails_at_once_and_the_others_go_on() -> None:
    signals = threading.Semaphore(0)
    gate = threading.Event()
    queue: TaskQueue[str] = TaskQueue("store", 1, 2, signals.release)

    def wait() -> str:
        assert gate.wait(10)
        return "done"

    first, second = (queue.submit(wait, "failed") for _ in range(2))
    third = queue.submit(wait, "failed")
    assert queue.pop(third) == "failed"
    assert queue.pop(first) is None
    gate.set()
    assert drained(queue, signals, 3) == {first: "done", second: "done"}
    assert repr(queue) == "<TaskQueue store, 0/2 open>"
    queue.close()


def test_closing_waits_for_the_task_that_runs_and_fails_those_that_wait() -> None:
    signals = threading.Semaphore(0)
    began, gate = threading.Event(), threading.Event()
    queue: TaskQueue[str] = TaskQueue("store", 1, 8, signals.release)

    def wait() -> str:
        began.set()
        assert gate.wait(10)
        return "done"

    running = queue.submit(wait, "failed")
    waiting = queue.submit(wait, "failed")
    assert began.wait(10)
    closing = threading.Thread(target=queue.close)
    closing.start()
    while not queue._closed:
        pass
    assert closing.is_alive()
    gate.set()
    closing.join(10)
    assert not closing.is_alive()
    late = queue.submit(lambda: "done", "failed")
    expected = {running: "done", waiting: "failed", late: "failed"}
    assert drained(queue, signals, 3) == expected
    queue.close()
