"""Tickets and registered memory: who may write where, and until when."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator

import pytest

from objectcache_schemas.descriptor import MemoryTarget
from objectcache_schemas.errors import (
    AccessDenied,
    Busy,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
)
from objectcache_schemas.layout import TargetRows
from objectcache_storage_server.conversations.tickets import TICKET_LIFE_S, TICKETS_MAX, TicketBook
from objectcache_storage_server.transports.memory_files import (
    PIECE_BYTES,
    map_memory_file,
    map_piece,
)
from objectcache_storage_server.transports.targets import (
    RegisteredTarget,
    TargetOwner,
    TargetRegistry,
)
from tests.storage_client import sealed_memory_file

LENGTH = 1 << 16


def test_a_ticket_is_good_once() -> None:
    book = TicketBook()
    ticket = book.issue("alice", now_s=0.0)
    assert book.redeem(ticket, now_s=1.0).identity == "alice"
    with pytest.raises(AccessDenied):
        book.redeem(ticket, now_s=1.0)


def test_a_ticket_expires() -> None:
    book = TicketBook()
    early, late = book.issue("alice", now_s=0.0), book.issue("bob", now_s=10.0)
    with pytest.raises(AccessDenied):
        book.redeem(early, now_s=TICKET_LIFE_S)
    assert book.redeem(late, now_s=TICKET_LIFE_S).identity == "bob"


def test_open_tickets_are_bounded_and_expire_to_make_room() -> None:
    book = TicketBook()
    for _ in range(TICKETS_MAX):
        book.issue("alice", now_s=0.0)
    with pytest.raises(Busy):
        book.issue("alice", now_s=TICKET_LIFE_S - 1)
    book.issue("alice", now_s=TICKET_LIFE_S)


class Hesitating(float):
    """A time that does something else the first time that it is compared."""

    def __new__(cls, now_s: float, meanwhile: Callable[[], None]) -> Hesitating:
        made = super().__new__(cls, now_s)
        made.meanwhile = [meanwhile]
        return made

    meanwhile: list[Callable[[], None]]

    def __lt__(self, other: float) -> bool:
        while self.meanwhile:
            self.meanwhile.pop()()
        return float(self) < other


def test_tickets_are_issued_and_redeemed_by_threads_at_once() -> None:
    book = TicketBook()
    book.issue("expired", now_s=0.0)
    good = book.issue("alice", now_s=20.0)
    redeemed: list[str] = []
    other = threading.Thread(
        target=lambda: redeemed.append(book.redeem(good, now_s=TICKET_LIFE_S + 1).identity)
    )

    def meanwhile() -> None:
        other.start()
        other.join(0.1)  # it has to wait for us, so this never sees its end

    # Both find the expired ticket; without a lock the second to forget it fails.
    book.issue("bob", now_s=Hesitating(TICKET_LIFE_S + 1, meanwhile))
    other.join()
    assert redeemed == ["alice"]


def register(
    registry: TargetRegistry, owner: TargetOwner, length: int = LENGTH
) -> RegisteredTarget:
    descriptor = sealed_memory_file(length)
    try:
        return registry.register(owner, descriptor, length)
    finally:
        os.close(descriptor)


def asked(target: RegisteredTarget, offset: int = 0, length: int = LENGTH) -> MemoryTarget:
    return MemoryTarget(
        transport="shared_memory",
        target_id=target.target_id,
        offset_bytes=offset,
        length_bytes=length,
        tag=1,
    )


def test_a_lease_writes_into_the_clients_memory_at_its_offset() -> None:
    registry, owner = TargetRegistry(1 << 30), TargetOwner("alice")
    descriptor = sealed_memory_file(LENGTH)
    with mmap.mmap(descriptor, LENGTH) as memory:
        target = registry.register(owner, descriptor, LENGTH)
        os.close(descriptor)
        lease = registry.lease("alice", asked(target, 100, 50), payload_bytes=30)
        lease.view[:] = b"x" * 30
        assert memory[99:131] == b"\0" + b"x" * 30 + b"\0"
        lease.end()


def test_another_identity_cannot_name_a_target() -> None:
    registry = TargetRegistry(1 << 30)
    target = register(registry, TargetOwner("alice"))
    with pytest.raises(NotFound, match="not registered"):
        registry.lease("mallory", asked(target), 1)
    registry.lease("alice", asked(target), 1).end()


@pytest.mark.parametrize(
    ("offset", "length", "payload", "field"),
    [
        (1, LENGTH, 1, "offset_bytes"),
        (LENGTH, 1, 1, "offset_bytes"),
        (0, 10, 11, "length_bytes"),
        ((1 << 62), (1 << 62), 1, "offset_bytes"),
    ],
)
def test_a_payload_outside_the_target_is_refused(
    offset: int, length: int, payload: int, field: str
) -> None:
    registry = TargetRegistry(1 << 30)
    target = register(registry, TargetOwner("alice"))
    with pytest.raises(InvalidRequest, match=field):
        registry.lease("alice", asked(target, offset, length), payload)


def test_rows_of_a_part_stay_within_what_was_asked_for() -> None:
    registry = TargetRegistry(1 << 30)
    target = register(registry, TargetOwner("alice"))
    rows = TargetRows(first_bytes=10, row_bytes=5, stride_bytes=20)
    lease = registry.lease("alice", asked(target, 100, 55), 15, rows)
    assert [lease.place_bytes(offset) for offset in (0, 4, 5, 14)] == [10, 14, 30, 54]
    assert len(lease.view) == 55
    lease.end()
    with pytest.raises(InvalidRequest, match=r"length_bytes is 54, the payload ends at 55"):
        registry.lease("alice", asked(target, 100, 54), 15, rows)


def test_release_waits_for_leases_cancels_them_and_admits_no_more() -> None:
    registry, owner = TargetRegistry(1 << 30), TargetOwner("alice")
    target = register(registry, owner)
    lease = registry.lease("alice", asked(target), 10)
    cancelled: list[ObjectCacheError] = []
    lease.on_release(cancelled.append)
    unmapped: list[bool] = []
    registry.release(target, lambda: unmapped.append(True))
    assert len(cancelled) == 1
    assert unmapped == []
    lease.view[:] = b"y" * 10  # still mapped
    with pytest.raises(NotFound):
        registry.lease("alice", asked(target), 10)
    lease.end()
    assert unmapped == [True]
    assert owner.registered_bytes == 0


def test_a_lease_that_learns_of_the_release_late_is_cancelled_at_once() -> None:
    registry, owner = TargetRegistry(1 << 30), TargetOwner("alice")
    target = register(registry, owner)
    lease = registry.lease("alice", asked(target), 10)
    registry.release(target, lambda: None)
    cancelled: list[ObjectCacheError] = []
    lease.on_release(cancelled.append)
    assert len(cancelled) == 1
    lease.end()


def test_a_file_that_could_shrink_is_refused() -> None:
    registry, owner = TargetRegistry(1 << 30), TargetOwner("alice")
    descriptor = sealed_memory_file(LENGTH, seals=0x0004)
    try:
        with pytest.raises(InvalidRequest, match="F_SEAL_SHRINK"):
            registry.register(owner, descriptor, LENGTH)
    finally:
        os.close(descriptor)
    with tempfile.TemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, LENGTH)
        with pytest.raises(InvalidRequest, match="F_SEAL_SHRINK"):
            registry.register(owner, file.fileno(), LENGTH)


def test_a_file_with_holes_is_refused() -> None:
    registry, owner = TargetRegistry(1 << 30), TargetOwner("alice")
    descriptor = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, LENGTH)
        fcntl.fcntl(descriptor, 1033, 0x0002)  # F_ADD_SEALS, F_SEAL_SHRINK
        with pytest.raises(InvalidRequest, match="holes"):
            registry.register(owner, descriptor, LENGTH)
    finally:
        os.close(descriptor)


def test_a_short_file_a_pipe_and_an_excess_are_refused() -> None:
    registry, owner = TargetRegistry(4 * LENGTH), TargetOwner("alice")
    descriptor = sealed_memory_file(LENGTH)
    reader, writer = os.pipe()
    try:
        with pytest.raises(InvalidRequest, match="at least"):
            registry.register(owner, descriptor, LENGTH + 1)
        with pytest.raises(InvalidRequest, match="at least"):
            registry.register(owner, reader, 10)
        with pytest.raises(InvalidRequest, match="targets_bytes_max"):
            registry.register(owner, descriptor, 5 * LENGTH)
        with pytest.raises(InvalidRequest, match="length_bytes"):
            registry.register(owner, descriptor, 0)
    finally:
        for one in (descriptor, reader, writer):
            os.close(one)
    assert owner.targets == {}


# --- clients that would have the server pay for their memory ---

KEEP_SIZE, PUNCH_HOLE = 1, 2
SEAL_SHRINK, SEAL_GROW, SEAL_SEAL = 2, 4, 1


def fallocate(descriptor: int, mode: int, offset_bytes: int, length_bytes: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    if call(descriptor, mode, offset_bytes, length_bytes):
        raise OSError(ctypes.get_errno(), "fallocate")


def punch(descriptor: int, offset_bytes: int = 0, length_bytes: int = mmap.PAGESIZE) -> None:
    fallocate(descriptor, KEEP_SIZE | PUNCH_HOLE, offset_bytes, length_bytes)


def held_bytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


class CountingOwner(TargetOwner):
    """A session that counts how often it was ended."""

    ended = 0

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def own_file() -> Iterator[int]:
    """The client's own descriptor of a memory file, which it keeps."""
    descriptor = sealed_memory_file(LENGTH)
    yield descriptor
    os.close(descriptor)


