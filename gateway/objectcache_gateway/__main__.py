"""`python -m objectcache_gateway`: run one gateway until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys

import uvloop

from objectcache_gateway.server import Gateway, check_parser
from objectcache_gateway.signing.credentials import (
    CredentialStore,
    RootCredentials,
    load_or_create_root,
)
from objectcache_gateway.tracing import open_tracer
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError, Unavailable
from objectcache_schemas.settings import GatewaySettings, Settings, parse_command_line

DESCRIPTION = "Run ObjectCache's gateway: S3 and the KV extension over HTTP."
OTHER_DESCRIPTORS = 64  # listener, event loop, logs, and sockets on their way to the storage server

logger = logging.getLogger("objectcache.gateway")


def parse_listen(listen: str) -> tuple[str, int]:
    """Host and port of `gateway.listen`. Raises `InvalidRequest`."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise InvalidRequest(f"gateway.listen must be host:port, got {listen!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def run(settings: Settings, root: RootCredentials, exit_with_stdin: bool) -> None:
    """Serve until SIGTERM, SIGINT or (if asked) the end of standard input; then drain."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if exit_with_stdin:
        loop.add_reader(sys.stdin.fileno(), _read_stdin, stop)
    host, port = parse_listen(settings.gateway.listen)
    tracer = open_tracer(os.environ)
    gateway = Gateway(settings, CredentialStore(root), tracer)
    try:
        port = await gateway.start(host, port)
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unavailable(f"cannot listen on {settings.gateway.listen}: {reason}") from error
    shown_host = f"[{host}]" if ":" in host else host
    logger.info("root credentials come from %s", root.source)
    print(f"ready gateway http://{shown_host}:{port}", flush=True)
    await stop.wait()
    logger.info("stopping: draining for up to %g s", settings.gateway.drain_timeout_s)
    await gateway.drain(settings.gateway.drain_timeout_s)
    tracer.close()


def _read_stdin(stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        stop.set()


def raise_descriptor_limit() -> int:
    """Use as many file descriptors as the system allows this process; returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def warn_of_descriptor_limit(descriptors_max: int, gateway: GatewaySettings) -> None:
    """Log a warning where the descriptors do not suffice for the connections that are allowed."""
    connections_max = gateway.connections_max + gateway.storage_connections_max
    if descriptors_max < connections_max + OTHER_DESCRIPTORS:
        logger.warning(
            "%d file descriptors do not suffice for gateway.connections_max and "
            "gateway.storage_connections_max, which are %d together; raise the hard limit "
            "(ulimit -Hn) or lower the settings",
            descriptors_max,
            connections_max,
        )


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    try:
        settings, namespace = parse_command_line(
            "objectcache gateway",
            DESCRIPTION,
            sys.argv[1:] if arguments is None else arguments,
            os.environ,
        )
        check_parser()
        logging.basicConfig(
            level=settings.gateway.log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        warn_of_descriptor_limit(raise_descriptor_limit(), settings.gateway)
        data_dir = settings.data_dir if settings.server.data_dir else None
        root = load_or_create_root(data_dir, os.environ)
        uvloop.run(run(settings, root, namespace.exit_with_stdin))
    except InvalidRequest as error:
        print(f"objectcache gateway: {error}", file=sys.stderr)
        return 2
    except ObjectCacheError as error:
        print(f"objectcache gateway: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
