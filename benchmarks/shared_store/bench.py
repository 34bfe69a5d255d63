"""Where a run works: one throwaway Ceph for all its questions, and how much is measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.basis.measure import Row
from benchmarks.s3.radosgw import Radosgw, processor_s
from benchmarks.shared_store.bare_reads import Cost
from benchmarks.shared_store.ceph_gateway import gateway_of
from objectcache_schemas.limits import GIB
from tests.ceph import CephCluster, ceph_cluster

OSD_MEMORY_BYTES = 5 * GIB  # three prefixes stay in its cache


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is measured."""

    chunk_count: int
    s3_chunks: int
    rounds: int
    commits: int
    many_chunks: int
    server_counts: tuple[int, ...]
    seconds: float  # in which servers commit


FULL = Amount(448, 112, 5, 60, 1_000_000, (1, 2, 4, 8), 5.0)
QUICK = Amount(16, 8, 2, 5, 4_000, (1, 2), 1.0)


class SharedBench:
    """Starts what a question asks for, once; `undo` stops it."""

    def __init__(
        self, folder: Path, amount: Amount, undo: ExitStack, ceph: CephCluster | None = None
    ) -> None:
        self.folder = folder
        self.amount = amount
        self.undo = undo
        self._ceph = ceph
        self._gateway: Radosgw | None = None

    @property
    def ceph(self) -> CephCluster:
        """A monitor, a manager and an OSD."""
        if self._ceph is None:
            self._ceph = self.undo.enter_context(ceph_cluster(folder=self.folder))
            self._ceph.tell("config", "set", "osd", "osd_memory_target", str(OSD_MEMORY_BYTES))
        return self._ceph

    @property
    def gateway(self) -> Radosgw:
        """A radosgw over the same OSD."""
        if self._gateway is None:
            self._gateway = self.undo.enter_context(gateway_of(self.ceph))
        return self._gateway

    def address(self, pool: str) -> str:
        """Of a store in a pool."""
        return f"rados://{pool}?conf={self.ceph.conf}"

    @property
    def osd_pids(self) -> tuple[int, ...]:
        """Whose processor time is the store's."""
        return tuple(osd.pid for osd in self.ceph.osds.values())


def with_servers(pids: tuple[int, ...], work: Callable[[], Cost]) -> Cost:
    """A pass, with what servers used of processors meanwhile."""
    before_s = processor_s(pids)
    cost = work()
    return cost._replace(servers_s=processor_s(pids) - before_s)


def cost_rows(
    group: str,
    costs: dict[str, list[Cost]],
    total_bytes: int,
    base: str,
    goals: dict[str, str],
    settings: dict[str, str] | None = None,
) -> list[Row]:
    """Rates, of the median of `base`, and the processor time that goes with them."""
    rows: list[Row] = []
    rates = {
        name: tuple(total_bytes / cost.wall_s / GIB for cost in passes)
        for name, passes in costs.items()
    }
    of = _median(rates[base])
    for name, samples in rates.items():
        client, servers = (
            _median(tuple(GIB * cost[index] / total_bytes for cost in costs[name]))
            for index in (1, 2)
        )
        spent = f"{client:.2f} + {servers:.2f} s/GiB of processors, client + servers"
        best = f"best {max(samples) / max(rates[base]):.3f} of best"
        rows.append(
            Row(
                group,
                f"{name}; {spent}; {best}",
                "GiB/s",
                samples,
                _median(samples) / of,
                base,
                goals.get(name, ""),
                "",
                {"client_s_per_gib": client, "servers_s_per_gib": servers},
                (settings or {}).get(name, ""),
            )
        )
    return rows


def _median(samples: tuple[float, ...]) -> float:
    ordered = sorted(samples)
    return ordered[len(ordered) // 2]
