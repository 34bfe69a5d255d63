"""SGLang's own radix cache over ObjectCache's linker: what one engine inserts, another loads."""

from __future__ import annotations

import array
from types import SimpleNamespace
from typing import Any

from tests.engines import sglang_on_cpu
from tests.servers import RunningServer

sglang_on_cpu.prepare()

import torch  # noqa: E402
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_cache.linker_factory import (  # noqa: E402
    create_unified_cache_linker,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402

sglang_on_cpu.publish_configuration()

PAGE = 8
LAYERS = 3
TOKENS = 256


class Engine:
    """The parts of an SGLang worker that hold KV."""

    def __init__(self, server: RunningServer, kind: str) -> None:
        self.pool = sglang_on_cpu.device_pool(
            kind, tokens=TOKENS, page_tokens=PAGE, layers=LAYERS, dtype=torch.bfloat16
        )
        self.allocator = PagedTokenToKVPoolAllocator(
            TOKENS, PAGE, torch.bfloat16, "cpu", self.pool, False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(4, TOKENS, "cpu", False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
        )
        self.cache = UnifiedRadixCache(params)
        config = {
            "linker": "ObjectCacheLinker",
            "linker_module_path": "objectcache.connectors.sglang_linker",
            "linker_extra_config": {
                "endpoint": server.endpoint,
                "bucket": "tree",
                "credentials_file": str(server.credentials_file),
                "lookup_timeout_s": 20.0,  # above any wait that a busy machine causes
            },
        }
        self.linker = create_unified_cache_linker(
            SimpleNamespace(model_path=f"m/{kind}"),
            params,
            backend="dynamic",
            config=config,
            components=set(self.cache.components),
        )
        self.cache.init_cache_linker(self.linker)
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)

    def contents(self, slots: Any) -> list[Any]:
        if hasattr(self.pool, "kv_lora_rank"):
            buffers = self.pool.kv_buffer
        else:
            buffers = [*self.pool.k_buffer, *self.pool.v_buffer]
        return [buffer[slots].view(torch.uint8).clone() for buffer in buffers]

    def clear(self) -> None:
        for layer in range(LAYERS):
            parts = (
                [self.pool.kv_buffer]
                if hasattr(self.pool, "kv_lora_rank")
                else [
                    self.pool.k_buffer,
                    self.pool.v_buffer,
                ]
            )
            for part in parts:
                part[layer].zero_()

    def close(self) -> None:
        self.cache.linker.close()


def key_of(tokens: list[int]) -> Any:
    return RadixKey(array.array("q", tokens))


def request(name: str) -> Any:
    return SimpleNamespace(
        rid=name, last_node=None, kv=None, swa_branching_seqlen=None, session=None
    )


def match(engine: Engine, tokens: list[int], req: Any) -> Any:
    found = engine.cache.match_prefix(MatchPrefixParams(key=key_of(tokens), req=req))
    req.last_node = found.last_device_node
    return found


def test_a_prefix_inserted_by_one_engine_is_matched_and_loaded_by_another(
    server: RunningServer,
) -> None:
    for kind in ("mha", "mla"):
        tokens = list(range(100, 100 + 5 * PAGE))
        first, second = Engine(server, kind), Engine(server, kind)
        second.clear()
        slots = first.allocator.alloc(len(tokens))
        expected = first.contents(slots)
        first.cache.insert(InsertParams(key=key_of(tokens), value=slots))
        first.linker._offloader.join()
        first.cache.check_hicache_events()
        assert not first.cache.linker.pending_offloads

        other = tokens[: 3 * PAGE] + list(range(7000, 7000 + 2 * PAGE))
        for asked, pages in ((other, 3), (tokens, 5)):
            req = request(f"{kind}-{pages}")
            found = match(second, asked, req)
            assert (found.device_prefix_len, found.host_hit_length) == (0, pages * PAGE)
            count, _ = second.cache.init_load_back(
                InitLoadBackParams(found.best_match_node, found.host_hit_length, req=req)
            )
            assert count == pages * PAGE
            into = second.cache.linker.private_load_indices[req.rid].clone()
            index = second.cache.ready_to_load_host_cache()
            second.linker.layer_done_counter.set_consumer(index)
            for layer in range(LAYERS):
                loaded = second.pool.get_key_buffer(layer)[into].view(torch.uint8)
                assert torch.equal(loaded, expected[layer][: pages * PAGE])
            assert second.cache.finish_external_linker_loads([req]) == []
            parts = second.contents(into)
            assert all(
                torch.equal(part, whole[: pages * PAGE])
                for part, whole in zip(parts, expected, strict=True)
            )
        first.close()
        second.close()


def test_a_load_that_fails_is_reported_for_its_request_alone(server: RunningServer) -> None:
    engine = Engine(server, "mha")
    tokens = list(range(500, 500 + 2 * PAGE))
    slots = engine.allocator.alloc(len(tokens))
    engine.cache.insert(InsertParams(key=key_of(tokens), value=slots))
    engine.linker._offloader.join()
    other = Engine(server, "mha")
    req, innocent = request("fails"), request("innocent")
    found = match(other, tokens, req)
    assert found.host_hit_length == 2 * PAGE
    marker = other.cache.linker.hit_markers[req.rid]
    other.cache.linker.hit_markers[req.rid] = marker._replace(tail_hashes=["00" * 32, "11" * 32])
    other.cache.init_load_back(
        InitLoadBackParams(found.best_match_node, found.host_hit_length, req=req)
    )
    other.cache.ready_to_load_host_cache()
    assert other.cache.finish_external_linker_loads([innocent, req]) == [req]
    engine.close()
    other.close()
