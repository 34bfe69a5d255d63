"""The storage server's own memory while prefixes of growing length are delivered."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import Row
from benchmarks.basis.prefix import Geometry, fill_chunks
from benchmarks.basis.server import Server
from objectcache import KvBucket, SharedMemoryTarget
from objectcache_runtime.settings import StorageSettings
from objectcache_schemas.limits import KIB, MIB

GROUP = "Memory of the storage server"
SAMPLE_INTERVAL_S = 0.002


def measure_server_memory(bench: Bench) -> Iterator[Row]:
    """Peak of the process' own memory, by prefix length.

    The target is registered throughout, so that what is subtracted for it does not change while it
    is looked at.
    """
    geometry = Geometry(16, bench.scale.chunk_count)
    keys = geometry.keys()
    with bench.server() as server, server.client() as client:
        bucket = client.kv_bucket("memory", geometry.layout(), create=True)
        target = client.shared_memory_target(geometry.payload_bytes)
        chunks = target.chunks(geometry.chunk_count, geometry.layout())
        fill_chunks(chunks, geometry, keys)
        bucket.put(keys, chunks)
        for transport in ("shared_memory", "body"):
            yield from _measure(server, bucket, target, keys, transport, bench.scale.repeats)


def _measure(
    server: Server,
    bucket: KvBucket,
    target: SharedMemoryTarget,
    keys: list[str],
    transport: str,
    repeats: int,
) -> Iterator[Row]:
    counts = sorted({max(1, len(keys) // 16), max(1, len(keys) // 4), len(keys)})
    shortest_mib: float | None = None
    for count in counts:
        with peak_of(server.storage_pid) as peak:
            for _ in range(repeats):
                with bucket.fetch(
                    keys[:count], delivery="layerwise", transport=transport, target=target
                ) as delivery:
                    delivery.wait()
        peak_mib = peak.peak_bytes / MIB
        shortest_mib = shortest_mib or peak_mib
        yield Row(
            group=GROUP,
            name=f"peak during {count} chunks, {transport}",
            unit="MiB",
            samples=(peak_mib,),
            ratio=peak_mib / shortest_mib,
            ratio_of=f"the peak during {counts[0]} chunks",
            goal="about 1",
            by_hand=f"{peak.idle_bytes / MIB:.0f} MiB before + "
            f"{StorageSettings().delivery_in_flight_bytes_max >> 20} MiB in flight",
            details={
                "payload_bytes": count * bucket.layout.chunk_bytes,
                "idle_mib": peak.idle_bytes / MIB,
                "process_peak_rss_mib": memory_bytes(server.storage_pid, "VmHWM") / MIB,
            },
        )


class Peak:
    """Highest own memory of a process since the start."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.idle_bytes = self.peak_bytes = own_memory_bytes(pid)

    def look(self) -> None:
        """Sample once."""
        self.peak_bytes = max(self.peak_bytes, own_memory_bytes(self._pid))


@contextmanager
def peak_of(pid: int) -> Generator[Peak]:
    """Sample a process until the block ends."""
    peak, ended = Peak(pid), threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_INTERVAL_S):
            peak.look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()
        peak.look()


def own_memory_bytes(pid: int) -> int:
    """Anonymous and shared memory (buffers are of the latter kind), without clients' targets.

    Targets are memory files that are resident as a whole; mapped object files do not count.
    """
    targets_bytes = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:" in line:
            first, _, end = line.split()[0].partition("-")
            targets_bytes += int(end, 16) - int(first, 16)
    return memory_bytes(pid, "RssAnon") + memory_bytes(pid, "RssShmem") - targets_bytes


def memory_bytes(pid: int, field: str) -> int:
    """A field of /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * KIB
    raise LookupError(f"/proc/{pid}/status has no {field}")
