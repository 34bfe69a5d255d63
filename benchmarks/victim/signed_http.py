"""Requests of one user, signed by hand: what attacks and their victim are made of."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.client
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

REGION = "us-east-1"
UNSIGNED = "UNSIGNED-PAYLOAD"


@dataclass(frozen=True, slots=True)
class Signer:
    """A user's key pair, and the endpoint that its requests go to."""

    endpoint: str
    access_key: str
    secret_key: str

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.endpoint)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def headers(
        self,
        method: str,
        path: str,
        payload_sha256: str = UNSIGNED,
        extra: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """The headers of a request, signed; `extra` is signed, too. A query is one name at most."""
        path, _, query = path.partition("?")
        query = f"{query}=" if query else ""
        amz_date = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        scope = f"{amz_date[:8]}/{REGION}/s3/aws4_request"
        named = {
            "host": "{}:{}".format(*self.address),
            "x-amz-content-sha256": payload_sha256,
            "x-amz-date": amz_date,
            **(extra or {}),
        }
        names = ";".join(sorted(named))
        lines = "".join(f"{name}:{named[name]}\n" for name in sorted(named))
        request = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{payload_sha256}"
        digest = hashlib.sha256(request.encode()).hexdigest()
        key = f"AWS4{self.secret_key}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        text = f"AWS4-HMAC-SHA256\n{amz_date}\n{scope}\n{digest}"
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        credential = f"Credential={self.access_key}/{scope}"
        signed = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={names}, Signature={signature}"
        return {**named, "authorization": signed}

    def head(self, method: str, path: str, length_bytes: int | None = None) -> bytes:
        """The head of a request as bytes; `length_bytes` of its body are to follow."""
        named = self.headers(method, path)
        if length_bytes is not None:
            named["content-length"] = str(length_bytes)
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in named.items())]
        return "\r\n".join([*lines, "", ""]).encode()


@dataclass(frozen=True, slots=True)
class Answered:
    """How a request ended: an HTTP status, 0 where the connection did, and how long it took."""

    status: int
    duration_s: float
    received_bytes: int = 0


class Asker:
    """One user's connection, which is kept where `keeps` and made anew where it was lost."""

    def __init__(self, signer: Signer, timeout_s: float, *, keeps: bool = True) -> None:
        self._signer = signer
        self._timeout_s = timeout_s
        self._keeps = keeps
        self._connection: http.client.HTTPConnection | None = None

    def ask(
        self, method: str, path: str, body: bytes = b"", extra: Mapping[str, str] | None = None
    ) -> Answered:
        """Send a request and take its answer to the last byte."""
        digest = hashlib.sha256(body).hexdigest()
        named = self._signer.headers(method, path, digest, extra)
        begun_s = time.perf_counter()
        status = received_bytes = 0
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection(
                    *self._signer.address, timeout=self._timeout_s
                )
            self._connection.request(method, path, body, named)
            answer = self._connection.getresponse()
            received_bytes = len(answer.read())
            status = answer.status
        except (OSError, http.client.HTTPException):
            status = 0
        if not status or not self._keeps:
            self.close()
        return Answered(status, time.perf_counter() - begun_s, received_bytes)

    def close(self) -> None:
        """Close the connection; the next request makes another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
