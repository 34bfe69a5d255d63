"""SGLang's linker on a bucket that is stored encoded: a fetcher's workers decode the pages that it
loads; without one the same bytes come plain, or encoded where that is set; and HiCache storage,
which takes whole pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from objectcache.deliveries.delivery import Delivery
from objectcache.errors import InvalidRequest
from tests.encoded_delivery.prefixes import ZSTD
from tests.engines import sglang_on_cpu
from tests.engines.fetched.encoded_bucket import NO_FETCHER, Decoded, encoded_server
from tests.fetcher.fetchers import RunningFetcher
from tests.servers import RunningServer

sglang_on_cpu.prepare()

import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402

from tests.engines.test_sglang_linker import (  # noqa: E402
    LAYERS,
    PAGE,
    TOKENS,
    contents,
    hashes,
    linker_of,
    offload,
    same,
    slots,
    transfer,
)

BUCKET = "linked"
SOURCE = tuple(range(12))
TARGET = tuple(range(31, 19, -1))
MANY = tuple(range(1000))
SLOW_GBPS = 0.005  # so many pages take seconds
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with encoded_server(tmp_path_factory.mktemp("encoded") / "data", BUCKET) as running:
        yield running


@pytest.fixture(scope="module")
def fetcher(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningFetcher]:
    log = tmp_path_factory.mktemp("fetcher") / "fetcher.log"
    with RunningFetcher(server, log) as running:
        yield running


def filled_pool(kind: str, tokens: int = TOKENS) -> Any:
    """Numbers such as KV cache has, which take fewer bytes encoded."""
    pool = sglang_on_cpu.device_pool(
        kind, tokens=tokens, page_tokens=PAGE, layers=LAYERS, dtype=torch.bfloat16
    )
    generator = torch.Generator().manual_seed(11)
    parts = [pool.k_buffer, pool.v_buffer] if kind == "mha" else [pool.kv_buffer]
    for buffer in (one for part in parts for one in part):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return pool


def page_bytes(pool: Any) -> int:
    return sum(len(part.flatten()) for part in contents(pool, slots(0)))


def deliveries_of(linker: Any) -> list[Delivery]:
    """Those of its loads, from now on."""
    bucket, begun = linker._store.bucket, list[Delivery]()
    fetch = bucket.fetch

    def noted(*given: Any, **chosen: Any) -> Delivery:
        delivery: Delivery = fetch(*given, **chosen)
        begun.append(delivery)
        return delivery

    bucket.fetch = noted
    return begun


def loads(linker: Any, keys: list[str], pages: tuple[int, ...] = TARGET) -> bool:
    assert linker.load("r", transfer(keys, slots(*pages)))
    landed: bool = linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    return landed


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_are_decoded_by_the_fetchers_workers(
    server: RunningServer, fetcher: RunningFetcher, kind: str
) -> None:
    pool = filled_pool(kind)
    linker = linker_of(server, pool, f"m/{kind}", fetcher=fetcher.endpoint)
    keys = hashes("a", len(SOURCE))
    expected = contents(pool, slots(*SOURCE))
    assert offload(linker, keys, slots(*SOURCE))
    decoded, begun = Decoded(fetcher), deliveries_of(linker)
    assert loads(linker, keys)
    assert same(contents(pool, slots(*TARGET)), expected)
    assert decoded.decoded_bytes == {ZSTD: len(SOURCE) * page_bytes(pool)}
    assert [(one.route, one.transport) for one in begun] == [("relay:fetcher", "shared_memory")]
    linker.close()


@pytest.mark.parametrize(
    ("url", "encodings"),
    [("", ""), (NO_FETCHER, ""), ("", ZSTD)],
    ids=["none", "away", "encodings"],
)
def test_without_a_fetcher_the_same_bytes_come_as_is_set(
    server: RunningServer, url: str, encodings: str
) -> None:
    pool = filled_pool("mha")
    model = f"m/without{bool(url)}{encodings}"
    linker = linker_of(server, pool, model, fetcher=url, encodings=encodings)
    keys = hashes("b", len(SOURCE))
    expected = contents(pool, slots(*SOURCE))
    assert offload(linker, keys, slots(*SOURCE))
    begun = deliveries_of(linker)
    assert loads(linker, keys)
    assert same(contents(pool, slots(*TARGET)), expected)
    (delivery,) = begun
    assert delivery.route == "direct"
    assert delivery.is_encoded == bool(encodings)
    linker.close()


def test_encodings_are_refused_beside_a_copier(server: RunningServer) -> None:
    with pytest.raises(InvalidRequest, match="'encodings' must be empty where 'gpu_copies' is"):
        linker_of(server, filled_pool("mha"), "m/copier", encodings="auto", gpu_copies="on")


def test_a_fetcher_that_is_killed_in_the_middle_of_a_batch_costs_no_page(
    tmp_path: Path,
) -> None:
    where = slots(*(page + len(MANY) for page in MANY))
    with (
        encoded_server(tmp_path / "data", BUCKET, f"scheduler.cap_gbps={SLOW_GBPS}") as own,
        RunningFetcher(own, tmp_path / "fetcher.log") as fetcher,
    ):
        pool = filled_pool("mha", 3 * len(MANY) * PAGE)
        linker = linker_of(own, pool, "m/killed", fetcher=fetcher.endpoint, timeout_s=TIMEOUT_S)
        keys = hashes("c", len(MANY))
        expected = contents(pool, slots(*MANY))
        assert offload(linker, keys, slots(*MANY))
        begun = deliveries_of(linker)
        assert linker.load("r", transfer(keys, where))
        index = linker.start_layer_wise_loading()
        linker.layer_done_counter.set_consumer(index)
        pool.get_kv_buffer(0)  # returns when the layer is there
        (delivery,) = begun
        assert delivery.route == "relay:fetcher", delivery.route_reason
        assert 0 < fetcher.decoded_bytes[ZSTD] < len(MANY) * page_bytes(pool)
        fetcher.process.kill()
        assert linker.finish_layer_wise_loading(index)
        assert delivery.route == "direct"
        assert same(contents(pool, where), expected)
        again = tuple(page + 2 * len(MANY) for page in MANY)
        assert loads(linker, keys, again)
        assert same(contents(pool, slots(*again)), expected)
        linker.close()


def test_hicache_storage_gets_what_is_stored_encoded_plain(
    server: RunningServer, fetcher: RunningFetcher
) -> None:
    pool = filled_pool("mha")
    linker = linker_of(server, pool, "m/both")
    keys = hashes("d", 12)
    assert offload(linker, keys, slots(*SOURCE))
    host = sglang_on_cpu.host_pool(pool, "page_first", page_tokens=PAGE)
    extra = {
        "backend_name": "objectcache",
        "module_path": "objectcache.connectors.sglang",
        "class_name": "ObjectCacheHiCache",
        "endpoint": server.endpoint,
        "bucket": BUCKET,
        "credentials_file": str(server.credentials_file),
        "fetcher": fetcher.endpoint,
    }
    sglang_on_cpu.publish_model("m/both")
    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "prod", extra_config=extra)
    backend = StorageBackendFactory.create_backend("dynamic", config, host)
    backend.register_mem_pool_host(host)
    decoded = Decoded(fetcher)
    assert backend.batch_get_v1(keys, slots(*SOURCE)) == [True] * len(keys)
    for layer in range(LAYERS):
        for part, buffer in ((0, pool.k_buffer), (1, pool.v_buffer)):
            found = host.kv_buffer[part, slots(*SOURCE), layer].view(torch.uint8)
            assert torch.equal(found, buffer[layer][slots(*SOURCE)].view(torch.uint8))
    assert decoded.decoded_bytes == {"plain": len(keys) * page_bytes(pool)}
    backend.close()
    linker.close()
