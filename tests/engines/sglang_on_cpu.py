"""SGLang's own memory pools, host pools and radix cache, importable without torchvision.

SGLang's configurations of image models import torchvision, whose builds need CUDA. Nothing that is
tested here calls it, so an empty module stands in its place.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
import warnings
from typing import Any

_STANDS_FOR = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def prepare() -> None:
    """Make SGLang importable in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers.utils

        # It remembers the answer: without torchvision it takes paths of its own.
        transformers.utils.is_torchvision_available()
        if "torchvision" not in sys.modules:
            for name in _STANDS_FOR:
                sys.modules[name] = _empty(name)
            sys.modules["torchvision"].transforms = sys.modules[_STANDS_FOR[1]]  # type: ignore[attr-defined]
        import sglang.srt.mem_cache.unified_radix_cache  # noqa: F401


def _empty(name: str) -> types.ModuleType:
    module = _Empty(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    return module


def device_pool(kind: str, *, tokens: int, page_tokens: int, layers: int, dtype: Any) -> Any:
    """SGLang's MHA or MLA device pool on the CPU, its slots filled with bytes that differ."""
    prepare()
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    if kind == "mha":
        pool = MHATokenToKVPool(tokens, page_tokens, dtype, 4, 8, layers, "cpu", False)
        buffers = [*pool.k_buffer, *pool.v_buffer]
    else:
        pool = MLATokenToKVPool(tokens, page_tokens, dtype, 48, 16, layers, "cpu", False)
        buffers = list(pool.kv_buffer)
    generator = torch.Generator().manual_seed(7)
    for buffer in buffers:
        raw = buffer.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return pool


def host_pool(device: Any, layout: str, *, page_tokens: int, head_groups: int = 1) -> Any:
    """SGLang's host pool over a device pool, in one of its layouts, unpinned.

    SGLang makes none, however small, where 10 GiB would not stay free; this process leaves none.
    """
    from sglang.srt.mem_cache.pool_host import base
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    info = device.get_device_pool_infos()[0].buffer_info
    common: dict[str, Any] = {
        "pin_memory": False,
        "device_capacity_tokens": device.size,
        "start_layer": 0,
        "end_layer": device.layer_num,
    }
    if hasattr(info, "head_num"):
        return MHATokenToKVPoolHost(
            info, 2.0, 0, page_tokens, layout, head_group_num=head_groups, **common
        )
    return MLATokenToKVPoolHost(
        info, 2.0, 0, page_tokens, layout, target_layer_num=device.layer_num, **common
    )


def publish_model(model_path: str, **arguments: Any) -> None:
    """The server arguments of this process, of which the model's path and these are set."""
    prepare()
    from sglang.srt import runtime_context

    published = types.SimpleNamespace(model_path=model_path, **arguments)
    runtime_context._CONTEXT._server_args = published


def publish_configuration() -> None:
    """What the radix cache reads of SGLang's configuration: that prefill runs here."""
    from sglang.srt import runtime_context

    bag = runtime_context._ConfigBag("disagg")
    bag._set("disaggregation_mode", "null")
    runtime_context._CONTEXT._config_bags = {"disagg": bag}
