"""`python -m objectcache_gateway.admin`: run the admin API until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import uvloop

from objectcache_gateway.admin.api import ROUTES
from objectcache_gateway.admin.server import AdminServer
from objectcache_gateway.admin.serving.accounts_view import AccountsView
from objectcache_gateway.admin.serving.change_audit import ChangeAudit
from objectcache_gateway.admin.serving.gateway_processes import GatewayProcesses
from objectcache_gateway.admin.serving.routes import Reach
from objectcache_gateway.connections.http_parser import check_parser
from objectcache_gateway.connections.https_contexts import server_context
from objectcache_gateway.signing.credentials import RootCredentials, load_or_create_root
from objectcache_gateway.start_word import add_start_argument, wait_for_word
from objectcache_gateway.storage.follow_servers import ServerFollower
from objectcache_gateway.storage.storage_address import StorageAddresses
from objectcache_gateway.storage.storage_fleet import StorageFleet
from objectcache_runtime.logs import configure_logging
from objectcache_runtime.networking.listening import HostPort, open_listeners, port_of
from objectcache_runtime.networking.tls import ReloadingContext, keep_reloading
from objectcache_runtime.settings import Settings, check_paths, parse_command_line
from objectcache_runtime.told_to_stop import end_of_stdin, stop_signals
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError, Unavailable

DESCRIPTION = "Run ObjectCache's admin API: users, buckets, health and metrics over HTTP."
STORAGE_CONNECTIONS_MAX = 32
STORAGE_TIMEOUT_S = 30.0
AUTO, OFF, LOOPBACK = "auto", "off", "127.0.0.1"
PORT_MAX = 65_535

logger = logging.getLogger("objectcache.gateway.admin")


def admin_address(settings: Settings) -> HostPort | None:
    """Where to listen beside the unix socket; None for nowhere. Raises `InvalidRequest`.

    `auto` is loopback, one port above the gateway's; a free port where the gateway's is.
    """
    listen = settings.admin.listen
    if listen == OFF:
        return None
    if listen != AUTO:
        return HostPort.parse("admin.listen", listen)
    port = HostPort.parse("gateway.listen", settings.gateway.listen).port
    return HostPort(LOOPBACK, port + 1 if 0 < port < PORT_MAX else 0)


def listeners_of(settings: Settings) -> list[socket.socket]:
    """The sockets of `admin.listen`. With `auto`, a port that is in use costs only a warning."""
    address = admin_address(settings)
    if address is None:
        return []
    try:
        return open_listeners(address, "" if settings.admin.listen == AUTO else "admin.listen")
    except Unavailable as error:
        if settings.admin.listen != AUTO:
            raise
        logger.warning(
            "%s: the admin API is on %s only; admin.listen says where else",
            error.message,
            settings.admin_socket,
        )
        return []


def warn_of_plain_text(settings: Settings) -> None:
    """Log a warning where tokens would cross a network unencrypted."""
    address = admin_address(settings)
    if address is None or settings.admin.tls_certificate or address.is_loopback:
        return
    logger.warning(
        "admin.listen %s is no loopback address and admin.tls_certificate is not set: tokens "
        "cross the network in plain text",
        address,
    )


def audit_file(settings: Settings) -> Path:
    """The admin audit log's file."""
    given = settings.admin.audit_log
    return Path(given) if given else settings.data_dir / "admin-audit.log"


async def run(settings: Settings, root: RootCredentials, exit_with_stdin: bool) -> None:
    """Serve until SIGTERM, SIGINT or (if asked) the end of standard input."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    stop_signals(stop)
    if exit_with_stdin:
        end_of_stdin(stop)
    context = server_context(settings.admin.tls_certificate, settings.admin.tls_key, "admin")
    listeners = listeners_of(settings)
    addresses = StorageAddresses(settings)
    server = make_server(settings, root, addresses)
    await server.start(settings.admin_socket)
    servers = ServerFollower(server.storage, addresses.remote)
    servers.start()
    for listener in listeners:
        server.listen(listener, context)
    scheme = "https" if context else "http"
    print(f"ready admin {_url(settings, listeners, scheme)}", flush=True)
    contexts = [*([context] if context is not None else []), *addresses.contexts]
    if contexts:
        loop.add_signal_handler(signal.SIGHUP, _reload, contexts)
    watch = asyncio.create_task(keep_reloading(contexts, settings.gateway.tls_reload_s))
    await stop.wait()
    watch.cancel()
    await servers.close()
    await server.close()


def make_server(
    settings: Settings, root: RootCredentials, addresses: StorageAddresses
) -> AdminServer:
    """The server and what it reaches, not yet listening. Call it within an event loop."""
    storage = StorageFleet(
        addresses.configured(),
        settings.limits,
        STORAGE_CONNECTIONS_MAX,
        STORAGE_TIMEOUT_S,
        is_steady=True,
    )
    gateway = settings.gateway
    audit_log = ChangeAudit(
        audit_file(settings), gateway.audit_log_bytes_max, gateway.audit_log_files_max
    )
    reach = Reach(
        settings,
        storage,
        AccountsView(storage),
        GatewayProcesses(settings),
        root.access_key,
        audit_log,
    )
    return AdminServer(reach, root, audit_log, ROUTES)


def _reload(contexts: list[ReloadingContext]) -> None:
    for context in contexts:
        context.reload()


def _url(settings: Settings, listeners: list[socket.socket], scheme: str) -> str:
    if not listeners:
        return f"unix://{settings.admin_socket}"
    host = str(listeners[0].getsockname()[0])
    return f"{scheme}://{HostPort(host, port_of(listeners[0]))}"


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    try:
        settings, namespace = parse_command_line(
            "objectcache admin serve",
            DESCRIPTION,
            sys.argv[1:] if arguments is None else arguments,
            os.environ,
            add_start_argument,
        )
        if not namespace.exit_with_stdin:  # a supervisor has looked already
            check_paths(settings, "admin")
        check_parser()
        configure_logging("admin", settings.admin.log_level, settings.server.log_format)
        if namespace.start_with_stdin and not wait_for_word():
            return 0
        warn_of_plain_text(settings)
        root = load_or_create_root(settings.data_dir, os.environ)
        # What was imported stays: no collection walks over it, as the process runs or ends.
        gc.freeze()
        uvloop.run(run(settings, root, namespace.exit_with_stdin))
    except InvalidRequest as error:
        print(f"objectcache admin: {error}", file=sys.stderr)
        return 2
    except ObjectCacheError as error:
        print(f"objectcache admin: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
