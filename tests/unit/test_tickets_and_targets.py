"""Tickets and registered memory: who may write where, and until when."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Callable

import pytest

from objectcache_schemas.descriptor import MemoryTarget
from objectcache_schemas.errors import (
    AccessDenied,
    Busy,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
)
from objectcache_storage_server.targets import Target, TargetOwner, TargetRegistry
from objectcache_storage_server.tickets import TICKET_LIFE_S, TICKETS_MAX, TicketBook
from tests.storage_client import sealed_memory_file

LENGTH = 1 << 16


def test_a_ticket_is_good_once() -> None:
    book = TicketBook()
    ticket = book.issue("alice", now_s=0.0)
    assert book.redeem(ticket, now_s=1.0) == "alice"
    with pytest.raises(AccessDenied):
        book.redeem(ticket, now_s=1.0)


def test_a_ticket_expires() -> None:
    book = TicketBook()
    early, late = book.issue("alice", now_s=0.0), book.issue("bob", now_s=10.0)
    with pytest.raises(AccessDenied):
        book.redeem(early, now_s=TICKET_LIFE_S)
    assert book.redeem(late, now_s=TICKET_LIFE_S) == "bob"


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
        target=lambda: redeemed.append(book.redeem(good, now_s=TICKET_LIFE_S + 1))
    )

    def meanwhile() -> None:
        other.start()
        other.join(0.1)  # it has to wait for us, so this never sees its end

    # Both find the expired ticket; without a lock the second to forget it fails.
    book.issue("bob", now_s=Hesitating(TICKET_LIFE_S + 1, meanwhile))
    other.join()
    assert redeemed == ["alice"]


def register(registry: TargetRegistry, owner: TargetOwner, length: int = LENGTH) -> Target:
    descriptor = sealed_memory_file(length)
    try:
        return registry.register(owner, descriptor, length)
    finally:
        os.close(descriptor)


def asked(target: Target, offset: int = 0, length: int = LENGTH) -> MemoryTarget:
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
