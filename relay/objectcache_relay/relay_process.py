"""From a command line to a process that serves until it is told to stop: relay or fetcher."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import uvloop

from objectcache.channel.access_key import SigningKey
from objectcache.channel.authorities import ca_file_of, client_context
from objectcache.channel.credentials_file import check_not_for_all, read_credentials
from objectcache.channel.endpoint import Endpoint
from objectcache_gateway.connections.http_parser import check_parser
from objectcache_gateway.connections.https_contexts import server_context
from objectcache_relay.decoding.worker_pool import WorkerPool
from objectcache_relay.dispatch_report import is_everywhere
from objectcache_relay.landing.forward_spans import open_tracer
from objectcache_relay.metrics_port import MetricsPort
from objectcache_relay.relay_families import relay_page
from objectcache_relay.server import Relay
from objectcache_relay.sessions import EngineSocket
from objectcache_relay.watch_upstream import UpstreamWatch
from objectcache_runtime.logs import configure_logging
from objectcache_runtime.metrics.metric_families import MetricsPage
from objectcache_runtime.networking.listening import HostPort, open_listeners, port_of
from objectcache_runtime.networking.tls import keep_reloading
from objectcache_runtime.settings import (
    Settings,
    check_paths,
    each_setting,
    parse_command_line,
)
from objectcache_runtime.told_to_stop import end_of_stdin, stop_signals
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError
from objectcache_schemas.limits import ROUTE_WORDS

# NIXL writes lines of its own to standard error, without bound, of what engines send.
NIXL_LOG_LEVEL = "NIXL_LOG_LEVEL"

logger = logging.getLogger("objectcache.relay")


class Reporter(Protocol):
    """Says somewhere how busy the process is, until it is stopped."""

    async def stop(self) -> None:
        """Say no more."""
        ...


class ForwardingProcess(ABC):
    """What a relay's process and a fetcher's differ in. `name` is the command, and the section of
    settings that is its alone.
    """

    name: ClassVar[str]
    description: ClassVar[str]

    # Settings that say nothing to this process, as SECTION or SECTION.KEY.
    without_effect: ClassVar[tuple[str, ...]]

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @property
    @abstractmethod
    def listen(self) -> str:
        """Where it serves."""

    @property
    @abstractmethod
    def metrics_listen(self) -> str:
        """Where it serves metrics, or off."""

    @property
    @abstractmethod
    def log_level(self) -> str:
        """Of what it logs."""

    @property
    @abstractmethod
    def engines(self) -> EngineSocket | None:
        """Where engines of its host join. Raises `InvalidRequest`."""

    async def pool(self) -> WorkerPool | None:
        """Workers that write into engines' memory, at work. Raises `Unavailable`."""
        return None

    def prepare(self, listening: HostPort, scheme: str) -> None:  # noqa: B027 - most need nothing
        """It is about to serve there. Raises `InvalidRequest` for settings that cannot be used."""

    def reporters(self, relay: Relay, can_serve: Callable[[], bool]) -> Sequence[Reporter]:
        """Who tells others of it, at work."""
        return ()


def job_key(settings: Settings, environment: Mapping[str, str], name: str = "relay") -> SigningKey:
    """The job's access key. Raises `InvalidRequest` where none is given."""
    file = settings.relay.credentials
    if file:
        check_not_for_all("relay.credentials", Path(file))
        return SigningKey(*read_credentials(Path(file)), None)
    try:
        return SigningKey(
            environment["OBJECTCACHE_ACCESS_KEY"], environment["OBJECTCACHE_SECRET_KEY"], None
        )
    except KeyError as error:
        raise InvalidRequest(
            f"set relay.credentials, or {error.args[0]}: a {name} has the job's access key"
        ) from None


def parse_endpoint(endpoint: str) -> Endpoint:
    """Where relay.endpoint is. Raises `InvalidRequest` for what is no URL of a gateway."""
    if not endpoint:
        raise InvalidRequest("relay.endpoint is not set; give the gateway's URL")
    try:
        return Endpoint.parse(endpoint)
    except InvalidRequest as error:
        raise InvalidRequest(f"relay.{error.message}") from error


def check_endpoint(endpoint: str, listening: HostPort, name: str = "relay") -> None:
    """Raise `InvalidRequest` where relay.endpoint is the process itself."""
    upstream = parse_endpoint(endpoint)
    named = HostPort(upstream.host, upstream.port)
    is_here = named.is_loopback or named.host == socket.gethostname()
    is_own = named.host == listening.host or (
        is_here and (listening.is_loopback or is_everywhere(listening.host))
    )
    if is_own and named.port == listening.port:
        raise InvalidRequest(
            f"relay.endpoint {endpoint} is this {name}'s own {name}.listen; give the gateway's URL"
        )


