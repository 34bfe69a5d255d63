"""Staging memory of which a part is withdrawn, because a device may still touch it."""

from __future__ import annotations

import random

import pytest

from objectcache_fabrics.staging_memory import StagingMemory

BUFFER_BYTES = 4096


def taken(staging: StagingMemory, count: int) -> list[memoryview]:
    return [staging.take(BUFFER_BYTES) for _ in range(count)]


def offsets(staging: StagingMemory, views: list[memoryview]) -> set[int]:
    return {staging.offset_of(view) for view in views}


def test_a_withdrawn_buffer_is_handed_out_to_nobody_again() -> None:
    staging = StagingMemory(BUFFER_BYTES, 4 * BUFFER_BYTES)
    reserved_bytes = staging.reserve(3 * BUFFER_BYTES)
    views = taken(staging, 3)
    staging.withdraw(views[1][100:200])  # any piece of it
    staging.withdraw(views[1])
    for view in views:
        staging.put(view)
    staging.release(reserved_bytes)
    assert staging.capacity_bytes == 3 * BUFFER_BYTES
    assert staging.length_bytes == 4 * BUFFER_BYTES
    assert staging.reserve(4 * BUFFER_BYTES, BUFFER_BYTES) == 3 * BUFFER_BYTES
    assert staging.offset_of(views[1]) not in offsets(staging, taken(staging, 3))
    assert staging.reserve(BUFFER_BYTES, BUFFER_BYTES) == 0
    assert f"and {BUFFER_BYTES} are out of use" in staging.shortage


def test_when_all_is_withdrawn_nothing_is_granted() -> None:
    staging = StagingMemory(BUFFER_BYTES, 2 * BUFFER_BYTES)
    staging.reserve(2 * BUFFER_BYTES)
    for view in taken(staging, 2):
        staging.withdraw(view)
        staging.put(view)
    assert staging.reserve(BUFFER_BYTES, BUFFER_BYTES) == 0
    staging.release(2 * BUFFER_BYTES)
    assert staging.promised_bytes == staging.capacity_bytes == 0
    assert staging.reserve(BUFFER_BYTES, BUFFER_BYTES) == 0


@pytest.mark.parametrize("seed", range(20))
def test_whoever_has_a_grant_finds_its_buffers_whatever_others_withdraw(seed: int) -> None:
    rng = random.Random(seed)
    staging = StagingMemory(BUFFER_BYTES, 32 * BUFFER_BYTES)
    running: list[tuple[int, list[memoryview]]] = []
    withdrawn: set[int] = set()
    for _ in range(500):
        assert 0 <= staging.promised_bytes <= staging.capacity_bytes
        if rng.random() < 0.5:
            reserved_bytes = staging.reserve(rng.randint(1, 6) * BUFFER_BYTES, BUFFER_BYTES)
            views = taken(staging, rng.randint(0, reserved_bytes // BUFFER_BYTES))
            assert withdrawn.isdisjoint(offsets(staging, views))
            running.append((reserved_bytes, views))
        elif running:
            reserved_bytes, views = running.pop(rng.randrange(len(running)))
            for view in views:
                if rng.random() < 0.02:
                    withdrawn.add(staging.offset_of(view))
                    staging.withdraw(view)
                staging.put(view)
            staging.release(reserved_bytes)
    for reserved_bytes, views in running:
        for view in views:
            staging.put(view)
        staging.release(reserved_bytes)
    assert staging.capacity_bytes == (32 - len(withdrawn)) * BUFFER_BYTES
    assert staging.promised_bytes == 0
