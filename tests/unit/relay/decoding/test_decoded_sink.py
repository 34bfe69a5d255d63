"""A piece that cannot go on ends the delivery's others, and each of them is ended."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest

from objectcache.landing.memory_file import MemoryFile
from objectcache.landing.targets import PlainTarget
from objectcache_relay.decoding.decoded_regions import DecodedRegions
from objectcache_relay.decoding.decoded_sink import DecodedSink
from objectcache_relay.decoding.worker_pool import WorkerPool
from objectcache_relay.forward_get import ForwardedGet
from objectcache_relay.forwarding import PIECE_BYTES_MAX
from objectcache_relay.landing.landed_rows import LandedRow
from objectcache_relay.landing.landing_regions import LandingMemory, LandingRegion
from objectcache_relay.landing.upstream import AskedForward
from objectcache_relay.sinks.piece_sink import LandedPiece, PieceSink, WriteEnded
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, OnMissing
from objectcache_schemas.errors import ObjectCacheError, Unavailable

SLICE_BYTES = 4096
pytestmark = pytest.mark.asyncio


class HeldSink(PieceSink):
    """Keeps what it is to write."""

    def __init__(self) -> None:
        self.under_way: list[WriteEnded] = []

    def write(self, piece: LandedPiece, ended: WriteEnded) -> None:
        self.under_way.append(ended)

    def announce(self, end_layer: int) -> None:
        raise AssertionError("nobody announces here")


class Pieces:
    """Of one get, passed on through a pool that has no workers yet."""

    def __init__(self) -> None:
        descriptor = Descriptor(
            ("0" * 64,), 8, 16, SLICE_BYTES, DeliveryMode.LAYERWISE, (0, 8), OnMissing.FAIL
        )
        get = SimpleNamespace(
            asked=AskedForward("bucket", descriptor, None, "request"),
            landed=SimpleNamespace(layer_bytes=SLICE_BYTES),
            line="engine",
        )
        self.ended: list[ObjectCacheError | None] = []
        self.regions = DecodedRegions(2 * PIECE_BYTES_MAX)
        self.onward = HeldSink()
        file = MemoryFile(SLICE_BYTES)
        self._landed = LandingRegion(LandingMemory(PlainTarget(file.array()), file))
        pool = WorkerPool(1)
        self._sink = DecodedSink(self.onward, pool, self.regions, cast(ForwardedGet, get))

    def write(self, *, is_plain: bool) -> None:
        row = LandedRow(0, 1, 0, SLICE_BYTES, 0 if is_plain else 1, SLICE_BYTES)
        view = self._landed.view[: SLICE_BYTES if is_plain else 0]
        piece = LandedPiece(self._landed, 0, view, (row,))
        self._sink.write(piece, self.ended.append)


async def test_behind_a_piece_that_is_not_written_none_goes_on() -> None:
    pieces = Pieces()
    pieces.write(is_plain=True)
    pieces.write(is_plain=False)  # which waits for a region, and holds up the next
    pieces.write(is_plain=True)
    failure = Unavailable("the peer is gone")
    pieces.onward.under_way[0](failure)
    assert pieces.ended == [failure, failure, failure]
    pieces.write(is_plain=True)
    assert pieces.ended[3] is failure
    assert len(pieces.onward.under_way) == 1


async def test_a_piece_whose_memory_no_worker_can_be_sent_ends() -> None:
    pieces = Pieces()
    made = asyncio.get_running_loop().create_future()
    pieces.regions.ask("engine", SLICE_BYTES, made.set_result, made.set_exception)
    pieces.regions.put("engine", await made)
    with no_descriptors():
        pieces.write(is_plain=False)
    (error,) = pieces.ended
    assert isinstance(error, Unavailable)
    assert pieces.regions.held_bytes == 0


@contextmanager
def no_descriptors() -> Generator[None]:
    """Have the system give this process no more of them."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
