"""`python -m objectcache_gateway`: run one gateway until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import sys

import uvloop

from objectcache_gateway.connections.accept_connections import find_listeners
from objectcache_gateway.connections.http_parser import check_parser
from objectcache_gateway.connections.https_contexts import server_context
from objectcache_gateway.control_socket import start_control
from objectcache_gateway.request_spans import open_tracer
from objectcache_gateway.server import Gateway
from objectcache_gateway.signing.credentials import (
    CredentialStore,
    RootCredentials,
    load_or_create_root,
)
from objectcache_gateway.start_word import add_start_argument, wait_for_word
from objectcache_runtime.logs import configure_logging
from objectcache_runtime.networking.tls import ReloadingContext, keep_reloading
from objectcache_runtime.settings import Settings, check_paths, parse_command_line
from objectcache_runtime.told_to_stop import end_of_stdin, stop_signals
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError

DESCRIPTION = "Run ObjectCache's gateway: S3 and the KV extension over HTTP."
OTHER_DESCRIPTORS = 64  # listener, event loop, logs, and sockets on their way to the storage server

logger = logging.getLogger("objectcache.gateway")


async def run(
    settings: Settings, root: RootCredentials, started: argparse.Namespace, connections_max: int
) -> None:
    """Serve until SIGTERM, SIGINT or (if asked) the end of standard input; then drain."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    stop_signals(stop)
    if started.exit_with_stdin:
        end_of_stdin(stop)
    tls = server_context(settings.gateway.tls_certificate, settings.gateway.tls_key)
    contexts: list[ReloadingContext] = []
    loop.add_signal_handler(signal.SIGHUP, _reload, contexts)
    listeners, shown = find_listeners(settings.gateway.listen, started.listen_fd, os.environ)
    tracer = open_tracer(os.environ)
    gateway = Gateway(settings, CredentialStore(root), tracer, connections_max)
    contexts += [*([tls] if tls is not None else []), *gateway.storage_addresses.contexts]
    await gateway.start(listeners, tls)
    control = None
    if settings.server.run_dir or settings.server.data_dir:  # a gateway alone may have neither
        control = await start_control(gateway, settings.gateway_socket(started.number))
    reloading = asyncio.create_task(keep_reloading(contexts, settings.gateway.tls_reload_s))
    logger.info("root credentials come from %s", root.source)
    print(f"ready gateway {'https' if tls else 'http'}://{shown}", flush=True)
    await stop.wait()
    logger.info("stopping: draining for up to %g s", settings.gateway.drain_timeout_s)
    await gateway.drain(settings.gateway.drain_timeout_s)
    if control is not None:
        await control.close()
    reloading.cancel()
    tracer.close()


def _reload(contexts: list[ReloadingContext]) -> None:
    for context in contexts:
        context.reload()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a supervisor says to one gateway of several."""
    add_start_argument(parser)
    parser.add_argument(
        "--listen-fd",
        action="append",
        type=int,
        default=[],
        metavar="N",
        help="serve this listening socket, in place of gateway.listen; may be repeated",
    )
    parser.add_argument(
        "--number", type=int, default=0, metavar="I", help="which of several gateways this is"
    )


def raise_descriptor_limit() -> int:
    """Use as many file descriptors as the system allows this process; returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def connections_that_fit(descriptors_max: int, settings: Settings) -> int:
    """`gateway.connections_max`, or how many the descriptors suffice for where those are fewer,
    which is logged.
    """
    gateway = settings.gateway
    others = gateway.storage_connections_max + settings.storage.sessions_max + OTHER_DESCRIPTORS
    if descriptors_max >= gateway.connections_max + others:
        return gateway.connections_max
    fitting = max(descriptors_max - others, descriptors_max // 4)
    logger.warning(
        "%d file descriptors suffice for %d client connections, not for gateway.connections_max, "
        "%d, beside %d others (gateway.storage_connections_max, storage.sessions_max); raise the "
        "hard limit (ulimit -Hn) or lower the settings",
        descriptors_max,
        fitting,
        gateway.connections_max,
        others,
    )
    return fitting


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    try:
        settings, namespace = parse_command_line(
            "objectcache gateway",
            DESCRIPTION,
            sys.argv[1:] if arguments is None else arguments,
            os.environ,
            add_arguments,
        )
        if not namespace.exit_with_stdin:  # a supervisor has looked already
            check_paths(settings, "gateway")
        check_parser()
        configure_logging(
            f"gateway-{namespace.number}", settings.gateway.log_level, settings.server.log_format
        )
        if namespace.start_with_stdin and not wait_for_word():
            return 0
        connections_max = connections_that_fit(raise_descriptor_limit(), settings)
        data_dir = settings.data_dir if settings.server.data_dir else None
        root = load_or_create_root(data_dir, os.environ)
        # What was imported stays: no collection walks over it, as the process runs or ends.
        gc.freeze()
        uvloop.run(run(settings, root, namespace, connections_max))
    except InvalidRequest as error:
        print(f"objectcache gateway: {error}", file=sys.stderr)
        return 2
    except ObjectCacheError as error:
        print(f"objectcache gateway: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
