"""HTTPS on the S3 port: real clients, and certificates that are renewed under them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from botocore.config import Config

import objectcache
from objectcache.channel.authorities import client_context
from objectcache_laboratory.access import find_access
from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_schemas.layout import KvLayout
from tests.certificates import Authority, Pair, serial_number, serial_number_of
from tests.integration.served import BOUND_S, Served, own_environment, wait_until
from tests.s3_clients import boto3_client
from tests.servers import RunningServer, start_server

LAYOUT = KvLayout(
    num_layers=4, chunk_tokens=16, per_layer_chunk_bytes=64 << 10, dtype="uint8", fingerprint="test"
)


class Https:
    """A server with a certificate of its own authority."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory / "tls")
        self.pair = self.authority.pair("server")
        self.server: RunningServer = start_server(
            directory / "data",
            f"gateway.tls_certificate={self.pair.certificate}",
            f"gateway.tls_key={self.pair.key}",
            "gateway.tls_reload_s=0.05",
            "storage.engine=files",
        )

    def s3(self) -> Any:
        credentials = self.server.credentials
        return boto3_client(
            endpoint_url=self.server.endpoint,
            aws_access_key_id=credentials.access_key,
            aws_secret_access_key=credentials.secret_key,
            region_name="us-east-1",
            verify=str(self.authority.file),
            config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
        )

    def shown(self) -> int:
        """Serial number of the certificate that a connection is shown now."""
        context = ssl.create_default_context(cafile=str(self.authority.file))
        with (
            socket.create_connection((self.server.host, self.server.port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connected,
        ):
            der = connected.getpeercert(binary_form=True)
            assert der is not None
            return serial_number(der)


@pytest.fixture(scope="module")
def https(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Https]:
    served = Https(tmp_path_factory.mktemp("https"))
    with served.server:
        yield served


def test_boto3_puts_and_gets_over_https_with_its_trailing_checksum(https: Https) -> None:
    assert https.server.endpoint.startswith("https://127.0.0.1:")
    body = os.urandom(3_000_000)
    s3 = https.s3()
    s3.create_bucket(Bucket="over-tls")
    s3.put_object(Bucket="over-tls", Key="a b", Body=body)
    assert s3.get_object(Bucket="over-tls", Key="a b")["Body"].read() == body
    s3.close()


@pytest.mark.parametrize("transport", ["body", "shared_memory"])
def test_the_sdk_fetches_a_prefix_over_https(https: Https, transport: str) -> None:
    credentials = https.server.credentials
    chunks = np.random.default_rng(1).integers(0, 256, (3, 4, 64 << 10), np.uint8)
    with objectcache.Client(
        https.server.endpoint,
        access_key=credentials.access_key,
        secret_key=credentials.secret_key,
        transport=transport,
        tls=client_context(https.authority.file),
    ) as client:
        bucket = client.kv_bucket("kv-tls", LAYOUT, create=True)
        keys = [f"{transport}-{number}" for number in range(3)]
        bucket.put(keys, chunks)
        with bucket.fetch(keys) as delivery:
            for layer in range(4):
                assert np.array_equal(delivery.wait_layer(layer), chunks[:, layer])


def test_a_client_that_does_not_know_the_authority_says_so(https: Https) -> None:
    with (
        objectcache.Client(https.server.endpoint, access_key="a" * 8, secret_key="s" * 8) as client,
        pytest.raises(
            Unavailable,
            match=r"TLS failed.*certificate verify failed.*ca_file, .*AWS_CA_BUNDLE",
        ),
    ):
        client.create_bucket("never")


def test_a_client_that_speaks_plain_http_to_tls_is_told_so(https: Https) -> None:
    url = https.server.endpoint.replace("https:", "http:")
    with (
        objectcache.Client(url, access_key="a" * 8, secret_key="s" * 8) as client,
        pytest.raises(Unavailable, match=f"^{url}: no answer: .*does it speak TLS.*https://$"),
    ):
        client.create_bucket("never")


def test_the_cli_takes_the_authority_from_a_flag_or_from_the_variable(https: Https) -> None:
    file = https.server.credentials_file
    variable = {"AWS_CA_BUNDLE": "other.pem"}
    flag = find_access(https.server.endpoint, file, variable, https.authority.file)
    assert flag.ca_file == str(https.authority.file)
    assert find_access(https.server.endpoint, file, variable).ca_file == "other.pem"
    assert find_access(https.server.endpoint, file, {}).tls() is None
    with pytest.raises(InvalidRequest, match=r"CA file other.pem: No such file"):
        find_access(https.server.endpoint, file, variable).tls()
    with pytest.raises(InvalidRequest, match="holds no certificate"):
        client_context(https.pair.key)


def test_plain_http_and_rubbish_on_the_port_are_dropped_and_others_served(https: Https) -> None:
    for rubbish in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(4096),
        b"\x16\x03\x01\xff\xff",
    ):
        with socket.create_connection((https.server.host, https.server.port), BOUND_S) as plain:
            answer = b""
            with contextlib.suppress(ConnectionError):  # dropped before it was sent or read
                plain.sendall(rubbish)
                plain.shutdown(socket.SHUT_WR)
                answer = plain.recv(4096)
            assert not answer.startswith(b"HTTP")
    assert https.shown() == serial_number_of(https.pair)


def test_a_renewed_certificate_is_shown_while_open_connections_go_on(https: Https) -> None:
    s3 = https.s3()
    s3.create_bucket(Bucket="renewed")
    before = serial_number_of(https.pair)
    assert https.shown() == before
    renewed = serial_number_of(https.authority.pair("server"))
    wait_until(lambda: https.shown() == renewed, "the new certificate (gateway.tls_reload_s)")
    s3.put_object(Bucket="renewed", Key="k", Body=b"on the old connection")
    s3.close()


def test_a_broken_certificate_leaves_the_one_before_in_force(https: Https) -> None:
    before = https.shown()
    https.pair.certificate.write_text("rubbish")
    gateway_log = https.server.data_dir / "gateway.log"
    wait_until(lambda: "the one before stays" in gateway_log.read_text(), "the error in the log")
    assert https.shown() == before
    renewed = serial_number_of(https.authority.pair("server"))
    wait_until(lambda: https.shown() == renewed, "the mended certificate")


def test_sighup_reloads_at_once(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    pair = authority.pair("server")
    settings = (f"gateway.tls_certificate={pair.certificate}", f"gateway.tls_key={pair.key}")
    https = Https.__new__(Https)
    https.authority, https.pair = authority, pair
    https.server = start_server(
        tmp_path / "data", *settings, "gateway.tls_reload_s=3600", "storage.engine=memory"
    )
    with https.server:
        assert https.shown() == serial_number_of(pair)
        renewed = serial_number_of(authority.pair("server"))
        os.kill(https.server.gateway_pid, signal.SIGHUP)
        wait_until(lambda: https.shown() == renewed, "the new certificate")


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("mismatched", "is not the key of"),
        ("expired", "ended at"),
        ("missing", "there is no such file"),
    ],
)
def test_serve_refuses_to_start_with_a_pair_that_is_none(
    tmp_path: Path, broken: str, words: str
) -> None:
    authority = Authority(tmp_path / "tls")
    pair = authority.pair("server", begins_days=-3, ends_days=-1 if broken == "expired" else 9)
    if broken == "mismatched":
        pair = Pair(pair.certificate, authority.pair("other").key)
    elif broken == "missing":
        pair.certificate.unlink()
    result = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "objectcache_operations",
                "serve",
                "--data-dir",
                tmp_path / "data",
            ),
            *("--listen", "127.0.0.1:0", "--set", "storage.engine=memory"),
            *("--set", f"gateway.tls_certificate={pair.certificate}"),
            *("--set", f"gateway.tls_key={pair.key}"),
        ],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        env=own_environment(),
    )
    assert result.returncode == 2
    assert "gateway.tls_certificate" in result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_serve_announces_an_https_url(tmp_path: Path) -> None:
    pair = Authority(tmp_path / "tls").pair("server")
    settings = (f"gateway.tls_certificate={pair.certificate}", f"gateway.tls_key={pair.key}")
    arguments = [part for setting in settings for part in ("--set", setting)]
    with Served(tmp_path / "data", *arguments, "--set", "storage.engine=memory") as served:
        served.wait_ready()
        assert served.endpoint.startswith("https://127.0.0.1:")
        assert served.stop() == 0
