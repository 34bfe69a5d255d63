"""Which part of a prefix each source delivers, and where. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from objectcache_schemas.descriptor import RATE_MIN, DeliveryMode, Descriptor


@dataclass(frozen=True, slots=True)
class SplitPart:
    """The chunks from `first` to below `end` of a prefix."""

    first: int
    end: int

    def descriptor(self, whole: Descriptor, layer: int) -> Descriptor:
        """Asks for this part of the prefix that `whole` names, from a layer on."""
        count = len(whole.chunk_keys)
        rate = whole.rate_bytes_per_s
        if rate is not None:
            rate = max(float(RATE_MIN), rate * (self.end - self.first) / count)
        return replace(
            whole,
            chunk_keys=whole.chunk_keys[self.first : self.end],
            delivery=DeliveryMode.LAYERWISE,
            layers=(layer, whole.end_layer),
            rate_bytes_per_s=rate,
            part=(self.first, count),
        )


def even_parts(chunk_count: int, server_count: int) -> list[SplitPart]:
    """As many parts as there are servers, or as chunks where those are fewer; no two differ by more
    than one chunk.
    """
    count = min(chunk_count, server_count)
    bounds = [chunk_count * number // count for number in range(count + 1)]
    return [SplitPart(first, end) for first, end in pairwise(bounds)]


def consecutive_parts(chunk_counts: Sequence[int]) -> list[SplitPart]:
    """Parts of so many chunks each, one after the other."""
    return [SplitPart(first, end) for first, end in pairwise(accumulate(chunk_counts, initial=0))]
