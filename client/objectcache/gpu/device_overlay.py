"""A device whose copies are made in another way than its own; all else is the device's."""

from __future__ import annotations

from objectcache.gpu.device import Device, Lane, Mark, StreamHold
from objectcache_schemas.errors import InvalidRequest


class DeviceOverlay(Device):
    """For a `Line`: whoever derives from it has lanes of its own kind, and marks where they need
    some. Streams cannot hold ahead for what it copies.
    """

    def __init__(self, under: Device) -> None:
        self.under = under
        self.ways = under.ways
        self.node = under.node
        self.place = under.place
        self.kind = under.kind

    def enter_thread(self) -> None:
        self.under.enter_thread()

    def lock_pages(self, address: int, length_bytes: int) -> None:
        self.under.lock_pages(address, length_bytes)

    def unlock_pages(self, address: int) -> None:
        self.under.unlock_pages(address)

    def relay(self, target: Device, task_bytes_max: int, pieces_max: int) -> Lane:
        return self.under.relay(target, task_bytes_max, pieces_max)

    def mark(self, stream: int) -> Mark:
        return self.under.mark(stream)

    def hold(self, stream: int, mark: Mark) -> None:
        self.under.hold(stream, mark)

    def stream_hold(self) -> StreamHold:
        return _NoHold()

    def allocate(self, length_bytes: int) -> int:
        return self.under.allocate(length_bytes)

    def free(self, address: int) -> None:
        self.under.free(address)

    def write(self, address: int, data: bytes) -> None:
        self.under.write(address, data)

    def read(self, address: int, length_bytes: int) -> bytes:
        return self.under.read(address, length_bytes)

    def __repr__(self) -> str:
        return repr(self.under)


class _NoHold(StreamHold):
    def hold(self, stream: int, number: int) -> None:
        raise InvalidRequest("a stream cannot hold for copies without a stream of their own")

    def raise_behind(self, lane: Lane, number: int) -> None:
        pass

    def raise_now(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass
