"""A server behind a link that the kernel bounds, fetchers on this side of it, and the engine."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.basis.server import Server, running_server
from benchmarks.basis.storage_socket import StorageSocket
from benchmarks.figures.experiment import NotPossible
from benchmarks.figures.shaped_link import ShapedLink, check_means, shaped_link
from benchmarks.shadow.contents import CONTENTS, Volume
from benchmarks.shadow.engine_process import EngineProcess, Reached, make_bucket, put
from objectcache_schemas.messages.buckets import SetPolicy
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.operators.schedule import ScheduleChanges, ScheduleState, SetSchedule
from objectcache_schemas.records import BucketPolicy, StoredEncoding
from tests.servers import RUN_DIR_PARENT, ServerProcess

CACHED = f"storage.page_cache_bytes={1 << 40}"  # everything: the link is measured, and no device
SCALE = 16  # of rates, as of benchmarks.figures
PAPER_GBPS = (10, 20, 30, 40)
QUEUE_S = 0.3  # no frame is lost, as in storage networks with flow control
OWN, SHARED = "on the other processor", "on the engine's processor"


def link_rate(paper_gbps: int) -> float:
    """Bytes per second of a scaled link."""
    return paper_gbps * 1e9 / 8 / SCALE


@dataclass(frozen=True, slots=True)
class Rig:
    """What runs."""

    link: ShapedLink
    engine: EngineProcess
    volume: Volume
    fragment_bytes: int
    processors: tuple[int, int]  # the engine's, and everybody else's
    endpoint: str
    folder: Path
    server: Server

    def bound(self, paper_gbps: int | None) -> None:
        """Bound the link to a rate of the paper's, scaled; None is no bound."""
        if paper_gbps is None:
            self.link.shape(None)
        else:
            self.link.shape(link_rate(paper_gbps), QUEUE_S)

    def cap(self, paper_gbps: int | None) -> None:
        """Have the server's scheduler bound what it sends to such a rate, by whichever way."""
        cap_gbps = 0.0 if paper_gbps is None else paper_gbps / SCALE
        with closing(StorageSocket(self.server.settings)) as storage:
            changes = ScheduleChanges(cap_gbps=cap_gbps)
            storage.ask(SetSchedule(changes=changes), ScheduleState)

    def fetcher(self, *settings: str) -> AbstractContextManager[Fetcher]:
        """One more fetcher, beside the server, with settings of its own."""
        return _fetcher(self.endpoint, self.folder, self.processors[1], *settings)


class Fetcher:
    """A fetcher that has been started."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process
        self.pid = process.pid

    @cached_property
    def url(self) -> str:
        """Waits until it serves."""
        return self._process.wait_ready()


def two_processors() -> tuple[int, int]:
    """The engine's, and that of all others. Raises `NotPossible`."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise NotPossible("it takes two processors, and this process may use one")
    return usable[0], usable[1]


@contextmanager
def rig(volume: Volume, folder: Path) -> Generator[Rig]:
    """Start everything and store the prefixes; the link has no bound. Raises `NotPossible`."""
    check_means()
    if shutil.which("taskset") is None:
        raise NotPossible("taskset is not installed; it is in the package util-linux")
    engines, others = two_processors()
    with ExitStack() as stack:
        link = stack.enter_context(shaped_link())
        on_others = ("taskset", "-c", str(others))
        server = stack.enter_context(
            running_server(
                folder / "data", CACHED, host="0.0.0.0", within=(*link.within, *on_others)
            )
        )
        endpoint = f"http://{link.address}:{server.endpoint.rpartition(':')[2]}"
        begun = {
            name: stack.enter_context(_fetcher(endpoint, folder, processor))
            for name, processor in ((OWN, others), (SHARED, engines))
        }
        fetchers = {name: fetcher.url for name, fetcher in begun.items()}  # they begin side by side
        reached = Reached(
            endpoint,
            server.access_key,
            server.secret_key,
            fetchers,
            volume,
            link.near_device,
            engines,
        )
        engine = stack.enter_context(EngineProcess(reached))
        for content in CONTENTS:
            engine.call(make_bucket, content)
            if content.is_encoded:
                _encode(server, content.bucket)
            engine.call(put, content)
        fragment_bytes = server.settings.storage.fragment_bytes
        yield Rig(link, engine, volume, fragment_bytes, (engines, others), endpoint, folder, server)


def _encode(server: Server, bucket: str) -> None:
    policy = BucketPolicy(encoding=StoredEncoding.PLANES_ZSTD)
    with closing(StorageSocket(server.settings)) as storage:
        storage.ask(SetPolicy(bucket=bucket, policy=policy), Done)


@contextmanager
def _fetcher(
    endpoint: str, folder: Path, processor: int, *more_settings: str
) -> Generator[Fetcher]:
    name = f"objectcache-fetcher-{secrets.token_hex(4)}"
    run_dir = Path(RUN_DIR_PARENT) / name
    settings = (
        "fetcher.listen=127.0.0.1:0",
        "fetcher.metrics_listen=off",
        "fetcher.log_level=warning",
        "fetcher.workers=1",
        f"fetcher.cpus={processor}",
        f"relay.endpoint={endpoint}",
        f"relay.credentials={folder / 'data' / 'root-credentials'}",
        "relay.transport=body",
        "fetcher.wait_s=60",
        "relay.hold_s=0",  # a prefix is read as often as it is asked for
        f"server.run_dir={run_dir}",
        *more_settings,
    )
    words = [word for one in settings for word in ("--set", one)]
    log = folder / f"{name}.log"
    within = ("taskset", "-c", str(processor))
    process = ServerProcess("objectcache_relay.fetcher", words, log, within=within)
    try:
        yield Fetcher(process)
    finally:
        process.terminate()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(run_dir)
