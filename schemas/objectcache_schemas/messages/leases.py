"""A part of a client's target, leased to whoever writes a payload into it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from objectcache_schemas.errors import WireError
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.message import Changes, Message, request


class TargetLeased(Message, frozen=True):
    """Reply to `LeaseTarget`; the target's memory file is beside it.

    Memory that a fabric reaches has none: there the gateway sends the payload in data frames, an
    empty one at the end, before `EndLease`.
    """

    def goes_on(self) -> bool:
        return True


@request(TargetLeased, Done, repeatable=False, changes=Changes.NOTHING)
class LeaseTarget(Message, frozen=True):
    """Lease a part of a client's target, to write one payload to it.

    The five fields of the target are those of the descriptor's `rdma_target`. NotFound
    (NoSuchTarget) unless the identity registered it.
    """

    identity: str  # who asks; the target must belong to the same
    transport: str
    target_id: bytes
    offset_bytes: int
    length_bytes: int
    tag: int
    payload_bytes: Annotated[int, msgspec.Meta(ge=1)]  # to be written from `offset_bytes` on
    first_layer: int  # of the payload; what has failed where the payload does not come
    end_layer: int


class EndLease(Message, frozen=True):
    """Nothing is written to the target any more. Reply: `Done`.

    The target's owner hears of it: all layers are ready, or the delivery failed with `error`.
    """

    error: WireError | None = None
