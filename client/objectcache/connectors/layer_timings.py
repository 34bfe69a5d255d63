"""The name that users configure for `transformers.layer_timings`."""

from objectcache.connectors.transformers.layer_timings import LayerTimings

__all__ = ["LayerTimings"]
