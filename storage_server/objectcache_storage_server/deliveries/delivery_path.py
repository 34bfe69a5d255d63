"""Which of the five paths a kv-get takes (paper, section 4.1), or why the one it forces cannot be.

In three steps: `forced_mode` checks the request and says which mode its path leaves, `choose_mode`
is the threshold rule, and `path_taken` names the path once the mode is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from objectcache_schemas.delivery_paths import DeliveryPath, cannot_take, parse_path
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_storage_server.transports.fabrics import check_transport
from objectcache_storage_server.transports.shared_memory import SharedMemoryTransport

TCP = "tcp"
_OF_ONE_OBJECT = (DeliveryPath.BUFFER, DeliveryPath.DIRECT)
_MODES = {DeliveryPath.BATCH: DeliveryMode.CHUNKWISE, DeliveryPath.AGG: DeliveryMode.LAYERWISE}


@dataclass(frozen=True, slots=True)
class AskedGet:
    """A get as it was asked for: what of its delivery is known before its chunks are."""

    path: str  # that it forces, or empty
    mode: DeliveryMode  # that it asks for; AUTO is left to the threshold rule
    transport: str
    is_body: bool  # it leaves over the gateway's connection
    is_staged: bool  # it goes by way of staging memory: over a fabric, into a target

    @classmethod
    def of(cls, path: str, descriptor: Descriptor) -> AskedGet:
        """Raises as `forced_mode`, and `Unsupported` for a transport that there is none of."""
        target = descriptor.rdma_target
        if target is not None:
            check_transport(target.transport)
        if descriptor.part is not None and path == DeliveryPath.BUFFER.value:
            raise cannot_take(DeliveryPath.BUFFER, "brings no part of a prefix; use agg")
        if descriptor.ring_layers is not None and path == DeliveryPath.BUFFER.value:
            raise cannot_take(DeliveryPath.BUFFER, "goes round in no ring; use agg")
        chunk_count = len(descriptor.chunk_keys)
        return cls(
            path,
            forced_mode(path, descriptor.delivery, chunk_count, target is not None),
            TCP if target is None else target.transport,
            is_body(path, target is not None),
            target is not None and target.transport != SharedMemoryTransport.name,
        )

    def may_take_frames(self, descriptor: Descriptor) -> bool:
        """Whether its payload may be encoded, if it is layerwise: whoever reads it would read the
        directory first, so the whole of a prefix.
        """
        return (
            bool(descriptor.encodings)
            and self.mode is not DeliveryMode.CHUNKWISE
            and descriptor.part is None
            and self.path != DeliveryPath.BUFFER.value
        )

    def taken(self, mode: DeliveryMode, chunk_count: int) -> str:
        """The name of the path that it takes, its mode being chosen."""
        return path_taken(self.path, mode, chunk_count, self.transport != TCP).value


def forced_mode(
    asked: str, delivery: DeliveryMode, chunk_count: int, has_target: bool
) -> DeliveryMode:
    """The mode that a kv-get asks for, its path included; AUTO is left to the threshold rule.

    `delivery` and `chunk_count` are the descriptor's. The staged object of `buffer` is in place all
    at once, so AUTO is chunkwise there. Raises `InvalidRequest` with the remedy where the path that
    is asked for cannot be taken.
    """
    path = parse_path(asked)
    if path is DeliveryPath.S3TCP:
        raise cannot_take(path, "is a plain GET of one object; send one without a descriptor")
    if path in _OF_ONE_OBJECT:
        _check_one_object(path, chunk_count, has_target)
    if path is DeliveryPath.BUFFER and delivery is DeliveryMode.AUTO:
        return DeliveryMode.CHUNKWISE
    mode = _MODES.get(path, delivery) if path else delivery
    if path and delivery not in (DeliveryMode.AUTO, mode):
        raise cannot_take(
            path, f"is {mode.value}, the descriptor's delivery is {delivery.value}; use auto"
        )
    return mode


def is_body(asked: str, has_target: bool) -> bool:
    """Whether the payload leaves over the gateway's connection: for the response's body, or for the
    gateway to write into the target itself.
    """
    return not has_target or asked == DeliveryPath.BUFFER.value


def choose_mode(
    asked: DeliveryMode, payload_bytes: int, layerwise_threshold_bytes: int
) -> DeliveryMode:
    """Layerwise from the threshold up, chunkwise below (paper, equation 2), unless the client asked
    for one.
    """
    if asked is not DeliveryMode.AUTO:
        return asked
    if payload_bytes >= layerwise_threshold_bytes:
        return DeliveryMode.LAYERWISE
    return DeliveryMode.CHUNKWISE


def path_taken(asked: str, mode: DeliveryMode, chunk_count: int, has_target: bool) -> DeliveryPath:
    """The path of a kv-get that `forced_mode` let through and whose mode is chosen.

    `chunk_count` is what is delivered. One chunk into a target is `direct` unless another path was
    forced; one chunk into the response's body is a prefix of one, by its mode.
    """
    forced = parse_path(asked)
    if forced is not None:
        return forced
    if has_target and chunk_count == 1:
        return DeliveryPath.DIRECT
    return DeliveryPath.AGG if mode is DeliveryMode.LAYERWISE else DeliveryPath.BATCH


def _check_one_object(path: DeliveryPath, chunk_count: int, has_target: bool) -> None:
    if not has_target:
        raise cannot_take(path, "writes into a target; the descriptor needs an rdma_target")
    if chunk_count != 1:
        raise cannot_take(
            path, f"carries one object, chunk_keys names {chunk_count}; use agg or batch"
        )
