"""Clients of a running server: boto3 with default settings, and requests signed by hand."""

from __future__ import annotations

import hashlib
import http.client
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element, fromstring

import boto3
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from tests.servers import Credentials as KeyPair
from tests.servers import RunningServer

REGION = "us-east-1"
TIMEOUT_S = 60.0  # generous, because machines may be busy
_CLIENTS: list[Any] = []


def boto3_client(**given: Any) -> Any:
    """boto3's client of S3, which `close_clients` closes if nobody else does."""
    make_client: Any = boto3.client  # its overloads know every AWS service by its literal name
    client = make_client("s3", **given)
    _CLIENTS.append(client)
    return client


def close_clients() -> None:
    """Close every client made so far, and with it the connections that it keeps."""
    while _CLIENTS:
        _CLIENTS.pop().close()


def s3_client(
    server: RunningServer,
    *,
    addressing_style: str = "path",
    endpoint: str | None = None,
    access_key: str | None = None,
    secret_key: str | None = None,
    **config: Any,
) -> Any:
    """A boto3 client; `config` goes to botocore's Config. No retries, so that errors show."""
    credentials = server.credentials
    s3_settings: Any = {"addressing_style": addressing_style}
    return boto3_client(
        endpoint_url=endpoint or server.endpoint,
        aws_access_key_id=access_key or credentials.access_key,
        aws_secret_access_key=secret_key or credentials.secret_key,
        region_name=REGION,
        config=Config(
            signature_version="s3v4",
            s3=s3_settings,
            retries={"total_max_attempts": 1},
            read_timeout=TIMEOUT_S,
            **config,
        ),
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, read to its end."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def xml(self) -> Element:
        """The body as XML."""
        return fromstring(self.body)

    @property
    def code(self) -> str | None:
        """Code of an error document."""
        return self.xml.findtext("Code")


def signed_headers(
    server: RunningServer,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    *,
    host: str | None = None,
    payload_hash: str | None = None,
    credentials: KeyPair | None = None,
) -> dict[str, str]:
    """Headers of a request that botocore's signer signed, the host among them. The root key signs
    where no other pair is given.
    """
    credentials = credentials or server.credentials
    host = host or f"{server.host}:{server.port}"
    request = AWSRequest(method, f"http://{host}{path}", headers={**(headers or {})}, data=body)
    request.headers["Host"] = host
    digest = payload_hash or hashlib.sha256(body).hexdigest()
    signer = _Signer(
        Credentials(credentials.access_key, credentials.secret_key), "s3", REGION, digest
    )
    signer.add_auth(request)
    return dict(request.headers.items())


class _Signer(S3SigV4Auth):
    """botocore's signer with a payload hash of the caller's choice."""

    def __init__(self, credentials: Any, service: str, region: str, digest: str) -> None:
        super().__init__(credentials, service, region)
        self._digest = digest

    def payload(self, request: Any) -> str:
        return self._digest


def call(
    server: RunningServer,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    *,
    host: str | None = None,
    credentials: KeyPair | None = None,
) -> Answer:
    """Send a signed request on a connection of its own."""
    named = signed_headers(server, method, path, body, headers, host=host, credentials=credentials)
    return send(server, method, path, body, named)


def send(
    server: RunningServer,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send a request as it is."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=TIMEOUT_S)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        named = {"Host": f"{server.host}:{server.port}", **(headers or {})}
        if body or method in ("PUT", "POST"):
            named.setdefault("Content-Length", str(len(body)))
        for name, value in named.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        return read_answer(connection.getresponse())
    finally:
        connection.close()


def read_answer(response: http.client.HTTPResponse) -> Answer:
    """Read a response to its end."""
    return Answer(response.status, response.headers, response.read())


def open_socket(server: RunningServer) -> socket.socket:
    """A bare connection to the gateway."""
    return socket.create_connection((server.host, server.port), TIMEOUT_S)


def send_head(
    connection: socket.socket, method: str, target: str, headers: Mapping[str, str]
) -> None:
    """Send a request's head on a bare connection."""
    lines = [
        f"{method} {target} HTTP/1.1",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())


def receive_answer(connection: socket.socket, method: str = "GET") -> Answer:
    """Receive one response on a bare connection."""
    response = http.client.HTTPResponse(connection, method=method)
    response.begin()
    return read_answer(response)


def presigned_path(client: Any, operation: str, parameters: Mapping[str, str], **more: Any) -> str:
    """Path and query of a presigned URL."""
    parts = urlsplit(client.generate_presigned_url(operation, Params=dict(parameters), **more))
    return f"{parts.path}?{parts.query}"
