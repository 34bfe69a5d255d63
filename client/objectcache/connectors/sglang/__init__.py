"""SGLang's HiCache storage over ObjectCache (chunkwise); `objectcache.connectors.sglang_linker` is
the layerwise one.

Read `hicache` first, then `page_store`; `host_layouts` is the arithmetic.
"""

from objectcache.connectors.sglang.hicache import ObjectCacheHiCache

__all__ = ["ObjectCacheHiCache"]
