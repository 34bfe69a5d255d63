"""The name that users configure for `transformers.layerwise_cache`."""

from objectcache.connectors.transformers.layerwise_cache import (
    LayerwiseCache,
    chunks_of,
    layout_of,
    lossy_of,
)

__all__ = ["LayerwiseCache", "chunks_of", "layout_of", "lossy_of"]
