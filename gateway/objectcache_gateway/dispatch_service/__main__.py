"""`python -m objectcache_gateway.dispatch_service`: serve until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
from pathlib import Path

import uvloop

from objectcache_gateway.connections.http_parser import check_parser
from objectcache_gateway.connections.https_contexts import server_context
from objectcache_gateway.dispatch_service.cluster_state import ClusterState
from objectcache_gateway.dispatch_service.server import DispatchServer
from objectcache_gateway.dispatch_service.token import TokenCheck, read_token
from objectcache_gateway.dispatch_service.topology_file import read_topology
from objectcache_runtime.logs import configure_logging
from objectcache_runtime.networking.listening import HostPort, open_listeners, port_of
from objectcache_runtime.networking.tls import keep_reloading
from objectcache_runtime.settings import (
    DispatchServiceSettings,
    Settings,
    check_paths,
    parse_command_line,
)
from objectcache_runtime.told_to_stop import stop_signals
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError

DESCRIPTION = "Say over HTTP which workers serve a request, and over whose storage NIC it is read."
FLAGS = {  # short for a setting
    "--listen": ("dispatch.listen", "HOST:PORT", "default 127.0.0.1:9010; port 0 is a free one"),
    "--token-file": ("dispatch.token_file", "FILE", "whose token callers must show"),
    "--topology": ("dispatch.topology", "FILE.toml", "nodes that need not register"),
}

logger = logging.getLogger("objectcache.gateway.dispatch")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what is short for a setting."""
    for flag, (setting, value, text) in FLAGS.items():
        parser.add_argument(
            flag,
            dest="set",
            action="append",
            default=argparse.SUPPRESS,
            type=f"{setting}={{}}".format,
            metavar=value,
            help=text,
        )


def token_of(settings: DispatchServiceSettings) -> str | None:
    """What callers must show; None where none is wanted. Raises `InvalidRequest`."""
    if settings.token_file:
        return read_token(Path(settings.token_file))
    if settings.anonymous:
        return None
    raise InvalidRequest(
        "dispatch.token_file is not set; give --token-file FILE, or --set dispatch.anonymous=true "
        "to let anybody in who reaches the port"
    )


async def run(settings: Settings, token: str | None) -> None:
    """Serve until SIGTERM or SIGINT."""
    dispatch = settings.dispatch
    stop = asyncio.Event()
    stop_signals(stop)
    context = server_context(dispatch.tls_certificate, dispatch.tls_key, "dispatch")
    listed = read_topology(Path(dispatch.topology)) if dispatch.topology else ()
    address = HostPort.parse("dispatch.listen", dispatch.listen)
    if token is None and not address.is_loopback:
        logger.warning(
            "dispatch.listen %s is no loopback address and dispatch.anonymous is set: anybody who "
            "reaches the port may register nodes and relays, and so steer routes",
            address,
        )
    elif context is None and not address.is_loopback:
        logger.warning(
            "dispatch.listen %s is no loopback address and dispatch.tls_certificate is not set: "
            "tokens cross the network in plain text",
            address,
        )
    server = DispatchServer(ClusterState(dispatch, listed), TokenCheck(token))
    listeners = open_listeners(address, "dispatch.listen")
    shown = address.with_port(port_of(listeners[0]))
    await server.start(listeners, context)
    print(f"ready dispatch {'http' if context is None else 'https'}://{shown}", flush=True)
    contexts = [] if context is None else [context]
    watch = asyncio.create_task(keep_reloading(contexts, settings.gateway.tls_reload_s))
    await stop.wait()
    watch.cancel()
    await server.close()


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    try:
        settings, _ = parse_command_line(
            "objectcache dispatch",
            DESCRIPTION,
            sys.argv[1:] if arguments is None else arguments,
            os.environ,
            add_flags,
        )
        check_paths(settings, "dispatch")
        check_parser()
        configure_logging("dispatch", settings.dispatch.log_level, settings.server.log_format)
        # What was imported stays: no collection walks over it, as the process runs or ends.
        gc.freeze()
        uvloop.run(run(settings, token_of(settings.dispatch)))
    except InvalidRequest as error:
        print(f"objectcache dispatch: {error}", file=sys.stderr)
        return 2
    except ObjectCacheError as error:
        print(f"objectcache dispatch: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
