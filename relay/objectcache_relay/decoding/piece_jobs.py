"""One get's pieces as jobs of the workers: decoded, and dequantised where that was asked for."""

from __future__ import annotations

from collections.abc import Callable

from objectcache_encodings.lossy import dtype_text
from objectcache_relay.decoding.jobs import MadeSlices, PiecePart, cut_rows, slices_of
from objectcache_relay.decoding.worker_pool import JobFailure, PoolJob, WorkerPool
from objectcache_relay.decoding.worker_process import SharedFile
from objectcache_relay.forward_get import ForwardedGet
from objectcache_relay.sinks.piece_sink import LandedPiece, WriteEnded
from objectcache_schemas.errors import DamagedData, DeliveryFailed, ObjectCacheError


class PieceJobs:
    """Used in the event loop."""

    def __init__(self, pool: WorkerPool, get: ForwardedGet) -> None:
        self.pool = pool
        self._asked = get.asked
        self._layer_bytes = get.landed.layer_bytes
        self._jobs_s = 0.0  # of workers

    @property
    def decode_s(self) -> float:
        """Seconds that all workers together were at it."""
        return self._jobs_s / self.pool.workers

    @property
    def slice_bytes(self) -> int:
        """Of a slice that was made."""
        return self._asked.as_written.per_layer_chunk_bytes

    @property
    def dequantises(self) -> bool:
        """Whether slices are made of others, plain ones too."""
        return self._asked.lossy is not None

    def made_bytes(self, stored_bytes: int) -> int:
        """How much is made of so much of the payload, of whole slices where they are made of
        others.
        """
        if not self.dequantises:
            return stored_bytes
        return stored_bytes // self._asked.descriptor.per_layer_chunk_bytes * self.slice_bytes

    def submit(
        self,
        piece: LandedPiece,
        target: SharedFile,
        place_bytes: int,
        may_begin: Callable[[], None],
        ended: WriteEnded,
    ) -> None:
        """Have a piece decoded into the target, from `place_bytes` on. `may_begin` is called before
        each job, and raises what is in the way. `ended` is called in the event loop, once no worker
        touches the piece or the target for it any more.
        """
        file = piece.region.file
        assert file is not None, "workers read landing memory by its file"
        source = self.pool.share(file, file.fd, file.length_bytes, is_target=False)
        files = (source, target)
        made, rows = self._made(piece), piece.rows
        if made is not None:
            rows = tuple(slices_of(row, made.stored_bytes) for row in rows)
        parts = list(cut_rows(rows, self.pool.workers, whole_slices=made is not None))
        end = _PieceEnd(len(parts), ended)
        self.pool.submit(
            [self._job(part, files, place_bytes, may_begin, end, made) for part in parts]
        )

    def _made(self, piece: LandedPiece) -> MadeSlices | None:
        """What becomes of a piece that is dequantised, which lies in one layer."""
        asked = self._asked
        if asked.lossy is None:
            return None
        layer = asked.descriptor.first_layer + piece.offset_bytes // self._layer_bytes
        stored_bytes = asked.descriptor.per_layer_chunk_bytes
        return MadeSlices(dtype_text(asked.lossy), layer, stored_bytes, self.slice_bytes)

    def _job(
        self,
        part: PiecePart,
        files: tuple[SharedFile, SharedFile],
        place_bytes: int,
        may_begin: Callable[[], None],
        end: _PieceEnd,
        made: MadeSlices | None,
    ) -> PoolJob:
        source, target = files
        number = self.pool.next_number()
        job = part.job(number, source.number, target.number, place_bytes, made)

        def ended(failure: JobFailure | None) -> None:
            end.one_ended(None if failure is None else self._error(part, failure))

        return PoolJob(job, files, may_begin, ended, took=self._took)

    def _took(self, seconds: float) -> None:
        self._jobs_s += seconds

    def _error(self, part: PiecePart, failure: JobFailure) -> ObjectCacheError:
        if failure.error is not None:
            return failure.error
        chunk = part.chunk(failure.slice_index)
        key = self._asked.descriptor.chunk_keys[chunk]
        if failure.is_stored_so:  # nobody has to look at it again
            return DeliveryFailed(f"chunk {chunk} ({key}): {failure.damage}", key=key)
        return DamagedData(f"chunk {chunk} ({key}) could not be decoded: {failure.damage}", key=key)


class _PieceEnd:
    """Tells when all jobs of a piece have ended, and the first of their errors."""

    def __init__(self, jobs: int, ended: WriteEnded) -> None:
        self._left = jobs
        self._ended = ended
        self._error: ObjectCacheError | None = None

    def one_ended(self, error: ObjectCacheError | None) -> None:
        """One more."""
        self._error = self._error or error
        self._left -= 1
        if not self._left:
            self._ended(self._error)
