"""Where an interface leads, by this host's own routing tables."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest

from objectcache_fabrics.verbs.next_hops import is_routed, next_hop

LOOPBACK = IPv4Address("127.0.0.1")


@pytest.mark.parametrize(
    ("destination", "routed"),
    [("127.0.0.1", True), ("127.9.8.7", True), ("198.51.100.7", False), ("8.8.8.8", False)],
)
def test_the_loopback_leads_to_its_own_network_alone(destination: str, routed: bool) -> None:
    assert is_routed("lo", LOOPBACK, IPv4Address(destination)) is routed


def test_no_route_leads_to_a_broadcast_address() -> None:
    assert not is_routed("lo", LOOPBACK, IPv4Address("127.255.255.255"))


@pytest.mark.parametrize("own", [LOOPBACK, IPv4Address("127.9.8.7"), IPv6Address("::1")])
def test_an_address_of_this_host_is_handed_to_nobody(own: IPv4Address | IPv6Address) -> None:
    assert next_hop("lo", own if own.version == 6 else LOOPBACK, own) is None


def test_what_cannot_be_told_is_not_held_against_anybody() -> None:
    assert is_routed("nosuch0", LOOPBACK, LOOPBACK)
    assert is_routed("", LOOPBACK, LOOPBACK)
