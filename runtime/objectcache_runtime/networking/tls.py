"""TLS contexts of every process: checked at the start, replaced while running.

A context is never changed once connections were made from it. `ReloadingContext` holds the current
one and makes connections from it, so a pair of files that is renewed takes hold as a whole or not
at all, and connections that are open keep what they began with.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from objectcache_schemas.errors import InvalidRequest

FILE_BYTES_MAX = 1 << 20  # a chain has a few KiB, a bundle of authorities some hundred
# TLS 1.2 with forward secrecy and authenticated encryption only; TLS 1.3 has nothing else.
CIPHERS_OF_TLS_1_2 = "ECDHE+AESGCM:ECDHE+CHACHA20"
EXPIRY_WARNING_S = 14 * 86400.0  # renewal is due long before; a warning leaves time to look

logger = logging.getLogger("objectcache.tls")

Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """The PEM files behind a context. `names` are the settings they come from, for messages."""

    names: str  # such as "gateway.tls_certificate, gateway.tls_key"
    certificate: Path
    key: Path
    authorities: Path | None = None

    def stamp(self) -> Stamp:
        """What changes when a file is replaced or rewritten, also behind a symbolic link."""
        files = (self.certificate, self.key, self.authorities)
        return tuple(None if file is None else _file_stamp(file) for file in files)


def certificate_files(section: str, certificate: str, key: str, ca: str = "") -> CertificateFiles:
    """The files of one section's tls_* settings; the key may lie in the certificate's file."""
    names = f"{section}.tls_certificate, {section}.tls_key" + (f", {section}.tls_ca" if ca else "")
    return CertificateFiles(
        names, Path(certificate), Path(key or certificate), Path(ca) if ca else None
    )


class ReloadingContext(ssl.SSLContext):
    """A context whose connections are made from the one that was loaded last.

    `build` makes a context from the files. What it raises, `InvalidRequest`, is raised when the
    first context is made; `reload` only logs it.
    """

    def __new__(
        cls,
        protocol: int,
        build: Callable[[], tuple[ssl.SSLContext, float]],
        files: CertificateFiles,
    ) -> ReloadingContext:
        """An `ssl.SSLContext` in the eyes of event loops; nothing is made from its own settings."""
        return super().__new__(cls, protocol)

    def __init__(
        self,
        protocol: int,
        build: Callable[[], tuple[ssl.SSLContext, float]],
        files: CertificateFiles,
    ) -> None:
        self._build = build
        self._files = files
        self._stamp = files.stamp()
        self._current, self._expires_s = build()
        self._warned = False

    @property
    def expires_s(self) -> float:
        """When the certificate ends, seconds since 1970."""
        return self._expires_s

    def reload(self) -> bool:
        """Take the files as they are now. Files that make no pair are logged, and the last pair
        stays in force.
        """
        self._stamp = self._files.stamp()
        try:
            self._current, self._expires_s = self._build()
        except InvalidRequest as error:
            logger.error("certificate not reloaded, the one before stays: %s", error.message)
            return False
        self._warned = False
        logger.info("certificate %s reloaded", self._files.certificate)
        return True

    def reload_if_changed(self) -> bool:
        """`reload` where a file has changed since the last look; says whether it took hold."""
        return self._files.stamp() != self._stamp and self.reload()

    def warn_of_expiry(self, now_s: float) -> None:
        """Log once that the certificate ends soon."""
        if self._expires_s - now_s < EXPIRY_WARNING_S and not self._warned:
            self._warned = True
            days = max(0.0, self._expires_s - now_s) / 86400
            logger.warning("certificate %s ends in %.1f days", self._files.certificate, days)

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """As `ssl.SSLContext` does, from the current context. Event loops call this."""
        return self._current.wrap_bio(*arguments, **named)

    def wrap_socket(self, *arguments: Any, **named: Any) -> ssl.SSLSocket:
        """As `ssl.SSLContext` does, from the current context."""
        return self._current.wrap_socket(*arguments, **named)

    def __repr__(self) -> str:
        return f"<ReloadingContext {self._files.certificate}>"


async def keep_reloading(contexts: Iterable[ReloadingContext], interval_s: float) -> None:
    """Look at the files of `contexts` again and again, until cancelled."""
    watched = list(contexts)
    while True:
        for context in watched:
            context.reload_if_changed()
            context.warn_of_expiry(time.time())
        await asyncio.sleep(interval_s)


def https_context(files: CertificateFiles) -> ReloadingContext:
    """For a server of HTTP/1.1. Raises `InvalidRequest` naming the settings and the remedy."""

    def build() -> tuple[ssl.SSLContext, float]:
        context, expires_s = _with_pair(ssl.PROTOCOL_TLS_SERVER, files)
        context.set_alpn_protocols(["http/1.1"])
        return context, expires_s

    return ReloadingContext(ssl.PROTOCOL_TLS_SERVER, build, files)


def mutual_server_context(files: CertificateFiles) -> ReloadingContext:
    """For a server that serves only peers with a certificate of `files.authorities`."""

    def build() -> tuple[ssl.SSLContext, float]:
        context, expires_s = _with_pair(ssl.PROTOCOL_TLS_SERVER, files)
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, files)
        return context, expires_s

    return ReloadingContext(ssl.PROTOCOL_TLS_SERVER, build, files)


def mutual_client_context(files: CertificateFiles) -> ReloadingContext:
    """For a client that shows a certificate, and checks the server's and its name."""

    def build() -> tuple[ssl.SSLContext, float]:
        context, expires_s = _with_pair(ssl.PROTOCOL_TLS_CLIENT, files)
        _trust(context, files)
        return context, expires_s

    return ReloadingContext(ssl.PROTOCOL_TLS_CLIENT, build, files)


