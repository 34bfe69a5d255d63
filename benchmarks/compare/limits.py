"""What the machine itself can do with as many bytes, measured in turn with the paths."""

from __future__ import annotations

import statistics
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from benchmarks.basis.measure import Samples
from benchmarks.machine.loopback import LoopbackStream, loopback_stream


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes a second: of one TCP stream on loopback, and of one thread that copies."""

    loopback: float
    copy: float


class LimitMeter:
    """Measures both once a round."""

    def __init__(self, stream: LoopbackStream, length_bytes: int) -> None:
        self._stream = stream
        self._source = np.ones(length_bytes, np.uint8)
        self._target = np.zeros(length_bytes, np.uint8)
        self._samples = Samples()

    def sample(self) -> None:
        """Measure."""
        self._samples.take("loopback", self._stream.from_memory)
        self._samples.take("copy", lambda: np.copyto(self._target, self._source))

    def limits(self) -> Limits:
        """By the medians."""
        seconds = self._samples.seconds
        length_bytes = len(self._source)
        return Limits(
            loopback=length_bytes / statistics.median(seconds["loopback"]),
            copy=length_bytes / statistics.median(seconds["copy"]),
        )


@contextmanager
def limit_meter(length_bytes: int) -> Generator[LimitMeter]:
    """A meter, and the process that sends to it."""
    with loopback_stream(length_bytes, ()) as stream:
        yield LimitMeter(stream, length_bytes)
