"""The AWS Common Runtime's S3 client, which splits transfers into ranges and parts by itself."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree.ElementTree import fromstring

import awscrt
from awscrt.auth import AwsCredentialsProvider
from awscrt.http import HttpHeaders, HttpRequest
from awscrt.io import (
    ClientBootstrap,
    ClientTlsContext,
    DefaultHostResolver,
    EventLoopGroup,
    TlsContextOptions,
)
from awscrt.s3 import (
    S3Client,
    S3RequestTlsMode,
    S3RequestType,
    S3ResponseError,
    create_default_s3_signing_config,
)

from tests.clients.driver import PART_BYTES, REGION, Endpoint, S3Driver

_TIMEOUT_S = 60.0
_XMLNS = "{http://s3.amazonaws.com/doc/2006-03-01/}"


class AwsCrt(S3Driver):
    """Requests as LMCache and NIXL make them: heads by hand, the rest by the runtime."""

    def __init__(self, endpoint: Endpoint, workspace: Path) -> None:
        super().__init__(endpoint, workspace)
        group = EventLoopGroup(1)
        provider = AwsCredentialsProvider.new_static(endpoint.access_key, endpoint.secret_key)
        self._s3 = S3Client(
            bootstrap=ClientBootstrap(group, DefaultHostResolver(group)),
            region=REGION,
            tls_mode=S3RequestTlsMode.ENABLED if endpoint.secure else S3RequestTlsMode.DISABLED,
            tls_connection_options=_tls(endpoint),
            part_size=PART_BYTES,
            multipart_upload_threshold=PART_BYTES,
            signing_config=create_default_s3_signing_config(
                region=REGION, credential_provider=provider
            ),
        )

    def version(self) -> str:
        return f"awscrt {awscrt.__version__}"

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._send(S3RequestType.PUT_OBJECT, "PUT", bucket, self._path(bucket, key), data)

    def put_parts(self, bucket: str, key: str, data: bytes) -> None:
        self.put(bucket, key, data)

    def get(self, bucket: str, key: str) -> bytes:
        return self._send(S3RequestType.GET_OBJECT, "GET", bucket, self._path(bucket, key))[1]

    def get_range(self, bucket: str, key: str, first: int, end: int) -> bytes:
        named = [("range", f"bytes={first}-{end - 1}")]
        path = self._path(bucket, key)
        return self._send(S3RequestType.GET_OBJECT, "GET", bucket, path, headers=named)[1]

    def size_bytes(self, bucket: str, key: str) -> int | None:
        try:
            headers, _ = self._default("HEAD", bucket, self._path(bucket, key), "HeadObject")
        except S3ResponseError as error:
            if error.status_code == 404:
                return None
            raise
        return int(headers["content-length"])

    def keys(self, bucket: str, prefix: str) -> list[str]:
        found: list[str] = []
        more = ""
        while True:
            query = f"list-type=2&prefix={quote(prefix, safe='')}{more}"
            path = f"{self._path(bucket, '')}?{query}"
            page = fromstring(self._default("GET", bucket, path, "ListObjectsV2")[1])
            found += [node.text or "" for node in page.iter(f"{_XMLNS}Key")]
            token = page.findtext(f"{_XMLNS}NextContinuationToken")
            if not token:
                return found
            more = f"&continuation-token={quote(token, safe='')}"

    def copy(self, bucket: str, source: str, target: str) -> None:
        named = [("x-amz-copy-source", quote(f"{bucket}/{source}"))]
        self._default("PUT", bucket, self._path(bucket, target), "CopyObject", named)

    def delete(self, bucket: str, key: str) -> None:
        self._default("DELETE", bucket, self._path(bucket, key), "DeleteObject")

    def _path(self, bucket: str, key: str) -> str:
        path = f"/{quote(key, safe='/')}"
        return path if self.endpoint.virtual_host else f"/{bucket}{path}"

    def _default(
        self,
        method: str,
        bucket: str,
        path: str,
        operation: str,
        headers: list[tuple[str, str]] = [],  # noqa: B006 - never changed
    ) -> tuple[dict[str, str], bytes]:
        kind = S3RequestType.DEFAULT
        return self._send(kind, method, bucket, path, headers=headers, operation_name=operation)

    def _send(
        self,
        kind: S3RequestType,
        method: str,
        bucket: str,
        path: str,
        body: bytes = b"",
        headers: list[tuple[str, str]] = [],  # noqa: B006 - never changed
        operation_name: str | None = None,
    ) -> tuple[dict[str, str], bytes]:
        pieces: dict[int, bytes] = {}
        answered: dict[str, str] = {}

        def take_head(status_code: int, headers: list[tuple[str, str]], **_: Any) -> None:
            answered.update((name.lower(), value) for name, value in headers)

        def take(chunk: bytes, offset: int, **_: Any) -> None:
            pieces[offset] = bytes(chunk)

        named = HttpHeaders([("host", self.endpoint.bucket_netloc(bucket)), *headers])
        if method == "PUT":
            named.set("content-length", str(len(body)))
        self._s3.make_request(
            type=kind,
            request=HttpRequest(method, path, named, io.BytesIO(body)),
            operation_name=operation_name,
            on_headers=take_head,
            on_body=take,
        ).finished_future.result(_TIMEOUT_S)
        return answered, b"".join(pieces[offset] for offset in sorted(pieces))


def _tls(endpoint: Endpoint) -> Any:
    if not endpoint.secure:
        return None
    options = TlsContextOptions()
    options.override_default_trust_store_from_path(None, endpoint.ca_file)
    return ClientTlsContext(options).new_connection_options()
