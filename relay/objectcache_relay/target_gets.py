"""Gets into engines' registered memory: asked over a session, or over HTTP with a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

from objectcache_encodings.lossy import LossyDtype, dtype_text
from objectcache_relay.forward_get import ForwardedGet, ForwardMeans, PeerLine
from objectcache_relay.forwarding import ForwardingEnd
from objectcache_relay.landing.asked_encodings import AskedEncodings
from objectcache_relay.landing.upstream import AskedForward
from objectcache_relay.sinks.piece_sink import PieceSink
from objectcache_schemas.accounts import ROOT_USER
from objectcache_schemas.descriptor import DeliveryMode, MemoryTarget
from objectcache_schemas.errors import DamagedData, InvalidRequest, Unsupported
from objectcache_schemas.messages.sessions import DeliveryFailure, LayersConsumed, PassGiven
from objectcache_storage_server.transports.targets import Lease, TargetOwner, TargetRegistry

# Into a target, of the delivery with this tag, as it is asked for.
TargetSink = Callable[[Lease, int, ForwardedGet], PieceSink]
JOB = ROOT_USER  # whoever has the job's key: there is nobody else


class TargetGets:
    """Gets into targets of this relay's sessions. Used in the event loop."""

    def __init__(
        self,
        means: ForwardMeans,
        registry: TargetRegistry,
        sink: TargetSink,
        pass_s: float,
        encodings: AskedEncodings,
        *,
        dequantises: bool = False,
    ) -> None:
        """`sink` makes the way into a target, which takes the lease over, takes chunks of these
        `encodings`, and `dequantises` lossy ones; `pass_s` is for how long a session is told that
        it may get by itself.
        """
        self.means = means
        self._registry = registry
        self.sink = sink
        self._pass_s = pass_s
        self.encodings = encodings
        self._dequantises = dequantises
        self._lines: WeakKeyDictionary[TargetOwner, PeerLine] = WeakKeyDictionary()

    def get(self, asked: AskedForward) -> TargetGet:
        """A get that has not begun. Raises `NotFound` (NoSuchTarget)."""
        if asked.descriptor.ring_layers is not None:
            raise InvalidRequest(
                "unknown field `ring_layers` at a relay: only the store goes round in a ring"
            )
        if asked.lossy is not None:
            self._check_lossy(asked, asked.lossy)
        return TargetGet(self, replace(asked, encodings=self.encodings.of(asked.bucket)))

    def _check_lossy(self, asked: AskedForward, lossy: LossyDtype) -> None:
        """Raise where it is not dequantised here."""
        if not self._dequantises:
            raise Unsupported("only a fetcher dequantises")
        descriptor = asked.descriptor
        fits = (lossy.slice_bytes, lossy.shape.tokens) == (
            descriptor.per_layer_chunk_bytes,
            descriptor.chunk_tokens,
        )
        if not fits or descriptor.delivery is not DeliveryMode.LAYERWISE:
            raise InvalidRequest(
                f"slices to dequantise as {dtype_text(lossy)} are of {lossy.slice_bytes} bytes and "
                "come layerwise"
            )

    def lease(self, get: ForwardedGet, target: MemoryTarget) -> Lease:
        """The right to write what was accepted. Raises as `TargetRegistry.lease` does."""
        written, count = get.asked.as_written, get.delivery.chunk_count
        rows = written.target_rows(count)
        return self._registry.lease(JOB, target, written.payload_bytes(count), rows)

    def owner_of(self, target: MemoryTarget) -> TargetOwner:
        """The session that registered a target. Raises `NotFound`, and what a lease of it does."""
        lease = self._registry.lease(JOB, target, 0)
        lease.end()
        return lease.target.owner

    def line_of(self, owner: TargetOwner) -> PeerLine:
        """What is on its way to one engine."""
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = PeerLine(self.means.in_flight_bytes_max)
        return line

    def ended(self, get: ForwardedGet, end: ForwardingEnd) -> None:
        """Learn from a get that was accepted. What was damaged may be so where it is stored."""
        asked, error = get.asked, end.error
        if error is None:
            self.encodings.ended(asked.bucket, get.seen())
        elif isinstance(error, DamagedData) and error.details.key is not None:
            self.means.landings.have_looked_at(asked, end.end_layer, error.details.key)

    def give_pass(self, owner: TargetOwner, bucket: str) -> None:
        """Have the session get from the bucket by itself: whoever joined it has the job's key."""
        owner.post(PassGiven(bucket=bucket, lives_s=self._pass_s))


class TargetGet:
    """One get into a target, from its beginning to its end."""

    def __init__(self, gets: TargetGets, asked: AskedForward) -> None:
        target = asked.descriptor.rdma_target
        assert target is not None
        self._gets = gets
        self._target = target
        self._owner = gets.owner_of(target)
        line = gets.line_of(self._owner)
        self._begun: Callable[[], None] = _nothing
        self.get = ForwardedGet(gets.means, asked, line, target.transport)

    def pass_bucket(self) -> None:
        """See `TargetGets.give_pass`."""
        self._gets.give_pass(self._owner, self.get.asked.bucket)

    async def run(self, begun: Callable[[], None]) -> ForwardingEnd:
        """Carry it; `begun` is called when it was accepted. Raises the refusal. When this returns
        nothing is written, and a failure was told to the session.
        """
        self._begun = begun
        watched = self._owner.watch_consumption(self._target.tag, self._consumed)
        try:
            end = await self.get.run(self._open)
        finally:
            if watched:
                self._owner.forget_consumption(self._target.tag, self._consumed)
        self._gets.ended(self.get, end)
        if end.error is not None:
            self._owner.post(
                DeliveryFailure(
                    tag=self._target.tag, failed_layer=end.end_layer, error=end.error.to_wire()
                )
            )
        return end

    async def _open(self, get: ForwardedGet) -> PieceSink:
        lease = self._gets.lease(get, self._target)
        try:
            lease.on_release(get.stop_soon)
            sink = self._gets.sink(lease, self._target.tag, get)
        except BaseException:
            lease.end()
            raise
        self._begun()
        return sink

    def _consumed(self, message: LayersConsumed) -> None:
        if self.get.is_accepted:
            self.get.consumed(message)


def _nothing() -> None:
    """Nobody is told yet."""
