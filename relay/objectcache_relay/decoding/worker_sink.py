"""One delivery's way into a memory file of an engine on this host, through the workers."""

from __future__ import annotations

from objectcache_relay.decoding.piece_jobs import PieceJobs
from objectcache_relay.decoding.worker_pool import WorkerPool
from objectcache_relay.forward_get import ForwardedGet
from objectcache_relay.sinks.piece_sink import LandedPiece, PieceSink, WriteEnded
from objectcache_schemas.errors import NotFound
from objectcache_schemas.messages.sessions import LayersReady
from objectcache_storage_server.transports.targets import Lease


class WorkerSink(PieceSink):
    """Written by workers. Where the engine has ended the session, or released the target, no job is
    begun; those that were are waited for.
    """

    def __init__(self, lease: Lease, tag: int, pool: WorkerPool, get: ForwardedGet) -> None:
        self._lease = lease
        self._tag = tag
        self._jobs = PieceJobs(pool, get)
        memory = lease.target.mapped
        self._target = pool.share(memory, memory.descriptor, memory.length_bytes, is_target=True)

    @property
    def decode_s(self) -> float:
        return self._jobs.decode_s

    def write(self, piece: LandedPiece, ended: WriteEnded) -> None:
        lease = self._lease
        place_bytes = lease.offset_bytes + lease.place_bytes(
            self._jobs.made_bytes(piece.offset_bytes)
        )
        self._jobs.submit(piece, self._target, place_bytes, self._check, ended)

    def _check(self) -> None:
        """Raises what is in the way of writing to the target."""
        target = self._lease.target
        target.check_whole()
        if target.released or target.owner.is_gone():
            raise NotFound("the target's session has ended", code="NoSuchTarget")

    def announce(self, end_layer: int) -> None:
        self._lease.target.owner.post(LayersReady(tag=self._tag, end_layer=end_layer))

    def close(self) -> None:
        self._lease.end()
