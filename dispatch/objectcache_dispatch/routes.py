"""Over which nodes' storage NICs a delivery comes: `direct`, `relay:NODE` or `split`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RouteKind = Literal["direct", "relay", "split"]


@dataclass(frozen=True, slots=True)
class RoutePart:
    """What one node reads. `relay` is None for the prefill worker's own node."""

    node: str
    relay: str | None
    read_bytes: int
    chunk_count: int = 0  # 0 where the delivery is not cut into chunks


@dataclass(frozen=True, slots=True)
class ReadRoute:
    """The parts of one delivery; more than one is a split.

    Of a split, the first part takes the first chunks, the next those after them.
    `predicted_lateness_s` is what the policy expected: how long the last of the layers to be late
    comes after its compute could begin, were the first layer there at once. Without a compute
    window it is when the last layer comes.
    """

    parts: tuple[RoutePart, ...]
    predicted_lateness_s: float = 0.0

    @property
    def kind(self) -> RouteKind:
        """direct: paper's PE read path; relay: its DE read path, or any other node's."""
        if len(self.parts) > 1:
            return "split"
        return "relay" if any(part.relay for part in self.parts) else "direct"

    def __str__(self) -> str:
        """As a header carries it: `direct`, `relay:n7`, `split:direct=40,relay:n7=24`."""
        names = ["direct" if part.relay is None else f"relay:{part.relay}" for part in self.parts]
        if len(self.parts) == 1:
            return names[0]
        shares = (f"{name}={p.chunk_count}" for name, p in zip(names, self.parts, strict=True))
        return "split:" + ",".join(shares)
