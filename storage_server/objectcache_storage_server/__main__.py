"""`python -m objectcache_storage_server`: run one storage server until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

import uvloop

from objectcache_runtime.first_of import first_of
from objectcache_runtime.logs import configure_logging
from objectcache_runtime.settings import Settings, check_paths, parse_command_line
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError
from objectcache_storage_server.accounts import lost_accounts
from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.connections.server import StorageServer
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.open_engine import open_engine
from objectcache_storage_server.heap import HeapTrimmer, bound_arenas
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
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if exit_with_stdin:
        loop.add_reader(sys.stdin.fileno(), _read_stdin, orphaned)
    for number in (signal.SIGHUP, signal.SIGUSR1):
        loop.add_signal_handler(number, _ignore)  # until there is something to do
    accounts: AccountBook | None = None
    if not lost_accounts.are_absent(settings):
        accounts = AccountBook.open(settings, os.environ)  # before the engine: its errors are cheap
    engine = open_engine(settings)
    if accounts is None:
        accounts = _first_accounts(settings, engine)
    multipart.create_bucket(engine)
    export = open_export(os.environ)
    service = Service(settings, engine, export.submit if export else None, accounts)
    count_uploads(service.store)
    server = StorageServer(service)
    await server.start()
    service.start_lifecycle()
    trimmer = HeapTrimmer()
    loop.add_signal_handler(signal.SIGHUP, server.reload_certificate)
    loop.add_signal_handler(signal.SIGUSR1, service.gates.entrance.close)  # the gateways stop, too
    print(f"ready storage {settings.storage_socket}", flush=True)
    logger.info("serving with engine %s, pid %d", engine.capabilities.name, os.getpid())
    await first_of(stop.wait(), orphaned.wait())
    if not stop.is_set():
        await _outlast_gateways(service, server, stop)
    logger.info("stopping: draining for up to %g s", settings.storage.drain_timeout_s)
    await server.drain(settings.storage.drain_timeout_s)
    trimmer.close()
    service.close()
    if export is not None:
        export.close()


def _first_accounts(settings: Settings, engine: Engine) -> AccountBook:
    """The accounts of a data directory that has none, if there is no bucket of a user."""
    try:
        lost_accounts.check_owners(settings, (bucket.owner for bucket in engine.each_bucket()))
        return AccountBook.open(settings, os.environ)
    except BaseException:
        engine.close()
        raise


def _ignore() -> None:
    """What a signal does before the server serves."""


def _read_stdin(ended: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        ended.set()


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
