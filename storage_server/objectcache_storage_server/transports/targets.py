"""Registered client memory: who owns it, who writes to it, and when it may be let go.

It is a memory file that this process has mapped (`memory_files`), or memory that a fabric reaches.
A target belongs to the identity whose session registered it and dies with that session. Deliveries
hold a `Lease` while they write; released memory is unmapped when the last lease ends.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

import msgspec

from objectcache_fabrics.leased_memory import RemoteTargetMemory
from objectcache_schemas.descriptor import TARGET_ID_BYTES, MemoryTarget
from objectcache_schemas.errors import InvalidRequest, NotFound, ObjectCacheError, Unsupported
from objectcache_schemas.excerpt import excerpt
from objectcache_schemas.layout import TargetRing, TargetRows
from objectcache_schemas.messages.sessions import LayersConsumed, LayersFreed
from objectcache_storage_server.accounts.read_passes import PassBook
from objectcache_storage_server.transports.memory_files import MappedTargetMemory, map_memory_file

TARGETS_PER_SESSION_MAX = 256


class RegisteredTarget:
    """One registered memory; `is_open` until it is let go."""

    def __init__(
        self,
        target_id: bytes,
        owner: TargetOwner,
        memory: MappedTargetMemory | RemoteTargetMemory,
    ) -> None:
        self.target_id = target_id
        self.owner = owner
        self.memory = memory
        self.length_bytes = memory.length_bytes
        self.is_open = True
        self.leases: set[Lease] = set()
        self.released = False
        self.on_unmapped: Callable[[], None] | None = None

    @property
    def mapped(self) -> MappedTargetMemory:
        """Its memory file. Raises `Unsupported` where a fabric alone reaches it."""
        if not isinstance(self.memory, MappedTargetMemory):
            raise Unsupported(
                f"a target of transport {self.memory.transport!r} has no memory file; use the "
                "paths direct, batch or agg"
            )
        return self.memory

    def check_whole(self) -> None:
        """To be asked before each piece is written or read. Raises `InvalidRequest` where the
        client has punched holes into its memory file, and then its session ends.
        """
        if isinstance(self.memory, MappedTargetMemory) and not self.memory.is_whole():
            self.owner.end()
            raise InvalidRequest(
                "the memory file has holes that it did not have when it was registered, so the "
                "session ends; leave registered memory allocated"
            )

    def __repr__(self) -> str:
        return f"<Target {self.length_bytes} bytes, {len(self.leases)} deliveries>"


class Lease:
    """A delivery's right to write to a part of a target: `length_bytes` from `offset_bytes` on, or
    of these the `rows`, or the places of a ring, alone.
    """

    def __init__(
        self,
        registry: TargetRegistry,
        target: RegisteredTarget,
        offset_bytes: int,
        length_bytes: int,
        rows: TargetRows | TargetRing | None = None,
    ) -> None:
        self._registry = registry
        self.target = target
        self.offset_bytes = offset_bytes
        self.length_bytes = length_bytes
        self._rows = rows
        memory = target.memory
        self._view: memoryview | None = None
        if isinstance(memory, MappedTargetMemory):
            self._view = memory.view[offset_bytes : offset_bytes + length_bytes]
        self.cancel: Callable[[ObjectCacheError], None] | None = None

    def place_bytes(self, payload_offset_bytes: int) -> int:
        """Where a piece of the payload, which is in one layer, lies; from `offset_bytes` on."""
        if self._rows is None:
            return payload_offset_bytes
        return self._rows.place_bytes(payload_offset_bytes)

    @property
    def view(self) -> memoryview:
        """The part of a memory file."""
        assert self._view is not None, "a fabric alone reaches this target"
        return self._view

    @property
    def remote(self) -> RemoteTargetMemory:
        """The target's memory, which a fabric reaches."""
        memory = self.target.memory
        assert isinstance(memory, RemoteTargetMemory)
        return memory

    def let_go(self) -> None:
        """The registry's: the part is not used any more."""
        if self._view is not None:
            self._view.release()

    def on_release(self, cancel: Callable[[ObjectCacheError], None]) -> None:
        """Have `cancel` called when the target is released, at once if it has been."""
        self._registry.set_cancel(self, cancel)

    def end(self) -> None:
        """Nothing writes under this lease any more. A second call has no effect."""
        self._registry.end_lease(self)


