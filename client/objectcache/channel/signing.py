"""Signature Version 4 for S3, by botocore's signer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from objectcache.channel.access_key import SigningKey
from objectcache.channel.endpoint import Endpoint
from objectcache.channel.requests import GatewayRequest
from objectcache_schemas import headers

UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"
REWRITTEN_HEADERS = (headers.TRACEPARENT,)  # by proxies with spans of their own; so not signed


class _Auth(S3SigV4Auth):
    """botocore's signer, with the payload's digest decided by us."""

    def payload(self, request: Any) -> str:
        return str(request.context["payload_sha256"])


class Signer:
    """Signs requests to one endpoint. `access_key` is asked at each request, so that it may rotate.

    Bodies are signed by digest, except where a request allows otherwise and the link protects
    bodies (TLS, or loopback).
    """

    def __init__(
        self,
        endpoint: Endpoint,
        region: str,
        access_key: Callable[[], SigningKey],
        service: str = "s3",
        *,
        always: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`always` are headers of every request."""
        self._endpoint = endpoint
        self._region = region
        self._access_key = access_key
        self._service = service
        self._always = always

    def signed_headers(self, request: GatewayRequest) -> dict[str, str]:
        """All headers to send with the request, the signature's among them."""
        to_sign = {**self._always, **request.headers, "host": self._endpoint.host_header}
        rewritten = {name: to_sign.pop(name) for name in REWRITTEN_HEADERS if name in to_sign}
        aws_request: Any = AWSRequest(
            request.method, self._endpoint.url + request.target, headers=to_sign
        )
        aws_request.context["payload_sha256"] = self._payload_sha256(request)
        key = self._access_key()
        credentials = Credentials(key.access_key, key.secret_key, key.session_token)
        auth: Any = _Auth(credentials, self._service, self._region)
        auth.add_auth(aws_request)
        signed = {name.lower(): value for name, value in aws_request.headers.items()}
        return signed | rewritten

    def _payload_sha256(self, request: GatewayRequest) -> str:
        if not request.sign_body and self._endpoint.protects_bodies:
            return UNSIGNED_PAYLOAD
        return body_sha256(request.body)


def body_sha256(parts: Sequence[bytes | memoryview]) -> str:
    """Hex SHA-256 of the parts one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
