"""Requests over pooled connections: sign, send, read the head, raise errors.

The one place that meets http.client: its exceptions, and the system's, become `Unavailable` here.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import struct
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from objectcache.channel.connections import Connection, ConnectionPool
from objectcache.channel.error_xml import ERROR_BODY_BYTES_MAX
from objectcache.channel.requests import GatewayRequest
from objectcache.channel.responses import REPLY_BYTES_MAX, HeaderLookup, parse_error
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError, Unavailable

NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")  # as OpenSSL says it
TCP_INFO_BYTES, RECEIVED_AT_BYTES = 256, 128  # of Linux's struct tcp_info: tcpi_bytes_received
REFUSAL_TIMEOUT_S = 1.0  # an answer to a body that could not be sent is there, or never comes


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole response."""

    header: HeaderLookup
    body: bytes


class GatewayExchange:
    """A response whose head has arrived and whose body is being read, by one thread.

    It ends with `finish` or `abandon`, by that thread; `interrupt` may come from any other.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        connection: Connection,
        sock: socket.socket,
        response: http.client.HTTPResponse,
    ) -> None:
        self._pool = pool
        self._connection = connection
        self._sock = sock
        self._response = response
        self._lock = threading.Lock()
        self._ended = False
        self._begun_bytes = self._came_bytes = _received_bytes(sock)

    def header(self, name: str) -> str | None:
        """A response header's value."""
        return self._response.getheader(name)

    @property
    def length_bytes(self) -> int | None:
        """Announced length of the body; None when it is chunked."""
        return self._response.length

    def readinto(self, view: memoryview) -> int:
        """Fill `view` from the body; fewer bytes mean that the body has ended, whole or cut.

        Raises `Unavailable` when the connection broke or went silent for its timeout.
        """
        with _translated("the connection broke", self._pool.url):
            return self._response.readinto(view)

    @property
    def came_bytes(self) -> int:
        """Bytes that have come over the connection since the head, whether they were read or not,
        as the system counts them; 0 where it does not. It grows while a long `readinto` waits.
        """
        with self._lock:
            if not self._ended:
                self._came_bytes = max(self._came_bytes, _received_bytes(self._sock))
            return self._came_bytes - self._begun_bytes

    def read(self, bytes_max: int = REPLY_BYTES_MAX) -> bytes:
        """The rest of the body; raises `ObjectCacheError` when it is over `bytes_max`."""
        with _translated("the connection broke", self._pool.url):
            body = self._response.read(bytes_max + 1)
        if len(body) > bytes_max:
            raise ObjectCacheError(f"the server's answer is over {bytes_max} bytes")
        if self._response.length:
            missing_bytes = self._response.length
            raise Unavailable(
                f"{self._pool.url}: the answer was cut, {missing_bytes} bytes are missing"
            )
        return body

    def wait_forever(self) -> None:
        """Let reads wait without a bound of their own."""
        self._sock.settimeout(None)

    def interrupt(self) -> None:
        """Make the reading thread, and the server, see the connection end now.

        No effect once the exchange has ended: the connection may carry another by then.
        """
        with self._lock, suppress(OSError):  # an error: the peer has ended it
            if not self._ended:
                # The base class's: the TLS class's own would let the reader go on in plain text.
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def finish(self) -> None:
        """End the exchange; the connection is reused if the body was read to its end."""
        if self._end():
            return
        reusable = self._response.isclosed() and not self._response.will_close
        self._response.close()
        if reusable:
            self._pool.give_back(self._connection)
        else:
            self._pool.discard(self._connection)

    def abandon(self) -> None:
        """End the exchange and close its connection, so that the server stops."""
        if self._end():
            return
        self._response.close()
        self._pool.discard(self._connection)

    def _end(self) -> bool:
        """Mark the exchange as ended; returns whether it was."""
        with self._lock:
            was_ended, self._ended = self._ended, True
        return was_ended


def _received_bytes(sock: socket.socket) -> int:
    """Of a connection, since it was made; 0 where the system does not say (tcp_info(7))."""
    try:
        said = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    except (OSError, AttributeError):  # the latter where there is no such option
        return 0
    if len(said) < RECEIVED_AT_BYTES + 8:
        return 0
    (count,) = struct.unpack_from("=Q", said, RECEIVED_AT_BYTES)
    return int(count)


class BodyUpload:
    """A request whose body the caller sends piece by piece; ends with `finish` or `abandon`."""

    def __init__(self, channel: HttpChannel, connection: Connection) -> None:
        self._channel = channel
        self._connection = connection
        self._ended = False

    def write(self, part: bytes | memoryview) -> None:
        """Send the next piece of the body.

        Raises the server's error when it refused the rest, `Unavailable` when the connection broke;
        the upload has ended then.
        """
        try:
            self._connection.http.send(part)
        except OSError as error:
            self._ended = True
            self._channel.refusal(self._connection, error)

    def finish(self) -> Reply:
        """Read the answer to the whole request; raises the server's error."""
        assert not self._ended
        self._ended = True
        return read_whole(self._channel.read_head(self._connection))

    def abandon(self) -> None:
        """Close the connection: the server forgets what it got. No effect once ended."""
        if not self._ended:
            self._ended = True
            self._channel.pool.discard(self._connection)


class RequestSigner(Protocol):
    """Who says in whose name requests are sent."""

    def signed_headers(self, request: GatewayRequest) -> dict[str, str]:
        """All headers to send with the request."""
        ...


