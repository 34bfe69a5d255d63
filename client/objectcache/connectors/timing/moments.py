"""Moments at which an engine begins and ends to compute: by the host's clock, or by its device's.

On a GPU run with Transformers alone; with other engines tested with a stand-in for torch's events.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any


class Clock(ABC):
    """Notes moments of the engine's computing, in the order in which it computes. Nothing waits."""

    @abstractmethod
    def now(self) -> Any:
        """The moment at which all is computed that the engine has asked for until now."""

    @abstractmethod
    def between_s(self, begin: Any, end: Any) -> float | None:
        """Seconds between two moments; None while the second one has not come."""


class HostClock(Clock):
    """Of an engine that has computed when its calls return."""

    def now(self) -> float:
        return time.monotonic()

    def between_s(self, begin: float, end: float) -> float:
        return end - begin


class DeviceClock(Clock):
    """Of an engine whose calls run ahead of its device: events on the current stream."""

    def __init__(self, device_module: Any) -> None:
        """`device_module` is torch's module for the device (`torch.cuda`, say)."""
        self._device_module = device_module

    def now(self) -> Any:
        event = self._device_module.Event(enable_timing=True)
        event.record()
        return event

    def between_s(self, begin: Any, end: Any) -> float | None:
        if not end.query():  # `elapsed_time` would raise; `synchronize` would hold the engine up
            return None
        return float(begin.elapsed_time(end)) / 1e3


def clock_of(device: Any) -> Clock:
    """The clock of a torch.device on which an engine computes."""
    if device.type == "cpu":
        return HostClock()
    import torch  # pyright: ignore[reportMissingImports]

    return DeviceClock(torch.get_device_module(device))
