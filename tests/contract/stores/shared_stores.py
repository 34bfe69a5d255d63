"""Where the tests of the shared stores' contract get each store: fresh, empty, and more than one
handle of it, as several servers have.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from objectcache_storage_server.engines.stores.folder.folder_store import FolderStore
from objectcache_storage_server.engines.stores.memory_store import MemoryStore, MemoryStoreState
from objectcache_storage_server.engines.stores.rados.rados_settings import RadosSettings
from objectcache_storage_server.engines.stores.rados.rados_store import RadosStore
from objectcache_storage_server.engines.stores.s3.s3_settings import S3Settings
from objectcache_storage_server.engines.stores.s3.s3_store import S3Store
from objectcache_storage_server.engines.stores.shared_store import SharedStore
from objectcache_storage_server.testing import FaultyStore, PassingStore
from tests.ceph import CephCluster
from tests.contract.opened_engines.shared_engines import DAOS, in_daos
from tests.s3_clients import boto3_client
from tests.seaweedfs import S3Server

IN_MEMORY = Path("/dev/shm")


class StorePlace:
    """A store that a test has to itself.

    `remove` takes away the pool, bucket or folder itself, under the handles that are open.
    """

    def __init__(self, open_handle: Callable[[], SharedStore], remove: Callable[[], None]) -> None:
        self._open_handle = open_handle
        self.remove = remove
        self._handles: list[SharedStore] = []

    def open(self) -> SharedStore:
        """Another handle, as another server would have; closed when the test ends."""
        handle = self._open_handle()
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        for handle in self._handles:
            handle.close()


@contextmanager
def _in_memory(wrap: Callable[[SharedStore], SharedStore]) -> Iterator[StorePlace]:
    state = MemoryStoreState()

    def remove() -> None:
        state.exists = False

    yield StorePlace(lambda: wrap(MemoryStore(state)), remove)


@contextmanager
def _in_folder(folder: Path | None) -> Iterator[StorePlace]:
    """Below `folder`, or in memory: flushing is most of what these tests would wait for."""
    with tempfile.TemporaryDirectory(
        prefix="objectcache-test-", dir=folder or (IN_MEMORY if IN_MEMORY.is_dir() else None)
    ) as parent:
        root = Path(parent) / "shared"
        yield StorePlace(lambda: FolderStore(root, create=True), lambda: shutil.rmtree(root))


@contextmanager
def _in_ceph(ceph: CephCluster) -> Iterator[StorePlace]:
    """A namespace of the cluster's pool, which is another one once a test has removed it."""
    pool = ceph.shared_pool()
    settings = RadosSettings(pool, namespace=uuid.uuid4().hex, conf=str(ceph.conf))
    yield StorePlace(lambda: RadosStore(settings, create=True), lambda: ceph.remove_pool(pool))


@contextmanager
def _on_juicefs(mounts: list[Path]) -> Iterator[StorePlace]:
    """Handles take turns in using two mounts, as two hosts do."""
    name = f"store-{uuid.uuid4().hex}"
    roots = itertools.cycle([mount / name for mount in mounts])
    FolderStore(next(roots), create=True).close()
    yield StorePlace(lambda: FolderStore(next(roots)), lambda: shutil.rmtree(next(roots)))
    shutil.rmtree(next(roots), ignore_errors=True)


@contextmanager
def settings_of_bucket(server: S3Server) -> Iterator[tuple[S3Settings, Callable[[], None]]]:
    """A store's settings in a bucket of its own, and what removes the bucket."""
    credentials = server.credentials
    settings = S3Settings(
        f"store-{uuid.uuid4().hex[:16]}",
        "the/prefix",
        endpoint=server.endpoint,
        access_key_id=credentials.access_key,
        secret_access_key=credentials.secret_key,
    )
    client = boto3_client(
        endpoint_url=server.endpoint,
        aws_access_key_id=credentials.access_key,
        aws_secret_access_key=credentials.secret_key,
        region_name=settings.region,
    )
    client.create_bucket(Bucket=settings.bucket)

    def remove() -> None:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=settings.bucket)
        for page in pages:
            for item in page.get("Contents", []):
                client.delete_object(Bucket=settings.bucket, Key=item["Key"])
        client.delete_bucket(Bucket=settings.bucket)

    try:
        yield settings, remove
    finally:
        with contextlib.suppress(client.exceptions.NoSuchBucket):
            remove()
        client.close()


@contextmanager
def _in_bucket(server: S3Server) -> Iterator[StorePlace]:
    """Trimmed records are removed at once, so every append has to look."""
    with settings_of_bucket(server) as (settings, remove):
        yield StorePlace(lambda: S3Store(settings, create=True, kept_s=0.0), remove)


@contextmanager
def _in_daos() -> Iterator[StorePlace]:
    """Two DAOS objects of the container that the environment names."""
    if not all(DAOS):
        pytest.skip("DAOS_POOL and DAOS_CONT name no container of a DAOS that runs")

    def remove() -> None:
        pytest.skip("the container of DAOS_CONT is not the tests' to remove")

    yield StorePlace(in_daos(), remove)


Opened = AbstractContextManager[StorePlace]
PLACES: dict[str, Callable[[pytest.FixtureRequest, Path], Opened]] = {
    "memory": lambda _request, _folder: _in_memory(lambda store: store),
    "passing": lambda _request, _folder: _in_memory(PassingStore),
    "folder": lambda _request, _folder: _in_folder(None),
    "rados": lambda request, _folder: _in_ceph(request.getfixturevalue("ceph")),
    "juicefs": lambda request, _folder: _on_juicefs(request.getfixturevalue("juicefs")),
    "radosgw": lambda request, _folder: _in_bucket(request.getfixturevalue("radosgw")),
    "objectcache": lambda request, _folder: _in_bucket(request.getfixturevalue("objectcache")),
    "seaweedfs": lambda request, _folder: _in_bucket(request.getfixturevalue("seaweedfs")),
    "daos": lambda _request, _folder: _in_daos(),
    "faulty": lambda _request, _folder: _in_memory(FaultyStore),
}