def _with_pair(protocol: int, files: CertificateFiles) -> tuple[ssl.SSLContext, float]:
    """A context with the certificate and its key, and when the certificate ends."""
    expires_s = _check_certificate(files, time.time())
    if b"ENCRYPTED" in _read(files, files.key):  # OpenSSL would ask on the terminal
        raise InvalidRequest(
            f"{files.names}: {files.key} is encrypted; give a key without a passphrase"
        )
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS_OF_TLS_1_2)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        context.load_cert_chain(files.certificate, files.key)
    except ssl.SSLError as error:
        raise InvalidRequest(f"{files.names}: {_pair_failure(files, error)}") from error
    except OSError as error:
        raise InvalidRequest(f"{files.names}: {files.key}: {error.strerror}") from error
    return context, expires_s


def _pair_failure(files: CertificateFiles, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"{files.key} is not the key of {files.certificate}; give the two of one pair"
    return f"{files.key} holds no usable private key in PEM"


def _check_certificate(files: CertificateFiles, now_s: float) -> float:
    """When the certificate ends. Raises `InvalidRequest` where it is none, or not valid now."""
    from cryptography import x509  # only who is given a certificate needs it

    data = _read(files, files.certificate)
    try:
        certificate = x509.load_pem_x509_certificates(data)[0]
    except ValueError as error:
        raise InvalidRequest(
            f"{files.names}: {files.certificate} holds no certificate in PEM"
        ) from error
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now_s >= ends.timestamp():
        raise InvalidRequest(
            f"{files.names}: {files.certificate} ended at {ends.isoformat()}; renew it"
        )
    if now_s < begins.timestamp():
        raise InvalidRequest(
            f"{files.names}: {files.certificate} begins at {begins.isoformat()}; check the clock"
        )
    return ends.timestamp()


def _trust(context: ssl.SSLContext, files: CertificateFiles) -> None:
    """Believe the authorities of `files`, and no others."""
    assert files.authorities is not None
    try:
        context.load_verify_locations(cadata=_read(files, files.authorities).decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"{files.names}: {files.authorities} holds no certificate in PEM"
        ) from error


def _read(files: CertificateFiles, file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidRequest(f"{files.names}: {file}: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise InvalidRequest(f"{files.names}: {file} is over {FILE_BYTES_MAX} bytes")
    return data


def _file_stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