def test_a_client_that_punches_holes_loses_its_session_and_what_was_written_into_them(
    own_file: int,
) -> None:
    registry, owner = TargetRegistry(1 << 30), CountingOwner("alice")
    target = registry.register(owner, own_file, LENGTH)
    lease = registry.lease("alice", asked(target), LENGTH)
    target.check_whole()
    punch(own_file, 4 * mmap.PAGESIZE)
    with pytest.raises(InvalidRequest, match="holes"):
        target.check_whole()
    lease.view[:] = bytes(LENGTH)  # of a piece that was under way: all pages are there again
    with pytest.raises(InvalidRequest, match="holes"):
        registry.lease("alice", asked(target), LENGTH)
    assert owner.ended == 2
    lease.end()
    registry.release(target, lambda: None)
    assert held_bytes(own_file) == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_hole_that_is_punched_while_a_file_is_mapped_is_refused_and_not_filled(
    again: bool,
) -> None:
    pieces = 3
    descriptor = sealed_memory_file(pieces * PIECE_BYTES)
    mapped: list[int] = []

    def punched_before(mapping: mmap.mmap, offset_bytes: int, length_bytes: int) -> None:
        """The client is quicker, and where it comes `again` slower as well."""
        mapped.append(offset_bytes)
        if offset_bytes == PIECE_BYTES:
            punch(descriptor, PIECE_BYTES, PIECE_BYTES)
        map_piece(mapping, offset_bytes, length_bytes)
        assert held_bytes(descriptor) == pieces * PIECE_BYTES, "the hole does not show"
        if again and offset_bytes == PIECE_BYTES:
            punch(descriptor, 0)

    try:
        with pytest.raises(InvalidRequest, match="changed while it was registered"):
            map_memory_file(descriptor, pieces * PIECE_BYTES, punched_before)
        assert mapped == [0, PIECE_BYTES], "and no piece after it"
        assert held_bytes(descriptor) == 0
    finally:
        os.close(descriptor)


