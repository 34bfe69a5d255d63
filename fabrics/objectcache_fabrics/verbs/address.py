"""What the two ends of a verbs connection tell each other, before and while they are connected.

A `VerbsAddress` is the `endpoint` of `OpenFabric` and `FabricOpened`. An announcement travels as
the 32 bits of immediate data of an RDMA write: 19 of the delivery's tag, 13 of its end layer.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, NamedTuple

import msgspec

from objectcache_schemas.errors import InvalidRequest

TAG_BITS = 19
LAYER_BITS = 13
TAG_END = 1 << TAG_BITS
END_LAYER_MAX = (1 << LAYER_BITS) - 1
GID_BYTES = 16
ENDPOINT_BYTES_MAX = 256
MTUS_BYTES = (256, 512, 1024, 2048, 4096)
RECEIVES_MAX = 4096  # a client's posted receives: announcements on their way to it

_Uint24 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]


class VerbsAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One end of a connection.

    `gid` is its port's address in network order, `lid` that in an InfiniBand subnet (0 on
    Ethernet). `receives` is how many announcements it can take before it returns credits, `reads`
    how many RDMA reads it answers at a time; both are 0 for a server, which is only answered.
    """

    qp_num: Annotated[int, msgspec.Meta(ge=1, lt=1 << 24)]
    psn: _Uint24  # sequence number of the first packet that it sends
    gid: Annotated[bytes, msgspec.Meta(min_length=GID_BYTES, max_length=GID_BYTES)]
    lid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0
    mtu_bytes: int = 1024
    receives: Annotated[int, msgspec.Meta(ge=0, le=RECEIVES_MAX)] = 0
    reads: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0

    def __post_init__(self) -> None:
        if self.mtu_bytes not in MTUS_BYTES:
            raise ValueError(f"mtu_bytes must be one of {MTUS_BYTES}")
        address = ipaddress.IPv6Address(self.gid)
        address_v4 = address.ipv4_mapped
        if address.is_unspecified or address.is_multicast:
            raise ValueError("gid must be the address of one port")
        if address_v4 is not None and (
            address_v4.is_multicast or int(address_v4) in (0, 2**32 - 1)
        ):
            raise ValueError("gid must be the address of one port")

    @property
    def gid_text(self) -> str:
        """The gid as the library takes it: eight groups of four hexadecimal digits."""
        return ipaddress.IPv6Address(self.gid).exploded

    def to_bytes(self) -> bytes:
        """As it travels."""
        return _ENCODER.encode(self)

    @staticmethod
    def from_bytes(endpoint: bytes) -> VerbsAddress:
        """Read what a peer sent. Raises `InvalidRequest` that names the field."""
        if len(endpoint) > ENDPOINT_BYTES_MAX:
            raise InvalidRequest(f"endpoint: over {ENDPOINT_BYTES_MAX} bytes")
        try:
            return _DECODER.decode(endpoint)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"endpoint: no address of verbs: {error}") from error

    def __repr__(self) -> str:
        return f"<VerbsAddress mtu {self.mtu_bytes}, {self.receives} receives>"


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(VerbsAddress)


class Announcement(NamedTuple):
    """The layers of the delivery with this tag, up to `end_layer`, are in place.

    Tags are told apart by their lowest 19 bits alone, so a client draws them below `TAG_END`.
    """

    tag: int
    end_layer: int

    def to_immediate(self) -> int:
        """The 32 bits that say so. `end_layer` is at most 8,191."""
        assert 0 <= self.end_layer <= END_LAYER_MAX, self.end_layer
        return (self.tag % TAG_END) << LAYER_BITS | self.end_layer

    @staticmethod
    def from_immediate(immediate: int) -> Announcement:
        """What 32 bits say."""
        return Announcement(immediate >> LAYER_BITS & (TAG_END - 1), immediate & END_LAYER_MAX)
