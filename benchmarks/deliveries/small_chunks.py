"""Many small chunks: what each costs to store, to find, to read, and to keep."""

from __future__ import annotations

import hashlib
import mmap
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import lmdb
import msgspec

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import (
    COPY_BYTES_PER_S_PER_THREAD,
    DISK_WRITE_BYTES_PER_S,
    KEY_PARSE_S,
    Row,
    Samples,
    milliseconds,
    rates,
    timed,
)
from benchmarks.basis.prefix import MLA_TOKEN_BYTES, Geometry
from benchmarks.basis.store import BUCKET, Store, opened_store
from benchmarks.deliveries.opened_store import Opened
from benchmarks.machine.device import device_writes
from benchmarks.machine.page_cache_copy import FileRun, PageCacheCopy
from objectcache_schemas.limits import GIB, KIB

SMALL = Geometry(16, 1, MLA_TOKEN_BYTES, num_layers=2)
BATCH = 448
FOUND = 4096  # keys of one question
PUT, DELIVER, COPY = "put", "layerwise, in process", "limit: two threads copy"
MATCH, OPEN, PLAIN = "match", "open_many", "limit: plain LMDB gets in one transaction"
OPEN_STORE = "opening the store"
RECORD_BYTES = 300  # of the index, by hand: a key, places, times, an ETag and two checksums
ROW_BYTES = 60  # of memory, by hand: what the tables' columns take


def measure_small_chunks(bench: Bench) -> Iterator[Row]:
    """Rows for puts, questions, deliveries, the index, and the memory of an open store."""
    chunk_count = bench.scale.small_chunks
    samples = Samples()
    with bench.place() as folder:
        keys = _keys(chunk_count)
        with opened_store(folder / "store") as store:
            _put_all(samples, store, keys)
            written = device_writes(
                folder / "plain",
                _payload_bytes(chunk_count),
                fresh=True,
                is_quick=bench.scale.is_quick,
            )
            written.take(samples)
            limit = written.best(samples)
            yield _put_row(samples, chunk_count, limit)
            yield from _question_rows(bench, store, keys, folder)
            yield from _delivery_rows(bench, store, keys)
        opened = _opened(folder / "store")
        assert opened.objects == chunk_count
        empty = folder / "empty"
        with opened_store(empty):
            pass
        yield from _standing_rows(folder / "store", opened, _opened(empty))


def _keys(count: int) -> list[str]:
    """Keys of chunks that follow each other; of the usual length, and cheap to make."""
    return [hashlib.blake2b(b"%d" % number, digest_size=32).hexdigest() for number in range(count)]


def _payload_bytes(count: int) -> int:
    return count * SMALL.chunk_bytes


def _of(count: int) -> Geometry:
    return Geometry(SMALL.chunk_tokens, count, SMALL.token_bytes, SMALL.num_layers)


def _put_all(samples: Samples, store: Store, keys: list[str]) -> None:
    payload = memoryview(mmap.mmap(-1, BATCH * SMALL.chunk_bytes))
    payload[:] = hashlib.shake_128(b"small chunks").digest(len(payload))
    for first in range(0, len(keys), BATCH):
        some = keys[first : first + BATCH]
        parent = keys[first - 1] if first else None
        seconds = timed(lambda: store.put(_of(len(some)), some, payload, parent_key=parent))  # noqa: B023
        samples.add(PUT, seconds)


def _put_row(samples: Samples, chunk_count: int, limit: str) -> Row:
    total_s = sum(samples.seconds[PUT])
    return Row(
        group=_group(chunk_count),
        name=f"{PUT} in batches of {BATCH}, {chunk_count / total_s:,.0f} chunks/s in all",
        unit="GiB/s",
        samples=rates(samples.seconds[PUT][:-1] or samples.seconds[PUT], _payload_bytes(BATCH)),
        ratio=samples.median_s(limit) / total_s,
        ratio_of=f"{limit}, all at once",
        goal="",
        by_hand=f"a device that writes {DISK_WRITE_BYTES_PER_S / GIB:.0f} GiB/s",
        details={"total_s": total_s, "chunks_per_s": chunk_count / total_s},
    )


