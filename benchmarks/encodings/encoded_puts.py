"""Puts of chunks that are stored as frames: encoded by the server, or by whoever puts them.

Rates are of the chunks' bytes for a second of the storage server's processor time, by the system's
clock of its process: others who keep the machine busy take less from them than from a clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import Row
from benchmarks.basis.server import Server
from benchmarks.basis.storage_socket import StorageSocket
from objectcache import Client, KvBucket, KvLayout
from objectcache.core import TransportChoice
from objectcache.puts.encode_layers import EncodedLayers
from objectcache.puts.put_request import PutRequest
from objectcache.puts.put_sinks import put_parts
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.messages.buckets import SetPolicy
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.records import BucketPolicy, StoredEncoding, Verification

ZSTD = StoredEncoding.PLANES_ZSTD
ROUNDS = 6
GB = 1e9
GOAL = 0.6  # GB for a second of the server's, of frames that are all decoded
LAYOUT = KvLayout(
    num_layers=32,
    chunk_tokens=16,
    per_layer_chunk_bytes=64 * KIB,
    dtype="bfloat16",
    fingerprint="normal numbers",
)
CHUNKS, QUICK_CHUNKS = 64, 4


@dataclass(slots=True)
class Way:
    """One way to put, into a bucket of its own, and what it took."""

    name: str
    transport: str
    stored: StoredEncoding | None
    is_sent_encoded: bool
    verification: Verification = Verification.FULL
    goal: float | None = None
    rates: list[float] = field(default_factory=list[float])  # GB for a second of the server's
    client_rates: list[float] = field(default_factory=list[float])  # and of this process's

    @property
    def bucket(self) -> str:
        """Its bucket's name."""
        return "".join(one if one.isalnum() else "-" for one in self.name.lower())


def _ways() -> list[Way]:
    ways: list[Way] = []
    for transport in ("body", "shared_memory"):
        text = transport.replace("_", " ")
        ways += [
            Way(f"{text}: sent and stored plain", transport, None, is_sent_encoded=False),
            Way(f"{text}: encoded by the server", transport, ZSTD, is_sent_encoded=False),
            Way(f"{text}: sent encoded", transport, ZSTD, is_sent_encoded=True, goal=GOAL),
            Way(f"{text}: sent encoded, stored plain", transport, None, is_sent_encoded=True),
        ]
    for verification in (Verification.SAMPLED, Verification.OFF):
        name = f"body: encoded by the server, verification {verification.value}"
        ways.append(Way(name, "body", ZSTD, False, verification))
    return ways


def measure_encoded_puts(bench: Bench) -> Iterator[Row]:
    """A row for each way to have chunks stored as frames, or not."""
    ways = _ways()
    count = QUICK_CHUNKS if bench.scale.is_quick else CHUNKS
    chunks = normal_chunks(count)
    with bench.server() as server, server.client() as client:
        puts = {way.name: _Put(client, server, way, chunks) for way in ways}
        for number in range(ROUNDS + 1):
            for way in ways:
                if number == 1:  # the first round fills caches
                    way.rates.clear()
                    way.client_rates.clear()
                puts[way.name].take(f"{number}")
        wire_bytes = puts[ways[2].name].wire_bytes
    yield from _rows(ways, chunks.nbytes, wire_bytes)


