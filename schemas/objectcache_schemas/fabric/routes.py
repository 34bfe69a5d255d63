"""Whether an interface of this host leads to an address, by the system's own routing rules.

The system is asked over netlink, which answers at once and sends nothing. A connection of verbs to
where no route leads would ask the network for it, for a second or longer.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct

_HEADER = struct.Struct("=IHHII")  # of a netlink message: length, type, flags, sequence, port
_ROUTE = struct.Struct("=BBBBBBBBI")  # rtmsg of linux/rtnetlink.h
_ATTRIBUTE = struct.Struct("=HH4s")
_RTM_GETROUTE = 26
_NLM_F_REQUEST = 1
_NLMSG_ERROR = 2
_RTM_F_FIB_MATCH = 0x2000  # a route of the tables: an interface alone would be one for everything
_RTA_DST, _RTA_SRC, _RTA_OIF = 1, 2, 4
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES)
_ANSWER_BYTES_MAX = 8192


def is_routed(
    interface: str, source: ipaddress.IPv4Address, destination: ipaddress.IPv4Address
) -> bool:
    """Whether a route leads from the source's address over the interface to the destination, if
    only to a neighbour that may not be there. True where the system does not tell.
    """
    try:
        error = _asked(socket.if_nametoindex(interface), source, destination)
    except OSError:
        return True
    return error not in _NO_ROUTE


def _asked(
    interface: int, source: ipaddress.IPv4Address, destination: ipaddress.IPv4Address
) -> int:
    """The number of the error that the lookup ends with; 0 for a route."""
    lookup = _ROUTE.pack(socket.AF_INET, 32, 32, 0, 0, 0, 0, 0, _RTM_F_FIB_MATCH)
    for kind, value in (
        (_RTA_DST, destination.packed),
        (_RTA_SRC, source.packed),
        (_RTA_OIF, struct.pack("=I", interface)),
    ):
        lookup += _ATTRIBUTE.pack(_ATTRIBUTE.size, kind, value)
    length_bytes = _HEADER.size + len(lookup)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.setblocking(False)
        netlink.send(_HEADER.pack(length_bytes, _RTM_GETROUTE, _NLM_F_REQUEST, 1, 0) + lookup)
        answer = netlink.recv(_ANSWER_BYTES_MAX)
    if _HEADER.unpack_from(answer)[1] != _NLMSG_ERROR:
        return 0
    (negative,) = struct.unpack_from("=i", answer, _HEADER.size)
    return -int(negative)
