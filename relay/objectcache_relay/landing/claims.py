"""Which get may be sent what another get had landed: of the same bucket, layout and keys. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from objectcache_relay.landing.upstream import AskedForward
from objectcache_schemas.descriptor import DeliveryMode, OnMissing


@dataclass(frozen=True, slots=True)
class LandedKey:
    """What has to be equal."""

    bucket: str
    num_layers: int
    chunk_tokens: int
    per_layer_chunk_bytes: int
    chunk_keys: tuple[str, ...]
    encodings: tuple[str, ...]

    @classmethod
    def of(cls, asked: AskedForward) -> LandedKey:
        """Of a get."""
        descriptor = asked.descriptor
        return cls(
            asked.bucket,
            descriptor.num_layers,
            descriptor.chunk_tokens,
            descriptor.per_layer_chunk_bytes,
            descriptor.chunk_keys,
            asked.encodings,
        )


def may_claim(asked: AskedForward, landed: AskedForward, *, has_arrived: bool) -> bool:
    """Whether a get with an equal key asks for nothing that the other does not land: its layers
    are among the other's, it forces no other path, and neither says at which rate it is to come;
    what has arrived is past that.
    """
    own, other = asked.descriptor, landed.descriptor
    are_landed = other.first_layer <= own.first_layer and own.end_layer <= other.end_layer
    is_fast = has_arrived or other.rate_bytes_per_s is None
    return (
        are_landed
        and is_fast
        and own.rate_bytes_per_s is None
        and asked.path in (None, landed.path)
    )


def has_claimed(
    asked: AskedForward, landed: AskedForward, mode: DeliveryMode, chunk_count: int
) -> bool:
    """Whether that is still so now that it is known how the other is delivered: in an order that
    the get may have, and with all chunks, or as many as are stored where that is enough.

    Of a chunkwise payload no layer range lies in one piece.
    """
    own, other = asked.descriptor, landed.descriptor
    if mode is not DeliveryMode.LAYERWISE and (
        (own.first_layer, own.end_layer) != (other.first_layer, other.end_layer)
    ):
        return False
    if own.delivery not in (DeliveryMode.AUTO, mode):
        return False
    if own.part is not None and mode is not DeliveryMode.LAYERWISE:
        return False
    return chunk_count == len(own.chunk_keys) or own.on_missing is OnMissing.TRUNCATE
