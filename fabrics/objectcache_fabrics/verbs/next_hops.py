"""Where packets from an interface of this host to an address go next, by the system's own rules.

The system is asked over netlink, which answers at once and sends nothing.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Generator
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

IPAddress = IPv4Address | IPv6Address

_HEADER = struct.Struct("=IHHII")  # of a netlink message: length, type, flags, sequence, port
_ROUTE = struct.Struct("=BBBBBBBBI")  # rtmsg of linux/rtnetlink.h
_NEIGHBOUR = struct.Struct("=BBHiHBB")  # ndmsg of linux/neighbour.h
_ATTRIBUTE = struct.Struct("=HH")
_NUMBER = struct.Struct("=I")
_RTM_GETROUTE, _RTM_GETNEIGH = 26, 30
_NLM_F_REQUEST = 1
_NLMSG_ERROR = 2
_RTM_F_FIB_MATCH = 0x2000  # a route of the tables: an interface alone would be one for everything
_RTN_UNICAST, _RTN_LOCAL = 1, 2
_RTA_DST, _RTA_SRC, _RTA_OIF, _RTA_GATEWAY, _RTA_VIA = 1, 2, 4, 5, 18
_NDA_DST = 1
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES)
_ANSWER_BYTES_MAX = 8192


class NextHop(NamedTuple):
    """A neighbour on an interface: the destination itself, or the router to it."""

    interface_index: int
    address: IPAddress


def is_routed(interface: str, source: IPAddress, destination: IPAddress) -> bool:
    """Whether a route leads from the source's address over the interface to the destination, if
    only to a neighbour that may not be there; none leads to a broadcast address. True where the
    system does not tell.
    """
    try:
        answer = _looked_up(interface, source, destination, _RTM_F_FIB_MATCH)
    except OSError as error:
        return error.errno not in _NO_ROUTE
    return _route_type(answer) in (_RTN_UNICAST, _RTN_LOCAL)


def next_hop(interface: str, source: IPAddress, destination: IPAddress) -> NextHop | None:
    """The neighbour that packets from the source's address over the interface to the destination
    are handed to; None for an address of this host, which has none. Raises `OSError`.
    """
    answer = _looked_up(interface, source, destination, 0)
    if _route_type(answer) == _RTN_LOCAL:
        return None
    attributes = dict(_attributes(answer[_ROUTE.size :]))
    (index,) = _NUMBER.unpack(attributes[_RTA_OIF])
    if _RTA_VIA in attributes:  # a router of the other family; behind two bytes with its number
        return NextHop(index, ip_address(attributes[_RTA_VIA][2:]))
    gateway = attributes.get(_RTA_GATEWAY)
    return NextHop(index, destination if gateway is None else ip_address(gateway))


def neighbour_state(hop: NextHop) -> int:
    """What the system knows of a neighbour, NUD_... of linux/neighbour.h; 0 for nothing.

    Raises `OSError`, on Linux before 5.0 always.
    """
    question = _NEIGHBOUR.pack(_family(hop.address), 0, 0, hop.interface_index, 0, 0, 0)
    try:
        answer = _asked(_RTM_GETNEIGH, question + _attribute(_NDA_DST, hop.address.packed))
    except FileNotFoundError:
        return 0
    return int(_NEIGHBOUR.unpack_from(answer)[4])


def interface_index(interface: str) -> int:
    """The interface's number; 0, which stands for any, where there is none of this name."""
    try:
        return socket.if_nametoindex(interface)
    except OSError:
        return 0


def _looked_up(interface: str, source: IPAddress, destination: IPAddress, flags: int) -> bytes:
    family, bits = _family(destination), destination.max_prefixlen
    question = _ROUTE.pack(family, bits, bits, 0, 0, 0, 0, 0, flags)
    question += _attribute(_RTA_DST, destination.packed) + _attribute(_RTA_SRC, source.packed)
    if index := interface_index(interface):
        question += _attribute(_RTA_OIF, _NUMBER.pack(index))
    return _asked(_RTM_GETROUTE, question)


def _route_type(answer: bytes) -> int:
    return int(_ROUTE.unpack_from(answer)[7])


def _asked(kind: int, question: bytes) -> bytes:
    """The body of the answer. Raises `OSError` with the number that the system refuses with."""
    length_bytes = _HEADER.size + len(question)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.setblocking(False)
        netlink.send(_HEADER.pack(length_bytes, kind, _NLM_F_REQUEST, 1, 0) + question)
        answer = netlink.recv(_ANSWER_BYTES_MAX)
    answer_bytes, answer_kind, *_ = _HEADER.unpack_from(answer)
    if answer_kind == _NLMSG_ERROR:
        (negative,) = struct.unpack_from("=i", answer, _HEADER.size)
        raise OSError(-int(negative), "the system refuses to tell")
    return answer[_HEADER.size : answer_bytes]


def _attribute(kind: int, value: bytes) -> bytes:
    """`value` has whole words."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value


def _attributes(body: bytes) -> Generator[tuple[int, bytes]]:
    while len(body) >= _ATTRIBUTE.size:
        length_bytes, kind = _ATTRIBUTE.unpack_from(body)
        yield kind, body[_ATTRIBUTE.size : length_bytes]
        body = body[max(_ATTRIBUTE.size, -(-length_bytes // 4) * 4) :]


def _family(address: IPAddress) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6
