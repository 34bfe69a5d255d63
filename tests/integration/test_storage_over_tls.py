"""A gateway and a storage server as if on two hosts: mutual TLS over TCP."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

import objectcache
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.frames import LENGTH, encode_frame
from objectcache_schemas.messages.handshake import Hello
from objectcache_schemas.messages.message import PROTOCOL_VERSION
from objectcache_storage_server.connections.newcomers import NEWCOMERS_MAX
from tests.certificates import Authority, Pair
from tests.integration.served import BOUND_S, wait_until
from tests.s3_clients import boto3_client
from tests.servers import Credentials, ServerProcess, free_port

LAYOUT = KvLayout(
    num_layers=4, chunk_tokens=16, per_layer_chunk_bytes=256 << 10, dtype="uint8", fingerprint="t"
)
LONG = KvLayout(
    num_layers=64, chunk_tokens=16, per_layer_chunk_bytes=1 << 20, dtype="uint8", fingerprint="t"
)
LONG_BYTES_PER_S = 16 << 20  # 16 s for four chunks of it


def settings_of(authority: Authority, pair: Pair) -> list[str]:
    return [
        f"server.tls_certificate={pair.certificate}",
        f"server.tls_key={pair.key}",
        f"server.tls_ca={authority.file}",
    ]


class TwoHosts:
    """A storage server and a gateway with directories of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory / "tls")
        self.port = free_port()
        self.storage_pair = self.authority.pair("storage")
        self.storage = self._start_storage()
        self.gateway, self.endpoint = self.start_gateway(
            "gateway", self.authority, self.authority.pair("gateway")
        )

    def _start_storage(self) -> ServerProcess:
        process = self._start(
            "objectcache_storage_server",
            "storage",
            *settings_of(self.authority, self.storage_pair),
            f"storage.listen=127.0.0.1:{self.port}",
            "storage.engine=files",
            "gateway.tls_reload_s=0.05",
        )
        process.wait_ready()
        return process

    def restart_storage(self) -> None:
        self.storage = self._start_storage()

    def start_gateway(
        self, name: str, authority: Authority, pair: Pair, host: str = "localhost"
    ) -> tuple[ServerProcess, str]:
        process = self._start(
            "objectcache_gateway",
            name,
            *settings_of(authority, pair),
            f"server.storage_address={host}:{self.port}",
            "gateway.listen=127.0.0.1:0",
        )
        return process, process.wait_ready()

    def _start(self, module: str, name: str, *settings: str) -> ServerProcess:
        data_dir = self.directory / name
        data_dir.mkdir(exist_ok=True)
        run_dir = f"/tmp/objectcache-two-{os.getpid()}-{self.port}-{name}"
        arguments = ["--data-dir", str(data_dir), "--set", f"server.run_dir={run_dir}"]
        arguments += [part for setting in settings for part in ("--set", setting)]
        return ServerProcess(module, arguments, self.directory / f"{name}.log")

    def credentials(self, name: str = "gateway") -> Credentials:
        lines = (self.directory / name / "root-credentials").read_text().splitlines()
        access_key, secret_key = (line.partition(" = ")[2] for line in lines[1:3])
        return Credentials(access_key, secret_key)

    def s3(self) -> Any:
        credentials = self.credentials()
        return boto3_client(
            endpoint_url=self.endpoint,
            aws_access_key_id=credentials.access_key,
            aws_secret_access_key=credentials.secret_key,
            region_name="us-east-1",
            config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
        )

    def client(self, transport: str) -> objectcache.Client:
        credentials = self.credentials()
        return objectcache.Client(
            self.endpoint,
            access_key=credentials.access_key,
            secret_key=credentials.secret_key,
            transport=transport,
            timeout_s=30.0,
        )

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def stop(self) -> None:
        for process in (self.gateway, self.storage):
            if process.returncode is None:
                process.terminate()
        for run_dir in Path("/tmp").glob(f"objectcache-two-{os.getpid()}-{self.port}-*"):
            shutil.rmtree(run_dir)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    both = TwoHosts(tmp_path_factory.mktemp("hosts"))
    yield both
    both.stop()


