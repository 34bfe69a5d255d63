"""Into an engine's memory: over a fabric, or on this host."""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np

from objectcache_relay.sinks.piece_sink import LandedPiece, PieceSink, WriteEnded
from objectcache_schemas.errors import DeliveryFailed, NotFound, ObjectCacheError
from objectcache_schemas.messages.sessions import LayersReady
from objectcache_storage_server.transports.targets import Lease


class FabricSink(PieceSink):
    """Written one-sided, out of landing memory as it lies."""

    def __init__(self, lease: Lease, tag: int) -> None:
        self._lease = lease
        self._peer = lease.remote.peer
        self._tag = tag

    def write(self, piece: LandedPiece, ended: WriteEnded) -> None:
        piece.region.lend_to(self._peer)
        self._peer.write(
            self._lease.remote.remote,
            self._lease.offset_bytes + self._lease.place_bytes(piece.offset_bytes),
            piece.view,
            ended,
        )

    def announce(self, end_layer: int) -> None:
        self._peer.announce(self._tag, end_layer)

    def close(self) -> None:
        self._peer.forget(self._tag)
        self._lease.end()


class MemoryFileSink(PieceSink):
    """Copied into a memory file of an engine on this host, by a thread. Where the engine has ended
    the session no piece is begun, though the event loop may not have heard of that yet.
    """

    def __init__(self, lease: Lease, tag: int, threads: Executor) -> None:
        self._lease = lease
        self._tag = tag
        self._threads = threads

    def write(self, piece: LandedPiece, ended: WriteEnded) -> None:
        self._threads.submit(self._copy, piece, ended)

    def _copy(self, piece: LandedPiece, ended: WriteEnded) -> None:
        place = self._lease.place_bytes(piece.offset_bytes)
        failure: ObjectCacheError | None = DeliveryFailed("the copy failed; see the relay's log")
        try:
            target = self._lease.target
            target.check_whole()
            if target.released or target.owner.is_gone():
                raise NotFound("the target's session has ended", code="NoSuchTarget")
            into = np.frombuffer(self._lease.view[place : place + len(piece.view)], np.uint8)
            np.copyto(into, np.frombuffer(piece.view, np.uint8))
            del into  # else the view could not be released
            failure = None
        except ObjectCacheError as error:
            failure = error
        finally:
            ended(failure)

    def announce(self, end_layer: int) -> None:
        self._lease.target.owner.post(LayersReady(tag=self._tag, end_layer=end_layer))

    def close(self) -> None:
        self._lease.end()
