"""A blocking client of the admin API, for one command of an operator."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from objectcache.channel.endpoint import Endpoint
from objectcache_schemas.errors import (
    ERRORS,
    InvalidRequest,
    ObjectCacheError,
    Unavailable,
    WireError,
)
from objectcache_schemas.headers import ADMIN_API
from objectcache_schemas.messages.later_fields import AnswerDecoder
from objectcache_schemas.operators.admin_api import SIGNING_SERVICE, Problem

R = TypeVar("R")

TIMEOUT_S = 30.0  # of silence; a check reports several times a second
ANSWER_BYTES_MAX = 256 << 20
UNIX_SCHEME = "unix://"
HOW_TO_FIND = (
    "the admin API listens where `objectcache serve` says in its line `admin`: by default on "
    "loopback, one port above the S3 port, and on RUN_DIR/admin.sock"
)


@dataclass(frozen=True, slots=True)
class RootKey:
    """The key pair that may sign requests of the admin API."""

    access_key: str
    secret_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class AdminAccess:
    """Where the admin API is, and what is shown there. A unix socket needs nothing."""

    endpoint: str  # http://host:port, https://host:port or unix:///path
    token: str | None = field(default=None, repr=False)
    root_key: RootKey | None = None
    tls: ssl.SSLContext | None = None


def path_of(*parts: str) -> str:
    """A path of the API; each part is one segment, whatever it holds."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def _target(path: str, query: Mapping[str, str | int | None]) -> str:
    given = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given, quote_via=quote)}" if given else path


