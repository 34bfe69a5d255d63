"""Has the system find the neighbour on the way to an address, before a connection is made to it.

Making a connection of verbs finds it too, but holds Python's lock for the second that it takes to
learn that nobody is there. Found before, the connection is made at once.
"""

from __future__ import annotations

import socket
import struct
import time
from ipaddress import IPv4Address

from objectcache_fabrics.verbs.next_hops import (
    IPAddress,
    NextHop,
    interface_index,
    neighbour_state,
    next_hop,
)
from objectcache_schemas.errors import Unavailable

# A neighbour is asked for once a second: long enough for the second question to be answered.
NEIGHBOUR_TIMEOUT_S = 1.5
POLL_PAUSE_S = 0.01
_NUD_FAILED = 0x20
_NUD_VALID = 0x02 | 0x04 | 0x08 | 0x10 | 0x40 | 0x80  # the kernel's: its address is known
_IP_PKTINFO = 8  # of linux/in.h; not every version of Python names it
_DISCARD_PORT = 9


def find_neighbour(interface: str, source: IPAddress, destination: IPAddress) -> None:
    """Wait until the system knows whom to hand packets to the destination, which go out from the
    source's address over the interface. Returns at once where it does, where the destination is
    this host's own, and where the system does not tell. Other threads go on meanwhile.

    Raises `Unavailable` where nobody answers within `NEIGHBOUR_TIMEOUT_S`.
    """
    try:
        hop = next_hop(interface, source, destination)
        if hop is None or neighbour_state(hop) & _NUD_VALID:
            return
    except OSError:
        return
    try:
        _send_datagram(interface, source, destination)
        is_found = _answers(hop, time.monotonic() + NEIGHBOUR_TIMEOUT_S)
    except OSError as error:
        raise Unavailable(
            f"the peer cannot be reached from this device: a datagram to it is refused "
            f"({error.strerror}); does a firewall here refuse UDP to port {_DISCARD_PORT}?"
        ) from error
    if not is_found:
        raise Unavailable(
            "the peer cannot be reached from this device: no host answers for its address, or for "
            "the router to it"
        )


def _answers(hop: NextHop, deadline_s: float) -> bool:
    while not (state := neighbour_state(hop)) & _NUD_VALID:
        if state & _NUD_FAILED or time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_PAUSE_S)
    return True


def _send_datagram(interface: str, source: IPAddress, destination: IPAddress) -> None:
    """Have the system look for the neighbour: an empty datagram, to the port that discards it."""
    index = interface_index(interface)
    where: tuple[str | int, ...] = (str(destination), _DISCARD_PORT)
    if isinstance(source, IPv4Address):
        family, level, kind = socket.AF_INET, socket.IPPROTO_IP, _IP_PKTINFO
        how = struct.pack("=i4s4s", index, source.packed, bytes(4))
    else:
        family, level, kind = socket.AF_INET6, socket.IPPROTO_IPV6, socket.IPV6_PKTINFO
        how = struct.pack("=16si", source.packed, index)
        where += (0, index if destination.is_link_local else 0)
    with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
        datagrams.sendmsg([b""], [(level, kind, how)], 0, where)
