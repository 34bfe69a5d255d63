"""Module names that users write into their engines' configuration."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("configured", "home", "name"),
    [
        ("vllm_tier", "vllm.tier", "ObjectCacheTier"),
        ("lmcache_l2", "lmcache.l2_adapter", "ObjectCacheL2Adapter"),
        ("sglang_linker", "sglang.linker", "ObjectCacheLinker"),
        ("transformers_cache", "transformers.layerwise_cache", "LayerwiseCache"),
        ("layer_timings", "transformers.layer_timings", "LayerTimings"),
    ],
)
def test_a_configured_name_is_the_class_in_its_connectors_folder(
    configured: str, home: str, name: str
) -> None:
    package = "objectcache.connectors"
    by_configured_name = getattr(importlib.import_module(f"{package}.{configured}"), name)
    assert by_configured_name is getattr(importlib.import_module(f"{package}.{home}"), name)