def check_landing_memory(landing_bytes: int) -> None:
    """Raise `InvalidRequest` for more than this machine has."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if landing_bytes > machine_bytes:
        raise InvalidRequest(
            f"relay.landing_bytes is {landing_bytes}, and this machine has {machine_bytes} bytes "
            "of memory"
        )


def check_name(node: str) -> None:
    """Raise `InvalidRequest` for a relay.node that means something else in a route."""
    if node in ROUTE_WORDS:
        raise InvalidRequest(
            f"relay.node must not be {node!r}, which is a word of routes; name the node otherwise"
        )


def set_without_effect(settings: Settings, names: Sequence[str]) -> list[str]:
    """Those of the settings, SECTION or SECTION.KEY, that are not as they are by default."""
    default = Settings()
    return [
        name
        for name, field in each_setting()
        if (name in names or name.partition(".")[0] in names)
        and _value(settings, name, field.name) != _value(default, name, field.name)
    ]


def _value(settings: Settings, name: str, key: str) -> object:
    return getattr(getattr(settings, name.partition(".")[0]), key)


async def serve(process: ForwardingProcess, key: SigningKey, *, exit_with_stdin: bool) -> None:
    """Serve until SIGTERM, SIGINT or (if asked) the end of standard input; then drain."""
    settings, name = process.settings, process.name
    stop = asyncio.Event()
    stop_signals(stop)
    if exit_with_stdin:
        end_of_stdin(stop)
    engines = process.engines
    shared = settings.relay
    listen = HostPort.parse(f"{name}.listen", process.listen)
    listeners = open_listeners(listen, f"{name}.listen")
    shown = listen.with_port(port_of(listeners[0]))
    tls = server_context(shared.tls_certificate, shared.tls_key, "relay")
    scheme = "http" if tls is None else "https"
    process.prepare(shown, scheme)
    check_endpoint(shared.endpoint, shown, name)
    tracer = open_tracer(f"objectcache-{name}", os.environ)
    tls_upstream = client_context(ca_file_of(os.environ))
    relay = Relay(settings, key, tls_upstream, await process.pool(), tracer, name)
    await relay.start(listeners, tls, engines)
    reloading = asyncio.create_task(
        keep_reloading([] if tls is None else [tls], settings.gateway.tls_reload_s)
    )
    watch = UpstreamWatch(relay.means.landings.upstream.ask, shared.endpoint, name=name)
    watch.start()
    reporters = process.reporters(relay, lambda: watch.is_answering)
    page = relay_page(relay.means, relay.pool, relay.decoded_regions)
    metrics = _serve_metrics(process.metrics_listen, f"{name}.metrics_listen", page, name)
    print(f"ready {name} {scheme}://{shown}", flush=True)
    logger.info("deliveries come from %s, pid %d", shared.endpoint, os.getpid())
    await stop.wait()
    logger.info("stopping: draining for up to %g s", shared.drain_timeout_s)
    relay.means.is_draining = True
    await asyncio.gather(*(reporter.stop() for reporter in reporters))
    await watch.stop()
    await relay.drain(shared.drain_timeout_s)
    reloading.cancel()
    if metrics is not None:
        await metrics.close()
    await asyncio.to_thread(tracer.close)


def _serve_metrics(listen: str, setting: str, page: MetricsPage, name: str) -> MetricsPort | None:
    """Serve `GET /metrics` where the setting says. Raises `Unavailable` where that is not free."""
    if listen == "off":
        return None
    port = MetricsPort(page, name)
    listeners = open_listeners(HostPort.parse(setting, listen), setting)
    port.start(listeners)
    for listener in listeners:
        logger.info("metrics: port %d", port_of(listener))
    return port


def run_command(
    kind: type[ForwardingProcess], arguments: list[str] | None, environment: Mapping[str, str]
) -> int:
    """Run one process of a kind to its end; returns the exit status."""
    os.environ.setdefault(NIXL_LOG_LEVEL, "FATAL")
    try:
        settings, namespace = parse_command_line(
            f"objectcache {kind.name}",
            kind.description,
            sys.argv[1:] if arguments is None else arguments,
            environment,
        )
        check_paths(settings, "relay")
        check_parser()
        parse_endpoint(settings.relay.endpoint)
        check_name(settings.relay.node)
        check_landing_memory(settings.relay.landing_bytes)
        process = kind(settings)
        configure_logging(kind.name, process.log_level, settings.server.log_format)
        for ignored in set_without_effect(settings, kind.without_effect):
            logger.warning("%s is set, and has no effect on a %s", ignored, kind.name)
        key = job_key(settings, environment, kind.name)
        # What was imported stays: no collection walks over it, as the process runs or ends.
        gc.freeze()
        uvloop.run(serve(process, key, exit_with_stdin=namespace.exit_with_stdin))
    except InvalidRequest as error:
        print(f"objectcache {kind.name}: {error}", file=sys.stderr)
        return 2
    except ObjectCacheError as error:
        print(f"objectcache {kind.name}: {error}", file=sys.stderr)
        return 1
    return 0
