"""Many deliveries: over the own storage link alone, and over those of other nodes beside it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from benchmarks.basis.measure import Row
from benchmarks.dual_path.carried import Carried
from benchmarks.dual_path.deliveries import DoneDelivery, join, prefill_all
from benchmarks.dual_path.node_process import NodeProcess
from benchmarks.dual_path.node_side import AUTO, DIRECT, over
from benchmarks.dual_path.running import GROUP, Running, milliseconds_of

GOALS = {1: ">= 1.9", 2: ">= 2.8", 3: ">= 3.6"}


def measure_many(running: Running) -> Iterator[Row]:
    """A row for the own link, one for a relay alone, and one for each number of routes."""
    relays = running.volume.relay_nodes
    ways = {"direct": (DIRECT, 1), "relay alone": (over(relays[0]), 1)}
    for count in range(1, len(relays) + 1):
        ways[f"auto, {count} relay{'s' * (count > 1)}"] = (AUTO, count)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    done: dict[str, list[DoneDelivery]] = {name: [] for name in ways}
    for _ in range(running.volume.rounds):
        for name, (route, count) in ways.items():
            rate, some = _round(running, running.engine_of(count), route)
            rates[name].append(rate / 1e6)
            done[name] += some
    for name, (route, count) in ways.items():
        is_direct = route == DIRECT
        links = count + 1 if route == AUTO else 1
        yield Row(
            GROUP,
            f"{running.volume.deliveries} deliveries, {running.volume.at_once} at once, "
            f"{running.transport}: {name}",
            "MB/s",
            tuple(rates[name]),
            None
            if is_direct
            else statistics.median(rates[name]) / statistics.median(rates["direct"]),
            "" if is_direct else "direct",
            GOALS[count] if route == AUTO else "",
            f"{links} x {running.volume.storage_bytes_per_s / 1e6:g} MB/s",
            details={
                "first_layers_ms": milliseconds_of([one.first_s for one in done[name]]),
                "routes": dict(Counter(one.route for one in done[name])),
                "reasons": dict(Counter(one.reason for one in done[name])),
            },
        )


def _round(running: Running, engine: NodeProcess, route: str) -> tuple[float, list[DoneDelivery]]:
    """Bytes a second, over links that carried what was delivered over them."""
    payload_bytes = running.volume.shape.payload_bytes
    numbers = list(range(running.volume.deliveries))
    engine.call(join, [route, route])  # whose client hears relays' reports from here on
    counted = Carried(running.network)
    taken_s, done = engine.call(prefill_all, numbers, route, running.volume.at_once)
    if not any("failed" in one.reason for one in done):  # such a one has come over two
        counted.check_routes([one.route for one in done], running.volume.shape)
    return len(numbers) * payload_bytes / taken_s, done