def test_a_hole_between_two_pieces_is_refused_before_it_is_filled() -> None:
    descriptor = sealed_memory_file(2 * PIECE_BYTES)

    def punched_after(mapping: mmap.mmap, offset_bytes: int, length_bytes: int) -> None:
        map_piece(mapping, offset_bytes, length_bytes)
        assert offset_bytes == 0
        punch(descriptor, PIECE_BYTES)

    try:
        with pytest.raises(InvalidRequest, match="memory file"):
            map_memory_file(descriptor, 2 * PIECE_BYTES, punched_after)
        assert held_bytes(descriptor) == 0
    finally:
        os.close(descriptor)


def test_a_client_that_writes_to_what_it_has_mapped_meanwhile_is_registered(
    own_file: int,
) -> None:
    with mmap.mmap(own_file, LENGTH, mmap.MAP_SHARED | mmap.MAP_POPULATE) as own:

        def written(mapping: mmap.mmap, offset_bytes: int, length_bytes: int) -> None:
            own[:3] = b"own"
            map_piece(mapping, offset_bytes, length_bytes)

        memory = map_memory_file(own_file, LENGTH, written)
        assert bytes(memory.view[:3]) == b"own"
        memory.close()


def test_a_client_that_leaves_its_memory_alone_keeps_what_was_written(own_file: int) -> None:
    registry, owner = TargetRegistry(1 << 30), CountingOwner("alice")
    target = registry.register(owner, own_file, LENGTH)
    for text in (b"one", b"two"):
        lease = registry.lease("alice", asked(target), LENGTH)
        target.check_whole()
        lease.view[:3] = text
        lease.end()
    registry.release(target, lambda: None)
    assert os.pread(own_file, 3, 0) == b"two"
    again = registry.register(owner, own_file, LENGTH)  # as after a session that was lost
    assert bytes(registry.lease("alice", asked(again), LENGTH).view[:3]) == b"two"
    assert owner.ended == 0


