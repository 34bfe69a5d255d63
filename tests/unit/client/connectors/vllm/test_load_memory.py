"""Memory for loads that is there before the first of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from objectcache.connectors.vllm.worker.load_memory import SMALLEST_BYTES, make_ready, ready_lengths
from objectcache.landing.memory_file import file_bytes_for
from objectcache.landing.regions import Region
from objectcache.landing.target_pool import TargetPool, pool_bytes_for
from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import GIB, MIB


class Made(Region):
    """Memory that is only counted."""

    def array(self) -> object:  # type: ignore[override]
        import numpy as np

        return np.zeros(1, np.uint8)

    def _register(self, session: object) -> bytes:
        return b"id"


class Counted:
    """A pool, and how many regions it has made."""

    def __init__(self, bytes_max: int) -> None:
        self.made: list[int] = []
        self.pool = TargetPool(bytes_max, self._make)

    def _make(self, length_bytes: int) -> Region:
        self.made.append(length_bytes)
        return Made(length_bytes)


@pytest.mark.parametrize("longest", [2 * MIB, 3 * MIB, 100 * MIB, 700 * MIB, 5 * GIB])
@pytest.mark.parametrize("bytes_max", [64 * MIB, GIB])
def test_any_load_within_the_bound_finds_memory_that_is_ready(longest: int, bytes_max: int) -> None:
    lengths = ready_lengths(longest, bytes_max)
    assert sum(map(file_bytes_for, lengths)) <= bytes_max
    counted = Counted(pool_bytes_for(4 * GIB))
    for length in lengths:
        assert counted.pool.stock(length, lambda region: None)
    made = list(counted.made)
    for load in range(SMALLEST_BYTES, lengths[0], 5 * MIB):
        landing = counted.pool.lease(load, 0.0)
        landing.settle()
        del landing
    assert counted.made == made
    assert lengths[0] == longest or lengths[0] == bytes_max * 3 // 4


def test_where_nothing_is_to_be_made_nothing_is() -> None:
    assert ready_lengths(MIB, GIB) == []
    assert ready_lengths(GIB, 1) == []


def test_a_pool_is_stocked_no_further_than_its_bound_and_gives_way_to_loads() -> None:
    counted = Counted(10 * MIB)
    assert counted.pool.stock(4 * MIB, lambda region: None)
    assert counted.pool.stock(6 * MIB, lambda region: None)
    assert not counted.pool.stock(2 * MIB, lambda region: None)
    counted.pool.lease(10 * MIB, 0.0)
    assert counted.made == [4 * MIB, 6 * MIB, 10 * MIB]


def test_memory_that_could_not_be_registered_is_kept() -> None:
    counted = Counted(10 * MIB)

    def refused(region: Region) -> None:
        raise Unavailable("no session")

    with pytest.raises(Unavailable):
        counted.pool.stock(4 * MIB, refused)
    counted.pool.lease(4 * MIB, 0.0)
    assert counted.made == [4 * MIB]


@pytest.mark.parametrize("reached", [True, False])
def test_the_log_says_what_is_ready(caplog: pytest.LogCaptureFixture, reached: bool) -> None:
    caplog.set_level("INFO")

    def stock(lengths: Sequence[int]) -> int:
        if not reached:
            raise Unavailable("the gateway cannot be reached")
        return sum(lengths)

    make_ready(stock, [8 * MIB, 2 * MIB]).join(10.0)
    said = "10 MiB of memory for loads are ready"
    assert caplog.messages == [
        said
        if reached
        else "memory for loads is made when it is needed: the gateway cannot be reached"
    ]
