"""A gateway process's own socket, for the admin server: metrics, the log's level, what goes on.

HTTP on RUN_DIR/gateway-N.sock, mode 0600, so for processes of the same user only:

    GET /metrics     Prometheus' text format
    GET /state       `GatewayState` as JSON
    PUT /log-level   {"level": "debug"}; until the process ends
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from objectcache_gateway.admin.serving.admin_connections import AdminConnection
from objectcache_gateway.admin.serving.media_types import PROMETHEUS_TEXT
from objectcache_gateway.server import Gateway
from objectcache_runtime.logs import log_level, set_log_level
from objectcache_runtime.networking.socket_paths import check_socket_path
from objectcache_schemas.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from objectcache_runtime.metrics.metric_families import MetricsPage

BODY_BYTES_MAX = 1024
BACKLOG = 16

Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]


class ProcessLogLevel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of PUT /log-level, and its answer."""

    level: str


class GatewayState(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /state."""

    pid: int
    requests_in_flight: int
    connections: int
    draining: bool
    log_level: str
    crowded: str = ""  # whom it turned away lately; empty where that were few


class Control:
    """The socket and what it answers; `close` ends it."""

    def __init__(self, gateway: Gateway, path: Path) -> None:
        self._gateway = gateway
        self._path = path
        self._page: MetricsPage | None = None
        self._server = web.Server(self._answer, access_log=None)
        self._listener: asyncio.Server | None = None
        self._inode = 0
        self._routes: dict[tuple[str, str], Handler] = {
            ("GET", "/metrics"): self._metrics,
            ("GET", "/state"): self._state,
            ("PUT", "/log-level"): self._log_level,
        }

    async def start(self) -> None:
        """Listen. Raises `InvalidRequest` for a path that is too long, `Unavailable` where the
        socket cannot be made.
        """
        path = self._path
        check_socket_path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.unlink(missing_ok=True)
            before = os.umask(0o177)  # it is nobody else's for not a moment
            try:
                self._listener = await asyncio.get_running_loop().create_unix_server(
                    lambda: AdminConnection(self._server), str(path), backlog=BACKLOG
                )
            finally:
                os.umask(before)
            self._inode = path.stat().st_ino
        except OSError as error:
            raise Unavailable(f"cannot listen on {path}: {error.strerror}") from error

    async def close(self) -> None:
        """Answer no more, and remove the socket, unless this process's successor has taken it."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink()
        await self._server.shutdown(timeout=0.1)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        handler = self._routes.get((request.method, request.path))
        if handler is None:
            return web.Response(status=404, text="no such resource\n")
        try:
            return await handler(request)
        except InvalidRequest as error:
            return web.Response(status=400, text=f"{error}\n")

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        # In a thread: the page takes milliseconds where there are many tenants.
        text = await asyncio.to_thread(self._metrics_text)
        return web.Response(body=text, headers={"Content-Type": PROMETHEUS_TEXT})

    def _metrics_text(self) -> bytes:
        if self._page is None:
            from objectcache_gateway.metrics.families import gateway_page

            self._page = gateway_page(self._gateway.counts, self._gateway.levels)
        return self._page.text()

    async def _state(self, request: web.BaseRequest) -> web.Response:
        levels = self._gateway.levels()
        return _json(
            GatewayState(
                pid=os.getpid(),
                requests_in_flight=levels.requests_in_flight,
                connections=levels.connections,
                draining=levels.draining,
                log_level=log_level(),
                crowded=levels.crowded,
            )
        )

    async def _log_level(self, request: web.BaseRequest) -> web.Response:
        if (request.content_length or 0) > BODY_BYTES_MAX:
            raise InvalidRequest(f"the body is over {BODY_BYTES_MAX} bytes")
        try:
            asked = msgspec.json.decode(await request.read(), type=ProcessLogLevel)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the body must be like {{'level': 'debug'}}: {error}") from error
        set_log_level(asked.level)
        return _json(ProcessLogLevel(log_level()))

    def __repr__(self) -> str:
        return f"<Control {self._path}>"


async def start_control(gateway: Gateway, path: Path) -> Control:
    """Serve a gateway's control socket; the caller closes it. Raises as `Control.start`."""
    control = Control(gateway, path)
    await control.start()
    return control


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
