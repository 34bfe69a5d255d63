"""Memory as fabrics name it: this process' own, and a client's that is reached from elsewhere."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from objectcache_schemas.errors import InvalidRequest

ADDRESS_MAX = 1 << 64
DRAM = "DRAM"
VRAM = "VRAM"


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMemory:
    """Memory of this process or of a GPU, as a fabric wants it. `owner` keeps it alive."""

    address: int
    length_bytes: int
    owner: object
    _: KW_ONLY
    memory: str = DRAM
    device_id: int = 0

    def __repr__(self) -> str:
        return f"<DeviceMemory {self.length_bytes} bytes of {self.memory}>"


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """A client's memory as a fabric names it. Its numbers are never logged."""

    address: int
    length_bytes: int
    key: int = 0
    device_id: int = 0
    memory: str = DRAM

    def __post_init__(self) -> None:
        """Raises `InvalidRequest` for numbers that no memory has."""
        if self.address < 1 or self.length_bytes < 1:
            raise InvalidRequest("address and length_bytes must be 1 or more")
        if self.address + self.length_bytes > ADDRESS_MAX:
            raise InvalidRequest("address and length_bytes must lie within 64 bits")
        if not 0 <= self.key < 1 << 32 or not 0 <= self.device_id < 1 << 16:
            raise InvalidRequest("key must have 32 bits, device_id 16")
        if self.memory not in (DRAM, VRAM):
            raise InvalidRequest(f"memory must be {DRAM} or {VRAM}")

    def __repr__(self) -> str:
        return f"<RemoteMemory {self.length_bytes} bytes of {self.memory}>"
