"""The rate of kv-put, which answers when the bytes are on the device."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.limits import remove_written, write_and_sync
from benchmarks.measure import DISK_WRITE_BYTES_PER_S, Row, Samples, rates
from benchmarks.prefix import Geometry
from benchmarks.server import Server
from objectcache.replay.kv_bytes import KvBytes
from objectcache_schemas.limits import GIB

GROUP = "Storing: one kv-put, on the device when it answers"
OURS, ONE_FILE, FILE_A_CHUNK = (
    "one kv-put",
    "limit: write and fsync of one file",
    "write and fsync of a file a chunk",
)


def measure_puts(server: Server, geometry: Geometry, repeats: int) -> Iterator[Row]:
    """Rows for our puts and for plain writes of as many bytes on the same device."""
    samples, kv = Samples(), KvBytes(geometry.layout())
    folder = server.data_dir.parent
    with server.client() as client:
        bucket = client.kv_bucket("puts", geometry.layout(), create=True)
        for repeat in range(repeats):
            keys = geometry.keys(series=1 + repeat)
            chunks = kv.chunks(keys)
            samples.take(OURS, lambda: bucket.put(keys, chunks))  # noqa: B023 - called at once
            for name, file_count in ((ONE_FILE, 1), (FILE_A_CHUNK, geometry.chunk_count)):
                samples.take(
                    name,
                    lambda n=file_count: write_and_sync(folder, geometry.payload_bytes, n),  # type: ignore[misc]
                )
                remove_written(folder)
    for name, seconds in samples.seconds.items():
        yield Row(
            group=GROUP,
            name=f"{name}, {geometry.chunk_count} chunks, {geometry}",
            unit="GiB/s",
            samples=rates(seconds, geometry.payload_bytes),
            ratio=samples.median_s(ONE_FILE) / statistics.median(seconds),
            ratio_of=ONE_FILE,
            goal="",
            by_hand=f"a disk that writes {DISK_WRITE_BYTES_PER_S / GIB:.0f} GiB/s",
            details={"payload_bytes": geometry.payload_bytes},
        )
