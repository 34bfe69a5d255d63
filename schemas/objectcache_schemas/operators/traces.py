"""Traces: what became of deliveries, as operators see it."""

from __future__ import annotations

import msgspec

from objectcache_schemas.errors import WireError
from objectcache_schemas.messages.message import Changes, Message, request


class TracePhase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a delivery's time: "client", "control_plane", "queue", "storage" or "network"."""

    name: str
    seconds: float


class LayerTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One layer's life, in seconds from the request's arrival; None is not yet, or not known."""

    layer: int
    first_read_s: float | None
    ready_s: float | None
    consumed_s: float | None


class DeliveryTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What became of one delivery, and when."""

    request_id: str
    bucket: str
    tenant: str
    path: str
    transport: str
    delivery: str  # layerwise or chunkwise
    policy: str
    chunk_count: int
    payload_bytes: int
    compute_window_s: float | None
    window_source: str
    rate_bytes_per_s: float | None  # assigned; of one that has ended the mean
    achieved_bytes_per_s: float | None
    started_unix_s: float
    duration_s: float | None  # None: under way
    phases: tuple[TracePhase, ...]
    layers: tuple[LayerTrace, ...]
    error: WireError | None = None
    reported_window_s: float | None = None  # median of the layers that the client told of
    nic: str = ""  # that it went to, by its tenant's name for it
    decoded_bytes: int = 0  # of the payload, more than it has where it is encoded; 0: not known


class Traces(Message, frozen=True):
    """Reply to `GetTraces`, the latest first."""

    traces: tuple[DeliveryTrace, ...]


@request(Traces, repeatable=False, changes=Changes.NOTHING)
class GetTraces(Message, frozen=True):
    """Ask for the traces of a request, or of the last deliveries.

    NotFound where a request id is given that no kept trace has.
    """

    request_id: str = ""
    limit: int = 20
