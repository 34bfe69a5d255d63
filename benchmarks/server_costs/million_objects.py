"""A bucket of a million objects: listings at any offset, usage, and how soon the server is up.

Keys lie in 1,000 folders of 1,000. The bucket is filled through the engine, which is not what is
measured; listings run through HTTP, one request after the other on one connection.
"""

from __future__ import annotations

import http.client
import mmap
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import HTTP_ROUND_TRIP_S, Row, Samples, milliseconds, timed
from benchmarks.basis.prefix import Geometry
from benchmarks.basis.server import Server, running_server
from benchmarks.basis.store import BUCKET, Store, opened_store
from objectcache_schemas.limits import KIB

TINY = Geometry(16, 1, 2, num_layers=2)  # 64 bytes a chunk: what counts is how many there are
BATCH = 500
FOLDER_OBJECTS = 1000
PAGE_KEYS = 1000
LISTED_S = 0.020  # the goal for a page
USAGE_S = 0.001
UP_S = 10.0
ENTRY_S = 10e-6  # by hand: find, decode, send, decode and write one entry of a listing
GROUP = "a bucket of many objects"


def measure_million_objects(bench: Bench) -> Iterator[Row]:
    """Rows for pages at several offsets, with prefix and delimiter, for usage, and for a start."""
    count = bench.scale.many_objects
    with bench.place() as folder:
        data = folder / "data"
        with opened_store(data) as store:
            _fill(store, count)
            yield from _usage_rows(store, count, bench.scale.repeats)
        begin_s = time.perf_counter()
        with running_server(data) as server:
            up_s = time.perf_counter() - begin_s
            yield _row(f"start of the server with {count:,} objects", "s", (up_s,), UP_S, "index")
            yield from _listing_rows(server, count, bench.scale.repeats)


def key_of(number: int) -> str:
    """Keys in byte order of their numbers."""
    return f"logs/{number // FOLDER_OBJECTS:04d}/{number % FOLDER_OBJECTS:04d}-of-a-usual-length"


def _fill(store: Store, count: int) -> None:
    geometry = Geometry(TINY.chunk_tokens, BATCH, TINY.token_bytes, TINY.num_layers)
    payload = memoryview(mmap.mmap(-1, max(BATCH * TINY.chunk_bytes, 64 * KIB)))
    for first in range(0, count, BATCH):
        keys = [key_of(number) for number in range(first, min(first + BATCH, count))]
        store.put(geometry, keys, payload[: len(keys) * TINY.chunk_bytes])


def _usage_rows(store: Store, count: int, repeats: int) -> Iterator[Row]:
    assert store.engine.usage(BUCKET).object_count == count
    seconds = tuple(timed(lambda: store.engine.usage(BUCKET)) for _ in range(100 * repeats))
    yield _row("usage of the bucket, in the engine", "ms", milliseconds(seconds), USAGE_S, "one")


def _listing_rows(server: Server, count: int, repeats: int) -> Iterator[Row]:
    samples = Samples()
    pages = _pages(count)
    with _lister(server) as list_page:
        for _ in range(5 * repeats):
            for name, (query, entries) in pages.items():
                found = 0

                def ask(query: dict[str, Any] = query) -> None:
                    nonlocal found
                    found = list_page(query)

                samples.take(name, ask)
                assert found == entries, (name, found)
    for name, (_, entries) in pages.items():
        by_hand = f"{1000 * (HTTP_ROUND_TRIP_S + entries * ENTRY_S):.0f} ms"
        yield _row(name, "ms", milliseconds(samples.seconds[name]), LISTED_S, by_hand)


def _pages(count: int) -> dict[str, tuple[dict[str, Any], int]]:
    """Parameters of ListObjectsV2 by name, and how many entries answer them."""
    folders = min(PAGE_KEYS, count // FOLDER_OBJECTS)
    middle, last = count // 2, count - PAGE_KEYS - 1
    return {
        "page of 1,000 at the beginning": ({}, PAGE_KEYS),
        "page of 1,000 in the middle": ({"StartAfter": key_of(middle - 1)}, PAGE_KEYS),
        "page of 1,000 at the end": ({"StartAfter": key_of(last)}, PAGE_KEYS),
        "one folder by prefix": ({"Prefix": key_of(middle)[: len("logs/0000/")]}, PAGE_KEYS),
        "all folders by delimiter": ({"Prefix": "logs/", "Delimiter": "/"}, folders),
        "one prefix over all by delimiter": ({"Delimiter": "/"}, 1),
    }


@contextmanager
def _lister(server: Server) -> Generator[Callable[[dict[str, Any]], int]]:
    """Asks for a page by a presigned URL, and counts its entries."""
    address = urlsplit(server.endpoint)
    assert address.hostname is not None
    with (
        closing(server.s3()) as s3,
        closing(http.client.HTTPConnection(address.hostname, address.port)) as connection,
    ):
        urls: dict[str, str] = {}

        def list_page(query: dict[str, Any]) -> int:
            name = repr(query)
            if name not in urls:
                parameters = {"Bucket": BUCKET, **query}
                url = s3.generate_presigned_url("list_objects_v2", Params=parameters)
                urls[name] = url.removeprefix(server.endpoint)
            connection.request("GET", urls[name])
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status == 200, body
            return body.count(b"<Contents>") + body.count(b"<CommonPrefixes>")

        list_page({"MaxKeys": 1})  # the connections are made
        yield list_page


def _row(name: str, unit: str, samples: tuple[float, ...], goal_s: float, by_hand: str) -> Row:
    scale = 1000 if unit == "ms" else 1
    median = sorted(samples)[len(samples) // 2]
    return Row(
        group=GROUP,
        name=name,
        unit=unit,
        samples=samples,
        ratio=median / (goal_s * scale),
        ratio_of="the goal",
        goal=f"< {goal_s * scale:g} {unit}",
        by_hand=by_hand,
    )


def main() -> None:
    """`python -m benchmarks.server_costs.million_objects`: the rows, where no table is wanted."""
    import tempfile

    from benchmarks.basis.scale import FULL

    with tempfile.TemporaryDirectory(prefix="objectcache-bench-") as folder:
        for row in measure_million_objects(Bench(Path(folder), FULL)):
            print(f"{row.name}: median {row.median:.2f} p99 {row.p99:.2f} {row.unit}", flush=True)


if __name__ == "__main__":
    main()
