"""How long an engine computes on a layer: learned of its steps, and told as they are computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from objectcache.connectors.timing.compute_windows import (
    FORGETTING,
    STEPS_KEPT,
    STEPS_MIN,
    BatchShape,
    WindowLearner,
)
from objectcache.connectors.timing.moments import DeviceClock, HostClock, clock_of
from objectcache.connectors.timing.step_windows import STEPS_MAX, Step, StepWindows
from objectcache.deliveries.consumption import Consumption, ConsumptionReports
from objectcache.deliveries.layer_progress import LayerProgress

PREFILL = BatchShape.of([(1024, 4096)])


def gpu_like_s(shape: BatchShape) -> float:
    """A Llama-3.1-8B's layer: launches, matrices that are read at least once, attention."""
    return 40e-6 + max(220e-6, 0.9e-6 * shape.tokens) + 3.5e-11 * shape.pairs


def random_shape(chooser: random.Random) -> BatchShape:
    """A step of one to four requests, of which each computes 16 to 2,048 tokens."""
    count = chooser.choice([1, 1, 1, 2, 4])
    return BatchShape.of(
        (int(2 ** chooser.uniform(4, 11)), chooser.choice([0, 1024, 4096, 16384, 65536]))
        for _ in range(count)
    )


def test_a_batch_counts_its_tokens_and_what_each_of_them_attends_to() -> None:
    assert BatchShape.of([(4, 0)]) == BatchShape(4, 8.0)
    assert BatchShape.of([(1, 100), (10, 1000)]) == BatchShape(11, 100.5 + 10 * 1005)
    assert BatchShape.of([]) == BatchShape(0, 0.0)


def test_nothing_is_claimed_of_an_engine_that_has_just_begun() -> None:
    learner = WindowLearner()
    for _ in range(STEPS_MIN):
        assert learner.window_s(PREFILL) is None
        learner.learn(PREFILL, [0.004, 0.005, 0.006])
    assert learner.window_s(PREFILL) == pytest.approx(0.005)


