"""One HTTP and one HTTPS server for all clients, and a driver for each client and wire."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from tests.clients.authority import Certificates, make_certificates
from tests.clients.driver import Endpoint
from tests.clients.drivers.boto import boto_client
from tests.clients.matrix import CLIENTS, Client, Wire
from tests.clients.remote import RemoteDriver, names_can_be_mounted
from tests.servers import RunningServer, start_server
from tests.storage_client import StorageClient

# Two labels, because a certificate for *.localhost is refused by OpenSSL's name check.
DOMAIN = "s3.localhost"
PAGES_BUCKET = "pages"
PAGES_KEYS = 1005  # more than one page of a listing


@dataclass(frozen=True, slots=True)
class Served:
    """A running server, and a boto3 client that prepares and judges."""

    running: RunningServer
    judge: Any
    certificates: Certificates | None

    def endpoint(self, wire: Wire) -> Endpoint:
        """Where a client finds it."""
        scheme = "https" if wire.secure else "http"
        host = DOMAIN if wire.virtual_host else "127.0.0.1"
        credentials = self.running.credentials
        authority = str(self.certificates.authority) if self.certificates else None
        return Endpoint(
            f"{scheme}://{host}:{self.running.port}",
            credentials.access_key,
            credentials.secret_key,
            authority,
            wire.virtual_host,
        )


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    names = [DOMAIN, f"*.{DOMAIN}", "localhost"]
    return make_certificates(tmp_path_factory.mktemp("certificates"), names)


@pytest.fixture(scope="session")
def http_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with start_server(
        tmp_path_factory.mktemp("http"), f"gateway.virtual_host_domains={DOMAIN}"
    ) as running:
        yield _prepared(Served(running, None, None))


@pytest.fixture(scope="session")
def https_server(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Served]:
    with start_server(
        tmp_path_factory.mktemp("https"),
        f"gateway.virtual_host_domains={DOMAIN}",
        f"gateway.tls_certificate={certificates.certificate}",
        f"gateway.tls_key={certificates.key}",
    ) as running:
        yield _prepared(Served(running, None, certificates))


def _prepared(served: Served) -> Served:
    wire = Wire(secure=served.certificates is not None, virtual_host=False)
    judge = boto_client(served.endpoint(wire))
    judge.create_bucket(Bucket=PAGES_BUCKET)
    keys = tuple(f"many/{number:05}" for number in range(PAGES_KEYS))
    chunks = Descriptor(
        chunk_keys=keys,
        num_layers=1,
        chunk_tokens=1,
        per_layer_chunk_bytes=1,
        delivery=DeliveryMode.CHUNKWISE,
    )
    # One commit for all: as puts of their own they would take longer than every client's steps.
    with StorageClient(served.running.run_dir / "storage.sock") as storage:
        storage.kv_put(PAGES_BUCKET, chunks.to_bytes(), bytes(PAGES_KEYS))
    return Served(served.running, judge, served.certificates)


@pytest.fixture(scope="session")
def mounts_names() -> bool:
    return names_can_be_mounted()


@dataclass(frozen=True, slots=True)
class Subject:
    """A client with a bucket of its own on one server."""

    driver: RemoteDriver
    bucket: str
    judge: Any

    def call(self, method: str, *arguments: Any) -> Any:
        """One step in the client's bucket; skips where the client has no word for it."""
        return self.driver.call(method, self.bucket, *arguments)


_PAIRS = [(client, wire) for client in CLIENTS for wire in client.wires]


@pytest.fixture(
    scope="module", params=_PAIRS, ids=[f"{client.name}-{wire}" for client, wire in _PAIRS]
)
def subject(
    request: pytest.FixtureRequest, mounts_names: bool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    client: Client
    wire: Wire
    client, wire = request.param
    if client.missing:
        pytest.skip(client.missing)
    if wire.virtual_host and not mounts_names:
        pytest.skip("virtual-host names need unshare --map-root-user --mount, which fails here")
    served: Served = request.getfixturevalue("https_server" if wire.secure else "http_server")
    bucket = f"{client.name}-{zlib.crc32(str(wire).encode()):08x}-{secrets.token_hex(2)}"
    served.judge.create_bucket(Bucket=bucket)
    names = [f"{label}.{DOMAIN}" for label in (bucket, PAGES_BUCKET)] + [DOMAIN]
    with RemoteDriver(
        f"tests.clients.drivers.{client.driver}",
        client.python,
        served.endpoint(wire),
        _workspace(tmp_path_factory, client),
        names if wire.virtual_host else (),
    ) as driver:
        yield Subject(driver, bucket, served.judge)


def _workspace(tmp_path_factory: pytest.TempPathFactory, client: Client) -> Path:
    return tmp_path_factory.mktemp(client.name) / "home"