class ApiClient:
    """Asks the admin API, one request after the other.

    Every method raises `Unavailable` where it cannot be reached or says nothing, and the error that
    it answered with.
    """

    def __init__(self, access: AdminAccess, timeout_s: float | None = None) -> None:
        self._access = access
        self._timeout_s = timeout_s or TIMEOUT_S
        self._connection = _connection(access, self._timeout_s)

    def get(self, path: str, reply_type: type[R], **query: str | int | None) -> R:
        """Ask; parts of the query that are None or empty are left out."""
        return self._decoded(self._asked("GET", _target(path, query), b""), reply_type)

    def send(self, method: str, path: str, body: msgspec.Struct | None, reply_type: type[R]) -> R:
        """Send a body, or none, and return the reply."""
        encoded = b"" if body is None else _encoded(body)
        return self._decoded(self._asked(method, path, encoded), reply_type)

    def delete(self, path: str, **query: str) -> bytes:
        """Delete; returns what is answered."""
        return self._read(self._asked("DELETE", _target(path, query), b""))

    def stream(self, path: str, body: msgspec.Struct, line_type: type[R]) -> Iterator[R]:
        """Send a body and return the reply's lines as they come."""
        response = self._asked("POST", path, _encoded(body))
        while line := self._ended(lambda: response.readline(ANSWER_BYTES_MAX)):
            yield self._line(line, line_type)

    def _asked(self, method: str, target: str, body: bytes) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json"} if body else {}
        headers |= _credentials(self._access, method, target, headers, body)

        def ask() -> http.client.HTTPResponse:
            self._connection.request(method, target, body or None, headers)
            return self._connection.getresponse()

        response = self._ended(ask)
        if response.headers.get(ADMIN_API) is None:
            self._read(response)
            raise InvalidRequest(self._not_the_api(response))
        if response.status >= 300:
            raise _problem(response.status, self._read(response))
        return response

    def _not_the_api(self, response: http.client.HTTPResponse) -> str:
        is_s3 = "xml" in response.headers.get("Content-Type", "") or (
            "x-amz-request-id" in response.headers
        )
        what = "is the S3 port, not the admin API" if is_s3 else "is no admin API of ObjectCache"
        return f"{self._access.endpoint} {what}; {HOW_TO_FIND}"

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        return self._ended(lambda: response.read(ANSWER_BYTES_MAX))

    def _decoded(self, response: http.client.HTTPResponse, reply_type: type[R]) -> R:
        return self._line(self._read(response), reply_type)

    def _line(self, data: bytes, reply_type: type[R]) -> R:
        try:
            return AnswerDecoder[R](reply_type, msgspec.json).decode(data)
        except msgspec.MsgspecError as error:
            raise ObjectCacheError(
                f"{self._access.endpoint} is of another version: {error}"
            ) from error

    def _ended(self, step: Callable[[], R]) -> R:
        """The step's result; what the network raises becomes `Unavailable` with the remedy."""
        try:
            return step()
        except TimeoutError as error:
            raise Unavailable(
                f"the admin API at {self._access.endpoint} says nothing for {self._timeout_s:g} s; "
                "see its log"
            ) from error
        except ssl.SSLError as error:
            raise Unavailable(_tls_failure(self._access.endpoint, error)) from error
        except OSError as error:
            raise Unavailable(_why_not(self._access.endpoint, error)) from error
        except http.client.HTTPException as error:
            raise Unavailable(
                f"the admin API at {self._access.endpoint} ended, or is none: "
                f"{type(error).__name__}; {HOW_TO_FIND}"
            ) from error

    def close(self) -> None:
        """Close; the server ends what it does for this connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ApiClient {self._access.endpoint}>"


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(access: AdminAccess, timeout_s: float) -> http.client.HTTPConnection:
    if access.endpoint.startswith(UNIX_SCHEME):
        return _UnixConnection(access.endpoint.removeprefix(UNIX_SCHEME), timeout_s)
    endpoint = Endpoint.parse(access.endpoint)
    if endpoint.scheme == "https":
        context = access.tls or ssl.create_default_context()
        return http.client.HTTPSConnection(
            endpoint.host, endpoint.port, timeout=timeout_s, context=context
        )
    return http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)


def _credentials(
    access: AdminAccess, method: str, target: str, headers: Mapping[str, str], body: bytes
) -> dict[str, str]:
    """The headers that say who asks."""
    if access.token:
        return {"Authorization": f"Bearer {access.token}"}
    if access.root_key is None or access.endpoint.startswith(UNIX_SCHEME):
        return {}
    from objectcache.channel.access_key import SigningKey
    from objectcache.channel.requests import GatewayRequest
    from objectcache.channel.signing import Signer

    key = SigningKey(access.root_key.access_key, access.root_key.secret_key)
    signer = Signer(Endpoint.parse(access.endpoint), "us-east-1", lambda: key, SIGNING_SERVICE)
    path, _, query = target.partition("?")
    signed = signer.signed_headers(GatewayRequest(method, path, query, headers, (body,)))
    return {name: value for name, value in signed.items() if name != "host"}


def _encoded(body: msgspec.Struct) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise InvalidRequest("a name or key is not Unicode text") from error


def _problem(status: int, data: bytes) -> ObjectCacheError:
    try:
        problem = AnswerDecoder[Problem](Problem, msgspec.json).decode(data)
    except msgspec.MsgspecError:
        return ObjectCacheError(f"the admin API answered {status}")
    if problem.code not in ERRORS:
        return ObjectCacheError(problem.message)
    return ObjectCacheError.from_wire(WireError(problem.code, problem.message))


def _tls_failure(endpoint: str, error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message
        return f"{endpoint} shows a certificate that is not trusted ({reason}); give --ca-file"
    return f"{endpoint} does not speak TLS; write http:// where it serves plain HTTP"


def _why_not(endpoint: str, error: OSError) -> str:
    """Why there is no connection, and the remedy."""
    if not endpoint.startswith(UNIX_SCHEME):
        reason: Any = error.strerror or error
        return f"{endpoint} cannot be reached: {reason}; {HOW_TO_FIND}"
    path = endpoint.removeprefix(UNIX_SCHEME)
    if isinstance(error, PermissionError):
        return f"{path} may not be opened: permission denied; run this as the server's own user"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return (
            f"no admin API runs there: {path} does not exist; give the --data-dir (or --config, "
            "--set server.run_dir=DIR) of a running server, or start one; beside a storage server "
            "that runs alone: objectcache admin serve"
        )
    if isinstance(error, ConnectionRefusedError):
        return f"no admin API listens at {path} any more; start the server again"
    if isinstance(error, ConnectionError):
        return f"the admin API at {path} ended; see its log"
    return f"{path} cannot be connected: {error.strerror or error}"