@pytest.mark.parametrize("seed", range(5))
def test_windows_of_shapes_that_were_never_seen_are_within_a_fifth(seed: int) -> None:
    chooser = random.Random(seed)
    learner = WindowLearner()
    errors: list[float] = []
    for number in range(120):
        shape = random_shape(chooser)
        true_s = gpu_like_s(shape)
        predicted_s = learner.window_s(shape)
        if number >= 20 and predicted_s is not None:
            errors.append(abs(predicted_s / true_s - 1))
        learner.learn(shape, [true_s * chooser.uniform(0.97, 1.03) for _ in range(32)])
    errors.sort()
    assert len(errors) > 90
    assert errors[int(0.9 * len(errors))] < 0.2
    assert errors[len(errors) // 2] < 0.05


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_whole_prompts_is_not_taken_for_attention_to_a_long_prefix(seed: int) -> None:
    chooser = random.Random(seed)
    learner = WindowLearner()
    for computed in (200, 60, 500, 120):
        whole = BatchShape.of([(computed, 0)])
        learner.learn(whole, [gpu_like_s(whole) * chooser.uniform(0.85, 1.15)])
    behind = BatchShape.of([(210, 8000)])
    assert learner.window_s(behind) == pytest.approx(gpu_like_s(behind), rel=0.35)


def test_many_small_steps_do_not_crowd_a_large_one_out() -> None:
    learner = WindowLearner()
    for _ in range(STEPS_MIN):
        learner.learn(PREFILL, [gpu_like_s(PREFILL)])
    for context in range(10_000):
        decode = BatchShape.of([(1, context)])
        learner.learn(decode, [gpu_like_s(decode)])
    assert learner.window_s(PREFILL) == pytest.approx(gpu_like_s(PREFILL), rel=0.1)


def test_nothing_is_claimed_of_a_step_that_is_unlike_all_that_were_seen() -> None:
    learner = WindowLearner()
    for context in range(100):
        learner.learn(BatchShape.of([(1, context)]), [0.0003])
    assert learner.window_s(PREFILL) is None


def test_an_engine_that_becomes_slower_is_followed() -> None:
    learner = WindowLearner()
    for layer_s in [0.001] * STEPS_KEPT + [0.002] * STEPS_KEPT:
        learner.learn(PREFILL, [layer_s])
    assert learner.window_s(PREFILL) == pytest.approx(0.002)
    assert FORGETTING < 1


def test_one_step_that_was_held_up_does_not_count_for_much() -> None:
    learner = WindowLearner()
    for layer_s in (0.001, 0.001, 0.001, 0.050, 0.001):
        learner.learn(PREFILL, [layer_s])
    assert learner.window_s(PREFILL) == pytest.approx(0.001, rel=0.1)


@pytest.mark.parametrize("layers_s", [[], [0.0], [-1.0], [1e9]])
def test_what_is_no_time_of_a_layer_teaches_nothing(layers_s: list[float]) -> None:
    learner = WindowLearner()
    for _ in range(5):
        learner.learn(PREFILL, layers_s)
        learner.learn(BatchShape(0, 0.0), [0.5])
    assert learner.window_s(PREFILL) is None
    assert learner.window_s(BatchShape(0, 0.0)) is None
    assert repr(learner) == "<WindowLearner 0 steps, 0 kept>"


# --- steps as they are computed ------------------------------------------------------------------


class FakeDevice:
    """torch's module of a device that is behind its host: it computes when it is let."""

    def __init__(self) -> None:
        self.queue: list[FakeEvent | float] = []  # events, and seconds of computing
        self.now_s = 100.0

    def Event(self, *, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)

    def compute(self, seconds: float) -> None:
        """The host asks for a kernel."""
        self.queue.append(seconds)

    def run(self, kernels: int) -> None:
        """The device computes so many kernels, and all events up to the next one."""
        while self.queue:
            first = self.queue[0]
            if isinstance(first, FakeEvent):
                first.at_s = self.now_s
            elif kernels:
                kernels -= 1
                self.now_s += first
            else:
                return
            self.queue.pop(0)

    def synchronize(self) -> None:
        raise AssertionError("the engine was held up")


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at_s: float | None = None

    def record(self) -> None:
        self.device.queue.append(self)

    def query(self) -> bool:
        return self.at_s is not None

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds; torch raises where one of both has not come."""
        assert self.at_s is not None
        assert end.at_s is not None
        return 1e3 * (end.at_s - self.at_s)


Told = tuple[int, float]


def listening(layers: int) -> tuple[ConsumptionReports, list[Told]]:
    """Reports of a delivery that is whole, and what is told of it."""
    told: list[Told] = []
    progress = LayerProgress(0, layers)
    progress.advance(layers)

    def hear(consumption: Consumption) -> None:
        assert consumption.is_measured
        told.append((consumption.end_layer, round(consumption.compute_s, 9)))

    return ConsumptionReports(progress, hear), told


def computed_step(
    windows: StepWindows, layers: int, compute: Callable[[int], None], *deliveries: Any
) -> None:
    """A step of the engine, whose calls return when `compute` does."""
    step = Step(PREFILL)
    windows.step_begins(step)
    for reports in deliveries:
        step.joins(reports)
    for layer in range(layers):
        windows.wait_begins()
        windows.wait_ended(layer)
        compute(layer)
    windows.step_ends()


def test_a_device_that_is_behind_is_measured_by_its_own_clock_and_never_waited_for() -> None:
    device = FakeDevice()
    windows = StepWindows(DeviceClock(device))
    reports, told = listening(3)
    computed_step(windows, 3, lambda layer: device.compute(0.01 * (layer + 1)), reports)
    reports.close()
    assert told == []  # every call of the step was made, and nothing is computed
    device.run(kernels=1)
    windows.wait_begins()  # the engine comes by
    assert told == [(1, 0.01)]
    device.run(kernels=2)
    windows.wait_begins()
    assert told == [(1, 0.01), (2, 0.02), (3, 0.03)]
    assert windows.expected_s(PREFILL) is None
    computed_step(windows, 3, lambda _: device.compute(0.02))
    device.run(kernels=3)
    windows.wait_begins()
    assert windows.expected_s(PREFILL) == pytest.approx(0.02)


def test_a_window_that_is_asked_for_knows_all_that_the_device_has_computed() -> None:
    device = FakeDevice()
    windows = StepWindows(DeviceClock(device))
    for _ in range(STEPS_MIN):
        computed_step(windows, 3, lambda _: device.compute(0.02))
        device.run(kernels=3)
    assert windows.expected_s(PREFILL) == pytest.approx(0.02)


def test_what_a_device_waits_for_is_not_computing() -> None:
    device = FakeDevice()
    windows = StepWindows(DeviceClock(device))
    reports, told = listening(2)
    step = Step(PREFILL)
    windows.step_begins(step)
    step.joins(reports)
    for layer in range(2):
        windows.wait_begins()
        device.run(kernels=9)
        device.now_s += 5.0  # until the layer is there
        windows.wait_ended(layer)
        device.compute(0.25)
    windows.step_ends()
    device.run(kernels=9)
    windows.wait_begins()
    assert told == [(1, 0.25), (2, 0.25)]


def test_of_a_device_that_stays_behind_old_steps_are_forgotten() -> None:
    device = FakeDevice()
    windows = StepWindows(DeviceClock(device))
    reports, told = listening(2)
    computed_step(windows, 2, lambda _: device.compute(0.5), reports)
    for _ in range(2 * STEPS_MAX):
        computed_step(windows, 2, lambda _: device.compute(0.01))
    assert repr(windows).endswith(f"{2 * STEPS_MAX} layers not measured yet>")
    device.run(kernels=1000)
    windows.wait_begins()
    assert told == []
    assert windows.expected_s(PREFILL) == pytest.approx(0.01)


def test_every_delivery_of_a_step_hears_of_its_layers_and_nothing_is_deduced() -> None:
    clock = ManualClock()
    windows = StepWindows(clock)
    heard = [listening(2), listening(2)]
    for reports, _ in heard:
        reports.wait_begins(0)
        reports.wait_ended(0)
    computed_step(windows, 2, clock.sleep, *(reports for reports, _ in heard))
    assert [told for _, told in heard] == [[(1, 0.125), (2, 0.125)]] * 2


class ManualClock(HostClock):
    """A host's clock that a test moves."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    def sleep(self, _layer: int) -> None:
        self.time_s += 0.125


def test_a_step_that_loads_nothing_teaches_as_well_and_one_that_never_ended_is_ended() -> None:
    clock = ManualClock()
    windows = StepWindows(clock)
    for _ in range(STEPS_MIN):
        windows.step_begins(Step(PREFILL))
        for layer in range(3):
            windows.wait_begins()
            windows.wait_ended(layer)
            clock.sleep(layer)
    windows.step_begins(Step(PREFILL))
    assert windows.expected_s(PREFILL) == pytest.approx(0.125)


def test_a_last_layer_whose_end_nobody_sees_is_told_as_the_others_and_teaches_nothing() -> None:
    clock = ManualClock()
    windows = StepWindows(clock)
    for _ in range(STEPS_MIN):
        step = Step(PREFILL)
        windows.step_begins(step)
        reports, told = listening(3)
        step.joins(reports)
        for layer in range(3):
            windows.wait_begins()
            windows.wait_ended(layer, ends_unseen=layer == 2)
            clock.sleep(layer)
        clock.time_s += 9.0  # what the engine does then is no layer
        assert told == [(1, 0.125), (2, 0.125), (3, 0.125)]
        assert len(step.layers_s) == 2
    assert windows.expected_s(PREFILL) == pytest.approx(0.125)


def test_calls_outside_a_step_are_without_effect() -> None:
    windows = StepWindows(ManualClock())
    windows.wait_begins()
    windows.wait_ended(0)
    windows.step_ends()
    windows.step_ends()
    assert windows.expected_s(PREFILL) is None


def test_a_cpus_clock_is_the_hosts() -> None:
    class Device:
        type = "cpu"

    assert isinstance(clock_of(Device()), HostClock)
    clock = HostClock()
    begin = clock.now()
    assert clock.between_s(begin, begin + 0.5) == pytest.approx(0.5)
