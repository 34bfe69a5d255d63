"""What of a delivery is sent on when: layers arrive in order, pieces leave, layers are announced.

No sockets, no clock, no threads: whoever owns a `Forwarding` tells it what happened and asks what
to do. `PeerTraffic` shares one peer's bytes in flight among the deliveries to it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from objectcache_schemas.errors import DamagedData, ObjectCacheError
from objectcache_schemas.limits import MIB

PIECE_BYTES_MAX = 8 * MIB


@dataclass(frozen=True, slots=True)
class ForwardedPiece:
    """A run of the payload within one layer, or anywhere in one that has no layers."""

    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class ForwardingEnd:
    """How a delivery ended for its engine: layers below `end_layer` were announced."""

    end_layer: int
    error: ObjectCacheError | None


class Forwarding:
    """One delivery on its way through. Of a payload of `layer_bytes` a layer, or, with `is_whole`,
    of one that is complete only with its last byte.

    A layer is announced when all of its pieces and of those before it are written, in order. After
    a failure upstream the layers that have arrived are still sent on; after `stop` nothing begins.
    """

    def __init__(
        self,
        first_layer: int,
        end_layer: int,
        layer_bytes: int,
        *,
        is_whole: bool = False,
        piece_bytes_max: int = PIECE_BYTES_MAX,
    ) -> None:
        self._first_layer = first_layer
        self._end_layer = end_layer
        self._layer_bytes = layer_bytes
        self._is_whole = is_whole
        self._piece_bytes_max = piece_bytes_max
        self._payload_bytes = (end_layer - first_layer) * layer_bytes
        self._arrived_bytes = 0
        self._begun_bytes = 0  # all before this were handed out
        self._writing: set[ForwardedPiece] = set()
        self._announced_end = first_layer
        self._upstream_over = False
        self._error: ObjectCacheError | None = None
        self._is_stopped = False
        self._damaged_bytes: int | None = None  # where the first damaged piece begins
        self._is_let_go = False

    # --- what happened ---

    def arrived(self, end_layer: int) -> None:
        """All layers below `end_layer` are in landing memory; going back has no effect."""
        if self._upstream_over:
            return
        if self._is_whole and end_layer < self._end_layer:
            return
        end_layer = min(end_layer, self._end_layer)
        arrived_bytes = (end_layer - self._first_layer) * self._layer_bytes
        self._arrived_bytes = max(self._arrived_bytes, arrived_bytes)

    def upstream_ended(self, error: ObjectCacheError | None = None) -> None:
        """The upstream touches landing memory no more; a second call has no effect."""
        if self._upstream_over:
            return
        self._upstream_over = True
        self._error = self._error or error

    def stop(self, error: ObjectCacheError) -> None:
        """Whoever receives it is gone, or wants no more; the first reason counts."""
        self._is_stopped = True
        self._error = self._error or error

    def ended(self, piece: ForwardedPiece, error: ObjectCacheError | None) -> None:
        """A piece that was handed out is written, or never will be. An error stops the rest. Where
        the piece is damaged, and whoever receives it is well, layers before it go on.
        """
        self._writing.remove(piece)
        if error is None:
            return
        if isinstance(error, DamagedData):
            before, at = self._damaged_bytes, piece.offset_bytes
            self._damaged_bytes = at if before is None else min(before, at)
        self.stop(error)

    # --- what to do ---

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is sent any more."""
        return self._is_stopped

    @property
    def wants_to_write(self) -> bool:
        """Whether there is a piece to hand out."""
        return not self._is_stopped and self._begun_bytes < self._arrived_bytes

    def next_piece(self) -> ForwardedPiece:
        """Hand out the next piece, which `ended` takes back. Only where `wants_to_write`."""
        assert self.wants_to_write
        piece = ForwardedPiece(self._begun_bytes, self.next_piece_bytes)
        self._begun_bytes += piece.length_bytes
        self._writing.add(piece)
        return piece

    @property
    def next_piece_bytes(self) -> int:
        """How long the next piece is."""
        begin = self._begun_bytes
        end = min(self._arrived_bytes, begin + self._piece_bytes_max)
        if not self._is_whole:  # its layer's end: in a target of several parts a row ends there
            end = min(end, (begin // self._layer_bytes + 1) * self._layer_bytes)
        return end - begin

    def announcement(self) -> int | None:
        """The end of the layers that are in place, where it has risen since the last call. Nothing
        is announced once it is stopped, since whoever wrote may have failed; but for what comes
        before damage.
        """
        if self._is_stopped and self._damaged_bytes is None:
            return None
        written_bytes = min((one.offset_bytes for one in self._writing), default=self._begun_bytes)
        if self._damaged_bytes is not None:
            written_bytes = min(written_bytes, self._damaged_bytes)
        if self._is_whole and written_bytes < self._payload_bytes:
            return None
        end_layer = self._first_layer + written_bytes // self._layer_bytes
        if end_layer <= self._announced_end:
            return None
        self._announced_end = end_layer
        return end_layer

    def end(self) -> ForwardingEnd | None:
        """How it ended, once the upstream is over and no byte moves any more."""
        if not self._upstream_over or self._writing or self.wants_to_write:
            return None
        return ForwardingEnd(self._announced_end, self._error)

    def let_go(self) -> bool:
        """Whether landing memory is to be let go now: true once, when it has ended."""
        if self._is_let_go or self.end() is None:
            return False
        self._is_let_go = True
        return True

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the payload that have not been written yet."""
        return self._payload_bytes - self._begun_bytes + self.in_flight_bytes

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of the pieces that are being written."""
        return sum(piece.length_bytes for piece in self._writing)

    @property
    def awaited_bytes(self) -> int:
        """Bytes that have not arrived, and may yet."""
        return 0 if self._upstream_over else self._payload_bytes - self._arrived_bytes

    def __repr__(self) -> str:
        ready = self._announced_end - self._first_layer
        return f"<Forwarding {ready}/{self._end_layer - self._first_layer} layers announced>"


class PeerTraffic:
    """The deliveries to one peer, of which `in_flight_bytes_max` are written at a time; one piece
    may always be. They take turns, a piece each.
    """

    def __init__(self, in_flight_bytes_max: int) -> None:
        self._in_flight_bytes_max = in_flight_bytes_max
        self._line: deque[Forwarding] = deque()
        self.in_flight_bytes = 0

    def add(self, forwarding: Forwarding) -> None:
        """One more delivery."""
        self._line.append(forwarding)

    def remove(self, forwarding: Forwarding) -> None:
        """A delivery that has ended."""
        self._line.remove(forwarding)

    def next_write(self) -> tuple[Forwarding, ForwardedPiece] | None:
        """What to write next; None where nothing is there or the peer has enough."""
        for _ in range(len(self._line)):
            forwarding = self._line[0]
            if forwarding.wants_to_write:
                after_bytes = self.in_flight_bytes + forwarding.next_piece_bytes
                if self.in_flight_bytes and after_bytes > self._in_flight_bytes_max:
                    return None
                self._line.rotate(-1)
                piece = forwarding.next_piece()
                self.in_flight_bytes += piece.length_bytes
                return forwarding, piece
            self._line.rotate(-1)
        return None

    def ended(
        self, forwarding: Forwarding, piece: ForwardedPiece, error: ObjectCacheError | None
    ) -> None:
        """See `Forwarding.ended`."""
        self.in_flight_bytes -= piece.length_bytes
        forwarding.ended(piece, error)

    @property
    def is_idle(self) -> bool:
        """Whether it has no delivery."""
        return not self._line

    def __repr__(self) -> str:
        return f"<PeerTraffic {len(self._line)} deliveries, {self.in_flight_bytes} bytes in flight>"
