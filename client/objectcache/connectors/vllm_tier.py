"""The name that users configure for `vllm.tier`."""

from objectcache.connectors.vllm.tier import ObjectCacheTier

__all__ = ["ObjectCacheTier"]
