"""The AWS Common Runtime's S3 client, which splits every transfer into ranges or parts."""

from __future__ import annotations

import io
import secrets
from typing import Any

import pytest
from awscrt.auth import AwsCredentialsProvider
from awscrt.http import HttpHeaders, HttpRequest
from awscrt.io import ClientBootstrap, DefaultHostResolver, EventLoopGroup
from awscrt.s3 import (
    S3Client,
    S3RequestTlsMode,
    S3RequestType,
    create_default_s3_signing_config,
)

from tests.s3_clients import REGION, TIMEOUT_S
from tests.servers import RunningServer

PART_BYTES = 8 << 20


@pytest.fixture(scope="module")
def crt(server: RunningServer) -> Any:
    group = EventLoopGroup(1)
    provider = AwsCredentialsProvider.new_static(
        server.credentials.access_key, server.credentials.secret_key
    )
    return S3Client(
        bootstrap=ClientBootstrap(group, DefaultHostResolver(group)),
        region=REGION,
        tls_mode=S3RequestTlsMode.DISABLED,
        part_size=PART_BYTES,
        signing_config=create_default_s3_signing_config(
            region=REGION, credential_provider=provider
        ),
    )


def transfer(crt: Any, kind: Any, request: Any, **more: Any) -> None:
    crt.make_request(type=kind, request=request, **more).finished_future.result(TIMEOUT_S)


@pytest.mark.parametrize("size_bytes", [0, 1000, PART_BYTES, 2 * PART_BYTES + 5])
def test_an_object_of_any_size_goes_up_and_comes_down(
    server: RunningServer, crt: Any, bucket: str, size_bytes: int
) -> None:
    body, received = secrets.token_bytes(size_bytes), bytearray(size_bytes)
    host, path = f"{server.host}:{server.port}", f"/{bucket}/model%40rank"

    def take(chunk: bytes, offset: int, **_: Any) -> None:
        received[offset : offset + len(chunk)] = chunk

    headers = HttpHeaders([("host", host), ("content-length", str(size_bytes))])
    put = HttpRequest("PUT", path, headers, io.BytesIO(body))
    transfer(crt, S3RequestType.PUT_OBJECT, put)
    get = HttpRequest("GET", path, HttpHeaders([("host", host)]))
    transfer(crt, S3RequestType.GET_OBJECT, get, on_body=take)
    assert bytes(received) == body
