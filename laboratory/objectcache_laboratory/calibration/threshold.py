"""The mode threshold: from which payload on layerwise delivery wins (paper, section 3.4). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GAIN = 0.01  # of TTFT: what is saved below that is not worth the smaller reads


@dataclass(frozen=True, slots=True)
class ModeReading:
    """TTFT of one payload by either mode."""

    payload_bytes: int
    chunkwise_s: float
    layerwise_s: float

    @property
    def gain(self) -> float:
        """What layerwise delivery saves, as a part of the chunkwise TTFT; below 0 it loses."""
        return 1 - self.layerwise_s / self.chunkwise_s


@dataclass(frozen=True, slots=True)
class Threshold:
    """The smallest payload for layerwise delivery; None where none was found, and why."""

    payload_bytes: int | None
    remark: str = ""


def find_threshold(readings: Sequence[ModeReading], gain: float = GAIN) -> Threshold:
    """The smallest payload that was measured from which on layerwise wins at all of them."""
    winning: int | None = None
    ordered = sorted(readings, key=lambda reading: reading.payload_bytes, reverse=True)
    for reading in ordered:
        if reading.gain < gain:
            break
        winning = reading.payload_bytes
    if winning is None:
        return Threshold(None, "layerwise does not win at the largest payload")
    if winning == ordered[-1].payload_bytes:
        return Threshold(winning, "layerwise wins at every payload that was measured")
    return Threshold(winning)
