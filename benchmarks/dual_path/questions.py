"""Which rows there are, over which transports."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import Row
from benchmarks.dual_path.rows.lost_relay import measure_lost_relay
from benchmarks.dual_path.rows.many_deliveries import measure_many
from benchmarks.dual_path.rows.one_delivery import measure_one_delivery
from benchmarks.dual_path.rows.processor_time import measure_processor_time
from benchmarks.dual_path.rows.read_once import measure_read_once
from benchmarks.dual_path.rows.traffic_classes import measure_traffic_classes
from benchmarks.dual_path.running import Running, running
from benchmarks.dual_path.volume import FULL, QUICK
from benchmarks.figures.experiment import NotPossible
from objectcache_fabrics.nixl.agent import library
from objectcache_schemas.errors import Unavailable

BODY, NIXL = "body", "nixl"
TRANSPORTS = (BODY, NIXL)
_PARTS: dict[str, tuple[Callable[[Running], Iterator[Row]], Sequence[str]]] = {
    "dual": (measure_many, TRANSPORTS),
    "one-delivery": (measure_one_delivery, TRANSPORTS),
    "traffic-classes": (measure_traffic_classes, (BODY,)),  # UCX marks nothing over TCP
    "lost-relay": (measure_lost_relay, TRANSPORTS),
    "read-once": (measure_read_once, TRANSPORTS),
    "processor-time": (measure_processor_time, TRANSPORTS),
}
PARTS = tuple(_PARTS)


def measure_dual_path(bench: Bench) -> Iterator[Row]:
    """All rows, or none where this machine has no namespaces: then a line says why."""
    try:
        yield from measure_parts(bench, PARTS, TRANSPORTS)
    except NotPossible as why:
        print(f"routes over other nodes are left out: {why}", file=sys.stderr)


def measure_parts(bench: Bench, parts: Sequence[str], transports: Sequence[str]) -> Iterator[Row]:
    """Rows of some parts over some transports. Raises `NotPossible`."""
    volume = QUICK if bench.scale.is_quick else FULL
    for transport in transports:
        asked = [name for name in parts if transport in _PARTS[name][1]]
        if not asked or (transport == NIXL and not _has_nixl()):
            continue
        with running(bench, volume, transport) as made:
            for name in asked:
                made.bound_links()
                for row in _PARTS[name][0](made):
                    yield replace(row, details={**row.details, "part": name})


def _has_nixl() -> bool:
    try:
        library()
    except Unavailable as why:
        print(f"deliveries over NIXL are left out: {why}", file=sys.stderr)
        return False
    return True
