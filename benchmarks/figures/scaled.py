"""The paper's requests, with bytes and rates divided so that they fit a small machine.

The scale divides the number of chunks. A slice keeps its real size (64 KiB at 16 tokens a chunk),
because what a store does is done by the slice: with smaller slices it would be measured on work
that nobody has. Where less than one chunk would be left, or no whole number of them, the chunks
take what size is needed to hold exactly the scaled bytes. Compute windows are never scaled.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.basis.prefix import Geometry
from benchmarks.figures.paper_data import (
    MARGIN_GBPS,
    NUM_LAYERS,
    TOKEN_LAYER_BYTES,
    PaperRequest,
)
from objectcache_schemas.operators.schedule import ScheduleChanges
from objectcache_schemas.policy_names import FOR_LIFE, PolicyName
from objectcache_storage_server.scheduling.demand import Demand

QUICK_LAYERS = 4


@dataclass(frozen=True, slots=True)
class ScaledRequest:
    """A request of the paper over `scale`, in chunks of about `chunk_tokens`."""

    paper: PaperRequest
    scale: int
    chunk_tokens: int = 16
    num_layers: int = NUM_LAYERS

    @property
    def geometry(self) -> Geometry:
        """The chunks that hold it. The token's bytes take up what the number of chunks cannot."""
        layer_bytes = self.paper.layer_bytes // self.scale
        whole_bytes = self.chunk_tokens * TOKEN_LAYER_BYTES
        chunk_count = max(1, round(layer_bytes / whole_bytes))
        while layer_bytes % (chunk_count * self.chunk_tokens):
            chunk_count -= 1
        token_bytes = layer_bytes // (chunk_count * self.chunk_tokens)
        return Geometry(self.chunk_tokens, chunk_count, token_bytes, self.num_layers)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer."""
        geometry = self.geometry
        return geometry.chunk_count * geometry.slice_bytes

    @property
    def demand(self) -> Demand:
        """As the scheduler sees it."""
        return Demand(self.layer_bytes, self.paper.window_s, self.num_layers)

    def __str__(self) -> str:
        return f"{self.paper.name}, G={self.chunk_tokens}"


def schedule(policy: PolicyName, cap_gbps: float, scale: int, epoch_s: float) -> ScheduleChanges:
    """The paper's cap, margin and rates, which hold for life, scaled; a cap of 0 is none."""
    return ScheduleChanges(
        policy=policy,
        cap_gbps=cap_gbps / scale,
        margin_gbps=MARGIN_GBPS / scale,
        epoch_s=epoch_s,
        rates=FOR_LIFE,
    )
