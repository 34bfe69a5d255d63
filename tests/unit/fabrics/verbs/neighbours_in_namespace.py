"""A program for the root of a network namespace of its own: its arguments are PREPARATION, CASES.

It lays out near0, with a host behind it that answers for 10.99.0.2 and fd99::2 alone, and prints
for each case what `find_neighbour` says.
"""

from __future__ import annotations

import json
import subprocess
import sys
from ipaddress import ip_address

from objectcache_fabrics.verbs.neighbours import find_neighbour
from objectcache_fabrics.verbs.next_hops import is_routed
from objectcache_schemas.errors import Unavailable

# Without accept_dad the interface's own address over IPv6, which asks for others, is there at once.
NEAR = """
ip link set lo up
ip link add near0 type veth peer name far0 netns {far}
echo 0 >/proc/sys/net/ipv6/conf/near0/accept_dad
ip addr add 10.99.0.1/24 dev near0
ip addr add fd99::1/64 dev near0 nodad
ip link set near0 up
ip route add 10.50.0.0/24 via 10.99.0.2
ip route add 10.51.0.0/24 via 10.99.0.77
ip route add 10.52.0.0/24 via inet6 fd99::2 dev near0
ip route add fd50::/64 via fd99::2
"""
FAR = """
ip addr add 10.99.0.2/24 dev far0
ip addr add fd99::2/64 dev far0 nodad
ip link set far0 up
"""


def run(script: str, *before: str) -> None:
    subprocess.run([*before, "sh", "-ec", script], check=True, timeout=60)


def found(source: str, destination: str) -> str:
    near, there = ip_address(source), ip_address(destination)
    if not is_routed("near0", near, there):
        return "no route"
    try:
        find_neighbour("near0", near, there)
    except Unavailable as error:
        return error.message
    return "found"


def main(preparation: str, cases: str) -> None:
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo here; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()  # the namespace is there
    try:
        run(NEAR.format(far=holder.pid))
        run(FAR, "nsenter", "--net", "--target", str(holder.pid))
        run(preparation)
        print(json.dumps([found(*case) for case in json.loads(cases)]))
    finally:
        holder.kill()
        holder.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