class HttpChannel:
    """Sends requests to one gateway. Thread-safe."""

    def __init__(self, pool: ConnectionPool, signer: RequestSigner, timeout_s: float) -> None:
        self.pool = pool
        self._signer = signer
        self.timeout_s = timeout_s

    def call(self, request: GatewayRequest, timeout_s: float | None = None) -> Reply:
        """Send a request and read the whole answer; raises the server's error.

        Raises `Unavailable` when the gateway cannot be reached, breaks the connection or is silent
        for `timeout_s` (default: the channel's).
        """
        return read_whole(self.open(request, timeout_s))

    def open(self, request: GatewayRequest, timeout_s: float | None = None) -> GatewayExchange:
        """Send a request and read the answer's head; raises as `call` does.

        A connection that the server had closed while it was idle is replaced once, if the request
        may be repeated.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        connection = self.pool.take(timeout_s)
        may_repeat = connection.reused and request.repeatable
        try:
            return self._open(connection, request)
        except Unavailable as error:
            if not (may_repeat and isinstance(error.__cause__, ConnectionError)):
                raise
        return self._open(self.pool.take(timeout_s), request)

    def start_upload(self, request: GatewayRequest, timeout_s: float | None = None) -> BodyUpload:
        """Send a request's head and the body parts it has; the rest follows by `BodyUpload.write`.

        The request's headers must announce the whole length.
        """
        connection = self.pool.take(self.timeout_s if timeout_s is None else timeout_s)
        try:
            self._send(connection, request)
        except OSError as error:
            self.refusal(connection, error)
        return BodyUpload(self, connection)

    def _open(self, connection: Connection, request: GatewayRequest) -> GatewayExchange:
        try:
            self._send(connection, request)
        except OSError as error:
            self.refusal(connection, error)
        return self.read_head(connection)

    def _send(self, connection: Connection, request: GatewayRequest) -> None:
        try:
            connect(connection)
            headers = self._signer.signed_headers(request.sent_at(time.monotonic()))
            if request.body or request.method in ("POST", "PUT"):
                headers.setdefault("content-length", str(request.body_bytes))
            http = connection.http
            http.putrequest(
                request.method, request.target, skip_host=True, skip_accept_encoding=True
            )
            for name, value in headers.items():
                _put_header(http, name, value)
            http.endheaders()
            for part in request.body:
                http.send(part)
        except OSError:
            raise
        except BaseException:
            self.pool.discard(connection)
            raise

    def refusal(self, connection: Connection, error: OSError) -> None:
        """Raise what an interrupted send means.

        A server that refuses a body answers before it has read it, so an answer may be there.
        """
        if connection.http.sock is None:
            self.pool.discard(connection)
            raise Unavailable(f"sending failed: {error}") from error  # it names the address
        connection.set_timeout(REFUSAL_TIMEOUT_S)
        try:
            self.read_head(connection).abandon()
        except Unavailable:
            raise _unavailable("sending failed", error, self.pool.url) from error
        raise _unavailable(
            "the server did not take the whole body", error, self.pool.url
        ) from error

    def read_head(self, connection: Connection) -> GatewayExchange:
        """Read the answer's head; raises its error, with the connection settled. That what the
        caller knows has not changed is none: an answer without a body.
        """
        sock = connection.http.sock
        try:
            with _translated("no answer", self.pool.url):
                response = connection.http.getresponse()
        except Unavailable as error:
            self.pool.discard(connection)
            if _may_speak_tls(connection, error.__cause__):
                told = f"{error.message}; does it speak TLS? Then write https://"
                raise Unavailable(told) from error.__cause__
            raise
        except BaseException:
            self.pool.discard(connection)
            raise
        exchange = GatewayExchange(self.pool, connection, sock, response)
        if response.status < 300 or response.status == http.HTTPStatus.NOT_MODIFIED:
            return exchange
        try:
            body = exchange.read(ERROR_BODY_BYTES_MAX)
        except ObjectCacheError:
            body = b""
        exchange.finish()
        raise parse_error(response.status, exchange.header, body, self.pool.url)


def connect(connection: Connection) -> None:
    """Connect unless that was done; the message of the `OSError` names the address."""
    http = connection.http
    if http.sock is None:
        try:
            http.connect()
        except OSError as error:
            http.close()  # a handshake that failed leaves a socket, from which no answer comes
            reason = error.strerror or str(error)
            if isinstance(error, ssl.SSLError):
                reason = f"TLS failed: {reason}{_tls_remedy(error)}"
            raise OSError(error.errno, f"{http.host}:{http.port}: {reason}") from error


def _put_header(http: http.client.HTTPConnection, name: str, value: str) -> None:
    try:
        http.putheader(name, value)
    except ValueError:  # its text has the value, which may be a credential
        raise InvalidRequest(f"header {name} would hold characters that HTTP forbids") from None


def read_whole(exchange: GatewayExchange) -> Reply:
    """Read a body to its end and let the connection go."""
    try:
        body = exchange.read()
    except BaseException:
        exchange.abandon()
        raise
    exchange.finish()
    return Reply(exchange.header, body)


def _may_speak_tls(connection: Connection, cause: BaseException | None) -> bool:
    """Whether what came first is no HTTP: TLS sends an alert, or ends the connection."""
    is_plain = not isinstance(connection.http, http.client.HTTPSConnection)
    return is_plain and not connection.reused and isinstance(cause, http.client.BadStatusLine)


def _tls_remedy(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            "; where an authority of your own signed it, name that one's certificate: in ca_file, "
            "--ca-file or AWS_CA_BUNDLE, or by the context that tls= takes"
        )
    if error.reason in NOT_TLS:
        return "; does it speak plain HTTP? Then write http://"
    return ""


@contextmanager
def _translated(what: str, url: str) -> Generator[None]:
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise _unavailable(what, error, url) from error


def _unavailable(what: str, error: BaseException, url: str) -> Unavailable:
    reason = str(error) or type(error).__name__
    return Unavailable(f"{url}: {what}: {reason}")