def test_pages_elsewhere_in_a_file_do_not_make_up_for_holes() -> None:
    registry, owner = TargetRegistry(1 << 30), CountingOwner("alice")
    descriptor = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, LENGTH)
        fallocate(descriptor, KEEP_SIZE, LENGTH, LENGTH)  # beyond its end
        fcntl.fcntl(descriptor, 1033, SEAL_SHRINK)
        with pytest.raises(InvalidRequest, match="holes"):
            registry.register(owner, descriptor, LENGTH)
        os.posix_fallocate(descriptor, 0, LENGTH)
        registry.register(owner, descriptor, LENGTH)
        with pytest.raises(PermissionError):  # its size, and so its pages, are settled now
            fallocate(descriptor, KEEP_SIZE, LENGTH, LENGTH)
    finally:
        os.close(descriptor)


def test_the_rest_of_a_file_counts_where_a_part_of_it_is_registered() -> None:
    registry, owner = TargetRegistry(1 << 30), CountingOwner("alice")
    descriptor = os.memfd_create("longer", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, 3 * LENGTH)
        os.posix_fallocate(descriptor, LENGTH, 2 * LENGTH)
        fcntl.fcntl(descriptor, 1033, SEAL_SHRINK)
        with pytest.raises(InvalidRequest, match="holes"):
            registry.register(owner, descriptor, LENGTH)
        os.posix_fallocate(descriptor, 0, LENGTH)
        target = registry.register(owner, descriptor, LENGTH)
        assert len(registry.lease("alice", asked(target), LENGTH).view) == LENGTH
    finally:
        os.close(descriptor)


def test_a_file_that_can_grow_and_take_no_seal_is_refused() -> None:
    registry, owner = TargetRegistry(1 << 30), CountingOwner("alice")
    descriptor = sealed_memory_file(LENGTH, seals=SEAL_SHRINK | SEAL_SEAL)
    try:
        with pytest.raises(InvalidRequest, match="F_SEAL_GROW"):
            registry.register(owner, descriptor, LENGTH)
    finally:
        os.close(descriptor)
