"""Loads beside vLLM's steps: their copies come behind what the engine asked for before them, and
before what it asks for after them; a copy that fails is a load that failed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from objectcache.connectors.vllm.before_schedule.parked_loads import ParkedLoads
from objectcache.connectors.vllm.before_schedule.side_copies import (
    DeviceCopies,
    HostCopies,
    SideCopies,
    side_copies_of,
)
from objectcache.connectors.vllm.plans import LoadPlan
from objectcache.connectors.vllm.worker.block_copies import WaitedCopies
from objectcache.connectors.vllm.worker.loads import SharedByLoads
from objectcache.deliveries.layer_progress import LayerProgress

BLOCKS = (3, 4)
LAYERS = 2
PLAN = LoadPlan("r", BLOCKS, (b"a", b"b"), 100, "w")


class FakeDevice:
    """torch's module of a device: what is asked of it, in its order and by which thread."""

    type = "cuda"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.engine = threading.get_ident()
        self.before_end: Any = lambda: None
        self.fails_at = ""

    def call(self, what: str) -> None:
        self.calls.append(what if threading.get_ident() == self.engine else f"beside: {what}")
        if self.fails_at and what.startswith(self.fails_at):
            raise RuntimeError(f"CUDA error at {what}")

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def Stream(self, device: Any) -> FakeStream:
        assert device is self
        self.call("new stream")
        return FakeStream(self, "own stream")

    def current_stream(self, device: Any) -> FakeStream:
        assert device is self
        return FakeStream(self, "engine's stream")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.call(f"into {stream.name}")
        yield
        self.call(f"out of {stream.name}")


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.of = ""

    def record(self, stream: FakeStream) -> None:
        self.of = stream.name
        self.device.call(f"event on {self.of}")


class FakeStream:
    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device = device
        self.name = name

    def wait_event(self, event: FakeEvent) -> None:
        self.device.call(f"{self.name} waits for event on {event.of}")

    def synchronize(self) -> None:
        self.device.before_end()
        self.device.call(f"wait for {self.name}")


class Whole:
    """A delivery that is there."""

    chunk_count, slice_bytes, layers = len(BLOCKS), 8, range(LAYERS)

    def __init__(self) -> None:
        self.progress = LayerProgress(0, LAYERS)
        self.progress.advance(LAYERS)

    def wait_layer(self, layer: int, timeout_s: float) -> Any:
        return np.zeros((len(BLOCKS), 8), np.uint8)

    def close(self) -> None:
        pass


def loads_of(device: FakeDevice, copies: SideCopies) -> ParkedLoads:
    layer = SimpleNamespace(load=lambda blocks, slices: device.call(f"copy into {blocks}"))
    return ParkedLoads(
        lambda plan: cast("Any", Whole()), WaitedCopies(cast("Any", [layer] * LAYERS)), 10.0, copies
    )


def run(loads: ParkedLoads) -> None:
    """Load, and come back when its threads are through."""
    loads.start([PLAN])
    loads._laying.shutdown(wait=True)


def test_copies_come_behind_the_engines_steps_and_are_waited_for_before_the_end_is_told() -> None:
    device = FakeDevice()
    loads = loads_of(device, DeviceCopies(device, device))
    told_early: list[set[str]] = []
    device.before_end = lambda: told_early.append(loads.take_ended())
    run(loads)
    assert device.calls == [
        "event on engine's stream",
        "beside: new stream",
        "beside: own stream waits for event on engine's stream",
        "beside: into own stream",
        *["beside: copy into (3, 4)"] * LAYERS,
        "beside: out of own stream",
        "beside: wait for own stream",
    ]
    assert told_early == [set()]
    assert loads.take_ended() == {"r"}
    assert loads.take_failed_blocks() == set()
    assert loads.loaded_blocks == len(BLOCKS)
    loads.close()


def test_what_the_engine_asks_for_after_the_start_is_not_waited_for() -> None:
    device = FakeDevice()
    copying = DeviceCopies(device, device).behind_steps()
    device.call("the step's own kernels")
    with copying:
        device.call("copy")
    assert device.calls[:2] == ["event on engine's stream", "the step's own kernels"]
    assert device.calls.count("event on engine's stream") == 1


def test_on_the_host_no_device_is_asked_for_anything() -> None:
    device = FakeDevice()
    loads = loads_of(device, HostCopies())
    run(loads)
    assert device.calls == ["beside: copy into (3, 4)"] * LAYERS
    assert loads.take_failed_blocks() == set()
    loads.close()


@pytest.mark.parametrize(
    "fails_at", ["new stream", "own stream waits", "into", "copy", "out of", "wait for"]
)
def test_whatever_fails_of_the_copies_none_of_the_blocks_is_there(
    fails_at: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeDevice()
    device.fails_at = fails_at
    loads = loads_of(device, DeviceCopies(device, device))
    run(loads)
    assert loads.take_ended() == {"r"}
    assert loads.take_failed_blocks() == set(BLOCKS)
    assert (loads.loaded_blocks, loads.failures) == (0, 1)
    assert "CUDA error at" in caplog.text
    loads.close()


def test_after_a_failed_copy_the_others_are_still_waited_for() -> None:
    device = FakeDevice()
    device.fails_at = "copy"
    loads = loads_of(device, DeviceCopies(device, device))
    run(loads)
    assert device.calls[-1] == "beside: wait for own stream"
    loads.close()


def test_a_device_says_by_its_kind_how_copies_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    stand_in = SimpleNamespace(get_device_module=lambda asked: asked)
    monkeypatch.setitem(sys.modules, "torch", cast("Any", stand_in))
    copying: AbstractContextManager[None] = side_copies_of(device).behind_steps()
    with copying:
        pass
    assert device.calls[0] == "event on engine's stream"
    assert isinstance(side_copies_of(SimpleNamespace(type="cpu")), HostCopies)


def test_what_came_whole_is_told_with_its_bytes_and_its_time() -> None:
    told: list[tuple[int, float]] = []
    device = FakeDevice()
    layer = SimpleNamespace(load=lambda blocks, slices: device.call("copy"))
    for fails_at, whole in (("", 1), ("copy", 0)):
        device.fails_at = fails_at
        loads = ParkedLoads(
            lambda plan: cast("Any", Whole()),
            WaitedCopies(cast("Any", [layer] * LAYERS)),
            10.0,
            HostCopies(),
            SharedByLoads(lambda count, load_s: told.append((count, load_s))),
        )
        run(loads)
        assert [count for count, _ in told] == [LAYERS * len(BLOCKS) * 8] * whole
        told.clear()
        loads.close()