class TargetOwner:
    """What a session is to those who write to its targets: an identity, a budget of memory, and
    somebody who is told and may tell. This one is told nothing, and says nothing.
    """

    def __init__(self, identity: str, access_key: str = "") -> None:
        """`access_key` is the one that signed the request for it."""
        self.identity = identity
        self.passes = PassBook(access_key)
        self.targets: dict[bytes, RegisteredTarget] = {}
        self.registered_bytes = 0

    def post(self, message: msgspec.Struct) -> None:
        """Send a message, from any thread."""

    def end(self) -> None:
        """End it soon, from any thread, and let its targets go: its client can begin another."""

    def is_gone(self) -> bool:
        """Whether its client has ended the session, which need not have been heard here yet; from
        any thread.
        """
        return False

    def watch_consumption(
        self,
        tag: int,
        callback: Callable[[LayersConsumed], None],
        dropped: Callable[[], None] | None = None,
    ) -> bool:
        """Have `callback` called in the event loop for what the client says that it has consumed
        of the delivery with this tag, until `forget_consumption`. May be called from any thread.

        It is a client's word: the layers may be none of the delivery's, and go back. A second
        delivery with the same tag takes the first one's place. `dropped` is called in the event
        loop when that happens, or the session ends. False where the session watches too many, or
        has ended: nothing will be called.
        """
        return False

    def forget_consumption(self, tag: int, callback: Callable[[LayersConsumed], None]) -> None:
        """What the client says with this tag is none of `callback`'s business any more. No effect
        where it is not watching.
        """

    def watch_freed(self, tag: int, callback: Callable[[LayersFreed], None]) -> None:
        """Have `callback` called in the event loop for the places that the client frees in the ring
        of the delivery with this tag, until `forget_freed`. A second delivery with the same tag
        takes the first one's place. Called in the event loop.
        """

    def forget_freed(self, tag: int, callback: Callable[[LayersFreed], None]) -> None:
        """The end of `watch_freed`. No effect where it is not watching."""


