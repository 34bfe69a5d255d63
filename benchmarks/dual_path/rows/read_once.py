"""A prefix that a prefill and a decode engine need: how often storage links carry it."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.basis.measure import Row
from benchmarks.dual_path.carried import Carried
from benchmarks.dual_path.deliveries import join, prefill_one
from benchmarks.dual_path.namespaces import PREFILL
from benchmarks.dual_path.node_side import DIRECT, over
from benchmarks.dual_path.running import GROUP, Running

HOLDING = "holding"
HOLD = "relay.hold_s=60"  # a busy machine may take its time between both
GOAL = "<= 1.05"


def measure_read_once(running: Running) -> Iterator[Row]:
    """Rows for a decode engine that reads directly, and for one that asks its own relay."""
    node = running.volume.relay_nodes[0]
    payload_bytes = running.volume.shape.payload_bytes
    relay = running.cluster.add_relay(node, HOLD, name=HOLDING)
    prefill = running.cluster.engine(PREFILL, running.volume)
    decode = running.cluster.engine(node, running.volume)
    for engine in (prefill, decode):
        engine.call(join, [DIRECT, over(HOLDING)])
    for name, route, is_at_once, goal in (
        ("reads it directly", DIRECT, False, ""),
        ("asks its own relay afterwards", over(HOLDING), False, GOAL),
        ("asks its own relay meanwhile", over(HOLDING), True, GOAL),
    ):
        reads = []
        for _ in range(running.volume.rounds):
            number = next(running.numbers)
            counted = Carried(running.network)
            begun = prefill.begin(prefill_one, number, over(HOLDING))
            if not is_at_once:
                begun.result()
            decode.call(prefill_one, number, route)
            if is_at_once:
                begun.result()
            is_read_once = route != DIRECT
            counted.check(
                {node: payload_bytes * (1 if is_read_once else 2)}, {PREFILL: payload_bytes}
            )
            reads.append(sum(counted.storage().values()) / payload_bytes)
        yield Row(
            GROUP,
            f"a prefix for prefill and decode, {running.transport}: the decode engine {name}",
            "reads",
            tuple(reads),
            reads[0] if goal else None,
            "the prefix, on all storage links" if goal else "",
            goal,
            "once" if goal else "by each",
        )
    running.cluster.give_back(prefill, decode)
    relay.stop()
