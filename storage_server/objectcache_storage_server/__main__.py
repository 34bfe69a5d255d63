"""`python -m objectcache_storage_server`: run one storage server until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

import uvloop

from objectcache_schemas.errors import InvalidRequest, ObjectCacheError
from objectcache_schemas.logs import configure_logging
from objectcache_schemas.settings import Settings, parse_command_line
from objectcache_storage_server import multipart
from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.connections.server import StorageServer
from objectcache_storage_server.engines.open import open_engine
from objectcache_storage_server.service import Service
from objectcache_storage_server.tracing.export import open_export

DESCRIPTION = "Run ObjectCache's storage server: engines, deliveries and their transports."

logger = logging.getLogger("objectcache.storage_server")


async def run(settings: Settings, exit_with_stdin: bool) -> None:
    """Serve until SIGTERM, SIGINT or (if asked) the end of standard input; then drain."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if exit_with_stdin:
        loop.add_reader(sys.stdin.fileno(), _read_stdin, stop)
    for number in (signal.SIGHUP, signal.SIGUSR1):
        loop.add_signal_handler(number, _ignore)  # until there is something to do
    accounts = AccountBook.open(settings, os.environ)  # before the engine: its errors are cheap
    engine = open_engine(settings)
    multipart.create_bucket(engine)
    export = open_export(os.environ)
    service = Service(settings, engine, export.submit if export else None, accounts)
    for part in multipart.open_parts(engine):
        service.stored.part_stored(*part)
    server = StorageServer(service)
    await server.start()
    service.start_lifecycle()
    loop.add_signal_handler(signal.SIGHUP, server.reload_certificate)
    loop.add_signal_handler(signal.SIGUSR1, service.entrance.close)  # the gateways stop, too
    print(f"ready storage {settings.storage_socket}", flush=True)
    logger.info("serving with engine %s, pid %d", engine.capabilities.name, os.getpid())
    await stop.wait()
    logger.info("stopping: draining for up to %g s", settings.storage.drain_timeout_s)
    await server.drain(settings.storage.drain_timeout_s)
    service.close()
    if export is not None:
        export.close()


def _ignore() -> None:
    """What a signal does before the server serves."""


def _read_stdin(stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        stop.set()


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    try:
        settings, namespace = parse_command_line(
            "objectcache storage",
            DESCRIPTION,
            sys.argv[1:] if arguments is None else arguments,
            os.environ,
        )
        configure_logging("storage", settings.storage.log_level, settings.server.log_format)
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
