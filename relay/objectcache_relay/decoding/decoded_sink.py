"""One delivery's way to an engine whose memory workers do not map: they decode into the fetcher's
own, and what is there goes on as plain pieces do.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from functools import partial

from objectcache_relay.decoding.decoded_regions import DecodedRegions, RegionWish
from objectcache_relay.decoding.piece_jobs import PieceJobs
from objectcache_relay.decoding.worker_pool import WorkerPool
from objectcache_relay.forward_get import ForwardedGet
from objectcache_relay.landing.landing_regions import LandingRegion
from objectcache_relay.sinks.piece_sink import LandedPiece, PieceSink, WriteEnded
from objectcache_schemas.errors import DeliveryFailed, ObjectCacheError


class _Piece:
    """A piece from when it is asked for until it has ended."""

    def __init__(self, landed: LandedPiece, ended: WriteEnded) -> None:
        self.landed = landed
        self.ended = ended
        self.wish: RegionWish | None = None
        self.region: LandingRegion | None = None
        self.plain: LandedPiece | None = None  # once it can go on
        self.error: ObjectCacheError | None = None

    @property
    def is_with_workers(self) -> bool:
        """Whether they read or write its memory."""
        return self.region is not None and self.plain is None and self.error is None


class DecodedSink(PieceSink):
    """Pieces go on in their order, since a body has no other. After one that failed none does: what
    came behind it would be taken for it.
    """

    def __init__(
        self, sink: PieceSink, pool: WorkerPool, regions: DecodedRegions, get: ForwardedGet
    ) -> None:
        """`sink` is where they go on to."""
        self._sink = sink
        self._jobs = PieceJobs(pool, get)
        self._regions = regions
        self._engine = get.line
        self._pieces: deque[_Piece] = deque()  # that have not gone on
        self._failure: ObjectCacheError | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    @property
    def decode_s(self) -> float:
        return self._jobs.decode_s

    def write(self, piece: LandedPiece, ended: WriteEnded) -> None:
        if self._failure is not None:
            ended(self._failure)
            return
        one = _Piece(piece, ended)
        self._pieces.append(one)
        if piece.view and not self._jobs.dequantises:
            one.plain = piece
            self._go_on()
        else:
            one.wish = self._regions.ask(
                self._engine,
                self._jobs.slice_bytes,
                partial(self._decode, one),
                partial(self._decoded, one),
            )

    def _decode(self, one: _Piece, region: LandingRegion) -> None:
        one.region, file = region, region.file
        assert file is not None
        try:
            target = self._jobs.pool.share(file, file.fd, file.length_bytes, is_target=True)
            self._jobs.submit(one.landed, target, 0, self._check, partial(self._decoded, one))
        except ObjectCacheError as error:
            self._decoded(one, error)

    def _check(self) -> None:
        """Raises what is in the way of decoding more."""
        if self._failure is not None:
            raise self._failure

    def _decoded(self, one: _Piece, error: ObjectCacheError | None) -> None:
        if error is not None or self._failure is not None:
            one.error = error or self._failure
        else:
            region, landed = one.region, one.landed
            assert region is not None
            stored_bytes = sum(row.decoded_bytes for row in landed.rows)
            one.plain = LandedPiece(
                region,
                self._jobs.made_bytes(landed.offset_bytes),
                region.view[: self._jobs.made_bytes(stored_bytes)],
                (),
            )
        self._go_on()

    def _go_on(self) -> None:
        """Pass on what may be; end what failed, and all behind it that no worker has."""
        while self._pieces and self._failure is None:
            one = self._pieces[0]
            if one.error is not None:
                self._fail(one.error)
            elif one.plain is None:
                return
            else:
                self._pieces.popleft()
                self._pass_on(one, one.plain)
        while self._failure is not None and (rest := self._without_workers()) is not None:
            self._pieces.remove(rest)
            self._end(rest, rest.error or self._failure)

    def _without_workers(self) -> _Piece | None:
        return next((one for one in self._pieces if not one.is_with_workers), None)

    def _pass_on(self, one: _Piece, plain: LandedPiece) -> None:
        try:
            self._sink.write(plain, partial(self._written_soon, one))
        except ObjectCacheError as error:
            self._written(one, error)

    def _written_soon(self, one: _Piece, error: ObjectCacheError | None) -> None:
        if threading.get_ident() == self._thread:
            self._written(one, error)
        else:
            self._loop.call_soon_threadsafe(self._written, one, error)

    def _written(self, one: _Piece, error: ObjectCacheError | None) -> None:
        if error is not None:
            self._fail(error)
        self._end(one, error)
        if error is not None:
            self._go_on()

    def _end(self, one: _Piece, error: ObjectCacheError | None) -> None:
        one.wish = None  # which holds the piece
        if one.region is not None:
            self._regions.put(self._engine, one.region)
        one.ended(error)

    def _fail(self, error: ObjectCacheError) -> None:
        """Pass nothing on any more; the first reason counts."""
        if self._failure is not None:
            return
        self._failure = error
        for one in list(self._pieces):  # a region that is free now may end one
            if one.wish is not None:
                self._regions.forget(one.wish)

    def announce(self, end_layer: int) -> None:
        self._sink.announce(end_layer)

    def stop(self) -> None:
        self._sink.stop()
        self._fail(DeliveryFailed("the delivery was cancelled"))
        self._go_on()

    def close(self) -> None:
        self._sink.close()