def _question_rows(bench: Bench, store: Store, keys: list[str], folder: Path) -> Iterator[Row]:
    asked = keys[:FOUND]
    samples = Samples()
    with _plain_index(folder / "plain-index", keys) as plain:
        for _ in range(bench.scale.repeats):
            samples.take(PLAIN, lambda: _get_all(plain, asked))
            samples.take(MATCH, lambda: store.engine.match(BUCKET, asked))
            samples.take(OPEN, lambda: store.engine.open_many(BUCKET, asked).close())
    assert store.engine.match(BUCKET, asked) == len(asked)
    for name in (MATCH, OPEN, PLAIN):
        yield Row(
            group=_group(len(keys)),
            name=f"{name} of {len(asked):,} keys",
            unit="ms",
            samples=milliseconds(samples.seconds[name]),
            ratio=samples.median_s(name) / samples.median_s(PLAIN),
            ratio_of=PLAIN,
            goal="",
            by_hand=f"{KEY_PARSE_S * 1e6:g} us a key: {1000 * len(asked) * KEY_PARSE_S:.1f} ms",
        )


@contextmanager
def _plain_index(folder: Path, keys: list[str]) -> Iterator[lmdb.Environment]:
    folder.mkdir()
    with lmdb.open(str(folder), map_size=GIB, sync=False) as environment:
        with environment.begin(write=True) as change:
            for key in sorted(keys):
                change.put(key.encode(), bytes(RECORD_BYTES), append=True)
        yield environment


def _get_all(environment: lmdb.Environment, keys: list[str]) -> None:
    with environment.begin(buffers=True) as view:
        for key in keys:
            assert view.get(key.encode()) is not None


def _delivery_rows(bench: Bench, store: Store, keys: list[str]) -> Iterator[Row]:
    asked = keys[:FOUND]
    geometry = _of(len(asked))
    memory = memoryview(mmap.mmap(-1, geometry.payload_bytes))
    samples = Samples()
    with ExitStack() as stack:
        copy = PageCacheCopy(_first(store.runs(), geometry.payload_bytes), memory, stack)
        store.deliver(geometry, asked, memory)
        for _ in range(bench.scale.repeats):
            samples.take(COPY, copy.into_target)
            samples.take(DELIVER, lambda: store.deliver(geometry, asked, memory))
    for name in (DELIVER, COPY):
        yield Row(
            group=_group(len(keys)),
            name=f"{name}, {len(asked):,} chunks, "
            f"{len(asked) / samples.median_s(name):,.0f} chunks/s",
            unit="GiB/s",
            samples=rates(samples.seconds[name], geometry.payload_bytes),
            ratio=samples.median_s(COPY) / samples.median_s(name),
            ratio_of=COPY,
            goal="",
            by_hand=f"2 threads x {COPY_BYTES_PER_S_PER_THREAD / GIB:.0f} GiB/s",
        )


def _first(runs: list[FileRun], length_bytes: int) -> list[FileRun]:
    """The first `length_bytes` of runs."""
    kept: list[FileRun] = []
    for run in runs:
        if length_bytes > 0:
            kept.append(run._replace(length_bytes=min(run.length_bytes, length_bytes)))
            length_bytes -= run.length_bytes
    return kept


def _opened(folder: Path) -> Opened:
    """What a process that does nothing else finds."""
    words = [sys.executable, "-m", "benchmarks.deliveries.opened_store", str(folder)]
    done = subprocess.run(words, capture_output=True, check=True)
    return msgspec.json.decode(done.stdout, type=Opened)


def _standing_rows(folder: Path, opened: Opened, empty: Opened) -> Iterator[Row]:
    index_bytes = (folder / "index" / "data.mdb").stat().st_blocks * 512
    memory_bytes = opened.memory_bytes - empty.memory_bytes
    payload_bytes = _payload_bytes(opened.objects)
    for name, unit, sample, ratio, ratio_of, by_hand in (
        (
            OPEN_STORE,
            "ms",
            1000 * opened.seconds,
            opened.seconds / empty.seconds,
            "opening an empty one",
            "100 MB/s of index",
        ),
        (
            "index on disk, a chunk: LMDB's file with its free pages, without the reserve",
            "bytes",
            index_bytes / opened.objects,
            index_bytes / payload_bytes,
            "the chunks' bytes",
            f"{RECORD_BYTES} bytes",
        ),
        (
            "memory of an open store, a chunk",
            "bytes",
            memory_bytes / opened.objects,
            memory_bytes / payload_bytes,
            "the chunks' bytes",
            f"{ROW_BYTES} bytes",
        ),
    ):
        yield Row(_group(opened.objects), name, unit, (sample,), ratio, ratio_of, "", by_hand)


def _group(chunk_count: int) -> str:
    size = f"{SMALL.num_layers} slices of {SMALL.slice_bytes / KIB:g} KiB"
    return f"{chunk_count:,} small chunks of {size}"
