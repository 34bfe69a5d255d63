"""The engine: a process with a processor of its own, which does what it is told."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Self, TypeVar

from benchmarks.shadow.contents import Content, Volume, stored
from benchmarks.shadow.deliveries import Fetched, Fetches, Way
from objectcache import Client

P = ParamSpec("P")
T = TypeVar("T")
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # more of them spin where others want the processor
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Reached:
    """What the engine is told of its surroundings. `fetchers` are URLs by names; the first is the
    one that fetches go to.
    """

    endpoint: str
    access_key: str
    secret_key: str
    fetchers: dict[str, str]
    volume: Volume
    device: str
    processor: int


class EngineSide:
    """What the process has."""

    def __init__(self, reached: Reached) -> None:
        self.reached = reached
        self.direct = self.client(reached.endpoint, "body")
        self.fetchers = {
            name: self.client(url, "shared_memory") for name, url in reached.fetchers.items()
        }
        first = next(iter(self.fetchers.values()))
        self.fetches = Fetches(self.direct, first, reached.volume, reached.device)
        self.by_url: dict[str, Fetches] = {}  # over fetchers that were begun later

    def client(self, url: str, transport: str) -> Client:
        """One of the server, or of a fetcher."""
        return Client(
            url,
            access_key=self.reached.access_key,
            secret_key=self.reached.secret_key,
            transport=transport,
            timeout_s=TIMEOUT_S,
        )


_sides: list[EngineSide] = []


def _begin(reached: Reached) -> None:
    os.sched_setaffinity(0, {reached.processor})
    _sides.append(EngineSide(reached))


def _do(work: Callable[..., T], args: tuple[object, ...]) -> T:
    return work(_sides[0], *args)


def make_bucket(side: EngineSide, content: Content) -> None:
    """An empty bucket, whose policy can be set."""
    side.direct.kv_bucket(content.bucket, content.layout(side.reached.volume), create=True)


def put(side: EngineSide, content: Content) -> None:
    """Store the prefix."""
    volume = side.reached.volume
    chunks = stored(content, volume).transpose(1, 0, 2)
    side.direct.kv_bucket(content.bucket, content.layout(volume)).put(content.keys(volume), chunks)


def fetch(side: EngineSide, content: Content, way: Way) -> Fetched:
    """See `Fetches.fetch`."""
    return side.fetches.fetch(content, way)


def fetch_over(side: EngineSide, content: Content, url: str) -> Fetched:
    """See `Fetches.fetch`; by way of the fetcher at a URL."""
    if url not in side.by_url:
        reached, over = side.reached, side.client(url, "shared_memory")
        side.by_url[url] = Fetches(side.direct, over, reached.volume, reached.device)
    return side.by_url[url].fetch(content, Way.FETCHER)


def forget_rates(side: EngineSide) -> None:
    """Have the next fetches come to a client that knows nothing of the link."""
    reached = side.reached
    side.direct.close()
    side.direct = side.client(reached.endpoint, "body")
    first = next(iter(side.fetchers.values()))
    side.fetches = Fetches(side.direct, first, reached.volume, reached.device)


class EngineProcess:
    """From the parent's side. One thing at a time."""

    def __init__(self, reached: Reached) -> None:
        self._pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(reached,)
        )
        before = os.environ.copy()
        os.environ.update(ONE_THREAD)  # a process that is spawned inherits it
        try:
            self._pool.submit(os.getpid).result()
        finally:
            os.environ.clear()
            os.environ.update(before)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._pool.submit(os.getpid).result()

    def call(
        self, work: Callable[Concatenate[EngineSide, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Have it call `work`, a function of a module, and wait for the result."""
        assert not kwargs
        return self._pool.submit(_do, work, args).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
