"""Real relays for tests: a process beside a `RunningServer`, and what is delivered."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest
from prometheus_client.parser import text_string_to_metric_families

from objectcache import Client, KvLayout
from objectcache.channel.access_key import SigningKey
from objectcache.channel.connections import ConnectionPool
from objectcache.channel.endpoint import Endpoint
from objectcache.channel.http_channel import HttpChannel
from objectcache.channel.requests import GatewayRequest
from objectcache.channel.signing import Signer
from objectcache.landing.targets import SharedMemoryTarget
from tests.servers import (
    RUN_DIR_PARENT,
    Credentials,
    RunningServer,
    ServerProcess,
    start_server,
)

LAYOUT = KvLayout(
    num_layers=8,
    chunk_tokens=16,
    per_layer_chunk_bytes=64 << 10,
    dtype="uint8",
    fingerprint="relay",
)
CHUNK_COUNT = 6
BUCKET = "relayed"
TOKENS = np.arange(CHUNK_COUNT * LAYOUT.chunk_tokens)
CHUNKS: npt.NDArray[np.uint8] = np.random.default_rng(7).integers(
    0, 256, (CHUNK_COUNT, LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes), np.uint8
)
PAYLOAD_BYTES = CHUNKS.nbytes
SLOW_BYTES_PER_S = 1 << 20  # a layer takes 0.4 s
BOUND_S = 30.0
SETTINGS = ("storage.nixl=trusting", "storage.fabric_staging_bytes=33554432")

HAS_NIXL = importlib.util.find_spec("nixl_cu12") is not None
NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="nixl-cu12 is not installed")
)


class RunningRelay:
    """A relay of a server's deliveries, on a free port of 127.0.0.1."""

    name = "relay"
    module = "objectcache_relay"

    def __init__(
        self,
        server: RunningServer,
        log: Path,
        *settings: str,
        job: Credentials | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """`job` is its key pair, by default the root user's; `within` as of a `ServerProcess`."""
        self._log = log
        self._credentials = job or server.credentials
        file = log.with_suffix(".credentials")
        file.touch(0o600)
        file.write_text(
            "[default]\n"
            f"aws_access_key_id = {self._credentials.access_key}\n"
            f"aws_secret_access_key = {self._credentials.secret_key}\n"
        )
        # The socket's path must be short.
        self.run_dir = (
            Path(RUN_DIR_PARENT) / f"objectcache-relay-{os.getpid()}-{secrets.token_hex(4)}"
        )
        every = (
            f"{self.name}.listen=127.0.0.1:0",
            f"{self.name}.metrics_listen=127.0.0.1:0",
            f"relay.endpoint={server.endpoint}",
            f"relay.credentials={file}",
            f"server.run_dir={self.run_dir}",
            *settings,
        )
        arguments = [part for one in every for part in ("--set", one)]
        self.process = ServerProcess(self.module, arguments, log, within=within)
        try:
            self.endpoint = self.process.wait_ready()
        except BaseException:
            self.stop()
            raise

    def client(self, transport: str = "body", **more: Any) -> Client:
        """A client whose deliveries come over this relay; the caller closes it."""
        credentials = self._credentials
        return Client(
            self.endpoint,
            access_key=credentials.access_key,
            secret_key=credentials.secret_key,
            transport=transport,
            **more,
        )

    def report(self) -> dict[str, Any]:
        """What it says of itself."""
        endpoint = Endpoint.parse(self.endpoint)
        credentials = self._credentials
        key = SigningKey(credentials.access_key, credentials.secret_key, None)
        pool = ConnectionPool(endpoint, 1, None)
        channel = HttpChannel(pool, Signer(endpoint, "us-east-1", lambda: key), 10.0)
        try:
            report: dict[str, Any] = json.loads(
                channel.call(GatewayRequest("GET", "/relay/report")).body
            )
            return report
        finally:
            pool.close()

    def samples(self) -> dict[tuple[str, ...], float]:
        """Its metrics, without `objectcache_` and `relay_`, by name and labels' values; it serves
        them where its metrics_listen is set.
        """
        found = re.search(r"metrics: port ([0-9]+)", self._log.read_text())
        assert found is not None
        return {
            (short_name(sample.name), *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(prometheus_text(int(found[1])))
            for sample in family.samples
        }

    def stop(self) -> None:
        """End it; a second call has no effect."""
        if self.process.returncode is None:
            self.process.terminate()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.endpoint}, pid {self.process.pid}>"


def short_name(metric: str) -> str:
    return metric.removeprefix("objectcache_").removeprefix("relay_")


def prometheus_text(port: int) -> str:
    """A relay's metrics."""
    with contextlib.closing(
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=BOUND_S)
    ) as answer:
        return str(answer.read().decode())


def client_of(server: RunningServer) -> Client:
    credentials = server.credentials
    return Client(
        server.endpoint, access_key=credentials.access_key, secret_key=credentials.secret_key
    )


def put_chunks(server: RunningServer) -> None:
    """Have the server hold what is delivered."""
    with client_of(server) as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT, create=True)
        bucket.put(bucket.chunk_keys(TOKENS), CHUNKS)


@contextlib.contextmanager
def stocked_server(data_dir: Path, *settings: str) -> Iterator[RunningServer]:
    """A server that holds what is delivered."""
    with start_server(data_dir, *SETTINGS, *settings) as running:
        put_chunks(running)
        yield running


def check_get(client: Client, **how: object) -> None:
    """One delivery of all, layer by layer."""
    bucket = client.kv_bucket(BUCKET, LAYOUT)
    with bucket.fetch(bucket.chunk_keys(TOKENS), delivery="layerwise", **how) as delivery:  # type: ignore[arg-type]
        for layer, payload in delivery:
            assert np.array_equal(payload, CHUNKS[:, layer]), f"layer {layer}"


def landing_mapped_bytes(pid: int, *targets: SharedMemoryTarget) -> int:
    """Memory files that a process maps, but for these targets of engines."""
    theirs = {os.fstat(target.file.fd).st_ino for target in targets}
    mapped_bytes = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        bounds, _, _, _, inode, *name = line.split()
        if name and name[0].startswith("/memfd:objectcache") and int(inode) not in theirs:
            begin, end = (int(one, 16) for one in bounds.split("-"))
            mapped_bytes += end - begin
    return mapped_bytes


def nothing_left(relay: RunningRelay) -> bool:
    report = relay.report()
    is_free: bool = report["landing_free_bytes"] == report["landing_bytes"]
    return is_free and report["read_queue_bytes"] == 0
