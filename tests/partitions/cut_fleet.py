"""Two storage servers on one store, in S3 or Ceph: one in a namespace whose link can be cut.

Gateways reach both by their unix sockets, which no network cuts: what is looked at is a server that
is well and whose store is silent.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.figures.shaped_link import ShapedLink
from objectcache_schemas.operators.server_state import GetHealth, Health
from tests.ceph import CephCluster
from tests.integration.fleet import RunningFleet
from tests.s3_clients import boto3_client
from tests.seaweedfs import S3Server
from tests.servers import ServerProcess
from tests.storage_client import StorageClient

BUCKET = "store"
# No call of the store is waited for longer, either. A busy machine stands still for less.
LEASE_S = 6.0
CUT_OFF, OUTSIDE = "storage-0", "storage-1"
NOTHING_PASSES = ("tc", "qdisc", "replace", "dev")
LESS_THAN_ANY_FRAME = ("root", "bfifo", "limit", "1")  # bytes that may wait; the rest is dropped


@dataclass(frozen=True)
class FleetStore:
    """The address of a store, as each side of the link reaches it, and whose key it is."""

    near: str
    far: str
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


class CutFleet(RunningFleet):
    """The first storage server lies behind the link, the second here."""

    def __init__(self, directory: Path, link: ShapedLink, store: FleetStore) -> None:
        self.link = link
        self._store = store
        super().__init__(
            directory, 2, "storage.nixl=off", f"storage.writer_lease_s={LEASE_S}", gateways=0
        )
        for server in self.servers:
            self.add_gateway(f"before-{server.name}", [server.address])

    def start(self, module: str, name: str, settings: Sequence[str], *_: object) -> ServerProcess:
        if module != "objectcache_storage_server":
            return super().start(module, name, settings)
        is_far = name == CUT_OFF
        engine = f"storage.engine={self._store.far if is_far else self._store.near}"
        within = self.link.within if is_far else ()
        return super().start(module, name, [*settings, engine], self._store.variables, within)

    def health(self, number: int) -> Health:
        """What a storage server says of itself, asked without a gateway."""
        with StorageClient(self.servers[number].address) as client:
            return client.ask(GetHealth(), Health)


@contextmanager
def cut(link: ShapedLink, *, is_one_way: bool) -> Iterator[None]:
    """Drop every frame for the length of the block; `is_one_way` lets those of the far side pass,
    so that the store does what it is asked, and its answers are lost.
    """
    ends: list[tuple[Sequence[str], str]] = [((), link.near_device)]
    if not is_one_way:
        ends.append((link.within, link.far_device))
    for within, device in ends:
        _run(*within, *NOTHING_PASSES, device, *LESS_THAN_ANY_FRAME)
    try:
        yield
    finally:
        for within, device in ends:
            _run(*within, "tc", "qdisc", "del", "dev", device, "root")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


def store_in_s3(s3: S3Server, link: ShapedLink, prefix: str) -> FleetStore:
    """A fresh one below a prefix."""
    port = s3.endpoint.rsplit(":", 1)[1]
    near, far = (
        f"s3://{BUCKET}/{prefix}?endpoint=http://{host}:{port}"
        for host in ("127.0.0.1", link.near_address)
    )
    create_store(near, keys_of(s3))
    return FleetStore(near, far, keys_of(s3))


def store_in_ceph(ceph: CephCluster) -> FleetStore:
    """A fresh one in a pool of a cluster that listens at the link's near address."""
    address = f"rados://{ceph.create_pool()}?conf={ceph.conf}"
    create_store(address, {})
    return FleetStore(address, address)


def keys_of(s3: S3Server) -> dict[str, str]:
    """A server's key, as variables of the environment."""
    return {
        "AWS_ACCESS_KEY_ID": s3.credentials.access_key,
        "AWS_SECRET_ACCESS_KEY": s3.credentials.secret_key,
    }


def create_store(address: str, keys: Mapping[str, str]) -> None:
    """Make a store, in a process of its own: the library of S3 bears no fork."""
    command = [sys.executable, "-m", "objectcache_storage_server.create_store", address]
    subprocess.run(command, env={**os.environ, **keys}, check=True, timeout=60)


def make_bucket(s3: S3Server) -> None:
    """The bucket of the stores."""
    client = boto3_client(
        endpoint_url=s3.endpoint,
        aws_access_key_id=s3.credentials.access_key,
        aws_secret_access_key=s3.credentials.secret_key,
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
