"""The gateway's audit log: a line a request, in S3's server access log format.

Lines are gathered in memory and written by a thread, every second and at the end, so that a slow
disk holds up no request. What finds no room, in memory or on the disk, is counted and left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from pathlib import Path

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.audit.audit_file import AuditFile
from objectcache_gateway.audit.audit_line import AuditEntry, audit_line
from objectcache_runtime.first_of import end
from objectcache_runtime.settings import GatewaySettings

FLUSH_INTERVAL_S = 1.0
FLUSH_BYTES = 1 << 20  # from which the writer does not wait for its interval
WAITING_BYTES_MAX = 16 << 20  # of lines that were not written yet; more are lost
REPORT_INTERVAL_S = 60.0

logger = logging.getLogger("objectcache.gateway.audit_log")


class AuditLog:
    """Gathers lines and has them written. All in the event loop but the writing itself."""

    def __init__(self, file: AuditFile) -> None:
        self._file = file
        self._file_lock = asyncio.Lock()
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self._overflown_lines = 0
        self._wake = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._reported_s = -REPORT_INTERVAL_S

    @property
    def written_lines(self) -> int:
        """Lines that are in the file."""
        return self._file.written_lines

    @property
    def lost_lines(self) -> int:
        """Lines that found no room in memory or could not be written."""
        return self._file.lost_lines + self._overflown_lines

    def start(self) -> None:
        """Begin to write now and then."""
        self._writing = asyncio.create_task(self._write_always())

    def record(self, exchange: Exchange, status: int | str, elapsed_s: float) -> None:
        """Note a request that has ended."""
        self.add(audit_line(entry_of(exchange, status, elapsed_s)))

    def add(self, line: bytes) -> None:
        """Have a line written; it is lost where too many wait for that."""
        if self._waiting_bytes + len(line) > WAITING_BYTES_MAX:
            self._overflown_lines += 1
            return
        self._lines.append(line)
        self._waiting_bytes += len(line)
        if self._waiting_bytes >= FLUSH_BYTES:
            self._wake.set()

    async def flush(self) -> None:
        """Write what is waiting."""
        async with self._file_lock:
            lines, self._lines = self._lines, []
            self._waiting_bytes = 0
            error = await asyncio.to_thread(self._file.write, lines) if lines else None
        if error is not None:
            self._report(error)

    async def close(self) -> None:
        """Write what is left, and close the file."""
        if self._writing is not None:
            await end(self._writing)
        await self.flush()
        self._file.close()

    async def _write_always(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_INTERVAL_S):
                    await self._wake.wait()
            self._wake.clear()
            # What is being written is written to its end; `close` waits for it.
            await asyncio.shield(self.flush())

    def _report(self, error: OSError) -> None:
        """Say that lines are lost, but not with every write."""
        now_s = time.monotonic()
        if now_s - self._reported_s >= REPORT_INTERVAL_S:
            self._reported_s = now_s
            logger.error(
                "gateway.audit_log cannot be written (%s); %d lines are lost so far",
                error.strerror,
                self.lost_lines,
            )


def open_audit_log(settings: GatewaySettings) -> AuditLog | None:
    """The audit log that the settings ask for."""
    if not settings.audit_log:
        return None
    path = Path(settings.audit_log).absolute()
    file = AuditFile(path, settings.audit_log_bytes_max, settings.audit_log_files_max)
    return AuditLog(file)


def entry_of(exchange: Exchange, status: int | str, elapsed_s: float) -> AuditEntry:
    """What the log says of a request."""
    request, asked = exchange.request, exchange.asked
    address = asked.address if asked else None
    transport = request.transport
    peer = transport.get_extra_info("peername") if transport else None
    tls = transport.get_extra_info("ssl_object") if transport else None
    cipher = tls.cipher() if isinstance(tls, ssl.SSLObject | ssl.SSLSocket) else None
    version, headers = request.version, request.headers
    is_presigned = "X-Amz-Signature=" in request.raw_path
    if isinstance(status, str):  # it was cut, or nobody was there to be answered
        begun = exchange.response
        status_sent = begun.status if begun is not None else None
    else:
        status_sent = status
    return AuditEntry(
        bucket_owner=exchange.bucket_owner,
        bucket=(address.bucket or "") if address else "",
        time_unix_s=time.time() - elapsed_s,
        remote_ip=str(peer[0]) if isinstance(peer, tuple) else "",
        requester=asked.identity if asked else "",
        request_id=exchange.request_id,
        operation=asked.operation if asked else None,
        method=request.method,
        key=(address.key or "") if address else "",
        raw_path=request.raw_path,
        http_version=f"HTTP/{version.major}.{version.minor}",
        status=status_sent,
        error_code=exchange.error_code,
        bytes_sent=exchange.sent_bytes,
        object_bytes=exchange.object_bytes,
        total_s=elapsed_s,
        turnaround_s=exchange.first_byte_s,
        referer=headers.get("Referer", ""),
        user_agent=headers.get("User-Agent", ""),
        version_id=exchange.query.get("versionId", ""),
        host_id="",
        is_signed=is_presigned or "Authorization" in headers,
        is_presigned=is_presigned,
        cipher_suite=cipher[0] if cipher else "",
        host=headers.get("Host", ""),
        tls_version=tls.version() or "" if cipher and tls else "",
    )
