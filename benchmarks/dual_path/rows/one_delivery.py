"""One delivery at a time: what a relay costs its first layer, and what a second link gives it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from benchmarks.basis.measure import Row, milliseconds
from benchmarks.dual_path.carried import Carried
from benchmarks.dual_path.deliveries import DoneDelivery, prefill_one
from benchmarks.dual_path.node_side import DIRECT, SPLIT, over
from benchmarks.dual_path.running import GROUP, Running, milliseconds_of

SPLIT_GOAL = "<= 0.53"
HOP_EXTRA_S = 0.003  # beyond a layer's time on the compute link


def measure_one_delivery(running: Running) -> Iterator[Row]:
    """Rows for the last layer, and one for the first."""
    relay = running.volume.relay_nodes[0]
    payload_bytes = running.volume.shape.payload_bytes
    ways: dict[str, list[DoneDelivery]] = {DIRECT: [], over(relay): [], SPLIT: []}
    for number in range(running.volume.single_rounds):
        for route, done in ways.items():
            counted = Carried(running.network)
            done.append(running.engine_of(1).call(prefill_one, number, route))
            counted.check_routes([done[-1].route], running.volume.shape)
    direct, relayed, split = ways.values()
    of_direct = statistics.median(one.last_s for one in direct)
    by_hand = f"{1e3 * payload_bytes / running.volume.storage_bytes_per_s:.0f} ms"
    for name, done, goal, expected in (
        ("direct", direct, "", by_hand),
        ("over a relay", relayed, "", by_hand),
        ("split over both", split, SPLIT_GOAL, f"half of {by_hand}"),
    ):
        last_s = [one.last_s for one in done]
        yield Row(
            GROUP,
            f"one delivery, {running.transport}: last layer, {name}",
            "ms",
            milliseconds(last_s),
            statistics.median(last_s) / of_direct if done is not direct else None,
            "direct" if done is not direct else "",
            goal,
            expected,
            details={
                "first_layers_ms": milliseconds_of([one.first_s for one in done]),
                "routes": dict(Counter(one.route for one in done)),
            },
        )
    layer_s = running.volume.shape.layer_bytes / running.volume.compute_bytes_per_s
    later_s = [one.first_s - before.first_s for one, before in zip(relayed, direct, strict=True)]
    yield Row(
        GROUP,
        f"one delivery, {running.transport}: first layer over a relay, later than direct",
        "ms",
        milliseconds(later_s),
        statistics.median(later_s) / (layer_s + HOP_EXTRA_S),
        "a layer on the compute link and 3 ms",
        "<= 1.0",
        f"{1e3 * layer_s:.1f} ms: a layer goes on when all of it is there",
    )
