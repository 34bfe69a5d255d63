"""Engines and blob stores that wrap another one: slower, faulty, or counted."""

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

__all__ = [
    "DelayingBlobStore",
    "FaultyBlobStore",
    "FaultyEngine",
    "Meter",
    "MeteredEngine",
    "PassingBlobStore",
    "SlowEngine",
    "WrappedEngine",
    "WrappedOpenObjects",
    "WrappedReads",
    "WrappedStaged",
    "WrappedStagedPrefix",
]
