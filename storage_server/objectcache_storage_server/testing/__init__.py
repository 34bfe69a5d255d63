"""Engines and stores that wrap another one: slower, faulty, or counted."""

from objectcache_storage_server.testing.wrapped_blob_stores import (
    DelayingBlobStore,
    FaultyBlobStore,
    PassingBlobStore,
)
from objectcache_storage_server.testing.wrapped_engines import (
    FaultyEngine,
    Meter,
    MeteredEngine,
    SlowEngine,
    WrappedEngine,
    WrappedOpenObjects,
    WrappedReads,
    WrappedStaged,
    WrappedStagedPrefix,
)
from objectcache_storage_server.testing.wrapped_shared_stores import FaultyStore, PassingStore

__all__ = [
    "DelayingBlobStore",
    "FaultyBlobStore",
    "FaultyEngine",
    "FaultyStore",
    "Meter",
    "MeteredEngine",
    "PassingBlobStore",
    "PassingStore",
    "SlowEngine",
    "WrappedEngine",
    "WrappedOpenObjects",
    "WrappedReads",
    "WrappedStaged",
    "WrappedStagedPrefix",
]
