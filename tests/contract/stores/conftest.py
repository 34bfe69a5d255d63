"""The servers of the shared stores' tests, each started once in a process, and a store in each.

They end with the last test of this folder: idle, they take 3 % of a core.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.s3.radosgw import missing_programs, running_radosgw
from tests.ceph import CephCluster, ceph_cluster, reason_to_skip
from tests.contract.stores import juicefs_mounts
from tests.contract.stores.shared_stores import PLACES, StorePlace
from tests.seaweedfs import S3Server, running_seaweedfs
from tests.seaweedfs import reason_to_skip as weed_missing
from tests.servers import DATA_FILES, Credentials, running_server


@pytest.fixture(scope="package")
def ceph() -> Iterator[CephCluster]:
    """A Ceph of this process, for all tests that ask for it."""
    reason = reason_to_skip()
    if reason:
        pytest.skip(reason)
    with ceph_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="package")
def juicefs() -> Iterator[list[Path]]:
    """Two mount points of one JuiceFS volume."""
    if reason := juicefs_mounts.reason_to_skip():
        pytest.skip(reason)
    with juicefs_mounts.juicefs_volume(2) as mounts:
        yield [mount.point for mount in mounts]


@pytest.fixture(scope="package")
def seaweedfs() -> Iterator[S3Server]:
    """A SeaweedFS of this process, for all tests that ask for it."""
    if reason := weed_missing():
        pytest.skip(reason)
    with running_seaweedfs() as server:
        yield server


@pytest.fixture(scope="package")
def radosgw() -> Iterator[S3Server]:
    """Ceph's gateway of S3, for all tests of this process that ask for it."""
    if reason := missing_programs():
        pytest.skip(reason)
    with running_radosgw() as gateway:
        endpoint = f"http://{gateway.host}:{gateway.port}"
        yield S3Server(endpoint, Credentials(gateway.access_key, gateway.secret_key))


@pytest.fixture(scope="package")
def objectcache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """ObjectCache itself as the S3 that others share, for all tests of this process."""
    folder = tmp_path_factory.mktemp("served")
    with running_server(folder, DATA_FILES, "storage.capacity_bytes=2147483648") as server:
        yield S3Server(server.endpoint, server.credentials)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StorePlace]:
    """A shared store, fresh and empty."""
    with PLACES[request.param](request, tmp_path) as opened:
        yield opened
        opened.close()
