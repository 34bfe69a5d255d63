"""The fabrics that this server delivers over: opened when the first client asks for one."""

from __future__ import annotations

import threading

from objectcache_schemas.accounts import ROOT_USER
from objectcache_schemas.errors import AccessDenied, Unsupported
from objectcache_schemas.limits import MIB
from objectcache_schemas.settings import StorageSettings
from objectcache_storage_server.transports.fabric import Fabric, FabricPeer, StagingMemory
from objectcache_storage_server.transports.shared_memory import SharedMemoryTransport

# Four of them stay in a processor's cache between being read and being written. Measured: with
# half as much a delivery costs a fifth more of the processor's time, most of it the interpreter's.
STAGED_FRAGMENT_BYTES_MAX = 4 * MIB
NIXL = "nixl"
VERBS = "verbs"
FABRICS = (NIXL, VERBS)


def check_transport(transport: str) -> None:
    """Raise `Unsupported` for a target's transport that there is none of."""
    served = (SharedMemoryTransport.name, *FABRICS)
    if transport not in served:
        raise Unsupported(
            f"rdma_target.transport {transport!r} is not served; there are {', '.join(served)}"
        )


class Fabrics:
    """Fabrics by name, over one staging memory. Thread-safe."""

    def __init__(self, storage: StorageSettings) -> None:
        largest_bytes = min(storage.target_fragment_bytes_max, STAGED_FRAGMENT_BYTES_MAX)
        self.staging = StagingMemory(
            max(storage.fragment_bytes, largest_bytes), storage.fabric_staging_bytes
        )
        self._storage = storage
        self._fabrics: dict[str, Fabric] = {}
        self._lock = threading.Lock()

    def open(self, transport: str, endpoint: bytes, identity: str) -> tuple[FabricPeer, bytes]:
        """See `Fabric.open`; for a session of this identity.

        Raises `Unsupported` for a fabric that is not served, with what to set or to install, and
        `AccessDenied` for NIXL to a user that the operator has not said to trust.
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
        return fabric.open(endpoint)

    def _make(self, transport: str) -> Fabric:
        storage = self._storage
        if transport == NIXL and storage.nixl != "off":
            from objectcache_storage_server.transports.nixl import NixlFabric

            return NixlFabric(
                self.staging, storage.nixl_devices, storage.nixl_ucx, storage.fabric_timeout_s
            )
        if transport == VERBS and storage.verbs_device:
            from objectcache_storage_server.transports.verbs.fabric import VerbsFabric

            return VerbsFabric(self.staging, storage.verbs_device, storage.fabric_timeout_s)
        remedy = {NIXL: "storage.nixl is off", VERBS: "storage.verbs_device names no device"}
        raise Unsupported(
            f"transport {transport!r} is not served: "
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
