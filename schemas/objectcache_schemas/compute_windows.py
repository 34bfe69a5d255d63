"""Compute windows that can be. Both sides judge by these: a window that is too short claims more of
the link than its delivery needs, at the cost of all others.
"""

from __future__ import annotations

import enum

WINDOW_S_MAX = 3600.0  # of one layer; a rate that follows from a window is a number to wait by
WHOLE_S = 0.0  # as a compute window: nothing is computed between layers, the consumer wants all

# Attention reads a layer's KV at least once, so no layer is computed in less than its bytes take at
# the speed of the memory that holds it. This is above any accelerator's.
DEVICE_BYTES_PER_S_MAX = 25e12

# What a host's clock shows between two waits is a window only where the host computes, or waits for
# its device. A loop that only moves the bytes on shows the time of a copy: 4 to 15 GB/s for one
# thread. So what a host's clock shows above this is no window; whoever knows better says so.
COPY_BYTES_PER_S_MIN = 4e9


class WindowSource(enum.Enum):
    """Where a delivery's compute window came from."""

    DESCRIPTOR = "descriptor"
    PROFILE = "profile"
    LEARNED = "learned"
    WHOLE = "whole"  # the client says that it computes nothing between layers
    DISBELIEVED = "disbelieved"  # told, measured or learned, but shorter than a layer can take
    NONE = "none"


def is_computed(window_s: float, layer_bytes: int) -> bool:
    """Whether a device could compute on a layer of so many bytes in so short a time."""
    return window_s * DEVICE_BYTES_PER_S_MAX >= layer_bytes


def is_no_copy(window_s: float, layer_bytes: int) -> bool:
    """Whether a host's clock has seen more than a copy of a layer of so many bytes."""
    return window_s * COPY_BYTES_PER_S_MIN >= layer_bytes
