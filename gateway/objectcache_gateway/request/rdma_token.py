"""The tokens with which clients of S3 over RDMA name their memory.

A token is only validated here: what it names is never used, so that no token, of this format or a
later one, can make this server touch a client's memory. Formats: cuObject's descriptor, 81
characters (address, size, key, LID, DCT number, whether there is a GID, GID), also with the address
and size that older clients append; and hipObject's, 88 hexadecimal digits.
"""

from __future__ import annotations

import enum
import re
import struct
from dataclasses import dataclass, field

from objectcache_schemas.errors import InvalidRequest

TOKEN_CHARACTERS_MAX = 115  # cuObject's with an address and a size appended

_ADDRESS_SPACE_BYTES = 1 << 64
_CUOBJECT = re.compile(
    r"([0-9a-f]{16}):([0-9a-f]{8}):([0-9a-f]{8}):([0-9a-f]{4}):([0-9a-f]{6}):([01]):([0-9a-f]{32})"
    r"(?::([0-9a-f]{16}):([0-9a-f]{16}))?"
)
_HIPOBJECT = re.compile(r"[0-9a-fA-F]{88}")
# Transport, queue pair, GID, key, address, size, port, LID: as they lie in the client's memory.
_HIPOBJECT_FIELDS = struct.Struct("<BI16sIQQBH")


class RdmaTransport(enum.Enum):
    """How a token's client wants to be reached."""

    DYNAMICALLY_CONNECTED = 0
    RELIABLE_CONNECTION = 1


@dataclass(frozen=True, slots=True)
class RdmaToken:
    """What a valid token says. The address and the key open memory: no repr shows them."""

    transport: RdmaTransport
    address: int = field(repr=False)
    size_bytes: int
    key: int = field(repr=False)
    queue_pair: int = field(repr=False)  # with dynamic connections the number of their target
    lid: int = field(repr=False)  # 0 on Ethernet
    gid: bytes | None = field(repr=False)  # None where the LID alone names the port

    def __post_init__(self) -> None:
        if not self.size_bytes:
            raise invalid_token("it names no byte of memory")
        if self.address + self.size_bytes > _ADDRESS_SPACE_BYTES:
            raise invalid_token("its memory ends past the address space")
        if not self.queue_pair:
            raise invalid_token("it names no queue pair")
        if not self.lid and not any(self.gid or b""):
            raise invalid_token("it names neither a LID nor a GID")


def parse_rdma_token(text: str) -> RdmaToken:
    """The token in an x-amz-rdma-token header.

    Raises `InvalidRequest` (InvalidRDMAToken), whose message holds nothing of the token.
    """
    if len(text) > TOKEN_CHARACTERS_MAX:
        raise invalid_token(f"it has more than {TOKEN_CHARACTERS_MAX} characters")
    match = _CUOBJECT.fullmatch(text)
    if match is not None:
        return _cuobject(match)
    if _HIPOBJECT.fullmatch(text):
        return _hipobject(bytes.fromhex(text))
    raise invalid_token("it must be a descriptor of cuObject or of hipObject")


def invalid_token(what: str) -> InvalidRequest:
    """The refusal of a token."""
    return InvalidRequest(f"x-amz-rdma-token is not valid: {what}", code="InvalidRDMAToken")


def _cuobject(match: re.Match[str]) -> RdmaToken:
    address, size_bytes, key, lid, target, has_gid = (int(match[n], 16) for n in range(1, 7))
    token = RdmaToken(
        RdmaTransport.DYNAMICALLY_CONNECTED,
        address,
        size_bytes,
        key,
        target,
        lid,
        bytes.fromhex(match[7]) if has_gid else None,
    )
    if match[8] is not None:
        _check_appended(int(match[8], 16), int(match[9], 16))
    return token


def _check_appended(address: int, size_bytes: int) -> None:
    if not size_bytes or address + size_bytes > _ADDRESS_SPACE_BYTES:
        raise invalid_token("the address and size after it name no memory")


def _hipobject(data: bytes) -> RdmaToken:
    number, queue_pair, gid, key, address, size_bytes, _, lid = _HIPOBJECT_FIELDS.unpack(data)
    if number not in (0, 1):
        raise invalid_token("its transport is neither 0 nor 1")
    return RdmaToken(RdmaTransport(number), address, size_bytes, key, queue_pair, lid, gid)
