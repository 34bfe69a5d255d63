"""The name that users configure for `lmcache.l2_adapter`."""

from objectcache.connectors.lmcache.l2_adapter import ObjectCacheL2Adapter

__all__ = ["ObjectCacheL2Adapter"]
