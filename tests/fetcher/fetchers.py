"""Real fetchers for tests: a process beside a `RunningServer`, with workers of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from objectcache import KvBucket
from objectcache.deliveries.delivery import Delivery
from tests.integration.served import wait_until
from tests.relay.relays import BUCKET, LAYOUT, TOKENS, RunningRelay

WORKER = "objectcache_relay.decoding.worker"


class RunningFetcher(RunningRelay):
    """A fetcher of a server's deliveries, on a free port of 127.0.0.1."""

    name = "fetcher"
    module = "objectcache_relay.fetcher"

    @property
    def workers(self) -> list[psutil.Process]:
        """Its workers' processes."""
        own = psutil.Process(self.process.pid)
        return [one for one in own.children() if WORKER in one.cmdline()]

    @property
    def decoded_bytes(self) -> dict[str, float]:
        """What its workers wrote, by encoding."""
        return {
            labels[0]: value
            for (name, *labels), value in self.samples().items()
            if name == "fetcher_decoded_bytes_total"
        }

    def memory_files(self) -> Iterator[int]:
        """Descriptors of its shared memory, each open for as long as it is the last one."""
        for file in Path(f"/proc/{self.process.pid}/fd").iterdir():
            try:
                if "memfd:objectcache" not in os.readlink(file):
                    continue
                descriptor = os.open(file, os.O_RDWR)
            except FileNotFoundError:  # it is closed meanwhile
                continue
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def wait_queued(self, decoded_bytes: int) -> None:
        """Until so many bytes wait for its workers, or are with them."""
        wait_until(
            lambda: self.samples()["fetcher_queued_bytes",] >= decoded_bytes,
            f"{decoded_bytes} bytes wait for workers",
        )


def memory_bytes(process: psutil.Process) -> int:
    """What a process has to itself, and its share of what others map, too."""
    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    found = [line.split() for line in text.splitlines() if line.startswith("Pss:")]
    return int(found[0][1]) << 10


def slow_fetch(bucket: KvBucket, rate_bytes_per_s: float) -> Delivery:
    """All of the prefix, at a rate."""
    keys = bucket.chunk_keys(TOKENS)
    return bucket.fetch(keys, delivery="layerwise", rate_bytes_per_s=rate_bytes_per_s)


__all__ = ["BUCKET", "LAYOUT", "RunningFetcher", "memory_bytes", "slow_fetch"]
