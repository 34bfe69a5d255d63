"""The name that users configure for `sglang.linker`."""

from objectcache.connectors.sglang.linker import ObjectCacheLinker

__all__ = ["ObjectCacheLinker"]
