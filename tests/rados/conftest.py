"""A Ceph of two OSDs whose parts are stopped and killed, and stores on it.

It ends with the last test of this folder: idle, it takes a tenth of a core.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from objectcache_storage_server.engines.stores.rados.rados_settings import RadosSettings
from objectcache_storage_server.engines.stores.rados.rados_store import RadosStore
from tests.ceph import CephCluster, ceph_cluster, reason_to_skip

Open = Callable[..., RadosStore]


def within(seconds: float = 60.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


@pytest.fixture(scope="package")
def cluster() -> Iterator[CephCluster]:
    reason = reason_to_skip()
    if reason:
        pytest.skip(reason)
    with ceph_cluster(osd_count=2) as cluster:
        yield cluster


@pytest.fixture
def open_store(cluster: CephCluster) -> Iterator[Open]:
    """Opens handles of one store, as several servers have; closed when the test ends."""
    namespace = uuid.uuid4().hex
    handles: list[RadosStore] = []

    def open_one(pool: str = "", *, connect_timeout_s: float = 15.0, **more: str) -> RadosStore:
        settings = RadosSettings(
            pool or cluster.shared_pool(), namespace=namespace, conf=str(cluster.conf), **more
        )
        handle = RadosStore(settings, create=True, connect_timeout_s=connect_timeout_s)
        handles.append(handle)
        return handle

    yield open_one
    for handle in handles:
        handle.close()