@contextmanager
def another_gateway(
    hosts: TwoHosts, authority: Authority, pair: Pair, host: str = "localhost"
) -> Iterator[Callable[[], bytes]]:
    """A gateway with its own certificate; yields what it answers about its health."""
    process, endpoint = hosts.start_gateway("other", authority, pair, host)
    address = endpoint.removeprefix("http://").rpartition(":")

    def health() -> bytes:
        with socket.create_connection((address[0], int(address[2])), 30) as connected:
            connected.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return b"".join(iter(lambda: connected.recv(4096), b""))

    try:
        yield health
    finally:
        process.terminate()


def test_objects_of_all_sizes_come_back_as_they_were_put(hosts: TwoHosts) -> None:
    s3 = hosts.s3()
    s3.create_bucket(Bucket="sizes")
    for size_bytes in (0, 1, 4096, 70_000, 9_000_001):
        body = os.urandom(size_bytes)
        s3.put_object(Bucket="sizes", Key=str(size_bytes), Body=body)
        assert s3.get_object(Bucket="sizes", Key=str(size_bytes))["Body"].read() == body
    part = s3.get_object(Bucket="sizes", Key="9000001", Range="bytes=1000000-2999999")
    assert len(part["Body"].read()) == 2_000_000
    s3.close()


def test_a_prefix_is_fetched_layer_by_layer_into_the_body(hosts: TwoHosts) -> None:
    chunks = np.random.default_rng(2).integers(0, 256, (5, 4, 256 << 10), np.uint8)
    keys = [f"chunk-{number}" for number in range(5)]
    with hosts.client("body") as client:
        bucket = client.kv_bucket("kv-body", LAYOUT, create=True)
        bucket.put(keys, chunks)
        assert bucket.match([*keys, "missing"]) == 5
        with bucket.fetch(keys) as delivery:
            for layer in range(4):
                assert np.array_equal(delivery.wait_layer(layer), chunks[:, layer])


def test_a_target_is_refused_or_replaced_by_the_body_and_nothing_hangs(hosts: TwoHosts) -> None:
    chunks = np.random.default_rng(3).integers(0, 256, (1, 4, 256 << 10), np.uint8)
    with hosts.client("auto") as client:
        bucket = client.kv_bucket("kv-auto", LAYOUT, create=True)
        bucket.put(["one"], chunks)
        with bucket.fetch(["one"]) as delivery:
            assert np.array_equal(delivery.wait_layer(3), chunks[:, 3])


