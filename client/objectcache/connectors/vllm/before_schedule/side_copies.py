"""Copies into vLLM's blocks beside its steps, from other threads: behind what was asked for before
them, and there for what is asked for afterwards.

Not run on a GPU: written against torch's interface, and tested with a stand-in for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


class SideCopies(ABC):
    """Orders copies against the engine's steps, which it never holds up."""

    @abstractmethod
    def behind_steps(self) -> AbstractContextManager[None]:
        """Called in the engine's thread, and entered once in the thread that copies.

        Copies made within it come behind all that the engine has asked its device for until the
        call: that may still zero the blocks, or write them for whoever had them before. They are
        there when it is left, which raises where one of them failed.
        """


class HostCopies(SideCopies):
    """Of an engine that has computed when its calls return."""

    def behind_steps(self) -> AbstractContextManager[None]:
        return nullcontext()


class DeviceCopies(SideCopies):
    """Of an engine whose calls run ahead of its device: each load copies in a stream of its own."""

    def __init__(self, device_module: Any, device: Any) -> None:
        """`device_module` is torch's module for the device (`torch.cuda`, say)."""
        self._device_module = device_module
        self._device = device

    def behind_steps(self) -> AbstractContextManager[None]:
        asked = self._device_module.Event()
        asked.record(self._device_module.current_stream(self._device))
        return self._in_own_stream(asked)

    @contextmanager
    def _in_own_stream(self, asked: Any) -> Generator[None]:
        stream = self._device_module.Stream(self._device)
        stream.wait_event(asked)
        try:
            with self._device_module.stream(stream):
                yield
        finally:
            stream.synchronize()  # also where copies fail: nothing writes the blocks afterwards


def side_copies_of(device: Any) -> SideCopies:
    """For the torch.device that has the blocks."""
    if device.type == "cpu":
        return HostCopies()
    import torch  # pyright: ignore[reportMissingImports]

    return DeviceCopies(torch.get_device_module(device), device)
