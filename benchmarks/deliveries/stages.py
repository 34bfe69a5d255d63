"""Where the time until the first layer goes: the client's clock, and the server's own trace.

One warm get after another, from a process on the same host. The client's clock gives the whole; the
trace gives what the client spent before it sent, and, from the request's arrival at the server,
when the first read began and when the layer was in place. What is left of the whole is the way
there and back: sockets, and processes that have to wake.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import HTTP_ROUND_TRIP_S, Row, Samples, milliseconds
from benchmarks.basis.prefix import MLA_TOKEN_BYTES, Geometry
from benchmarks.basis.server import Server
from benchmarks.basis.storage_socket import StorageSocket
from benchmarks.deliveries.warm import CACHED, CACHED_SHOWN
from objectcache import Client, KvBucket
from objectcache_laboratory.replay.kv_bytes import KvBytes
from objectcache_schemas.operators.traces import DeliveryTrace, GetTraces, Traces

GROUP = "Where the time until the first layer goes"
WHOLE = "until the engine has it"
STAGES = (
    "in the client, until it sends",
    "from arrival until the first read begins",
    "reading the first layer",
    "the way there and back",
)
WAYS = {"shared_memory": "shared memory", "body": "an HTTP body"}
MLA_LAYERS, GETS_A_REPEAT = 61, 6


@dataclass(frozen=True, slots=True)
class FirstLayer:
    """Seconds of one get; the last three are by the server's trace."""

    whole_s: float
    client_s: float
    first_read_s: float  # from the arrival
    ready_s: float

    def stages_s(self) -> tuple[float, ...]:
        """In the order of `STAGES`; they add up to the whole."""
        way_s = self.whole_s - self.client_s - self.ready_s
        return self.client_s, self.first_read_s, self.ready_s - self.first_read_s, way_s


def geometries(is_quick: bool) -> Sequence[Geometry]:
    """Prefixes of few chunks: MLA at G=64, and Llama-3.1-8B at G=16."""
    few = [Geometry(64, count, MLA_TOKEN_BYTES, MLA_LAYERS) for count in (4, 16)]
    return few[:1] if is_quick else (*few, *(Geometry(16, count) for count in (64, 256)))


def measure_stages(bench: Bench) -> Iterator[Row]:
    """Rows for each stage of each prefix, by each transport."""
    gets = bench.scale.repeats * GETS_A_REPEAT
    with bench.server(CACHED) as server, server.client() as client:
        for geometry in geometries(bench.scale.is_quick):
            for transport, way in WAYS.items():
                taken = list(_gets(server, client, geometry, transport, gets))
                yield from stage_rows(f"{geometry.chunk_count} chunks, {way}", taken)


def stage_rows(name: str, gets: Sequence[FirstLayer]) -> Iterator[Row]:
    """The whole and each stage of it, as medians of the same gets."""
    samples = Samples()
    for get in gets:
        samples.add(WHOLE, get.whole_s)
        for stage, stage_s in zip(STAGES, get.stages_s(), strict=True):
            samples.add(stage, stage_s)
    for stage, seconds in samples.seconds.items():
        yield Row(
            group=GROUP,
            name=f"{name}: {stage}",
            unit="ms",
            samples=milliseconds(seconds),
            ratio=samples.median_s(stage) / samples.median_s(WHOLE),
            ratio_of=WHOLE,
            goal="",
            by_hand=_BY_HAND.get(stage, "well below the round trip"),
            settings=CACHED_SHOWN,
        )


_BY_HAND: Mapping[str, str] = {
    WHOLE: f"one round trip, {1000 * HTTP_ROUND_TRIP_S:g} ms, and the layer",
    STAGES[2]: "the layer at the rate of two copies",
}


def _gets(
    server: Server, client: Client, geometry: Geometry, transport: str, count: int
) -> Iterator[FirstLayer]:
    keys = geometry.keys()
    name = f"stages-{geometry.chunk_count}-{transport.replace('_', '-')}"
    bucket = client.kv_bucket(name, geometry.layout(), create=True)
    bucket.put(keys, KvBytes(geometry.layout()).chunks(keys))
    for number in range(count + 1):
        whole_s, request_id = _get(bucket, keys, transport)
        if number:  # the first one opens connections
            with closing(StorageSocket(server.settings)) as storage:
                (trace,) = storage.ask(GetTraces(request_id=request_id), Traces).traces
            yield first_layer(whole_s, trace)


def _get(bucket: KvBucket, keys: list[str], transport: str) -> tuple[float, str]:
    begun_s = time.perf_counter()
    with bucket.fetch(keys, delivery="layerwise", transport=transport) as delivery:
        delivery.wait_layer(0)
        whole_s = time.perf_counter() - begun_s
        delivery.wait()
        return whole_s, delivery.request_id


def first_layer(whole_s: float, trace: DeliveryTrace) -> FirstLayer:
    """The get that the client timed, by its trace."""
    layer = trace.layers[0]
    assert layer.first_read_s is not None
    assert layer.ready_s is not None
    client_s = sum(phase.seconds for phase in trace.phases if phase.name == "client")
    return FirstLayer(whole_s, client_s, layer.first_read_s, layer.ready_s)