class TargetRegistry:
    """All targets of this server. Thread-safe."""

    def __init__(self, bytes_per_owner_max: int, server_id: bytes = b"") -> None:
        """`server_id` begins every target's id, by which gateways find the server that holds it."""
        self._bytes_per_owner_max = bytes_per_owner_max
        self._server_id = server_id
        self._targets: dict[bytes, RegisteredTarget] = {}
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Targets that are registered."""
        return len(self._targets)

    def register(self, owner: TargetOwner, descriptor: int, length_bytes: int) -> RegisteredTarget:
        """Map a memory file. The caller keeps (and closes) the file descriptor.

        Raises `InvalidRequest` as `map_memory_file` does, and over the session's budget.
        """
        self.check_budget(owner, length_bytes)
        return self._add(owner, map_memory_file(descriptor, length_bytes))

    def register_remote(self, owner: TargetOwner, memory: RemoteTargetMemory) -> RegisteredTarget:
        """Take memory that its peer has admitted. Raises `InvalidRequest` over the session's
        budget.
        """
        self.check_budget(owner, memory.length_bytes)
        return self._add(owner, memory)

    def check_budget(self, owner: TargetOwner, length_bytes: int) -> None:
        """Raise `InvalidRequest` where a session may not register as much more."""
        if len(owner.targets) >= TARGETS_PER_SESSION_MAX:
            raise InvalidRequest(f"a session may register {TARGETS_PER_SESSION_MAX} targets")
        if length_bytes <= 0:
            raise InvalidRequest(f"length_bytes must be 1 or more, got {length_bytes}")
        total_bytes = owner.registered_bytes + length_bytes
        if total_bytes > self._bytes_per_owner_max:
            raise InvalidRequest(
                f"length_bytes: the session's targets would hold {total_bytes} bytes, "
                f"storage.targets_bytes_max is {self._bytes_per_owner_max}"
            )

    def _add(
        self, owner: TargetOwner, memory: MappedTargetMemory | RemoteTargetMemory
    ) -> RegisteredTarget:
        drawn = secrets.token_bytes(TARGET_ID_BYTES - len(self._server_id))
        target = RegisteredTarget(self._server_id + drawn, owner, memory)
        with self._lock:
            self._targets[target.target_id] = target
            owner.targets[target.target_id] = target
            owner.registered_bytes += memory.length_bytes
        return target

    def lease(
        self,
        identity: str,
        asked: MemoryTarget,
        payload_bytes: int,
        rows: TargetRows | TargetRing | None = None,
    ) -> Lease:
        """The right to write a payload, in one piece, in `rows` or round in a ring.

        Raises `NotFound` (NoSuchTarget) unless this identity registered the target,
        `InvalidRequest` where the payload would leave its bounds, the target is of another
        transport, or its memory file has holes.
        """
        with self._lock:
            target = self._targets.get(asked.target_id)
            if target is None or not target.is_open or target.owner.identity != identity:
                raise NotFound("rdma_target.target_id is not registered", code="NoSuchTarget")
            if asked.transport != target.memory.transport:
                raise InvalidRequest(
                    f"rdma_target.transport is {excerpt(asked.transport)!r}, the target was "
                    f"registered for {target.memory.transport!r}",
                    code="InvalidDescriptor",
                )
            if asked.offset_bytes + asked.length_bytes > target.length_bytes:
                raise InvalidRequest(
                    f"rdma_target: offset_bytes + length_bytes is "
                    f"{asked.offset_bytes + asked.length_bytes}, the target holds "
                    f"{target.length_bytes} bytes",
                    code="InvalidDescriptor",
                )
            end_bytes = payload_bytes if rows is None else rows.end_bytes(payload_bytes)
            if end_bytes > asked.length_bytes:
                what = f"has {payload_bytes} bytes" if rows is None else f"ends at {end_bytes}"
                raise InvalidRequest(
                    f"rdma_target.length_bytes is {asked.length_bytes}, the payload {what}",
                    code="InvalidDescriptor",
                )
            target.check_whole()
            lease = Lease(self, target, asked.offset_bytes, end_bytes, rows)
            target.leases.add(lease)
            return lease

    def set_cancel(self, lease: Lease, cancel: Callable[[ObjectCacheError], None]) -> None:
        """See `Lease.on_release`."""
        with self._lock:
            lease.cancel = cancel
            released = lease.target.released
        if released:
            cancel(_released())

    def end_lease(self, lease: Lease) -> None:
        """See `Lease.end`."""
        with self._lock:
            lease.let_go()
            lease.target.leases.discard(lease)
            lease.cancel = None
        self._unmap_if_idle(lease.target)

    def release(self, target: RegisteredTarget, on_unmapped: Callable[[], None]) -> None:
        """Take the target out of use: no new lease, running deliveries are cancelled, and
        `on_unmapped` is called (in whichever thread) once nothing writes to it.
        """
        with self._lock:
            if self._targets.pop(target.target_id, None) is None:
                return
            del target.owner.targets[target.target_id]
            target.owner.registered_bytes -= target.length_bytes
            target.released = True
            target.on_unmapped = on_unmapped
            cancels = [lease.cancel for lease in target.leases if lease.cancel]
        for cancel in cancels:
            cancel(_released())
        self._unmap_if_idle(target)

    def _unmap_if_idle(self, target: RegisteredTarget) -> None:
        with self._lock:
            if not target.released or target.leases or not target.is_open:
                return
            target.is_open = False
            target.memory.close()
            done = target.on_unmapped
        if done is not None:
            done()

    def __repr__(self) -> str:
        return f"<TargetRegistry {len(self._targets)} targets>"


def _released() -> NotFound:
    return NotFound("the target was released", code="NoSuchTarget")
