"""What a descriptor of 10,000 chunks costs before its first byte."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import KEY_PARSE_S, Row, Samples, milliseconds
from benchmarks.basis.prefix import LAYERS, Geometry
from objectcache_runtime.settings import StorageSettings
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.limits import Limits
from objectcache_storage_server.deliveries.plan import Plan, plan_chunks
from objectcache_storage_server.engines.base import Placement

GROUP = "Planning"
CHUNK_COUNT = 10_000
GOAL_MS = 50.0
PARSED, FIRST_LAYER = "parsed, checked and planned", "and the reads of the first layer"


def measure_planning(bench: Bench) -> Iterator[Row]:
    """Rows for the plan, and for the plan with the reads of one layer worked out."""
    geometry = Geometry(16, CHUNK_COUNT)
    data = Descriptor(
        tuple(geometry.keys()), LAYERS, geometry.chunk_tokens, geometry.slice_bytes
    ).to_bytes()
    placements = [Placement(index, 0) for index in range(CHUNK_COUNT)]
    limits, fragment_bytes = Limits(), StorageSettings().fragment_bytes

    def plan() -> Plan:
        descriptor = Descriptor.from_bytes(data, limits)
        return plan_chunks(descriptor, placements, DeliveryMode.LAYERWISE, fragment_bytes)

    def plan_first_layer() -> None:
        planned, layer_bytes = plan(), CHUNK_COUNT * geometry.slice_bytes
        for fragment in planned.fragments():
            if fragment.offset_bytes >= layer_bytes:
                break
            planned.reads(fragment)

    samples = Samples()
    for _ in range(bench.scale.repeats):
        samples.take(PARSED, plan)
        samples.take(FIRST_LAYER, plan_first_layer)
    for name, goal in ((PARSED, f"at most 1 ({GOAL_MS:g} ms)"), (FIRST_LAYER, "")):
        yield Row(
            group=GROUP,
            name=f"{CHUNK_COUNT:,} chunks {name}",
            unit="ms",
            samples=milliseconds(samples.seconds[name]),
            ratio=1000 * samples.median_s(name) / GOAL_MS,
            ratio_of=f"{GOAL_MS:g} ms",
            goal=goal,
            by_hand=f"{CHUNK_COUNT:,} keys x {KEY_PARSE_S * 1e6:g} us: "
            f"{1000 * CHUNK_COUNT * KEY_PARSE_S:g} ms",
            details={"descriptor_bytes": len(data)},
        )