def normal_chunks(count: int) -> npt.NDArray[np.uint8]:
    """bfloat16 of a normal distribution: uint8[count, layers, slice_bytes]."""
    shape = (count, LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes // 2)
    floats = np.random.default_rng(1).standard_normal(shape, np.float32)
    return (floats.view("<u4") >> 16).astype("<u2").view(np.uint8)


class _Put:
    """Puts the same chunks again and again, under other keys."""

    def __init__(
        self, client: Client, server: Server, way: Way, chunks: npt.NDArray[np.uint8]
    ) -> None:
        self._client, self._server, self._way, self._chunks = client, server, way, chunks
        self._bucket: KvBucket = client.kv_bucket(way.bucket, LAYOUT, create=True)
        policy = BucketPolicy(encoding=way.stored, verification=way.verification)
        with closing(StorageSocket(server.settings)) as storage:
            storage.ask(SetPolicy(bucket=way.bucket, policy=policy), Done)
        self.wire_bytes = chunks.nbytes

    def take(self, series: str) -> None:
        """Put them once, and delete them."""
        keys = [f"{series}-{number}" for number in range(len(self._chunks))]
        server_s, own_s = processor_s(self._server.storage_pid), time.process_time()
        if self._way.is_sent_encoded:
            self._put_encoded(keys)
        else:
            self._bucket.put(keys, self._chunks, transport=self._way.transport)
        own_s = time.process_time() - own_s
        server_s = processor_s(self._server.storage_pid) - server_s
        self._way.rates.append(self._chunks.nbytes / server_s / GB)
        self._way.client_rates.append(self._chunks.nbytes / own_s / GB)
        self._server.delete(self._way.bucket, keys)

    def _put_encoded(self, keys: list[str]) -> None:
        """As `KvBucket.put` does; here the length of the payload is noted."""
        descriptor = Descriptor(
            tuple(keys),
            LAYOUT.num_layers,
            LAYOUT.chunk_tokens,
            LAYOUT.per_layer_chunk_bytes,
            DeliveryMode.CHUNKWISE,
        )
        core = self._client._core  # pyright: ignore[reportPrivateUsage]
        transport = TransportChoice.parse(self._way.transport)
        put = PutRequest(self._way.bucket, descriptor, transport, 60.0, ZSTD.value, 2)
        layers = EncodedLayers(put, ZSTD.value)
        for layer in range(LAYOUT.num_layers):
            layers.add(list(self._chunks[:, layer]))
        encoded = layers.payload()
        assert encoded is not None
        self.wire_bytes = encoded[0].payload_bytes
        put_parts(core, *encoded)


def processor_s(pid: int) -> float:
    """Processor time of another process and all its threads, by its clock (clock_getcpuclockid)."""
    return time.clock_gettime(~pid << 3 | 2)


def _by_hand(way: Way) -> str:
    """Of 1.1 GB/s of a decoder, 0.8 of an encoder, and 2 of a plain put's copies and hashes."""
    is_full = way.verification is Verification.FULL
    decodes = way.is_sent_encoded or (way.stored is not None and is_full)
    encodes = way.stored is not None and not way.is_sent_encoded
    seconds = 1 / 2 + (1 / 1.1 if decodes else 0.0) + (1 / 0.8 if encodes else 0.0)
    return f"{1 / seconds:.2f} GB/s"


def _rows(ways: list[Way], chunk_bytes: int, wire_bytes: int) -> Iterator[Row]:
    group = f"Puts of frames: {chunk_bytes // MIB} MiB of bf16, by the server's processor time"
    plain = {way.transport: way for way in ways if way.stored is None and not way.is_sent_encoded}
    for way in ways:
        of = plain[way.transport]
        pairs = [mine / its for mine, its in zip(way.rates, of.rates, strict=True)]
        yield Row(
            group=group,
            name=way.name,
            unit="GB/s",
            samples=tuple(way.rates),
            ratio=float(np.median(pairs)),
            ratio_of=of.name,
            goal="" if way.goal is None else f"{way.goal} GB/s",
            by_hand=_by_hand(way),
            details={
                "wire_ratio": chunk_bytes / wire_bytes if way.is_sent_encoded else 1.0,
                "client_gb_per_processor_s": float(np.median(way.client_rates)),
            },
            ratios=tuple(pairs),
        )
    yield Row(
        group=group,
        name="plain bytes of those on the wire, sent encoded",
        unit="ratio",
        samples=(chunk_bytes / wire_bytes,),
        ratio=chunk_bytes / wire_bytes,
        ratio_of="bytes on the wire",
        goal="1.42",
        by_hand="1.49 of normal numbers",
    )
