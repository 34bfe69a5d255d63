"""Finding whom packets are handed to, against the kernel: in a network namespace of the test's own.

The address of a host that answers, one that nobody answers for, and both behind routers.
"""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from ipaddress import IPv4Address

import pytest

from objectcache_fabrics.verbs import neighbours
from objectcache_fabrics.verbs.next_hops import NextHop
from objectcache_schemas.errors import Unavailable

ENTER = ("unshare", "--user", "--map-root-user", "--net")
PROGRAM = "tests.unit.fabrics.verbs.neighbours_in_namespace"
NOBODY = "no host answers"


@pytest.fixture(scope="module")
def namespaces() -> None:
    if not all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip")):
        pytest.skip("unshare, nsenter or ip is not installed")
    laid_out = "ip link add near0 type veth peer name far0"
    tried = subprocess.run([*ENTER, "sh", "-c", laid_out], capture_output=True, timeout=60)
    if tried.returncode:
        pytest.skip(f"the system gives no network namespaces: {tried.stderr.decode()}")


def found(*cases: tuple[str, str], preparation: str = ":") -> list[str]:
    """What is said for each source and destination."""
    told = subprocess.run(
        [*ENTER, sys.executable, "-m", PROGRAM, preparation, json.dumps(cases)],
        check=True,
        stdout=subprocess.PIPE,
        timeout=120,
    )
    return list(json.loads(told.stdout))


needs_namespaces = pytest.mark.usefixtures("namespaces")


@needs_namespaces
def test_a_host_that_answers_is_found_and_so_is_one_behind_a_router_that_does() -> None:
    assert (
        found(
            ("10.99.0.1", "10.99.0.2"),
            ("10.99.0.1", "10.50.0.9"),
            ("10.99.0.1", "10.52.0.9"),
            ("fd99::1", "fd99::2"),
            ("fd99::1", "fd50::9"),
        )
        == ["found"] * 5
    )


@needs_namespaces
def test_each_kind_of_router_is_looked_for_itself() -> None:
    """Not found before, by a case that needs the same one."""
    for case in (("10.99.0.1", "10.50.0.9"), ("10.99.0.1", "10.52.0.9"), ("fd99::1", "fd50::9")):
        assert found(case) == ["found"]


@needs_namespaces
@pytest.mark.parametrize(
    ("source", "destination"),
    [("10.99.0.1", "10.99.0.99"), ("fd99::1", "fd99::99"), ("10.99.0.1", "10.51.0.9")],
)
def test_where_nobody_answers_is_refused_and_again_when_asked_again(
    source: str, destination: str
) -> None:
    for told in found((source, destination), (source, destination)):
        assert NOBODY in told


@needs_namespaces
def test_this_hosts_own_addresses_need_nobody() -> None:
    assert found(("10.99.0.1", "10.99.0.1"), ("fd99::1", "fd99::1")) == ["found"] * 2


@needs_namespaces
def test_no_route_leads_to_a_broadcast_address_or_outside() -> None:
    assert (
        found(
            ("10.99.0.1", "10.99.0.255"), ("10.99.0.1", "198.51.100.7"), ("fd99::1", "2001:db8::7")
        )
        == ["no route"] * 3
    )


@needs_namespaces
def test_who_is_known_is_sent_nothing() -> None:
    """Nobody is there to answer for it: asked, it would not be found."""
    known = "ip neigh add 10.99.0.99 lladdr 02:00:00:00:00:99 nud permanent dev near0"
    assert found(("10.99.0.1", "10.99.0.99"), preparation=known) == ["found"]


@needs_namespaces
def test_an_interface_that_asks_nobody_is_enough() -> None:
    assert found(("10.99.0.1", "10.99.0.99"), preparation="ip link set near0 arp off") == ["found"]


def test_a_datagram_that_a_firewall_refuses_is_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    near, there = IPv4Address("10.99.0.1"), IPv4Address("10.99.0.2")
    monkeypatch.setattr(neighbours, "next_hop", lambda *_: NextHop(2, there))
    monkeypatch.setattr(neighbours, "neighbour_state", lambda _: 0)
    monkeypatch.setattr(neighbours, "_send_datagram", refused)
    with pytest.raises(Unavailable, match=r"\(Operation not permitted\).*firewall"):
        neighbours.find_neighbour("near0", near, there)
