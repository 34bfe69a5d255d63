"""LMCache in the engine's process: a plug-in of its remote storage framework.

    remote_storage_plugins: ["objectcache"]
    extra_config:
      remote_storage_plugin.objectcache.module_path: objectcache.connectors.lmcache
      remote_storage_plugin.objectcache.class_name: ObjectCacheConnectorAdapter

docs/lmcache.md says what else to set. The adapter for its multiprocess mode is
`objectcache.connectors.lmcache_l2`.
"""

from objectcache.connectors.lmcache.connector import (
    ObjectCacheConnector,
    ObjectCacheConnectorAdapter,
)

__all__ = ["ObjectCacheConnector", "ObjectCacheConnectorAdapter"]
