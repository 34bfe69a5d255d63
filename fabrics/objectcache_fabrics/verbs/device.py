"""An RDMA device: its port, its address, and memory that it may read and write.

One name is a device's, such as mlx5_0 or rxe0, or a device and a port, mlx5_0:2. Of a RoCE port the
address is the RoCE v2 one over IPv4, which routes as IP does.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from objectcache_fabrics.verbs.neighbours import find_neighbour
from objectcache_fabrics.verbs.next_hops import IPAddress, is_routed
from objectcache_fabrics.verbs.pyverbs_binding import Pyverbs, load_pyverbs, translated
from objectcache_schemas.errors import Unavailable

MESSAGE_BYTES_MAX = 1 << 30  # of one write; what ports allow more, nobody needs
READS_MAX = 16  # RDMA reads under way on one connection

# The library of rdma-core 44 hides the descriptor of a completion channel. It is the one that is
# there after the channel was made, and was not before; so channels and devices, which have such
# descriptors too, are opened and closed one at a time.
descriptor_lock = threading.Lock()


class VerbsDevice:
    """An open device with one of its ports. Thread-safe."""

    def __init__(self, name: str = "") -> None:
        """Open a device; without a name, the first that has an active port.

        Raises `Unavailable`, with what is missing: the library, the device, an active port, an
        address.
        """
        self.verbs = load_pyverbs()
        device_name, port = _parsed(name) if name else _first_active(self.verbs)
        self.context = _opened(self.verbs, device_name)
        try:
            self._describe(device_name, port)
            with translated(f"device {device_name} gives no protection domain"):
                self.domain: Any = self.verbs.pd.PD(self.context)
        except Unavailable:
            with descriptor_lock:
                self.context.close()
            raise

    def _describe(self, device_name: str, port: int) -> None:
        enums = self.verbs.enums
        with translated(f"port {port} of device {device_name} cannot be asked"):
            about_port = self.context.query_port(port)
            about_device = self.context.query_device()
        self.name = f"{device_name}:{port}"
        if about_port.state != enums.IBV_PORT_ACTIVE:
            raise Unavailable(f"port {port} of RDMA device {device_name} is not active")
        self.port = port
        self.lid: int = about_port.lid
        self.is_ethernet = about_port.link_layer == enums.IBV_LINK_LAYER_ETHERNET
        self.mtu_bytes: int = 128 << about_port.active_mtu
        self.message_bytes_max = min(MESSAGE_BYTES_MAX, about_port.max_msg_sz)
        self.segments_max: int = about_device.max_sge
        self.read_segments_max: int = max(1, min(about_device.max_sge, about_device.max_sge_rd))
        self.work_max: int = about_device.max_qp_wr
        self.reads_answered_max = min(READS_MAX, about_device.max_qp_rd_atom)
        self.reads_asked_max = min(READS_MAX, about_device.max_qp_init_rd_atom)
        with translated(f"port {port} of device {device_name} has no addresses"):
            self.gid_index, self.gid = self._chosen_gid(about_port.gid_tbl_len)
        self._interface = _interface_of(device_name, port, self.gid_index)

    def _chosen_gid(self, table_length: int) -> tuple[int, bytes]:
        if not self.is_ethernet:
            return 0, _gid_bytes(self.context.query_gid(self.port, 0))
        version_2 = self.verbs.enums.IBV_GID_TYPE_ROCE_V2
        gids = {
            entry.gid_index: _gid_bytes(self.context.query_gid(self.port, entry.gid_index))
            for entry in self.context.query_gid_table(table_length)
            if entry.port_num == self.port and entry.gid_type == version_2
        }
        if not gids:
            raise Unavailable(
                f"RDMA device {self.name} has no address for RoCE v2: give its network interface "
                "an IPv4 address"
            )
        return min(gids.items(), key=lambda item: (_gid_rank(item[1]), item[0]))

    def find(self, gid: bytes) -> None:
        """Have the system find the way from the port's network interface to an address, so that a
        connection to it is made at once; nothing over InfiniBand. May take
        `NEIGHBOUR_TIMEOUT_S`, while other threads go on.

        Raises `Unavailable` where no route leads there, or nobody answers.
        """
        if not self.is_ethernet:
            return
        source, destination = _ip_address(self.gid), _ip_address(gid)
        if source.version != destination.version or not is_routed(
            self._interface, source, destination
        ):
            raise Unavailable("the peer cannot be reached from this device: no route leads there")
        find_neighbour(self._interface, source, destination)

    def register(
        self, address: int, length_bytes: int, *, remote_write: bool, remote_read: bool
    ) -> VerbsRegion:
        """Let the device at own memory, and whoever is connected and has its key, as far as it
        says. The memory must stay until the region is closed.

        The interpreter stands still while its pages are locked: the library holds Python's lock.

        Raises `Unavailable`, where the system locks no more memory for this process.
        """
        enums = self.verbs.enums
        access = enums.IBV_ACCESS_LOCAL_WRITE
        access |= enums.IBV_ACCESS_REMOTE_WRITE if remote_write else 0
        access |= enums.IBV_ACCESS_REMOTE_READ if remote_read else 0
        with translated(
            f"{length_bytes} bytes cannot be registered; is `ulimit -l` (locked memory) too low?"
        ):
            region = self.verbs.mr.MR(self.domain, length_bytes, access, address=address)
        return VerbsRegion(region, address, length_bytes)

    def close(self) -> None:
        """Let the device go; its connections and regions are closed. Repeating has no effect."""
        with descriptor_lock, translated(f"device {self.name} does not close"):
            self.domain.close()
            self.context.close()

    def __repr__(self) -> str:
        return f"<VerbsDevice {self.name}, mtu {self.mtu_bytes}>"


class VerbsRegion:
    """Registered memory. `remote_key` opens it to the other end, so it is never logged."""

    def __init__(self, region: Any, address: int, length_bytes: int) -> None:
        self._region = region
        self.address = address
        self.length_bytes = length_bytes
        self.local_key: int = region.lkey
        self.remote_key: int = region.rkey

    def close(self) -> None:
        """Take the memory away from the device; what is under way into it has ended or fails.

        Repeating has no effect.
        """
        with translated("a region does not close"):
            self._region.close()

    def __repr__(self) -> str:
        return f"<VerbsRegion {self.length_bytes} bytes>"


def _parsed(name: str) -> tuple[str, int]:
    device_name, _, port = name.partition(":")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 256):
        raise Unavailable(f"RDMA device {name!r}: the port must be a number from 1 to 255")
    return device_name, int(port or 1)


def _first_active(verbs: Pyverbs) -> tuple[str, int]:
    """The first device and port that can be used."""
    with translated("the system has no RDMA devices"):
        names = [device.name.decode() for device in verbs.device.get_device_list()]
    for name in names:
        with _opened_briefly(verbs, name) as context, translated(f"device {name}"):
            for port in range(1, context.query_device().phys_port_cnt + 1):
                if context.query_port(port).state == verbs.enums.IBV_PORT_ACTIVE:
                    return name, port
    raise Unavailable(f"no RDMA device has an active port; there are {', '.join(names) or 'none'}")


def _opened(verbs: Pyverbs, name: str) -> Any:
    with descriptor_lock, translated(f"RDMA device {name!r} cannot be opened"):
        return verbs.device.Context(name=name)


@contextmanager
def _opened_briefly(verbs: Pyverbs, name: str) -> Generator[Any]:
    context = _opened(verbs, name)
    try:
        yield context
    finally:
        with descriptor_lock:
            context.close()


def _interface_of(device_name: str, port: int, gid_index: int) -> str:
    """The network interface that has the address; empty where the system does not say."""
    ports = Path("/sys/class/infiniband", device_name, "ports")
    try:
        return (ports / str(port) / "gid_attrs" / "ndevs" / str(gid_index)).read_text().strip()
    except OSError:
        return ""


def _gid_bytes(text: str) -> bytes:
    return ipaddress.IPv6Address(text).packed


def _ip_address(gid: bytes) -> IPAddress:
    address = ipaddress.IPv6Address(gid)
    return address.ipv4_mapped or address


def _gid_rank(gid: bytes) -> int:
    """IPv4 first, then what routes, then what does not."""
    address = ipaddress.IPv6Address(gid)
    if address.ipv4_mapped is not None:
        return 0
    return 2 if address.is_link_local else 1
