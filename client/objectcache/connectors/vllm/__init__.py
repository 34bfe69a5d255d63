"""ObjectCache behind vLLM: `"kv_connector_module_path": "objectcache.connectors.vllm"`."""

from objectcache.connectors.vllm.connector import ObjectCacheConnector

__all__ = ["ObjectCacheConnector"]
