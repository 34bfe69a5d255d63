"""What a scheduler chooses at a time: a piece of a delivery's payload."""

from __future__ import annotations

from typing import NamedTuple


class Fragment(NamedTuple):
    """A contiguous piece of the payload: some chunks' slices of some layers, or part of one slice.

    `skip_bytes` is where it begins within its first slice; it is 0 unless a slice is larger than a
    fragment.
    """

    offset_bytes: int  # in the payload
    length_bytes: int
    first_chunk: int
    end_chunk: int
    first_layer: int
    end_layer: int
    skip_bytes: int = 0
