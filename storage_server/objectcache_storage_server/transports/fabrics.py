"""The fabrics that this server delivers over: opened when the first client asks for one."""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
from pathlib import Path

from objectcache_fabrics.peers import NO_LANE, Fabric, FabricPeer, TrafficLane, WriteTimeout
from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_runtime.settings import StorageSettings
from objectcache_runtime.shares.fair_shares import FairShares
from objectcache_schemas.accounts import ROOT_USER
from objectcache_schemas.errors import AccessDenied, InvalidRequest, Unavailable, Unsupported
from objectcache_schemas.excerpt import excerpt
from objectcache_schemas.limits import MIB
from objectcache_storage_server.transports.shared_memory import SharedMemoryTransport

# Four of them stay in a processor's cache between being read and being written. Measured: with
# half as much a delivery costs a fifth more of the processor's time, most of it the interpreter's.
STAGED_FRAGMENT_BYTES_MAX = 4 * MIB
NIXL = "nixl"
VERBS = "verbs"
FABRICS = (NIXL, VERBS)
_NIXL_PACKAGE = "nixl_cu12"
_SYSTEM_DEVICES = Path("/sys/class")
logger = logging.getLogger("objectcache.storage_server.fabrics")
_UCX_DEVICE = re.compile(r"(?P<device>[A-Za-z0-9_][A-Za-z0-9_.-]*)(:(?P<port>[0-9]+))?")


def check_nixl_devices(storage: StorageSettings, system: Path = _SYSTEM_DEVICES) -> None:
    """Raise `InvalidRequest` where storage.nixl_devices names no device of this host, or several:
    NIXL takes what follows a comma for another setting. Nothing is checked where NIXL is not served
    or the system does not list its devices.
    """
    named = storage.nixl_devices
    is_served = storage.nixl != "off" and not _missing_nixl()
    network, rdma = system / "net", system / "infiniband"
    if not named or not is_served or not network.is_dir():
        return
    if "," in named:
        raise InvalidRequest(
            f"storage.nixl_devices names several devices ({named}); name one, or leave it empty "
            "and name them in UCX_NET_DEVICES in the environment"
        )
    matched = _UCX_DEVICE.fullmatch(named)
    if matched is None:
        raise InvalidRequest(
            f"storage.nixl_devices is {named!r}; it must name a device as UCX does, such as "
            "mlx5_0:1 or eth0"
        )
    port = rdma / matched["device"] / "ports" / (matched["port"] or "1")
    if not (network / named).is_dir() and not port.is_dir():
        raise InvalidRequest(
            f"storage.nixl_devices names {named}, which this host does not have; it has "
            f"{', '.join(_devices(network, rdma))}"
        )


def warn_of_unserved_devices(storage: StorageSettings) -> None:
    """Log which devices are named for a fabric that this host cannot serve, and why."""
    if storage.nixl_devices not in ("", StorageSettings().nixl_devices):
        reason = "storage.nixl is off" if storage.nixl == "off" else _missing_nixl()
        if reason:
            logger.warning("storage.nixl_devices is not used: %s", reason)
    if storage.verbs_device:
        from objectcache_fabrics.verbs.pyverbs_binding import load_pyverbs

        try:
            load_pyverbs()
        except Unavailable as error:
            logger.warning("storage.verbs_device is not used: %s", error.message)


def _missing_nixl() -> str:
    is_there = importlib.util.find_spec(_NIXL_PACKAGE) is not None
    return "" if is_there else f"the package {_NIXL_PACKAGE} is not installed"


def _devices(network: Path, rdma: Path) -> list[str]:
    """Names as UCX has them."""
    ports = [f"{port.parents[1].name}:{port.name}" for port in rdma.glob("*/ports/*")]
    return sorted(ports) + sorted(device.name for device in network.iterdir() if device.is_dir())


def check_transport(transport: str) -> None:
    """Raise `Unsupported` for a target's transport that there is none of."""
    served = (SharedMemoryTransport.name, *FABRICS)
    if transport not in served:
        raise Unsupported(
            f"rdma_target.transport {excerpt(transport)!r} is not served; there are "
            f"{', '.join(served)}"
        )


class Fabrics:
    """Fabrics by name, over one staging memory. Thread-safe."""

    def __init__(
        self,
        storage: StorageSettings,
        timeout: WriteTimeout | None = None,
        lane: TrafficLane = NO_LANE,
    ) -> None:
        """`timeout` in place of storage.fabric_timeout_s, for a process that has one of its own.
        `lane` is that of verbs; NIXL's is in storage.nixl_ucx.
        """
        self._lane = lane
        self._timeout = timeout or WriteTimeout(
            storage.fabric_timeout_s, "storage.fabric_timeout_s"
        )
        largest_bytes = min(storage.target_fragment_bytes_max, STAGED_FRAGMENT_BYTES_MAX)
        self.staging = StagingMemory(
            max(storage.fragment_bytes, largest_bytes),
            storage.fabric_staging_bytes,
            "storage.fabric_staging_bytes",
        )
        # Sessions over those that are costly to have open, each as its storage.NAME_sessions_max.
        self.session_shares = {NIXL: FairShares(storage.nixl_sessions_max)}
        self._storage = storage
        self._fabrics: dict[str, Fabric] = {}
        self._lock = threading.Lock()

    def open(self, transport: str, endpoint: bytes, identity: str) -> tuple[FabricPeer, bytes]:
        """See `Fabric.open`; for a session of this identity.

        Raises `Unsupported` for a fabric that is not served, with what to set or to install, and
        `AccessDenied` for NIXL to a user that the operator has not said to trust; `Unavailable`
        where the fabric cannot be opened.
        """
        is_trusted = identity == ROOT_USER or self._storage.nixl == "trusting"
        if transport == NIXL and self._storage.nixl != "off" and not is_trusted:
            raise AccessDenied(
                "NIXL is served to the root user: its library trusts clients with this process' "
                "memory. Use verbs, shared memory or bodies; storage.nixl=trusting serves every "
                "user, with the risks that docs/security.md names"
            )
        with self._lock:
            fabric = self._fabrics.get(transport)
            if fabric is None:
                fabric = self._fabrics[transport] = self._make(transport)
        try:
            return fabric.open(endpoint)
        except Unavailable as error:
            if transport != NIXL:
                raise
            raise Unavailable(
                f"the storage server: {error.message} (its storage.nixl_devices is "
                f"{self._storage.nixl_devices!r})"
            ) from error

    def _make(self, transport: str) -> Fabric:
        storage = self._storage
        timeout = self._timeout
        if transport == NIXL and storage.nixl != "off":
            from objectcache_fabrics.nixl.fabric import NixlFabric

            return NixlFabric(self.staging, storage.nixl_devices, storage.nixl_ucx, timeout)
        if transport == VERBS and storage.verbs_device:
            from objectcache_fabrics.verbs.fabric import VerbsFabric

            return VerbsFabric(self.staging, storage.verbs_device, timeout, self._lane)
        remedy = {NIXL: "storage.nixl is off", VERBS: "storage.verbs_device names no device"}
        raise Unsupported(
            f"transport {excerpt(transport)!r} is not served: "
            f"{remedy.get(transport, 'there are shared_memory, nixl and verbs')}"
        )

    def close(self) -> None:
        """Let all go; no peer is open."""
        with self._lock:
            for fabric in self._fabrics.values():
                fabric.close()
            self._fabrics.clear()

    def __repr__(self) -> str:
        return f"<Fabrics {sorted(self._fabrics)}, {self.staging!r}>"
