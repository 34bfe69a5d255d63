"""An engine's GPU that is emulated: its copier, for an engine that computes on the host."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Literal

from objectcache.connectors.device.engine_copier import EngineCopier
from objectcache.gpu.copier import Copier
from objectcache.gpu.device import Lane, Mark, Way
from objectcache.gpu.line import LineSettings
from objectcache.gpu.links.checked_links import CheckedLinks
from objectcache.gpu.links.pull_settings import PAPERS
from tests.emulated_device import EmulatedDevice


class EmulatedGpu(EmulatedDevice):
    """Streams of the engine, one a thread, in which nothing but waits is queued: the engine has
    computed when its calls return. So whoever has a stream wait has waited when the call returns.
    """

    def __init__(self, rate_bytes_per_s: float | None = None) -> None:
        super().__init__(rate_bytes_per_s)
        self._own = threading.local()
        self._engine_lanes: list[Lane] = []

    def hold(self, stream: int, mark: Mark) -> None:
        super().hold(stream, mark)
        self.mark(stream).wait()

    def current_stream(self) -> int:
        """The calling thread's."""
        if not hasattr(self._own, "stream"):
            lane = self.lane(1, 1)
            self._engine_lanes.append(lane)
            self._own.stream = lane.stream
        stream: int = self._own.stream
        return stream

    def close(self) -> None:
        """End the engine's streams."""
        for lane in self._engine_lanes:
            lane.close()


def emulated_copier(
    gpu: EmulatedGpu,
    way: Way = Way.STAGED,
    links: Literal["host", "direct"] | CheckedLinks = "direct",
) -> EngineCopier:
    """A copier whose micro-tasks are small, so that a layer has several."""
    settings = LineSettings(way, task_bytes=8 << 10, depth=3, pieces_max=7)
    copier = Copier(gpu, loads=settings, saves=settings, links=links)
    return EngineCopier(copier, gpu.current_stream)


def two_links(gpu: EmulatedGpu) -> CheckedLinks:
    """The GPU's own link and that of a neighbour, which share a layer however small it is."""
    rules = replace(PAPERS, chunk_bytes=8 << 10, pieces_max=7, fallback_bytes=0)
    return CheckedLinks(gpu, (EmulatedDevice(beside=gpu),), {}, rules)
