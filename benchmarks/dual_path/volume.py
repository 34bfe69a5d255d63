"""How much is measured, over links of which rate."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.dual_path.prefixes import PromptShape


@dataclass(frozen=True, slots=True)
class Volume:
    """Rates are of payload, in bytes a second."""

    shape: PromptShape
    relay_nodes: tuple[str, ...]
    deliveries: int  # of a round
    at_once: int
    rounds: int
    single_rounds: int  # of what is one delivery
    killed_at_layers: tuple[int, ...]  # of a delivery whose relay is killed
    storage_bytes_per_s: float
    compute_bytes_per_s: float
    burst_link_bytes_per_s: float  # the compute link that KV and bursts want at once
    burst_count: int
    burst_period_s: float
    relay_timeout_s: float | None = None  # the SDK's own, unless it is to wait for a busy machine

    @property
    def joining_prompt(self) -> int:
        """The prompt that nothing measured is about."""
        return self.deliveries


FULL = Volume(
    shape=PromptShape(num_layers=16, chunk_count=16),
    relay_nodes=("d0", "d1", "d2"),
    deliveries=32,
    at_once=8,
    rounds=3,
    single_rounds=7,
    killed_at_layers=(1, 6, 12),
    storage_bytes_per_s=25e6,
    compute_bytes_per_s=100e6,
    burst_link_bytes_per_s=50e6,
    burst_count=200,
    burst_period_s=0.025,
)
QUICK = Volume(
    shape=PromptShape(num_layers=4, chunk_count=4),
    relay_nodes=("d0",),
    deliveries=6,
    at_once=6,
    rounds=1,
    single_rounds=1,
    killed_at_layers=(1,),
    storage_bytes_per_s=25e6,
    compute_bytes_per_s=100e6,
    burst_link_bytes_per_s=50e6,
    burst_count=10,
    burst_period_s=0.005,
    relay_timeout_s=30.0,
)