def test_a_gateway_of_another_authority_is_refused(hosts: TwoHosts, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    mixed = Authority(tmp_path / "mixed", "mixed")
    mixed.file.write_bytes(hosts.authority.file.read_bytes())  # it believes the storage server
    with another_gateway(hosts, mixed, stranger.pair("other")) as health:
        assert health().startswith(b"HTTP/1.1 503")
    wait_until(lambda: "were no gateways" in hosts.log("storage"), "the refusal's log")


def test_a_storage_server_of_another_authority_or_name_is_refused(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    pair = hosts.authority.pair("other")
    for authority, host in ((stranger, "localhost"), (hosts.authority, "127.1")):
        with another_gateway(hosts, authority, pair, host) as health:
            answer = health()
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"TLS to the storage server failed: CERTIFICATE_VERIFY_FAILED" in answer


def test_a_client_without_a_certificate_and_rubbish_are_dropped(hosts: TwoHosts) -> None:
    context = ssl.create_default_context(cafile=str(hosts.authority.file))
    with (
        socket.create_connection(("127.0.0.1", hosts.port), BOUND_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connected,
    ):
        answer = b""
        hello = Hello(v=PROTOCOL_VERSION, limits_fingerprint=Limits().fingerprint())
        with contextlib.suppress(OSError):
            connected.sendall(encode_frame(hello))
            answer = connected.recv(1)
        assert answer == b""
    for rubbish in (LENGTH.pack(10) + b"0123456789", os.urandom(5000)):
        with (
            socket.create_connection(("127.0.0.1", hosts.port), BOUND_S) as plain,
            contextlib.suppress(ConnectionError),  # dropped before it was sent or read
        ):
            plain.sendall(rubbish)
            plain.shutdown(socket.SHUT_WR)
            while plain.recv(4096):
                pass
    s3 = hosts.s3()
    assert s3.list_buckets()["ResponseMetadata"]["HTTPStatusCode"] == 200
    s3.close()


def test_connections_that_show_no_certificate_keep_no_gateway_out(hosts: TwoHosts) -> None:
    logged_before = hosts.log("storage").count("were no gateways")
    with contextlib.ExitStack() as held:
        idle = [
            held.enter_context(socket.create_connection(("127.0.0.1", hosts.port), BOUND_S))
            for _ in range(3 * NEWCOMERS_MAX)
        ]
        assert idle[0].recv(1) == b""  # the oldest went
        with another_gateway(hosts, hosts.authority, hosts.authority.pair("third")) as health:
            assert health().startswith(b"HTTP/1.1 200")
        for connected in idle:
            with contextlib.suppress(ConnectionResetError):
                assert connected.recv(1) == b""  # their time for a handshake is over
    assert hosts.log("storage").count("were no gateways") <= logged_before + 3


def test_what_listens_without_certificates_refuses_to_start(hosts: TwoHosts) -> None:
    for module, setting in (
        ("objectcache_storage_server", f"storage.listen=127.0.0.1:{hosts.port}"),
        ("objectcache_gateway", f"server.storage_address=localhost:{hosts.port}"),
    ):
        process = hosts._start(module, f"bare-{module}", setting, "gateway.listen=127.0.0.1:0")
        assert process.wait() == 2
        assert "server.tls_certificate and server.tls_ca must be" in process.log_tail()


def test_an_expired_certificate_ends_the_start(hosts: TwoHosts, tmp_path: Path) -> None:
    pair = hosts.authority.pair("expired", begins_days=-3, ends_days=-1)
    process = hosts._start(
        "objectcache_gateway",
        "expired",
        *settings_of(hosts.authority, pair),
        f"server.storage_address=localhost:{hosts.port}",
        "gateway.listen=127.0.0.1:0",
    )
    assert process.wait() == 2
    assert "ended at" in process.log_tail()


def test_a_renewed_certificate_is_taken_without_a_lost_request(hosts: TwoHosts) -> None:
    s3 = hosts.s3()
    hosts.authority.pair("storage")
    wait_until(lambda: "reloaded" in hosts.log("storage"), "the storage server to reload")
    hosts.authority.pair("gateway")
    os.kill(hosts.gateway.pid, signal.SIGHUP)
    wait_until(lambda: "reloaded" in hosts.log("gateway"), "the gateway to reload")
    for _ in range(3):
        s3.list_buckets()
    s3.close()


def test_a_body_on_its_way_when_the_storage_server_stops_arrives_whole(hosts: TwoHosts) -> None:
    body = os.urandom(24 << 20)
    s3 = hosts.s3()
    s3.create_bucket(Bucket="stopped")
    s3.put_object(Bucket="stopped", Key="k", Body=body)
    stream = s3.get_object(Bucket="stopped", Key="k")["Body"]
    start = stream.read(1 << 20)
    hosts.storage.signal_stop()
    assert start + stream.read() == body
    assert hosts.storage.wait() == 0
    s3.close()
    hosts.restart_storage()


def test_a_storage_server_that_is_killed_within_a_body_cuts_it_and_comes_back(
    hosts: TwoHosts,
) -> None:
    chunks = np.zeros((4, 64, 1 << 20), np.uint8)
    keys = [f"long-{number}" for number in range(4)]
    with hosts.client("body") as client:
        bucket = client.kv_bucket("kv-long", LONG, create=True)
        bucket.put(keys, chunks)
        with bucket.fetch(keys, rate_bytes_per_s=LONG_BYTES_PER_S) as delivery:
            delivery.wait_layer(0)
            hosts.storage.kill()
            with pytest.raises(ObjectCacheError):
                deque(map(delivery.wait_layer, range(64)), maxlen=0)
        hosts.restart_storage()
        assert bucket.match(keys) == 4
    s3 = hosts.s3()
    with pytest.raises(ClientError, match="NoSuchBucket"):
        s3.list_objects_v2(Bucket="never-made")
    s3.close()
