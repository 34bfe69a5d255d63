"""A relay that is killed while it sends a delivery on: what is missing comes from elsewhere."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator

from benchmarks.basis.measure import Row, milliseconds
from benchmarks.dual_path.deliveries import (
    Bytes,
    DoneDelivery,
    check,
    join,
    prefill_one,
    prefilled,
)
from benchmarks.dual_path.namespaces import PREFILL
from benchmarks.dual_path.node_side import NodeSide, over
from benchmarks.dual_path.running import GROUP, Running, milliseconds_of
from objectcache_laboratory.reference_engine.kv_chunks import KvSource

DYING = "dying"
GOAL = "<= 1.0"


class DeadlyLayers:
    """A source that kills a process once a layer is there."""

    def __init__(self, source: KvSource, layer: int, pid: int) -> None:
        self._source = source
        self._layer = layer
        self._pid = pid

    def wait_layer(self, layer: int) -> Bytes:
        """Wait for it where it comes from."""
        payload = self._source.wait_layer(layer)
        if layer == self._layer:
            os.kill(self._pid, signal.SIGKILL)
        return payload


def prefill_while_killing(
    side: NodeSide, number: int, route: str, layer: int, pid: int
) -> DoneDelivery:
    """Prefill from a prefix whose relay is killed when a layer is there."""
    keys = side.keys(number)
    begun_s = time.monotonic()
    with side.bucket.fetch(keys, delivery="layerwise", route=route) as delivery:
        done = prefilled(side, number, delivery, DeadlyLayers(delivery, layer, pid), begun_s)
    return check(side, number, done)


def measure_lost_relay(running: Running) -> Iterator[Row]:
    """What it costs beside a delivery of which nothing is lost; bytes and logits are right."""
    node = running.volume.relay_nodes[0]
    shape = running.volume.shape
    whole = [
        running.engine.call(prefill_one, number, over(node)).last_s
        for number in range(running.volume.single_rounds)
    ]
    undisturbed_s = statistics.median(whole)
    lost_s, missing_s = [], []
    for number, layer in enumerate(running.volume.killed_at_layers):
        relay = running.cluster.add_relay(node, name=DYING)
        engine = running.cluster.engine(PREFILL, running.volume)
        engine.call(join, [over(DYING)])
        done = engine.call(prefill_while_killing, number, over(DYING), layer, relay.process.pid)
        lost_s.append(done.last_s - undisturbed_s)
        missing_bytes = (shape.num_layers - layer - 1) * shape.layer_bytes
        missing_s.append(missing_bytes / running.volume.storage_bytes_per_s)
        running.cluster.give_back(engine)
        relay.stop()
    layers = ", ".join(map(str, running.volume.killed_at_layers))
    yield Row(
        GROUP,
        f"one delivery, {running.transport}: time lost by a relay that is killed at layer {layers}",
        "ms",
        milliseconds(lost_s),
        max(lost / missing for lost, missing in zip(lost_s, missing_s, strict=True)),
        "reading what was missing once more (the worst of them)",
        GOAL,
        "what the relay had and had not sent, and a request",
        details={"lost_ms": milliseconds_of(lost_s), "missing_ms": milliseconds_of(missing_s)},
    )
