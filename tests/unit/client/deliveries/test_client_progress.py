"""Payload arithmetic, and the layer events that waiters see."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.errors import DeliveryFailed, InvalidRequest
from objectcache.payload import PayloadShape
from objectcache_schemas.descriptor import DeliveryMode

COUNTS = st.integers(1, 5)
DEADLINE_S = 30.0


@given(first=COUNTS, layers=COUNTS, chunks=COUNTS, slice_bytes=COUNTS, spare=COUNTS)
def test_both_orders_show_the_same_payload(
    first: int, layers: int, chunks: int, slice_bytes: int, spare: int
) -> None:
    size = layers * chunks * slice_bytes
    by_layer = np.arange(size, dtype=np.uint16).reshape(layers, chunks, slice_bytes)
    expected = (by_layer % 251).astype(np.uint8)
    for mode in (DeliveryMode.LAYERWISE, DeliveryMode.CHUNKWISE):
        shape = PayloadShape(first, first + layers, chunks, slice_bytes, mode)
        order = expected if mode is DeliveryMode.LAYERWISE else expected.transpose(1, 0, 2)
        memory = np.frombuffer(order.tobytes() + bytes(spare), np.uint8)
        payload = shape.payload(memory)
        assert np.array_equal(payload, expected)
        assert np.shares_memory(payload, memory)


@given(layers=COUNTS, chunks=COUNTS, slice_bytes=COUNTS, part=st.floats(0, 1))
def test_a_layer_counts_when_its_last_byte_is_there(
    layers: int, chunks: int, slice_bytes: int, part: float
) -> None:
    layerwise = PayloadShape(2, 2 + layers, chunks, slice_bytes, DeliveryMode.LAYERWISE)
    chunkwise = PayloadShape(2, 2 + layers, chunks, slice_bytes, DeliveryMode.CHUNKWISE)
    received = int(part * layerwise.payload_bytes)
    whole = [n for n in range(layers + 1) if n * layerwise.layer_bytes <= received]
    assert layerwise.layers_within(received) == 2 + whole[-1]
    complete = received == chunkwise.payload_bytes
    assert chunkwise.layers_within(received) == (2 + layers if complete else 2)


def test_no_chunks_are_a_complete_payload() -> None:
    shape = PayloadShape(0, 3, 0, 40, DeliveryMode.CHUNKWISE)
    assert shape.layers_within(0) == 3
    assert shape.payload(np.empty(0, np.uint8)).shape == (3, 0, 40)


def test_layers_become_usable_in_order_with_their_arrivals() -> None:
    progress = LayerProgress(4, 8, started_s=time.monotonic() - 100)
    progress.advance(6)
    assert [progress.is_ready(layer) for layer in (4, 5, 6, 7)] == [True, True, False, False]
    arrivals_s = progress.arrivals_s
    assert arrivals_s[0] is not None
    assert arrivals_s[0] >= 100
    assert arrivals_s[2:] == [None, None]
    progress.advance(5)  # going back changes nothing
    assert progress.ready_end == 6
    progress.advance(99)
    assert progress.complete


def test_a_layer_outside_the_delivery_is_refused() -> None:
    progress = LayerProgress(4, 8)
    for layer in (3, 8, -1):
        with pytest.raises(InvalidRequest, match="from 4 to 7"):
            progress.wait(layer, None)


def test_nobody_is_woken_for_a_layer_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, begun = LayerProgress(0, 8), threading.Event()
    progress.spare_by(lambda _: begun.set())  # the waiter has the lock, until it sleeps
    condition = progress._condition
    woken: list[int] = []
    notify_all = condition.notify_all

    def counted() -> None:
        woken.append(progress.ready_end)
        notify_all()

    monkeypatch.setattr(condition, "notify_all", counted)
    waiting = threading.Thread(target=progress.wait, args=(5, None))
    waiting.start()
    assert begun.wait(DEADLINE_S)
    for end_layer in range(1, 6):
        progress.advance(end_layer)
    assert woken == []
    progress.advance(7)
    assert woken == [7]
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()


def test_what_is_waited_for_is_told_where_it_is_not_the_next_layer() -> None:
    progress, told = LayerProgress(0, 8), list[int]()
    progress.spare_by(told.append)

    def wait_for(layer: int) -> None:
        with suppress(DeliveryFailed):
            progress.wait(layer, timeout_s=0)

    wait_for(0)
    assert told == []
    wait_for(6)
    wait_for(6)
    wait_for(7)
    assert told == [7, 8], "each once"
    wait_for(2)
    wait_for(0)
    assert told == [7, 8, 3, 1], "somebody waits for less"
    progress.advance(1)
    wait_for(1)
    assert told == [7, 8, 3, 1]
    progress.advance(8)
    wait_for(7)
    assert told == [7, 8, 3, 1]


def test_every_waiter_learns_of_a_failure_with_its_own_exception() -> None:
    progress = LayerProgress(0, 4)
    progress.advance(1)
    failures: list[DeliveryFailed] = []

    def wait(layer: int) -> None:
        try:
            progress.wait(layer, None)
        except DeliveryFailed as failure:
            failures.append(failure)

    threads = [threading.Thread(target=wait, args=(layer,)) for layer in (0, 1, 2, 3)]
    for thread in threads:
        thread.start()
    cause = ConnectionError("gone")
    progress.fail("it broke", cause)
    for thread in threads:
        thread.join(20)
    assert [failure.details.layer for failure in failures] == [1, 1, 1]
    assert len({id(failure) for failure in failures}) == 3
    assert all(failure.__cause__ is cause for failure in failures)
    progress.advance(4)  # too late
    with pytest.raises(DeliveryFailed, match="it broke"):
        progress.wait(3, None)


def test_a_complete_delivery_cannot_fail() -> None:
    progress = LayerProgress(0, 2)
    progress.advance(2)
    progress.fail("too late")
    progress.wait(1, None)


def test_a_wait_that_times_out_leaves_the_delivery_running() -> None:
    progress = LayerProgress(0, 2)
    with pytest.raises(DeliveryFailed, match=r"within 0\.01 s"):
        progress.wait(1, 0.01)
    progress.advance(2)
    progress.wait(1, 0.01)


def test_silence_ends_a_delivery() -> None:
    progress = LayerProgress(0, 2, silence_s_max=0.05)
    progress.advance(1)
    with pytest.raises(DeliveryFailed, match=r"nothing arrived for 0\.05 s"):
        progress.wait(1, 20)
    assert progress.ended
    assert not progress.complete


def test_listeners_hear_of_every_change() -> None:
    progress = LayerProgress(0, 3)
    seen: list[int] = []
    progress.listen(lambda: seen.append(progress.ready_end))
    progress.advance(2)
    progress.fail("it broke")
    progress.fail("again")
    assert seen == [2, 2]
    assert "failed" in repr(progress)


@pytest.mark.parametrize("ends", [lambda one: one.advance(3), lambda one: one.fail("it broke")])
def test_a_listener_is_let_go_of_with_the_last_change(
    ends: Callable[[LayerProgress], None],
) -> None:
    progress = LayerProgress(0, 3)
    held = Held()
    progress.listen(held.hear)
    progress.advance(2)
    let_go = weakref.ref(held)
    del held
    assert let_go() is not None
    gc.disable()
    try:
        ends(progress)
        late = Held()
        progress.listen(late.hear)
        let_go_late = weakref.ref(late)
        del late
        assert (let_go(), let_go_late()) == (None, None)
    finally:
        gc.enable()


class Held:
    def hear(self) -> None:
        """A change."""
