"""Who takes part: every client with its server, and why one does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.basis.server import running_server
from benchmarks.compare import servers
from benchmarks.compare.clients.lmcache_client import LmcacheClient
from benchmarks.compare.clients.mooncake_client import MooncakeClient
from benchmarks.compare.clients.nixl_obj_client import NixlObjClient
from benchmarks.compare.clients.objectcache_client import TRANSPORTS, ObjectCacheClient
from benchmarks.compare.clients.redis_client import RedisClient
from benchmarks.compare.clients.s3_bucket import S3Server
from benchmarks.compare.clients.store_client import StoreClient
from benchmarks.compare.ways import NIXL, OURS_AS_S3, RADOSGW, Way
from benchmarks.s3.radosgw import free_ports, missing_programs, running_radosgw

SEGMENT_SLACK = 1.5  # the master evicts from 0.9 on, and objects are padded
OUR_DOMAIN = "0.0.1"  # below which 127.0.0.1 is the bucket "127"
THEIR_DOMAIN = "s3.invalid"  # a host outside of it is a bucket's name, unless it is an address


@dataclass(frozen=True, slots=True)
class Contestant:
    """A client, and the processes that serve it. `missing` says why it cannot take part."""

    client: StoreClient
    server_pids: tuple[int, ...] = ()
    missing: str = ""

    @property
    def ways(self) -> Sequence[Way]:
        """Its lines of the table."""
        return self.client.ways


def started(undo: ExitStack, folder: Path, payload_bytes_max: int) -> list[Contestant]:
    """Start every server that there is; `undo` stops them. What does not start is missing."""
    contestants: list[Contestant] = []
    for start in (_objectcache, _mooncake, _redis, _radosgw):
        contestants += start(undo, folder, payload_bytes_max)
    return contestants


def _objectcache(undo: ExitStack, folder: Path, _: int) -> Iterator[Contestant]:
    domains = f"gateway.virtual_host_domains={OUR_DOMAIN}"
    running = undo.enter_context(running_server(folder / "objectcache", domains))
    port = int(running.endpoint.rpartition(":")[2])
    hosts = ("localhost", "127.0.0.1", "127")
    server = S3Server(OURS_AS_S3, port, running.access_key, running.secret_key, *hosts)
    pids = (psutil.Process(running.storage_pid).ppid(),)
    for way in TRANSPORTS:
        missing = servers.missing_modules("nixl_cu12") if way == NIXL else ""
        yield Contestant(ObjectCacheClient(server, way), pids, missing)
    yield from _s3_contestants(server, pids, "")


def _mooncake(undo: ExitStack, folder: Path, payload_bytes_max: int) -> Iterator[Contestant]:
    missing = servers.missing_modules("mooncake")
    segment_bytes = int(payload_bytes_max * SEGMENT_SLACK)
    (own_port,) = free_ports(1)
    yield _started(
        undo,
        missing,
        lambda: servers.running_mooncake(folder / "mooncake", segment_bytes),
        lambda master_port: MooncakeClient(own_port, master_port),
    )


def _redis(undo: ExitStack, folder: Path, _: int) -> Iterator[Contestant]:
    missing = servers.missing_redis()
    yield _started(undo, missing, lambda: servers.running_redis(folder / "redis"), RedisClient)


def _started(
    undo: ExitStack,
    missing: str,
    running: Callable[[], AbstractContextManager[tuple[int, Sequence[int]]]],
    client: Callable[[int], StoreClient],
) -> Contestant:
    if not missing:
        try:
            port, pids = undo.enter_context(running())
            return Contestant(client(port), tuple(pids))
        except RuntimeError as error:
            missing = str(error)
    return Contestant(client(0), missing=missing)


def _radosgw(undo: ExitStack, _folder: Path, _: int) -> Iterator[Contestant]:
    missing = missing_programs()
    hosts = ("127.0.0.1", "localhost", "localhost")
    server = S3Server(RADOSGW, 0, "", "", *hosts)
    pids: tuple[int, ...] = ()
    if not missing:
        try:
            running = undo.enter_context(running_radosgw(THEIR_DOMAIN))
            keys = (running.access_key, running.secret_key)
            server = S3Server(RADOSGW, running.port, *keys, *hosts)
            pids = running.pids
        except RuntimeError as error:
            missing = str(error)
    yield from _s3_contestants(server, pids, missing)


def _s3_contestants(server: S3Server, pids: tuple[int, ...], missing: str) -> Iterator[Contestant]:
    without_lmcache = missing or servers.missing_modules("lmcache", "torch", "awscrt")
    without_nixl = missing or servers.missing_modules("nixl_cu12")
    yield Contestant(LmcacheClient(server), pids, without_lmcache)
    yield Contestant(NixlObjClient(server), pids, without_nixl)
