"""One delivery in the engine's process, by one of the ways that are compared."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.shadow.contents import Bytes, Content, Volume, expected, plain_layout
from objectcache import Client, KvBucket
from objectcache.landing.targets import PlainTarget, SharedMemoryTarget


class Way(enum.Enum):
    """Who decodes and dequantises, and when."""

    ENGINE = "in the engine"  # layer by layer, in the thread that waits
    AUTO = "in the engine, where it pays"
    SERVER = "in the server"  # which is asked for no encoding
    FETCHER = "fetcher"
    WHOLE = "whole, then decoded"  # in the engine, when the last byte is there
    FETCHER_WHOLE = "fetcher, waits for the whole"
    FETCHER_BY_LAYER = "fetcher, one layer at a time"
    FETCHER_REGISTERS = "fetcher, new memory each fetch"

    @property
    def is_fetcher(self) -> bool:
        """Whether bytes come by way of the fetcher."""
        return self.name.startswith("FETCHER")


@dataclass(frozen=True, slots=True)
class Fetched:
    """Times from the fetch call, seconds; `wire_bytes` as the kernel counts the link's."""

    usable_s: tuple[float, ...]  # of each layer, dequantised where it had to be
    wire_bytes: int

    @property
    def first_s(self) -> float:
        """Until the engine can begin."""
        return self.usable_s[0]

    @property
    def last_s(self) -> float:
        """Until all is there."""
        return self.usable_s[-1]

    def ttft_s(self, compute_s: float) -> float:
        """Until an engine has computed all layers, each of which takes so long. Arithmetic."""
        end_s = 0.0
        for usable_s in self.usable_s:
            end_s = max(end_s, usable_s) + compute_s
        return end_s


class Fetches:
    """The clients of one engine."""

    def __init__(self, direct: Client, fetcher: Client, volume: Volume, device: str) -> None:
        """`device` is this end of the link."""
        self._clients = {False: direct, True: fetcher}
        self._volume = volume
        self._count = Path("/sys/class/net") / device / "statistics" / "rx_bytes"
        self._memory = np.ones(volume.delivered_bytes, np.uint8)  # of the engine: used each time

    def bucket(self, content: Content, way: Way) -> KvBucket:
        """As this way reaches it."""
        client = self._clients[way.is_fetcher]
        return client.kv_bucket(content.bucket, plain_layout(self._volume), lossy=content.lossy)

    def fetch(self, content: Content, way: Way) -> Fetched:
        """One delivery, of which every byte is compared. Raises `SystemExit` where one differs."""
        keys = content.keys(self._volume)
        bucket = self.bucket(content, way)
        before = int(self._count.read_text())
        begun_s = time.monotonic()
        usable_s: list[float] = []
        kept: list[Bytes] = []
        for _, view in self._layers(bucket, content, way, keys):
            kept.append(view)
            usable_s.append(time.monotonic() - begun_s)
        wire_bytes = int(self._count.read_text()) - before
        if not all(map(np.array_equal, kept, expected(content, self._volume))):
            raise SystemExit(f"{content.name}, {way.value}: other bytes than were put")
        return Fetched(tuple(usable_s), wire_bytes)

    def _layers(
        self, bucket: KvBucket, content: Content, way: Way, keys: list[str]
    ) -> Iterator[tuple[int, Bytes]]:
        encodings: str | list[str] = []
        if content.is_encoded and way is not Way.SERVER and not way.is_fetcher:
            encodings = "auto" if way is Way.AUTO else ["planes-zstd"]
        target: SharedMemoryTarget | PlainTarget | None = None
        if not way.is_fetcher:
            target = PlainTarget(self._memory[: len(keys) * bucket.chunk_bytes])
        if way is Way.FETCHER_BY_LAYER:
            for layer in range(self._volume.layers):
                with bucket.fetch(
                    keys, delivery="layerwise", layers=(layer, layer + 1)
                ) as delivery:
                    yield layer, delivery.wait_layer(layer)
            return
        if way is Way.FETCHER_REGISTERS:
            length_bytes = len(keys) * bucket.chunk_bytes
            target = self._clients[True].shared_memory_target(length_bytes)
        with bucket.fetch(
            keys, delivery="layerwise", encodings=encodings, target=target
        ) as delivery:
            if way in (Way.WHOLE, Way.FETCHER_WHOLE):
                yield from enumerate(delivery.wait())
            else:
                yield from delivery
        if isinstance(target, SharedMemoryTarget):
            with closing(target):
                pass
