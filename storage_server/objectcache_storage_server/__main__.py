"""`python -m objectcache_storage_server`: run one storage server until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys

import uvloop

from objectcache_runtime.first_of import first_of
from objectcache_runtime.logs import configure_logging
from objectcache_runtime.settings import Settings, check_paths, parse_command_line
from objectcache_runtime.told_to_stop import end_of_stdin, stop_signals
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError
from objectcache_storage_server.connections.server import StorageServer
from objectcache_storage_server.heap import HeapTrimmer, bound_arenas
from objectcache_storage_server.open_server import open_server
from objectcache_storage_server.s3 import multipart
from objectcache_storage_server.s3.upload_requests import count_uploads
from objectcache_storage_server.service import Service
from objectcache_storage_server.tracing.export import open_export
from objectcache_storage_server.transports.fabrics import (
    check_nixl_devices,
    warn_of_unserved_devices,
)

DESCRIPTION = "Run ObjectCache's storage server: engines, deliveries and their transports."

# NIXL writes lines of its own to standard error, without bound, of what clients send.
NIXL_LOG_LEVEL = "NIXL_LOG_LEVEL"

logger = logging.getLogger("objectcache.storage_server")


async def run(settings: Settings, exit_with_stdin: bool) -> None:
    """Serve until SIGTERM, SIGINT or (if asked) the end of standard input; then drain."""
    check_nixl_devices(settings.storage)
    warn_of_unserved_devices(settings.storage)
    stop, orphaned = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    stop_signals(stop)
    if exit_with_stdin:
        end_of_stdin(orphaned)
    for number in (signal.SIGHUP, signal.SIGUSR1):
        loop.add_signal_handler(number, _ignore)  # until there is something to do
    opened = open_server(settings, os.environ)
    engine = opened.engine
    multipart.create_bucket(engine)
    export = open_export(os.environ)
    service = Service(
        settings,
        engine,
        export.submit if export else None,
        opened.accounts,
        opened.shared,
        opened.documents,
    )
    count_uploads(service.uploads)
    server = StorageServer(service)
    await server.start()
    service.own.announce()
    service.start_lifecycle()
    trimmer = HeapTrimmer()
    loop.add_signal_handler(signal.SIGHUP, server.reload_certificate)
    loop.add_signal_handler(signal.SIGUSR1, service.gates.entrance.close)  # the gateways stop, too
    print(f"ready storage {settings.storage_socket}", flush=True)
    logger.info("serving with engine %s, pid %d", engine.capabilities.name, os.getpid())
    await first_of(stop.wait(), orphaned.wait())
    if not stop.is_set():
        await _outlast_gateways(service, server, stop)
    await service.own.leave()
    logger.info("stopping: draining for up to %g s", settings.storage.drain_timeout_s)
    await server.drain(settings.storage.drain_timeout_s)
    trimmer.close()
    service.close()
    if export is not None:
        export.close()


def _ignore() -> None:
    """What a signal does before the server serves."""


async def _outlast_gateways(service: Service, server: StorageServer, stop: asyncio.Event) -> None:
    """Serve on while gateways drain that lost the same supervisor: they must be outlasted."""
    bound_s = service.settings.gateway.drain_timeout_s
    logger.info("the supervisor has ended: serving gateways that drain for up to %g s", bound_s)
    await first_of(stop.wait(), server.left_by_gateways(), timeout_s=bound_s)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    try:
        settings, namespace = parse_command_line(
            "objectcache storage",
            DESCRIPTION,
            sys.argv[1:] if arguments is None else arguments,
            os.environ,
        )
        if not namespace.exit_with_stdin:  # a supervisor has looked already
            check_paths(settings, "server", "storage", "scheduler")
        configure_logging("storage", settings.storage.log_level, settings.server.log_format)
        bound_arenas()
        os.environ.setdefault(NIXL_LOG_LEVEL, "FATAL")
        # What was imported stays: no collection walks over it, as the process runs or ends.
        gc.freeze()
        uvloop.run(run(settings, namespace.exit_with_stdin))
    except InvalidRequest as error:
        print(f"objectcache storage: {error}", file=sys.stderr)
        return 2
    except ObjectCacheError as error:
        print(f"objectcache storage: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
