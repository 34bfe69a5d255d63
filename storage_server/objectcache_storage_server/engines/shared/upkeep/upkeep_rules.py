"""What the settings say of a shared store's upkeep."""

from __future__ import annotations

from dataclasses import dataclass

WRITER_LEASE_S = 30.0
# Twice the longest life of a delivery (storage.delivery_timeout_s, 600 s): what was opened just
# before its deletion is delivered to its end, also by a server whose settings allow more.
GRACE_S = 1200.0


@dataclass(frozen=True, slots=True)
class UpkeepRules:
    """Read once, at the start."""

    capacity_bytes: int = 0  # of this store's objects; 0 is what the store itself has
    high_watermark: float = 0.95  # part of the capacity from which chunks are evicted
    low_watermark: float = 0.90  # part of it down to which they are
    evicts: bool = True  # where space runs out; otherwise puts are refused
    grace_s: float = GRACE_S  # from a deletion to that of the objects
    writer_lease_s: float = WRITER_LEASE_S  # of silence, after which a writer is taken for dead
